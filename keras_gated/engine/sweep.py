"""Sweeps through time on TensorFlow: the recurrence forward, and Algorithm rnn-bptt backward.

Hidden here: gradients of either order, reversal, lanes.  A caller sees one differentiable function of tensors,
`sweep`; a cell is only its `Equations` (equations.py).

How it runs.  The batch is cut into lanes (lane.py), compiled programs (program.py) that TensorFlow runs side by side.

Axes: B batch, T time, D features, N units, k gates.
"""

import functools
import os
import uuid
from typing import NamedTuple

import tensorflow as tf

from keras_gated.engine.compilation import backward, forward, once
from keras_gated.engine.compilation import programs as programs
from keras_gated.engine.contract import loop
from keras_gated.keras_internals import in_compiled_program

SMALLEST_BATCH = 8  # below, a second lane costs more than it saves,
SMALLEST_INFERENCE = 12 << 20  # or in inference for fewer multiplications than these
FILLED = 32  # short batches that are filled up to a size that is compiled: together they cost about one compilation


class Options(NamedTuple):
    """What is fixed when a sweep is traced."""

    equations: tuple  # the cell's `Equations`
    go_backwards: bool  # read x from its end; all else is in the order of processing
    features: int  # D
    units: int  # N
    sequences: bool  # hand out the outputs of all times, not only the final states
    probed: bool  # whether there is a probe
    save: bool  # keep what the backward sweep needs; without it a gradient costs one more forward sweep
    traits: tuple = ()  # dtype and which masks there are: set by `sweep`, so that each has its own function


class Masks(NamedTuple):
    """What a sweep treats as constant, in the order of processing; None where there is none."""

    valid: tf.Tensor | None  # (B, T) bool: False leaves the state as it was
    shown: tf.Tensor | None  # (B, T) bool: False makes the output 0
    x: tf.Tensor | None  # (B, D) dropout of the input
    h: tf.Tensor | None  # (B, N) dropout of h in the recurrent products


def sweep(options, x, states, weights, masks, probe=None):
    """Runs a cell over x (B, T, D).

    Args:
        options: `Options`.
        x: (B, T, D).
        states: the initial states, one (B, N) each.
        weights: W (D, kN), b (kN,), U (N, kN) and, where the cell has one, b_u (kN,).
        masks: `Masks`.
        probe: None or zeros (B, T, S), in the order of x: see `watched` in equations.py.

    Returns:
        The outputs, (B, T, N) or None, and the final states.  Differentiable in x, states and weights, and the
        gradient once more.
    """
    x = x if x.shape[1] else _with_a_step(x)
    weights = tuple(tf.convert_to_tensor(w) for w in weights)
    options = options._replace(traits=(x.dtype, *(mask is None for mask in masks)))
    run = _traced(options) if tf.executing_eagerly() else functools.partial(_differentiable, options)
    return run(x, tuple(states), weights, () if probe is None else (probe,), masks)


def _with_a_step(x):
    """x, whose length only the running graph knows: there it is checked."""
    expected = "A recurrent layer expects at least one time step, received x of shape"
    with tf.control_dependencies([tf.debugging.Assert(tf.shape(x)[1] > 0, [expected, tf.shape(x)])]):
        return tf.identity(x)


@functools.cache
def _traced(options):
    """An eager call runs as a graph of its own: its lanes run side by side, and no tape looks inside them."""
    return tf.function(functools.partial(_differentiable, options), autograph=False, reduce_retracing=True)


def _differentiable(options, x, states, weights, probes, masks):
    given = (x, states, weights, probes)

    @tf.custom_gradient
    def run(*tensors):
        rows = _rows(x)
        outputs, saved = _forward_lanes(options, tf.nest.pack_sequence_as(given, tensors), masks, rows)

        def gradient(*d_outputs):
            return _gradient(options, tf.nest.pack_sequence_as(given, tensors), masks, rows, saved, d_outputs)

        return outputs, gradient

    outputs = run(*tf.nest.flatten(given))
    return (outputs[0], outputs[1:]) if options.sequences else (None, outputs)


