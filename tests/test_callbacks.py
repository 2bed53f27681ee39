"""GradientNorms against a manual GradientTape loop, and against a run without it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import keras_gated as kg

BATCH, SIZE, EPOCHS = 8, 43, 2  # the last batch is short
STEPS = 6 * EPOCHS


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.recurrent, self.read_out = kg.GRU(5), keras.layers.Dense(1)

    def call(self, x):
        return self.read_out(self.recurrent(x))


def sequential():
    return keras.Sequential([keras.Input((6, 3)), kg.LSTM(5), keras.layers.Dense(1)])


def functional():
    x = keras.Input((None, 3))
    return keras.Model(x, keras.layers.Dense(1)(keras.layers.Bidirectional(kg.SimpleRNN(4))(x)))


OPTIMIZERS = {
    "none": lambda: keras.optimizers.SGD(0.1),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.3),
    "clipvalue": lambda: keras.optimizers.Adam(0.01, clipvalue=0.05),
}
MODELS = {"sequential": sequential, "functional": functional, "subclassed": Subclassed}


@pytest.fixture
def data(rng):
    x = rng.normal(size=(SIZE, 6, 3)).astype("float32")
    return x, x[:, 0, :1]


def fit(make, optimizer, data, callbacks=(), epochs=EPOCHS, **options):
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(optimizer(), "mse", **options)
    model.fit(*data, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def manual(make, optimizer, data):
    """-> raw and clipped global norm, and the raw norm of each variable, of every step."""
    keras.utils.set_random_seed(0)
    model, optimizer, (x, y) = make(), optimizer(), data
    raw, clipped, each = [], [], []
    for _ in range(EPOCHS):
        for i in range(0, SIZE, BATCH):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x[i : i + BATCH], training=True) - y[i : i + BATCH]) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            raw.append(np.sqrt(sum(np.sum(np.square(g)) for g in gradients)))
            clipped.append(np.sqrt(sum(np.sum(np.square(g)) for g in by_hand(optimizer, gradients, raw[-1]))))
            each.append([np.linalg.norm(g) for g in gradients])
            optimizer.apply(gradients, model.trainable_variables)
    return np.array(raw), np.array(clipped), np.array(each)


def by_hand(optimizer, gradients, norm):
    if optimizer.global_clipnorm:
        return [g * min(1, optimizer.global_clipnorm / norm) for g in gradients]
    if optimizer.clipnorm:
        return [g * min(1, optimizer.clipnorm / np.linalg.norm(g)) for g in gradients]
    if optimizer.clipvalue:
        return [np.clip(g, -optimizer.clipvalue, optimizer.clipvalue) for g in gradients]
    return gradients


def read(folder):
    """-> {tag: (steps, values)} of the run that GradientNorms writes."""
    events = EventAccumulator(str(folder / "gradients"), size_guidance={"tensors": 0}).Reload()
    logged = {}
    for tag in events.Tags()["tensors"]:
        points = [(e.step, e.tensor_proto.float_val[0]) for e in events.Tensors(tag)]
        logged[tag] = tuple(np.transpose(points))
    return logged


MODES = [
    {},
    {"steps_per_execution": 4},
    {"jit_compile": True},
    {"jit_compile": True, "steps_per_execution": 4},
    {"run_eagerly": True},
]
MATRIX = [
    *(("sequential", optimizer, {}) for optimizer in OPTIMIZERS),
    *(("sequential", "global_clipnorm", mode) for mode in MODES[1:]),
    *((model, "clipnorm", mode) for model in ("functional", "subclassed") for mode in (MODES[1], MODES[3])),
]


@pytest.mark.parametrize(("model", "optimizer", "mode"), MATRIX, ids=str)
def test_logged_norms_are_those_of_a_tape(model, optimizer, mode, data, tmp_path):
    make, optimizer = MODELS[model], OPTIMIZERS[optimizer]
    norms = kg.GradientNorms(tmp_path)
    watched = fit(make, optimizer, data, [keras.callbacks.TensorBoard(tmp_path), norms], **mode)

    raw, clipped, each = manual(make, optimizer, data)
    logged = read(tmp_path)
    for steps, _ in logged.values():
        np.testing.assert_array_equal(steps, np.arange(STEPS))
    np.testing.assert_allclose(logged["grad_norm/raw"][1], raw, rtol=1e-5)
    np.testing.assert_allclose(logged["grad_norm/clipped"][1], clipped, rtol=1e-5)
    tags = [f"grad_norm_variable/{v.path}" for v in watched.trainable_variables]
    np.testing.assert_allclose(np.transpose([logged[tag][1] for tag in tags]), each, rtol=1e-4, atol=1e-7)
    assert len([tag for tag in logged if tag.startswith("grad_norm_variable")]) == len(tags)
    for name, recorded in zip(tags, norms.records.variables.values(), strict=True):
        np.testing.assert_allclose(recorded, logged[name][1], rtol=1e-6)
    np.testing.assert_allclose(norms.records.raw, logged["grad_norm/raw"][1], rtol=1e-6)

    unwatched = fit(make, optimizer, data, **mode)
    for a, b in zip(watched.get_weights(), unwatched.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_nothing_is_left_behind(data, tmp_path):
    met = []

    class Onlooker(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            met.append(set(vars(self.model.optimizer)) & {"apply", "_clip_gradients"})

    model = fit(sequential, OPTIMIZERS["clipnorm"], data, [kg.GradientNorms(tmp_path), Onlooker()])
    assert len(met) == STEPS and not any(met)
    assert not set(vars(model.optimizer)) & {"apply", "_clip_gradients"}
    assert type(model.train_function).__name__ == "function"
    assert {e.name for e in tmp_path.iterdir()} == {"gradients"}


def test_the_axis_goes_on_when_fit_is_called_again(data, tmp_path):
    norms = kg.GradientNorms(tmp_path, per_variable=False)
    model = fit(sequential, OPTIMIZERS["none"], data, [norms])
    tap, traced = norms._tap, norms._tap.traced
    model.fit(*data, batch_size=BATCH, verbose=0, callbacks=[norms])
    assert norms._tap is tap and tap.traced is traced  # nothing traced again
    model.compile("sgd", "mse")
    model.fit(*data, batch_size=BATCH, verbose=0, callbacks=[norms])
    np.testing.assert_array_equal(read(tmp_path)["grad_norm/raw"][0], np.arange(STEPS + 12))
    assert not [tag for tag in read(tmp_path) if tag.startswith("grad_norm_variable")]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_the_end_of_data_of_unknown_length_is_no_step(data, tmp_path):
    """Keras's own optimizer.iterations counts one step too many there."""
    x, y = data

    def batches():
        for i in range(0, SIZE, BATCH):
            yield x[i : i + BATCH], y[i : i + BATCH]

    signature = tuple(tf.TensorSpec((None, *a.shape[1:])) for a in data)
    for mode in ({}, {"steps_per_execution": 4}):
        norms = kg.GradientNorms(tmp_path)
        model = sequential()
        model.compile("sgd", "mse", **mode)
        dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
        model.fit(dataset, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[norms])
        np.testing.assert_array_equal(norms.records.step, np.arange(STEPS))


