"""One lane of a sweep, some rows of the batch, through all of its time, on TensorFlow.

Hidden here: what is compiled and traced, and how often; spans of time.

Where T is known when the graph is made, a lane is one compiled program (program.py).  Where it is unknown, it is one of
SPAN steps, which runs over one span of time after the other and is compiled once for all lengths.
"""

import functools

import tensorflow as tf

from keras_gated.engine import scan as program
from keras_gated.engine.contract import arithmetic_dtype
from keras_gated.keras_internals import in_compiled_program

SPAN = 64  # steps of one compiled program where T is unknown

_programs = []  # the shapes of each that was made


def once(function):
    """function(options, *tensors) as a graph that is traced once for tensors of these shapes.  Tracing takes nearly as
    long as compiling, and Keras traces a step of training twice.  Inside a program of others, where a batch is cut up
    differently, it is part of theirs."""

    @functools.wraps(function)
    def run(options, *tensors):
        return function(options, *tensors) if in_compiled_program() else _run(function, options, *tensors)

    return run


def _run(function, options, *tensors, compiled=False):
    shapes = tuple(None if a is None else a.shape for a in tf.nest.flatten(tensors))
    return _graph(function, options, shapes, compiled)(*tensors)


@functools.cache
def _graph(function, options, shapes, compiled):
    """One graph for each set of shapes, so that what is known of them stays known."""
    if not compiled:
        return tf.function(functools.partial(function, options), autograph=False)

    def opaque(*tensors):  # or a tape of higher order would have TensorFlow differentiate the loops
        return tf.nest.map_structure(tf.stop_gradient, function(options, *tensors))

    _programs.append(shapes)
    return tf.function(opaque, jit_compile=True, autograph=False)


def programs():
    """How many programs were made so far in this process.  XLA compiles each once for every size of a lane, and
    where T is known when the graph is made for every T; where it is unknown, one program does for all."""
    return len(_programs)


def forward(options, x, states, weights, masks):
    """-> [outputs (B, T, N) where wanted, *final states], and what the backward sweep needs."""
    if x.shape[1] is not None or in_compiled_program():
        return _forward(options, x, states, weights, masks, None)
    return _forward_spans(options, x, states, weights, masks)


def _forward(options, *tensors):
    """One program, whose outputs do for h where it did not keep that."""
    outputs, saved = _run(program.forward, options, *tensors, compiled=True)
    return outputs, saved and saved._replace(h=saved.h or outputs[:1])


def backward(options, x, weights, masks, saved, d_outputs, skipped):
    """-> [dx and, where it is wanted, the gradient of the probe], gradients of the initial states, and of weights."""
    if x.shape[1] is not None or in_compiled_program():
        tensors = x, weights, masks, saved, d_outputs, None, skipped
        *d_rows, d_weights = _run(program.backward, options, *tensors, compiled=True)
        return *d_rows, _with_one_dU(options, d_weights)
    return _backward_spans(options, x, weights, masks, saved, d_outputs, skipped)


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

    def array(self, shape, dtype):
        """An array of one tensor for each span."""
        return tf.TensorArray(dtype, self.count, clear_after_read=False, element_shape=shape)

    def joined(self, array):
        """One (B, SPAN, n) for each span -> (B, T, n)."""
        parts = tf.stop_gradient(tf.transpose(array.stack(), (1, 0, 2, 3)))
        return tf.reshape(parts, (tf.shape(parts)[0], self.count * SPAN, parts.shape[-1]))[:, : self.T]


def _as_before(old, new):
    """The new tensors with the static shapes of the old: a compiled program does not tell them."""
    return tuple(tf.ensure_shape(n, o.shape) for n, o in zip(new, old, strict=True))


def _with_one_dU(options, d_weights):
    """The gradients of the weights, with dU in one: joined out here, as XLA compiles long for it."""
    dW, db, *dU, last = d_weights
    dU, db_u = (dU, [last]) if options.equations.recurrent_bias else ([*dU, last], [])
    return [dW, db, dU[0] if len(dU) == 1 else tf.concat(dU, 1), *db_u]


