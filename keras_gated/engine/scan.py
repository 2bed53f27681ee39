"""The two loops over time: a cell's equations over the rows of one shard and the steps of one segment (TensorFlow).

Both walk over chunks of time that fit the cache: one product x W for a chunk, then its steps; backward its steps, then
one product each for dW, dx and the gradient of each matrix.  Neither x W nor da exists for all times, unless small.

Hides masks, dropout, chunks, blocks of a matrix and precision.  compilation.py compiles both loops by XLA; every size
is then a constant.

Axes: B batch, T time, D features, N units, k gates.  Arrays are (B, T, n), as they came, except for what `Saved` keeps
of gates and of states that are not put out: these are (T + 1, B n), flat, since XLA compiles such rows fastest.

How long XLA compiles is as much a matter here as how long the program runs: it is about 10 ms for each kernel.
"""

from functools import partial
from typing import NamedTuple

import tensorflow as tf
from keras import ops

from keras_gated.engine.contract import Equations, apply_mask
from keras_gated.engine.precision import arithmetic_dtype, norm
from keras_gated.engine.roles import Matrix

WHOLE_BYTES = 1 << 18  # gates of one sequence: up to here its times are one chunk, and no loop over chunks is compiled;
# half of it in training, which has their gradients besides
CHUNK_BYTES = 1 << 19  # else, gates of one chunk: they stay in the L2 cache between product and steps
LARGE_BYTES = 1 << 18  # a larger U is cut into blocks of columns,
FEW_ROWS = 4, 64  # where from 4 to 64 rows are multiplied by it, to 32 in training, as it takes memory;
BLOCK = 64  # a block has so many, or as often doubled as leaves 8 blocks at most, as XLA compiles each


class Options(NamedTuple):
    """What is fixed when a sweep is traced."""

    equations: Equations
    features: int  # D
    sizes: tuple  # (name, value) of each size of the equations
    sequences: bool  # hand out the outputs of all times, not only the final states
    save: bool  # keep what the backward sweep needs; without it a gradient costs one more forward sweep
    traits: tuple = ()  # dtype and which masks there are: set by `sweep`, so that each has its own graph

    def width(self, of):
        return self.equations.width(of, dict(self.sizes))

    @property
    def state_widths(self):
        return [self.width(width) for width in self.equations.states.values()]

    @property
    def saved_widths(self):
        return [self.width(width) for width in self.equations.saved.values()]

    @property
    def gates_width(self):
        """kN, the columns of W and b."""
        return self.width(self.equations.gates)

    @property
    def weight_shapes(self):
        """{letter: shape} of all weights, W and b included."""
        shapes = {"W": (self.features, self.gates_width), "b": (self.gates_width,)}
        for letter, weight in self.equations.weights.items():
            ends = (weight.rows, weight.columns) if isinstance(weight, Matrix) else (weight.width,)
            shapes[letter] = tuple(map(self.width, ends))
        return shapes


class Masks(NamedTuple):
    """What a sweep treats as constant, in the order of processing; None where there is none."""

    valid: tf.Tensor | None  # (B, T) bool: False leaves the state as it was
    shown: tf.Tensor | None  # (B, T) bool: False makes the output 0
    x: tf.Tensor | None  # (B, D) dropout of the input
    h: tf.Tensor | None  # (B, n) dropout of h in the recurrent products


class Saved(NamedTuple):
    """What is kept for the backward sweep."""

    h_0: tf.Tensor  # (B, n)
    h: list  # one (B, T, n); omitted where the outputs can be reused
    states: list  # the others, (T + 1, B n): row t holds c_t, row 0 the initial one
    gates: list  # (T + 1, B n): row t holds what made h_t of h_{t-1}


class Gradients(NamedTuple):
    """What a backward sweep returns."""

    x: tf.Tensor  # (B, T, D)
    states: tuple  # of the initial states
    weights: dict  # by letter
    perturbation: tuple  # (B, T, S), where there is one


