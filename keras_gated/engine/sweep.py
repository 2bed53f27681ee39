"""Sweeps through time on TensorFlow: the recurrence forward, and Algorithm rnn-bptt backward.

A caller sees one differentiable function of tensors, `sweep`; a cell is only its `Equations` (contract.py).

Hides reversal, gradients of either order, and that an eager call runs as a graph.  The batch is cut into shards
(shards.py), these into segments of time (segments.py), which are compiled programs (scan.py).

Axes: B batch, T time, D features, N units, k gates.
"""

import functools

import tensorflow as tf

from keras_gated.engine import shards
from keras_gated.engine.compilation import programs as programs
from keras_gated.engine.loop import loop
from keras_gated.engine.scan import Masks as Masks
from keras_gated.engine.scan import Options as Options

SETTINGS = 64  # of eager calls whose graphs are kept


def sweep(options, x, states, weights, masks, go_backwards=False, perturbation=None):
    """Runs a cell over x (B, T, D).

    Args:
        options: `Options`.
        x: (B, T, D).
        states: the initial states, (B, width) each.
        weights: as `Equations` take them: {"W": (D, kN), "b": (kN,), and those that the equations declare}.
        masks: `Masks`.
        go_backwards: read x from its end; the masks are in the order of processing.
        perturbation: None or zeros (B, T, S), in the order of x: see engine/perturbation.py.

    Returns:
        The outputs, (B, T, N) or None, and the final states.  Differentiable in x, states and weights, and the
        gradient once more.
    """
    x = x if x.shape[1] else _with_a_step(x)
    weights = {name: tf.convert_to_tensor(w) for name, w in weights.items()}
    in_order = [tf.reverse(a, [1]) if go_backwards else a for a in (x, perturbation) if a is not None]
    options = options._replace(traits=(x.dtype, *(mask is None for mask in masks)))
    tensors = in_order[0], tuple(states), weights, tuple(in_order[1:]), masks
    if not tf.executing_eagerly():
        return _differentiable(options, *tensors)
    flat = tf.nest.flatten(tensors)
    dtypes = tuple(None if a is None else a.dtype for a in flat)
    return _eager(options, dtypes, bool(in_order[1:]))(*(a for a in flat if a is not None))


def _with_a_step(x):
    """x, whose length only the running graph knows: there it is checked."""
    expected = "A recurrent layer expects at least one time step, received x of shape"
    with tf.control_dependencies([tf.debugging.Assert(tf.shape(x)[1] > 0, [expected, tf.shape(x)])]):
        return tf.identity(x)


@functools.lru_cache(maxsize=SETTINGS)
def _eager(options, dtypes, perturbed):
    """An eager call runs as a graph: its shards run side by side, and no tape looks inside them.

    The graph is one for every batch size and every length, whichever comes first: what was called before must not
    decide which program runs.
    """
    D, n, sizes = options.features, options.state_widths, dict(options.sizes)
    weights = {"W": (D, options.gates_width), "b": (options.gates_width,), **options.equations.shapes(sizes)}
    states = tuple(tf.TensorShape((None, width)) for width in n)
    row, sequence = tf.TensorShape((None, None)), tf.TensorShape((None, None, len(n)))
    masks = Masks(row, row, tf.TensorShape((None, D)), states[0])
    weights = {name: tf.TensorShape(shape) for name, shape in weights.items()}
    structure = tf.TensorShape((None, None, D)), states, weights, (sequence,) * perturbed, masks
    shapes = zip(tf.nest.flatten(structure), dtypes, strict=True)
    signature = [tf.TensorSpec(shape, dtype) for shape, dtype in shapes if dtype is not None]

    @tf.function(autograph=False, input_signature=signature)
    def run(*present):
        present = iter(present)
        tensors = [None if dtype is None else next(present) for dtype in dtypes]
        return _differentiable(options, *tf.nest.pack_sequence_as(structure, tensors))

    return run


def _differentiable(options, x, states, weights, perturbation, masks):
    given = (x, states, weights, perturbation)

    @tf.custom_gradient
    def run(*tensors):
        x, states, weights, _ = tf.nest.pack_sequence_as(given, tensors)
        outputs, saved = shards.forward(options, x, states, weights, masks)

        def gradient(*d_outputs):
            return _gradient(options, tf.nest.pack_sequence_as(given, tensors), masks, saved, d_outputs)

        return outputs, gradient

    outputs = run(*tf.nest.flatten(given))
    return (outputs[0], outputs[1:]) if options.sequences else (None, outputs)


def _gradient(options, given, masks, saved, d_outputs):
    """First order by the backward sweep; second order by autodiff of Keras's loop over the same equations."""
    # Each order is traced as a graph of its own, which may only hold tensors of that graph.
    masks, arguments = _copied((masks, (given, tuple(d_outputs))))
    options = options._replace(save=True)

    @tf.custom_gradient
    def run(*tensors):
        (x, states, weights, perturbation), d_outputs = tf.nest.pack_sequence_as(arguments, tensors)
        kept = saved or shards.forward(options, x, states, weights, masks)[1]

        def gradient(*d_gradients):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                gradients = _first_order_by_loop(options, (x, states, weights), masks, d_outputs)
            d_gradients = d_gradients[: len(gradients)]  # of a perturbation there is no second order
            return tape.gradient(gradients, tensors, d_gradients, tf.UnconnectedGradients.ZERO)

        found = shards.backward((options, bool(perturbation)), x, states, weights, masks, kept, d_outputs)
        return tf.nest.flatten((found.x, found.states, found.weights, found.perturbation)), gradient  # as `given`

    return run(*tf.nest.flatten(arguments))


def _copied(tree):
    return tf.nest.map_structure(lambda a: None if a is None else tf.identity(a), tree)


def _first_order_by_loop(options, given, masks, d_outputs):
    x, states, weights = given
    tensors = tf.nest.flatten(given)
    sizes = dict(options.sizes)
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        outputs, states = loop(
            lambda x_t, states: options.equations.advance(x_t, states, weights, sizes, masks.x, masks.h),
            x,
            states,
            masks.valid,
            masks.shown,
            go_backwards=False,
            sequences=options.sequences,
        )
        results = [*([outputs] if options.sequences else []), *states]
    return tape.gradient(results, tensors, d_outputs, tf.UnconnectedGradients.ZERO)
