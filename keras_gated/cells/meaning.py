"""What the states and the gates of a cell mean: of ours by their equations, of Keras's by the table below.

Hides where each library keeps its gates.  They are the chapter's: in a GRU z writes, h = (1 - z) h₋ + z h̃; for
keras.layers.GRU, whose z keeps, what is read as z is 1 minus Keras's.

Axes: R rows, N units, S all states of the cell side by side.
"""

from collections.abc import Callable
from typing import NamedTuple

import keras
from keras import ops

from keras_gated.cells.recurrent import RecurrentCell
from keras_gated.engine.precision import arithmetic_dtype
from keras_gated.engine.roles import RetainingGate


class Meaning(NamedTuple):
    """Of one kind of cell."""

    states: tuple[str, ...]  # h first
    memory: str  # the state that carries memory
    blocks: tuple[str, ...]  # of the recurrent kernel, in the order of memory; empty where they are not known
    gates: tuple[str, ...]  # those that can be read
    read: Callable | None  # x (R, D), states before (R, S) -> {gate: (R, N)}, and the factor by which memory is kept
    retaining_gate: RetainingGate | None
    remembers_open: bool = True  # whether memory is kept where that gate, as it is read, is open


def meaning_of(cell):
    """`Meaning` of any cell; of one that is not known its first state, h, alone."""
    if isinstance(cell, RecurrentCell):
        return _of_ours(cell)
    kind = next((kind for kind in KERAS if isinstance(cell, kind)), None)
    return KERAS[kind](cell) if kind else Meaning(("h",), "h", (), (), None, None)


def _of_ours(cell):
    equations = cell.equations
    gates = tuple(gate for gate in equations.gates if gate in equations.saved)
    read = (lambda x, states: _read_ours(cell, x, states)) if gates or equations.retained else None
    return Meaning(tuple(equations.states), equations.memory, equations.gates, gates, read, equations.retaining_gate)


def _read_ours(cell, x, states):
    equations, sizes, dtype = cell.equations, cell.sizes, arithmetic_dtype(x.dtype)
    x, states = ops.cast(x, dtype), ops.cast(states, dtype)
    weights = {name: ops.cast(w, dtype) for name, w in cell.tensors().items()}
    p = ops.split(ops.matmul(x, weights["W"]) + weights["b"], len(equations.gates), axis=-1)
    named = equations.forward_weights(weights, sizes)
    _, saved = equations.call("step", p, split_states(states, cell.widths.values()), weights=named)
    saved = equations.named_saved(*saved)
    gates = {gate: getattr(saved, gate) for gate in equations.gates if gate in equations.saved}
    return gates, equations.retained(saved) if equations.retained else None


def split_states(states, widths):
    """(R, S) -> one array for each state."""
    ends, end = [], 0
    for width in widths:
        end += width
        ends.append(end)
    return ops.split(states, ends[:-1], axis=-1) if len(ends) > 1 else [states]


def _lstm(cell):
    def read(x, states):
        i, f, _, o = _of_keras(cell, 4, x, states)
        return {"i": i, "f": f, "o": o}, f

    return Meaning(("h", "c"), "c", ("i", "f", "c", "o"), ("i", "f", "o"), read, RetainingGate("f", 1))


def _gru(cell):
    def read(x, states):
        kept, r, _ = _of_keras(cell, 3, x, states)
        return {"z": 1 - kept, "r": r}, kept

    # A larger bias of Keras's z keeps more; what is read as z is then nearer to 0.
    return Meaning(("h",), "h", ("z", "r", "h"), ("z", "r"), read, RetainingGate("z", 1), remembers_open=False)


def _simple_rnn(cell):
    return Meaning(("h",), "h", ("h",), (), None, None)


KERAS = {keras.layers.LSTMCell: _lstm, keras.layers.GRUCell: _gru, keras.layers.SimpleRNNCell: _simple_rnn}


def _of_keras(cell, blocks, x, states):
    """σ(x W + h₋ U + b) of every block of a cell of Keras."""
    dtype = arithmetic_dtype(x.dtype)
    x, h_prev = ops.cast(x, dtype), ops.cast(states, dtype)[:, : cell.units]
    a = ops.matmul(x, cell.kernel) + ops.matmul(h_prev, cell.recurrent_kernel)
    if cell.use_bias:
        a = a + ops.sum(ops.reshape(cell.bias, (-1, blocks * cell.units)), axis=0)
    return ops.split(cell.recurrent_activation(a), blocks, axis=-1)
