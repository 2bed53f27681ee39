"""Callbacks for model.fit that write what was measured to TensorBoard."""

import importlib.util
import os
import time
import warnings
from abc import abstractmethod

import keras
import numpy as np

from keras_gated.events import event_file, steps_made
from keras_gated.gates import activity_of, gate_names, gates, retention_of
from keras_gated.profiles import ROWS, Profiles, Summary
from keras_gated.records import Records
from keras_gated.trajectory import measuring, recurrent_layers

FLOOR = 1e-8  # of the profiles in histograms: below, a gradient does not reach


def _opened(callback):
    """The event file of a callback's run, with its charts."""
    from keras_gated.dashboard import charts

    file = event_file(os.path.join(callback.log_dir, callback.RUN))
    file.add(0, time.time(), [charts(callback._charts())])
    return file


class TapCallback(keras.callbacks.Callback):
    """A callback that sees inside the training step (TensorFlow backend), through a reader of `keras_gated.tap`.

    Args:
        log_dir: folder, which may be the one of keras.callbacks.TensorBoard and of other callbacks.
        every: write each `every`-th step only.
    """

    RUN = None  # the folder in log_dir: a run of its own, for TensorBoard loses data where two writers share one

    def __init__(self, log_dir, every=1):
        super().__init__()
        if int(every) != every or every < 1:
            raise ValueError(f"{type(self).__name__} expects every to be a positive integer, received {every!r}.")
        self.log_dir = os.fspath(log_dir)
        self.every = int(every)
        self._tap = self._reader = self._file = None

    @abstractmethod
    def _make_reader(self, tap):
        """-> `Reader`, whenever the model has been compiled anew."""

    @abstractmethod
    def _charts(self):
        """-> {title: [`Chart`]}, for TensorBoard's page Custom Scalars."""

    def on_train_begin(self, logs=None):
        if keras.backend.backend() != "tensorflow":
            raise ValueError(
                f"{type(self).__name__} expects the TensorFlow backend, received {keras.backend.backend()!r}. "
                "Train without the callback, or set KERAS_BACKEND=tensorflow."
            )
        from keras_gated.tap import missing, tap_of

        if names := missing(self.model):
            self._tap = self._warn(names, "no training step is logged")
            return
        tap = tap_of(self.model)
        if tap is not self._tap:
            if self._tap:
                self._tap.deliver()  # what a fit that was broken off has left
            reader = self._make_reader(tap)
            reader.next_step = self._reader.next_step if self._reader else 0
            self._tap, self._reader = tap, reader
        if self._reader.missing:
            names, tags = zip(*self._reader.missing, strict=True)
            self._warn(names, f"{', '.join(dict.fromkeys(tags))} is left out")
        if self._file is None:  # one for all fits: TensorBoard may read a second one out of order
            self._file = _opened(self)
        tap.join(self._reader, self.params)
        self._started_at = self._reader.next_step

    def _warn(self, names, consequence):
        warnings.warn(
            f"{type(self).__name__} expects {', '.join(dict.fromkeys(names))}, received Keras {keras.__version__} "
            f"without: {consequence}. Take a version of Keras that keras_gated was tested with, 3.13 to 3.15.",
            stacklevel=3,
        )

    def on_train_batch_begin(self, batch, logs=None):
        if self._tap:
            self._tap.install()

    def on_train_batch_end(self, batch, logs=None):
        if self._tap:
            self._tap.remove()

    def on_epoch_end(self, epoch, logs=None):
        if self._tap:
            self._tap.remove()  # the last batch of data of unknown length begins and does not end
            self._tap.deliver()

    def on_train_end(self, logs=None):
        if self._tap:
            self._tap.leave()
            if self._tap.begun and self._reader.next_step == self._started_at:
                warnings.warn(
                    f"{type(self).__name__} saw no training step: the optimizer that model.compile was given was not "
                    "called. Call self.optimizer.apply in train_step, or train without the callback.",
                    stacklevel=2,
                )


