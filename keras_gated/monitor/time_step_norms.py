"""The gradient of every time step of every recurrent layer in every training step (TensorFlow).

Hidden here: what carries the norms from the middle of the backward pass to the device's ring, in each replica, and
how they become profiles on the host.
"""

import collections
import functools

import numpy as np
import tensorflow as tf

from keras_gated.engine.precision import arithmetic_dtype
from keras_gated.gradients.perturbed import perturbed, states
from keras_gated.gradients.trajectory import find, recurrent_layers
from keras_gated.monitor.profiles import ROWS, Profiles, Source, time_of_row
from keras_gated.monitor.ring_buffer import this_replica
from keras_gated.monitor.tap import Reader

HEAD = 2  # loss scale and T stand before the rows


class TimeStepReader(Reader):
    """Measures them.

    Args:
        tap: the `Tap` it is going to join.
        layers: {label: keras.layers.RNN}, each with `states`.
        receive: called with {`Source`: `Profiles`} and {training step: about when it ended}.
    """

    name = "GradientFlow"

    def __init__(self, tap, layers, receive):
        self.tap, self.layers, self._receive = tap, layers, receive
        self.rings = {}  # by label

    def install(self, tap):
        self._calls = {}  # of each layer
        tap.wrap(tap.optimizer, "apply", self._next_step)
        for label, layer in self.layers.items():
            tap.enter(perturbed(layer, functools.partial(self._attach, label)))

    # In the graph.

    def _attach(self, label, sequences, mask):
        """A perturbation whose gradient is written, and then ends."""
        layer = self.layers[label]
        anchor = next(iter([*layer.trainable_weights, *self.tap.model.trainable_variables]))
        width, call = len(states(layer)), self._call(label)
        dtype = arithmetic_dtype(sequences.dtype)
        shape = tf.concat([tf.shape(sequences)[:2], [width]], 0)

        @tf.custom_gradient
        def source(anchor):  # of a tensor that the tape follows, or no gradient would come by
            def gradient(d_zeros):
                self._write(call, d_zeros, mask)

            return tf.ensure_shape(tf.zeros(shape, dtype), (*sequences.shape[:2], width)), gradient

        return source(tf.convert_to_tensor(anchor))

    def _call(self, label):
        """A name for this call of the layer: a model may call it more than once in a step."""
        calls = self._calls.setdefault(_here(), collections.Counter())
        calls[label] += 1
        return label if calls[label] == 1 else f"{label}_call_{calls[label]}"

    def _next_step(self, apply, *args, **kwargs):
        self._calls.pop(_here(), None)
        return apply(*args, **kwargs)

    def _write(self, call, d_zeros, mask):
        B, T, S = *tf.unstack(tf.shape(d_zeros)[:2]), d_zeros.shape[2]
        valid = tf.ones((B, T), d_zeros.dtype) if mask is None else tf.cast(tf.reshape(mask, (B, T)), d_zeros.dtype)
        sums = tf.reduce_sum(tf.concat([d_zeros, valid[..., None]], -1), 0)  # (T, S + 1)
        rows = tf.transpose(tf.gather(sums, time_of_row(tf.range(ROWS), T)))
        head = [self.tap.loss_scale(), tf.cast(T, tf.float32)]
        if call not in self.rings:
            self.rings[call] = self.tap.ring("time_steps", HEAD + ROWS * (S + 1))
        columns = tf.concat([head, tf.cast(tf.reshape(rows, [-1]), tf.float32)], 0)
        self.tap.write(self.rings[call], tf.ensure_shape(columns, (HEAD + ROWS * (S + 1),)))

    # On the host.

    def sources(self):
        """What is going to be measured, as far as it is known before the model is called."""
        return [source for label in self.layers for source in self._sources(label)]

    def _sources(self, call):
        layer = self.layers[call if call in self.layers else call.rpartition("_call_")[0]]
        return [Source(call, state, layer.go_backwards) for state in states(layer)]

    def receive(self, drained):
        profiles = {}
        for call, ring in self.rings.items():
            rows = drained.rows[ring]
            some = rows.written.any(axis=1)
            values = np.where(rows.written[..., None], rows.values, 0)[some].astype(np.float64)  # (S, R, ...)
            scale, length = values[:, :, 0].max(axis=1), values[:, :, 1].max(axis=1).astype(int)
            sources = self._sources(call)
            sums = values[:, :, HEAD:].reshape(*values.shape[:2], len(sources) + 1, ROWS).sum(axis=1)
            *sums, count = np.moveaxis(sums, 1, 0)
            for source, total in zip(sources, sums, strict=True):
                with np.errstate(invalid="ignore", divide="ignore"):
                    norms = np.where(count > 0, total / count / scale[:, None], np.nan)
                profiles[source] = Profiles(drained.step[some], length, norms)
        self._receive(profiles, dict(zip(drained.step, drained.time, strict=True)))


def _here():
    """The replica, and the graph that is made: Keras makes others in between, to see what a layer puts out."""
    return this_replica(), None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def watchable(model, chosen):
    """{label: layer} of the recurrent layers, all of them or those chosen by object or name.

    Raises:
        ValueError: where there is none, or a chosen one is not in the model or has no states that can be seen.
    """
    layers = recurrent_layers(model)
    if chosen is not None:
        wanted = [find(model, layer) for layer in chosen]
        layers = {label: layer for label, layer in layers.items() if any(layer is w for w in wanted)}
    blind = [label for label, layer in layers.items() if states(layer) is None]
    if blind and chosen is not None or len(blind) == len(layers):
        raise ValueError(
            f"GradientFlow expects keras.layers.RNN layers with Keras's loop over time, received a model "
            f"{model.name!r} with {', '.join(blind) + ', whose loop is its own' if blind else 'no recurrent layer'}."
        )
    return {label: layer for label, layer in layers.items() if label not in blind}