def test_every_thins_the_file_and_not_the_records(data, tmp_path):
    norms = kg.GradientNorms(tmp_path, every=5)
    fit(sequential, OPTIMIZERS["none"], data, [norms])
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


def test_an_interrupted_fit_loses_no_step_and_leaves_the_model_as_it_was(data, tmp_path):
    norms = kg.GradientNorms(tmp_path)
    keras.utils.set_random_seed(0)
    model = sequential()
    model.compile("sgd", "mse")
    with pytest.raises(KeyboardInterrupt):
        model.fit(*data, batch_size=BATCH, verbose=0, callbacks=[norms, Interrupt()])
    assert type(model.train_function).__name__ == "function"
    model.fit(*data, batch_size=BATCH, epochs=3, verbose=0)  # not watched
    model.fit(*data, batch_size=BATCH, verbose=0, callbacks=[norms])
    np.testing.assert_array_equal(norms.records.step, np.arange(3 + 6))
    np.testing.assert_array_equal(read(tmp_path)["grad_norm/raw"][0], np.arange(3 + 6))


def test_steps_before_a_failing_one_are_in_the_file(data, tmp_path):
    x, y = data

    def batches():
        for i in range(3):
            yield x[i : i + BATCH], y[i : i + BATCH]
        raise RuntimeError("the disk is gone")

    signature = tuple(tf.TensorSpec((None, *a.shape[1:])) for a in data)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    model = sequential()
    model.compile("sgd", "mse")
    with pytest.raises(tf.errors.OpError, match="the disk is gone"):
        model.fit(dataset, shuffle=False, verbose=0, callbacks=[kg.GradientNorms(tmp_path)])
    np.testing.assert_array_equal(read(tmp_path)["grad_norm/raw"][0], [0, 1, 2])
    assert type(model.train_function).__name__ == "function"


def test_a_second_one_in_the_same_fit_is_told_so(data, tmp_path):
    with pytest.raises(ValueError, match="one GradientNorms among its callbacks, received several"):
        fit(sequential, OPTIMIZERS["none"], data, [kg.GradientNorms(tmp_path / "a"), kg.GradientNorms(tmp_path / "b")])


def test_variables_of_one_name_stay_apart(data, tmp_path):
    class Twins(keras.Model):
        def __init__(self):
            super().__init__(name="twins")
            self.first, self.second = keras.layers.Dense(4, name="dense"), keras.layers.Dense(1, name="dense")

        def call(self, x):
            return self.second(self.first(x[:, 0]))

    model = fit(Twins, OPTIMIZERS["none"], data, [kg.GradientNorms(tmp_path)])
    assert len(model.trainable_variables) == 4 == len([t for t in read(tmp_path) if t.startswith("grad_norm_variable")])


def test_a_step_that_applies_to_some_variables_is_logged(data, tmp_path):
    class HalfTrained(Subclassed):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            half = self.read_out.trainable_variables
            self.optimizer.build(self.trainable_variables)
            self.optimizer.apply(tape.gradient(loss, half), half)
            return {"loss": loss}

    norms = kg.GradientNorms(tmp_path)
    fit(HalfTrained, OPTIMIZERS["clipnorm"], data, [norms])
    assert len([t for t in read(tmp_path) if t.startswith("grad_norm_variable")]) == 2
    assert np.all(norms.records.raw > 0)


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


def test_an_overflow_is_shown(tmp_path):
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0, clipnorm=1.0), initial_scale=2.0**16)
    records = fit_one_weight(optimizer, [1, 1, 1, 0.5], tmp_path, dtype="mixed_float16")
    np.testing.assert_array_equal(records.raw, [np.inf, np.inf, 2, 0.5])
    np.testing.assert_array_equal(records.clipped, [np.inf, np.inf, 1, 0.5])


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
