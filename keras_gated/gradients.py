"""Measurements of the gradient's journey through time.

Every function takes arrays and returns arrays; nothing is written, printed or changed.  They measure any
keras.layers.RNN: ours, SimpleRNN / LSTM / GRU of Keras, RNN(cell), a half of a Bidirectional.

A layer is measured on its own input: `state_jacobian_norms(layer, x, mask)`.  For a layer inside a model,
`layer_input(model, x, layer)` finds that input, with its mask and initial state, where the layer is given as an
object or by name:

    state_jacobian_norms(*layer_input(model, x, "lstm"))

Steps are in the order of processing.  Padded steps count in no mean; where no example of the batch has a step,
the result is NaN.  Axes: B batch, T time, N units, k gates.
"""

from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_gated.recurrence import RecurrentCell
from keras_gated.trajectory import (
    LayerInput,
    layer_input,
    recurrent_layers,
    trajectory,
)

__all__ = ["GateStatistics", "LayerInput", "gate_activity", "layer_input", "recurrent_layers", "retention_time"]

LOW, HIGH = 0.05, 0.95  # a gate beyond them is as good as shut or open, and its own gradient as good as gone


class GateStatistics(NamedTuple):
    """One gate over time, over the units and the examples that have the step."""

    mean: np.ndarray  # (T,)
    std: np.ndarray  # (T,)
    low: np.ndarray  # (T,) share below 0.05
    high: np.ndarray  # (T,) share above 0.95


def gate_activity(layer, x, mask=None, initial_state=None):
    """What the gates of a layer do on x, step by step.

    Gates are the chapter's: i, f, o of an LSTM; z, r of a GRU, where z writes, h = (1 - z) h₋ + z h̃.  For
    keras.layers.GRU, whose z keeps, that is 1 minus what Keras calls z.

    Args:
        layer: a keras.layers.RNN with gates.
        x: (B, T, D), the layer's input.
        mask: (B, T), False where a step is padding; or None.
        initial_state: as the layer takes it; by default that which it would start from.

    Returns:
        {gate: `GateStatistics`}.

    Raises:
        ValueError: for a layer without gates.
    """
    given = trajectory(layer, x, mask, initial_state)
    return {gate: _statistics(values, given.valid) for gate, values in _gates(layer, given).items()}


def retention_time(layer, x, mask=None, initial_state=None):
    """For how many steps each unit retains what it holds: -1 / ⟨ln f⟩, over all steps and examples.

    Along the cell state the error shrinks by f a step (eq. rnn-lstm-cec), by the factor e in this time.  f is the
    forget gate of an LSTM, and 1 - z of a GRU.  In a layer with f = 0.5 it is 1.44, with f = 0.99 it is 99.5.

    Args:
        layer, x, mask, initial_state: as in `gate_activity`.

    Returns:
        (N,), in steps; inf where f is 1.

    Raises:
        ValueError: for a layer that has neither gate.
    """
    given = trajectory(layer, x, mask, initial_state)
    f = _retained(layer, given)
    with np.errstate(divide="ignore"):
        return 1 / np.abs(np.log(f[given.valid].astype(np.float64)).mean(axis=0))


def _retained(layer, given):
    gates = _gates(layer, given)
    if "f" not in gates and "z" not in gates:
        raise _no_gates(layer.cell, "a forget gate f or an update gate z")
    return gates["f"] if "f" in gates else 1 - gates["z"]


def _gates(layer, given):
    """{gate: (B, T, N)}."""
    rows = given.x.reshape(-1, given.x.shape[-1]), given.states[:, :-1].reshape(-1, given.states.shape[-1])
    gates = _gates_of_cell(layer.cell, *map(ops.convert_to_tensor, rows))
    return {gate: ops.convert_to_numpy(g).reshape(*given.valid.shape, -1) for gate, g in gates.items()}


def _gates_of_cell(cell, x, states):
    """Over many steps at once: x (R, D), the states before (R, S) -> {gate: (R, N)}."""
    if isinstance(cell, RecurrentCell):
        equations, weights = cell.equations, cell.tensors()
        W, b, *_ = weights
        p = ops.split(ops.matmul(x, W) + b, len(equations.gates), axis=-1)
        states = ops.split(states, len(equations.states), axis=-1)
        _, saved = equations.step(p, states, *equations.recurrent(weights))
        saved = dict(zip(equations.saved, saved, strict=True))
        gates = {gate: saved[gate] for gate in equations.gates if gate in saved}
    elif isinstance(cell, keras.layers.LSTMCell):
        i, f, _, o = _of_keras(cell, 4, x, states)
        gates = {"i": i, "f": f, "o": o}
    elif isinstance(cell, keras.layers.GRUCell):
        kept, r, _ = _of_keras(cell, 3, x, states)
        gates = {"z": 1 - kept, "r": r}
    else:
        gates = {}
    if not gates:
        raise _no_gates(cell, "gates that are known")
    return gates


def _of_keras(cell, blocks, x, states):
    """σ(x W + h₋ U + b) of every block of a cell of Keras."""
    h_prev = states[:, : cell.units]
    a = ops.matmul(x, cell.kernel) + ops.matmul(h_prev, cell.recurrent_kernel)
    if cell.use_bias:
        a = a + ops.sum(ops.reshape(cell.bias, (-1, blocks * cell.units)), axis=0)
    return ops.split(cell.recurrent_activation(a), blocks, axis=-1)


def _no_gates(cell, expected):
    return ValueError(
        f"Expected a layer with {expected}, LSTM or GRU of keras_gated or keras.layers, received one of "
        f"{type(cell).__module__}.{type(cell).__name__}."
    )


def _statistics(values, valid):
    """Over examples that have the step, and units: (B, T, N), (B, T) -> (T,) each."""
    values = values.astype(np.float64)
    mean = _mean(values.mean(axis=-1), valid)
    variance = _mean(((values - mean[:, None]) ** 2).mean(axis=-1), valid)
    low, high = (_mean(share.mean(axis=-1), valid) for share in (values < LOW, values > HIGH))
    return GateStatistics(mean, np.sqrt(variance), low, high)


def _mean(values, valid):
    """Over axis 0, of what is valid only; NaN where nothing is."""
    count = valid.sum(axis=0)
    total = np.where(valid, values, 0).sum(axis=0)
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
