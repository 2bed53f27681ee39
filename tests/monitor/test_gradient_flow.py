"""GradientFlow: the profile of every training step against probes in a loop by hand, and what is written of it."""

import contextlib
import functools
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tiers import daily

import keras_gated as kg
from keras_gated.gradients.horizon import horizon
from keras_gated.gradients.perturbed import perturbed, states
from keras_gated.gradients.trajectory import recurrent_layers
from keras_gated.monitor.profiles import ROWS, Profiles, Source, Summary, percentiles, times

K = keras.layers
SIZE, BATCH, T, D = 22, 8, 7, 3  # the last batch is short
STEPS = 3


class CalledTwice(keras.Model):
    def __init__(self):
        super().__init__()
        self.recurrent, self.read_out = kg.GRU(4, name="twice"), K.Dense(1)

    def call(self, x):
        return self.read_out(self.recurrent(x) - self.recurrent(2 * x))


class TwoSteps(keras.Model):
    """A train_step that applies twice."""

    def train_step(self, data):
        for _ in range(2):
            logs = super().train_step(data)
        return logs


def small(**options):
    """One layer of ours, one of Keras, in real order and backwards, of masked sequences."""
    x = inputs = keras.Input((None, D))
    x = K.Bidirectional(kg.LSTM(3, return_sequences=True, **options), name="both")(K.Masking(dtype="float32")(x))
    return keras.Model(inputs, K.Dense(1, dtype="float32")(K.GRU(3, name="theirs", **options)(x)))


def mixed():
    """Layers of all kinds, behind one another."""
    x = inputs = keras.Input((None, D))
    x = K.Bidirectional(kg.LSTM(4, return_sequences=True), name="both")(K.Masking()(x))
    x = K.LSTM(4, return_sequences=True, name="theirs")(x)
    x = K.RNN([kg.LSTMCell(4), K.GRUCell(4)], return_sequences=True, name="stacked")(x)
    return keras.Model(inputs, K.Dense(1)(kg.SimpleRNN(4, name="plain")(x)))


@pytest.fixture
def data(rng):
    x = rng.normal(size=(SIZE, T, D)).astype("float32")
    x[3:12, 4:] = 0  # padding
    x[4, :2] = 0
    return x, x[:, 0, :1]


