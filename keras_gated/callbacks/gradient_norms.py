"""GradientNorms: the gradient norms of every training step, in TensorBoard."""

import os

import numpy as np

from keras_gated.callbacks.tapped import TapCallback
from keras_gated.monitor.records import Records


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

    def __init__(self, log_dir: str | os.PathLike[str], per_variable: bool = True, every: int = 1):
        super().__init__(log_dir, every)
        self.per_variable = per_variable
        self._pieces, self._epoch = [], []

    @property
    def records(self) -> Records:
        if self._tap:
            self._tap.deliver()
        self._pieces = [Records.joined(self._pieces)]
        return self._pieces[0]

    def _make_reader(self, tap):
        from keras_gated.monitor.optimizer_norms import NormReader

        return NormReader(tap, self._receive)

    def _charts(self):
        from keras_gated.monitor.dashboard import Chart

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
