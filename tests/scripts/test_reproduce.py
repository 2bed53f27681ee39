"""What holds claims against published numbers, without the training: verdicts, resumption, report, settings."""

import json
import math
import re

import numpy as np
import pytest
import reproduce.__main__
from reproduce import (
    claim,
    conductor,
    copying,
    counting,
    figure,
    grammar,
    plan,
    report,
    training,
    treebank,
    worker,
)
from reproduce.store import Store

from keras_gated import tasks

MACHINE = {"date": "2026-11-30", "processor": "a processor", "cores": 2, "python": "3.11.7", "keras_gated": "0.1.0"}
MACHINE |= dict.fromkeys(report.PACKAGES, "1.0")


def imagined(run, rng):
    """A result of a run as its family would give it, without training."""
    curve = [[1000 * i, float(rng.uniform()), float(rng.uniform())] for i in range(1, 5)]
    numbers = {"solved": 9000, "wrong": 0, "accuracy": 0.999, "not_finite": False, "first_failing": 140, "loss": 0.17}
    numbers |= {"error": 0.04, "baseline": 0.9, "curve": curve}
    if run.family == "adding":
        numbers["wrong"] = {"1": 0.001, "2": 0.02, "4": 0.3}
    return numbers


@pytest.fixture(params=[True, False], ids=["quick", "full"])
def claims(request):
    return plan.claims(request.param)


def results(of_claim, **changes):
    """Results of all runs of a claim; changes: {key of a setting=value: changes of the result}."""
    rng = np.random.default_rng(0)
    return [(run, {**imagined(run, rng), **changes.get(run.setting.get("cell"), {})}) for run in of_claim.runs]


def named(name):
    (only,) = plan.claims(quick=False, names=[name])
    return only


def test_every_row_of_the_plan_is_there():
    names = [c.name for c in plan.claims(quick=False)]
    assert len(names) == 11 and names == [c.name for c in plan.claims(quick=True)]


def test_settings_are_tuned_on_other_seeds_than_those_reported(claims):
    assert all(run.seed < 100 for run in plan.runs(claims))


def test_the_full_form_has_the_seeds_that_the_pass_marks_speak_of():
    def seeds(name, **wanted):
        return sorted(r.seed for r in named(name).runs if wanted.items() <= r.setting.items())

    assert seeds("Long lag", cell="LSTM", lag=100) == seeds("Temporal order", cell="LSTM") == [0, 1, 2, 3, 4]
    assert len(seeds("Long lag", cell="LSTM", lag=200)) == len(seeds("Long lag", cell="LSTM", lag=500)) == 1
    assert {r.setting["biases"]["f"] for r in named("Forget bias").runs} == {-1, 0, 1, 2, 5}
    assert len(seeds("Embedded")) == 10


def test_a_run_that_two_claims_rest_on_is_planned_once(claims):
    runs = plan.runs(claims)
    assert len(runs) < sum(len(c.runs) for c in claims)
    assert len({json.dumps([r.family, r.setting, r.seed], sort_keys=True) for r in runs}) == len(runs)
    assert [r.seconds for r in runs] == sorted((r.seconds for r in runs), reverse=True)


def test_the_estimates_fit_the_time_there_is():
    for quick, minutes in ((True, 8), (False, 60)):
        assert sum(r.seconds for r in plan.runs(plan.claims(quick))) / 60 / 2 < minutes


def test_a_claim_without_all_of_its_runs_is_neither_held_nor_refuted(claims):
    for c in claims:
        assert claim.verdict(c, results(c)[:-1]) == ("incomplete", [])