def fit(model, data, log_dir=None, optimizer=None, epochs=1, every=1, extra=(), layers=None, **options):
    """Rate 0 by default: all steps see the same weights."""
    flow = kg.GradientFlow(log_dir, layers=layers, every=every) if log_dir else None
    model.compile(optimizer or keras.optimizers.SGD(0.0), "mse", **options)
    callbacks = [c for c in (flow, *extra) if c]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        model.fit(*data, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return flow


def by_hand(model, x, y):
    """{name: (T,)} of one batch, the mean over the examples that have the step; operation by operation."""
    held = {}

    def attach(label, layer, sequences, mask):
        call = label if label not in held else f"{label}_call_2"
        held[call] = tf.zeros((*sequences.shape[:2], len(states(layer)))), mask, layer
        tape.watch(held[call][0])
        return held[call][0]

    with tf.GradientTape(persistent=True) as tape, contextlib.ExitStack() as stack:
        tf.config.run_functions_eagerly(True)
        stack.callback(tf.config.run_functions_eagerly, False)
        for label, layer in recurrent_layers(model).items():
            stack.enter_context(perturbed(layer, functools.partial(attach, label, layer)))
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    found = {}
    for call, (probe, mask, layer) in held.items():
        norms = tape.gradient(loss, probe).numpy()
        valid = np.ones(norms.shape[:2]) if mask is None else np.reshape(mask, norms.shape[:2])
        with np.errstate(invalid="ignore"):
            means = norms.sum(0) / valid.sum(0)[:, None]
        for i, state in enumerate(states(layer)):
            found[Source(call, state, layer.go_backwards).name] = means[:, i]
    return found


def batches(data):
    return [[a[i : i + BATCH] for a in data] for i in range(0, SIZE, BATCH)]


def assert_profiles(flow, model, data, rtol=1e-5):
    expected = [by_hand(model, *batch) for batch in batches(data)]
    assert set(flow.profiles) == set(expected[0])
    for name, profiles in flow.profiles.items():
        np.testing.assert_array_equal(profiles.step, np.arange(STEPS))
        for i, of_batch in enumerate(expected):
            length = len(of_batch[name])
            assert profiles.length[i] == length
            np.testing.assert_allclose(profiles.norms[i], of_batch[name][times(length)], rtol=rtol, atol=1e-9)


WAYS = {
    "graph": {},
    "graph of all kinds": {},
    "eager": {"run_eagerly": True},
    "jit": {"jit_compile": True},
    "two steps an execution": {"steps_per_execution": 2},
    "accumulation": {"optimizer": keras.optimizers.SGD, "accumulation": 2},
}


@pytest.mark.parametrize("way", daily(WAYS, "graph"))
def test_every_step_of_every_layer_is_measured_as_by_hand(way, data, rng, tmp_path):
    options = dict(WAYS[way])
    if "accumulation" in options:
        options["optimizer"] = options["optimizer"](0.0, gradient_accumulation_steps=options.pop("accumulation"))
    model = mixed() if way == "graph of all kinds" else small()
    assert_profiles(fit(model, data, tmp_path, **options), model, data)


def in_half_precision(cell):
    x = keras.Input((None, D))
    return keras.Model(x, K.Dense(1, dtype="float32")(K.RNN(cell(3, dtype="mixed_float16"), dtype="mixed_float16")(x)))


HALF = {
    "layers": lambda: small(dtype="mixed_float16"),
    "RNN of our cell": lambda: in_half_precision(kg.LSTMCell),
    "RNN of Keras's cell": lambda: in_half_precision(K.LSTMCell),
}


@pytest.mark.parametrize("name", daily(HALF, "RNN of our cell"))
def test_half_precision_is_measured_unscaled(name, data, rng, tmp_path):
    model = HALF[name]()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=2.0**10)
    assert_profiles(fit(model, data, tmp_path, optimizer), model, data, rtol=0.05)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_lengths_that_change_share_the_rows(rng, tmp_path):
    lengths = [5, 9, ROWS + 2]
    pairs = [(rng.normal(size=(4, n, D)).astype("float32"), np.ones((4, 1), "float32")) for n in lengths]
    model = keras.Sequential([keras.Input((None, D)), kg.SimpleRNN(3), K.Dense(1)])
    flow = kg.GradientFlow(tmp_path)
    model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit((pair for pair in pairs), shuffle=False, verbose=0, callbacks=[flow])
    for name, profiles in flow.profiles.items():
        assert list(profiles.length) == lengths
        for i, pair in enumerate(pairs):
            expected = by_hand(model, *pair)[name]
            np.testing.assert_allclose(profiles.norms[i], expected[times(lengths[i])], rtol=1e-4)
            np.testing.assert_allclose(profiles.norms[i][[0, -1]], expected[[0, -1]], rtol=1e-4)


def test_a_layer_that_is_called_twice_has_two_profiles(data, rng, tmp_path, uncompiled):
    model = CalledTwice()
    flow = fit(model, data, tmp_path)
    assert set(flow.profiles) == {"twice", "twice_call_2"}
    assert_profiles(flow, model, data)


def test_a_step_that_applies_twice_has_two_profiles_of_its_own(data, rng, tmp_path):
    x = keras.Input((T, D))
    model = TwoSteps(x, K.Dense(1)(kg.GRU(4, name="gru")(x)))
    flow = fit(model, data, tmp_path)
    np.testing.assert_array_equal(flow.records["gru"].step, np.arange(2 * STEPS))
    np.testing.assert_allclose(flow.profiles["gru"].norms[::2], flow.profiles["gru"].norms[1::2], rtol=1e-6)


