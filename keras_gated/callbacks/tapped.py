"""What callbacks that see inside the training step have in common: how they join the tap of a fit, and when they write.

Hides the tap's life in a fit: made anew when the model is compiled anew, shared by all callbacks, let go at the end.
"""

import os
import time
import warnings
from abc import abstractmethod

import keras

from keras_gated.monitor.event_file import event_file


def opened(callback):
    """The event file of a callback's run, with its charts."""
    from keras_gated.monitor.dashboard import charts

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

    def __init__(self, log_dir: str | os.PathLike[str], every: int = 1):
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
        from keras_gated.monitor.tap import missing, tap_of

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
            self._file = opened(self)
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