REFUTED = {  # what makes each claim fail
    "Long lag": [
        {"LSTM": {"wrong": 1}},
        {"LSTM": {"solved": 62_400}},
        {"SimpleRNN": {"accuracy": 0.61}},
        {"LSTM": {"solved": None}},
    ],
    "Temporal order": [{"LSTM": {"accuracy": 0.98}}, {"SimpleRNN": {"accuracy": 0.41}}],
    "Counting": [{"LSTM": {"first_failing": 74}}, {"GRU": {"first_failing": 100}}],
    "Adding": [{"GRU": {"wrong": {"1": 0.021, "2": 0, "4": 0}}}, {"SimpleRNN": {"error": 0.019}}],
    "Copying": [{"GRU": {"loss": 0.164}}, {"SimpleRNN": {"loss": 0.183}}],
    "Embedded Reber": [{"LSTM": {"accuracy": 0.99}}, {"LSTM": {"solved": None}}],
    "Continual Reber": [{"LSTM": {"accuracy": 0.94}}, {"LSTM, f = 1": {"accuracy": 0.76}}],
    "Next bit": [{"LSTM": {"accuracy": 0.52}}, {"Bidirectional": {"accuracy": 0.99}}],
    "Tagging": [{"Bidirectional": {"accuracy": 0.904}}, {"Bidirectional": {"accuracy": 0.91, "baseline": 0.92}}],
    "Clipping": [{"SimpleRNN": {"not_finite": True}}],
}
HELD = {
    "Long lag": {"SimpleRNN": {"accuracy": 0.5}},
    "Temporal order": {"SimpleRNN": {"accuracy": 0.25}},
    "Counting": {"GRU": {"first_failing": 60}},
    "Embedded Reber": {"LSTM": {"accuracy": 1.0}},
    "Continual Reber": {"LSTM, f = 1": {"accuracy": 0.5}},
    "Next bit": {"LSTM": {"accuracy": 0.5}, "Bidirectional": {"accuracy": 1.0}},
    "Tagging": {"LSTM": {"accuracy": 0.9}, "Bidirectional": {"accuracy": 0.92}},
    "Copying": {"GRU": {"loss": 0.17}},
}


@pytest.mark.parametrize(("name", "change"), [(name, change) for name in REFUTED for change in REFUTED[name]])
def test_each_pass_mark_can_be_missed(name, change):
    c, held = named(name), HELD.get(name, {})
    assert claim.verdict(c, results(c, **held))[0] == "holds"
    changed = {cell: {**held.get(cell, {}), **change.get(cell, {})} for cell in {*held, *change}}
    holds, checks = claim.verdict(c, results(c, **changed))
    assert holds == "does not hold"
    assert 1 <= sum(not check.holds for check in checks) <= 3


def test_a_clipped_network_must_not_succeed_less_often():
    c = named("Clipping")
    for max_norm, expected in ((None, "holds"), (1.0, "does not hold")):
        made = [(run, {**r, "solved": None} if run.setting["max_norm"] == max_norm else r) for run, r in results(c)]
        assert claim.verdict(c, made)[0] == expected


def by_bias(updates):
    c = named("Forget bias")
    return claim.verdict(c, [(run, {"solved": updates[run.setting["biases"]["f"]]}) for run, _ in results(c)])[0]


def test_the_forget_bias_is_judged_by_the_order_of_the_medians():
    assert by_bias({-1: None, 0: None, 1: 60_000, 2: 50_000, 5: 20_000}) == "holds"
    assert by_bias({-1: None, 0: None, 1: None, 2: None, 5: 20_000}) == "holds"
    assert by_bias({-1: None, 0: 50_000, 1: 60_000, 2: 50_000, 5: 20_000}) == "does not hold"
    assert by_bias({-1: None, 0: None, 1: 29_000, 2: 50_000, 5: 20_000}) == "does not hold"
    assert by_bias({-1: None, 0: None, 1: None, 2: None, 5: None}) == "does not hold"


def test_one_of_five_seeds_may_fail_and_two_may_not():
    assert claim.enough([True] * 4 + [False], 0.8) == (True, "4 of 5")
    assert not claim.enough([True] * 3 + [False] * 2, 0.8)[0]
    assert claim.enough([True] * 9 + [False], 0.9)[0] and not claim.enough([True] * 8 + [False] * 2, 0.9)[0]


def test_the_median_counts_what_was_never_reached_as_the_largest():
    assert claim.median_or_more([3, None, 1]) == 3
    assert claim.median_or_more([None, None, 1]) is None
    assert claim.median_or_more([4, 2]) == 3
    assert claim.median_or_more([None, 1]) is None


