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

from keras_gated.clipping.clip_norm import ClipNorm
from keras_gated.clipping.sparse import merged_values
from keras_gated.monitor.tap import Reader

ABSENT = -1.0  # marks a variable without a gradient: NaN would hide an overflow
CLIPPED = "grad_norm/clipped and clip_ratio"
HEAD = 4  # loss scale, learning rate, whether it made an update, and norm of this replica stand before the variables


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


class NormReader(Reader):
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
        self.missing = _missing(self.optimizer, self.several)
        self.sees_clipping = CLIPPED not in dict(self.missing).values()
        self.parts = {}  # by id of the optimizer
        self.paths = None
        if self.optimizer.built:  # always so with replicas
            self._allocate([])

    def install(self, tap):
        self._install_parts()
        tap.wrap(self.optimizer, "apply", self._received)

    def _install_parts(self):
        for optimizer in _parts(self.optimizer):
            if id(optimizer) not in self.parts:
                self.parts[id(optimizer)] = _Part(self, optimizer)
            part = self.parts[id(optimizer)]
            self.tap.wrap(optimizer, "apply", part.noted)
            if hasattr(optimizer, "_clip_gradients"):
                self.tap.wrap(optimizer, "_clip_gradients", part.clipped)
            if part.summed_later and hasattr(optimizer, "_all_reduce_sum_gradients"):
                self.tap.wrap(optimizer, "_all_reduce_sum_gradients", part.summed)

    # In the graph.

    def _received(self, apply, grads, trainable_variables=None):
        grads = list(grads)
        given = self.optimizer._trainable_variables if trainable_variables is None else trainable_variables
        variables = list(given)
        if self.paths is None:
            self._allocate(variables)
        if not _parts(self.optimizer):
            _without_loss_scale(self.optimizer).build(variables)  # a MultiOptimizer that has not chosen yet
            self._install_parts()
        scale, rate, step, before = self.tap.loss_scale(), self._learning_rate(), self.tap.step(), self._updates()
        done = apply(grads, trainable_variables)
        # Seen from outside: one operation more in a branch that is not always run would change how it is compiled.
        updated = tf.reduce_any([a != b for a, b in zip(before, self._updates(), strict=True)])

        halves = _halves(grads)
        own = _norms(tf.add_n([h for h in halves if h is not None] or [tf.zeros((), tf.float64)])) / scale
        summed = _halves(_summed(grads)) if self.several else halves
        head = tf.stack([scale, rate, tf.cast(updated, tf.float32), own])
        self.ring.write(step, tf.concat([head, self.in_order(summed, variables, scale)], 0))
        return done

    def _updates(self):
        """How many each optimizer has made."""
        return [tf.identity(tf.cast(o.iterations, tf.int64)) for o in _parts(self.optimizer)]

    def _allocate(self, variables):
        """At the first trace, or before: a model may have no variables before."""
        known = [*self.tap.model.trainable_variables, *getattr(self.optimizer, "_trainable_variables", []), *variables]
        self.index = {}
        for v in known:
            self.index.setdefault(id(v), len(self.index))
        unique = {id(v): v for v in known}.values()
        self.paths = _unique([getattr(v, "path", v.name) for v in unique])
        self.ring = self.tap.ring("received_norms", HEAD + len(self.paths))

    def in_order(self, halves, variables, scale=1.0):
        """(V,) norms, from what `_halves` has of some variables."""
        columns = [tf.constant(ABSENT, tf.float64)] * len(self.paths)
        for v, half in zip(variables, halves, strict=True):
            if half is not None:
                columns[self.index[id(v)]] = half
        columns = tf.stack(columns)
        return tf.where(columns == ABSENT, ABSENT, _norms(columns) / scale)

    def _learning_rate(self):
        optimizer = _innermost(self.optimizer)
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
        clipped = raw
        for part in self.parts.values():
            raw, clipped = part.complete(raw, clipped, drained)
        scale, rate, updated = first[:, 0, :3].T
        updated = updated == 1
        present = raw != ABSENT
        raw, clipped = (np.where(present, n, 0) for n in (raw, np.where(updated[:, None], clipped, raw)))
        norms = Norms(drained.step, raw, clipped, present, updated, scale, rate, first[:, :, 3])
        self._receive(norms, drained.time)


