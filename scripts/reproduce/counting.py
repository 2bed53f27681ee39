"""Counting: how far beyond the longest sequence of the training does it go?"""

import statistics

import numpy as np
from keras import ops
from reproduce import training
from reproduce.claim import Check, Claim, Run, of

from keras_gated import tasks

LONGEST = 50  # in training
SYMBOLS = 3
COMMON = {"units": 16, "optimizer": "Adam", "rate": 0.01, "decay": True, "clip": 1.0, "batch": 16, "chunk": 800}


def claims(quick):
    limit, seeds, tested = (16_000, 1, 150) if quick else (160_000, 7, 300)
    runs = [
        Run("counting", {"cell": cell, **COMMON, "limit": limit, "tested": tested}, seed, limit / 4000)
        for cell in ("LSTM", "GRU")
        for seed in range(seeds)
    ]
    return [
        Claim(
            name="Counting",
            says="An LSTM counts with its cell state, which is not bounded; a GRU's state is.",
            published="a^n b^n c^n: LSTM right beyond n = 100, GRU failing from n = 9 on (Weiss, Goldberg & Yahav "
            "2018); LSTM's first failing n 145.9 in the mean (Suzgun, Belinkov & Shieber 2018)",
            setting=f"a^n b^n c^n, n ≤ 50; 16 units; Adam 0.01 that falls to 0 along a cosine, clipped at 1, {limit:,} "
            f"sequences in batches of 16; a symbol may come next if its output exceeds ½; n up to {tested} tested",
            runs=runs,
            judge=judge,
        )
    ]


def judge(results):
    failing = {cell: [r["first_failing"] for r in of(results, cell=cell)] for cell in ("LSTM", "GRU")}
    lstm, gru = (statistics.median(of_cell) for of_cell in failing.values())
    found = f"{lstm:g} ({', '.join(map(str, sorted(failing['LSTM'])))})"
    ratio = lstm / gru
    return [
        Check("LSTM's median first failing n ≥ 75", found, lstm >= 75),
        Check(
            "at least 1.5 times the GRU's",
            f"{ratio:.1f} times {gru:g} ({', '.join(map(str, sorted(failing['GRU'])))})",
            ratio >= 1.5,
        ),
    ]


def right(y, logits):
    """All sets right: a symbol may come if its output exceeds ½."""
    agrees = ops.all(ops.equal(logits > 0, y > 0.5), axis=-1)
    padding = ops.max(y, axis=-1) == 0
    return ops.cast(ops.all(ops.logical_or(agrees, padding), axis=-1), "float32")


def train(setting, rng, note):
    def draw(n):
        x, y, _ = tasks.counting(rng, n, LONGEST, SYMBOLS)
        return x, y

    model = training.network(setting, features=SYMBOLS + 2, outputs=SYMBOLS + 2, every_step=True)
    training.compiled(model, setting, training.next_symbols, right)
    outcome = training.train(model, draw, setting, note)
    return {**outcome, "first_failing": first_failing(model, setting["tested"])}


def first_failing(model, tested):
    """The smallest n that is not answered right, or tested + 1."""
    width = SYMBOLS * tested + 1
    x, y = np.zeros((2, tested, width, SYMBOLS + 2), np.float32)
    for n in range(1, tested + 1):
        task = tasks.counting(np.random.default_rng(0), 1, n, SYMBOLS, shortest=n)
        x[n - 1, : task.x.shape[1]], y[n - 1, : task.x.shape[1]] = task.x[0], task.y[0]
    answered = ops.convert_to_numpy(right(y, model.predict(x, batch_size=tested, verbose=0)))
    return 1 + int(np.argmin([*answered, 0]))
