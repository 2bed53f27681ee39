"""Rows of numbers that wait on the device until the host reads them (TensorFlow).

Hidden here: that writing a row costs the same whatever the buffer's size and compiles under XLA, that every replica has
a buffer of its own, and how an old row is told from a new one.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import tensorflow as tf

STAMPS = 1 << 22  # a row carries its step modulo this, exact in float32


class Rows(NamedTuple):
    """What was written in S steps by R replicas."""

    values: np.ndarray  # (S, R, width) float32
    written: np.ndarray  # (S, R) whether the step wrote a row; its values are meaningless else


class Ring:
    """The last `capacity` rows, one a step, of each replica.

    Args:
        name: of the variable.
        width: how many numbers a row has.
        capacity: how many steps are kept.
        strategy: tf.distribute.Strategy.
    """

    def __init__(self, name, width, capacity, strategy):
        self.name, self.width, self.capacity = name, width, capacity
        start = np.full((capacity, 1 + width), -1, np.float32)  # no step has that stamp
        self.parts = one_per_replica(start, name, strategy)

    def write(self, step, columns):
        """In the graph of a training step: the numbers (width,), of which the last call in a step counts."""
        columns = tf.stack(columns)
        if columns.shape != (self.width,):
            raise ValueError(f"Ring {self.name!r} expects {self.width} numbers, received {columns.shape}.")
        row = tf.concat([[tf.cast(step % STAMPS, tf.float32)], columns], 0)
        of_this_replica(self.parts).scatter_nd_update([[tf.cast(step % self.capacity, tf.int32)]], [row])

    def read(self, steps):
        """On the host: `Rows` of an array of steps, none older than the capacity."""
        rows = np.stack([part.numpy()[steps % self.capacity] for part in self.parts], axis=1)
        return Rows(rows[..., 1:], rows[..., 0] == (steps % STAMPS)[:, None])


def one_per_replica(value, name, strategy):
    """A variable for each replica, which none of them waits for; also from within a graph or a replica."""

    def make():
        with strategy.scope():
            variable = tf.Variable(
                value,
                trainable=False,
                name=name,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.NONE,
            )
            return strategy.experimental_local_results(variable)

    with ThreadPoolExecutor(1) as elsewhere:  # graphs and replicas are TensorFlow's state of a thread
        return elsewhere.submit(make).result()


def of_this_replica(parts):
    return parts[this_replica()]


def this_replica():
    """Its number, known when its graph is made."""
    return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
