"""Callbacks for model.fit that write what was measured to TensorBoard."""

import os
import time
from typing import NamedTuple

import keras
import numpy as np

RUN = "gradients"  # a run folder of its own: TensorBoard loses data where two writers share one
DRAIN_EVERY = 256  # batches


class Records(NamedTuple):
    """Norms of S training steps."""

    step: np.ndarray  # (S,) true training steps, from 0
    raw: np.ndarray  # (S,) of the whole gradient before clipping
    clipped: np.ndarray  # (S,) of the whole gradient as the optimizer used it
    variables: dict  # path: (S,) of one variable's gradient before clipping, NaN where it had none

    @classmethod
    def of(cls, norms, paths, first_step):
        """From the `Norms` of a tap, its variables' paths and the number of its step 0."""
        raw, clipped = (np.sqrt(np.sum(n**2, axis=1)) for n in (norms.raw, norms.clipped))
        each = np.where(norms.present, norms.raw, np.nan).T
        return cls(norms.step + first_step, raw, clipped, dict(zip(paths, each, strict=True)))

    def followed_by(self, other):
        paths = dict.fromkeys([*self.variables, *other.variables])
        none = [np.full(len(r.step), np.nan) for r in (self, other)]
        variables = {
            path: np.concatenate([r.variables.get(path, absent) for r, absent in zip((self, other), none, strict=True)])
            for path in paths
        }
        return Records(*map(np.concatenate, zip(self[:3], other[:3], strict=True)), variables)


class GradientNorms(keras.callbacks.Callback):
    """Writes the gradient norms of every training step to TensorBoard (TensorFlow backend).

    Nothing changes in the model, its compile call or what it learns.  Scalars, in the run `<log_dir>/gradients`:

    - grad_norm/raw: norm of the whole gradient before clipping, loss scaling taken out;
    - grad_norm/clipped: the same after clipnorm, global_clipnorm or clipvalue of the optimizer;
    - grad_norm_variable/<variable.path>: norm of one variable's gradient before clipping.

    The axis is the true training step 0, 1, 2, ..., also with steps_per_execution > 1, and goes on when `fit` is
    called again.  (Keras's own TensorBoard callback counts executions.)

    Args:
        log_dir: folder, which may be the one of keras.callbacks.TensorBoard.
        per_variable: whether the variables are written as well.
        every: write each `every`-th step only.

    Attributes:
        records: `Records` of all steps so far, thinned or not.

    Raises:
        ValueError: in fit, on another backend, for a model that is trained on several replicas or by several
            optimizers, and for a second GradientNorms.
    """

    def __init__(self, log_dir, per_variable=True, every=1):
        super().__init__()
        if int(every) != every or every < 1:
            raise ValueError(f"GradientNorms expects every to be a positive integer, received {every!r}.")
        self.log_dir = os.fspath(log_dir)
        self.per_variable = per_variable
        self.every = int(every)
        self.records = Records(np.zeros(0, np.int64), np.zeros(0), np.zeros(0), {})
        self._tap = None
        self._writer = None

    def on_train_begin(self, logs=None):
        if keras.backend.backend() != "tensorflow":
            raise ValueError(
                f"GradientNorms expects the TensorFlow backend, received {keras.backend.backend()!r}. "
                "Train without the callback, or set KERAS_BACKEND=tensorflow."
            )
        from keras_gated.tap import Tap, release

        release(self.model)
        if self._writer is None:  # one file for all fits: TensorBoard may read a second one out of order
            self._writer = ScalarWriter(os.path.join(self.log_dir, RUN))
        self._batches, self._drained_at = 0, time.time()
        if self._tap is not None:
            self._write()  # what a fit that was broken off has left
        if self._tap is None or not self._tap.fits(self.model):
            capacity = (DRAIN_EVERY + self.model.steps_per_execution) * 2
            self._tap = Tap(self.model, capacity, on_failure=self._write)
            self._first_step = len(self.records.step)

    def on_train_batch_begin(self, batch, logs=None):
        self._tap.install()

    def on_train_batch_end(self, batch, logs=None):
        self._tap.remove()
        self._batches += self.model.steps_per_execution
        if self._batches >= DRAIN_EVERY:
            self._write()

    def on_epoch_end(self, epoch, logs=None):
        self._tap.remove()  # the last batch of data of unknown length begins and does not end
        self._write()

    def on_train_end(self, logs=None):
        self._write()

    def _write(self):
        norms = self._tap.drain()
        self._batches, begin, self._drained_at = 0, self._drained_at, time.time()
        if norms is None:
            return
        new = Records.of(norms, self._tap.paths, self._first_step)
        self.records = self.records.followed_by(new)
        times = np.linspace(begin, self._drained_at, len(new.step) + 1)[1:]
        for i in np.flatnonzero(new.step % self.every == 0):
            scalars = {"grad_norm/raw": new.raw[i], "grad_norm/clipped": new.clipped[i]}
            if self.per_variable:
                present = np.flatnonzero(norms.present[i])
                scalars |= {f"grad_norm_variable/{self._tap.paths[v]}": norms.raw[i, v] for v in present}
            self._writer.write(new.step[i], times[i], scalars)
        self._writer.flush()


class ScalarWriter:
    """Writes many scalars of one step as one event.

    Each tf.summary.scalar is an operation of its own, too slow for every step; here protocol buffers go straight
    to TensorBoard's event file.
    """

    def __init__(self, folder):
        from tensorboard.compat.proto import event_pb2, summary_pb2, types_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._file = EventFileWriter(folder)
        self._described = set()
        self._event, self._float = event_pb2.Event, types_pb2.DT_FLOAT
        self._metadata = summary_pb2.SummaryMetadata(
            plugin_data={"plugin_name": "scalars"}, data_class=summary_pb2.DATA_CLASS_SCALAR
        )

    def write(self, step, wall_time, scalars):
        event = self._event(step=int(step), wall_time=wall_time)
        for tag, number in scalars.items():
            value = event.summary.value.add(tag=tag)
            if tag not in self._described:  # once per file
                value.metadata.CopyFrom(self._metadata)
                self._described.add(tag)
            value.tensor.dtype = self._float
            value.tensor.tensor_shape.SetInParent()
            value.tensor.float_val.append(number)
        self._file.add_event(event)

    def flush(self):
        self._file.flush()
