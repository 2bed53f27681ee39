"""GateActivity: what the gates do on one fixed batch while a model is trained, in TensorBoard."""

import os
import time
from typing import Any, Literal

import keras
import numpy as np

from keras_gated.callbacks.tapped import opened
from keras_gated.gradients.gates import activity_of, gate_names, gates, retention_of
from keras_gated.gradients.trajectory import measuring, recurrent_layers
from keras_gated.monitor.event_file import steps_made


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

    def __init__(self, log_dir: str | os.PathLike[str], x: Any, every: Literal["epoch"] | int = "epoch"):
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
            self._file = opened(self)
        self._write()

    def _charts(self):
        from keras_gated.monitor.dashboard import Chart

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
