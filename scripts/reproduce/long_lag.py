"""Experiment 2c of Hochreiter & Schmidhuber (1997): the second symbol is asked for hundreds of steps later."""

from reproduce import training
from reproduce.claim import Check, Claim, Run, counted, enough, listed, of, percent

from keras_gated import tasks

PUBLISHED = {100: 31_000, 200: 33_000, 500: 38_000}
TOLERANCE = 0.2
COMMON = {"optimizer": "Adam", "rate": 0.003, "decay": True, "clip": 1.0, "batch": 8, "window": 10_000}
CELLS = {
    "LSTM": {"cell": "LSTM", "units": 8, "biases": {"f": 8.0, "i": -2.0}},
    "SimpleRNN": {"cell": "SimpleRNN", "units": 16},
}


def setting(cell, lag, limit):
    chunk = 400 if lag <= 100 else 200 if lag <= 200 else 40
    return {**CELLS[cell], **COMMON, "lag": lag, "chunk": chunk, "limit": limit}


def claims(quick):
    if quick:
        runs = [Run("long_lag", setting("LSTM", 100, 62_000), 0, 30)]
        runs.append(Run("long_lag", setting("SimpleRNN", 100, 6_000), 0, 8))
    else:
        runs = [Run("long_lag", setting("LSTM", 100, 62_000), seed, 30) for seed in range(5)]
        runs += [Run("long_lag", setting("LSTM", q, 2 * PUBLISHED[q]), 0, 60 if q == 200 else 150) for q in (200, 500)]
        runs += [Run("long_lag", setting("SimpleRNN", 100, 62_000), seed, 60) for seed in range(5)]
    return [
        Claim(
            name="Long lag",
            says="An LSTM bridges hundreds of steps of noise, a simple RNN does not.",
            published="31,000, 33,000 and 38,000 sequences at q = 100, 200 and 500 (Hochreiter & Schmidhuber 1997, "
            "task 2c, table 3)",
            setting="p = q; 8 units, biases of forget gate 8 and input gate -2; SimpleRNN(16); Adam 0.003 that falls "
            "to 0 along a cosine, clipped at 1, batches of 8; until 10,000 sequences in a row were within 0.2, these "
            "included",
            runs=runs,
            judge=judge,
        )
    ]


def judge(results):
    checks = []
    for lag, published in PUBLISHED.items():
        lstm = of(results, cell="LSTM", lag=lag)
        if lstm:
            solved = [r["solved"] is not None and r["solved"] <= 2 * published and r["wrong"] == 0 for r in lstm]
            holds, found = enough(solved, 0.8)
            wrong = max(r["wrong"] for r in lstm)
            found = f"{found}; after {listed(r['solved'] for r in lstm)} sequences, at most {wrong} wrong"
            demanded = f"LSTM, q = {lag}: 0 wrong within {counted(2 * published)} sequences, 4 of 5 seeds"
            checks.append(Check(demanded, found, holds))
    best = max(r["accuracy"] for r in of(results, cell="SimpleRNN"))
    checks.append(Check("SimpleRNN, q = 100: at most 60 % right", f"{percent(best)} at best", best <= 0.6))
    return checks


def train(setting, rng, note):
    q = setting["lag"]
    right = training.within(TOLERANCE)

    def draw(n):
        x, y, mask = tasks.long_lag(rng, n, q)
        x, mask, _ = training.padded(tasks.Task(x, mask, mask))
        return [x, mask], y

    model = training.network(setting, features=q + 4, outputs=2)
    training.compiled(model, setting, training.classes(), right)
    outcome = training.train(model, draw, setting, note)
    within, accuracy = training.shares_right(model, draw, (right, training.largest), at_once=64)
    return {**outcome, "wrong": round((1 - within) * training.TESTED), "accuracy": accuracy}
