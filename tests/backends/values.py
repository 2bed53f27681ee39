"""Outputs and gradients of every cell on whatever backend Keras runs on, from numbers that do not depend on it.

Run as a script it writes them to a file.
"""

import sys

import keras
import numpy as np
from keras import ops

import keras_gated as kg

B, T, D, N = 3, 5, 2, 3
LAYERS = {
    **{f"rnn_{f}": (kg.SimpleRNN, {"activation": f}) for f in ("tanh", "relu", "sigmoid", "linear")},
    "lstm": (kg.LSTM, {}),
    "gru": (kg.GRU, {}),
    "gru_reset_after": (kg.GRU, {"reset_after": True}),
}
OTHER_ACTIVATIONS = ("rnn_relu", "rnn_sigmoid", "rnn_linear")
OPTIONS = {
    "plain": {},
    "backwards": {"go_backwards": True, "zero_output_for_mask": True},
    "unrolled": {"unroll": True},
}


def make(name, **options):
    """A layer with random, distinct weights."""
    kind, own = LAYERS[name]
    layer = kind(N, return_sequences=True, return_state=True, **own, **options)
    layer.build((None, None, D))
    rng = np.random.default_rng(1)
    layer.set_weights([rng.normal(size=w.shape) * 0.6 for w in layer.weights])
    return layer


def batch(layer):
    """-> x, initial states, mask."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(B, T, D)).astype("float32")
    states = [rng.normal(size=(B, N)).astype("float32") for _ in layer.cell.equations.states]
    mask = rng.random((B, T)) > 0.4
    mask[0], mask[1, 0], mask[1, 1:3] = False, False, True
    return x, states, mask


def loss(outputs):
    total = 0.0
    for k, y in enumerate(outputs):
        weight = np.cos(np.arange(np.prod(y.shape)) + k).reshape(tuple(y.shape)).astype("float32")
        total = total + ops.sum(ops.sin(1.3 * y) * ops.convert_to_tensor(weight))
    return total


def values_and_gradients(layer, x, states, mask):
    """-> outputs and final states; gradients of `loss` in x, the initial states and the weights.  NumPy."""
    run = {"tensorflow": _on_tensorflow, "jax": _on_jax, "torch": _on_torch}[keras.backend.backend()]
    outputs, gradients = run(layer, x, states, None if mask is None else ops.convert_to_tensor(mask))
    return [ops.convert_to_numpy(a) for a in outputs], [ops.convert_to_numpy(a) for a in gradients]


def _on_tensorflow(layer, x, states, mask):
    import tensorflow as tf

    x, states = tf.constant(x), [tf.constant(s) for s in states]
    with tf.GradientTape() as tape:
        tape.watch([x, *states])
        outputs = layer(x, initial_state=states, mask=mask, training=True)
        total = loss(outputs)
    return outputs, tape.gradient(total, [x, *states, *layer.trainable_variables])


def _on_jax(layer, x, states, mask):
    import jax

    def total(x, states, weights):
        fixed = [v.value for v in layer.non_trainable_variables]
        outputs, _ = layer.stateless_call(weights, fixed, x, initial_state=states, mask=mask, training=True)
        return loss(outputs), outputs

    weights = [v.value for v in layer.trainable_variables]
    (dx, d_states, d_weights), outputs = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(x, states, weights)
    return outputs, [dx, *d_states, *d_weights]


def _on_torch(layer, x, states, mask):
    x, *states = leaves = [ops.convert_to_tensor(a).requires_grad_() for a in (x, *states)]
    outputs = layer(x, initial_state=states, mask=mask, training=True)
    loss(outputs).backward()
    gradients = [a.grad for a in (*leaves, *(v.value for v in layer.trainable_variables))]
    return [y.detach() for y in outputs], gradients


def all_values():
    """-> {name/options/masked/k: array}."""
    found = {}
    for name in LAYERS:
        for label, options in OPTIONS.items():
            for masked in (False, True):
                if name in OTHER_ACTIVATIONS and not (masked and label == "plain"):
                    continue
                layer = make(name, **options)
                x, states, mask = batch(layer)
                outputs, gradients = values_and_gradients(layer, x, states, mask if masked else None)
                for k, a in enumerate([*outputs, *gradients]):
                    found[f"{name}/{label}/{masked}/{k}"] = a
    return found


if __name__ == "__main__":
    np.savez(sys.argv[1], **all_values())
