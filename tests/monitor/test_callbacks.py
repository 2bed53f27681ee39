"""What GradientNorms leaves behind: files, records, logs, and nothing else.  (test_tap_matrix.py: the numbers.)"""

import csv
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from monitoring import BATCH, Subclassed, dense, numbers, read
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tiers import daily

import keras_gated as kg
from keras_gated.callbacks.tapped import TapCallback
from keras_gated.monitor.dashboard import histogram
from keras_gated.monitor.event_file import event_file
from keras_gated.monitor.records import Records
from keras_gated.monitor.ring_buffer import Ring
from keras_gated.monitor.tap import Reader

EPOCHS = 2
STEPS = 6 * EPOCHS
SGD = keras.optimizers.SGD


def fit(callbacks, make=dense, optimizer=None, epochs=EPOCHS, **options):
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(optimizer or SGD(0.1), "mse", **options)
    again(model, callbacks, epochs=epochs)
    return model


def again(model, callbacks=(), **options):
    x, y = numbers()
    return model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=list(callbacks), **options)


def variable_tags(folder):
    return [tag for tag in read(folder) if tag.startswith("grad_norm_variable/")]


def test_nothing_is_left_behind(tmp_path):
    model = fit([kg.GradientNorms(tmp_path)])
    assert not set(vars(model.optimizer)) & {"apply", "_clip_gradients"}
    assert type(model.train_function).__name__ == "function"
    assert {e.name for e in tmp_path.iterdir()} == {"gradients"}


def test_the_axis_goes_on_when_fit_is_called_again(tmp_path):
    norms = kg.GradientNorms(tmp_path, per_variable=False)
    model = fit([norms])
    tap, traced = norms._tap, norms._tap.traced
    again(model, [norms])
    assert norms._tap is tap and tap.traced is traced  # nothing traced again
    model.compile("sgd", "mse")
    again(model, [norms])
    np.testing.assert_array_equal(read(tmp_path)["grad_norm/raw"][0], np.arange(STEPS + 12))
    assert not variable_tags(tmp_path)


def test_every_thins_the_file_and_not_the_records(tmp_path):
    norms = kg.GradientNorms(tmp_path, every=5)
    fit([norms])
    np.testing.assert_array_equal(read(tmp_path)["grad_norm/raw"][0], [0, 5, 10])
    np.testing.assert_array_equal(norms.records.step, np.arange(STEPS))


def test_no_step_is_lost_in_a_long_epoch(rng, tmp_path):
    x = rng.normal(size=(2000, 2, 3)).astype("float32")
    model = keras.Sequential([keras.Input((2, 3)), kg.SimpleRNN(2), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=300)
    norms = kg.GradientNorms(tmp_path, per_variable=False)
    model.fit(x, x[:, 0, :1], batch_size=1, verbose=0, callbacks=[norms])
    np.testing.assert_array_equal(norms.records.step, np.arange(2000))
    assert np.all(norms.records.raw > 0)


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            raise KeyboardInterrupt


def test_an_interrupted_fit_loses_no_step_and_leaves_the_model_as_it_was(tmp_path):
    norms = kg.GradientNorms(tmp_path)
    model = fit([], epochs=0)
    with pytest.raises(KeyboardInterrupt):
        again(model, [norms, Interrupt()])
    assert type(model.train_function).__name__ == "function"
    again(model)  # not watched
    again(model, [norms])
    np.testing.assert_array_equal(norms.records.step, np.arange(3 + 6))
    np.testing.assert_array_equal(read(tmp_path)["grad_norm/raw"][0], np.arange(3 + 6))


def test_steps_before_a_failing_one_are_in_the_file(tmp_path):
    x, y = numbers()

    def batches():
        for i in range(3):
            yield x[i : i + BATCH], y[i : i + BATCH]
        raise RuntimeError("the disk is gone")

    signature = tuple(tf.TensorSpec((None, *a.shape[1:])) for a in (x, y))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    model = fit([], epochs=0)
    with pytest.raises(tf.errors.OpError, match="the disk is gone"):
        model.fit(dataset, shuffle=False, verbose=0, callbacks=[kg.GradientNorms(tmp_path)])
    np.testing.assert_array_equal(read(tmp_path)["grad_norm/raw"][0], [0, 1, 2])
    assert type(model.train_function).__name__ == "function"


def test_a_second_one_in_the_same_fit_is_told_so(tmp_path):
    with pytest.raises(ValueError, match="one GradientNorms among its callbacks, received several"):
        fit([kg.GradientNorms(tmp_path / "a"), kg.GradientNorms(tmp_path / "b")])


def test_variables_of_one_name_stay_apart(tmp_path):
    class Twins(keras.Model):
        def __init__(self):
            super().__init__(name="twins")
            self.first, self.second = keras.layers.Dense(4, name="dense"), keras.layers.Dense(1, name="dense")

        def call(self, x):
            return self.second(self.first(x[:, 0]))

    model = fit([kg.GradientNorms(tmp_path)], Twins)
    assert len(model.trainable_variables) == 4 == len(variable_tags(tmp_path))


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_no_finite_gradient_is_logged_as_zero_or_infinite(size, tmp_path):
    """The squares of these are neither in float32."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.0), lambda y_true, y_pred: y_pred * size)
    norms = kg.GradientNorms(tmp_path)
    model.fit(np.full((1, 1), 3.0), np.zeros((1, 1)), verbose=0, callbacks=[norms])
    np.testing.assert_allclose(norms.records.raw, [3 * size], rtol=1e-6)


def fit_one_weight(optimizer, data, folder, dtype=None):
    """y = w x from w = 1, loss mean(y²): the gradient of a batch is 2 w mean(x²)."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", dtype=dtype)
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(optimizer, "mse")
    norms = kg.GradientNorms(folder)
    x = np.array(data, "float32")[:, None]
    model.fit(x, 0 * x, batch_size=1, shuffle=False, verbose=0, callbacks=[norms])
    return norms.records