@pytest.mark.parametrize("make", daily([small, mixed], small))
def test_training_is_the_same_to_the_last_bit(make, data, rng, tmp_path):
    trained = []
    for log_dir in (None, tmp_path):
        keras.utils.set_random_seed(1)
        model = make()
        fit(model, data, log_dir, keras.optimizers.Adam(0.01, global_clipnorm=0.1), epochs=3)
        trained.append(model.get_weights())
    for plain, watched in zip(*trained, strict=True):
        np.testing.assert_array_equal(plain, watched)


def test_what_is_written(data, rng, tmp_path, uncompiled):
    model = keras.Sequential([keras.Input((T, D)), kg.LSTM(4, name="lstm"), K.Dense(1)])
    flow = fit(model, data, tmp_path, epochs=2, every=2)
    fit(model, data, extra=[flow])  # goes on
    read = EventAccumulator(str(tmp_path / "time_steps"), size_guidance={"tensors": 0}).Reload()
    tags = {
        f"time_step_norm/{name}/{of}" for name in ("lstm", "lstm/c") for of in (*Summary.SCALARS, "heatmap", "profile")
    }
    assert set(read.Tags()["tensors"]) == tags | {"custom_scalars__config__"}
    for name, summary in flow.records.items():
        np.testing.assert_array_equal(summary.step, [0, 2, 4, 6, 8])
        for field in Summary.SCALARS:
            events = read.Tensors(f"time_step_norm/{name}/{field}")
            assert [event.step for event in events] == [0, 2, 4, 6, 8]
            values = [tf.make_ndarray(event.tensor_proto) for event in events]
            np.testing.assert_allclose(values, getattr(summary, field), rtol=1e-6)
        pictures = read.Tensors(f"time_step_norm/{name}/heatmap")
        assert [event.step for event in pictures] == [2, 4, 8]
        width, height, png = pictures[-1].tensor_proto.string_val
        assert tf.io.decode_png(png).shape[:2] == (int(height), int(width))
        bars = tf.make_ndarray(read.Tensors(f"time_step_norm/{name}/profile")[-1].tensor_proto)
        np.testing.assert_allclose(bars[[0, -1], [0, 1]], [0, T])
        median = np.median(flow.profiles[name].norms, axis=0)
        np.testing.assert_allclose(bars[:, 2], np.maximum(np.log10(median) + 8, 0), rtol=1e-4)


