"""One compiled program: the equations of a cell over the rows of one lane and the steps of one span, on TensorFlow.

Hidden here: the two loops over time, forward and backward, with masks, dropout, chunks, blocks of U and precision.
Whoever runs it (lane.py) compiles it by XLA; every size is then a constant.

A program walks over chunks of time small enough for the cache: one product x W for the chunk, then its steps;
backward its steps, then one product each for dW, dU and dx.  Neither x W nor da exists for all times, unless small.

Axes: B batch, T time, D features, N units, k gates.  All is (B, T, n), as it came, but for what `Saved` keeps of
gates and of states that are not put out: that is (T + 1, B N), flat, as XLA compiles such rows fastest.

How long XLA compiles is as much a matter here as how long the program runs: it is about 10 ms for each kernel.
"""

from functools import partial
from typing import NamedTuple

import tensorflow as tf
from keras import ops

from keras_gated.engine.contract import arithmetic_dtype, norm

WHOLE_BYTES = 1 << 18  # gates of one sequence: up to here its times are one chunk, and no loop over chunks is compiled;
# half of it in training, which has their gradients besides
CHUNK_BYTES = 1 << 19  # else, gates of one chunk: they stay in the L2 cache between product and steps
LARGE_BYTES = 1 << 18  # a larger U is cut into blocks of columns,
FEW_ROWS = 4, 64  # where from 4 to 64 rows are multiplied by it, to 32 in training, as it takes memory;
BLOCK = 64  # a block has so many, or as often doubled as leaves 8 blocks at most, as XLA compiles each


