"""The table of all cells, and small batches of random, distinct numbers for them."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import keras
import numpy as np
import reference
import tensorflow as tf

import keras_gated as kg

B, T, D, N = 3, 5, 2, 3


class Cell(NamedTuple):
    """One row of the table."""

    layer: Callable  # keyword options -> our layer
    reference: Callable  # the step in NumPy
    gates: int
    states: int


CELLS = {
    **{
        f"rnn_{f}": Cell(partial(kg.SimpleRNN, N, activation=f), reference.simple_rnn(f), 1, 1)
        for f in ("tanh", "relu", "sigmoid", "linear")
    },
    "lstm": Cell(partial(kg.LSTM, N), reference.lstm, 4, 2),
    "gru": Cell(partial(kg.GRU, N), reference.gru, 3, 1),
    "gru_reset_after": Cell(partial(kg.GRU, N, reset_after=True), reference.gru_reset_after, 3, 1),
}


class Batch(NamedTuple):
    """Inputs of a layer, float64."""

    x: np.ndarray  # (B, T, D)
    states: list  # (B, N) each
    mask: np.ndarray  # (B, T): holes, padding on either side, and a row of nothing else


def batch(cell, rng, size=B, length=T):
    mask = rng.random((size, length)) > 0.4
    mask[0] = False
    mask[1, 0] = mask[2, -1] = False
    mask[1, -1] = mask[2, 0] = True
    states = [rng.normal(size=(size, N)) for _ in range(cell.states)]
    return Batch(rng.normal(size=(size, length, D)), states, mask)


def build(layer, rng, features=D):
    """Builds the layer, and gives every weight random, distinct numbers."""
    if not layer.built:
        layer.build((None, None, features))
    layer.set_weights([rng.normal(size=w.shape) * 0.6 for w in layer.get_weights()])
    return layer


def make(cell, rng, **options):
    return build(cell.layer(**{"dtype": "float64", "return_sequences": True, "return_state": True, **options}), rng)


def loop_of(layer):
    """The same cell, weights included, in Keras's own loop."""
    config = layer.get_config()
    names = ("return_sequences", "return_state", "go_backwards", "zero_output_for_mask", "dtype")
    return keras.layers.RNN(layer.cell, **{name: config[name] for name in names})


def loss(outputs):
    """A loss in which every output has a weight of its own."""
    total = 0.0
    for k, y in enumerate(outputs):
        weight = np.cos(np.arange(np.prod(y.shape)) + k).reshape(y.shape)
        total += tf.reduce_sum(tf.sin(1.3 * y) * weight)
    return total


def values_and_gradients(run, layer, given, mask=None, training=True):
    """-> outputs and final states; gradients of `loss` in x, the initial states and the weights."""
    x, states = tf.constant(given.x), [tf.constant(s) for s in given.states]
    with tf.GradientTape() as tape:
        tape.watch([x, *states])
        outputs = run(x, initial_state=states, mask=mask, training=training)
        total = loss(outputs)
    return list(outputs), tape.gradient(total, [x, *states, *layer.trainable_variables])


def assert_close(received, expected, tolerance=1e-6):
    """Each array equal, relative to the largest entry of the expected one."""
    assert len(received) == len(expected)
    for a, b in zip(received, expected, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(initial=0), 1e-30))
