"""One module per cell: its equations, their transpose, and the layer.

For a cell of your own: `Equations` with `Matrix`, `Vector` and `RetainingGate`, then a `RecurrentCell` and a
`Recurrent`.  `keras_gated.testing.check_cell` holds the laws against it.
"""

from keras_gated.cells.recurrent import Recurrent, RecurrentCell
from keras_gated.engine.contract import Equations, sigmoid
from keras_gated.engine.roles import Matrix, RetainingGate, Vector

__all__ = ["Equations", "Matrix", "Recurrent", "RecurrentCell", "RetainingGate", "Vector", "sigmoid"]