def test_accumulated_gradients_are_logged_as_they_are_applied(tmp_path):
    """Micro-steps 2 and 8 make one update with their mean 5, clipped to 1; the first of them makes none."""
    optimizer = keras.optimizers.SGD(0.0, gradient_accumulation_steps=2, clipnorm=1.0)
    records = fit_one_weight(optimizer, [1, 2, 1, 2], tmp_path)
    np.testing.assert_allclose(records.raw, [2, 5, 2, 5])
    np.testing.assert_allclose(records.clipped, [2, 1, 2, 1])
    np.testing.assert_array_equal(records.updated, [False, True, False, True])
    assert records.summary() == {"gradient_norm": 5, "gradient_norm_max": 5, "clipped_share": 1, "nonfinite_steps": 0}


def test_an_overflow_is_shown(tmp_path):
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0, clipnorm=1.0), initial_scale=2.0**16)
    records = fit_one_weight(optimizer, [1, 1, 1, 0.5], tmp_path, dtype="mixed_float16")
    np.testing.assert_array_equal(records.raw, [np.inf, np.inf, 2, 0.5])
    np.testing.assert_array_equal(records.clipped, [np.inf, np.inf, 1, 0.5])
    np.testing.assert_array_equal(records.updated, [False, False, True, True])
    np.testing.assert_array_equal(records.loss_scale, [2**16, 2**15, 2**14, 2**14])
    logged = read(tmp_path)
    np.testing.assert_array_equal(logged["grad_norm/nonfinite"][1], [1, 1, 0, 0])
    np.testing.assert_array_equal(logged["grad_norm/loss_scale"][1], records.loss_scale)
    np.testing.assert_array_equal(logged["grad_norm/clip_ratio"], [[2, 3], [0.5, 1]])
    assert records.summary()["nonfinite_steps"] == 2 and records.summary()["clipped_share"] == 0.5


FOUR_IN_JIT = {"jit_compile": True, "steps_per_execution": 4}