class Saved(NamedTuple):
    """What is kept for the backward sweep."""

    h_0: tf.Tensor  # (B, N)
    h: list  # one (B, T, N); none where the outputs are the same, which do for it
    states: list  # the others, (T + 1, B N): row t holds c_t, row 0 the initial one
    gates: list  # (T + 1, B N): row t holds what made h_t of h_{t-1}


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
        rows = self.B if x.shape[0] is None else x.shape[0]
        least, most = FEW_ROWS
        self.few = (least <= rows) & (rows <= most // (1 + options.save))
        self.end = self.T if length is None else length
        self.row = tf.stack([self.B, 1, self.N])
        of_a_step = self.k * self.N * self.dtype.size
        self.whole = x.shape[1] is not None and x.shape[1] * of_a_step * (1 + options.save) <= WHOLE_BYTES
        if self.whole:
            self.length = self.T
        else:
            self.length = _even(self.T, tf.maximum(4, CHUNK_BYTES // (tf.maximum(self.B, 1) * of_a_step)))
            self.chunks = -(-self.end // self.length)

    def cast(self, tree):
        return tf.nest.map_structure(lambda a: None if a is None else tf.cast(a, self.dtype), tree)

    def by(self, U):
        """h -> h U.  XLA spreads a product over all cores, where the other lane runs as well.  Products of a few rows
        with blocks of U stay on one; a single row waits for U rather than for a core, and many are worth spreading."""
        uncut = partial(_times, [U])
        if U.shape.num_elements() * self.dtype.size <= LARGE_BYTES:
            return uncut
        width = BLOCK
        while U.shape[1] > 8 * width:
            width *= 2
        blocks = [U[:, i : i + width] for i in range(0, U.shape[1], width)]
        cut = partial(_times, blocks)
        if isinstance(self.few, bool):
            return cut if self.few else uncut
        return lambda h: tf.cond(self.few, partial(cut, h), partial(uncut, h))

    def chunk(self, i):
        """First time of chunk i, and the range of its steps: those that no earlier chunk holds, as the last one
        overlaps, and that x has."""
        if self.whole:
            return tf.constant(0), tf.constant(0), self.end
        start = tf.minimum(i * self.length, self.T - self.length)  # not by end: XLA would compile for each
        return start, i * self.length - start, tf.minimum(self.length, self.end - start)

    def read(self, a, start):
        """A chunk of a (B, T, n): (B, length, n)."""
        return a if self.whole else tf.slice(a, [0, start, 0], [self.B, self.length, a.shape[2]])

    def write(self, a, start, rows):
        """a (B, T, n) with a chunk (B, length, n) from time start on, in place."""
        return rows if self.whole else ops.slice_update(a, [0, start, 0], rows)

    def each_chunk(self, body, variables, backwards=False):
        """body(i, *variables) -> variables, for one chunk after the other."""
        if self.whole:
            return body(0, *variables)
        first, step = (self.chunks - 1, -1) if backwards else (tf.constant(0), 1)
        within = (lambda i, *_: i >= 0) if backwards else (lambda i, *_: i < self.chunks)
        return _loop(within, lambda i, *variables: (i + step, *body(i, *variables)), (first, *variables))

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

    def gates(self, p, j):
        """Step j of a (B, length, kN), gate by gate: (B, N) each.  Each has a read of its own: of one that is cut up
        afterwards XLA makes scalar code."""
        reads = [tf.slice(p, [0, j, gate * self.N], self.row) for gate in range(self.k)]
        return [tf.reshape(read, (-1, self.N)) for read in reads]

    def time(self, a, t):
        """Row t of a flat (T + 1, B N): (B, N)."""
        return tf.reshape(tf.gather(a, t), (-1, self.N))

    def times(self, a, start):
        """A chunk of a flat (T + 1, B N): (B, length, N)."""
        a = tf.slice(a, [start, 0], [self.length, self.B * self.N])
        return tf.transpose(tf.reshape(a, (self.length, self.B, self.N)), (1, 0, 2))

    def h(self, saved, t):
        """h_{t+1}, the h that step t made, for t from -1: (B, N)."""
        (h,) = saved.h
        h = tf.reshape(tf.slice(h, [0, tf.maximum(t, 0), 0], self.row), (-1, self.N))
        return tf.where(t < 0, saved.h_0, h)

    def h_before(self, saved, start):
        """h before each time of a chunk: (B, length, N)."""
        (h,) = saved.h
        others = tf.slice(h, [0, start, 0], [self.B, self.length - 1, self.N])
        return tf.concat([self.h(saved, start - 1)[:, None], others], 1)


def _times(blocks, h):
    """h U, of blocks of the columns of U."""
    products = [tf.matmul(h, block) for block in blocks]
    return products[0] if len(products) == 1 else tf.concat(products, 1)


def _write(a, t, row):
    """a (B, T, n) with row (B, n) at time t, in place."""
    return ops.slice_update(a, [0, t, 0], row[:, None])


def _write_time(a, at, row):
    """a (T, B n) with row (B, n) at [t, 0], in place."""
    return ops.slice_update(a, at, tf.reshape(row, (1, -1)))


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


def _puts_out_h(options, x, masks):
    """Whether the outputs are what the backward sweep needs of h."""
    return options.sequences and masks.shown is None and arithmetic_dtype(x.dtype) == x.dtype.name


def forward(options, x, states, weights, masks, length):
    """-> [outputs (B, T, N) where wanted, *final states], `Saved` or ().  Only length steps are run, T where it is
    None."""
    equations, save = options.equations, options.save
    program = _Program(options, x, weights, masks, length)
    U = equations.recurrent(program.weights, program.h_mask, program.by)
    states = program.cast(list(states))
    h_0 = states[0]
    h = [program.zeros(program.B, program.T, program.N)] if save or options.sequences else []
    kept = program.zeros(program.T + 1, program.B * program.N)
    all_states = [_write_time(kept, [0, 0], s) for s in states[1:]] if save else []
    all_gates = [kept for _ in equations.saved] if save else []

    def chunk(i, states, h, all_states, all_gates):
        start, first, end = program.chunk(i)
        valid = program.read_valid(start)
        p = program.chunked(tf.matmul(program.read_x(start), program.W))

        def step(j, states, h, all_states, all_gates):
            t = start + j
            p_j = [p_gate + b for p_gate, b in zip(program.gates(p, j), tf.split(program.b, program.k), strict=True)]
            new, gates = equations.step(p_j, states, *U)
            states = _where(None if valid is None else tf.gather(valid, j, axis=1), new, states)
            at = tf.stack([t + 1, 0])
            all_states = [_write_time(a, at, s) for a, s in zip(all_states, states[1:], strict=False)]
            all_gates = [_write_time(a, at, g) for a, g in zip(all_gates, gates, strict=False)]
            return j + 1, states, [_write(a, t, states[0]) for a in h], all_states, all_gates

        return _loop(lambda j, *_: j < end, step, (first, states, h, all_states, all_gates))

    states, h, all_states, all_gates = program.each_chunk(chunk, (states, h, all_states, all_gates))
    outputs = [program.only_shown(a) for a in h] if options.sequences else []
    results = [tf.cast(a, x.dtype) for a in (*outputs, *states)]
    h = [] if _puts_out_h(options, x, masks) else h
    return results, Saved(h_0, h, all_states, all_gates) if save else ()


def backward(options, x, weights, masks, saved, d_outputs, length, skipped):
    """-> [dx and, where it is wanted, the gradient of the probe], gradients of the initial states, [dW, db, *parts of
    dU and, with a bias of its own, db_u]."""
    equations = options.equations
    program = _Program(options, x, weights, masks, length)
    U_T = equations.recurrent_transposed(program.weights, program.h_mask, program.by)
    W_T = tf.transpose(program.W)
    if skipped is not None:
        d_outputs = [tf.where(_like(tf.range(program.B) >= skipped, d), d, tf.zeros_like(d)) for d in d_outputs]
    d_sequence, *d_states = d_outputs if options.sequences else (None, *d_outputs)
    if options.sequences:
        d_sequence = program.only_shown(d_sequence)

    def chunk(i, d_states, dx, d_probe, d_weights):
        start, first, end = program.chunk(i)
        valid = program.read_valid(start)
        d_outer = program.cast(program.read(d_sequence, start)) if options.sequences else None

        def step(j, d_states, da, d_probe):
            t = start + j
            valid_j = None if valid is None else tf.gather(valid, j, axis=1)
            if options.sequences:
                d_states = [d_states[0] + tf.gather(d_outer, j, axis=1), *d_states[1:]]
            d_valid = _where(valid_j, d_states, [tf.zeros_like(d) for d in d_states])
            gates = [program.time(a, t + 1) for a in saved.gates]
            before = [program.h(saved, t - 1), *(program.time(a, t) for a in saved.states)]
            after = [program.h(saved, t), *(program.time(a, t + 1) for a in saved.states)]
            da_j, d_prev = equations.step_gradient(gates, before, after, d_valid, *U_T)
            total = equations.total_gradient(gates, after, d_valid) if d_probe else None
            d_probe = [_write(a, t, tf.concat([*map(norm, total)], -1)) for a in d_probe]
            if valid_j is not None:  # a masked step hands its gradient on: there da is 0, as it is linear in d
                d_prev = _where(valid_j, d_prev, d_states)
            return j - 1, list(d_prev), _write(da, j, da_j), d_probe

        da = program.zeros(program.B, program.length, program.k * program.N)
        d_states, da, d_probe = _loop(lambda j, *_: j >= first, step, (end - 1, d_states, da, d_probe))
        da, x_rows = _flat(da), program.read_x(start)
        h_prev = program.h_before(saved, start)
        h_prev = _flat(h_prev if program.h_mask is None else h_prev * program.h_mask[:, None])
        gates = [_flat(program.times(a, start + 1)) for a in saved.gates]
        dW = tf.matmul(x_rows, da, transpose_a=True)
        new = [dW, tf.reduce_sum(da, 0), *equations.weight_gradient(da, h_prev, gates)]
        d_weights = [d + n for d, n in zip(d_weights, new, strict=True)]
        dx_chunk = program.chunked(tf.matmul(da, W_T))
        dx_chunk = dx_chunk if program.x_mask is None else dx_chunk * program.x_mask[:, None]
        return d_states, program.write(dx, start, dx_chunk), d_probe, d_weights

    W, b, _, *b_u = program.weights
    dU = [program.zeros(program.N, n * program.N) for n in equations.products]
    d_weights = [tf.zeros_like(W), tf.zeros_like(b), *dU, *map(tf.zeros_like, b_u)]
    carried = (
        program.cast(list(d_states)),
        program.zeros(program.B, program.T, program.D),
        [program.zeros(program.B, program.T, len(d_states))] if options.probed else [],
        d_weights,
    )
    d_states, dx, d_probe, d_weights = program.each_chunk(chunk, carried, backwards=True)
    dx, *d_states = [tf.cast(d, x.dtype) for d in (dx, *d_states)]
    return [dx, *d_probe], d_states, d_weights
