"""The gradient norms of every training step, taken where the gradients pass through the optimizer (TensorFlow).

Hidden here: the private places of Keras's optimizers where gradients pass, and in which form.

    loss → gradients of each replica, scaled → apply → unscaled → accumulated → clipped → summed over replicas → used

and for ClipNorm, which sums before it clips:

    loss → gradients of each replica, scaled → apply → unscaled → summed over replicas → accumulated → clipped → used
"""

from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_gated.clipping import ClipNorm, norm
from keras_gated.tap import Probe

ABSENT = -1.0  # marks a variable without a gradient: NaN would hide an overflow
HEAD = 3  # loss scale, learning rate and norm of this replica stand before the variables


class Norms(NamedTuple):
    """Norms of S training steps, V variables and R replicas, unscaled; those of absent gradients are 0."""

    step: np.ndarray  # (S,) true training steps
    raw: np.ndarray  # (S, V) of the sum over replicas, before clipping
    clipped: np.ndarray  # (S, V) as the optimizer used them; raw where it made no update; NaN where that is not known
    present: np.ndarray  # (S, V) whether the variable had a gradient
    updated: np.ndarray  # (S,) whether the optimizer made an update
    loss_scale: np.ndarray  # (S,)
    learning_rate: np.ndarray  # (S,) NaN where there are several, or only a Python function knows
    replicas: np.ndarray  # (S, R) of what each replica adds to the sum, all variables together


class NormProbe(Probe):
    """Measures them.

    Args:
        tap: the `Tap` it is going to join.
        receive: called with `Norms` and about when each step ended.
    """

    name = "GradientNorms"

    def __init__(self, tap, receive):
        self.tap, self.optimizer, self._receive = tap, tap.optimizer, receive
        self.several = tap.strategy.num_replicas_in_sync > 1
        scaled = isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)
        self.scaled = scaled or bool(self.optimizer.loss_scale_factor)
        self.parts = {}  # by id of the optimizer
        self.paths = None
        if self.optimizer.built:  # always so with replicas
            self._allocate([])

    def install(self, tap):
        owner = _without_loss_scale(self.optimizer)
        if _is_several(owner) and not owner.built:
            tap.wrap(owner, "build", self._built)  # which may choose the parts
        for optimizer in _parts(owner):
            self._install_part(optimizer)
        tap.wrap(self.optimizer, "apply", self._received)

    def _built(self, build, *args, **kwargs):
        known = set(self.parts)
        build(*args, **kwargs)
        for optimizer in _parts(_without_loss_scale(self.optimizer)):
            if id(optimizer) not in known:
                self._install_part(optimizer)

    def _install_part(self, optimizer):
        part = self.parts.setdefault(id(optimizer), _Part(self, optimizer))
        self.tap.wrap(optimizer, "apply", part.noted)
        if hasattr(optimizer, "_clip_gradients"):
            self.tap.wrap(optimizer, "_clip_gradients", part.clipped)
        if self.several and not isinstance(optimizer, ClipNorm) and hasattr(optimizer, "_all_reduce_sum_gradients"):
            self.tap.wrap(optimizer, "_all_reduce_sum_gradients", part.summed)

    # In the graph.

    def _received(self, apply, grads, trainable_variables=None):
        grads = list(grads)
        given = self.optimizer._trainable_variables if trainable_variables is None else trainable_variables
        variables = list(given)
        if self.paths is None:
            self._allocate(variables)
        scale = self.tap.loss_scale()
        mine = [None if g is None else norm(g) / scale for g in grads]
        norms = [None if g is None else norm(g) / scale for g in _summed(grads)] if self.several else mine
        own = norm(tf.stack([n for n in mine if n is not None] or [0.0]))
        head = [scale, self._learning_rate(), own]
        self.tap.write(self.ring, head + self.in_order(norms, variables))
        return apply(grads, trainable_variables)

    def _allocate(self, variables):
        """At the first trace, or before: a model may have no variables before."""
        known = [*self.tap.model.trainable_variables, *self.optimizer._trainable_variables, *variables]
        self.index = {}
        for v in known:
            self.index.setdefault(id(v), len(self.index))
        unique = {id(v): v for v in known}.values()
        self.paths = _unique([getattr(v, "path", v.name) for v in unique])
        self.ring = self.tap.ring("received_norms", HEAD + len(self.paths))

    def in_order(self, norms, variables):
        columns = [tf.constant(ABSENT)] * len(self.paths)
        for v, n in zip(variables, norms, strict=True):
            if n is not None:
                columns[self.index[id(v)]] = n
        return columns

    def _learning_rate(self):
        optimizer = self.optimizer
        while hasattr(optimizer, "inner_optimizer"):
            optimizer = optimizer.inner_optimizer
        rate = vars(optimizer).get("_learning_rate")
        # A function of the user's may count how often it is called.
        if _is_several(optimizer) or not isinstance(
            rate, keras.Variable | keras.optimizers.schedules.LearningRateSchedule
        ):
            return tf.constant(np.nan, tf.float32)
        return tf.cast(optimizer.learning_rate, tf.float32)

    # On the host.

    def receive(self, drained):
        first = drained.rows[self.ring].values  # (S, R, HEAD + V)
        raw = first[:, 0, HEAD:].astype(np.float64)  # each replica has the sum
        clipped = raw.copy()
        updated = np.zeros(len(raw), bool)
        for part in self.parts.values():
            if part.ring is not None:
                rows = drained.rows[part.ring]
                written, (before, after) = rows.written[:, 0], np.split(rows.values[:, 0].astype(np.float64), 2, axis=1)
                updated |= written
                raw = np.where(written[:, None] & (before != ABSENT), before, raw)
                clipped = np.where(written[:, None] & (after != ABSENT), after, clipped)
        clipped = np.where(updated[:, None], clipped, raw)
        present = raw != ABSENT
        raw, clipped = np.where(present, raw, 0), np.where(present, clipped, 0)
        scale, rate = first[:, 0, :2].T
        norms = Norms(drained.step, raw, clipped, present, updated, scale, rate, first[:, :, 2])
        self._receive(norms, drained.time)