class _Scan:
    """The sizes of both loops, and what they read and write: rows of one time, chunks of several."""

    def __init__(self, options, x, weights, masks, length):
        self.options, self.x, self.masks = options, x, masks
        self.dtype = tf.as_dtype(arithmetic_dtype(x.dtype))
        self.weights = self.cast(weights)
        self.x_mask, self.h_mask = self.cast([masks.x, masks.h])
        self.D, self.k = options.features, len(options.equations.gates)
        self.N = options.width("units")
        self.h_width, *self.widths = options.state_widths
        self.saved_widths = options.saved_widths
        self.B, self.T = tf.shape(x)[0], tf.shape(x)[1]
        rows = self.B if x.shape[0] is None else x.shape[0]
        least, most = FEW_ROWS
        self.few = (least <= rows) & (rows <= most // (1 + options.save))
        self.end = self.T if length is None else length
        of_a_step = self.k * self.N * self.dtype.size
        self.whole = x.shape[1] is not None and x.shape[1] * of_a_step * (1 + options.save) <= WHOLE_BYTES
        if self.whole:
            self.length = self.T
        else:
            self.length = _even(self.T, tf.maximum(4, CHUNK_BYTES // (tf.maximum(self.B, 1) * of_a_step)))
            self.chunks = -(-self.end // self.length)

    def forward_weights(self):
        equations, sizes = self.options.equations, dict(self.options.sizes)
        return equations.forward_weights(self.weights, sizes, self.h_mask, self.by)

    def backward_weights(self):
        equations, sizes = self.options.equations, dict(self.options.sizes)
        return equations.backward_weights(self.weights, sizes, self.h_mask, self.by)

    def cast(self, tree):
        return tf.nest.map_structure(lambda a: None if a is None else tf.cast(a, self.dtype), tree)

    def by(self, U):
        """s -> s U.  XLA spreads a product over all cores, on which the other shard runs as well.  Products of a few
        rows with blocks of U stay on one core; a single row waits for U, and many rows are worth spreading."""
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
        row = tf.stack([self.B, 1, self.N])
        reads = [tf.slice(p, [0, j, gate * self.N], row) for gate in range(self.k)]
        return [tf.reshape(read, (-1, self.N)) for read in reads]

    def time(self, a, t, width):
        """Row t of a flat (T + 1, B n): (B, n)."""
        return tf.reshape(tf.gather(a, t), (-1, width))

    def times(self, a, start, width):
        """A chunk of a flat (T + 1, B n): (B, length, n)."""
        a = tf.slice(a, [start, 0], [self.length, self.B * width])
        return tf.transpose(tf.reshape(a, (self.length, self.B, width)), (1, 0, 2))

    def h(self, saved, t):
        """h_{t+1}, the h that step t made, for t from -1: (B, n)."""
        (h,) = saved.h
        h = tf.reshape(tf.slice(h, [0, tf.maximum(t, 0), 0], [self.B, 1, self.h_width]), (-1, self.h_width))
        return tf.where(t < 0, saved.h_0, h)

    def states(self, saved, t):
        """All states after step t - 1, for t from 0: (B, n) each."""
        others = zip(saved.states, self.widths, strict=True)
        return [self.h(saved, t - 1), *(self.time(a, t, width) for a, width in others)]

    def gates_saved(self, saved, t):
        pairs = zip(saved.gates, self.saved_widths, strict=True)
        return self.options.equations.named_saved(*(self.time(a, t + 1, width) for a, width in pairs))

    # Of a whole chunk, its rows under one another.

    def chunk_before(self, saved, start):
        """The states before each step of a chunk."""
        (h,) = saved.h
        others = tf.slice(h, [0, start, 0], [self.B, self.length - 1, self.h_width])
        before = tf.concat([self.h(saved, start - 1)[:, None], others], 1)
        pairs = zip(saved.states, self.widths, strict=True)
        return [_flat(before), *(_flat(self.times(a, start, width)) for a, width in pairs)]

    def chunk_after(self, saved, start):
        """The states after each step of a chunk."""
        (h,) = saved.h
        pairs = zip(saved.states, self.widths, strict=True)
        return [_flat(self.read(h, start)), *(_flat(self.times(a, start + 1, width)) for a, width in pairs)]

    def chunk_saved(self, saved, start):
        pairs = zip(saved.gates, self.saved_widths, strict=True)
        return self.options.equations.named_saved(*(_flat(self.times(a, start + 1, width)) for a, width in pairs))

    def weight_gradient(self, da, saved, start, named):
        """The gradients of a chunk, by letter: those of W and b, and what the cell says of its own weights."""
        equations = self.options.equations
        arrays = self.chunk_saved(saved, start), self.chunk_before(saved, start), self.chunk_after(saved, start)
        of_cell = equations.call("weight_gradient", da, *arrays, weights=named)
        gradients = {"W": tf.matmul(self.read_x(start), da, transpose_a=True), "b": tf.reduce_sum(da, 0)}
        for letter, value in of_cell.items():
            if isinstance(equations.weights[letter], Matrix):
                rows, du = value
                rows = self.dropped(rows) if equations.is_dropped(letter) else rows
                gradients[letter] = tf.matmul(rows, du, transpose_a=True)
            else:
                gradients[letter] = tf.reduce_sum(value, 0)
        return gradients

    def dropped(self, rows):
        """Rows of a chunk that a matrix multiplied, with recurrent dropout."""
        return rows if self.h_mask is None else _flat(self.chunked(rows) * self.h_mask[:, None])


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


def outputs_are_h(options, x, masks):
    """Whether the outputs are what the backward sweep needs of h."""
    return options.sequences and masks.shown is None and arithmetic_dtype(x.dtype) == x.dtype.name


def forward(options, x, states, weights, masks, length):
    """-> [outputs (B, T, N) where wanted, *final states], `Saved` or ().  Only length steps are run, T where it is
    None."""
    equations, save = options.equations, options.save
    scan = _Scan(options, x, weights, masks, length)
    named = scan.forward_weights()
    states = scan.cast(list(states))
    h_0 = states[0]
    h = [scan.zeros(scan.B, scan.T, scan.h_width)] if save or options.sequences else []
    kept = {width: scan.zeros(scan.T + 1, scan.B * width) for width in {*scan.widths, *scan.saved_widths}}
    all_states = [_write_time(kept[w], [0, 0], s) for w, s in zip(scan.widths, states[1:], strict=True)] if save else []
    all_gates = [kept[width] for width in scan.saved_widths] if save else []

    def chunk(i, states, h, all_states, all_gates):
        start, first, end = scan.chunk(i)
        valid = scan.read_valid(start)
        p = scan.chunked(tf.matmul(scan.read_x(start), scan.weights["W"]))
        b = tf.split(scan.weights["b"], scan.k)

        def step(j, states, h, all_states, all_gates):
            t = start + j
            p_j = [p_gate + b_gate for p_gate, b_gate in zip(scan.gates(p, j), b, strict=True)]
            new, gates = equations.call("step", p_j, states, weights=named)
            states = _where(None if valid is None else tf.gather(valid, j, axis=1), new, states)
            at = tf.stack([t + 1, 0])
            all_states = [_write_time(a, at, s) for a, s in zip(all_states, states[1:], strict=False)]
            all_gates = [_write_time(a, at, g) for a, g in zip(all_gates, gates, strict=False)]
            return j + 1, states, [_write(a, t, states[0]) for a in h], all_states, all_gates

        return _loop(lambda j, *_: j < end, step, (first, states, h, all_states, all_gates))

    states, h, all_states, all_gates = scan.each_chunk(chunk, (states, h, all_states, all_gates))
    outputs = [scan.only_shown(a) for a in h] if options.sequences else []
    results = [tf.cast(a, x.dtype) for a in (*outputs, *states)]
    h = [] if outputs_are_h(options, x, masks) else h
    return results, Saved(h_0, h, all_states, all_gates) if save else ()


def backward(options, perturbed, x, weights, masks, saved, d_outputs, length, skipped):
    """-> `Gradients`."""
    equations = options.equations
    scan = _Scan(options, x, weights, masks, length)
    named = scan.backward_weights()
    W_T = tf.transpose(scan.weights["W"])
    if skipped is not None:
        d_outputs = [tf.where(_like(tf.range(scan.B) >= skipped, d), d, tf.zeros_like(d)) for d in d_outputs]
    d_sequence, *d_states = d_outputs if options.sequences else (None, *d_outputs)
    if options.sequences:
        d_sequence = scan.only_shown(d_sequence)
    keep_d_states = equations.wants_d_states

    def chunk(i, d_states, dx, d_zeros, d_weights):
        start, first, end = scan.chunk(i)
        valid = scan.read_valid(start)
        d_outer = scan.cast(scan.read(d_sequence, start)) if options.sequences else None

        def step(j, d_states, da, d_zeros, kept):
            t = start + j
            valid_j = None if valid is None else tf.gather(valid, j, axis=1)
            if options.sequences:
                d_states = [d_states[0] + tf.gather(d_outer, j, axis=1), *d_states[1:]]
            d_valid = _where(valid_j, d_states, [tf.zeros_like(d) for d in d_states])
            gates, before, after = scan.gates_saved(saved, t), scan.states(saved, t), scan.states(saved, t + 1)
            da_j, d_before = equations.call("step_gradient", gates, before, after, d_valid, weights=named)
            if d_zeros:
                total = equations.call("total_gradient", gates, after, d_valid, weights=named)
                d_zeros = [_write(a, t, tf.concat([*map(norm, total)], -1)) for a in d_zeros]
            if valid_j is not None:  # a masked step hands its gradient on: there da is 0, as it is linear in d
                d_before = _where(valid_j, d_before, d_states)
            kept = [_write(a, j, d) for a, d in zip(kept, d_valid, strict=False)]
            return j - 1, list(d_before), _write(da, j, da_j), d_zeros, kept

        da = scan.zeros(scan.B, scan.length, scan.k * scan.N)
        kept = [scan.zeros(scan.B, scan.length, d.shape[-1]) for d in d_states] if keep_d_states else []
        variables = (end - 1, d_states, da, d_zeros, kept)
        d_states, da, d_zeros, kept = _loop(lambda j, *_: j >= first, step, variables)
        da = _flat(da)
        new = scan.weight_gradient(da, saved, start, named | {"d_states": [_flat(d) for d in kept]})
        d_weights = {letter: d + new[letter] for letter, d in d_weights.items()}
        dx_chunk = apply_mask(scan.chunked(tf.matmul(da, W_T)), None if scan.x_mask is None else scan.x_mask[:, None])
        return d_states, scan.write(dx, start, dx_chunk), d_zeros, d_weights

    carried = (
        scan.cast(list(d_states)),
        scan.zeros(scan.B, scan.T, scan.D),
        [scan.zeros(scan.B, scan.T, len(d_states))] if perturbed else [],
        {letter: scan.zeros(*shape) for letter, shape in options.weight_shapes.items()},
    )
    d_states, dx, d_zeros, d_weights = scan.each_chunk(chunk, carried, backwards=True)
    dx, *d_states = [tf.cast(d, x.dtype) for d in (dx, *d_states)]
    return Gradients(dx, tuple(d_states), d_weights, tuple(d_zeros))
