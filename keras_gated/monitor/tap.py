"""Lets callbacks see inside the training step of a running model.fit on TensorFlow, and changes nothing that it does.

Hidden here: how a traced training step is tapped, who else meets that, what is a step, and when the host may look.

A `Tap` replaces model.train_function by one that is traced afresh while methods of the optimizer, or of whatever else
its readers name, are wrapped.  They are wrapped only as long as that function runs, so nobody else ever meets a patched
object.  In the graph the readers write rows into rings on the device; the host reads the rings now and then.

All callbacks of one fit share one tap.
"""

import atexit
import contextlib
import math
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_gated.monitor.event_file import steps_made
from keras_gated.monitor.ring_buffer import Ring, of_this_replica, one_per_replica
from keras_gated.patching import replaced

DRAIN_EVERY = 256  # steps
DRAIN_AFTER = 10.0  # seconds


class Drained(NamedTuple):
    """What S training steps have written."""

    step: np.ndarray  # (S,) true training steps
    time: np.ndarray  # (S,) about when each ended, in seconds since 1970
    rows: dict  # Ring: `Rows`


class Reader(ABC):
    """What one callback wants of a tap: which methods to wrap, and what to do with the rows they wrote.

    In its wrappers, which run in the graph and in each replica, `tap.step()` is the training step and
    `tap.write(ring, columns)` writes its row.
    """

    name = None  # of the callback, for messages
    missing = ()  # what it does not find in Keras, and what is left out for that: (name, tags)
    next_step = 0  # the first step that this one has not received

    @abstractmethod
    def install(self, tap):
        """Called each time the training function runs: calls tap.wrap for every method."""

    @abstractmethod
    def receive(self, drained):
        """On the host: the `Drained` steps since the last call."""


