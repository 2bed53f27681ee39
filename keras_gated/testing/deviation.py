"""What a law says when it is broken: which line of the contract, by how much, where."""

from typing import NamedTuple

import keras
import numpy as np
from keras import ops

PRECISE = keras.backend.backend() == "tensorflow"  # elsewhere Keras's operations compute in float32 at most
DTYPE, ROUNDING = ("float64", 0.0) if PRECISE else ("float32", 1e-4)

LAWS = {
    # Of the equations.
    "pure": "a function gives the same bits for the same arguments",
    "examples": "the rows of a batch do not see each other",
    "precision": "of arrays in float32 come arrays in float32",
    "total": "total_gradient adds to d_states the paths between the states of one step, and nothing else",
    "transpose": "step_gradient and weight_gradient are the derivative of step, by automatic differentiation",
    "slope": "step_gradient and weight_gradient are the derivative of step, by central differences",
    "linear": "step_gradient is linear in d_states",
    "sequence": "over several steps the gradients are those of automatic differentiation through all of them",
    "retained": "with the other gates held fixed, a step multiplies its memory by `retained`",
    "retaining gate": "a larger bias of retaining_gate retains more for a sign of 1, less for -1",
    # Of the cell and its layer.
    "configuration": "from_config(get_config()) makes an equal cell",
    "layer": "a layer names the cell as its cell_class",
    "values": "the layer runs the equations; a masked step leaves the states as they were",
    "masks": "a masked step equals a missing one, and what x holds there changes nothing",
    "pieces": "running in two pieces equals running once",
    "batch": "the examples of a batch do not see each other",
    "reversal": "go_backwards on the reversed input is the forward run",
    "gradient": "the gradient of the layer is the autodiff gradient of keras.layers.RNN(cell), dropout on",
    "second order": "so is the gradient of a gradient",
    "half precision": "half precision is for storage: the equations are evaluated in float32",
    "saving": "a saved model loads with the same configuration, weights and outputs",
}


class Line(NamedTuple):
    """One line of the contract: arrays that must be equal."""

    name: str
    received: object
    expected: object


def broken(cell, law, what):
    """The error of a broken law."""
    return AssertionError(f"{type(cell).__name__} breaks the law {law!r}, {LAWS[law]}: {what}")


def compare(cell, law, lines, expected_is, tolerance):
    """Raises for the first line that is off, relative to the largest number that is expected in any of them.  Tolerance
    0 means bit for bit.  A line that others are computed from stands before them."""
    lines = [line._replace(received=array(line.received), expected=array(line.expected)) for line in lines]
    for line in lines:
        if line.received.shape != line.expected.shape:
            shapes = f"of shape {line.received.shape}, expected {line.expected.shape}, {expected_is}"
            raise broken(cell, law, f"{line.name} is {shapes}.")
    allowed = max(tolerance, ROUNDING) if tolerance else 0
    allowed *= max((np.abs(line.expected).max(initial=0) for line in lines), default=0)
    for line in lines:
        size, at = _largest(line)
        if size > allowed:
            received, expected = line.received[at], line.expected[at]
            raise broken(
                cell,
                law,
                f"{line.name} is {received:.6g} at {list(map(int, at))}, expected {expected:.6g}, {expected_is}. "
                f"It is {size:.2g} off, where {allowed:.1g} is allowed.",
            )


def _largest(line):
    """The largest deviation, and where it is; one that is not finite in one place alone counts as inf."""
    a, b = line.received.astype("float64"), line.expected.astype("float64")
    if not a.size:
        return 0.0, ()
    with np.errstate(invalid="ignore"):
        off = np.where((a == b) | np.isnan(a) & np.isnan(b), 0, np.abs(a - b))
    off = np.where(np.isnan(off), np.inf, off)
    at = np.unravel_index(off.argmax(), off.shape)
    return float(off[at]), at


def array(tensor):
    """In float32 at least, as NumPy knows no bfloat16."""
    if isinstance(tensor, np.ndarray):
        return tensor
    name = keras.backend.standardize_dtype(tensor.dtype)
    return ops.convert_to_numpy(ops.cast(tensor, "float32") if name in ("float16", "bfloat16") else tensor)
