"""Shards: the rows of a batch in two halves that run side by side (TensorFlow).

Hides when two halves are faster than one whole, and how a batch that does not divide evenly is cut.  Both shards have
the same number of rows, so that one program serves both; that number follows from the size of the batch alone.
"""

import os
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_gated.engine import segments
from keras_gated.engine.compilation import traced_once
from keras_gated.engine.scan import Gradients
from keras_gated.keras_internals import in_compiled_program

SMALLEST_BATCH = 8  # of known size: below, a second shard costs more than it saves,
SMALLEST_INFERENCE = 12 << 20  # or in inference for fewer multiplications than these
EXACT = 16  # rows of a shard: from here on they are rounded up, to 8 numbers between a power of two and the next


class _Shard(NamedTuple):
    """Rows of the batch.  The first `skipped` ones belong to the other shard: they count in no output or gradient."""

    rows: slice
    skipped: tf.Tensor | None = None

    def cut(self, tree):
        return tf.nest.map_structure(lambda a: None if a is None else a[self.rows], tree)


def shards_of(options, x):
    """The shards of a batch: one where it is small or nothing else can run beside it, else two."""
    B = x.shape[0]
    if not _side_by_side() or B is not None and _is_small(options, x):
        return [_Shard(slice(None))]
    B = tf.shape(x)[0] if B is None else B
    rows = rows_of_shard(B)
    if isinstance(B, int) and 2 * rows == B:
        return [_Shard(slice(None, rows)), _Shard(slice(rows, None))]
    return [
        _Shard(slice(None, rows), tf.constant(0)),
        _Shard(slice(B - rows, None), tf.convert_to_tensor(2 * rows - B)),
    ]


def rows_of_shard(B):
    """Half the batch, rounded up to one of few sizes: a number, or a tensor where B is one.

    Few sizes keep few programs where the batch size changes; at most an eighth is computed twice, for usual sizes less
    than 5 %.  Of a small batch each shard has all rows, and the second counts for nothing: the sums are those of one
    shard, whether the size was known or not.
    """
    half = (B + 1) // 2
    if isinstance(B, int):
        half = B if B < SMALLEST_BATCH else half
    else:
        half = tf.where(B < SMALLEST_BATCH, B, half)
    octaves = np.arange(27)
    bounds, finer = EXACT << octaves, 1 << octaves
    if isinstance(B, int):
        step = 1 + int(finer[half >= bounds].sum())
    else:
        step = 1 + tf.reduce_sum(tf.where(half >= bounds.astype("int32"), finer.astype("int32"), 0))
    return -(-half // step) * step


def _is_small(options, x):
    B, T = x.shape[:2]
    of_a_step = B * options.gates_width * (options.features + options.width("units"))
    return B < SMALLEST_BATCH or not options.save and T is not None and T * of_a_step < SMALLEST_INFERENCE


def _side_by_side():
    """Not on one core, nor inside an outer jit."""
    return not in_compiled_program() and _cores() > 1


def _cores():
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(allowed, tf.config.threading.get_inter_op_parallelism_threads() or allowed)


def _join(shards, parts, like, width):
    """The rows of all shards, of the shape of `like` except for the last axis."""
    parts = [part[shard.skipped :] for shard, part in zip(shards, parts, strict=True)]
    joined = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
    joined.set_shape((*like.shape[:-1], width))
    return joined


@traced_once
def forward(options, x, states, weights, masks):
    """-> outputs, and where it is wanted what each shard kept for the backward sweep."""
    shards = shards_of(options, x)
    batch = x, states, masks
    results = []
    for shard in shards:
        x_rows, state_rows, mask_rows = shard.cut(batch)
        results.append(segments.forward(options, x_rows, state_rows, weights, mask_rows))
    outputs, saved = zip(*results, strict=True)
    like = [(x, options.state_widths[0])] * options.sequences + [(s, s.shape[-1]) for s in states]
    outputs = [_join(shards, parts, *shape) for *parts, shape in zip(*outputs, like, strict=True)]
    return outputs, saved if options.save else None


@traced_once
def backward(static, x, states, weights, masks, saved, d_outputs):
    """-> `Gradients`, those of the weights as they are stored."""
    options, perturbed = static
    shards = shards_of(options, x)
    batch = x, masks, d_outputs
    results = []
    for shard, kept in zip(shards, saved, strict=True):
        x_rows, mask_rows, d_rows = shard.cut(batch)
        results.append(segments.backward(*static, x_rows, weights, mask_rows, kept, d_rows, shard.skipped))
    of_x, of_states, of_weights, of_perturbation = zip(*results, strict=True)
    summed = {letter: tf.add_n([d[letter] for d in of_weights]) for letter in of_weights[0]}
    stored = options.equations.joined(summed, join=lambda parts: tf.concat(parts, 1))  # XLA would compile long for it
    return Gradients(
        x=_join(shards, of_x, x, options.features),
        states=tuple(_join(shards, parts, s, s.shape[-1]) for *parts, s in zip(*of_states, states, strict=True)),
        weights={name: tf.cast(d, weights[name].dtype) for name, d in stored.items()},
        perturbation=tuple(_join(shards, parts, x, len(states)) for parts in zip(*of_perturbation, strict=True)),
    )
