"""The roles of a cell's weights, and how many arguments its functions take by position."""

from typing import NamedTuple


class Matrix(NamedTuple):
    """A weight that multiplies rows: the equations call it as a function, s -> s M.

    `rows` is the width of s: the name of a state or a size.  Where it is the first state, h, recurrent dropout acts
    on s.  `columns` are gates, for whose pre-activations the product is, or a size.  Matrices that name the same
    variable are its columns, in the order in which they are declared.
    """

    rows: str
    columns: tuple[str, ...] | str
    variable: str = "recurrent_kernel"


class Vector(NamedTuple):
    """A weight that the equations see as an array (n,): a peephole, a gain, a bias.

    `width` is a size, a state or gates.  `variable="bias"` stores it as the second row of the bias; else it has a
    variable of its own, named like the letter, which starts from `initializer`.
    """

    width: tuple[str, ...] | str
    variable: str | None = None
    initializer: str = "zeros"


class RetainingGate(NamedTuple):
    """The gate whose bias decides how long the memory lasts."""

    gate: str
    sign: int  # 1: a larger bias retains more; -1: a smaller one
    option: str | None = None  # the cell's argument for where that bias starts


POSITIONAL = {"step": 2, "step_gradient": 4, "weight_gradient": 4, "total_gradient": 3}
