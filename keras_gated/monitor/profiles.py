"""Profiles: ‖∂L/∂h_t‖ of a layer over time, of one training step after another.

Hidden here: how sequences of any length share one width.  A profile has ROWS rows, spread evenly over the T time
steps of its batch, from the first, which is row 0, to the last, which is the last row; each row shows one time step
as it is, and with T < ROWS some steps are shown more than once.
"""

from typing import NamedTuple

import numpy as np

from keras_gated.gradients.horizon import at, horizon, last

ROWS = 128


class Source(NamedTuple):
    """Whose profile it is."""

    layer: str  # a label of the layer, or of one of several calls of it
    state: str  # a letter, after "<cell>/" where a layer stacks cells
    backwards: bool  # whether the layer goes from the end of the sequence to its start

    @property
    def _parts(self):
        *cell, letter = self.state.split("/")
        return "/".join([self.layer, *cell]), letter

    @property
    def name(self):
        """That of the layer; that of other states than h with their letter."""
        layer, letter = self._parts
        return layer if letter == "h" else f"{layer}/{letter}"

    @property
    def norm(self):
        layer, letter = self._parts
        return f"‖∂L/∂{letter}_t‖ of {layer}"

    def tags(self, *what):
        return [f"time_step_norm/{self.name}/{each}" for each in what]


class Profiles(NamedTuple):
    """Of S training steps of one layer, means over the examples that have the time step."""

    step: np.ndarray  # (S,) true training steps
    length: np.ndarray  # (S,) T
    norms: np.ndarray  # (S, ROWS) NaN where no example has the time step

    @classmethod
    def joined(cls, pieces):
        return cls(*map(np.concatenate, zip(*pieces, strict=True)))

    def thinned(self, most):
        """At most so many, evenly chosen among the training steps."""
        since, stride = self.step - self.step[:1], 1
        while np.sum(since % stride == 0) > most:
            stride *= 2
        return self.taken(since % stride == 0)

    def taken(self, which):
        return Profiles(*(a[which] for a in self))

    def decades_above(self, floor):
        """(ROWS,) log10 of the median over the training steps, from the floor on, which is 0."""
        _, median, _ = percentiles(self.norms.T)
        return np.log10(np.clip(np.nan_to_num(median, nan=floor), floor, np.finfo(np.float32).max) / floor)


class Summary(NamedTuple):
    """What is said of each of S profiles, over the time steps that some example has."""

    step: np.ndarray  # (S,) true training steps
    length: np.ndarray  # (S,) T
    first: np.ndarray  # (S,) at the first time step
    last: np.ndarray  # (S,) at the last
    p10: np.ndarray  # (S,) percentiles
    p50: np.ndarray  # (S,)
    p90: np.ndarray  # (S,)
    horizon: np.ndarray  # (S,) steps, see `horizon`

    SCALARS = ("first", "last", "p10", "p50", "p90", "horizon")

    @classmethod
    def of(cls, profiles, backwards):
        """backwards: whether the layer goes from the end of the sequence to its start."""
        norms, there = profiles.norms, ~np.isnan(profiles.norms)
        ends = at(norms, np.argmax(there, axis=1)), at(norms, last(there))
        t = times(profiles.length[:, None])
        once = np.where(np.diff(t, axis=1, prepend=-1) > 0, norms, np.nan)  # each time step, in however many rows
        return cls(profiles.step, profiles.length, *ends, *percentiles(once), horizon(norms, t, backwards))

    @classmethod
    def joined(cls, pieces):
        return cls(*map(np.concatenate, zip(*pieces, strict=True)))


def times(length):
    """The time step that each row shows, (..., ROWS), of sequences of `length` (..., 1) steps."""
    return time_of_row(np.arange(ROWS), length)


def time_of_row(row, length):
    """Integers, on arrays of any library."""
    return (row * (length - 1) + (ROWS - 1) // 2) // (ROWS - 1)


def percentiles(norms):
    """(S, R) -> (3, S): the 10th, 50th and 90th of each row, NaN left out."""
    ordered = np.sort(norms, axis=1)  # NaN last
    last = np.maximum(np.sum(~np.isnan(norms), axis=1) - 1, 0)
    at = np.array([[0.1], [0.5], [0.9]]) * last
    below = at.astype(int)
    low, high = (ordered[np.arange(len(norms)), i] for i in (below, np.minimum(below + 1, last)))
    with np.errstate(invalid="ignore"):  # inf - inf
        return np.where(high > low, low + (at - below) * (high - low), low)
