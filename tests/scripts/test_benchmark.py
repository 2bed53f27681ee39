"""The parts of the benchmark that time nothing: what is planned, how it is compared, tables and figure."""

import pytest
from benchmark import comparison, figure, plan, report

CONTENDERS = ("ours", "ours, jit", *comparison.KERAS, *comparison.TORCH, *comparison.PRODUCTS)
TIMING = {"rounds": 5, "seconds": 0.03}


def timed(rng):
    outcomes = {name: {"ms": list(rng.uniform(1, 9, 5)), "error": 1e-7} for name in CONTENDERS}
    return {**outcomes, "keras, unroll": {"reason": "TimeoutError"}}


def measured(e, rng):
    alone = dict.fromkeys(
        ("first_s", "second_s", "loss", "later_ms", "left_MiB", "with_first_MiB", "steady_MiB"), rng.uniform(1, 9)
    )
    of_modes = {mode: timed(rng) for mode in e["arguments"].get("modes", ())}
    watched = {name: {"ms": list(rng.uniform(1, 9, 5))} for name in ("no callback", "GradientNorms", "both")}
    results = {"steps": of_modes, "writers": of_modes, "masked_epoch": timed(rng), "watched_epoch": watched}
    return {**e, "result": results.get(e["name"], {**alone, "programs": 7})}


@pytest.fixture
def results(rng):
    processes = plan.processes(plan.PARTS, plan.CELLS, plan.SHAPES, **TIMING)
    return [measured(e, rng) for entries in processes for e in entries]


def test_a_round_that_was_disturbed_leaves_the_ratio_as_it_is():
    outcomes = {"ours": {"ms": [1, 2, 10]}, "keras": {"ms": [3, 6, 30]}}
    assert comparison.ratio(outcomes, "keras") == 3


def test_the_fastest_mode_counts_and_one_that_was_not_timed_does_not():
    outcomes = {"ours": {"ms": [1]}, "keras": {"ms": [3]}, "keras, jit": {"ms": [2]}, "keras, unroll": {"reason": ""}}
    assert comparison.against_fastest(outcomes, comparison.KERAS) == (2, "keras, jit")
    assert comparison.against_fastest(outcomes, comparison.TORCH) == (None, None)


def test_no_measurement_is_planned_twice(results):
    identities = [str(plan.identity(e)) for e in results]
    assert len(set(identities)) == len(identities)


def test_all_that_is_planned_is_in_the_tables(results):
    titles = [table.title for table in report.tables(results)]
    assert len(titles) == 12
    for table in report.tables(results):
        assert all(len(row) == len(table.columns) for rows in table.groups for row in rows), table.title
    train = report.tables(results)[0]
    assert sum(map(len, train.groups)) == len(plan.CELLS) * (len(plan.SHAPES) + 1)


@pytest.mark.parametrize("parts", [plan.PARTS, ["masked"]])
def test_a_figure_is_drawn_of_what_there_is(results, parts, tmp_path):
    figure.draw([r for r in results if r["part"] in parts], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").exists() == ("grid" in parts)