def _gradient(options, given, masks, rows, saved, d_outputs):
    """First order by the backward sweep; second order by autodiff of Keras's loop over the same equations."""
    # Each order is traced as a graph of its own, which may only hold tensors of that graph.
    masks, arguments = _copied((masks, (given, tuple(d_outputs))))
    options = options._replace(save=True)

    @tf.custom_gradient
    def run(*tensors):
        given, d_outputs = tf.nest.pack_sequence_as(arguments, tensors)
        kept = saved or _forward_lanes(options, given, masks, rows)[1]

        def gradient(*d_gradients):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                gradients = _first_order_by_loop(options, given, masks, d_outputs)
            d_gradients = d_gradients[: len(gradients)]  # of a probe there is no second order
            return tape.gradient(gradients, tensors, d_gradients, tf.UnconnectedGradients.ZERO)

        return _backward_lanes(options, given, masks, rows, kept, d_outputs), gradient

    return run(*tf.nest.flatten(arguments))


def _copied(tree):
    return tf.nest.map_structure(lambda a: None if a is None else tf.identity(a), tree)


def _first_order_by_loop(options, given, masks, d_outputs):
    x, states, weights, _ = given
    tensors = [x, *states, *weights]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        outputs, states = loop(
            lambda x_t, states: options.equations.advance(x_t, states, weights, masks.x, masks.h),
            x,
            states,
            masks.valid,
            masks.shown,
            go_backwards=options.go_backwards,
            sequences=options.sequences,
        )
        results = [*([outputs] if options.sequences else []), *states]
    return tape.gradient(results, tensors, d_outputs, tf.UnconnectedGradients.ZERO)


# Lanes.


class _Lane(NamedTuple):
    """Rows of the batch.  Lanes have equal numbers of rows, so that one program does for all: those that two have in
    common are `skipped` in the gradient and the outputs of the second."""

    rows: slice
    skipped: tf.Tensor | None = None

    def cut(self, tree):
        return tf.nest.map_structure(lambda a: None if a is None else a[self.rows], tree)


class _Lanes(tuple):
    """All lanes of a batch; where they have more rows than the batch, it is filled up with zeros."""

    rows = None  # of the filled up batch, where it may be filled up

    def filled(self, tree):
        if self.rows is None:
            return tree
        tensors = [a for a in tf.nest.flatten(tree) if a is not None]
        spare = self.rows - tf.shape(tensors[0])[0]

        def fill():
            return [tf.pad(a, [[0, spare], *([0, 0] for _ in a.shape[1:])]) for a in tensors]

        full = iter(tf.cond(spare > 0, fill, lambda: [tf.identity(a) for a in tensors]))
        return tf.nest.map_structure(lambda a: None if a is None else next(full), tree)


def _rows(x):
    """How many rows each lane gets, where only the running graph knows B; else None."""
    if x.shape[0] is not None or not _side_by_side():
        return None
    B = tf.shape(x)[0]
    return _rows_compiled(B, _own_rows(B))


