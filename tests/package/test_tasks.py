"""The tasks against slow readings of their definitions, from x alone, and against what their baselines promise."""

import itertools
import re

import numpy as np
import pytest

from keras_gated import tasks

MAKERS = {
    "adding": lambda rng: tasks.adding(rng, 50, 30),
    "adding, unit": lambda rng: tasks.adding(rng, 50, 30, form="unit"),
    "copy_memory": lambda rng: tasks.copy_memory(rng, 50, 7),
    "temporal_order": lambda rng: tasks.temporal_order(rng, 50, 40),
    "temporal_order, 3": lambda rng: tasks.temporal_order(rng, 50, 40, symbols=3),
    "counting": lambda rng: tasks.counting(rng, 50, 6),
    "reber": lambda rng: tasks.reber(rng, 50),
    "reber, continual": lambda rng: tasks.reber(rng, 5, 90),
    "long_lag": lambda rng: tasks.long_lag(rng, 50, 6),
    "reversal": lambda rng: tasks.reversal(rng, 50, 8, shortest=1),
}


def sequences(task, symbols):
    """The sequences of a one-hot x as words, and that nothing stands behind their ends."""
    for x, mask in zip(task.x, task.mask, strict=True):
        assert np.array_equal(x.sum(axis=1), mask) and set(np.unique(x)) <= {0, 1}
        yield "".join(symbols[i] for i in x[mask].argmax(axis=1))


