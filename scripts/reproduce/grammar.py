"""The embedded Reber grammar, in single strings and as a stream that nobody resets."""

import keras
import numpy as np
from keras import ops
from reproduce import training
from reproduce.claim import Check, Claim, Run, counted, enough, listed, of, percent

import keras_gated as kg
from keras_gated import tasks

T, P = (tasks.REBER_SYMBOLS.index(symbol) for symbol in "TP")
LIMIT = 40_000
STRINGS = {"cell": "LSTM", "units": 16, "optimizer": "Adam", "rate": 0.01, "clip": 1.0}
STRINGS |= {"batch": 8, "chunk": 1000, "window": 4000}
STREAM = {"units": 8, "optimizer": "Adam", "rate": 0.01, "clip": 1.0, "batch": 16, "steps": 50, "tested": 20_000}


def claims(quick):
    return [strings(quick), stream(quick)]


def strings(quick):
    limit, seeds = (20_000, 1) if quick else (LIMIT, 10)
    return Claim(
        name="Embedded Reber grammar",
        says="An LSTM learns a grammar whose last but one symbol repeats the second.",
        published="8,440 to 39,740 sequences, 97 to 100 % of trials; Elman's simple RNN none (Hochreiter & "
        "Schmidhuber 1997, experiment 1, table 1)",
        setting="16 units, forget bias 1; Adam 0.01, clipped at 1, batches of 8; until 4,000 strings in a row were "
        "right, these included: at every symbol all that may come next above all that may not",
        runs=[Run("grammar", {**STRINGS, "limit": limit}, seed, limit / 3000) for seed in range(seeds)],
        judge=judge_strings,
    )


def judge_strings(results):
    solved = [r["solved"] is not None and r["accuracy"] == 1 for _, r in results]
    holds, found = enough(solved, 0.9)
    limit = results[0][0].setting["limit"]
    found += f"; after {listed(r['solved'] for _, r in results)} strings"
    return [Check(f"256 new strings right within {counted(limit)} strings, 9 of 10 seeds", found, holds)]


def stream(quick):
    updates, seeds = (1500, 1) if quick else (4000, 5)
    limit = updates * STREAM["batch"]
    return Claim(
        name="Continual Reber grammar",
        says="Without resets an LSTM needs its forget gate.",
        published="streams of 1,000,000 symbols predicted by 18 of 100 networks with forget gates, by none without "
        "(Gers, Schmidhuber & Cummins 2000)",
        setting=f"8 units; 16 streams, never reset, the gradient cut every 50 symbols; {updates:,} updates of Adam "
        "0.01, clipped at 1; last but one symbols in the second half of 16 new streams of 20,000 symbols",
        runs=[
            Run("grammar", {"cell": cell, **STREAM, "limit": limit}, seed, updates / 250)
            for cell in ("LSTM", "LSTM, f = 1")
            for seed in range(seeds)
        ],
        judge=judge_stream,
    )


def judge_stream(results):
    shares = {cell: [r["accuracy"] for r in of(results, cell=cell)] for cell in ("LSTM", "LSTM, f = 1")}
    of_gate, of_one = (float(np.median(of_cell)) for of_cell in shares.values())
    said = {cell: ", ".join(percent(share) for share in sorted(of_cell)) for cell, of_cell in shares.items()}
    return [
        Check("with forget gate at least 95 % (median)", said["LSTM"], of_gate >= 0.95),
        Check("forget gate fixed at 1: at most 75 % (median)", said["LSTM, f = 1"], of_one <= 0.75),
    ]


def legal_above_illegal(y, logits):
    """(B, T) bool: whether all that may come next is above all that may not."""
    lowest_legal = ops.min(ops.where(y > 0, logits, np.inf), axis=-1)
    highest_illegal = ops.max(ops.where(y > 0, -np.inf, logits), axis=-1)
    return lowest_legal > highest_illegal


def whole_string(y, logits):
    padding = ops.max(y, axis=-1) == 0
    return ops.cast(ops.all(ops.logical_or(legal_above_illegal(y, logits), padding), axis=-1), "float32")


def train(setting, rng, note):
    return (train_stream if "steps" in setting else train_strings)(setting, rng, note)


def train_strings(setting, rng, note):
    def draw(n):
        x, y, _ = training.padded(tasks.reber(rng, n))
        return x, y

    model = training.network(setting, features=7, outputs=7, every_step=True)
    training.compiled(model, setting, training.next_symbols, whole_string)
    outcome = training.train(model, draw, setting, note)
    return {**outcome, "accuracy": training.share_right(model, draw, whole_string, n=256)}


class ForgetGateAt(keras.constraints.Constraint):
    """Sets the columns of the forget gate to a value: 0 in the kernels and 30 in the bias make f = σ(30) = 1."""

    def __init__(self, value):
        self.value = value

    def __call__(self, weight):
        i, f, c, o = ops.split(weight, 4, axis=-1)
        return ops.concatenate([i, ops.full_like(f, self.value), c, o], axis=-1)


def stateful_lstm(setting):
    options = {"return_sequences": True, "stateful": True}
    if setting["cell"] == "LSTM":
        return kg.LSTM(setting["units"], **options)
    fixed = {"kernel_constraint": ForgetGateAt(0.0), "recurrent_constraint": ForgetGateAt(0.0)}
    return kg.LSTM(setting["units"], forget_bias=30.0, bias_constraint=ForgetGateAt(30.0), **fixed, **options)


def train_stream(setting, rng, note):
    streams, steps = setting["batch"], setting["steps"]
    x = keras.Input(batch_shape=(streams, None, 7))
    layer = stateful_lstm(setting)
    model = keras.Model(x, keras.layers.Dense(7)(layer(x)))
    for weight in layer.trainable_weights:  # Keras constrains them after an update only
        if weight.constraint is not None:
            weight.assign(weight.constraint(weight))

    def every_symbol(y, logits):
        return ops.mean(ops.cast(legal_above_illegal(y, logits), "float32"), axis=-1)

    training.compiled(model, setting, training.next_symbols, every_symbol)
    whole = tasks.reber(rng, streams, max(1, setting["limit"] // streams) * steps)
    windows = [in_windows(a, steps) for a in (whole.x, whole.y)]
    place = iter(range(0, len(windows[0]), streams * 50))

    def draw(n):
        start = next(place)
        return tuple(a[start : start + n] for a in windows)

    outcome = training.train(model, draw, {**setting, "chunk": streams * 50}, note)
    layer.reset_states()
    return {**outcome, "accuracy": last_but_one(model, tasks.reber(rng, streams, setting["tested"]), streams)}


def in_windows(stream, steps):
    """(B, k steps, 7) -> (k B, steps, 7): batches of B windows, each going on where the one before ended."""
    B, _, D = stream.shape
    return stream.reshape(B, -1, steps, D).transpose(1, 0, 2, 3).reshape(-1, steps, D)


def last_but_one(model, task, streams):
    """Share of them right in the second half.  Nowhere else may only T, or only P, come next."""
    answered = ops.convert_to_numpy(legal_above_illegal(task.y, model.predict(task.x, batch_size=streams, verbose=0)))
    asked = (task.y.sum(axis=-1) == 1) & (task.y[..., [T, P]].sum(axis=-1) == 1)
    asked[:, : task.x.shape[1] // 2] = False
    return float(answered[asked].mean())
