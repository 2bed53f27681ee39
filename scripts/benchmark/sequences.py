"""An encoder-decoder that all contenders compute, with equal weights, and the loops over tokens that users write.

Axes: B batch, T time, V vocabulary, N units, K width of the beam.
"""

from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
from benchmark.plan import WIDTH

import keras_gated as kg

START, END = 1, 2


class Writer(NamedTuple):
    """One way to train it and to write with it.

    Functions without arguments: `train`, a training step with SGD, returns the loss before it; `greedy` and `beam`
    write T tokens for each of B sources, and return them (B, T), without what follows the end token.
    """

    train: Callable
    greedy: Callable
    beam: Callable


class Sequences:
    """One batch of sources and targets without padding, and our model: LSTMs of N units, one layer each."""

    def __init__(self, shape):
        self.shape = B, T, V, N = shape
        rng = np.random.default_rng(0)
        self.source = rng.integers(3, V, (B, T)).astype("int32")
        written = rng.integers(3, V, (B, T - 1)).astype("int32")
        ends = np.full((B, 1), START, "int32"), written, np.full((B, 1), END, "int32")
        self.target = np.concatenate(ends, axis=1)
        shapes = [w.shape for w in self.ours().get_weights()]
        self.weights = [rng.normal(size=shape, scale=2 * N**-0.5) for shape in shapes]
        self.weights[-1][END] -= 6  # hardly any sequence ends before T tokens: all contenders write as many

    def ours(self):
        *_, V, N = self.shape
        model = kg.Seq2Seq(V, V, N, cell="lstm")
        model.compile(keras.optimizers.SGD(0.1), metrics=[])
        if hasattr(self, "weights"):
            model.set_weights(self.weights)
        return model

    def by_layer(self):
        """Arrays of each layer, its gates as Keras has them; logits of what is never written have a bias of -1e9."""
        embedded, lstm, embedded_target, lstm_target, (kernel, bias) = np.split(
            np.array(self.weights, object), np.cumsum([1, 3, 1, 3])
        )
        lowered = bias - 1e9 * np.isin(np.arange(len(bias)), (0, START))
        return {
            "encoder_embedding": list(embedded),
            "encoder_lstm": list(lstm),
            "decoder_embedding": list(embedded_target),
            "decoder_lstm": list(lstm_target),
            "logits": [kernel, lowered],
        }


def greedy(step, state, rows, length):
    """step(tokens, state) -> log p (rows, V), state."""
    token, ended, written = np.full(rows, START), np.zeros(rows, bool), []
    while len(written) < length and not ended.all():
        log_p, state = step(token, state)
        token = np.where(ended, 0, log_p.argmax(axis=1))
        ended |= token == END
        written.append(token)
    return _filled(np.stack(written, axis=1), length)


def beam(step, follow, state, rows, length):
    """The same search as `keras_gated.decoding.beam_search`; follow(state, rows) picks and repeats rows of a state."""
    state = follow(state, np.repeat(np.arange(rows), WIDTH))
    token, sums = np.full(rows * WIDTH, START), np.tile([0.0] + [-np.inf] * (WIDTH - 1), (rows, 1))
    tokens, finished, best = np.zeros((rows, WIDTH, 0), int), np.zeros((rows, length), int), np.full(rows, -np.inf)
    each = np.arange(rows)[:, None]
    for _ in range(length):
        log_p, state = step(token, state)
        V = log_p.shape[1]
        sums = (sums[..., None] + log_p.reshape(rows, WIDTH, V)).reshape(rows, -1)
        index = np.argsort(-sums, axis=1, kind="stable")[:, : 2 * WIDTH]
        sums, parent, new = sums[each, index], index // V, index % V
        tokens = np.concatenate([tokens[each, parent], new[..., None]], axis=2)
        ends = new == END
        for b, k in np.argwhere(ends[:, :WIDTH]):
            if sums[b, k] > best[b]:
                best[b], finished[b] = sums[b, k], _filled(tokens[b, k], length)
        kept = np.argsort(ends, axis=1, kind="stable")[:, :WIDTH]  # those that go on, the likeliest first
        sums, parent, tokens = sums[each, kept], parent[each, kept], tokens[each, kept]
        token = new[each, kept].ravel()
        state = follow(state, (parent + WIDTH * each).ravel())
        if np.all(sums[:, 0] <= best):
            break
    for b in np.flatnonzero(sums[:, 0] > best):
        finished[b] = _filled(tokens[b, 0], length)
    return finished


def _filled(tokens, length):
    return np.pad(tokens, [(0, 0)] * (tokens.ndim - 1) + [(0, length - tokens.shape[-1])])