def test_a_stored_run_is_found_by_all_that_decides_it(tmp_path):
    store = Store(tmp_path)
    run = claim.Run("adding", {"units": 3, "rate": 0.1}, 0, 5)
    store.save(run, {"solved": 5}, 1.5)
    assert store.result(run._replace(setting={"rate": 0.1, "units": 3}, seconds=7)) == {"solved": 5}
    for other in ({"seed": 1}, {"family": "copying"}, {"setting": {"units": 4, "rate": 0.1}}):
        assert store.result(run._replace(**other)) is None


def test_what_was_cut_off_while_it_was_written_does_not_count(tmp_path, monkeypatch):
    store = Store(tmp_path)
    run = claim.Run("adding", {}, 0, 5)

    def fails(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(KeyboardInterrupt):
        store.save(run, {"solved": 5}, 1.5)
    assert store.result(run) is None and store.stored([run]) == []


@pytest.mark.slow
def test_runs_that_failed_are_told_and_the_others_kept(tmp_path):
    """In processes of their own: a family that is not there fails, the smallest training does not."""
    store, failures, over = Store(tmp_path), [], set()
    setting = {**copying.COMMON, "cell": "SimpleRNN", "units": 2, "limit": 640}
    runs = [claim.Run("no_such_family", {}, 0, 1), claim.Run("copying", setting, 0, 1)]

    def told(changes):
        over.update(index for index, share in changes.items() if share is None)

    conductor.run_all(runs, 1, store, told, lambda run, exception: failures.append((run, exception)))
    assert over == {0, 1}
    assert [run for run, _ in failures] == runs[:1] and isinstance(failures[0][1], ModuleNotFoundError)
    assert store.result(runs[0]) is None and math.isfinite(store.result(runs[1])["loss"])


def test_the_command_fails_where_a_run_has_failed(tmp_path, monkeypatch, capsys):
    """What is there is shown all the same."""
    command = ["reproduce.sh", "--claims", "Next bit", "Copying", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", command)

    def run_all(runs, processes, store, console):
        for run in runs:
            if run.family == "copying":
                store.save(run, imagined(run, np.random.default_rng(0)), 2.0)

    monkeypatch.setattr(reproduce.__main__, "run_all", run_all)
    with pytest.raises(SystemExit, match="not all is known of Next bit; "):
        reproduce.__main__.main()
    assert "incomplete" in capsys.readouterr().out and "| Copying |" in (tmp_path / "reproduction.md").read_text()
    monkeypatch.setattr("sys.argv", [*command[:2], "Copying", *command[-2:]])
    reproduce.__main__.main()


def test_a_claim_that_is_not_there_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["reproduce.sh", "--claims", "nobody", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="expects words out of these names: Next bit, .*; received nobody"):
        reproduce.__main__.main()
    assert not (tmp_path / "out").exists()


@pytest.fixture
def full_store(claims, tmp_path, rng):
    store = Store(tmp_path / "runs")
    for run in plan.runs(claims):
        store.save(run, imagined(run, rng), 2.0)
    return store


def test_the_report_has_a_row_for_each_pass_mark(claims, full_store):
    rows = report.rows(claims, full_store)
    text = report.markdown(MACHINE, rows, quick=False)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    for row in rows:
        assert row["verdict"] in ("holds", "does not hold") and row["done"] == row["planned"]
        for check in row["checks"]:
            sign = "holds" if check["holds"] else "**does not hold**"
            assert f"| {check['demanded']} | {check['found']} | {sign} |" in text
        assert f"| {row['name']} | {row['setting']} | {row['planned']} |" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| ")}
    assert widths == {5, 6}
    assert f"{len(plan.runs(claims)) * 2 / 60:.0f} minutes" in text


def test_a_report_of_half_of_the_runs_says_so(claims, tmp_path):
    text = report.markdown(MACHINE, report.rows(claims, Store(tmp_path)), quick=True)
    assert text.count("| incomplete |") == len(claims) and "0 of 1" in text or "0 of" in text


def test_a_figure_is_drawn_of_what_there_is(claims, full_store, tmp_path):
    figure.draw(report.rows(claims, full_store), tmp_path / "figure.png")
    figure.draw(report.rows(claims, Store(tmp_path / "empty")), tmp_path / "none.png")
    assert (tmp_path / "figure.png").exists() and not (tmp_path / "none.png").exists()


def test_what_json_does_not_know_is_left_out():
    assert worker.plain({"a": [1.0, math.nan, (math.inf,)], "b": "x"}) == {"a": [1.0, None, [None]], "b": "x"}


class Answers:
    """Stands for a model whose fit gives these (loss, share right), one after another."""

    def __init__(self, *answers):
        self.answers = iter(answers)

    def fit(self, *_, **__):
        loss, right = next(self.answers)
        return type("History", (), {"history": {"loss": [loss], "right": [right]}})


def trained(*answers, **setting):
    setting = {"batch": 1, "chunk": 10, "limit": 50, **setting}
    return training.train(Answers(*answers), lambda n: (None, None), setting, lambda share: None)


def test_solved_is_when_the_whole_window_was_right():
    outcome = trained((1.0, 1.0), (1.0, 0.9), (1.0, 1.0), (1.0, 1.0), window=20)
    assert outcome["solved"] == 40 and [point[0] for point in outcome["curve"]] == [10, 20, 30, 40]
    assert trained(*[(1.0, 0.9)] * 5, window=20)["solved"] is None
    assert trained(*[(1.0, 1.0)] * 5)["solved"] is None  # no window: to the limit


def test_training_ends_with_a_loss_that_is_not_finite():
    outcome = trained((math.nan, 0.0), window=20)
    assert outcome == {"solved": None, "curve": [[10, None, 0.0]]}


def test_right_is_within_the_tolerance_at_every_output():
    logits = np.log([[0.75, 0.25], [0.85, 0.15], [0.15, 0.85]])
    y = np.array([0, 0, 0])
    assert np.array(training.within(0.2)(y, logits)).tolist() == [0, 1, 0]
    assert np.array(training.largest(y, logits)).tolist() == [1, 1, 0]


def test_padding_counts_neither_in_the_loss_nor_in_what_is_right(rng):
    task = tasks.reber(rng, 30)
    x, y, _ = training.padded(task)
    assert x.shape[1] % 32 == 0 and np.array_equal(x[:, : task.x.shape[1]], task.x)
    logits = rng.normal(size=y.shape).astype("float32")
    longer = np.pad(logits, ((0, 0), (0, 5), (0, 0)), constant_values=9)
    y_longer = np.pad(y, ((0, 0), (0, 5), (0, 0)))
    assert np.allclose(training.next_symbols(y, logits), training.next_symbols(y_longer, longer))
    perfect = np.where(y_longer > 0, 1.0, -1.0)
    for right in (grammar.whole_string, counting.right):
        assert np.array(right(y_longer, perfect)).all()


def test_one_illegal_symbol_above_a_legal_one_makes_a_string_wrong():
    y = np.array([[[1.0, 1, 0], [0, 1, 0]]])
    assert np.array(grammar.whole_string(y, np.array([[[3.0, 2, 1], [0, 5, 4]]]))) == 1
    assert np.array(grammar.whole_string(y, np.array([[[3.0, 1, 2], [0, 5, 4]]]))) == 0


def test_the_answer_of_counting_is_the_whole_set():
    y = np.array([[[1.0, 1, 0], [0, 1, 0]]])
    assert np.array(counting.right(y, np.array([[[1.0, 1, -1], [-1, 1, -1]]]))) == 1
    assert np.array(counting.right(y, np.array([[[1.0, -1, -1], [-1, 1, -1]]]))) == 0


def test_the_first_failing_n_is_that_of_a_network_that_counts_so_far():
    class UpTo:
        def __init__(self, n):
            self.n = n

        def predict(self, x, **_):
            lengths = x.sum(axis=(1, 2)).astype(int) // counting.SYMBOLS
            y = np.stack([tasks_of(n, x.shape[1]) for n in lengths])
            return np.where(lengths[:, None, None] > self.n, 1 - 2 * y, 2 * y - 1)

    def tasks_of(n, width):
        y = tasks.counting(np.random.default_rng(1), 1, n, counting.SYMBOLS, shortest=n).y[0]
        return np.pad(y, ((0, width - len(y)), (0, 0)))

    assert counting.first_failing(UpTo(7), 12) == 8
    assert counting.first_failing(UpTo(12), 12) == 13


def test_windows_of_a_stream_go_on_where_the_one_before_ended(rng):
    stream = rng.normal(size=(3, 20, 7))
    windows = grammar.in_windows(stream, 5)
    for b in range(3):
        assert np.array_equal(np.concatenate([windows[k * 3 + b] for k in range(4)]), stream[b])


@pytest.mark.parametrize("limit", [0, 16 * 50])
def test_a_fixed_forget_gate_is_1_before_and_after_training(limit, tf, rng):
    setting = {**grammar.STREAM, "cell": "LSTM, f = 1", "limit": limit, "tested": 100, "steps": 5}
    kept = []
    made = grammar.stateful_lstm

    def watched(setting):
        kept.append(made(setting))
        return kept[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "stateful_lstm", watched)
        result = grammar.train(setting, rng, lambda share: None)
    W, U, b = kept[0].get_weights()
    N = setting["units"]
    assert not W[:, N : 2 * N].any() and not U[:, N : 2 * N].any() and (b[N : 2 * N] == 30).all()
    assert W[:, :N].any() and 0 <= result["accuracy"] <= 1


def test_the_symbols_asked_for_in_a_stream_are_the_last_but_one(rng):
    task = tasks.reber(rng, 4, 1000)
    confused = task.y.copy()
    for word, y in zip(task.x.argmax(axis=-1), confused, strict=True):
        letters = "".join(tasks.REBER_SYMBOLS[i] for i in word)
        for last_but_one in re.finditer("(?<=E)[TP](?=E)", letters):  # between the inner E and the outer one
            y[last_but_one.start() - 1, [grammar.T, grammar.P]] = y[last_but_one.start() - 1, [grammar.P, grammar.T]]

    class Says:
        def __init__(self, y):
            self.y = y

        def predict(self, x, **_):
            return self.y

    assert grammar.last_but_one(Says(task.y), task, 4) == 1
    assert grammar.last_but_one(Says(confused), task, 4) < 0.05  # but for those that the end of the stream cuts off


SENTENCES = [[("Evde", "NOUN"), ("kaldı", "VERB")], [("evde", "NOUN"), ("dün", "ADV"), ("geldi", "VERB")]]


def test_the_baseline_knows_words_and_else_their_longest_suffix():
    assert treebank.baseline(SENTENCES, [[("EVDE", "NOUN"), ("aldı", "VERB"), ("gün", "ADV"), ("x", "NOUN")]]) == 1
    assert treebank.baseline(SENTENCES, [[("evde", "VERB"), ("geldi", "VERB")]]) == 0.5
    against_its_suffix = [[("masada", "NOUN"), ("kasada", "VERB"), ("tasada", "VERB")]]
    assert treebank.baseline(against_its_suffix, against_its_suffix) == 1


def test_words_seen_once_are_as_if_never_seen():
    vocabulary = treebank.vocabularies(SENTENCES)
    assert vocabulary.word == {"evde": 2} and sorted(vocabulary.tag) == ["ADV", "NOUN", "VERB"]
    x, mask, tags = treebank.arrays(SENTENCES, vocabulary, 4)
    assert x[0].tolist() == [[2, 2, 2, 2], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert mask.tolist() == [[True, True, False, False], [True, True, True, False]]
    assert tags.tolist() == [[1, 2, -1, -1], [1, 0, 2, -1]]


def test_no_sentence_is_in_training_and_test():
    numbered = [[(str(i), "NUM")] for i in range(50)]
    trained_on, tested = treebank.split(numbered, 0)
    assert sorted(map(str, trained_on + tested)) == sorted(map(str, numbered)) and len(tested) == 10
    assert treebank.split(numbered, 1)[1] != tested