class GradientNorms(TapCallback):
    """Writes the gradient norms of every training step to TensorBoard (TensorFlow backend).

    Nothing changes in the model, its compile call or what it learns.  Scalars, in the run `<log_dir>/gradients`:

    - grad_norm/raw: norm of the whole gradient before clipping: loss scaling taken out, summed over replicas, the mean
      where gradients are accumulated, equal rows of an embedding added up;
    - grad_norm/clipped: the same after clipping, as it is applied;
    - grad_norm/clip_ratio: clipped / raw, where the optimizer made an update;
    - grad_norm/nonfinite: 1 in a step whose gradient has an inf or NaN, else 0;
    - grad_norm/loss_scale, under loss scaling, and grad_norm/learning_rate of an optimizer that has one;
    - grad_norm_variable/<variable.path>: norm of one variable's gradient before clipping;
    - grad_norm_replica/<replica>: norm of what one of several replicas adds to the gradient.

    A training step is one call of `optimizer.apply`: a train_step of your own that calls it three times makes three
    steps, each with the variables it was called for.  The axis is the true step, also with steps_per_execution > 1; it
    starts at the optimizer's iterations, 0 for a new one, and goes on when `fit` is called again.  (Keras's own
    TensorBoard callback counts executions, and starts again.)

    At the end of an epoch its logs receive, for the callbacks that stand behind this one in the list and for History:
    gradient_norm (median of the updates) and gradient_norm_max, both before clipping and of finite gradients;
    clipped_share, of those updates; and nonfinite_steps.

    With several replicas the gradients are summed over them once more, where Keras clips each by itself.

    Args:
        log_dir: folder, which may be the one of keras.callbacks.TensorBoard.
        per_variable: whether the variables are written as well.
        every: write each `every`-th step only.

    Attributes:
        records: `Records` of all steps so far, thinned or not.

    Raises:
        ValueError: in fit, on another backend, and for a second GradientNorms.
    """

    RUN = "gradients"

    def __init__(self, log_dir, per_variable=True, every=1):
        super().__init__(log_dir, every)
        self.per_variable = per_variable
        self._pieces, self._epoch = [], []

    @property
    def records(self):
        if self._tap:
            self._tap.deliver()
        self._pieces = [Records.joined(self._pieces)]
        return self._pieces[0]

    def _make_reader(self, tap):
        from keras_gated.norms import NormReader

        return NormReader(tap, self._receive)

    def _charts(self):
        from keras_gated.dashboard import Chart

        charts = [
            Chart("the whole gradient, before and after clipping", ("grad_norm/raw", "grad_norm/clipped")),
            Chart("what clipping leaves: clipped / raw", ("grad_norm/clip_ratio",)),
        ]
        if self.per_variable:
            charts.append(Chart("each variable's gradient, before clipping", ("grad_norm_variable/",)))
        return {"Norm of the gradient, every training step": charts}

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = []

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        if logs is not None:
            logs.update(Records.joined(self._epoch).summary())

    def _receive(self, norms, times):
        records = Records.of(norms, self._reader.paths)
        self._pieces.append(records)
        self._epoch.append(records)
        for i in np.flatnonzero(records.step % self.every == 0):
            self._file.write(records.step[i], times[i], self._scalars(records, norms, i))
        self._file.flush()

    def _scalars(self, records, norms, i):
        raw, clipped, finite = records.raw[i], records.clipped[i], records.finite[i]
        scalars = {"grad_norm/raw": raw, "grad_norm/nonfinite": not finite}
        if self._reader.sees_clipping:
            scalars["grad_norm/clipped"] = clipped
            if finite and records.updated[i]:
                scalars["grad_norm/clip_ratio"] = clipped / raw if raw else 1.0
        if self._reader.scaled:
            scalars["grad_norm/loss_scale"] = records.loss_scale[i]
        if not np.isnan(records.learning_rate[i]):
            scalars["grad_norm/learning_rate"] = records.learning_rate[i]
        if self._reader.several:
            scalars |= {f"grad_norm_replica/{r}": n for r, n in enumerate(records.replicas[i])}
        if self.per_variable:
            present = np.flatnonzero(norms.present[i])
            scalars |= {f"grad_norm_variable/{self._reader.paths[v]}": norms.raw[i, v] for v in present}
        return scalars


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

    def __init__(self, log_dir, layers=None, every=1):
        super().__init__(log_dir, every)
        self.layers = layers
        self.profiles = {}
        self._pieces, self._epoch = {}, {}

    @property
    def records(self):
        if self._tap:
            self._tap.deliver()
        self._pieces = {name: [Summary.joined(pieces)] for name, pieces in self._pieces.items()}
        return {name: summary for name, (summary,) in self._pieces.items()}

    def _make_reader(self, tap):
        from keras_gated.time_steps import TimeStepReader, watchable

        return TimeStepReader(tap, watchable(self.model, self.layers), self._receive)

    def _charts(self):
        from keras_gated.dashboard import Chart

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
        from keras_gated.dashboard import histogram, image

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


