"""Sweeps through time on TensorFlow: the recurrence forward, and Algorithm rnn-bptt backward.

Hidden here: loops, masks, dropout, reversal, lanes, chunks of time, compilation, precision.  A caller sees one
differentiable function of tensors, `sweep`; a cell is only its `Equations` (equations.py).

How it runs.  The batch is cut into lanes, one compiled program each, which TensorFlow runs side by side.  A
program walks over chunks of time small enough for the cache: one product x W for the chunk, then its steps;
backward its steps, then one product each for dW, dU and dx.  Neither x W nor da ever exists for all times.
Where T is unknown when the graph is made, a lane is one program of SPAN steps, run over one span of time after
the other, and compiled once for all lengths.

Axes: B batch, T time, D features, N units, k gates.  What is kept for the backward sweep is time-major, (T, B, N),
and the states have a row in front for the initial one: row t of the states holds h_{t-1}, row t of the gates what
made h_t of it.  All else is (B, T, n), as it came.
"""

import functools
import os
from typing import NamedTuple

import tensorflow as tf
from keras import ops
from tensorflow.python.eager import forwardprop_util
from tensorflow.python.framework import ops as graphs
from tensorflow.python.ops import control_flow_util

from keras_gated.equations import arithmetic_dtype, loop

CHUNK_BYTES = 1 << 19  # gates of one chunk of time: they stay in the L2 cache between product and steps
SMALLEST_BATCH = 8  # below, a second lane costs more than it saves
SPAN = 64  # steps of one compiled program where T is unknown


class Options(NamedTuple):
    """What is fixed when a sweep is traced."""

    equations: tuple  # the cell's `Equations`
    go_backwards: bool  # read x from its end; all else is in the order of processing
    features: int  # D
    units: int  # N
    sequences: bool  # hand out the outputs of all times, not only the final states
    save: bool  # keep what the backward sweep needs; without it a gradient costs one more forward sweep
    traits: tuple = ()  # dtype and which masks there are: set by `sweep`, so that each has its own function


class Masks(NamedTuple):
    """What a sweep treats as constant, in the order of processing; None where there is none."""

    valid: tf.Tensor | None  # (B, T) bool: False leaves the state as it was
    shown: tf.Tensor | None  # (B, T) bool: False makes the output 0
    x: tf.Tensor | None  # (B, D) dropout of the input
    h: tf.Tensor | None  # (B, N) dropout of h in the recurrent products


def sweep(options, x, states, weights, masks):
    """Runs a cell over x (B, T, D).

    Args:
        options: `Options`.
        x: (B, T, D).
        states: the initial states, one (B, N) each.
        weights: W (D, kN), b (kN,), U (N, kN) and, where the cell has one, b_u (kN,).
        masks: `Masks`.

    Returns:
        The outputs, (B, T, N) or None, and the final states.  Differentiable in x, states and weights, and the
        gradient once more.
    """
    x = x if x.shape[1] else _with_a_step(x)
    weights = tuple(tf.convert_to_tensor(w) for w in weights)
    options = options._replace(traits=(x.dtype, *(mask is None for mask in masks)))
    run = _traced(options) if tf.executing_eagerly() else functools.partial(_differentiable, options)
    return run(x, tuple(states), weights, masks)


def _with_a_step(x):
    """x, whose length only the running graph knows: there it is checked."""
    expected = "A recurrent layer expects at least one time step, received x of shape"
    with tf.control_dependencies([tf.debugging.Assert(tf.shape(x)[1] > 0, [expected, tf.shape(x)])]):
        return tf.identity(x)


def in_forward_mode(tensors):
    """Whether a ForwardAccumulator watches: what it needs, tf.custom_gradient cannot give."""
    return bool(forwardprop_util.pack_tangents([tf.convert_to_tensor(t) for t in tensors]).indices)


@functools.cache
def _traced(options):
    """An eager call runs as a graph of its own: its lanes run side by side, and no tape looks inside them."""
    return tf.function(functools.partial(_differentiable, options), autograph=False, reduce_retracing=True)


