"""How much of the error reaches each time step, as it is (TensorFlow): the loss of a model, taken apart by steps.

Hides how the loss of one batch is evaluated without changing the model.

Axes: B batch, T time, N units, S all states of the cell side by side, k gates.
"""

from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_gated.cells.meaning import meaning_of
from keras_gated.gradients.jacobians import recurrent_kernel
from keras_gated.gradients.perturbed import perturbed, states
from keras_gated.gradients.trajectory import (
    find,
    mean_of_valid,
    output_columns,
    side_by_side,
    step_of,
    tapped,
    trajectory,
    unchanged,
)

TERMS = 1 << 24  # numbers of the terms of eq. rnn-loss-grad that are held at a time


class TimeStepNorms(NamedTuple):
    """Total gradients of every time step: means over the examples that have it."""

    dh: np.ndarray  # (T,) ‖∂L/∂h_t‖
    dc: np.ndarray | None  # (T,) ‖∂L/∂c_t‖ of the state that carries memory, through h_t too; None where that is h


class LossTerms(NamedTuple):
    """The double sum of eq. rnn-loss-grad."""

    norm: np.ndarray  # (T, T): [t, k] is that of the term of L_t by way of step k, 0 for k > t
    total: np.ndarray  # (N, kN) the sum of all terms, ∂L/∂W_h


def time_step_norms(model: keras.Model, x: Any, y: Any, layer: keras.layers.RNN | str) -> TimeStepNorms:
    """How much of the loss reaches each time step: the total ‖∂L/∂h_t‖ and ‖∂L/∂c_t‖, through the recurrence.

    Args:
        model: a compiled model; it is run as in training, dropout on, and stays as it was.
        x, y: one batch of its inputs and targets.
        layer: a keras.layers.RNN inside the model: the object, its label in `recurrent_layers`, or its name.

    Returns:
        `TimeStepNorms`, in the order of x; of stacked cells those of the uppermost.

    Raises:
        ValueError: where there is not exactly one such layer or call of it, and for a loop that is not understood.
    """
    signal = error_signal(model, x, y, layer)
    h, memory = uppermost(find(model, layer))
    of = {name: mean_of_valid(norms, signal.valid) for name, norms in signal.norms.items()}
    return TimeStepNorms(of[h], None if memory == h else of[memory])


def uppermost(layer):
    """The names in `ErrorSignal.norms` of h and of the state that carries memory; of stacked cells the uppermost's."""
    cells = getattr(layer.cell, "cells", [layer.cell])
    meaning = meaning_of(cells[-1])
    stack = f"{cells[-1].name}/" if len(cells) > 1 else ""
    return stack + meaning.states[0], stack + meaning.memory


class ErrorSignal(NamedTuple):
    """Total gradients of every time step of every example, in the order of x."""

    loss: float
    norms: dict[str, np.ndarray]  # state, as `perturbed.states` calls it: (B, T) ‖∂L/∂state_t‖
    valid: np.ndarray  # (B, T) bool


def error_signal(model, x, y, layer):
    """`ErrorSignal`; arguments and errors are those of `time_step_norms`."""
    import tensorflow as tf

    layer, held = find(model, layer), []
    names = states(layer)
    if names is None:
        raise ValueError(
            f"time_step_norms expects SimpleRNN, LSTM, GRU or keras.layers.RNN(cell), received {layer.name!r}, a "
            f"{type(layer).__name__} with a loop of its own."
        )

    def attach(sequences, mask):
        B, T = sequences.shape[:2]
        zeros = tf.zeros((B, T, len(names)), "float64" if sequences.dtype == tf.float64 else "float32")
        held.append((zeros, np.ones((B, T), bool) if mask is None else ops.convert_to_numpy(mask).reshape(B, T) > 0))
        tape.watch(zeros)
        return zeros

    with tf.GradientTape(watch_accessed_variables=False) as tape, perturbed(layer, attach):
        loss = _loss(model, x, y, training=True)
    ((zeros, valid),) = _one_call(model, layer, held)
    norms = tape.gradient(loss, zeros, unconnected_gradients="zero").numpy().astype(np.float64)
    return ErrorSignal(float(loss), dict(zip(names, np.moveaxis(norms, -1, 0), strict=True)), valid)


