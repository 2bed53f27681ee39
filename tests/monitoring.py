"""A small training run to be watched: its numbers, two models, and what GradientNorms has written of it."""

import keras
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

BATCH = 8


def numbers():
    x = np.random.default_rng(0).normal(size=(43, 4, 3)).astype("float32")  # the last batch is short
    return x, x[:, 0, :1] + x[:, 1, 1:2] ** 2


def dense():
    hidden, out = keras.layers.Dense(4, "tanh", name="hidden"), keras.layers.Dense(1, name="out")
    return keras.Sequential([keras.Input((4, 3)), keras.layers.Flatten(), hidden, out])


class Subclassed(keras.Model):
    """Has no variable before its first step."""

    def __init__(self):
        super().__init__()
        self.flat, self.hidden, self.out = keras.layers.Flatten(), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)

    def call(self, x):
        return self.out(self.hidden(self.flat(x)))


def read(folder):
    """-> {tag: (steps, values)} of the run that GradientNorms writes."""
    events = EventAccumulator(str(folder / "gradients"), size_guidance={"tensors": 0}).Reload()
    logged = {}
    for tag in events.PluginTagToContent("scalars"):
        points = [(e.step, e.tensor_proto.float_val[0]) for e in events.Tensors(tag)]
        logged[tag] = tuple(np.transpose(points))
    return logged