@pytest.mark.parametrize("mode", daily([{}, FOUR_IN_JIT], {}), ids=str)
def test_half_precision_trains_the_same_weights(mode, tmp_path):
    def half():
        flat, hidden = keras.layers.Flatten(), keras.layers.Dense(4, "tanh", dtype="mixed_float16")
        return keras.Sequential([keras.Input((4, 3)), flat, hidden, keras.layers.Dense(1)])

    def optimizer():
        return keras.optimizers.LossScaleOptimizer(SGD(0.1, global_clipnorm=1.0), initial_scale=2.0**18)

    norms = kg.GradientNorms(tmp_path)
    watched, unwatched = (fit(c, half, optimizer(), **mode) for c in ([norms], []))
    for a, b in zip(watched.get_weights(), unwatched.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    records = norms.records
    assert 0 < records.finite.sum() < STEPS  # the scale is too large at first
    np.testing.assert_array_equal(records.updated, records.finite)
    assert np.all(np.diff(records.loss_scale)[~records.finite[:-1]] < 0)


@pytest.mark.parametrize("scaled_by", ["optimizer", "factor"])
def test_loss_scaling_is_taken_out(scaled_by, tmp_path):
    """The gradient is 2, however the loss is scaled."""
    optimizer = {
        "optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=1024),
        "factor": lambda: keras.optimizers.SGD(0.0, loss_scale_factor=256, gradient_accumulation_steps=2),
    }[scaled_by]()
    np.testing.assert_allclose(fit_one_weight(optimizer, [1, 1], tmp_path, dtype="mixed_float16").raw, [2, 2])


def test_repeated_rows_of_an_embedding_count_as_one(tmp_path):
    """loss = -mean(y), and a row that is looked up twice: its gradient is 2, not √2."""
    model = keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(4, 1), keras.layers.Flatten()])
    model.compile(keras.optimizers.SGD(0.1, global_clipnorm=1), lambda y_true, y_pred: keras.ops.sum(y_pred, axis=-1))
    norms = kg.GradientNorms(tmp_path)
    model.fit(np.array([[1, 1]]), np.zeros((1, 2)), verbose=0, callbacks=[norms])
    np.testing.assert_allclose(norms.records.raw, [2])
    np.testing.assert_allclose(norms.records.clipped, [2**0.5], rtol=1e-6)  # as Keras clips: it takes √2 for the norm


def test_bad_input_gets_a_clear_sentence(tmp_path):
    with pytest.raises(ValueError, match="every to be a positive integer, received 0"):
        kg.GradientNorms(tmp_path, every=0)


# Logs of the epoch.


