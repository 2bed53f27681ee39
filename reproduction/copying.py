"""Copying ten symbols across a silence: what no cell learns quickly."""

import numpy as np
from keras import ops

from keras_gated import tasks
from reproduction import training
from reproduction.claim import Check, Claim, Run, of

LENGTH = 100
COMMON = {"optimizer": "Adam", "rate": 0.01, "clip": 1.0, "batch": 32, "chunk": 640}
CELLS = {
    "SimpleRNN": {"units": 80},
    "LSTM": {"units": 40, "forget_bias": 1.0},
    "GRU": {"units": 46},
}
UPDATES = 600
ALLOWED = 0.05


def claims(quick):
    seeds = 1 if quick else 3
    limit = COMMON["batch"] * UPDATES
    runs = [
        Run("copying", {"cell": cell, **CELLS[cell], **COMMON, "limit": limit}, seed, 8)
        for cell in CELLS
        for seed in range(seeds)
    ]
    return [
        Claim(
            name="Copying",
            says="Gates are no cure for everything: in the time of the other tasks no cell copies, each learns the "
            "silence.",
            published="LSTM stays at the memoryless 10 ln 8 / (T + 20) = 0.1733 for T = 100 (Arjovsky, Shah & Bengio "
            "2016, "
            "figure 1)",
            setting="T = 100; 80 / 40 / 46 units (6,400 to 8,200 recurrent and input weights); Adam 0.01, clipped at "
            "1, 600 "
            "updates of 32 sequences; cross-entropy of 2,560 new ones",
            runs=runs,
            judge=judge,
        )
    ]


def judge(results):
    checks = []
    baseline = tasks.copy_memory_baseline(LENGTH)
    for cell in CELLS:
        losses = [r["loss"] for r in of(results, cell=cell)]
        away = max(abs(loss / baseline - 1) for loss in losses)
        found = f"{', '.join(f'{loss:.4f}' for loss in losses)}"
        checks.append(Check(f"{cell}: within 5 % of {baseline:.4f}", found, away <= ALLOWED))
    return checks


def right(y, logits):
    """All ten symbols, and the silence before them."""
    return ops.cast(ops.all(ops.equal(ops.argmax(logits, axis=-1), ops.cast(y, "int32")), axis=-1), "float32")


def train(setting, rng, note):
    def draw(n):
        x, y, _ = tasks.copy_memory(rng, n, LENGTH)
        return x, y

    model = training.network(setting, features=10, outputs=9, every_step=True)
    training.compiled(model, setting, training.classes(), right)
    outcome = training.train(model, draw, setting, note)
    x, y = draw(training.TESTED)
    logits = model.predict(x, batch_size=256, verbose=0)
    return {**outcome, "loss": float(np.mean(ops.sparse_categorical_crossentropy(y, logits, from_logits=True)))}
