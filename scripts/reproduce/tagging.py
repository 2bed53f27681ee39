"""Tagging words: what comes after a word helps to tell what it is."""

import statistics

import keras
import numpy as np
from keras import ops
from reproduce import treebank
from reproduce.claim import Check, Claim, Run, of, percent

import keras_gated as kg

COMMON = {"optimizer": "Adam", "rate": 0.003, "clip": 1.0, "batch": 32, "dropout": 0.4, "width": 64}
CELLS = {"LSTM": {"units": 64}, "Bidirectional": {"units": 37}}  # 49,408 and 49,136 weights
EMBEDDED = {"word": 64, "suffix_3": 32, "suffix_2": 24, "shape": 8}


def claims(quick):
    epochs, seeds = (2, 1) if quick else (10, 5)
    runs = [
        Run("tagging", {"cell": cell, **CELLS[cell], **COMMON, "epochs": epochs, "split": 0}, seed, 4 * epochs)
        for cell in CELLS
        for seed in range(seeds)
    ]
    return [
        Claim(
            name="Tagging",
            says="A tagger that also reads from the end is right more often than one of the same size that does not.",
            published="bidirectional ahead (Graves & Schmidhuber 2005, of speech; Plank, Søgaard & Goldberg 2016, "
            "of tags in 22 languages)",
            setting="Turkish Web Treebank, 14 tags, web and wiki shuffled, 4/5 for training; embedded words, "
            "suffixes and capitals; LSTM(64) and Bidirectional(LSTM(37)), about 49,000 weights each; Adam 0.003, "
            f"dropout 0.4, {epochs} epochs",
            runs=runs,
            judge=judge,
        )
    ]


def judge(results):
    forward, both = ([r["accuracy"] for r in of(results, cell=cell)] for cell in ("LSTM", "Bidirectional"))
    ahead = statistics.mean(both) - statistics.mean(forward)
    baseline = max(r["baseline"] for _, r in results)
    return [
        Check(
            "Bidirectional ahead by 0.5 point",
            f"{100 * ahead:.2f} points: {', '.join(map(percent, both))} against {', '.join(map(percent, forward))}",
            ahead >= 0.005,
        ),
        Check(f"and above the baseline, {percent(baseline)}", percent(min(both)), min(both) > baseline),
    ]


def train(setting, rng, note):
    trained, tested = treebank.split(treebank.sentences(), setting["split"])
    vocabulary = treebank.vocabularies(trained)
    x, mask, y = treebank.arrays(trained, vocabulary, setting["width"])
    model = network(setting, vocabulary)
    told = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: note((epoch + 1) / setting["epochs"]))
    fitted = {"batch_size": setting["batch"], "epochs": setting["epochs"], "verbose": 0, "callbacks": [told]}
    losses = model.fit([x, mask], y, **fitted).history["loss"]
    longest = max(map(len, tested))
    x, mask, y = treebank.arrays(tested, vocabulary, longest)
    guesses = model.predict([x, mask], batch_size=128, verbose=0).argmax(axis=-1)
    words = sum(map(len, tested))  # a tag that was not seen in training counts as wrong
    return {
        "accuracy": float(np.sum((guesses == y) & mask) / words),
        "baseline": treebank.baseline(trained, tested),
        "curve": [[epoch + 1, loss] for epoch, loss in enumerate(losses)],
    }


def network(setting, vocabulary):
    x, mask = keras.Input((None, 4), dtype="int32"), keras.Input((None,), dtype="bool")
    sizes = [len(numbers) + 2 for numbers in vocabulary[:3]] + [5]
    columns = [
        keras.layers.Embedding(size, width)(x[..., i])
        for i, (size, width) in enumerate(zip(sizes, EMBEDDED.values(), strict=True))
    ]
    h = keras.layers.Dropout(setting["dropout"])(ops.concatenate(columns, axis=-1))
    layer = kg.LSTM(setting["units"], return_sequences=True)
    if setting["cell"] == "Bidirectional":
        layer = keras.layers.Bidirectional(layer)
    h = keras.layers.Dropout(setting["dropout"])(layer(h, mask=mask))
    model = keras.Model([x, mask], keras.layers.Dense(len(vocabulary.tag))(h))
    optimizer = getattr(keras.optimizers, setting["optimizer"])(setting["rate"], global_clipnorm=setting["clip"])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    model.compile(optimizer, loss, steps_per_execution=20)
    return model
