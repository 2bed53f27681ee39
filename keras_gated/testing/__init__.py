"""`check_cell`: the laws that hold for every cell, for a cell of your own.

Hides how each law is checked: the equations eagerly, one step at a time; the layer by a few compiled programs.
"""

from __future__ import annotations

import contextlib
import inspect

import numpy as np

from keras_gated.cells.recurrent import Recurrent, RecurrentCell
from keras_gated.keras_internals import names_unchanged
from keras_gated.testing.deviation import DTYPE, broken
from keras_gated.testing.equations import D, check_equations
from keras_gated.testing.layer import check_layer, step_by_step

UNITS, SEED = 3, 11

__all__ = ["check_cell"]


def check_cell(
    cell: RecurrentCell | Recurrent | type[RecurrentCell] | type[Recurrent], compiled: bool = True, seed: int = SEED
) -> None:
    """Holds all laws against a cell: its equations against their derivatives, its layer against the equations.

    What is checked is a copy with random weights, in float64 on TensorFlow; the cell itself stays as it was.  The laws,
    in this order, as the error names the first that is broken:

    - configuration, layer: from_config(get_config()) makes an equal cell; a layer class names it as cell_class;
    - pure, examples, precision: the functions of the equations give the same for the same, row by row, in the dtype of
      what they receive;
    - total: total_gradient adds to d_states the paths between states of one step (not on JAX);
    - transpose, slope, linear: step_gradient and weight_gradient are the derivative of step, by automatic
      differentiation and by central differences; step_gradient is linear in d_states;
    - retained, retaining gate: they mean what the contract says;
    - sequence: over several steps gradients are those of automatic differentiation;

    and of its layer, with masks and initial states:

    - values: it runs the equations, and a masked step leaves the states as they were;
    - masks: a masked step equals a missing one, what x holds there changes nothing, and it receives no gradient;
    - pieces, batch, reversal: two pieces equal one run; the examples of a batch do not see each other; go_backwards on
      reversed input is the forward run;
    - gradient, second order: with dropout, the gradients are those of keras.layers.RNN(cell);
    - half precision: the equations are evaluated in float32;
    - saving: a saved model loads.

    Args:
        cell: a cell or a layer of ours or derived from `keras_gated.cells`, as an object or as a class, which is then
            made with 3 units.  A few units suffice: of large arrays only some numbers are varied.
        compiled: whether the layer runs its compiled programs (TensorFlow: four, about ten seconds) or does the same
            step by step, in about three.
        seed: of the random numbers.

    Raises:
        AssertionError: for the first broken law, with the line of the contract, the deviation and its place.
        ValueError: for what is no such cell, and for a class that needs more arguments.
    """
    cell, rng = _cell(cell), np.random.default_rng(seed)
    with names_unchanged():
        copy = _copy(cell, rng)
        check_equations(copy, rng)
        with contextlib.nullcontext() if compiled else step_by_step():
            check_layer(copy, rng)


def _cell(given):
    kind = given if isinstance(given, type) else type(given)
    if issubclass(kind, Recurrent) and kind is not Recurrent:
        return _cell(given.cell_class if kind is given else given.cell)
    if not issubclass(kind, RecurrentCell) or kind.equations is None:
        raise ValueError(
            f"check_cell expects a RecurrentCell with equations, or its layer, received {given!r}. Derive yours from "
            "keras_gated.cells.RecurrentCell and set `equations`."
        )
    if kind is not given:
        return given
    try:
        return given(UNITS)
    except TypeError as error:
        raise ValueError(
            f"check_cell makes {given.__name__}({UNITS}), which fails: {_first_line(error)} Give it a cell with all "
            "its arguments instead of the class."
        ) from error


def _copy(cell, rng):
    """A cell of the same configuration, without dropout, with random weights."""
    kind, config = type(cell), cell.get_config()
    missing = [name for name in inspect.signature(kind).parameters if name not in config]
    if missing:
        raise broken(cell, "configuration", f"get_config leaves out {', '.join(missing)}.")
    again = kind.from_config(config).get_config()
    different = [name for name in config if config[name] != again.get(name)]
    if different:
        raise broken(cell, "configuration", f"{', '.join(different)} of the copy differ from those of the cell.")
    if getattr(cell.layer_class, "cell_class", None) is not kind:
        raise broken(cell, "layer", f"none does. Derive one from Recurrent, with cell_class = {kind.__name__}.")
    copy = kind.from_config({**config, "dtype": DTYPE, "dropout": 0.0, "recurrent_dropout": 0.0})
    copy.build((None, D))
    copy.set_weights([0.6 * rng.normal(size=w.shape) for w in copy.get_weights()])
    return copy


def _first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