class _Part:
    """What passes through one of the optimizers that make the step."""

    def __init__(self, reader, optimizer):
        self.reader, self.optimizer, self.ring = reader, optimizer, None
        last = optimizer.inner_optimizer if isinstance(optimizer, ClipNorm) else optimizer
        self.accumulates = bool(last.gradient_accumulation_steps)
        self.summed_later = reader.several and not isinstance(optimizer, ClipNorm)
        self.follows = False  # whether norms that were not read follow from those before clipping
        self.columns = set()  # of its variables

    def noted(self, apply, grads, trainable_variables=None):
        """Which variables the gradients belong to that come by next."""
        grads = list(grads)
        given = self.optimizer._trainable_variables if trainable_variables is None else trainable_variables
        pairs = zip(grads, given, strict=True)
        self.variables = [v for g, v in pairs if g is not None and not getattr(v, "overwrite_with_gradient", False)]
        self.columns |= {self.reader.index[id(v)] for v in self.variables}
        return apply(grads, trainable_variables)

    def clipped(self, clip, grads):
        grads = list(grads)
        clipped = clip(grads)
        if self.summed_later:
            return clipped  # of one replica
        unread = [None] * len(grads)
        raw = _halves(grads) if self.accumulates else unread
        self.follows = clipped is grads or _by_factors(self.optimizer)
        if not self.follows:
            used = _halves(clipped)
        elif _rows_may_repeat(self.optimizer, grads):
            used = _clipped_by_keras(self.optimizer, grads)
        else:
            used = unread
        if used is not unread or raw is not unread:
            self._write(raw, used)
        return clipped

    def summed(self, reduce, pairs):
        pairs = reduce(list(pairs))
        self._write([None] * len(pairs), _halves(g for g, _ in pairs))
        return pairs

    def _write(self, raw, used):
        reader = self.reader
        if self.ring is None:
            self.ring = reader.tap.ring("clipped_norms", 2 * len(reader.paths))
        norms = [reader.in_order(halves, self.variables) for halves in (raw, used)]
        reader.tap.write(self.ring, tf.concat(norms, 0))

    def complete(self, raw, clipped, drained):
        """The norms (S, V) so far, and those that this part knows in their places."""
        mine = np.isin(np.arange(raw.shape[1]), list(self.columns))
        before = after = np.full_like(raw, ABSENT)
        if self.ring is not None:
            rows = drained.rows[self.ring]
            before, after = np.split(np.where(rows.written[:, :1], rows.values[:, 0], ABSENT), 2, axis=1)
        raw = np.where(before != ABSENT, before, raw)
        own = np.where(mine & (raw != ABSENT), raw, 0)
        other = _clipped(self.optimizer, own) if self.follows else np.nan
        return raw, np.where(mine, np.where(after != ABSENT, after, other), clipped)


def _halves(gradients):
    """‖g‖² / 2 of each, None of None: two operations, in float64, which holds the squares of every float32."""
    return [None if g is None else tf.nn.l2_loss(tf.cast(merged_values(g), tf.float64)) for g in gradients]


def _norms(halves):
    return tf.cast(tf.sqrt(2 * halves), tf.float32)


def _missing(optimizer, several):
    """What is not in this version of Keras, and what is left out for that."""
    names = {}
    for part in _parts(optimizer):
        names |= dict.fromkeys(_absent(part, "_clip_gradients"), CLIPPED)
        if several and not isinstance(part, ClipNorm):
            names |= dict.fromkeys(_absent(part, "_all_reduce_sum_gradients"), CLIPPED)
    if not _is_several(_innermost(optimizer)):
        names |= dict.fromkeys(_absent(_innermost(optimizer), "_learning_rate"), "grad_norm/learning_rate")
    return tuple(names.items())


def _absent(optimizer, name):
    return [] if hasattr(optimizer, name) else [f"{type(optimizer).__name__}.{name}"]


def _innermost(optimizer):
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def _without_loss_scale(optimizer):
    return optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer


def _is_several(optimizer):
    """A MultiOptimizer.  (ClipNorm round one clips by itself.)"""
    return hasattr(optimizer, "optimizers") and not isinstance(optimizer, ClipNorm)


def _parts(optimizer):
    """Those that clip: one, or as many as a MultiOptimizer has chosen so far."""
    optimizer = _without_loss_scale(optimizer)
    return optimizer.optimizers if _is_several(optimizer) else [optimizer]


def _summed(grads):
    there = [g for g in grads if g is not None]
    sums = iter(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, there))
    return [None if g is None else next(sums) for g in grads]


def _unique(paths):
    """Keras lets two layers have one name."""
    return [f"{path}_{n}" if (n := paths[:i].count(path)) else path for i, path in enumerate(paths)]


def _by_factors(optimizer):
    """Whether it clips each gradient as a whole.

    Then the norms of clipped gradients follow from those before, and the clipped gradients need not be read: one
    reader more changes how the update is compiled, and its last bit.
    """
    plain = type(optimizer)._clip_gradients is keras.optimizers.Optimizer._clip_gradients
    return isinstance(optimizer, ClipNorm) or (plain and not optimizer.clipvalue)


def _rows_may_repeat(optimizer, grads):
    """Keras takes repeated rows of IndexedSlices one by one for its norm."""
    return not isinstance(optimizer, ClipNorm) and any(isinstance(g, tf.IndexedSlices) for g in grads)


def _clipped_by_keras(optimizer, grads):
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads]
    squares = [2 * tf.nn.l2_loss(tf.cast(v, tf.float32)) for v in values]
    if optimizer.global_clipnorm:
        squares = [tf.add_n(squares)] * len(squares)
    longest = optimizer.clipnorm or optimizer.global_clipnorm
    factors = [tf.cast(tf.minimum(1.0, longest / tf.sqrt(s)), tf.float64) for s in squares]
    return [half * factor**2 for half, factor in zip(_halves(grads), factors, strict=True)]


def _clipped(optimizer, raw):
    """The norms (S, V) that follow from those before clipping."""
    if isinstance(optimizer, ClipNorm):
        longest, each = optimizer.max_norm, optimizer.per_variable
    else:
        longest, each = optimizer.clipnorm or optimizer.global_clipnorm, bool(optimizer.clipnorm)
    if not longest:
        return raw
    norm = raw if each else np.sqrt(np.sum(raw**2, axis=1, keepdims=True))
    with np.errstate(invalid="ignore"):  # an inf makes NaNs
        return raw * (longest / np.maximum(norm, longest))
