"""One shard through all of its time: as one program or, where T is unknown, segment by segment (TensorFlow).

Where T is known when the graph is made, a shard is one compiled program (scan.py).  Where it is unknown, the program is
one of SEGMENT steps, which runs over one segment of time after the other and is compiled once for all lengths.

Hides which of both runs, and how a sequence of any length is cut into segments and joined again.
"""

import tensorflow as tf

from keras_gated.engine import scan
from keras_gated.engine.compilation import compiled, traced_once
from keras_gated.engine.precision import arithmetic_dtype
from keras_gated.keras_internals import in_compiled_program

SEGMENT = 64  # steps of one compiled program where T is unknown


def forward(options, x, states, weights, masks):
    """-> [outputs (B, T, N) where wanted, *final states], and what the backward sweep needs."""
    if x.shape[1] is not None or in_compiled_program():
        return _forward(options, x, states, weights, masks, None)
    return _forward_segments(options, x, states, weights, masks)


def _forward(options, *tensors):
    """One program; where it did not keep h, the outputs are h."""
    outputs, saved = compiled(scan.forward, options, *tensors)
    return outputs, saved and saved._replace(h=saved.h or outputs[:1])


def backward(options, perturbed, x, weights, masks, saved, d_outputs, skipped):
    """-> `Gradients`."""
    if x.shape[1] is not None or in_compiled_program():
        return _backward(options, perturbed, x, weights, masks, saved, d_outputs, None, skipped)
    return _backward_segments((options, perturbed), x, weights, masks, saved, d_outputs, skipped)


def _backward(options, perturbed, *tensors):
    """One program, and a second one for the perturbation: the gradients come from the same program with and without it,
    since one more reader of the states' gradients would change how XLA rounds them."""
    found = compiled(_scan_backward, options, *tensors)
    return found._replace(perturbation=compiled(_scan_perturbation, options, *tensors)) if perturbed else found


def _scan_backward(options, *tensors):
    return scan.backward(options, False, *tensors)


def _scan_perturbation(options, *tensors):
    return scan.backward(options, True, *tensors).perturbation


class _Segments:
    """Segments of a time axis whose length T only the running graph knows."""

    def __init__(self, T):
        self.T, self.count = T, -(-T // SEGMENT)

    def padded(self, a):
        """a (B, T, ...) filled up to whole segments; None stays None."""
        ends = [[0, 0], [0, self.count * SEGMENT - self.T]]
        return None if a is None else tf.pad(a, ends + [[0, 0]] * (a.shape.rank - 2))

    def cut(self, a, i):
        """Segment i of a padded (B, T, ...)."""
        if a is None:
            return None
        part = a[:, i * SEGMENT : (i + 1) * SEGMENT]
        return tf.ensure_shape(part, (a.shape[0], SEGMENT, *a.shape[2:]))

    def length(self, i):
        return tf.minimum(SEGMENT, self.T - i * SEGMENT)

    def array(self, shape, dtype):
        """An array of one tensor for each segment."""
        return tf.TensorArray(dtype, self.count, clear_after_read=False, element_shape=shape)

    def joined(self, array):
        """One (B, SEGMENT, n) for each segment -> (B, T, n)."""
        parts = tf.stop_gradient(tf.transpose(array.stack(), (1, 0, 2, 3)))
        return tf.reshape(parts, (tf.shape(parts)[0], self.count * SEGMENT, parts.shape[-1]))[:, : self.T]


def _as_before(old, new):
    """The new tensors with the static shapes of the old: a compiled program does not tell them."""
    return tuple(tf.ensure_shape(n, o.shape) for n, o in zip(new, old, strict=True))


@traced_once
def _forward_segments(options, x, states, weights, masks):
    segments = _Segments(tf.shape(x)[1])
    x, valid, shown = map(segments.padded, (x, masks.valid, masks.shown))

    def segment(i, states, sequences, saved):
        part = masks._replace(valid=segments.cut(valid, i), shown=segments.cut(shown, i))
        outputs, kept = _forward(options, segments.cut(x, i), states, weights, part, segments.length(i))
        sequences = [a.write(i, h) for a, h in zip(sequences, outputs, strict=False)]
        saved = tf.nest.map_structure(lambda a, b: a.write(i, b), saved, kept)
        return i + 1, _as_before(states, outputs[len(sequences) :]), sequences, saved

    shapes, dtype = _saved_shapes(options, x) if options.save else (), arithmetic_dtype(x.dtype)
    saved = tf.nest.map_structure(lambda shape: segments.array(shape, dtype), shapes)
    sequences = [segments.array((x.shape[0], SEGMENT, options.state_widths[0]), x.dtype)] * options.sequences
    carried = (tf.constant(0), tuple(states), sequences, saved)
    _, states, sequences, saved = tf.while_loop(lambda i, *_: i < segments.count, segment, carried)
    outputs = [*map(segments.joined, sequences), *tf.nest.map_structure(tf.stop_gradient, states)]
    return outputs, tf.nest.map_structure(lambda a: a.flow, saved)


def _saved_shapes(options, x):
    """Of one segment."""
    B, (n, *widths) = x.shape[0], options.state_widths

    def flat(width):
        return tf.TensorShape((SEGMENT + 1, None if B is None else B * width))

    of_h = tf.TensorShape((B, n)), [tf.TensorShape((B, SEGMENT, n))]
    return scan.Saved(*of_h, [*map(flat, widths)], [*map(flat, options.saved_widths)])


@traced_once
def _backward_segments(static, x, weights, masks, saved, d_outputs, skipped):
    options, perturbed = static
    segments = _Segments(tf.shape(x)[1])
    d_sequence, *d_states = d_outputs if options.sequences else (None, *d_outputs)
    x, valid, shown, d_sequence = map(segments.padded, (x, masks.valid, masks.shown, d_sequence))

    def read(i, shape, flow):  # of an array a function can only return the flow
        return tf.ensure_shape(tf.TensorArray(dtype, flow=flow).read(i), shape)

    def segment(i, d_states, d_weights, sequences):
        part = masks._replace(valid=segments.cut(valid, i), shown=segments.cut(shown, i))
        kept = tf.nest.map_structure(lambda shape, flow: read(i, shape, flow), _saved_shapes(options, x), saved)
        d_outputs = [*([segments.cut(d_sequence, i)] if options.sequences else []), *d_states]
        tensors = segments.cut(x, i), weights, part, kept, d_outputs, segments.length(i), skipped
        new = _backward(options, perturbed, *tensors)
        d_weights = {letter: d + new.weights[letter] for letter, d in d_weights.items()}
        sequences = [a.write(i, d) for a, d in zip(sequences, (new.x, *new.perturbation), strict=True)]
        return i - 1, _as_before(d_states, new.states), d_weights, sequences

    dtype = arithmetic_dtype(x.dtype)
    sequences = [segments.array((x.shape[0], SEGMENT, options.features), x.dtype)]
    sequences += [segments.array((x.shape[0], SEGMENT, len(d_states)), dtype)] * perturbed
    d_weights = {letter: tf.zeros(shape, dtype) for letter, shape in options.weight_shapes.items()}
    carried = (segments.count - 1, tuple(d_states), d_weights, sequences)
    _, d_states, d_weights, sequences = tf.while_loop(lambda i, *_: i >= 0, segment, carried)
    dx, *d_perturbation = map(segments.joined, sequences)
    d_states = tf.nest.map_structure(tf.stop_gradient, d_states)
    return scan.Gradients(dx, d_states, d_weights, tuple(d_perturbation))
