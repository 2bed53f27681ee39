"""The laws of a cell's layer: what the engine makes of the equations, with masks, in pieces, in half precision.

On TensorFlow all laws together compile four programs: inference, training forward and backward, and half precision.

Axes: B batch, T time, D features.
"""

import contextlib
import os
import tempfile
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_gated.testing.autodiff import gradients
from keras_gated.testing.deviation import DTYPE, Line, array, broken, compare
from keras_gated.testing.eager import forward
from keras_gated.testing.equations import weights_of

B, T, D = 4, 6, 2
SEED = [1, 2]  # of dropout: where it is the same, so are the masks
HALF = "mixed_bfloat16"
EXACT, AUTODIFF, ROUNDED = 1e-12, 1e-9, 1 / 64  # in half precision a number keeps 8 bits


class Batch(NamedTuple):
    x: np.ndarray  # (B, T, D)
    states: list
    mask: np.ndarray  # (B, T): holes, padding at either end, and a row of nothing else


def check_layer(cell, rng):
    """Raises AssertionError for the first law that the layer of a cell with weights breaks."""
    layer, given = layer_of(cell), random_batch(cell, rng)
    for law in (values, masks, pieces, batch, reversal, gradient, second_order, half_precision, saving):
        law(cell, layer, given)


def layer_of(cell, **changes):
    """A layer of the same cell with the same weights."""
    config = {**cell.get_config(), "dtype": DTYPE, "return_sequences": True, "return_state": True, **changes}
    layer = cell.layer_class.from_config({**config, "name": None})
    layer.build((None, None, cell.kernel.shape[0]))
    layer.cell.set_weights(cell.get_weights())
    return layer


def random_batch(cell, rng):
    mask = rng.random((B, T)) > 0.3
    mask[0], mask[1, 0], mask[2, -2:] = False, False, False
    mask[1, 1], mask[2, 0], mask[3] = True, True, [True, False, True, True, False, True]
    states = [rng.normal(size=(B, width)).astype(DTYPE) for width in cell.widths.values()]
    return Batch(rng.normal(size=(B, T, D)).astype(DTYPE), states, mask)


def _call(layer, given, **options):
    """Outputs and final states, as arrays."""
    return [array(a) for a in layer(given.x, initial_state=given.states, mask=given.mask, **options)]


def _lines(cell, received, expected, of="{}"):
    names = ["the outputs", *(f"the final state {state}" for state in cell.widths)]
    return [Line(of.format(name), a, b) for name, a, b in zip(names, received, expected, strict=True)]


def _by_equations(cell, given, dtype=DTYPE):
    """Outputs and final states, step by step."""
    x, mask = ([ops.convert_to_tensor(a[:, t]) for t in range(T)] for a in (given.x, given.mask[..., None]))
    weights = {name: ops.cast(w, dtype) for name, w in weights_of(cell).items()}
    x, states = [ops.cast(a, dtype) for a in x], [ops.cast(s, dtype) for s in given.states]
    steps = forward(cell.equations, cell.sizes, weights, x, states, mask)
    outputs = np.stack([array(after[0]) for _, _, after in steps], axis=1)
    seen = np.cumsum(given.mask, axis=1) > 0
    return [np.where(seen[..., None], outputs, 0), *(array(s) for s in steps[-1][2])]


def values(cell, layer, given):
    lines = _lines(cell, _call(layer, given), _by_equations(cell, given))
    compare(cell, "values", lines, "by the equations, step by step", EXACT)


def masks(cell, layer, given):
    expected = _call(layer, given)
    order = np.argsort(~given.mask, axis=1, kind="stable")  # the valid steps first
    x, mask = (np.take_along_axis(a, o, 1) for a, o in ((given.x, order[..., None]), (given.mask, order)))
    without = _call(layer, given._replace(x=x, mask=mask))
    compare(cell, "masks", _lines(cell, without, expected)[1:], "as with masked steps in between", EXACT)
    filled = _call(layer, given._replace(x=np.where(given.mask[..., None], given.x, np.nan)))
    compare(cell, "masks", _lines(cell, filled, expected, "with NaN at masked steps {}"), "as without", 0)


def pieces(cell, layer, given):
    whole, middle = _call(layer, given), T // 2
    first, *states = _call(layer, given._replace(x=given.x[:, :middle], mask=given.mask[:, :middle]))
    second, *states = _call(layer, Batch(given.x[:, middle:], states, given.mask[:, middle:]))
    seen = (np.cumsum(given.mask[:, middle:], axis=1) > 0)[..., None]  # before, the second has no output to repeat
    outputs = np.concatenate([first, np.where(seen, second, whole[0][:, middle:])], axis=1)
    compare(cell, "pieces", _lines(cell, [outputs, *states], whole), "as in one piece", EXACT)


def batch(cell, layer, given):
    expected = _call(layer, given)
    for n in range(B):
        other = Batch(*(keras.tree.map_structure(lambda a, n=n: np.roll(a, 1 - n, axis=0), list(given))))
        other.x[2:], other.states[0][2:] = 3, -1  # row n is now row 1, beside strangers
        rows = [a[1] for a in _call(layer, other)]
        lines = _lines(cell, rows, [a[n] for a in expected], f"{{}} of example {n}")
        compare(cell, "batch", lines, "as beside the others", EXACT)


def reversal(cell, layer, given):
    backward = layer_of(cell, go_backwards=True)
    flipped = given._replace(x=given.x[:, ::-1], mask=given.mask[:, ::-1])
    compare(cell, "reversal", _lines(cell, _call(backward, flipped), _call(layer, given)), "as forward", EXACT)


