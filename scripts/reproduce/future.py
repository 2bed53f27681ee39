"""What a bidirectional layer sees that no one-directional one can."""

import keras
from keras import ops
from reproduce import training
from reproduce.claim import Check, Claim, Run, of, percent

import keras_gated as kg

LENGTH = 20
COMMON = {"units": 8, "optimizer": "Adam", "rate": 0.02, "clip": 1.0, "batch": 32, "chunk": 3200}


def claims(quick):
    limit, seeds = (16_000, 1) if quick else (32_000, 3)
    runs = [
        Run("future", {"cell": cell, **COMMON, "limit": limit}, seed, 6)
        for cell in ("LSTM", "Bidirectional")
        for seed in range(seeds)
    ]
    return [
        Claim(
            name="Next bit",
            says="What comes next in random bits is known only to who reads them backwards, too.",
            published="50 % and 100 %: no number can be better or worse (the idea: Schuster & Paliwal 1997)",
            setting=f"y_t = x_{{t+1}}, T = 20; LSTM(8), Bidirectional(LSTM(8)); Adam 0.02, {limit:,} sequences in "
            "batches of 32",
            runs=runs,
            judge=judge,
        )
    ]


def judge(results):
    forward, both = ([r["accuracy"] for r in of(results, cell=cell)] for cell in ("LSTM", "Bidirectional"))
    return [
        Check(
            "LSTM: 50 %, to within a point",
            ", ".join(map(percent, forward)),
            max(abs(a - 0.5) for a in forward) <= 0.01,
        ),
        Check("Bidirectional: more than 99.9 %", ", ".join(map(percent, both)), min(both) > 0.999),
    ]


def train(setting, rng, note):
    def draw(n):
        bits = rng.integers(2, size=(n, LENGTH + 1))
        return 2.0 * bits[:, :-1, None] - 1, bits[:, 1:]

    def right(y, logits):
        """Share of steps, without the last, whose next bit nobody has seen."""
        hits = ops.equal(ops.argmax(logits, axis=-1), ops.cast(y, "int32"))
        return ops.mean(ops.cast(hits[:, :-1], "float32"), axis=-1)

    def loss(y, logits):
        return ops.mean(ops.sparse_categorical_crossentropy(y, logits, from_logits=True)[:, :-1], axis=-1)

    layer = kg.LSTM(setting["units"], return_sequences=True)
    if setting["cell"] == "Bidirectional":
        layer = keras.layers.Bidirectional(layer)
    x = keras.Input((LENGTH, 1))
    model = training.compiled(keras.Model(x, keras.layers.Dense(2)(layer(x))), setting, loss, right)
    outcome = training.train(model, draw, setting, note)
    return {**outcome, "accuracy": training.share_right(model, draw, right)}