class Later(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.logs = dict(logs)


def test_the_logs_of_an_epoch_reach_history_and_the_callbacks_behind(tmp_path):
    norms, early, later = kg.GradientNorms(tmp_path), Later(), Later()
    path, best = str(tmp_path / "log.csv"), str(tmp_path / "{gradient_norm:.3f}.keras")
    stop = keras.callbacks.EarlyStopping(monitor="gradient_norm_max", mode="max", patience=0, baseline=1e9)
    save = keras.callbacks.ModelCheckpoint(best, monitor="gradient_norm", mode="max", save_best_only=True)
    model = fit([], epochs=0, optimizer=SGD(0.1, global_clipnorm=3.0))
    history = again(model, [early, norms, later, keras.callbacks.CSVLogger(path), stop, save], epochs=5).history

    first, last = norms.records.raw.reshape(-1, 6)
    assert model.stop_training  # after two epochs of five
    expected = {
        "gradient_norm": [np.median(first), np.median(last)],
        "gradient_norm_max": [first.max(), last.max()],
        "clipped_share": [np.mean(first > 3), np.mean(last > 3)],
        "nonfinite_steps": [0, 0],
    }
    assert 0 < expected["clipped_share"][0] < 1
    for name, values in expected.items():
        assert history[name] == values and later.logs[name] == values[-1] and name not in early.logs
    with open(path) as file:
        assert [float(row["gradient_norm_max"]) for row in csv.DictReader(file)] == expected["gradient_norm_max"]
    assert (tmp_path / f"{np.median(first):.3f}.keras").exists()


def test_the_logs_are_of_one_epoch(tmp_path):
    norms = kg.GradientNorms(tmp_path)
    history = again(fit([], epochs=0), [norms], epochs=2).history
    of_each = norms.records.raw.reshape(2, 6)
    np.testing.assert_array_equal(history["gradient_norm"], np.median(of_each, axis=1))


def test_the_learning_rate_is_the_one_in_use(tmp_path):
    norms = kg.GradientNorms(tmp_path)
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    fit([norms], optimizer=kg.ClipNorm(SGD(decay)), steps_per_execution=4)
    np.testing.assert_allclose(norms.records.learning_rate, 0.1 * 0.5 ** np.arange(STEPS), rtol=1e-5)
    np.testing.assert_allclose(read(tmp_path)["grad_norm/learning_rate"][1], norms.records.learning_rate)


def test_a_function_for_a_learning_rate_is_not_called_once_more(tmp_path):
    calls = []
    fit([kg.GradientNorms(tmp_path)], optimizer=SGD(lambda: calls.append(0) or 0.1), run_eagerly=True)
    watched = len(calls)
    calls.clear()
    fit([], optimizer=SGD(lambda: calls.append(0) or 0.1), run_eagerly=True)
    assert watched == len(calls)


# Resumed, broken off, several.


def test_resumed_training_goes_on_where_the_checkpoint_was(tmp_path):
    first = kg.GradientNorms(tmp_path / "first")
    model = fit([first], epochs=1, optimizer=SGD(0.1, gradient_accumulation_steps=2))
    model.save(tmp_path / "model.keras")
    model, norms = keras.models.load_model(tmp_path / "model.keras"), kg.GradientNorms(tmp_path / "second")
    again(model, [norms], initial_epoch=1, epochs=2)
    np.testing.assert_array_equal(norms.records.step, np.arange(6, 12))
    whole = kg.GradientNorms(tmp_path / "whole")
    fit([whole], optimizer=SGD(0.1, gradient_accumulation_steps=2))
    np.testing.assert_allclose([*first.records.raw, *norms.records.raw], whole.records.raw, rtol=1e-6)


def test_a_restored_backup_goes_on_where_it_was(tmp_path):
    def callbacks():
        return [kg.GradientNorms(tmp_path), keras.callbacks.BackupAndRestore(tmp_path / "backup")]

    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise RuntimeError("the power is gone")

    norms, backup = callbacks()
    with pytest.raises(RuntimeError, match="the power is gone"):
        fit([norms, backup, Fails()])
    norms, backup = callbacks()
    fit([norms, backup])
    np.testing.assert_array_equal(norms.records.step, np.arange(6, 12))


BROKEN_OFF = """
import sys, keras, keras_gated as kg
from monitoring import BATCH, dense, numbers

class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            raise KeyboardInterrupt

model, (x, y) = dense(), numbers()
model.compile("sgd", "mse")
model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[kg.GradientNorms(sys.argv[1]), Interrupt()])
"""


@pytest.mark.slow
def test_a_program_that_is_broken_off_leaves_its_steps_in_the_file(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", BROKEN_OFF, str(tmp_path)], capture_output=True, text=True, env=environment
    )
    assert "KeyboardInterrupt" in run.stderr
    np.testing.assert_array_equal(read(tmp_path)["grad_norm/raw"][0], [0, 1, 2])


def test_records_may_be_read_at_any_time(tmp_path):
    norms, seen = kg.GradientNorms(tmp_path), []
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(len(norms.records.step)))
    fit([norms, look])
    assert seen == [*range(1, STEPS + 1)]


class Sums(Reader):
    """Writes the sum of the first gradient, every third step."""

    name = "GradientSums"

    def __init__(self, tap):
        self.ring, self.tap, self.got = tap.ring("sums", 2), tap, []

    def install(self, tap):
        tap.wrap(self.tap.optimizer, "apply", self.applied)

    def applied(self, apply, grads, variables=None):
        total = tf.reduce_sum(list(grads)[0])
        third = self.tap.step() % 3 == 0
        tf.cond(third, lambda: self.tap.write(self.ring, [total, 7.0]), lambda: None)
        return apply(grads, variables)

    def receive(self, drained):
        rows = drained.rows[self.ring]
        written = rows.written[:, 0]
        self.got += zip(drained.step[written], rows.values[written, 0], strict=True)


class GradientSums(TapCallback):
    RUN = "gradients"

    def _make_reader(self, tap):
        return Sums(tap)

    def _charts(self):
        return {}