def loss_gradient_terms(model: keras.Model, x: Any, y: Any, layer: keras.layers.RNN | str) -> LossTerms:
    """Which lag contributes how much to the gradient: the terms of eq. rnn-loss-grad.

    The term of t and k is ∂L_t/∂h_t · ∂h_t/∂h_k · ∂h_k/∂W_h, summed over the batch, with the whole state in place of
    h and the recurrent kernel for W_h.  L_t is what the loss takes directly from the layer's output (or the state
    that it hands out) at step t: all of it at the last step, without return_sequences.

    Args:
        model, x, y, layer: as in `time_step_norms`; the model is run with dropout off.

    Returns:
        `LossTerms`, in the order of processing.

    Raises:
        ValueError: where there is not exactly one such layer or call of it, and for a cell without recurrent_kernel.
    """
    import tensorflow as tf

    layer, calls = find(model, layer), []
    kernel = recurrent_kernel(layer)

    def note(inner_loop, sequences, initial_state, mask, training=False):
        last, outputs, states = inner_loop(sequences, initial_state, mask, training=training)
        watched = keras.tree.map_structure(tf.identity, (last, outputs, list(states)))
        tape.watch(keras.tree.flatten(watched))
        calls.append(((sequences, mask, initial_state), watched))
        return watched

    with tf.GradientTape(watch_accessed_variables=False) as tape, tapped(layer, note):
        loss = _loss(model, x, y, training=False)
    (((sequences, mask, initial_state), watched),) = _one_call(model, layer, calls)
    d_last, d_outputs, d_states = tape.gradient(loss, watched, unconnected_gradients="zero")
    given = trajectory(layer, ops.convert_to_numpy(sequences), keras.tree.flatten(mask)[0], initial_state)
    direct, h = np.zeros(given.states[:, 1:].shape), output_columns(layer)
    direct[:, -1, h] = d_last
    if layer.return_sequences:
        direct[:, :, h] += d_outputs
    if layer.zero_output_for_mask:
        direct *= given.valid[..., None]
    direct[:, -1] += side_by_side(d_states)
    return _terms(layer, given, direct, kernel)


def _terms(layer, given, direct, kernel):
    """`LossTerms` of the gradients (B, T, S) that arrive at each state directly.

    From the last step to the first goes delta (T, B, S): row t is ∂L_t/∂h_t · ∂h_t/∂h_k.
    """
    import tensorflow as tf

    step, dtype, U = step_of(layer), given.states.dtype, kernel.value
    B, T, S = direct.shape

    @tf.function(input_signature=[tf.TensorSpec(s, dtype) for s in ((B, None), (B, S), (None, B, S))])
    def transported(x, states, delta):
        with tf.GradientTape(watch_accessed_variables=False, persistent=True) as tape:
            tape.watch([U, states])
            loss = tf.einsum("bs,tbs->t", step(x, states), delta)
        return tape.jacobian(loss, U), tape.jacobian(loss, states)

    norm, total, delta = np.zeros((T, T)), np.zeros(U.shape), np.zeros((T, B, S))
    at_once = max(1, TERMS // int(np.prod(U.shape)))
    for k in reversed(range(T)):
        delta[k], valid = direct[:, k], given.valid[:, k, None]
        for i in range(k, T, at_once):
            some = slice(i, i + at_once)
            here = (delta[some] * valid).astype(dtype)
            terms, before = (a.numpy().astype(np.float64) for a in transported(given.x[:, k], given.states[:, k], here))
            norm[some, k] = np.sqrt(np.sum(terms**2, axis=(1, 2)))
            total += terms.sum(axis=0)
            delta[some] = np.where(valid, before, delta[some])
    return LossTerms(norm, total)


def _loss(model, x, y, training):
    """The loss of a batch, as in training but unscaled, the model left as it was."""
    if not model.compiled:
        raise ValueError(f"Expected a compiled model, received {model.name!r}. Compile it with the loss to measure.")
    tensors = keras.tree.map_structure(ops.convert_to_tensor, (x, y))
    with unchanged(model):
        y_pred = model(tensors[0], training=training)
        return model.compute_loss(x=tensors[0], y=tensors[1], y_pred=y_pred, training=training)


def _one_call(model, layer, calls):
    if len(calls) != 1:
        raise ValueError(
            f"Expected the model {model.name!r} to call its layer {layer.name!r} once, received {len(calls)} calls. "
            "Use a layer for each."
        )
    return calls
