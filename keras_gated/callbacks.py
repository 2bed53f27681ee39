"""Callbacks for model.fit that write what was measured to TensorBoard."""

import os
import warnings
from abc import abstractmethod
from typing import NamedTuple

import keras
import numpy as np

from keras_gated.events import event_file

RUN = "gradients"  # a run folder of its own: TensorBoard loses data where two writers share one
CLIPPED = 1 - 1e-5  # what is longer was rounded, not clipped


class TapCallback(keras.callbacks.Callback):
    """A callback that sees inside the training step (TensorFlow backend), through a probe of `keras_gated.tap`.

    Args:
        log_dir: folder, which may be the one of keras.callbacks.TensorBoard and of other callbacks.
        every: write each `every`-th step only.
    """

    def __init__(self, log_dir, every=1):
        super().__init__()
        if int(every) != every or every < 1:
            raise ValueError(f"{type(self).__name__} expects every to be a positive integer, received {every!r}.")
        self.log_dir = os.fspath(log_dir)
        self.every = int(every)
        self._tap = self._probe = self._file = None

    @abstractmethod
    def _make_probe(self, tap):
        """-> `Probe`, whenever the model has been compiled anew."""

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
        if self._file is None:  # one for all fits: TensorBoard may read a second one out of order
            self._file = event_file(os.path.join(self.log_dir, RUN))
        tap = tap_of(self.model)
        if tap is not self._tap:
            if self._tap:
                self._tap.deliver()  # what a fit that was broken off has left
            probe = self._make_probe(tap)
            probe.next_step = self._probe.next_step if self._probe else 0
            self._tap, self._probe = tap, probe
        if self._probe.missing:
            names, tags = zip(*self._probe.missing, strict=True)
            self._warn(names, f"{', '.join(dict.fromkeys(tags))} is left out")
        tap.join(self._probe, self.params)
        self._started_at = self._probe.next_step

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
            if self._tap.begun and self._probe.next_step == self._started_at:
                warnings.warn(
                    f"{type(self).__name__} saw no training step: the optimizer that model.compile was given was not "
                    "called. Call self.optimizer.apply in train_step, or train without the callback.",
                    stacklevel=2,
                )


class Records(NamedTuple):
    """Norms of S training steps of which R replicas took part."""

    step: np.ndarray  # (S,) true training steps
    raw: np.ndarray  # (S,) of the whole gradient before clipping
    clipped: np.ndarray  # (S,) of the whole gradient as the optimizer used it
    updated: np.ndarray  # (S,) whether the optimizer made an update: not where it accumulated or left the step out
    loss_scale: np.ndarray  # (S,) that was taken out, 1 without loss scaling
    learning_rate: np.ndarray  # (S,) NaN where there are several, or only a Python function knows
    replicas: np.ndarray  # (S, R) of what each replica adds to the whole gradient
    variables: dict  # path: (S,) of one variable's gradient before clipping, NaN where it had none

    @property
    def finite(self):
        """(S,) whether the whole gradient has neither inf nor NaN."""
        return np.isfinite(self.raw)

    @classmethod
    def of(cls, norms, paths):
        """From the `Norms` of a probe and its variables' paths."""
        raw, clipped = (np.sqrt(np.sum(n**2, axis=1)) for n in (norms.raw, norms.clipped))
        each = np.where(norms.present, norms.raw, np.nan).astype(np.float32).T
        rest = (norms.updated, norms.loss_scale, norms.learning_rate, norms.replicas)
        return cls(norms.step, raw, clipped, *rest, dict(zip(paths, each, strict=True)))

    @classmethod
    def joined(cls, pieces):
        """One after the other."""
        if len(pieces) == 1:
            return pieces[0]
        none = [np.zeros(0), np.zeros(0), np.zeros(0, bool), np.zeros(0), np.zeros(0)]
        if not pieces:
            return cls(np.zeros(0, np.int64), *none, np.zeros((0, 1)), {})
        absent = [np.full(len(r.step), np.nan, np.float32) for r in pieces]
        variables = {
            path: np.concatenate([r.variables.get(path, nan) for r, nan in zip(pieces, absent, strict=True)])
            for path in dict.fromkeys(path for r in pieces for path in r.variables)
        }
        replicas = max(r.replicas.shape[1] for r in pieces)
        widened = [
            np.pad(r.replicas, ((0, 0), (0, replicas - r.replicas.shape[1])), constant_values=np.nan) for r in pieces
        ]
        columns = [np.concatenate(column) for column in list(zip(*pieces, strict=True))[:-2]]
        return cls(*columns, np.concatenate(widened), variables)

    def summary(self):
        """What goes into the logs of an epoch: of its updates with a finite gradient, and how many were not."""
        used = self.updated & self.finite
        raw, clipped = self.raw[used], self.clipped[used]
        some = len(raw) > 0
        return {
            "gradient_norm": float(np.median(raw)) if some else np.nan,
            "gradient_norm_max": float(np.max(raw)) if some else np.nan,
            "clipped_share": float(np.mean(clipped < raw * CLIPPED)) if some else 0.0,
            "nonfinite_steps": int(np.sum(~self.finite)),
        }


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

    def _make_probe(self, tap):
        from keras_gated.norms import NormProbe

        return NormProbe(tap, self._receive)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = []

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        if logs is not None:
            logs.update(Records.joined(self._epoch).summary())

    def _receive(self, norms, times):
        records = Records.of(norms, self._probe.paths)
        self._pieces.append(records)
        self._epoch.append(records)
        for i in np.flatnonzero(records.step % self.every == 0):
            self._file.write(records.step[i], times[i], self._scalars(records, norms, i))
        self._file.flush()

    def _scalars(self, records, norms, i):
        raw, clipped, finite = records.raw[i], records.clipped[i], records.finite[i]
        scalars = {"grad_norm/raw": raw, "grad_norm/nonfinite": not finite}
        if self._probe.sees_clipping:
            scalars["grad_norm/clipped"] = clipped
            if finite and records.updated[i]:
                scalars["grad_norm/clip_ratio"] = clipped / raw if raw else 1.0
        if self._probe.scaled:
            scalars["grad_norm/loss_scale"] = records.loss_scale[i]
        if not np.isnan(records.learning_rate[i]):
            scalars["grad_norm/learning_rate"] = records.learning_rate[i]
        if self._probe.several:
            scalars |= {f"grad_norm_replica/{r}": n for r, n in enumerate(records.replicas[i])}
        if self.per_variable:
            present = np.flatnonzero(norms.present[i])
            scalars |= {f"grad_norm_variable/{self._probe.paths[v]}": norms.raw[i, v] for v in present}
        return scalars