@pytest.mark.parametrize("order", daily([1, -1], 1))
def test_several_callbacks_share_one_tap_and_one_file(order, tmp_path):
    alone = kg.GradientNorms(tmp_path / "alone")
    fit([alone])
    norms, sums = kg.GradientNorms(tmp_path), GradientSums(tmp_path, every=3)
    model = fit([norms, sums][::order], steps_per_execution=4)
    tap, traced = norms._tap, norms._tap.traced
    assert sums._tap is tap and norms._file is sums._file
    assert [step for step, _ in sums._reader.got] == [0, 3, 6, 9]
    assert all(row[1] == 7 and row[0] != 0 for _, row in sums._reader.got)
    np.testing.assert_allclose(norms.records.raw, alone.records.raw, rtol=1e-6)

    again(model, [norms, sums][::order])
    assert norms._tap is tap and tap.traced is traced  # nothing traced again
    again(model, [sums])
    assert tap.traced is not traced
    assert [step for step, _ in sums._reader.got] == [*range(0, STEPS + 12, 3)]
    np.testing.assert_array_equal(norms.records.step, np.arange(STEPS + 6))
    again(model, [norms])
    np.testing.assert_array_equal(norms.records.step, [*range(STEPS + 6), *range(STEPS + 12, STEPS + 18)])


def test_one_callback_for_two_models(tmp_path):
    norms = kg.GradientNorms(tmp_path)
    one, two = fit([norms], epochs=1), fit([norms], Subclassed, epochs=1)
    again(one, [norms])
    again(two, [norms])
    np.testing.assert_array_equal(norms.records.step, np.arange(4 * 6))
    each = np.array([np.isnan(norms.records.variables[v.path]) for v in one.trainable_variables])
    np.testing.assert_array_equal(each, np.tile(np.repeat([False, True, False, True], 6), (4, 1)))


def test_files_are_the_same_without_tensorflow(tmp_path, monkeypatch):
    found = {}
    for backend in ("tensorflow", "jax"):
        monkeypatch.setattr(keras.backend, "backend", lambda backend=backend: backend)
        file = event_file(tmp_path / backend)
        for step in range(4):
            file.write(step, step / 3, {"a": step**2, "b": 1 / 7})
        file.add(9, 0.5, [histogram("c", np.arange(3), np.arange(2), "about")])
        file.flush()
        (path,) = (tmp_path / backend).iterdir()
        assert path.name.startswith("events.out.tfevents.")
        version, *found[backend] = EventFileLoader(str(path)).Load()
        assert version.file_version == "brain.Event:2"
    assert found["tensorflow"] == found["jax"] and len(found["jax"]) == 5


# Long runs.


def test_a_row_of_an_earlier_round_is_not_taken_for_a_new_one():
    ring = Ring("rows", 1, 4, tf.distribute.get_strategy())
    for step in (0, 1, 2, 3, 5, 7):
        ring.write(tf.constant(step, tf.int64), [10.0 * step])
    rows = ring.read(np.arange(4, 8))
    np.testing.assert_array_equal(rows.written[:, 0], [False, True, False, True])
    np.testing.assert_array_equal(rows.values[rows.written], [[50], [70]])


@pytest.mark.slow
def test_many_calls_of_apply_in_one_execution_are_not_lost(tmp_path):
    class Often(Subclassed):
        def train_step(self, data):
            x, y = data
            for _ in range(20):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
                self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    norms = kg.GradientNorms(tmp_path, per_variable=False)
    x, y = numbers()
    fit([], Often, epochs=0).fit(x, y, batch_size=1, verbose=0, callbacks=[norms])
    np.testing.assert_array_equal(norms.records.step, np.arange(len(x) * 20))