class GateActivity(keras.callbacks.Callback):
    """Writes to TensorBoard what the gates of every recurrent layer do on one fixed batch.

    Gates are the chapter's: i, f, o of LSTM; z, r of GRU, where z writes (h = (1 - z) h₋ + z h̃), whatever a layer of
    Keras calls it.  Scalars, in the run `<log_dir>/layer_gates`, over all units, time steps and examples:

    - gate/<layer>/<gate>/mean;
    - gate/<layer>/<gate>/low and high: shares below 0.05 and above 0.95, where a gate is as good as shut or open;
    - gate/<layer>/retention: -1 / ln f in steps, the median over the units: for how long a unit retains what it holds
      (f is the forget gate, and 1 - z of GRU).

    They are written before the training and then after each epoch, or after each so many training steps.  The model
    runs without dropout, and is left as it was.

    Args:
        log_dir: folder, which may be the one of keras.callbacks.TensorBoard and of other callbacks.
        x: one batch of the model's inputs.
        every: "epoch", or a number of training steps.

    Attributes:
        records: {layer: {gate: `GateStatistics`}} of the last time, per time step in the order of processing.

    Raises:
        ValueError: in fit, for a model without a layer that has gates.
    """

    RUN = "layer_gates"  # behind "gradients", as TensorBoard orders charts by run

    def __init__(self, log_dir, x, every="epoch"):
        super().__init__()
        if every != "epoch" and (int(every) != every or every < 1):
            raise ValueError(f'GateActivity expects every to be "epoch" or a positive integer, received {every!r}.')
        self.log_dir = os.fspath(log_dir)
        self.x = x
        self.every = every
        self.records = {}
        self._file = self._measured = None

    def on_train_begin(self, logs=None):
        layers = recurrent_layers(self.model)
        self._gates = {label: names for label, layer in layers.items() if (names := gate_names(layer))}
        if not self._gates:
            raise ValueError(
                f"GateActivity expects a model with an LSTM or GRU layer, received {self.model.name!r} with "
                f"{', '.join(layers) or 'no recurrent layer'}."
            )
        if self._measured is not self.model:
            self._measured, self._measure = self.model, measuring(self.model, gates)
        self._step = self._epoch_begin = steps_made(self.model.optimizer)
        if self._file is None:
            self._file = _opened(self)
        self._write()

    def _charts(self):
        from keras_gated.dashboard import Chart

        def tags(label, names, *what):
            return [f"gate/{label}/{gate}/{each}" for gate in names for each in what]

        layers = self._gates.items()
        means = [Chart(f"gates of {label}: mean", tags(label, names, "mean")) for label, names in layers]
        ends = [
            Chart(f"gate {gate} of {label}: share below 0.05, above 0.95", tags(label, gate, "low", "high"))
            for label, names in layers
            for gate in names
        ]
        retention = Chart(
            "retention: steps in which a factor e is lost", [f"gate/{label}/retention" for label in self._gates]
        )
        return {"Gates, on a fixed batch": [retention, *means, *ends]}

    def on_train_batch_end(self, batch, logs=None):
        self._step = self._epoch_begin + batch + 1
        if self.every != "epoch" and self._step - self._written >= self.every:
            self._write()

    def on_epoch_end(self, epoch, logs=None):
        self._epoch_begin = self._step
        if self.every == "epoch":
            self._write()

    def _write(self):
        measured, scalars = self._measure(self.x), {}
        for label in measured:
            self.records[label] = activity_of(measured[label])
            for gate, statistics in self.records[label].items():
                for what in ("mean", "low", "high"):
                    scalars[f"gate/{label}/{gate}/{what}"] = np.nanmean(getattr(statistics, what))
            scalars[f"gate/{label}/retention"] = np.median(retention_of(measured[label]))
        self._file.write(self._step, time.time(), scalars)
        self._file.flush()
        self._written = self._step
