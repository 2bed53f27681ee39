"""The table of all cells, small batches of random, distinct numbers for them, and their gradients on any backend."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import keras
import numpy as np
import reference
from keras import ops

import keras_gated as kg

B, T, D, N = 3, 5, 2, 3
PRECISE = keras.backend.backend() == "tensorflow"  # elsewhere Keras's operations compute in float32 at most
DTYPE, ROUNDING = ("float64", 0) if PRECISE else ("float32", 1e-5)


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
    """Inputs of a layer, of DTYPE."""

    x: np.ndarray  # (B, T, D)
    states: list  # (B, N) each
    mask: np.ndarray  # (B, T): holes, padding on either side, and a row of nothing else


def batch(cell, rng, size=B, length=T):
    mask = rng.random((size, length)) > 0.4
    mask[0] = False
    mask[1, 0] = mask[2, -1] = False
    mask[1, -1] = mask[2, 0] = True
    states = [rng.normal(size=(size, N)).astype(DTYPE) for _ in range(cell.states)]
    return Batch(rng.normal(size=(size, length, D)).astype(DTYPE), states, mask)


def mask_for_keras(given):
    """given.mask, but none at the ends on JAX: before the first valid step Keras's loop puts out its state there."""
    at_the_ends = np.isin(np.arange(T), [0, T - 1]) & (keras.backend.backend() == "jax")
    return given.mask | at_the_ends


def build(layer, rng, features=D):
    """Builds the layer, and gives every weight random, distinct numbers."""
    if not layer.built:
        layer.build((None, None, features))
    layer.set_weights([rng.normal(size=w.shape) * 0.6 for w in layer.get_weights()])
    return layer


def make(cell, rng, **options):
    return build(cell.layer(**{"dtype": DTYPE, "return_sequences": True, "return_state": True, **options}), rng)


def loop_of(layer):
    """The same cell, weights included, in Keras's own loop."""
    config = layer.get_config()
    names = ("return_sequences", "return_state", "go_backwards", "zero_output_for_mask", "dtype")
    return keras.layers.RNN(layer.cell, **{name: config[name] for name in names})


def loss(outputs):
    """A loss in which every output has a weight of its own."""
    total = 0.0
    for k, y in enumerate(outputs):
        weight = np.cos(np.arange(np.prod(y.shape)) + k).reshape(tuple(y.shape))
        total = total + ops.sum(ops.sin(1.3 * y) * ops.cast(weight, y.dtype))
    return total


def gradients(function, tensors, variables=()):
    """-> gradients of function(*tensors)[0] in tensors and variables, differentiable once more; the rest of it."""
    return {"tensorflow": _on_tensorflow, "jax": _on_jax, "torch": _on_torch}[keras.backend.backend()](
        function, tensors, list(variables)
    )


def _on_tensorflow(function, tensors, variables):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(tensors)
        total, *rest = function(*tensors)
    return tape.gradient(total, [*tensors, *variables]), rest


def _on_jax(function, tensors, variables):
    import jax

    def total(tensors, values):
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            total, *rest = function(*tensors)
        return total, rest

    values = [v.value for v in variables]
    (of_tensors, of_values), rest = jax.grad(total, argnums=(0, 1), has_aux=True)(list(tensors), values)
    return [*of_tensors, *of_values], rest


def _on_torch(function, tensors, variables):
    import torch

    tensors = [t if t.requires_grad else t.clone().requires_grad_() for t in tensors]
    total, *rest = function(*tensors)
    return list(torch.autograd.grad(total, [*tensors, *(v.value for v in variables)], create_graph=True)), rest


def compiled(function, variables):
    """The function of tensors, fast where it is called again and again; `variables` may change in between."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function, autograph=False)
    if keras.backend.backend() == "torch":
        return function
    import jax

    @jax.jit
    def run(values, *tensors):
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return function(*tensors)

    return lambda *tensors: run([v.value for v in variables], *tensors)


def values_and_gradients(run, layer, given, mask=None, training=True):
    """-> outputs and final states; gradients of `loss` in x, the initial states and the weights."""

    def total(x, *states):
        outputs = run(x, initial_state=list(states), mask=mask, training=training)
        return loss(outputs), *outputs

    mask = None if mask is None else ops.convert_to_tensor(mask)
    tensors = [ops.convert_to_tensor(a) for a in (given.x, *given.states)]
    found, outputs = gradients(total, tensors, layer.trainable_variables)
    return outputs, found


def arrays(tensors):
    return [ops.convert_to_numpy(a) for a in tensors]


def assert_close(received, expected, tolerance=1e-6):
    """Each array equal, relative to the largest entry of the expected one; tolerance 0 means bit for bit."""
    assert len(received) == len(expected)
    tolerance = max(tolerance, ROUNDING) if tolerance else 0
    for a, b in zip(arrays(received), arrays(expected), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(initial=0), 1e-30))