def test_a_step_of_twenty_variables_takes_less_than_two_kilobytes(tmp_path):
    layers = [keras.layers.Dense(2, name=f"a_layer_of_a_long_name_{i}") for i in range(10)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    model.compile(SGD(1e-3), "mse")
    model.fit(np.ones((1000, 2)), np.ones((1000, 2)), batch_size=1, verbose=0, callbacks=[kg.GradientNorms(tmp_path)])
    (file,) = (tmp_path / "gradients").iterdir()
    assert len(variable_tags(tmp_path)) == 20 and file.stat().st_size < 2000 * 1000


def test_records_grow_by_what_they_hold(tmp_path):
    """Joining them at every look at the device would take the square of the time."""
    norms, pieces = kg.GradientNorms(tmp_path), []
    norms._epoch = pieces
    record = Records(*[np.zeros(256)] * 6, np.zeros((256, 1)), {f"v{i}": np.zeros(256, np.float32) for i in range(20)})
    for _ in range(400):
        norms._pieces.append(record)
    records = norms.records
    assert len(records.step) == 400 * 256 and norms.records is records
    assert sum(a.nbytes for a in [*records[:-1], *records.variables.values()]) < 200 * len(records.step)


# Names that Keras may lose.


class WithoutClipping(SGD):
    """A Keras whose optimizers clip under another name."""

    def __getattribute__(self, name):
        if name == "_clip_gradients":
            raise AttributeError(name)
        return super().__getattribute__(name)

    def _backend_apply_gradients(self, grads, trainable_variables):
        self._backend_update_step(grads, trainable_variables, self.learning_rate)


class WithoutRate(SGD):
    @property
    def learning_rate(self):
        return self._rate

    def __init__(self, learning_rate):
        super().__init__(learning_rate)
        self._rate = self.__dict__.pop("_learning_rate")


class WithoutApply(SGD):
    def __getattribute__(self, name):
        if name == "apply":
            raise AttributeError(name)
        return super().__getattribute__(name)

    def apply_gradients(self, pairs):
        return keras.optimizers.Optimizer.apply(self, *zip(*pairs, strict=True))


LOST = {
    "_clip_gradients": (WithoutClipping, "grad_norm/clipped and clip_ratio is left out"),
    "_learning_rate": (WithoutRate, "grad_norm/learning_rate is left out"),
    "apply": (WithoutApply, "no training step is logged"),
}


@pytest.mark.parametrize("name", LOST)
def test_a_name_that_the_optimizer_lost_is_told_once_and_the_rest_is_logged(name, tmp_path):
    optimizer, sentence = LOST[name]
    norms, whole = kg.GradientNorms(tmp_path / "a"), kg.GradientNorms(tmp_path / "b")
    with pytest.warns(UserWarning, match=f"GradientNorms expects .*{name}, received Keras .*{sentence}") as told:
        model = fit([norms], optimizer=optimizer(0.1))
    assert len([w for w in told if "expects" in str(w.message)]) == 1
    unwatched = fit([whole])
    for a, b in zip(model.get_weights(), unwatched.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    if name == "apply":
        assert len(norms.records.step) == 0
        return
    np.testing.assert_allclose(norms.records.raw, whole.records.raw)
    lost = {"_clip_gradients": {"grad_norm/clipped", "grad_norm/clip_ratio"}}.get(name, {"grad_norm/learning_rate"})
    assert {t.partition("/")[2] for t in read(tmp_path / "b")} > {t.partition("/")[2] for t in lost}
    assert len(read(tmp_path / "b")) - len(read(tmp_path / "a")) == len(lost)
    assert not lost & set(read(tmp_path / "a"))


@pytest.mark.parametrize("name", ["make_train_function", "distribute_strategy", "steps_per_execution"])
def test_a_name_that_the_model_lost_is_told_once(name, tmp_path):
    class Lost(Subclassed):
        lost = False

        def __getattribute__(self, attribute):
            if attribute == name and object.__getattribute__(self, "lost"):
                raise AttributeError(attribute)
            return super().__getattribute__(attribute)

    norms = kg.GradientNorms(tmp_path)
    model = Lost()
    model.compile("sgd", "mse")
    norms.set_model(model)
    norms.set_params({})
    model.lost = True
    with pytest.warns(UserWarning, match=f"expects Lost.{name}, received Keras .*no training step is logged") as told:
        norms.on_train_begin()
    assert len([w for w in told if "expects" in str(w.message)]) == 1
    for call in (norms.on_train_batch_begin, norms.on_train_batch_end, norms.on_epoch_begin):
        call(0)
    norms.on_epoch_end(0, {})
    norms.on_train_end()
    assert len(norms.records.step) == 0


def test_an_optimizer_that_is_not_the_model_s_is_told(tmp_path):
    class Own(Subclassed):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            self.own.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    model = Own()
    model.own = SGD(0.1)
    model.compile(SGD(0.1), "mse")
    with pytest.warns(UserWarning, match="GradientNorms saw no training step: the optimizer .* was not called"):
        again(model, [kg.GradientNorms(tmp_path)])