def _with_dropout(cell):
    """Our layer, and keras.layers.RNN of the same cell."""
    layer = layer_of(cell, dropout=0.3, recurrent_dropout=0.3, seed=1)
    return layer, keras.layers.RNN(layer.cell, return_sequences=True, return_state=True, dtype=DTYPE)


def _mask_for_keras(given):
    """given.mask, but none at the ends on JAX: before the first valid step Keras's loop puts out its state there."""
    return given.mask | np.isin(np.arange(T), [0, T - 1]) & (keras.backend.backend() == "jax")


def _loss_of(run, cell, given):
    """Of x and the initial states: a number to which every output and state contributes, and these."""
    mask = ops.convert_to_tensor(_mask_for_keras(given))

    def loss(x, *states):
        cell.seed_generator.state.assign(np.array(SEED, "uint32"))
        results = run(x, initial_state=list(states), mask=mask, training=True)
        total = 0.0
        for k, y in enumerate(results):
            weight = np.cos(np.arange(np.prod(y.shape)) + k).reshape(tuple(y.shape))
            total = total + ops.sum(ops.sin(1.3 * y) * ops.cast(weight, y.dtype))
        return total, *results

    return loss


@contextlib.contextmanager
def step_by_step():
    """TensorFlow traces and compiles nothing while this lasts; elsewhere it does so anyway."""
    if keras.backend.backend() != "tensorflow":
        yield
        return
    import tensorflow as tf

    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def _inputs(given):
    return [ops.convert_to_tensor(a) for a in (given.x, *given.states)]


def _gradient_lines(cell, received, expected, of="{}"):
    names = ["the gradient of x", *(f"the gradient of the initial state {state}" for state in cell.widths)]
    names += [f"the gradient of the weight {v.name}" for v in cell.trainable_variables]
    return [Line(of.format(name), a, b) for name, a, b in zip(names, received, expected, strict=True)]


def gradient(cell, layer, given):
    layer, loop = _with_dropout(cell)
    (received, outputs), (expected, outputs_of_loop) = (
        gradients(_loss_of(run, layer.cell, given), _inputs(given), layer.cell.trainable_variables)
        for run in (layer, loop)
    )
    compare(cell, "gradient", _lines(cell, outputs, outputs_of_loop), "by keras.layers.RNN(cell)", EXACT)
    compare(cell, "gradient", _gradient_lines(cell, received, expected), "by keras.layers.RNN(cell)", AUTODIFF)
    masked = ~_mask_for_keras(given)
    if np.any(array(received[0])[masked]):
        raise broken(cell, "masks", "a masked step of x receives a gradient.")
    filled = _inputs(given._replace(x=np.where(masked[..., None], np.nan, given.x).astype(DTYPE)))
    again, _ = gradients(_loss_of(layer, layer.cell, given), filled, layer.cell.trainable_variables)
    compare(cell, "masks", _gradient_lines(cell, again, received, "with NaN at masked steps {}"), "as without", 0)


def second_order(cell, layer, given):
    layer, loop = _with_dropout(cell)

    def of(run):
        loss = _loss_of(run, layer.cell, given)

        def penalty(*inputs):
            first, _ = gradients(loss, inputs, layer.cell.trainable_variables)
            return (sum(ops.sum(d**2) * (1 + k) for k, d in enumerate(first)),)

        return gradients(penalty, _inputs(given), layer.cell.trainable_variables)[0]

    with step_by_step():  # as a graph, it takes some twenty seconds to trace
        received, expected = of(layer), of(loop)
    compare(cell, "second order", _gradient_lines(cell, received, expected), "by keras.layers.RNN(cell)", AUTODIFF)


def half_precision(cell, layer, given):
    """What is computed is float32's answer to the rounded question, rounded: not an error per step."""
    half = layer_of(cell, dtype=HALF)
    rounded = lambda a: array(ops.cast(ops.convert_to_tensor(a), "bfloat16"))  # noqa: E731
    half.set_weights([rounded(w) for w in half.get_weights()])
    given = Batch(rounded(given.x), [rounded(s) for s in given.states], given.mask)
    x, *states = (ops.cast(ops.convert_to_tensor(a), "bfloat16") for a in (given.x, *given.states))
    outputs = half(x, initial_state=states, mask=given.mask)
    for a in outputs:
        if keras.backend.standardize_dtype(a.dtype) != "bfloat16":
            raise broken(cell, "half precision", f"under {HALF} the layer puts out {a.dtype}.")
    expected = [rounded(a) for a in _by_equations(half.cell, given, "float32")]
    compare(cell, "half precision", _lines(cell, map(array, outputs), expected), "in float32, rounded", ROUNDED)


def saving(cell, layer, given):
    model = keras.Sequential([keras.Input((None, D)), layer_of(cell, return_state=False)])
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        try:
            model.save(path)
            loaded = keras.models.load_model(path).layers[0]
        except Exception as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            advice = "Both classes need @keras.saving.register_keras_serializable and get_config all their arguments."
            raise broken(cell, "saving", f"{said} {advice}") from error
    if loaded.get_config() != model.layers[0].get_config():
        raise broken(cell, "saving", "the loaded layer has another configuration.")
    pairs = zip(model.layers[0].weights, loaded.weights, strict=True)
    compare(cell, "saving", [Line(f"the weight {a.name}", b, a) for a, b in pairs], "as it was saved", 0)
