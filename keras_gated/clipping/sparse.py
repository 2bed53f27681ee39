"""The sparse gradients of embeddings: IndexedSlices of TensorFlow, in which a row may stand several times.

Hides the type, so that whoever computes with gradients treats dense and sparse ones alike.
"""

from collections.abc import Callable
from typing import Any

import keras


def is_sparse(gradient: Any) -> bool:
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return isinstance(gradient, tf.IndexedSlices)


def merged_values(gradient: Any) -> Any:
    """Its numbers, repeated rows added up."""
    return values(merged(gradient))


def values(gradient: Any) -> Any:
    return gradient.values if is_sparse(gradient) else gradient


def with_values(gradient: Any, function: Callable[[Any], Any]) -> Any:
    if not is_sparse(gradient):
        return function(gradient)
    return type(gradient)(function(gradient.values), gradient.indices, gradient.dense_shape)


def merged(gradient: Any) -> Any:
    """Of IndexedSlices: where an index is repeated, its first row is the sum and the others are 0."""
    if not is_sparse(gradient):
        return gradient
    import tensorflow as tf

    order = tf.argsort(gradient.indices, stable=True)
    indices, rows = tf.gather(gradient.indices, order), tf.gather(gradient.values, order)
    count = tf.shape(indices)[0]
    first = tf.concat([[True], indices[1:] != indices[:-1]], 0)[:count]
    row = tf.cumsum(tf.cast(first, tf.int32)) - 1
    sums = tf.gather(tf.math.unsorted_segment_sum(rows, row, count), row)
    first = tf.reshape(first, [count] + [1] * (rows.shape.rank - 1))
    return tf.IndexedSlices(tf.where(first, sums, tf.zeros_like(sums)), indices, gradient.dense_shape)