class Tap:
    """Taps the training steps of a compiled Keras model.  Get it from `tap_of`.

    A step is one call of optimizer.apply, numbered from the optimizer's iterations on.
    """

    def __init__(self, model):
        self.model, self.optimizer = model, model.optimizer
        self.strategy = model.distribute_strategy
        self.plain = model.train_function
        self.capacity = 2 * (DRAIN_EVERY + model.steps_per_execution)
        self.count = one_per_replica(np.int64(0), "tapped_steps", self.strategy)
        self.rings = []
        self.readers, self.traced_for = [], None
        self.params, self.begun = None, False
        self.steps_each = None  # how many an execution makes
        self.executions, self.drained, self.drained_at = 0, 0, time.time()

    # In the life of a fit.

    def join(self, reader, params):
        """At train begin, for every fit.  `params` is what Keras gives to all callbacks of one fit."""
        if self.params is not params or reader in self.readers:
            self.deliver()  # what a fit that was broken off has left
            self.readers, self.params, self.begun = [], params, False
        if any(type(other) is type(reader) for other in self.readers):
            raise ValueError(f"fit expects one {reader.name} among its callbacks, received several. Leave one.")
        self.readers.append(reader)

    def install(self):
        """For the next training step.  Not longer: whoever raises in between leaves the model as it was."""
        if not self.begun:
            self._begin()
        self.model.train_function = self

    def remove(self):
        self.model.train_function = self.plain

    def leave(self):
        """At train end."""
        self.remove()
        self.deliver()
        self.params = None

    def fits(self, model):
        """Whether the model is compiled as it was when this tap was made."""
        return model.optimizer is self.optimizer and model.train_function is self.plain

    def _begin(self):
        """At the first step of a fit, when all callbacks have joined and all weights have been restored."""
        self.begun, self.drained_at = True, time.time()
        self.drained = max(self.drained or steps_made(self.optimizer), *(reader.next_step for reader in self.readers))
        for part in self.count:
            part.assign(self.drained)
        if self.traced_for != self.readers:
            self.model.make_train_function(force=True)
            self.traced, self.traced_for, self.steps_each = self.model.train_function, self.readers, None

    def __call__(self, iterator):
        """The train function, run while the readers' wrappers are in their places."""
        if self._due():
            self.deliver()
        try:
            with contextlib.ExitStack() as self._wrapped:
                self.wrap(self.optimizer, "apply", self._counted)
                for reader in self.readers:
                    reader.install(self)
                self.executions += 1
                return self.traced(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):  # the end of an epoch
            raise
        except BaseException:
            self.remove()
            with contextlib.suppress(tf.errors.OpError):  # the device may be what failed
                self.deliver()
            raise

    # For readers.

    def wrap(self, owner, name, wrapper):
        """Until the train function returns, owner.name(...) is wrapper(owner.name, ...)."""
        self.enter(replaced(owner, name, wrapper))

    def enter(self, context):
        """Until the train function returns, the context lasts."""
        self._wrapped.enter_context(context)

    def ring(self, name, width):
        """A new `Ring`, also while the graph is traced."""
        self.rings.append(Ring(name, width, self.capacity, self.strategy))
        return self.rings[-1]

    def step(self):
        """In the graph: the number of this training step."""
        return of_this_replica(self.count).read_value()

    def loss_scale(self):
        """In the graph: what the loss is multiplied by."""
        if isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
            built = self.optimizer.built
            return tf.cast(self.optimizer.dynamic_scale if built else self.optimizer.initial_scale, tf.float32)
        return tf.constant(self.optimizer.loss_scale_factor or 1.0, tf.float32)

    def write(self, ring, columns):
        """In the graph: `ring.width` numbers of this training step, a list or a tensor."""
        ring.write(self.step(), columns)

    def _counted(self, apply, grads, *args, **kwargs):
        grads = list(grads)
        done = apply(grads, *args, **kwargs)
        # At the end of the data this graph raises half-way: a step counts once its gradients exist.
        with tf.control_dependencies([g for g in grads if g is not None]):
            of_this_replica(self.count).assign_add(1)
        return done

    # On the host.

    def _due(self):
        """Asked without a look at the device, but for the first execution, which shows how many steps one makes."""
        if not self.executions:
            return False
        each = self.steps_each or self.capacity
        return self.executions * each >= DRAIN_EVERY or time.time() - self.drained_at > DRAIN_AFTER

    def deliver(self):
        """Hands what was written since the last call to the readers."""
        end, begin, before = int(self.count[0]), self.drained, self.drained_at
        self.drained, self.drained_at = end, time.time()
        if self.executions:
            self.steps_each = max(self.steps_each or 1, math.ceil((end - begin) / self.executions))
        self.executions = 0
        if end - begin > self.capacity:
            lost, begin = end - begin - self.capacity, end - self.capacity
            warnings.warn(f"{lost} training steps were not logged: the buffer was full.", stacklevel=2)
        if begin == end:
            return
        steps = np.arange(begin, end)
        times = np.linspace(before, self.drained_at, len(steps) + 1)[1:]
        drained = Drained(steps, times, {ring: ring.read(steps) for ring in self.rings})
        for reader in self.readers:
            reader.next_step = end
            reader.receive(drained)


def missing(model):
    """What Keras must have, and has not, for a step to be seen at all."""
    of_model = ("make_train_function", "train_function", "distribute_strategy", "steps_per_execution")
    names = [f"{type(model).__name__}.{n}" for n in of_model if not hasattr(model, n)]
    optimizer = model.optimizer
    return names + [f"{type(optimizer).__name__}.{n}" for n in ("apply", "iterations") if not hasattr(optimizer, n)]


_taps = weakref.WeakValueDictionary()  # by id of the model, which lives as long as its tap does


def tap_of(model):
    """The tap of a compiled model, which is the same for all callbacks and for every fit until it is compiled anew."""
    if isinstance(model.train_function, Tap):  # a callback raised before the training step ran
        model.train_function.remove()
    tap = _taps.get(id(model))
    if tap is None or not tap.fits(model):
        tap = _taps[id(model)] = Tap(model)
    return tap


@atexit.register
def _deliver_all():
    """What a fit has left that was broken off, and the program with it."""
    for tap in list(_taps.values()):
        tap.deliver()
