"""Experiment 4 of Hochreiter & Schmidhuber (1997): numbers must be kept, not only bits."""

import numpy as np
from keras import ops
from reproduce import training
from reproduce.claim import Check, Claim, Run, of, percent

from keras_gated import tasks

TOLERANCE = 0.04
LENGTH = 100
COMMON = {"optimizer": "Adam", "rate": 0.01, "clip": 1.0, "batch": 32, "chunk": 3200}
CELLS = {  # 4,480, 4,212 and 4,690 weights
    "LSTM": {"units": 32, "biases": {"f": 5.0, "i": -2.0}},
    "GRU": {"units": 36, "biases": {"z": -4.0}},
    "SimpleRNN": {"units": 67, "rate": 0.001},
}


def claims(quick):
    limit, seeds = (32_000, 1) if quick else (160_000, 5)
    runs = [
        Run("adding", {"cell": cell, **COMMON, **CELLS[cell], "limit": limit}, seed, limit / 5000)
        for cell in CELLS
        for seed in range(seeds)
    ]
    return [
        Claim(
            name="Adding",
            says="LSTM and GRU add two numbers far apart, a simple RNN of the same size does not.",
            published="74,000 sequences, 1 wrong of 2,560 at T = 100 (Hochreiter & Schmidhuber 1997, experiment 4, "
            "table 7)",
            setting="T = 100; 32 / 36 / 67 units (4,200 to 4,700 weights); biases: LSTM's forget gate 5, input "
            f"gate -2; GRU's update gate -4; Adam 0.01 (SimpleRNN 0.001), clipped at 1, {limit:,} sequences in batches "
            f"of 32; then "
            "the same network at two and four times the length",
            runs=runs,
            judge=judge,
        )
    ]


def judge(results):
    checks = []
    for cell in ("LSTM", "GRU"):
        wrong = {times: [r["wrong"][times] for r in of(results, cell=cell)] for times in ("1", "2", "4")}
        found = f"{percent(max(wrong['1']))} in the worst seed; {percent(np.median(wrong['2']))} at 2 T, "
        found += f"{percent(np.median(wrong['4']))} at 4 T"
        checks.append(Check(f"{cell}: at most 2 % wrong", found, max(wrong["1"]) <= 0.02))
    share = min(r["error"] for r in of(results, cell="SimpleRNN")) / tasks.adding_baseline(LENGTH)
    checks.append(Check("SimpleRNN's error at least 50 % of the baseline", f"{percent(share)} at best", share >= 0.5))
    return checks


def right(y, answer):
    return ops.cast(ops.abs(answer[:, 0] - ops.reshape(y, (-1,))) < TOLERANCE, "float32")


def train(setting, rng, note):
    def draw(n, length=LENGTH):
        x, y, mask = tasks.adding(rng, n, length)
        return [x, mask], y

    model = training.compiled(training.network(setting, features=2, outputs=1), setting, "mse", right)
    outcome = training.train(model, draw, setting, note)
    wrong = {
        str(times): 1 - training.share_right(model, lambda n, times=times: draw(n, times * LENGTH), right)
        for times in (1, 2, 4)
    }
    inputs, y = draw(training.TESTED)
    error = float(np.mean((model.predict(inputs, batch_size=256, verbose=0) - y) ** 2))
    return {**outcome, "wrong": wrong, "error": error}
