"""Sweeps through time on TensorFlow: the recurrence forward, and Algorithm rnn-bptt backward.

Hidden here: loops, masks, dropout, reversal, lanes, chunks of time, compilation, precision.  A caller sees one
differentiable function of tensors, `sweep`; a cell is only its `Equations` (equations.py).

How it runs.  The batch is cut into lanes, one compiled program each, which TensorFlow runs side by side.  A
program walks over chunks of time small enough for the cache: one product x W for the chunk, then its steps;
backward its steps, then one product each for dW, dU and dx.  Neither x W nor da ever exists for all times.

Axes: B batch, T time, D features, N units, k gates.  Inside, arrays are time-major, and those of states have a
row in front for the initial state: row t of the states holds h_{t-1}, row t of the gates what made h_t of it.
"""

import functools
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.eager import forwardprop_util
from tensorflow.python.framework import ops as graphs
from tensorflow.python.ops import control_flow_util

from keras_gated.equations import arithmetic_dtype, loop

CHUNK_BYTES = 1 << 19  # gates of one chunk of time: they stay in the L2 cache between product and steps
SMALLEST_BATCH = 8  # below, a second lane costs more than it saves


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
    weights = tuple(tf.convert_to_tensor(w) for w in weights)
    options = options._replace(traits=(x.dtype, *(mask is None for mask in masks)))
    run = _traced(options) if tf.executing_eagerly() else functools.partial(_differentiable, options)
    return run(x, tuple(states), weights, masks)


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


def _lanes(x):
    """Slices of the batch.  Inside somebody else's compiled program lanes would run one after another."""
    few = x.shape[0] is not None and x.shape[0] < SMALLEST_BATCH
    if few or control_flow_util.GraphOrParentsInXlaContext(graphs.get_default_graph()):
        return [slice(None)]
    half = tf.shape(x)[0] // 2
    return [slice(None, half), slice(half, None)]


def _cut(tree, lane):
    return tf.nest.map_structure(lambda a: None if a is None else a[lane], tree)


def _join(parts, shape):
    joined = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
    joined.set_shape(shape)
    return joined


def _forward_lanes(options, given, masks):
    x, states, weights = given
    run = _compiled(_forward, options)
    results = [run(*_cut((x, states), lane), weights, _cut(masks, lane)) for lane in _lanes(x)]
    outputs, saved = zip(*results, strict=True)
    shapes = [(*x.shape[:2], options.units)] * options.sequences + [(x.shape[0], options.units)] * len(states)
    outputs = [_join(parts, shape) for *parts, shape in zip(*outputs, shapes, strict=True)]
    return outputs, saved if options.save else None


def _backward_lanes(options, given, masks, saved, d_outputs):
    x, states, weights = given
    run = _compiled(_backward, options)
    results = [
        run(_cut(x, lane), weights, _cut(masks, lane), kept, _cut(d_outputs, lane))
        for lane, kept in zip(_lanes(x), saved, strict=True)
    ]
    d_rows, d_weights = zip(*results, strict=True)
    d_rows = [_join(parts, a.shape) for *parts, a in zip(*d_rows, (x, *states), strict=True)]
    d_weights = [tf.cast(tf.add_n(parts), w.dtype) for *parts, w in zip(*d_weights, weights, strict=True)]
    return d_rows + d_weights


@functools.cache
def _compiled(function, options):
    def opaque(*arguments):  # or a tape of higher order would have TensorFlow differentiate the loops
        return tf.nest.map_structure(tf.stop_gradient, function(options, *arguments))

    return tf.function(opaque, jit_compile=True, autograph=False, reduce_retracing=True)


# One lane.


