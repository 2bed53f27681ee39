"""Which precision equations are evaluated in."""

import keras
from keras import ops


def arithmetic_dtype(dtype):
    """Half precision is for storage and transport: equations are evaluated in float32 at least."""
    name = keras.backend.standardize_dtype(dtype)
    return "float32" if name in ("float16", "bfloat16") else name


def norm(d, axes=1):
    """(B, ...) -> (B, 1), in float32 at least; squares are taken in float64, where they can be represented.  Likewise
    over what comes behind more axes: (B, T, ...) -> (B, T, 1)."""
    squares = ops.square(ops.cast(d, "float64"))
    sums = ops.sum(squares, axis=tuple(range(axes, len(d.shape))))
    return ops.cast(ops.sqrt(sums), arithmetic_dtype(d.dtype))[..., None]
