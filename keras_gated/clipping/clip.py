"""Clipping a list of gradients by their norm (eq. rnn-clip).

    g ← (τ / ‖g‖) g    if ‖g‖ > τ,    else g

Hides how the norm of numbers is computed whose squares are too large or too small for float32.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_gated.clipping.sparse import merged_values, values, with_values

LARGEST = float(np.finfo("float32").max)
TINY = float(np.finfo("float32").tiny)  # what is smaller is 0 in some kernels and not in others


def clip(gradients: Sequence[Any], max_norm: float, per_variable: bool = False) -> list[Any]:
    """The gradients by eq. rnn-clip with τ = max_norm; those within it bit for bit.

    A list of tensors (on TensorFlow also IndexedSlices whose indices differ), of any shapes, each returned in its
    dtype and computed in float32 at least.  An inf or NaN makes NaNs: of all gradients, or with per_variable of its
    own, as in Keras.
    """
    sizes = [_size(g) for g in gradients]
    if not per_variable:
        sizes = [_size_of_all(sizes)] * len(gradients)
    return [_shortened(g, size, max_norm) for g, size in zip(gradients, sizes, strict=True)]


def norm(gradient: Any) -> Any:
    """‖g‖ in float32, also of gradients whose squares would be 0 or inf; repeated rows are added up first."""
    s, r = _size(merged_values(gradient))
    return ops.cast(s * r, "float32")


def _size(gradient):
    """(s, r) with ‖g‖ = s r: both are representable for every finite g, and r is finite for no other."""
    g = precise(values(gradient))
    largest = ops.max(ops.abs(g), initial=0)
    s = ops.where(ops.isfinite(largest), ops.maximum(largest, TINY), 1.0)
    return s, ops.sqrt(ops.sum(ops.square(g / s)))


def _size_of_all(sizes):
    """(s, r) of several gradients as one, with r = NaN where one is not finite."""
    scales, relatives = (ops.stack(part) for part in zip(*sizes, strict=True))
    s = ops.max(scales)
    r = ops.sqrt(ops.sum(ops.square(scales / s * relatives)))
    return s, r + (r - r)


def _shortened(gradient, size, max_norm):
    s, r = size
    within = s * r <= max_norm
    # (g / s) (τ / r), not g τ / (s r): s r may be beyond the largest number, and τ / (s r) below the smallest.
    divisor, factor = ops.where(within, 1.0, s), ops.where(within, 1.0, max_norm / r)
    return with_values(gradient, lambda g: ops.cast(ops.cast(g, s.dtype) / divisor * factor, g.dtype))


def precise(values: Any) -> Any:
    """In float32, or float64 where they are."""
    return values if keras.backend.standardize_dtype(values.dtype) == "float64" else ops.cast(values, "float32")