def _differentiable(options, x, states, weights, masks):
    given = (x, states, weights)

    @tf.custom_gradient
    def run(*tensors):
        outputs, saved = _forward_lanes(options, tf.nest.pack_sequence_as(given, tensors), masks)

        def gradient(*d_outputs):
            return _gradient(options, tf.nest.pack_sequence_as(given, tensors), masks, saved, d_outputs)

        return outputs, gradient

    outputs = run(*tf.nest.flatten(given))
    return (outputs[0], outputs[1:]) if options.sequences else (None, outputs)


def _gradient(options, given, masks, saved, d_outputs):
    """First order by the backward sweep; second order by autodiff of Keras's loop over the same equations."""
    # Each order is traced as a graph of its own, which may only hold tensors of that graph.
    masks, arguments = _copied((masks, (given, tuple(d_outputs))))

    @tf.custom_gradient
    def run(*tensors):
        given, d_outputs = tf.nest.pack_sequence_as(arguments, tensors)
        kept = saved or _forward_lanes(options._replace(save=True), given, masks)[1]

        def gradient(*d_gradients):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                gradients = _first_order_by_loop(options, given, masks, d_outputs)
            return tape.gradient(gradients, tensors, d_gradients, tf.UnconnectedGradients.ZERO)

        return _backward_lanes(options, given, masks, kept, d_outputs), gradient

    return run(*tf.nest.flatten(arguments))


def _copied(tree):
    return tf.nest.map_structure(lambda a: None if a is None else tf.identity(a), tree)


def _first_order_by_loop(options, given, masks, d_outputs):
    tensors = tf.nest.flatten(given)
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        x, states, weights = given
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
    """Rows of the batch.  Lanes have equal numbers of rows, so that one program does for both: where the batch is
    odd, they have one row in common, which is `skipped` (1) in the gradient and the outputs of the second."""

    rows: slice
    skipped: tf.Tensor | None = None

    def cut(self, tree):
        return tf.nest.map_structure(lambda a: None if a is None else a[self.rows], tree)


