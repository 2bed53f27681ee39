"""Gets the gradients out of a running model.fit on TensorFlow, with no change to model, optimizer or compile.

Hidden here: the private places of Keras where gradients pass, how a traced graph is tapped, and the buffer in
which rows wait on the device.  What comes out are the norms of every training step, in order.

`Tap` replaces model.train_function by one that is traced afresh while two methods of the optimizer are wrapped.
They are wrapped only as long as that function runs, so nobody else ever meets a patched optimizer.  In the
graph, each training step writes one row into a ring on the device; the host reads the ring now and then.
"""

import warnings
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_gated.clipping import ClipNorm, norm, replaced

ABSENT = -1.0  # marks a variable without a gradient: NaN would hide an overflow
STAMPS = 1 << 22  # a row carries its step modulo this, exact in float32


class Norms(NamedTuple):
    """Norms of S training steps and V variables, unscaled; those of absent gradients are 0."""

    step: np.ndarray  # (S,) true training steps
    raw: np.ndarray  # (S, V) before clipping
    clipped: np.ndarray  # (S, V) as the optimizer used them; raw where it made no update
    present: np.ndarray  # (S, V) whether the variable had a gradient


class Tap:
    """Taps the training steps of a compiled Keras model.

    Args:
        model: the model, compiled.
        capacity: how many steps the ring holds between two calls of `drain`.
        on_failure: called when a training step raises, so that what was measured before is not lost.

    Raises:
        ValueError: for a model trained on several replicas or by several optimizers.
    """

    def __init__(self, model, capacity, on_failure):
        self.optimizer = model.optimizer
        scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        self.inner = model.optimizer.inner_optimizer if scaled else model.optimizer  # the one that clips
        several = hasattr(self.inner, "optimizers") and not isinstance(self.inner, ClipNorm)
        if model.distribute_strategy.num_replicas_in_sync > 1 or several:
            raise ValueError(
                "GradientNorms expects one replica and one optimizer, received a model with several. "
                "Train it without the callback."
            )
        self.capacity = capacity
        self.on_failure = on_failure
        self.variables = None
        self.count = tf.Variable(0, dtype=tf.int64, trainable=False, name="tapped_steps")
        self.drained = 0
        self.model = model
        self.plain = model.train_function
        model.make_train_function(force=True)
        self.traced = model.train_function
        self.remove()

    def install(self):
        """For the next training step.  Not longer: whoever raises in between leaves the model as it was."""
        if isinstance(self.model.train_function, Tap):
            raise ValueError("fit expects one GradientNorms among its callbacks, received several. Leave one.")
        self.model.train_function = self

    def remove(self):
        self.model.train_function = self.plain

    def fits(self, model):
        """Whether the model is compiled as it was when this tap was made."""
        return model.optimizer is self.optimizer and model.train_function is self.plain

    def __call__(self, iterator):
        """The train function, run while the optimizer is wrapped."""
        try:
            with (
                replaced(self.optimizer, "apply", self._tapped_apply),
                replaced(self.inner, "_clip_gradients", self._tapped_clip),
            ):
                return self.traced(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):  # the end of an epoch
            raise
        except BaseException:
            self.remove()
            self.on_failure()
            raise

    # In the graph.

    def _tapped_apply(self, apply, grads, trainable_variables=None):
        grads = list(grads)
        given = self.optimizer._trainable_variables if trainable_variables is None else trainable_variables
        variables = list(given)
        if self.variables is None:
            self._allocate([*self.model.trainable_variables, *variables])
        self.clippable = [
            v
            for v, g in zip(variables, grads, strict=True)
            if g is not None and not getattr(v, "overwrite_with_gradient", False)
        ]
        scale = self._loss_scale()
        norms = [None if g is None else norm(g) / scale for g in grads]
        row = self._write(self.received, self._in_order(norms, variables))
        apply(grads, trainable_variables)
        # At the end of the data this graph raises half-way: a step counts once its gradients exist.
        with tf.control_dependencies([row]):
            self.count.assign_add(1)

    def _tapped_clip(self, clip, grads):
        grads = list(grads)
        clipped = clip(grads)
        raw = [norm(g) for g in grads]
        if _clips_by_global_norm(self.inner):
            # Reading the clipped tensors would change how the update is compiled, and its last bit.
            factor = tf.minimum(1.0, self.inner.global_clipnorm / global_norm_of_keras(grads))
            used = [r * factor for r in raw]
        else:
            used = raw if clipped is grads else [norm(g) for g in clipped]
        self._write(self.clipped, self._in_order(raw, self.clippable) + self._in_order(used, self.clippable))
        return clipped

    def _allocate(self, variables):
        """The rings, at the first trace: a model may have no variables before."""
        self.index = {}
        for v in variables:
            self.index.setdefault(id(v), len(self.index))
        self.variables = list({id(v): v for v in variables}.values())
        self.paths = _unique([v.path for v in self.variables])
        with tf.init_scope():
            self.received = self._ring(1 + len(self.variables))
            self.clipped = self._ring(1 + 2 * len(self.variables))

    def _ring(self, width):
        return tf.Variable(tf.fill([self.capacity, width], ABSENT), trainable=False, name="tapped_norms")

    def _in_order(self, norms, variables):
        columns = [tf.constant(ABSENT)] * len(self.variables)
        for v, n in zip(variables, norms, strict=True):
            if n is not None:
                columns[self.index[id(v)]] = n
        return columns

    def _write(self, ring, columns):
        step = self.count.read_value()
        row = tf.stack([tf.cast(step % STAMPS, tf.float32), *columns])
        ring.scatter_nd_update([[tf.cast(step % self.capacity, tf.int32)]], [row])
        return row

    def _loss_scale(self):
        optimizer = self.optimizer
        if optimizer is not self.inner:
            return tf.cast(optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale, tf.float32)
        return tf.constant(optimizer.loss_scale_factor or 1.0, tf.float32)

    # On the host.

    def drain(self):
        """The norms of the steps since the last call, as `Norms`, or None if there were none."""
        end = int(self.count)
        begin = max(self.drained, end - self.capacity)
        if begin > self.drained:
            warnings.warn(f"{begin - self.drained} training steps were not logged: the buffer was full.", stacklevel=2)
        steps = np.arange(begin, end)
        self.drained = end
        if not len(steps):
            return None
        n = len(self.variables)
        received = self.received.numpy()[steps % self.capacity].astype(np.float64)
        clipped = self.clipped.numpy()[steps % self.capacity].astype(np.float64)
        updated = clipped[:, 0] == steps % STAMPS  # else the row is an old one: no update was made
        raw = np.where(updated[:, None], clipped[:, 1 : 1 + n], received[:, 1:])
        used = np.where(updated[:, None], clipped[:, 1 + n :], raw)
        present = raw != ABSENT
        return Norms(steps, np.where(present, raw, 0), np.where(present, used, 0), present)


def release(model):
    """Removes a tap that was left installed, by another callback that raised before the training step ran."""
    if isinstance(model.train_function, Tap):
        model.train_function.remove()


def _unique(paths):
    """Keras lets two layers have one name."""
    return [f"{path}_{n}" if (n := paths[:i].count(path)) else path for i, path in enumerate(paths)]


def _clips_by_global_norm(optimizer):
    plain = type(optimizer)._clip_gradients is keras.optimizers.Optimizer._clip_gradients
    return plain and bool(optimizer.global_clipnorm) and not optimizer.clipnorm


def global_norm_of_keras(gradients):
    """What Keras takes for the norm when it clips: repeated rows of IndexedSlices count one by one."""
    values = (g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients)
    return tf.sqrt(tf.add_n([2 * tf.nn.l2_loss(tf.cast(v, tf.float32)) for v in values]))