class _Lane:
    """The sizes of one lane, and what its loops read and write, a chunk of time at once."""

    def __init__(self, options, x, weights, masks):
        self.x, self.masks, self.go_backwards = x, masks, options.go_backwards
        self.dtype = tf.as_dtype(arithmetic_dtype(x.dtype))
        self.weights = self.cast(list(weights))
        self.W, self.b, *_ = self.weights
        self.x_mask, self.h_mask = self.cast([masks.x, masks.h])
        self.D, self.N, self.k = options.features, options.units, len(options.equations.gates)
        self.B, self.T = tf.shape(x)[0], tf.shape(x)[1]
        row_bytes = tf.maximum(self.B, 1) * self.k * self.N * self.dtype.size
        length = tf.minimum(tf.maximum(4, CHUNK_BYTES // row_bytes), self.T)
        self.chunks = -(-self.T // length)
        self.length = -(-self.T // self.chunks)

    def cast(self, tree):
        return tf.nest.map_structure(lambda a: None if a is None else tf.cast(a, self.dtype), tree)

    def span(self, i):
        """First time of chunk i, and the first of its steps that no earlier chunk holds: the last one overlaps."""
        start = tf.minimum(i * self.length, self.T - self.length)
        return start, i * self.length - start

    def read(self, a, start):
        """A chunk of a (B, T, n): (length, B, n)."""
        return tf.transpose(tf.slice(a, [0, start, 0], [self.B, self.length, a.shape[2]]), (1, 0, 2))

    def read_x(self, start):
        """A chunk of x in the order of processing, without padding and with dropout."""
        x = self.read(self.x, self.T - self.length - start if self.go_backwards else start)
        x = self.cast(tf.reverse(x, [0]) if self.go_backwards else x)
        valid = self.read_valid(start)
        x = x if valid is None else tf.where(valid, x, tf.zeros_like(x))
        return x if self.x_mask is None else x * self.x_mask

    def read_valid(self, start):
        return None if self.masks.valid is None else self.read(self.masks.valid[..., None], start)

    def only_shown(self, outputs):
        if self.masks.shown is None:
            return outputs
        return tf.where(self.masks.shown[..., None], outputs, tf.zeros_like(outputs))

    def array(self, *shape):
        """Zeros, to be written row by row in place."""
        rows = tf.TensorArray(self.dtype, shape[0], element_shape=[*(None for _ in shape[1:-1]), shape[-1]])
        return rows.unstack(tf.zeros(shape, self.dtype))

    def row(self, a, t, gate=0):
        """Row t of a (·, B, kN), one gate of it: (B, N).  Each gate has a read of its own: of one that is cut up
        afterwards XLA makes scalar code."""
        a = tf.slice(a, [t, 0, gate * self.N], [1, self.B, self.N])
        return tf.ensure_shape(a[0], (None, self.N))

    def read_flat(self, a, start):
        """A chunk of a (T, B, n), its rows under one another."""
        return _flat(tf.slice(a, [start, 0, 0], [self.length, self.B, a.shape[2]]))

    def joined(self, chunks):
        """(chunks, B, length, n) -> (B, T, n), without what the last chunk holds a second time."""
        n = chunks.shape[-1]
        whole = tf.reshape(tf.transpose(chunks[:-1], (1, 0, 2, 3)), (self.B, (self.chunks - 1) * self.length, n))
        _, first = self.span(self.chunks - 1)
        return tf.concat([whole, chunks[-1][:, first:]], 1)


def _flat(a):
    return tf.reshape(a, (-1, a.shape[-1]))


def _where(mask, new, old):
    """new where the mask is True or absent, else old; lists of arrays."""
    return list(new) if mask is None else [tf.where(mask, n, o) for n, o in zip(new, old, strict=True)]


def _loop(condition, body, variables):
    """A while loop over nested tensors, whose batch may change its static size but not its real one."""

    def invariant(v):
        if isinstance(v, tf.TensorArray) or v.shape.rank < 2:
            return tf.TensorShape(None if isinstance(v, tf.TensorArray) else v.shape)
        return tf.TensorShape([None] * (v.shape.rank - 1) + [v.shape[-1]])

    shapes = tf.nest.map_structure(invariant, variables)
    return tf.while_loop(condition, body, variables, shape_invariants=shapes)[1:]


def _forward(options, x, states, weights, masks):
    """-> [outputs (B, T, N) where wanted, *final states], (states, gates) of all times."""
    equations, save = options.equations, options.save
    lane = _Lane(options, x, weights, masks)
    U = equations.recurrent(lane.weights, lane.h_mask)
    states = lane.cast(list(states))
    all_states = [lane.array(lane.T + 1, lane.B, lane.N).write(0, s) for s in states] if save else []
    all_gates = [lane.array(lane.T, lane.B, lane.N) for _ in equations.saved] if save else []
    all_h = [lane.array(lane.T, lane.B, lane.N)] if options.sequences and not save else []

    def chunk(i, *carried):
        start, first = lane.span(i)
        valid = lane.read_valid(start)
        p = tf.matmul(_flat(lane.read_x(start)), lane.W)
        p = tf.reshape(p, (lane.length, lane.B, lane.k * lane.N))

        def step(j, states, all_states, all_gates, all_h):
            t = start + j
            p_j = [lane.row(p, j, gate) + b for gate, b in enumerate(tf.split(lane.b, lane.k))]
            new, gates = equations.step(p_j, states, *U)
            states = _where(None if valid is None else valid[j], new, states)
            all_states = [a.write(t + 1, s) for a, s in zip(all_states, states, strict=False)]
            all_gates = [a.write(t, g) for a, g in zip(all_gates, gates, strict=False)]
            all_h = [a.write(t, states[0]) for a in all_h]
            return j + 1, states, all_states, all_gates, all_h

        return i + 1, *_loop(lambda j, *_: j < lane.length, step, (first, *carried))

    carried = _loop(lambda i, *_: i < lane.chunks, chunk, (tf.constant(0), states, all_states, all_gates, all_h))
    states, all_states, all_gates, all_h = carried
    all_states = [a.stack() for a in all_states]
    results = [tf.cast(s, x.dtype) for s in states]
    if options.sequences:
        h = all_states[0][1:] if save else all_h[0].stack()
        results.insert(0, lane.only_shown(tf.cast(tf.transpose(h, (1, 0, 2)), x.dtype)))
    return results, (all_states, [a.stack() for a in all_gates])


def _backward(options, x, weights, masks, saved, d_outputs):
    """-> [dx, *gradients of the initial states], [dW, db, dU and, where there is one, db_u]."""
    equations = options.equations
    lane = _Lane(options, x, weights, masks)
    U_T, W_T = equations.recurrent_transposed(lane.weights, lane.h_mask), tf.transpose(lane.W)
    all_states, all_gates = saved
    d_sequence, *d_states = d_outputs if options.sequences else (None, *d_outputs)
    if options.sequences:
        d_sequence = lane.only_shown(d_sequence)

    def chunk(i, d_states, dx, d_weights):
        start, first = lane.span(i)
        valid = lane.read_valid(start)
        d_outer = lane.cast(lane.read(d_sequence, start)) if options.sequences else None

        def step(j, d_states, da):
            t = start + j
            valid_j = None if valid is None else valid[j]
            if options.sequences:
                d_states = [d_states[0] + lane.row(d_outer, j), *d_states[1:]]
            zeros = [tf.zeros_like(d) for d in d_states]
            da_j, d_prev = equations.step_gradient(
                [lane.row(a, t) for a in all_gates],
                [lane.row(a, t) for a in all_states],
                [lane.row(a, t + 1) for a in all_states],
                _where(valid_j, d_states, zeros),
                *U_T,
            )
            if valid_j is not None:  # a masked step hands its gradient on: there da is 0, as it is linear in d
                d_prev = _where(valid_j, d_prev, d_states)
            return j - 1, list(d_prev), da.write(j, da_j)

        da = lane.array(lane.length, lane.B, lane.k * lane.N)
        d_states, da = _loop(lambda j, *_: j >= first, step, (lane.length - 1, d_states, da))
        da = _flat(da.stack())
        h_prev = tf.slice(all_states[0], [start, 0, 0], [lane.length, lane.B, lane.N])
        h_prev = _flat(h_prev if lane.h_mask is None else h_prev * lane.h_mask)
        gates = [lane.read_flat(a, start) for a in all_gates]
        dW = tf.matmul(_flat(lane.read_x(start)), da, transpose_a=True)
        new = [dW, tf.reduce_sum(da, 0), *equations.weight_gradient(da, h_prev, gates)]
        d_weights = [d + n for d, n in zip(d_weights, new, strict=True)]
        dx_chunk = tf.reshape(tf.matmul(da, W_T), (lane.length, lane.B, lane.D))
        dx_chunk = dx_chunk if lane.x_mask is None else dx_chunk * lane.x_mask
        return i - 1, d_states, dx.write(i, tf.transpose(dx_chunk, (1, 0, 2))), d_weights

    dx = lane.array(lane.chunks, lane.B, lane.length, lane.D)
    d_weights = [tf.zeros_like(w) for w in lane.weights]
    carried = (lane.chunks - 1, lane.cast(list(d_states)), dx, d_weights)
    d_states, dx, d_weights = _loop(lambda i, *_: i >= 0, chunk, carried)
    dx = lane.joined(dx.stack())
    dx = tf.reverse(dx, [1]) if options.go_backwards else dx
    return [tf.cast(d, x.dtype) for d in (dx, *d_states)], d_weights
