"""What the gates of a recurrent layer do, step by step.

Hidden here: where each library keeps its gates.  They are the chapter's: i, f, o of an LSTM; z, r of a GRU, where z
writes, h = (1 - z) h₋ + z h̃.  For keras.layers.GRU, whose z keeps, that is 1 minus what Keras calls z.

Axes: B batch, T time, N units.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from numpy.typing import ArrayLike

from keras_gated.cells.recurrent import RecurrentCell
from keras_gated.engine.contract import arithmetic_dtype
from keras_gated.gradients.trajectory import checked, mean_of_valid, states_on

LOW, HIGH = 0.05, 0.95  # a gate beyond them is as good as shut or open, and its own gradient as good as gone


class GateStatistics(NamedTuple):
    """One gate over time, over the units and the examples that have the step."""

    mean: np.ndarray  # (T,)
    std: np.ndarray  # (T,)
    low: np.ndarray  # (T,) share below 0.05
    high: np.ndarray  # (T,) share above 0.95


def gate_activity(
    layer: keras.layers.RNN, x: ArrayLike, mask: ArrayLike | None = None, initial_state: Any = None
) -> dict[str, GateStatistics]:
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
    return activity_of(gates_on(layer, x, mask, initial_state))


def gate_names(layer):
    """The chapter's letters for the gates of a layer; none for a layer without gates that are known."""
    cell = layer.cell
    if isinstance(cell, RecurrentCell):
        return tuple(gate for gate in cell.equations.gates if gate in cell.equations.saved)
    known = {keras.layers.LSTMCell: ("i", "f", "o"), keras.layers.GRUCell: ("z", "r")}
    return next((names for kind, names in known.items() if isinstance(cell, kind)), ())


def retention_time(
    layer: keras.layers.RNN, x: ArrayLike, mask: ArrayLike | None = None, initial_state: Any = None
) -> np.ndarray:
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
    return retention_of(gates_on(layer, x, mask, initial_state))


class Gates(NamedTuple):
    """The gates of a layer on one batch, in the order of processing."""

    values: dict  # gate: (B, T, N)
    valid: np.ndarray  # (B, T) bool


def gates(layer, x, mask=None, initial_state=None):
    """`Gates` of tensors, also while a graph is made; None for a layer without gates that are known."""
    if not gate_names(layer):
        return None
    x, states, valid = states_on(layer, x, mask, initial_state)
    B, T, D = *ops.shape(x)[:2], x.shape[2]
    rows = ops.reshape(x, (B * T, D)), ops.reshape(states[:, :-1], (B * T, states.shape[2]))
    values = {gate: ops.reshape(a, (B, T, a.shape[1])) for gate, a in _gates_of_cell(layer.cell, *rows).items()}
    return Gates(values, ops.ones((B, T), "bool") if valid is None else valid)


def gates_on(layer, x, mask, initial_state):
    x, mask = checked(layer, np.asarray(x), mask)
    found = gates(layer, x, None if mask.all() else mask, initial_state)
    if found is None:
        kind = type(layer.cell)
        raise ValueError(
            f"Expected a layer with gates that are known, LSTM or GRU of keras_gated or keras.layers, received one of "
            f"{kind.__module__}.{kind.__name__}."
        )
    return keras.tree.map_structure(ops.convert_to_numpy, found)


def activity_of(gates):
    """{gate: `GateStatistics`} of `Gates`."""
    return {gate: _statistics(values, gates.valid) for gate, values in gates.values.items()}


def retention_of(gates):
    """(N,) of `Gates`, see `retention_time`."""
    f = gates.values["f"] if "f" in gates.values else 1 - gates.values["z"]
    with np.errstate(divide="ignore"):
        return 1 / np.abs(np.log(f[gates.valid].astype(np.float64)).mean(axis=0))


def _gates_of_cell(cell, x, states):
    """Over many steps at once: x (R, D), the states before (R, S) -> {gate: (R, N)}."""
    dtype = arithmetic_dtype(x.dtype)
    x, states = ops.cast(x, dtype), ops.cast(states, dtype)
    if isinstance(cell, RecurrentCell):
        equations, weights = cell.equations, [ops.cast(w, dtype) for w in cell.tensors()]
        W, b, *_ = weights
        p = ops.split(ops.matmul(x, W) + b, len(equations.gates), axis=-1)
        states = ops.split(states, len(equations.states), axis=-1)
        _, saved = equations.step(p, states, *equations.recurrent(weights))
        saved = dict(zip(equations.saved, saved, strict=True))
        gates = {gate: saved[gate] for gate in equations.gates if gate in saved}
    elif isinstance(cell, keras.layers.LSTMCell):
        i, f, _, o = _of_keras(cell, 4, x, states)
        gates = {"i": i, "f": f, "o": o}
    else:
        kept, r, _ = _of_keras(cell, 3, x, states)
        gates = {"z": 1 - kept, "r": r}
    return gates


def _of_keras(cell, blocks, x, states):
    """σ(x W + h₋ U + b) of every block of a cell of Keras."""
    h_prev = states[:, : cell.units]
    a = ops.matmul(x, cell.kernel) + ops.matmul(h_prev, cell.recurrent_kernel)
    if cell.use_bias:
        a = a + ops.sum(ops.reshape(cell.bias, (-1, blocks * cell.units)), axis=0)
    return ops.split(cell.recurrent_activation(a), blocks, axis=-1)


def _statistics(values, valid):
    """Over examples that have the step, and units: (B, T, N), (B, T) -> (T,) each."""
    values = values.astype(np.float64)
    mean = mean_of_valid(values.mean(axis=-1), valid)
    variance = mean_of_valid(((values - mean[:, None]) ** 2).mean(axis=-1), valid)
    low, high = (mean_of_valid(share.mean(axis=-1), valid) for share in (values < LOW, values > HIGH))
    return GateStatistics(mean, np.sqrt(variance), low, high)