@once
def _forward_spans(options, x, states, weights, masks):
    spans = _Spans(tf.shape(x)[1])
    x, valid, shown = map(spans.padded, (x, masks.valid, masks.shown))

    def span(i, states, sequences, saved):
        part = masks._replace(valid=spans.cut(valid, i), shown=spans.cut(shown, i))
        tensors = spans.cut(x, i), states, weights, part, spans.length(i)
        outputs, kept = _forward(options, *tensors)
        sequences = [a.write(i, h) for a, h in zip(sequences, outputs, strict=False)]
        saved = tf.nest.map_structure(lambda a, b: a.write(i, b), saved, kept)
        return i + 1, _as_before(states, outputs[len(sequences) :]), sequences, saved

    shapes, dtype = _saved_shapes(options, x) if options.save else (), arithmetic_dtype(x.dtype)
    saved = tf.nest.map_structure(lambda shape: spans.array(shape, dtype), shapes)
    sequences = [spans.array((x.shape[0], SPAN, options.units), x.dtype)] * options.sequences
    carried = (tf.constant(0), tuple(states), sequences, saved)
    _, states, sequences, saved = tf.while_loop(lambda i, *_: i < spans.count, span, carried)
    outputs = [*map(spans.joined, sequences), *tf.nest.map_structure(tf.stop_gradient, states)]
    return outputs, tf.nest.map_structure(lambda a: a.flow, saved)


def _saved_shapes(options, x):
    """Of one span."""
    B, N = x.shape[0], options.units
    flat = tf.TensorShape((SPAN + 1, None if B is None else B * N))
    states, gates = len(options.equations.states) - 1, len(options.equations.saved)
    return program.Saved(tf.TensorShape((B, N)), [tf.TensorShape((B, SPAN, N))], [flat] * states, [flat] * gates)


@once
def _backward_spans(options, x, weights, masks, saved, d_outputs, skipped):
    spans = _Spans(tf.shape(x)[1])
    d_sequence, *d_states = d_outputs if options.sequences else (None, *d_outputs)
    x, valid, shown, d_sequence = map(spans.padded, (x, masks.valid, masks.shown, d_sequence))

    def read(i, shape, flow):  # of an array a function can only return the flow
        return tf.ensure_shape(tf.TensorArray(dtype, flow=flow).read(i), shape)

    def span(i, d_states, d_weights, d_sequences):
        part = masks._replace(valid=spans.cut(valid, i), shown=spans.cut(shown, i))
        kept = tf.nest.map_structure(lambda shape, flow: read(i, shape, flow), _saved_shapes(options, x), saved)
        d_outputs = [*([spans.cut(d_sequence, i)] if options.sequences else []), *d_states]
        tensors = spans.cut(x, i), weights, part, kept, d_outputs, spans.length(i), skipped
        rows, new_states, new = _run(program.backward, options, *tensors, compiled=True)
        d_weights = [d + n for d, n in zip(d_weights, _with_one_dU(options, new), strict=True)]
        d_sequences = [a.write(i, d) for a, d in zip(d_sequences, rows, strict=True)]
        return i - 1, _as_before(d_states, new_states), d_weights, d_sequences

    dtype = arithmetic_dtype(x.dtype)
    d_sequences = [spans.array((x.shape[0], SPAN, options.features), x.dtype)]
    d_sequences += [spans.array((x.shape[0], SPAN, len(d_states)), dtype)] * options.probed
    d_weights = [tf.zeros(w.shape, dtype) for w in weights]
    carried = (spans.count - 1, tuple(d_states), d_weights, d_sequences)
    _, d_states, d_weights, d_sequences = tf.while_loop(lambda i, *_: i >= 0, span, carried)
    return [*map(spans.joined, d_sequences)], tf.nest.map_structure(tf.stop_gradient, d_states), d_weights