def test_charts_are_prepared_for_what_is_written(data, rng, tmp_path, uncompiled):
    flow, norms = kg.GradientFlow(tmp_path), kg.GradientNorms(tmp_path)
    gates = kg.GateActivity(tmp_path, data[0])
    model = small()
    model.compile("sgd", "mse")
    model.fit(*data, verbose=0, callbacks=[flow, norms, gates])
    for run, charts in (("time_steps", 11), ("gradients", 3), ("layer_gates", 12)):
        read = EventAccumulator(str(tmp_path / run)).Reload()
        layout = layout_pb2.Layout.FromString(read.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
        (category,) = layout.category
        assert len(category.chart) == charts
        for chart in category.chart:
            bands = [tag for s in chart.margin.series for tag in (s.lower, s.value, s.upper)]
            assert chart.title and (chart.multiline.tag or bands)
            assert set(bands) <= set(read.Tags()["tensors"])
            for pattern in chart.multiline.tag:
                assert any(re.match(pattern, tag) for tag in read.Tags()["tensors"]), pattern


@pytest.mark.slow
def test_the_rows_of_two_replicas_are_one_batch(data, replicas, tmp_path):
    keras.utils.clear_session()
    with replicas.scope():
        model = small()
    flow = fit(model, data, tmp_path)
    keras.utils.clear_session()
    alone = small()  # with the same names
    alone.set_weights(model.get_weights())
    assert_profiles(flow, alone, data)


def test_only_the_layers_asked_for(data, rng, tmp_path, uncompiled):
    model = small()
    backward = model.get_layer("both").backward_layer.name
    flow = fit(model, data, tmp_path, layers=[backward, model.get_layer("theirs")])
    assert set(flow.records) == {f"both/{backward}", f"both/{backward}/c", "theirs"}


class Own(K.RNN):
    def inner_loop(self, *args, **kwargs):
        return super().inner_loop(*args, **kwargs)


@pytest.mark.parametrize(
    ("layer", "layers", "sentence"),
    [
        (K.Flatten(), None, "GradientFlow expects .* received a model .* with no recurrent layer"),
        (Own(K.GRUCell(2), name="own"), None, "GradientFlow expects .* with own, whose loop is its own"),
        (kg.GRU(2), ["lstm"], "'lstm', which is none. It holds: gru"),
    ],
)
def test_what_cannot_be_watched_is_said(layer, layers, sentence, data, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        fit(keras.Sequential([keras.Input((T, D)), layer, K.Dense(1)]), data, tmp_path, layers=layers)
    assert not any(tmp_path.rglob("events*"))


def test_without_matplotlib_all_else_is_written(data, rng, tmp_path, monkeypatch, uncompiled):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    model = keras.Sequential([keras.Input((T, D)), kg.GRU(4, name="gru"), K.Dense(1)])
    with pytest.warns(UserWarning, match=r"writes no heat maps.*pip install 'keras_gated\[plots\]'"):
        fit(model, data, tmp_path)
    written = EventAccumulator(str(tmp_path / "time_steps")).Reload().Tags()["tensors"]
    assert "time_step_norm/gru/profile" in written and "time_step_norm/gru/heatmap" not in written


# Profiles.


def test_rows_show_both_ends_and_spread_evenly():
    for length in (1, 2, 5, ROWS, 1000, 100_003):
        shown = times(length)
        assert (shown[0], shown[-1]) == (0, length - 1)
        np.testing.assert_allclose(shown, np.linspace(0, length - 1, ROWS), atol=0.51)


@pytest.mark.parametrize(
    ("norms", "backwards", "expected"),
    [
        ([1e-4, 1e-2, 0.2, 1, 10], False, 3),
        ([1e-4, 0.11, 0.1, 1, 10], False, 4),
        ([1e-4, 0.09, 0.2, 1, 10], False, 3),
        ([10, 1, 0.2, 0.09, 1], True, 3),
        ([1, 1, 1, 1, 1], False, 4),  # nowhere
        ([9, 3, 1, 0, 0], False, 2),  # the loss reads an earlier step
        ([1, 1e-9, np.nan, np.nan, np.nan], True, 1),
        ([np.nan, np.nan, 1, 1, 1], False, 2),
        ([0, 0, 0, 0, 0], False, np.nan),
        ([1, 1, 1, 1, np.inf], False, np.nan),
        ([np.inf, 1, 1, 1e-9, 1], False, 1),
    ],
)
def test_the_horizon_is_the_lag_at_which_one_percent_is_left(norms, backwards, expected):
    np.testing.assert_array_equal(horizon(np.array(norms, float), np.arange(5), backwards), expected)


def test_percentiles_leave_out_what_is_not_there(rng):
    norms = rng.random((40, 9))
    norms[rng.random(norms.shape) < 0.4] = np.nan
    norms[3], norms[5, 2] = np.nan, np.inf
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice")
        np.testing.assert_allclose(percentiles(norms), np.nanpercentile(norms, [10, 50, 90], axis=1))


def test_thinning_keeps_evenly_spread_steps():
    step = np.arange(7, 1000)
    profiles = Profiles(step, np.ones_like(step), np.ones((len(step), ROWS)))
    kept = profiles.thinned(100).step
    assert 50 <= len(kept) <= 100 and set(np.diff(kept)) == {16}
    np.testing.assert_array_equal(profiles.thinned(1000).step, step)
    odd = profiles.taken(step % 2 == 1).thinned(100).step  # of a layer that each second step calls
    assert 50 <= len(odd) <= 100 and set(np.diff(odd)) == {16}
