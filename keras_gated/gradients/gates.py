"""What the gates of a recurrent layer do, step by step.

Hides how gates are read for all steps at once.  What the gates of a cell are is in cells/meaning.py.

Axes: B batch, T time, N units.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from numpy.typing import ArrayLike

from keras_gated.cells.meaning import meaning_of
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
    """The names of the gates that can be read of a layer's cell; none for a cell that is not known."""
    return meaning_of(layer.cell).gates


def retention_time(
    layer: keras.layers.RNN, x: ArrayLike, mask: ArrayLike | None = None, initial_state: Any = None
) -> np.ndarray:
    """For how many steps each unit retains what it holds: -1 / ⟨ln f⟩, over all steps and examples.

    Along the cell state the error shrinks by f a step (eq. rnn-lstm-cec), by the factor e in this time.  f is the
    forget gate of an LSTM, 1 - z of a GRU, and of any other cell what its equations call `retained`.  In a layer with
    f = 0.5 it is 1.44, with f = 0.99 it is 99.5.

    Args:
        layer, x, mask, initial_state: as in `gate_activity`.

    Returns:
        (N,), in steps; inf where f is 1.

    Raises:
        ValueError: for a layer without such a factor.
    """
    return retention_of(gates_on(layer, x, mask, initial_state))


class Gates(NamedTuple):
    """The gates of a layer on one batch, in the order of processing."""

    values: dict  # gate: (B, T, N)
    retained: np.ndarray | None  # (B, T, N) the factor by which a step keeps its memory
    valid: np.ndarray  # (B, T) bool


def gates(layer, x, mask=None, initial_state=None):
    """`Gates` of tensors, also while a graph is made; None for a layer without gates that are known."""
    read = meaning_of(layer.cell).read
    if read is None:
        return None
    x, states, valid = states_on(layer, x, mask, initial_state)
    B, T, D = *ops.shape(x)[:2], x.shape[2]
    rows = ops.reshape(x, (B * T, D)), ops.reshape(states[:, :-1], (B * T, states.shape[2]))
    values, retained = read(*rows)
    values, retained = keras.tree.map_structure(
        lambda a: None if a is None else ops.reshape(a, (B, T, a.shape[1])), (values, retained)
    )
    return Gates(values, retained, ops.ones((B, T), "bool") if valid is None else valid)


def gates_on(layer, x, mask, initial_state):
    x, mask = checked(layer, np.asarray(x), mask)
    found = gates(layer, x, None if mask.all() else mask, initial_state)
    if found is None:
        kind = type(layer.cell)
        raise ValueError(
            f"Expected a layer with gates that are known, such as LSTM or GRU of keras_gated or keras.layers, received "
            f"one of {kind.__module__}.{kind.__name__}."
        )
    return keras.tree.map_structure(lambda a: None if a is None else ops.convert_to_numpy(a), found)


def activity_of(gates):
    """{gate: `GateStatistics`} of `Gates`."""
    return {gate: _statistics(values, gates.valid) for gate, values in gates.values.items()}


def retention_of(gates):
    """(N,) of `Gates`, see `retention_time`."""
    if gates.retained is None:
        raise ValueError("Expected a layer whose equations say what a step retains, received one without `retained`.")
    kept = gates.retained[gates.valid].astype(np.float64)
    with np.errstate(divide="ignore"):
        return 1 / np.abs(np.log(kept).mean(axis=0))


def _statistics(values, valid):
    """Over examples that have the step, and units: (B, T, N), (B, T) -> (T,) each."""
    values = values.astype(np.float64)
    mean = mean_of_valid(values.mean(axis=-1), valid)
    variance = mean_of_valid(((values - mean[:, None]) ** 2).mean(axis=-1), valid)
    low, high = (mean_of_valid(share.mean(axis=-1), valid) for share in (values < LOW, values > HIGH))
    return GateStatistics(mean, np.sqrt(variance), low, high)