def _lanes(x):
    """One lane for a small batch, else two, where two can run: not on one core, nor inside a program of others."""
    B = x.shape[0]
    if _in_compiled_program() or _cores() < 2 or (B is not None and B < SMALLEST_BATCH):
        return [_Lane(slice(None))]
    if B is not None and B % 2 == 0:
        return [_Lane(slice(None, B // 2)), _Lane(slice(B // 2, None))]
    B = tf.shape(x)[0]
    half, one = (B + 1) // 2, B < SMALLEST_BATCH  # a batch that turns out small leaves the second lane empty
    first = _Lane(slice(None, tf.where(one, B, half)), tf.constant(0))
    return [first, _Lane(slice(tf.where(one, B, B - half), None), tf.where(one, 0, B % 2))]


def _cores():
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(allowed, tf.config.threading.get_inter_op_parallelism_threads() or allowed)


def _in_compiled_program():
    return control_flow_util.GraphOrParentsInXlaContext(graphs.get_default_graph())


def _join(lanes, parts, shape):
    parts = [part[lane.skipped :] for lane, part in zip(lanes, parts, strict=True)]
    joined = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
    joined.set_shape(shape)
    return joined


def _in_order(options, x):
    """x or its gradient, between the order it came in and the order of processing."""
    return tf.reverse(x, [1]) if options.go_backwards else x


def _forward_lanes(options, given, masks):
    x, states, weights = given
    x, lanes = _in_order(options, x), _lanes(x)
    results = [_forward_spans(options, *lane.cut((x, states)), weights, lane.cut(masks)) for lane in lanes]
    outputs, saved = zip(*results, strict=True)
    shapes = [(*x.shape[:2], options.units)] * options.sequences + [(x.shape[0], options.units)] * len(states)
    outputs = [_join(lanes, parts, shape) for *parts, shape in zip(*outputs, shapes, strict=True)]
    return outputs, saved if options.save else None


def _backward_lanes(options, given, masks, saved, d_outputs):
    x, states, weights = given
    x, lanes = _in_order(options, x), _lanes(x)
    results = [
        _backward_spans(options, lane.cut(x), weights, lane.cut(masks), kept, lane.cut(d_outputs), lane.skipped)
        for lane, kept in zip(lanes, saved, strict=True)
    ]
    d_rows, d_weights = zip(*results, strict=True)
    d_rows = [_join(lanes, parts, a.shape) for *parts, a in zip(*d_rows, (x, *states), strict=True)]
    d_rows[0] = _in_order(options, d_rows[0])
    d_weights = [tf.cast(tf.add_n(parts), w.dtype) for *parts, w in zip(*d_weights, weights, strict=True)]
    return d_rows + d_weights


# Spans.


class _Spans:
    """Where T is unknown when the graph is made: spans of time, one program for all of them and for every T."""

    def __init__(self, T):
        self.T, self.count = T, -(-T // SPAN)

    def padded(self, a):
        """a (B, T, ...) filled up to whole spans; None stays None."""
        ends = [[0, 0], [0, self.count * SPAN - self.T]]
        return None if a is None else tf.pad(a, ends + [[0, 0]] * (a.shape.rank - 2))

    def cut(self, a, i):
        """Span i of a padded (B, T, ...)."""
        if a is None:
            return None
        part = a[:, i * SPAN : (i + 1) * SPAN]
        return tf.ensure_shape(part, (a.shape[0], SPAN, *a.shape[2:]))

    def length(self, i):
        return tf.minimum(SPAN, self.T - i * SPAN)

    def arrays(self, number, shape, dtype):
        """Arrays of one tensor for each span."""
        return [tf.TensorArray(dtype, self.count, clear_after_read=False, element_shape=shape) for _ in range(number)]

    def joined(self, array):
        """One (B, SPAN, n) for each span -> (B, T, n)."""
        parts = tf.stop_gradient(tf.transpose(array.stack(), (1, 0, 2, 3)))
        return tf.reshape(parts, (tf.shape(parts)[0], self.count * SPAN, parts.shape[-1]))[:, : self.T]


def _as_before(old, new):
    """The new tensors with the static shapes of the old: a compiled program does not tell them."""
    return tuple(tf.ensure_shape(n, o.shape) for n, o in zip(new, old, strict=True))


def _forward_spans(options, x, states, weights, masks):
    """`_forward` of one lane."""
    run = _compiled(_forward, options)
    if x.shape[1] is not None or _in_compiled_program():
        return run(x, states, weights, masks, None)
    spans = _Spans(tf.shape(x)[1])
    x, valid, shown = map(spans.padded, (x, masks.valid, masks.shown))

    def span(i, states, sequences, saved):
        part = masks._replace(valid=spans.cut(valid, i), shown=spans.cut(shown, i))
        outputs, kept = run(spans.cut(x, i), states, weights, part, spans.length(i))
        sequences = [a.write(i, h) for a, h in zip(sequences, outputs, strict=False)]
        saved = tf.nest.map_structure(lambda a, b: a.write(i, b), saved, tuple(kept))
        return i + 1, _as_before(states, outputs[len(sequences) :]), sequences, saved

    rows, dtype, save = (x.shape[0], options.units), arithmetic_dtype(x.dtype), options.save
    sequences = spans.arrays(options.sequences, (rows[0], SPAN, rows[1]), x.dtype)
    saved = (
        spans.arrays(save * len(states), (SPAN + 1, *rows), dtype),
        spans.arrays(save * len(options.equations.saved), (SPAN, *rows), dtype),
    )
    carried = (tf.constant(0), tuple(states), sequences, saved)
    _, states, sequences, saved = tf.while_loop(lambda i, *_: i < spans.count, span, carried)
    return [*map(spans.joined, sequences), *tf.nest.map_structure(tf.stop_gradient, states)], saved


def _backward_spans(options, x, weights, masks, saved, d_outputs, skipped):
    """`_backward` of one lane."""
    run = _compiled(_backward, options)
    if x.shape[1] is not None or _in_compiled_program():
        return run(x, weights, masks, saved, d_outputs, None, skipped)
    spans = _Spans(tf.shape(x)[1])
    d_sequence, *d_states = d_outputs if options.sequences else (None, *d_outputs)
    x, valid, shown, d_sequence = map(spans.padded, (x, masks.valid, masks.shown, d_sequence))

    def span(i, d_states, d_weights, dx):
        part = masks._replace(valid=spans.cut(valid, i), shown=spans.cut(shown, i))
        kept = tf.nest.map_structure(lambda a: a.read(i), saved)
        d_outputs = [*([spans.cut(d_sequence, i)] if options.sequences else []), *d_states]
        d_rows, new = run(spans.cut(x, i), weights, part, kept, d_outputs, spans.length(i), skipped)
        d_weights = [d + n for d, n in zip(d_weights, new, strict=True)]
        return i - 1, _as_before(d_states, d_rows[1:]), d_weights, [dx[0].write(i, d_rows[0])]

    dx = spans.arrays(1, (x.shape[0], SPAN, options.features), x.dtype)
    d_weights = [tf.zeros(w.shape, arithmetic_dtype(x.dtype)) for w in weights]
    carried = (spans.count - 1, tuple(d_states), d_weights, dx)
    _, d_states, d_weights, dx = tf.while_loop(lambda i, *_: i >= 0, span, carried)
    return [spans.joined(dx[0]), *tf.nest.map_structure(tf.stop_gradient, d_states)], d_weights


def programs():
    """How many programs were made so far in this process.  XLA compiles each once for every size of a lane, and
    where T is known when the graph is made for every T; where it is unknown, one program does for all."""
    return sum(program.experimental_get_tracing_count() for program in _programs)


_programs = []


@functools.cache
def _compiled(function, options):
    def opaque(*arguments):  # or a tape of higher order would have TensorFlow differentiate the loops
        return tf.nest.map_structure(tf.stop_gradient, function(options, *arguments))

    program = tf.function(opaque, jit_compile=True, autograph=False, reduce_retracing=True)
    _programs.append(program)
    return program


# One program.


class _Program:
    """The sizes of one program, and what its loops read and write: rows of one time, chunks of several."""

    def __init__(self, options, x, weights, masks, length):
        self.x, self.masks = x, masks
        self.dtype = tf.as_dtype(arithmetic_dtype(x.dtype))
        self.weights = self.cast(list(weights))
        self.W, self.b, *_ = self.weights
        self.x_mask, self.h_mask = self.cast([masks.x, masks.h])
        self.D, self.N, self.k = options.features, options.units, len(options.equations.gates)
        self.B, self.T = tf.shape(x)[0], tf.shape(x)[1]
        row_bytes = tf.maximum(self.B, 1) * self.k * self.N * self.dtype.size
        self.length = _even(self.T, tf.maximum(4, CHUNK_BYTES // row_bytes))
        self.end = self.T if length is None else length
        self.chunks = -(-self.end // self.length)

    def cast(self, tree):
        return tf.nest.map_structure(lambda a: None if a is None else tf.cast(a, self.dtype), tree)

    def chunk(self, i):
        """First time of chunk i, and the range of its steps: those that no earlier chunk holds, as the last one
        overlaps, and that x has."""
        start = tf.minimum(i * self.length, self.T - self.length)  # not by end: XLA would compile for each
        return start, i * self.length - start, tf.minimum(self.length, self.end - start)

    def read(self, a, start):
        """A chunk of a (B, T, n): (B, length, n)."""
        return tf.slice(a, [0, start, 0], [self.B, self.length, a.shape[2]])

    def read_x(self, start):
        """A chunk of x without padding and with dropout, its rows under one another."""
        x = self.cast(self.read(self.x, start))
        valid = self.read_valid(start)
        x = x if valid is None else tf.where(valid, x, tf.zeros_like(x))
        return _flat(x if self.x_mask is None else x * self.x_mask[:, None])

    def read_valid(self, start):
        return None if self.masks.valid is None else self.read(self.masks.valid[..., None], start)

    def only_shown(self, outputs):
        if self.masks.shown is None:
            return outputs
        return tf.where(self.masks.shown[..., None], outputs, tf.zeros_like(outputs))

    def zeros(self, *shape):
        return tf.zeros(shape, self.dtype)

    def chunked(self, a):
        """Rows under one another -> (B, length, n)."""
        return tf.reshape(a, (self.B, self.length, a.shape[-1]))

    def row(self, a, t, gate=0):
        """Row t of a (B, ·, kN), one gate of it: (B, N).  Each gate has a read of its own: of one that is cut up
        afterwards XLA makes scalar code."""
        a = tf.slice(a, [0, t, gate * self.N], [self.B, 1, self.N])
        return tf.ensure_shape(a[:, 0], (None, self.N))

    def time(self, a, t):
        """Time t of a (T, B, N)."""
        return tf.ensure_shape(tf.slice(a, [t, 0, 0], [1, self.B, self.N])[0], (None, self.N))

    def times(self, a, start):
        """A chunk of a (T, B, N): (length, B, N)."""
        return tf.slice(a, [start, 0, 0], [self.length, self.B, self.N])


def _write(a, start, rows):
    """a (B, T, n) with rows (B, length, n) from time start on, in place."""
    return ops.slice_update(a, [0, start, 0], rows)


def _write_time(a, t, row):
    """a (T, B, n) with row (B, n) at time t, in place."""
    return ops.slice_update(a, [t, 0, 0], row[None])


def _like(rows, a):
    """(B,) -> (B, 1, ...), as many axes as a has."""
    return tf.reshape(rows, (-1, *(1 for _ in a.shape[1:])))


def _flat(a):
    return tf.reshape(a, (-1, a.shape[-1]))


def _where(mask, new, old):
    """new where the mask is True or absent, else old; lists of arrays."""
    return list(new) if mask is None else [tf.where(mask, n, o) for n, o in zip(new, old, strict=True)]


def _loop(condition, body, variables):
    """A while loop over nested tensors, whose batch may change its static size but not its real one."""

    def invariant(v):
        return tf.TensorShape([None] * (v.shape.rank - 1) + [v.shape[-1]]) if v.shape.rank else v.shape

    shapes = tf.nest.map_structure(invariant, variables)
    return tf.while_loop(condition, body, variables, shape_invariants=shapes)[1:]


def _even(total, most):
    """The length of a part, where a total is cut into as few parts of about one length as `most` allows."""
    parts = -(-total // tf.minimum(most, total))
    return -(-total // parts)


def _forward(options, x, states, weights, masks, length):
    """-> [outputs (B, T, N) where wanted, *final states], (states, gates) of all times.  Only length steps are run,
    T where it is None."""
    equations, save = options.equations, options.save
    program = _Program(options, x, weights, masks, length)
    U = equations.recurrent(program.weights, program.h_mask)
    states = program.cast(list(states))
    all_states = [_write_time(program.zeros(program.T + 1, program.B, program.N), 0, s) for s in states] if save else []
    all_gates = [program.zeros(program.T, program.B, program.N) for _ in equations.saved] if save else []
    outputs = [program.zeros(program.B, program.T, program.N)] if options.sequences else []

    def chunk(i, states, all_states, all_gates, outputs):
        start, first, end = program.chunk(i)
        valid = program.read_valid(start)
        p = program.chunked(tf.matmul(program.read_x(start), program.W))
        shown = [] if save else [program.read(a, start) for a in outputs]

        def step(j, states, all_states, all_gates, shown):
            t = start + j
            p_j = [program.row(p, j, gate) + b for gate, b in enumerate(tf.split(program.b, program.k))]
            new, gates = equations.step(p_j, states, *U)
            states = _where(None if valid is None else valid[:, j], new, states)
            all_states = [_write_time(a, t + 1, s) for a, s in zip(all_states, states, strict=False)]
            all_gates = [_write_time(a, t, g) for a, g in zip(all_gates, gates, strict=False)]
            shown = [_write(a, j, states[0][:, None]) for a in shown]
            return j + 1, states, all_states, all_gates, shown

        steps = (first, states, all_states, all_gates, shown)
        states, all_states, all_gates, shown = _loop(lambda j, *_: j < end, step, steps)
        if save:
            shown = [tf.transpose(program.times(all_states[0], start + 1), (1, 0, 2))]
        outputs = [_write(a, start, rows) for a, rows in zip(outputs, shown, strict=False)]
        return i + 1, states, all_states, all_gates, outputs

    chunks = (tf.constant(0), states, all_states, all_gates, outputs)
    states, all_states, all_gates, outputs = _loop(lambda i, *_: i < program.chunks, chunk, chunks)
    results = [tf.cast(a, x.dtype) for a in (*map(program.only_shown, outputs), *states)]
    return results, (all_states, all_gates)


def _backward(options, x, weights, masks, saved, d_outputs, length, skipped):
    """-> [dx, *gradients of the initial states], [dW, db, dU and, where there is one, db_u]."""
    equations = options.equations
    program = _Program(options, x, weights, masks, length)
    U_T, W_T = equations.recurrent_transposed(program.weights, program.h_mask), tf.transpose(program.W)
    all_states, all_gates = saved
    if skipped is not None:
        d_outputs = [tf.where(_like(tf.range(program.B) >= skipped, d), d, tf.zeros_like(d)) for d in d_outputs]
    d_sequence, *d_states = d_outputs if options.sequences else (None, *d_outputs)
    if options.sequences:
        d_sequence = program.only_shown(d_sequence)

    def chunk(i, d_states, dx, d_weights):
        start, first, end = program.chunk(i)
        valid = program.read_valid(start)
        d_outer = program.cast(program.read(d_sequence, start)) if options.sequences else None

        def step(j, d_states, da):
            t = start + j
            valid_j = None if valid is None else valid[:, j]
            if options.sequences:
                d_states = [d_states[0] + program.row(d_outer, j), *d_states[1:]]
            zeros = [tf.zeros_like(d) for d in d_states]
            da_j, d_prev = equations.step_gradient(
                [program.time(a, t) for a in all_gates],
                [program.time(a, t) for a in all_states],
                [program.time(a, t + 1) for a in all_states],
                _where(valid_j, d_states, zeros),
                *U_T,
            )
            if valid_j is not None:  # a masked step hands its gradient on: there da is 0, as it is linear in d
                d_prev = _where(valid_j, d_prev, d_states)
            return j - 1, list(d_prev), _write_time(da, j, da_j)

        da = program.zeros(program.length, program.B, program.k * program.N)
        d_states, da = _loop(lambda j, *_: j >= first, step, (end - 1, d_states, da))
        h_prev = program.times(all_states[0], start)
        h_prev = h_prev if program.h_mask is None else h_prev * program.h_mask
        da, h_prev, *gates = map(_flat, (da, h_prev, *(program.times(a, start) for a in all_gates)))
        x_rows = _flat(tf.transpose(program.chunked(program.read_x(start)), (1, 0, 2)))
        dW = tf.matmul(x_rows, da, transpose_a=True)
        new = [dW, tf.reduce_sum(da, 0), *equations.weight_gradient(da, h_prev, gates)]
        d_weights = [d + n for d, n in zip(d_weights, new, strict=True)]
        dx_chunk = tf.transpose(tf.reshape(tf.matmul(da, W_T), (program.length, program.B, program.D)), (1, 0, 2))
        dx_chunk = dx_chunk if program.x_mask is None else dx_chunk * program.x_mask[:, None]
        return i - 1, d_states, _write(dx, start, dx_chunk), d_weights

    d_weights = [tf.zeros_like(w) for w in program.weights]
    carried = (
        program.chunks - 1,
        program.cast(list(d_states)),
        program.zeros(program.B, program.T, program.D),
        d_weights,
    )
    d_states, dx, d_weights = _loop(lambda i, *_: i >= 0, chunk, carried)
    return [tf.cast(d, x.dtype) for d in (dx, *d_states)], d_weights
