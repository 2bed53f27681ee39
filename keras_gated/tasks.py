"""Tasks whose answer and whose chance level are known: what the papers on recurrent networks measure by.

Each function takes a numpy Generator, the number of sequences and their length, and returns a `Task`.  Next to it
stands what a network reaches that learnt nothing of the task: a *baseline* is a loss, a *chance* is a share of right
answers.

    from keras_gated import tasks
    x, y, mask = tasks.temporal_order(np.random.default_rng(0), n=1000, length=100)
"""

import math
from typing import Literal, NamedTuple

import numpy as np


class Task(NamedTuple):
    """n sequences of at most T steps, and their answers."""

    x: np.ndarray  # (n, T, D) float32, zeros behind the end of a sequence; `reversal` has (n, T) int32
    y: np.ndarray  # an answer for each sequence, (n, ...), or for each step, (n, T, ...)
    mask: np.ndarray  # (n, T) bool: the steps of x that belong to the sequence, as Keras means it


def adding(rng: np.random.Generator, n: int, length: int, form: Literal["signed", "unit"] = "signed") -> Task:
    """The sum of two marked numbers.

    "signed": Hochreiter & Schmidhuber (1997), experiment 4.  Pairs (value, marker), values in U[-1, 1], between
    length and 1.1 length of them.  The marker is 1 at one of the first ten pairs and at one of the first length/2 - 1
    that are then unmarked, -1 at the first and at the last pair, 0 elsewhere.  The target is 0.5 + (X1 + X2) / 4; if
    the first pair is drawn it keeps its -1, and its X counts as 0.  An answer is right within 0.04.

    "unit": Le, Jaitly & Hinton (2015), with markers as in Arjovsky, Shah & Bengio (2016).  Exactly length pairs,
    values in U[0, 1), the marker is 1 once in each half and 0 elsewhere.  The target is X1 + X2.

    Args:
        rng: numpy Generator.
        n: number of sequences.
        length: of the shortest sequence ("signed"), of all ("unit"); at least 20.
        form: "signed" or "unit".

    Returns:
        `Task`: x (n, T, 2), y (n, 1) float32, mask (n, T), where T is length + length // 10 or length.
    """
    _check("adding", rng, n=(n, 1), length=(length, 20))
    _check_choice("adding", "form", form, ("signed", "unit"))
    T = length + length // 10 if form == "signed" else length
    lengths = rng.integers(length, T, size=n, endpoint=True)
    x = np.zeros((n, T, 2), np.float32)
    value, marker = x[..., 0], x[..., 1]
    mask = _valid(lengths, T)
    rows = np.arange(n)
    value[...] = rng.random((n, T), dtype=np.float32)
    if form == "signed":
        value[...] = (2 * value - 1) * mask
        first, second = rng.integers(10, size=n), rng.integers(length // 2 - 1, size=n)
        second += second >= first
    else:
        first, second = rng.integers(length // 2, size=n), rng.integers(length // 2, length, size=n)
    marker[rows, first] = marker[rows, second] = 1
    if form == "signed":
        marker[:, 0] = marker[rows, lengths - 1] = -1
    total = sum(value[rows, place] * (marker[rows, place] == 1) for place in (first, second))[:, None]
    return Task(x, 0.5 + total / 4 if form == "signed" else total, mask)


def adding_baseline(length: int, form: Literal["signed", "unit"] = "signed") -> float:
    """Mean squared error of always saying the mean, 0.5 or 1.

    "unit": the variance of X1 + X2, 1/6.  "signed": 1/24 if both are there, half of it where the first pair was drawn,
    which happens to one sequence in ten and a few more: 0.0392 for length 100.
    """
    _check_choice("adding_baseline", "form", form, ("signed", "unit"))
    if form == "unit":
        return 1 / 6
    first_pair = 1 / 10 + 9 / 10 / (length // 2 - 1)
    return (1 - first_pair / 2) / 24


def copy_memory(rng: np.random.Generator, n: int, length: int, symbols: int = 8, copied: int = 10) -> Task:
    """Ten symbols, a long silence, a sign, and the ten symbols are to be said again.

    x is 0 .. symbols - 1 at the first `copied` steps, then length - 1 blanks, the sign, and `copied` blanks; y is blank
    but for the last `copied` steps.  The blank is number `symbols`, the sign number `symbols` + 1.  Arjovsky, Shah &
    Bengio (2016), after Hochreiter & Schmidhuber (1997).

    Args:
        rng: numpy Generator.
        n: number of sequences.
        length: steps from the last symbol to the sign; at least 1.
        symbols: how many there are to choose from; at least 2.
        copied: how many are to be remembered; at least 1.

    Returns:
        `Task`: x (n, T, symbols + 2), one-hot; y (n, T) int32, from 0 to symbols; mask (n, T), all True; T is
        length + 2 copied.
    """
    _check("copy_memory", rng, n=(n, 1), length=(length, 1), symbols=(symbols, 2), copied=(copied, 1))
    T = length + 2 * copied
    mask = np.ones((n, T), bool)
    tokens = np.full((n, T), symbols)
    tokens[:, :copied] = rng.integers(symbols, size=(n, copied))
    y = np.full((n, T), symbols, np.int32)
    y[:, -copied:] = tokens[:, :copied]
    tokens[:, -copied - 1] = symbols + 1
    return Task(_one_hot(tokens, mask, symbols + 2), y, mask)


def copy_memory_baseline(length: int, symbols: int = 8, copied: int = 10) -> float:
    """Cross-entropy, a step, without memory: nothing for blanks, ln 8 for each symbol; 10 ln 8 / (length + 20)."""
    return copied * math.log(symbols) / (length + 2 * copied)


def temporal_order(rng: np.random.Generator, n: int, length: int, symbols: int = 2) -> Task:
    """In which order did X and Y come?

    A sequence starts with E, ends with B, and is made of a, b, c and d but for two (experiment 6a) or three (6b)
    places, which hold X or Y.  Between length and 1.1 length symbols; at length 100 the places are drawn from 10..20
    and 50..60, or 10..20, 33..43 and 66..76, the first symbol being number 1; they grow with length.  Hochreiter &
    Schmidhuber (1997), experiment 6.

    Args:
        rng: numpy Generator.
        n: number of sequences.
        length: of the shortest sequence; at least 20.
        symbols: 2 or 3 places.

    Returns:
        `Task`: x (n, T, 8), one-hot in the order E B X Y a b c d; y (n,) int32, the places read as a binary number,
        X for 0 and Y for 1, the first place first; mask (n, T); T is length + length // 10.
    """
    _check("temporal_order", rng, n=(n, 1), length=(length, 20))
    _check_choice("temporal_order", "symbols", symbols, (2, 3))
    E, B, X = 0, 1, 2
    width = length // 10
    starts = (width, length // 2) if symbols == 2 else (width, length // 3, 2 * length // 3)
    lengths = rng.integers(length, length + width, size=n, endpoint=True)
    mask = _valid(lengths, length + width)
    tokens = rng.integers(4, 8, size=mask.shape)
    rows = np.arange(n)
    tokens[:, 0], tokens[rows, lengths - 1] = E, B
    y = np.zeros(n, np.int32)
    for start in starts:
        is_Y = rng.integers(2, size=n)
        tokens[rows, start - 1 + rng.integers(width, size=n, endpoint=True)] = X + is_Y
        y = 2 * y + is_Y.astype(np.int32)
    return Task(_one_hot(tokens, mask, 8), y, mask)


def temporal_order_chance(symbols: int = 2) -> float:
    """Share of right answers by guessing: 1/4 (6a), 1/8 (6b)."""
    return 0.5**symbols


def counting(rng: np.random.Generator, n: int, length: int, symbols: int = 2, shortest: int = 1) -> Task:
    """Which symbols may come next in a^m b^m, or a^m b^m c^m?

    S a a a b b b: after S only a may come, after an a both a and b, then as many b (and c) as there were a, and at
    last T.  m is uniform from shortest to length.  Gers & Schmidhuber (2001); Weiss, Goldberg & Yahav (2018); Suzgun,
    Belinkov & Shieber (2018).

    Args:
        rng: numpy Generator.
        n: number of sequences.
        length: the largest m; at least 1.
        symbols: 2 for a^m b^m, 3 for a^m b^m c^m, and so on.
        shortest: the smallest m, from 1 to length.

    Returns:
        `Task`: x (n, T, symbols + 2), one-hot in the order S a b c T, without the T of the end; y of the same shape,
        1 for every symbol that may come next; mask (n, T), 1 + symbols · m steps; T is 1 + symbols · length.
    """
    _check("counting", rng, n=(n, 1), length=(length, 1), symbols=(symbols, 2), shortest=(shortest, 1))
    if shortest > length:
        raise ValueError(
            f"tasks.counting expects shortest to be at most length, received {shortest} and {length}. Exchange them?"
        )
    m = rng.integers(shortest, length, size=(n, 1), endpoint=True)
    after_S = np.arange(symbols * length + 1)
    letters = 1 + after_S // m  # from the first a to T, which is number symbols + 1
    tokens = np.concatenate([np.zeros_like(m), letters[:, :-1]], axis=1)
    mask = after_S <= symbols * m
    D = symbols + 2
    y = _one_hot(letters, mask, D)
    y[..., 1:3] = np.where((tokens == 1)[..., None], 1, y[..., 1:3])
    return Task(_one_hot(tokens, mask, D), y, mask)


def counting_chance(length: int, shortest: int = 1) -> float:
    """Share of sequences right at every step for one who knows the last symbol only: those with m = 1."""
    return 1 / length if shortest == 1 else 0.0


REBER_SYMBOLS = "BTPSXVE"
REBER = (  # from each node: (symbol, node) twice, equally likely; node 7 is behind the E
    (("B", 1), ("B", 1)),
    (("T", 2), ("P", 3)),
    (("S", 2), ("X", 4)),
    (("T", 3), ("V", 5)),
    (("X", 3), ("S", 6)),
    (("P", 4), ("V", 6)),
    (("E", 7), ("E", 7)),
)


def reber(rng: np.random.Generator, n: int, length: int | None = None) -> Task:
    """Which symbols may come next in the embedded Reber grammar?

    A string is B, T or P, a string of Reber's grammar, the same T or P, E: what came second must be remembered until
    the last symbol but one.  With a length, such strings follow each other without a sign, and nobody resets the
    network in between (the continual form).  Hochreiter & Schmidhuber (1997), experiment 1; continual: Gers,
    Schmidhuber & Cummins (2000).

    Args:
        rng: numpy Generator.
        n: number of strings, or of streams.
        length: of each stream; None for single strings.

    Returns:
        `Task`: x (n, T, 7), one-hot in the order B T P S X V E, single strings without their last E; y of the same
        shape, 1 for every symbol that may come next; mask (n, T), all True for streams.
    """
    _check("reber", rng, n=(n, 1), length=(1 if length is None else length, 1))
    symbols, following, may_follow = _embedded_reber()
    last_state = len(may_follow) - 1  # where only the outer E may come
    state, alive = np.zeros(n, np.intp), np.ones(n, bool)
    tokens, states, mask = [], [], []
    while alive.any() if length is None else len(tokens) < length:
        choice = rng.integers(2, size=n)
        tokens.append(symbols[state, choice])
        state = following[state, choice]
        states.append(state)
        mask.append(alive)
        if length is None:
            alive = alive & (state != last_state)
    tokens, states, mask = (np.stack(steps, axis=1) for steps in (tokens, states, mask))
    return Task(_one_hot(tokens, mask, 7), may_follow[states] * mask[..., None], mask)


def _embedded_reber():
    """The automaton: symbol and next state of each choice, (states, 2), and which symbols may come, (states, 7).

    States 0 and 1 are before and behind the outer B, then come Reber's nodes twice, once for T and once for P; behind
    the last E the automaton is in state 0 again.
    """
    outer = [(("B", 1), ("B", 1)), (("T", 2), ("P", 2 + 8))]
    ending = 2 + 2 * 8
    for first, remembered in ((2, "T"), (2 + 8, "P")):
        outer += [tuple((symbol, first + node) for symbol, node in edges) for edges in REBER]
        outer.append(((remembered, ending),) * 2)
    outer.append((("E", 0), ("E", 0)))
    symbols = np.array([[REBER_SYMBOLS.index(symbol) for symbol, _ in edges] for edges in outer])
    may_follow = np.eye(7, dtype=np.float32)[symbols].max(axis=1)
    return symbols, np.array([[state for _, state in edges] for edges in outer]), may_follow


def reber_chance() -> float:
    """Share of right answers at the last symbol but one, T or P, without memory of the second."""
    return 0.5


def long_lag(rng: np.random.Generator, n: int, length: int, distractors: int | None = None) -> Task:
    """Was the second symbol x or y?

    b, then x or y, then length + k distractors, then e, and the answer; k is geometric, P(k) = 0.9^k / 10.  Nothing in
    what lies between helps.  Hochreiter & Schmidhuber (1997), experiment 2c, whose q is length and whose p is
    distractors.

    Args:
        rng: numpy Generator.
        n: number of sequences.
        length: q, the smallest number of distractors; at least 1.
        distractors: p, how many different ones there are; None for as many as length.

    Returns:
        `Task`: x (n, T, p + 4), one-hot, the distractors first, then e b x y; y (n,) int32, 0 for x and 1 for y;
        mask (n, T); T is the longest of these sequences, length + 3 + the largest k.
    """
    p = length if distractors is None else distractors
    _check("long_lag", rng, n=(n, 1), length=(length, 1), distractors=(p, 1))
    e, b, x = p, p + 1, p + 2
    lengths = length + 3 + rng.geometric(0.1, size=n) - 1
    mask = _valid(lengths, lengths.max())
    tokens = rng.integers(p, size=mask.shape)
    y = rng.integers(2, size=n, dtype=np.int32)
    tokens[:, 0], tokens[:, 1], tokens[np.arange(n), lengths - 1] = b, x + y, e
    return Task(_one_hot(tokens, mask, p + 4), y, mask)


def long_lag_chance() -> float:
    """Share of right answers by guessing."""
    return 0.5


def reversal(rng: np.random.Generator, n: int, length: int, symbols: int = 10, shortest: int | None = None) -> Task:
    """Say a sequence backwards: a task for an encoder and a decoder.

    Tokens as `Seq2Seq` has them: 0 is padding, 1 starts and 2 ends a target, symbols are 3 .. symbols + 2.  Sutskever,
    Vinyals & Le (2014) found that reversed sources are the easier ones: what was read last is said first.

    Args:
        rng: numpy Generator.
        n: number of sequences.
        length: of the longest; at least 1.
        symbols: how many there are to choose from; at least 2.
        shortest: length of the shortest, all up to length being equally likely; None for length.

    Returns:
        `Task`: x (n, length) int32; y (n, length + 2) int32, the start token, x backwards, the end token, then 0;
        mask (n, length), the tokens of x.
    """
    shortest = length if shortest is None else shortest
    _check("reversal", rng, n=(n, 1), length=(length, 1), symbols=(symbols, 2), shortest=(shortest, 1))
    if shortest > length:
        raise ValueError(
            f"tasks.reversal expects shortest to be at most length, received {shortest} and {length}. Exchange them?"
        )
    lengths = rng.integers(shortest, length, size=n, endpoint=True)
    mask = _valid(lengths, length)
    x = rng.integers(3, symbols + 3, size=mask.shape, dtype=np.int32) * mask
    y = np.zeros((n, length + 2), np.int32)
    y[:, 0] = 1
    backwards = np.maximum(lengths[:, None] - 1 - np.arange(length), 0)
    y[:, 1:-1] = np.take_along_axis(x, backwards, axis=1) * mask
    y[np.arange(n), lengths + 1] = 2
    return Task(x, y, mask)


def reversal_chance(symbols: int = 10) -> float:
    """Share of right tokens by guessing."""
    return 1 / symbols


def _valid(lengths, T):
    return np.arange(T) < lengths[:, None]


def _one_hot(tokens, mask, D):
    return np.eye(D + 1, D, dtype=np.float32)[np.where(mask, tokens, D)]  # the last row is 0


def _check(task, rng, **numbers):
    """Whole numbers, {name: (value, smallest)}, and a Generator."""
    if not isinstance(rng, np.random.Generator):
        raise TypeError(
            f"tasks.{task} expects a numpy Generator, received {type(rng).__name__}. Pass np.random.default_rng(seed)."
        )
    for name, (value, smallest) in numbers.items():
        if not isinstance(value, int | np.integer) or value < smallest:
            raise ValueError(
                f"tasks.{task} expects {name} to be a whole number from {smallest} on, received {value!r}."
            )


def _check_choice(task, name, value, choices):
    if value not in choices:
        raise ValueError(f"tasks.{task} expects {name} to be {' or '.join(map(repr, choices))}, received {value!r}.")