def _own_rows(B):
    return tf.where(B < SMALLEST_BATCH, B, (B + 1) // 2)  # a small batch leaves the second lane empty


def _lanes(options, x, rows):
    """One lane for a small batch, else two, where two can run."""
    B = x.shape[0]
    if rows is None and (B is None or _small(options, x) or not _side_by_side()):
        return _Lanes([_Lane(slice(None))])
    if rows is None and B % 2 == 0:
        return _Lanes([_Lane(slice(None, B // 2)), _Lane(slice(B // 2, None))])
    if rows is None:
        return _Lanes([_Lane(slice(None, B // 2 + 1), tf.constant(0)), _Lane(slice(B // 2, None), tf.constant(1))])
    B = tf.shape(x)[0]
    begin = tf.where(rows < B, B - rows, rows)
    lanes = _Lanes([_Lane(slice(None, rows), tf.constant(0)), _Lane(slice(begin, None), tf.maximum(0, rows - begin))])
    lanes.rows = tf.where((rows != _own_rows(B)) & (rows >= B), 2 * rows, B)
    return lanes


def _small(options, x):
    B, T = x.shape[:2]
    of_a_step = B * len(options.equations.gates) * options.units * (options.features + options.units)
    return B < SMALLEST_BATCH or not options.save and T is not None and T * of_a_step < SMALLEST_INFERENCE


def _side_by_side():
    """Not on one core, nor inside a program of others."""
    return not in_compiled_program() and _cores() > 1


def _rows_compiled(B, own):
    """How many rows a lane gets: those of the largest lane so far where two such hold the batch, as that program
    exists, and a last, short batch is not worth another.  Batches that are often short are, and then get their own.

    What was seen is kept in a table of the running graph, as Python is not asked there how large a batch is.  It
    changes no number by more than rounding.
    """
    name = f"keras_gated_{uuid.uuid4().hex}"
    table = tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.int32, shared_name=name)
    keys, zero = tf.constant([0, 1], tf.int64), tf.constant(0)
    seen = tf.raw_ops.LookupTableFindV2(table_handle=table, keys=keys, default_value=zero)
    largest, filled = tf.unstack(seen, num=2)
    short = ((B + 1) // 2 <= largest) & (own != largest)
    rows = tf.where(short & (filled < FILLED), largest, own)
    seen = tf.stack([tf.maximum(largest, rows), filled + tf.cast(short, tf.int32)])
    tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=keys, values=seen)
    return rows


def _cores():
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(allowed, tf.config.threading.get_inter_op_parallelism_threads() or allowed)


def _join(lanes, parts, like, width):
    """The rows of all lanes, as many as `like` has, of its shape but for the last axis."""
    parts = [part[lane.skipped :] for lane, part in zip(lanes, parts, strict=True)]
    joined = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
    joined = joined if lanes.rows is None else joined[: tf.shape(like)[0]]
    joined.set_shape((*like.shape[:-1], width))
    return joined


def _in_order(options, x):
    """x or its gradient, between the order it came in and the order of processing."""
    return tf.reverse(x, [1]) if options.go_backwards else x


@once
def _forward_lanes(options, given, masks, rows):
    """-> outputs, and where it is wanted what each lane kept for the backward sweep."""
    x, states, weights, _ = given
    lanes = _lanes(options, x, rows)
    batch = lanes.filled((_in_order(options, x), states, masks))
    results = [forward(options, *lane.cut(batch[:2]), weights, lane.cut(batch[2])) for lane in lanes]
    outputs, saved = zip(*results, strict=True)
    like = [x] * options.sequences + list(states)
    outputs = [_join(lanes, parts, a, options.units) for *parts, a in zip(*outputs, like, strict=True)]
    return outputs, saved if options.save else None


@once
def _backward_lanes(options, given, masks, rows, saved, d_outputs):
    x, states, weights, probes = given
    lanes = _lanes(options, x, rows)
    batch = lanes.filled((_in_order(options, x), masks, d_outputs))
    results = [
        backward(options, x, weights, masks, kept, d_outputs, lane.skipped)
        for lane, kept in zip(lanes, saved, strict=True)
        for x, masks, d_outputs in [lane.cut(batch)]
    ]
    d_sequences, d_states, d_weights = zip(*results, strict=True)
    d_sequences, d_states = (
        [_join(lanes, parts, a, a.shape[-1]) for *parts, a in zip(*d_rows, tensors, strict=True)]
        for d_rows, tensors in ((d_sequences, (x, *probes)), (d_states, states))
    )
    dx, *d_probes = [_in_order(options, d) for d in d_sequences]
    d_weights = [tf.cast(tf.add_n(parts), w.dtype) for *parts, w in zip(*d_weights, weights, strict=True)]
    return [dx, *d_states, *d_weights, *d_probes]
