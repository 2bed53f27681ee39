"""GradientFlow: the gradient of every time step of every training step, in TensorBoard."""

import importlib.util
import os
import time
import warnings
from collections.abc import Sequence

import keras
import numpy as np

from keras_gated.callbacks.tapped import TapCallback
from keras_gated.monitor.profiles import ROWS, Profiles, Summary

FLOOR = 1e-8  # of the profiles in histograms: below, a gradient does not reach


class GradientFlow(TapCallback):
    """Writes ‖∂L/∂h_t‖ of every time step in every training step to TensorBoard (TensorFlow backend).

    It is the total gradient of the training step itself, through the recurrence: which time steps the error reaches.
    Of LSTM ‖∂L/∂c_t‖ is written as well, the way of c_t through h_t included.  It is measured in every recurrent layer:
    ours, those of keras.layers, keras.layers.RNN of any cell, halves of a Bidirectional; t is always the place in the
    sequence, whichever way a layer runs.  A norm is that of one example's row of the gradient of the loss, which is a
    mean over the batch, loss scaling taken out; shown is its mean over the examples that have the time step.  Nothing
    changes in the model, its compile call or what it learns.

    In the run `<log_dir>/time_steps`, below time_step_norm/<layer>, and time_step_norm/<layer>/c for c_t:

    - p10, p50, p90: percentiles over the time steps; first, last: the first and the last time step;
    - horizon: how many steps before the loss less than 1 % of the gradient there is left;
    - heatmap, at the end of an epoch: all time steps of its training steps, at most 512 (needs matplotlib);
    - profile, at the end of an epoch: the median over its training steps, as a histogram whose bars are time steps and
      whose heights are decades above 1e-8.

    Sequences of any length share 128 rows, from the first to the last time step.  A layer that a model calls more than
    once has a second name, <layer>_call_2.  On a GPU, layers of Keras do without their fused kernel meanwhile.

    Args:
        log_dir: folder, which may be the one of keras.callbacks.TensorBoard and of other callbacks.
        layers: the recurrent layers to watch, as objects or by name; all by default.
        every: write each `every`-th training step only, into scalars and heat maps.

    Attributes:
        records: {layer or layer/c: `Summary`} of all steps that were written.
        profiles: {layer or layer/c: `Profiles`} of the epoch that ended last, at most 512 training steps of it.

    Raises:
        ValueError: in fit, on another backend, for a model without a recurrent layer, for a layer that is not in it,
            and for a second GradientFlow.
    """

    RUN = "time_steps"
    COLUMNS = 512

    def __init__(
        self, log_dir: str | os.PathLike[str], layers: Sequence[keras.layers.RNN | str] | None = None, every: int = 1
    ):
        super().__init__(log_dir, every)
        self.layers = layers
        self.profiles = {}
        self._pieces, self._epoch = {}, {}

    @property
    def records(self) -> dict[str, Summary]:
        if self._tap:
            self._tap.deliver()
        self._pieces = {name: [Summary.joined(pieces)] for name, pieces in self._pieces.items()}
        return {name: summary for name, (summary,) in self._pieces.items()}

    def _make_reader(self, tap):
        from keras_gated.monitor.time_step_norms import TimeStepReader, watchable

        return TimeStepReader(tap, watchable(self.model, self.layers), self._receive)

    def _charts(self):
        from keras_gated.monitor.dashboard import Chart

        sources = self._reader.sources()
        within = [
            Chart(f"{s.norm}: median over the time steps, 10 to 90 %", bands=[s.tags("p10", "p50", "p90")])
            for s in sources
        ]
        ends = [Chart(f"{s.norm}: first and last time step", s.tags("first", "last")) for s in sources]
        horizon = Chart(
            "horizon: steps until 1 % of the gradient is left", sum((s.tags("horizon") for s in sources), [])
        )
        return {"Gradient of every time step": [horizon, *within, *ends]}

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        if not _can_draw():
            warnings.warn(
                "GradientFlow writes no heat maps, as matplotlib is not installed: pip install 'keras_gated[plots]'.",
                stacklevel=2,
            )

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = {}

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self.profiles = {}
        for source, profiles in self._epoch.items():
            self.profiles[source.name] = profiles = profiles.thinned(self.COLUMNS)
            if len(profiles.step):
                self._file.add(profiles.step[-1], time.time(), self._pictures(source, profiles))
                self._file.flush()

    def _receive(self, received, times):
        events = {}  # all numbers of a step go into one
        for source, profiles in received.items():
            profiles = profiles.taken(profiles.step % self.every == 0)
            summary = Summary.of(profiles, source.backwards)
            self._pieces.setdefault(source.name, []).append(summary)
            epoch = [*([self._epoch[source]] if source in self._epoch else []), profiles]
            self._epoch[source] = Profiles.joined(epoch).thinned(2 * self.COLUMNS)
            tags, numbers = source.tags(*Summary.SCALARS), np.stack([getattr(summary, f) for f in Summary.SCALARS], 1)
            for step, row in zip(summary.step, numbers.tolist(), strict=True):
                events.setdefault(step, {}).update((tag, n) for tag, n in zip(tags, row, strict=True) if n == n)
        for step, scalars in sorted(events.items()):
            self._file.write(step, times[step], scalars)
        self._file.flush()

    def _pictures(self, source, profiles):
        from keras_gated.monitor.dashboard import histogram, image

        (histogram_tag, image_tag), T = source.tags("profile", "heatmap"), profiles.length.max()
        about = f"{source.norm}, median over the epoch. Across: time step t. Up: decades above {FLOOR:g}."
        values = [histogram(histogram_tag, np.linspace(0, T, ROWS + 1), profiles.decades_above(FLOOR), about)]
        if _can_draw():
            from keras_gated.plots import png, time_steps_over_training

            about = f"{source.norm} of every time step t (up) in every training step (across)."
            values.append(image(image_tag, *png(time_steps_over_training(profiles, source.norm)), about))
        return values


def _can_draw():
    return importlib.util.find_spec("matplotlib") is not None