def sets(y, symbols):
    """What may come next at each step, as sets of letters."""
    return [{symbols[i] for i in np.flatnonzero(may)} for may in y]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_generator_alone_decides(make):
    drawn = [make(np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert all(np.array_equal(a, b) for a, b in zip(drawn[0], drawn[1], strict=True))
    assert drawn[0].x.shape != drawn[2].x.shape or not np.array_equal(drawn[0].x, drawn[2].x)


@pytest.mark.parametrize("name", MAKERS)
def test_types_and_masks_are_those_of_the_docstring(name, rng):
    x, y, mask = MAKERS[name](rng)
    assert x.dtype == (np.int32 if name == "reversal" else np.float32)
    assert y.dtype in (np.int32, np.float32) and mask.dtype == bool
    assert mask.shape == x.shape[:2] and len(y) == len(x)
    assert mask[:, 0].all() and np.all(mask[:, 1:] <= mask[:, :-1])  # a sequence has no holes
    assert not np.any(x[~mask])


@pytest.mark.parametrize("length", [20, 45, 100])
def test_signed_adding_is_the_sum_at_the_ones(length, rng):
    x, y, mask = tasks.adding(rng, 500, length)
    places = [], []
    for (value, marker), target, valid in zip(x.transpose(0, 2, 1), y[:, 0], mask, strict=True):
        last = valid.sum() - 1
        assert marker[0] == marker[last] == -1
        ones = np.flatnonzero(marker[: last + 1] == 1)
        assert np.count_nonzero(marker) == 2 + len(ones)
        assert len(ones) == 2 or len(ones) == 1  # the first pair was drawn
        assert target == pytest.approx(0.5 + sum(value[t] for t in ones) / 4, abs=1e-6)
        if len(ones) == 2:
            assert ones[0] < 10 and ones[1] < length // 2
        for lengths, of_this in zip(places, (last + 1, len(ones)), strict=True):
            lengths.append(of_this)
    assert set(places[0]) <= set(range(length, length + length // 10 + 1))
    assert min(places[0]) == length and max(places[0]) == length + length // 10
    assert np.mean(np.array(places[1]) == 1) == pytest.approx(0.1 + 0.9 / (length // 2 - 1), abs=0.06)
    assert x[..., 0].min() < -0.99 and x[..., 0].max() > 0.99


def test_every_place_of_a_mark_is_equally_likely(rng):
    """A second mark that were drawn from all places would fall on the first one, or leave the last place empty."""
    marks = tasks.adding(rng, 40_000, 30).x[..., 1] == 1
    share = marks.mean(axis=0)
    assert share[1:10] == pytest.approx(0.1 + 0.9 / 14, abs=0.008)
    assert share[10:15] == pytest.approx(1 / 14, abs=0.006)  # of the first fourteen that are still unmarked
    assert not share[15:].any()


def test_unit_adding_has_a_mark_in_each_half(rng):
    x, y, mask = tasks.adding(rng, 2000, 31, form="unit")
    value, marker = x[..., 0], x[..., 1]
    assert mask.all() and set(np.unique(marker)) == {0, 1}
    assert np.all(marker[:, :15].sum(axis=1) == 1) and np.all(marker[:, 15:].sum(axis=1) == 1)
    assert marker.any(axis=0).all()
    assert y[:, 0] == pytest.approx(np.sum(value * marker, axis=1))
    assert value.min() >= 0 and value.max() < 1


@pytest.mark.parametrize(("length", "form", "mean"), [(20, "signed", 0.5), (100, "signed", 0.5), (50, "unit", 1.0)])
def test_the_baseline_of_adding_is_the_error_of_its_mean(length, form, mean, rng):
    y = tasks.adding(rng, 100_000, length, form).y
    assert tasks.adding_baseline(length, form) == pytest.approx(np.mean((y - mean) ** 2), rel=0.02)


def test_the_baselines_that_papers_state():
    assert tasks.adding_baseline(100, "unit") == 1 / 6
    assert tasks.adding_baseline(10**9) == pytest.approx(0.95 / 24)
    assert tasks.copy_memory_baseline(100) == pytest.approx(0.1733, abs=5e-5)
    assert (tasks.temporal_order_chance(2), tasks.temporal_order_chance(3)) == (1 / 4, 1 / 8)


def test_copying_asks_for_what_was_said_before_the_silence(rng):
    task = tasks.copy_memory(rng, 100, 7, symbols=4, copied=3)
    assert task.mask.all()
    said = set()
    for word, y in zip(sequences(task, "0123-!"), task.y, strict=True):
        assert re.fullmatch("[0-3]{3}-{6}!-{3}", word)
        assert "".join("0123-"[i] for i in y) == "-" * 10 + word[:3]
        said |= set(word[:3])
    assert said == set("0123")


def test_the_baseline_of_copying_is_that_of_blanks_and_guesses(rng):
    y = tasks.copy_memory(rng, 100, 50, symbols=5, copied=6).y
    p = np.zeros((62, 6))
    p[:-6, 5] = 1
    p[-6:, :5] = 1 / 5
    cross_entropy = -np.mean(np.log(p[np.arange(62), y]))
    assert tasks.copy_memory_baseline(50, symbols=5, copied=6) == pytest.approx(cross_entropy)


@pytest.mark.parametrize(
    ("symbols", "places"), [(2, [(10, 20), (50, 60)]), (3, [(10, 20), (33, 43), (66, 76)])], ids=["6a", "6b"]
)
def test_temporal_order_reads_x_and_y_as_a_binary_number(symbols, places, rng):
    task = tasks.temporal_order(rng, 3000, 100, symbols)
    lengths, found = set(), [set() for _ in places]
    for word, y in zip(sequences(task, "EBXYabcd"), task.y, strict=True):
        assert re.fullmatch("E[abcdXY]+B", word)
        marks = [(i + 1, letter) for i, letter in enumerate(word) if letter in "XY"]
        assert y == sum("XY".index(letter) << i for i, (_, letter) in enumerate(reversed(marks)))
        assert len(marks) == len(places)
        for seen, (place, _) in zip(found, marks, strict=True):
            seen.add(place)
        lengths.add(len(word))
    assert lengths == set(range(100, 111))
    assert found == [set(range(first, last + 1)) for first, last in places]
    assert np.bincount(task.y) / 3000 == pytest.approx(tasks.temporal_order_chance(symbols), abs=0.03)


@pytest.mark.parametrize("symbols", [2, 3, 4])
def test_counting_says_what_may_come_next(symbols, rng):
    letters, counts = "abcd"[:symbols], set()
    alphabet = "S" + letters + "T"
    language = {"".join(letter * m for letter in letters) + "T" for m in range(1, 30)}
    task = tasks.counting(rng, 300, 9, symbols, shortest=2)
    for word, y, mask in zip(sequences(task, alphabet), task.y, task.mask, strict=True):
        assert word[0] == "S" and word[1:] + "T" in language
        for t, may in enumerate(sets(y[mask], alphabet)):
            begun = word[1 : t + 1]
            assert may == {whole[len(begun)] for whole in language if whole.startswith(begun) and whole != begun}
        assert not y[~mask].any()
        counts.add(word.count("a"))
    assert counts == set(range(2, 10))


def test_without_counting_only_the_shortest_sequence_can_be_right(rng):
    """Tries all that one can answer who knows the last symbol alone."""
    task = tasks.counting(rng, 4000, 5)
    last, may = task.x.argmax(axis=-1), task.y @ (1 << np.arange(4))  # each set as a number
    best = 0
    for answers in itertools.product(range(16), repeat=2):  # after a, after b; S is followed by a
        said = np.array([2, *answers])[last.clip(max=2)]
        best = max(best, np.mean(np.all((said == may) | ~task.mask, axis=1)))
    assert tasks.counting_chance(5) == pytest.approx(best, abs=0.02)
    assert tasks.counting_chance(5, shortest=2) == 0


# Written from the picture of the graph: what the loops allow, not which node follows which.
LOOP = "(?:XT*VP)*"
INNER = f"B(?:TS*X{LOOP}(?:S|XT*VV)|PT*V(?:V|P{LOOP}(?:S|XT*VV)))E"
GRAMMAR = re.compile(f"B(?:T{INNER}T|P{INNER}P)E")


def test_reber_strings_are_grammatical_and_all_of_them_come(rng):
    task = tasks.reber(rng, 4000)
    words = [word + "E" for word in sequences(task, tasks.REBER_SYMBOLS)]
    assert all(GRAMMAR.fullmatch(word) for word in words)
    shortest = {"BTBTXSETE", "BTBPVVETE", "BPBTXSEPE", "BPBPVVEPE"}
    share = [words.count(word) / 4000 for word in shortest]
    assert share == pytest.approx([1 / 16] * 4, abs=0.02)  # four free choices
    for word, y, mask in zip(words, task.y, task.mask, strict=True):
        assert all(letter in may for letter, may in zip(word[1:], sets(y[mask], tasks.REBER_SYMBOLS), strict=True))
        assert not y[~mask].any()


def test_reber_names_every_symbol_that_may_come_next(rng):
    """The sets against the language itself, all words up to 16 symbols; those end within 6 symbols of any beginning."""
    bodies = {""}
    language = set()
    for first, loops, middle in itertools.product("TP", range(4), ("", "P")):
        for s, t in itertools.product(range(8), range(8)):
            head = f"T{'S' * s}X" if first == "T" else f"P{'T' * t}V"
            if first == "P" and not middle:
                bodies.add(head + "V")
                continue
            head += middle if first == "P" else ""
            for ts in itertools.product(range(6), repeat=loops):
                looped = head + "".join(f"X{'T' * k}VP" for k in ts)
                bodies |= {looped + "S", *(f"{looped}X{'T' * k}VV" for k in range(8))}
    for body in bodies - {""}:
        language |= {f"B{outer}B{body}E{outer}E" for outer in "TP" if len(body) <= 11}
    assert all(GRAMMAR.fullmatch(word) for word in language)
    may_follow = {}
    for word in language:
        for t in range(1, min(len(word), 11)):
            may_follow.setdefault(word[:t], set()).add(word[t])
    task = tasks.reber(rng, 3000)
    checked = 0
    for word, y in zip(sequences(task, tasks.REBER_SYMBOLS), task.y, strict=True):
        for t, may in enumerate(sets(y, tasks.REBER_SYMBOLS)[: min(len(word), 10)], start=1):
            assert may == may_follow[word[:t]]
            checked += 1
    assert checked > 20_000


def test_a_continual_stream_is_one_string_after_another(rng):
    task = tasks.reber(rng, 20, 400)
    assert task.mask.all()
    for word, y in zip(sequences(task, tasks.REBER_SYMBOLS), task.y, strict=True):
        ends = [m.end() for m in GRAMMAR.finditer(word)]
        assert "".join(GRAMMAR.findall(word)) == word[: ends[-1]]
        may = sets(y, tasks.REBER_SYMBOLS)
        assert all(letter in allowed for letter, allowed in zip(word[1:], may[:-1], strict=True))
        assert all(may[end - 1] == {"B"} and len(may[end - 2]) == 1 for end in ends)


def test_the_last_symbol_but_one_is_the_second():
    """Its chance: who has forgotten the second symbol is right in half of the strings."""
    task = tasks.reber(np.random.default_rng(5), 4000)
    words = list(sequences(task, tasks.REBER_SYMBOLS))
    assert all(word[1] == word[-1] for word in words)
    assert np.mean([word[-1] == "T" for word in words]) == pytest.approx(tasks.reber_chance(), abs=0.02)


def test_the_long_lag_has_a_geometric_tail(rng):
    q, p, n = 8, 5, 20_000
    task = tasks.long_lag(rng, n, q, distractors=p)
    words = list(sequences(task, "12345ebxy"))
    for word, y in zip(words, task.y, strict=True):
        assert re.fullmatch("b[xy][1-5]{8,}e", word)
        assert y == "xy".index(word[1])
    k = np.array([len(word) for word in words]) - q - 3
    for tail in (0, 1, 5, 20):
        assert np.mean(k >= tail) == pytest.approx(0.9**tail, abs=0.015)
    assert np.mean(k) == pytest.approx(9, abs=0.3)
    assert np.mean(task.y) == pytest.approx(tasks.long_lag_chance(), abs=0.015)
    distractors = task.x[..., :p].sum(axis=(0, 1))
    assert distractors / distractors.sum() == pytest.approx(1 / p, abs=0.01)


def test_a_long_lag_has_as_many_distractors_as_steps():
    assert tasks.long_lag(np.random.default_rng(0), 2, 50).x.shape[2] == 54


def test_a_reversed_target_is_the_source_from_its_end(rng):
    x, y, mask = tasks.reversal(rng, 500, 9, symbols=4, shortest=2)
    lengths = set()
    for source, target, valid in zip(x, y, mask, strict=True):
        tokens = [token for token in source.tolist() if token]
        assert len(tokens) == valid.sum() and set(tokens) <= {3, 4, 5, 6}
        assert target.tolist() == [1, *reversed(tokens), 2] + [0] * (9 - len(tokens))
        lengths.add(len(tokens))
    assert lengths == set(range(2, 10))
    shares = np.bincount(x[mask], minlength=7)[3:] / mask.sum()
    assert shares == pytest.approx(tasks.reversal_chance(symbols=4), abs=0.03)


def test_a_reversal_without_a_shortest_length_is_full(rng):
    assert tasks.reversal(rng, 20, 9).mask.all()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda rng: tasks.adding(rng, 5, 19), "length to be a whole number from 20 on, received 19"),
        (lambda rng: tasks.adding(rng, 0, 20), "n to be a whole number from 1 on, received 0"),
        (lambda rng: tasks.adding(rng, 5, 20, "float"), "form to be 'signed' or 'unit', received 'float'"),
        (lambda rng: tasks.adding_baseline(20, "float"), "form to be 'signed' or 'unit', received 'float'"),
        (lambda rng: tasks.temporal_order(rng, 5, 100.0), "length to be a whole number from 20 on, received 100.0"),
        (lambda rng: tasks.temporal_order(rng, 5, 100, 4), "symbols to be 2 or 3, received 4"),
        (lambda rng: tasks.copy_memory(rng, 5, 5, symbols=1), "symbols to be a whole number from 2 on, received 1"),
        (lambda rng: tasks.counting(rng, 5, 3, shortest=4), "shortest to be at most length, received 4 and 3"),
        (lambda rng: tasks.reber(rng, 5, 0), "length to be a whole number from 1 on, received 0"),
        (lambda rng: tasks.long_lag(rng, 5, 5, 0), "distractors to be a whole number from 1 on, received 0"),
        (lambda rng: tasks.reversal(rng, 5, 3, shortest=4), "shortest to be at most length, received 4 and 3"),
    ],
)
def test_bad_input_gets_one_sentence(call, said, rng):
    with pytest.raises(ValueError, match=re.escape(said)):
        call(rng)


def test_a_seed_is_no_generator():
    with pytest.raises(TypeError, match="a numpy Generator, received int. Pass np.random.default_rng"):
        tasks.reber(7, 5)
