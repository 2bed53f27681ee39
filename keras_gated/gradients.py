"""Measurements of the gradient's journey through time.

Every function takes arrays and returns arrays; nothing is written, printed or changed.  They measure any
keras.layers.RNN: ours, SimpleRNN / LSTM / GRU of Keras, RNN(cell), a half of a Bidirectional.

A layer is measured on its own input: `state_jacobian_norms(layer, x, mask)`.  For a layer inside a model,
`layer_input(model, x, layer)` finds that input, with its mask and initial state, where the layer is given as an
object or by name:

    state_jacobian_norms(*layer_input(model, x, "lstm"))

Steps are in the order of processing, but those of `time_step_norms` in the order of x.  Padded steps count in no
mean; where no example of the batch has a step, the result is NaN.  Axes: B batch, T time, N units, k gates.
"""

from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_gated.chain import product_norms
from keras_gated.gates import GateStatistics, gate_activity, gates_on, retention_time
from keras_gated.trajectory import (
    LayerInput,
    find,
    layer_input,
    mean_of_valid,
    output_columns,
    recurrent_layers,
    side_by_side,
    step_jacobians,
    step_of,
    tapped,
    trajectory,
    unchanged,
)

__all__ = [
    "GateStatistics",
    "LayerInput",
    "LossTerms",
    "Spectrum",
    "TimeStepNorms",
    "cell_state_jacobian",
    "gate_activity",
    "jacobian_bound",
    "layer_input",
    "loss_gradient_terms",
    "recurrent_layers",
    "retention_time",
    "spectrum",
    "state_jacobian_norms",
    "time_step_norms",
]

STEEPEST = {"tanh": 1.0, "relu": 1.0, "sigmoid": 0.25, "linear": 1.0, "softsign": 1.0, "elu": 1.0}  # γ = max |f'|
TERMS = 1 << 24  # numbers of the terms of eq. rnn-loss-grad that are held at a time


class TimeStepNorms(NamedTuple):
    """Total gradients of every time step: means over the examples that have it."""

    dh: np.ndarray  # (T,) ‖∂L/∂h_t‖
    dc: np.ndarray | None  # (T,) ‖∂L/∂c_t‖, the way through h_t included; None where there is no c


class Spectrum(NamedTuple):
    """Of each block of the recurrent kernel, in the order of memory: h; i f c o; or z r h."""

    sigma_max: np.ndarray  # (k,) largest singular value
    radius: np.ndarray  # (k,) spectral radius


class LossTerms(NamedTuple):
    """The double sum of eq. rnn-loss-grad."""

    norm: np.ndarray  # (T, T): [t, k] is that of the term of L_t by way of step k, 0 for k > t
    total: np.ndarray  # (N, kN) the sum of all terms, ∂L/∂W_h


def time_step_norms(model, x, y, layer):
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
    import tensorflow as tf

    from keras_gated.probe import probed, states

    layer, held = find(model, layer), []
    names = states(layer)
    if names is None:
        raise ValueError(
            f"time_step_norms expects SimpleRNN, LSTM, GRU or keras.layers.RNN(cell), received {layer.name!r}, a "
            f"{type(layer).__name__} with a loop of its own."
        )

    def attach(sequences, mask):
        B, T = sequences.shape[:2]
        probe = tf.zeros((B, T, len(names)), "float64" if sequences.dtype == tf.float64 else "float32")
        held.append((probe, np.ones((B, T), bool) if mask is None else ops.convert_to_numpy(mask).reshape(B, T) > 0))
        tape.watch(probe)
        return probe

    with tf.GradientTape(watch_accessed_variables=False) as tape, probed(layer, attach):
        loss = _loss(model, x, y, training=True)
    ((probe, valid),) = _one_call(model, layer, held)
    norms = tape.gradient(loss, probe, unconnected_gradients="zero").numpy().astype(np.float64)
    of = {name.split("/")[-1]: mean_of_valid(norms[..., i], valid) for i, name in enumerate(names)}
    return TimeStepNorms(of["h"], of["c"] if names[-1].endswith("c") else None)