class _Part:
    """What passes through one of the optimizers that make the step."""

    def __init__(self, probe, optimizer):
        self.probe, self.optimizer, self.ring = probe, optimizer, None

    def noted(self, apply, grads, trainable_variables=None):
        """Which variables the gradients belong to that come by next."""
        grads = list(grads)
        given = self.optimizer._trainable_variables if trainable_variables is None else trainable_variables
        pairs = zip(grads, given, strict=True)
        self.variables = [v for g, v in pairs if g is not None and not getattr(v, "overwrite_with_gradient", False)]
        return apply(grads, trainable_variables)

    def clipped(self, clip, grads):
        grads = list(grads)
        clipped = clip(grads)
        if self.probe.several and not isinstance(self.optimizer, ClipNorm):
            return clipped  # of one replica
        raw = [norm(g) for g in grads]
        self._write(raw, self._used(grads, raw, clipped))
        return clipped

    def _used(self, grads, raw, clipped):
        """The norms of `clipped`.  Where factors do it, reading it would change how the update is compiled, to its
        last bit."""
        if isinstance(self.optimizer, ClipNorm):
            sizes = raw if self.optimizer.per_variable else [norm(tf.stack(raw))] * len(raw)
            longest = self.optimizer.max_norm
            return [tf.where(size <= longest, r, r / size * longest) for r, size in zip(raw, sizes, strict=True)]
        if _clips_by_global_norm(self.optimizer):
            factor = tf.minimum(1.0, self.optimizer.global_clipnorm / global_norm_of_keras(grads))
            return [r * factor for r in raw]
        return raw if clipped is grads else [norm(g) for g in clipped]

    def summed(self, reduce, pairs):
        pairs = reduce(list(pairs))
        self._write([None] * len(pairs), [norm(g) for g, _ in pairs])
        return pairs

    def _write(self, raw, used):
        probe = self.probe
        if self.ring is None:
            self.ring = probe.tap.ring("clipped_norms", 2 * len(probe.paths))
        probe.tap.write(self.ring, probe.in_order(raw, self.variables) + probe.in_order(used, self.variables))


def _without_loss_scale(optimizer):
    return optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer


def _is_several(optimizer):
    """A MultiOptimizer.  (ClipNorm round one clips by itself.)"""
    return hasattr(optimizer, "optimizers") and not isinstance(optimizer, ClipNorm)


def _parts(optimizer):
    """Those that clip."""
    return optimizer.optimizers if _is_several(optimizer) else [optimizer]


def _summed(grads):
    there = [g for g in grads if g is not None]
    sums = iter(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, there))
    return [None if g is None else next(sums) for g in grads]


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
