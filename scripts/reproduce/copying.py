"""Copying ten symbols across a silence: what no cell learns quickly."""

import numpy as np
from keras import ops
from reproduce import training
from reproduce.claim import Check, Claim, Run, of

from keras_gated import tasks

LENGTH = 100
COMMON = {"optimizer": "Adam", "rate": 0.003, "clip": 1.0, "batch": 20, "chunk": 600}
FASTER = 0.01  # at which the GRU begins to copy
CELLS = {
    "SimpleRNN": {"units": 80},
    "LSTM": {"units": 40},
    "GRU": {"units": 46},
}
UPDATES = 600
ALLOWED = 0.05


def claims(quick):
    setting = {**COMMON, "limit": COMMON["batch"] * UPDATES}
    rates = [(cell, COMMON["rate"]) for cell in CELLS] + [("GRU", FASTER)]
    runs = [
        Run("copying", {"cell": cell, **CELLS[cell], **setting, "rate": rate}, seed, 8)
        for cell, rate in rates
        for seed in range(1 if quick else 3)
    ]
    return [
        Claim(
            name="Copying",
            says="Gates are no cure for everything: in 600 updates no cell copies, each learns the silence.",
            published="LSTM stays at 10 ln 8 / (T + 20), which needs no memory (Arjovsky, Shah & Bengio 2016)",
            setting="T = 100; 80 / 40 / 46 units (7,300 to 8,300 weights); Adam 0.003, clipped at 1, 600 updates of 20 "
            "sequences; cross-entropy of 2,560 new ones",
            runs=runs,
            judge=judge,
        )
    ]


def judge(results):
    checks = []
    baseline = tasks.copy_memory_baseline(LENGTH)
    for cell in CELLS:
        losses = [r["loss"] for r in of(results, cell=cell, rate=COMMON["rate"])]
        found = said(losses)
        if cell == "GRU":
            found += f" (with Adam {FASTER}: {said(r['loss'] for r in of(results, rate=FASTER))})"
        away = max(abs(loss / baseline - 1) for loss in losses)
        checks.append(Check(f"{cell}: within 5 % of {baseline:.4f}", found, away <= ALLOWED))
    return checks


def said(losses):
    return ", ".join(f"{loss:.4f}" for loss in sorted(losses))


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