def state_jacobian_norms(layer, x, mask=None, initial_state=None):
    """How far a change of one hidden state is felt: ‖∂h_t/∂h_k‖₂ of all pairs of steps (eq. rnn-jacobian).

    The product of the Jacobians of the whole state, of which the rows and columns of h count: for an LSTM the change
    of h_k alone, carried on by h and c.

    Args:
        layer: a keras.layers.RNN that has weights (TensorFlow backend).
        x, mask, initial_state: as in `gate_activity`.

    Returns:
        (T, T): [t, k] is the largest singular value, 1 for k = t, 0 for k > t; the mean over the examples that have
        both steps.  Accurate to about 1e-7 (relative) up to 64 state numbers, to about 1e-5 above.
    """
    given, part = trajectory(layer, x, mask, initial_state), output_columns(layer)
    norms = np.concatenate([product_norms(J, part) for _, J in step_jacobians(layer, given)])
    mean = mean_of_valid(norms, given.valid[:, :, None] & given.valid[:, None, :])
    return np.tril(mean)


def jacobian_bound(layer, lag):
    """(γ σ_max(W_h))^lag, which ‖∂h_t/∂h_{t-lag}‖ of a simple RNN never exceeds (eq. rnn-jacobian-bound).

    Args:
        layer: SimpleRNN of keras_gated or keras.layers, or a keras.layers.RNN of their cells.
        lag: t - k, a number or an array; masked steps between k and t do not count.

    Returns:
        The bound, of the shape of lag.  γ is the steepest slope of the activation: 1 for tanh, 0.25 for sigmoid.

    Raises:
        ValueError: for gated cells, which have no such bound, and for an activation of unknown slope.
    """
    activation = getattr(layer.cell, "activation", None)
    name = activation if isinstance(activation, str) else getattr(activation, "__name__", repr(activation))
    if len(_blocks(layer)) > 1 or name not in STEEPEST:
        raise ValueError(
            f"jacobian_bound expects a SimpleRNN with an activation out of {', '.join(STEEPEST)}, received "
            f"{type(layer.cell).__name__} with {name!r}. state_jacobian_norms measures any layer."
        )
    with np.errstate(over="ignore"):
        return (STEEPEST[name] * spectrum(layer).sigma_max[0]) ** np.asarray(lag, np.float64)


def spectrum(layer):
    """Largest singular value and spectral radius of each block of the recurrent kernel.

    Below 1 / γ the first says that gradients of a simple RNN vanish; the second above 1, that they may explode.

    Args:
        layer: a keras.layers.RNN whose cell has a recurrent_kernel (N, kN).

    Returns:
        `Spectrum`.

    Raises:
        ValueError: for another cell.
    """
    blocks = _blocks(layer)
    sigma_max = np.linalg.svd(blocks, compute_uv=False)[:, 0]
    return Spectrum(sigma_max, np.abs(np.linalg.eigvals(blocks)).max(axis=-1))


def _blocks(layer):
    """(k, N, N) float64."""
    U = ops.convert_to_numpy(_recurrent_kernel(layer)).astype(np.float64)
    return np.stack(np.split(U, U.shape[1] // len(U), axis=1))


def _recurrent_kernel(layer):
    U = getattr(layer.cell, "recurrent_kernel", None)
    if U is None or len(U.shape) != 2 or U.shape[1] % U.shape[0]:
        raise ValueError(
            f"Expected a built layer whose cell has a recurrent_kernel (N, kN), received {layer.name!r} with a "
            f"{type(layer.cell).__name__}. Put stacked cells into layers of their own."
        )
    return U


def cell_state_jacobian(layer, x, mask=None, initial_state=None):
    """The diagonal of ∂c_t/∂c_{t-1}, the gates held fixed: f_t (eq. rnn-lstm-cec).

    Its product over a lag is what the constant error carousel leaves of the error.

    Args:
        layer: an LSTM of keras_gated or keras.layers, or a keras.layers.RNN of their cells.
        x, mask, initial_state: as in `gate_activity`.

    Returns:
        (B, T, N); 1 where a step is masked and c stays.

    Raises:
        ValueError: for a layer without a forget gate.
    """
    found = gates_on(layer, x, mask, initial_state)
    if "f" not in found.values:
        raise ValueError(
            f"cell_state_jacobian expects an LSTM, received {layer.name!r} with the gates "
            f"{', '.join(found.values)}. For what a GRU retains see retention_time."
        )
    return np.where(found.valid[..., None], found.values["f"], 1)


def loss_gradient_terms(model, x, y, layer):
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
    kernel = _recurrent_kernel(layer)

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
