"""Whatever fails while a layer is watched, nothing stays replaced on it or on its cell (TensorFlow)."""

import contextlib

import keras
import numpy as np
import pytest
from table import B, D, N, T
from tiers import daily

import keras_gated as kg

tf = pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("of the TensorFlow backend", allow_module_level=True)

from keras_gated.gradients import perturbed as perturbed_module  # noqa: E402
from keras_gated.gradients.perturbed import perturbed, states  # noqa: E402
from keras_gated.gradients.trajectory import layer_input, recurrent_layers  # noqa: E402

K = keras.layers


class Planned(Exception):
    """What the tests raise."""


class Fragile:
    """A function that fails at its n-th call once it is armed."""

    def __init__(self, function):
        self.function, self.left = function, None

    def arm(self, n=1):
        self.left = n

    def __call__(self, *args, **kwargs):
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                raise Planned
        return self.function(*args, **kwargs)


class FragileCell(keras.layers.LSTMCell):
    """Of Keras's kind, which fails in call when its activation has been called on c."""

    armed = False

    def call(self, *args, **kwargs):
        output = super().call(*args, **kwargs)
        if self.armed:
            raise Planned
        return output


def made(kind, activation):
    options = {"return_sequences": True}
    if kind == "stacked":
        return K.RNN([K.LSTMCell(N, activation=activation), K.GRUCell(N, activation=activation)], **options)
    if kind == "ours":
        return K.RNN([kg.LSTMCell(N), K.LSTMCell(N, activation=activation)], **options)
    return getattr(K, kind)(N, activation=activation, **options)


def holdings(layer):
    """What the layer and its cells hold, by object and name."""
    cells = [layer.cell, *getattr(layer.cell, "cells", [])]
    return [dict(vars(each)) for each in (layer, *cells)]


def assert_untouched(layer, before):
    for held, expected in zip(holdings(layer), before, strict=True):
        assert held.keys() == expected.keys()
        assert [name for name in held if held[name] is not expected[name]] == []


def run_perturbed(layer, x, attach=None, **given):
    def zeros(sequences, mask):
        return tf.zeros((*tf.unstack(tf.shape(sequences)[:2]), len(states(layer))), sequences.dtype)

    with perturbed(layer, attach or zeros):
        return layer(x, **given)


KINDS = ["SimpleRNN", "LSTM", "GRU", "stacked", "ours"]
WAYS = {
    "eagerly": lambda run: run,
    "in a tf.function": tf.function,
    "compiled": lambda run: tf.function(run, jit_compile=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_where_a_layer_of_keras_fails(kind, way, rng, monkeypatch):
    activation = Fragile(keras.ops.tanh)
    layer, x = made(kind, activation), tf.constant(rng.normal(size=(B, T, D)), tf.float32)
    expected = run_perturbed(layer, x, training=True)
    before, loop = holdings(layer), Fragile(perturbed_module.rnn_loop)
    attach = Fragile(lambda sequences, mask: tf.zeros((B, T, len(states(layer)))))
    monkeypatch.setattr(perturbed_module, "rnn_loop", loop)
    # The second call of an activation is that on c; by the third of a stack the second cell is running.
    plans = [(activation, n) for n in (1, 2, 3) if n < 2 or kind != "SimpleRNN" and kind != "GRU"]
    for fragile, n in [*plans, (loop, 1), (attach, 1)]:
        fragile.arm(n)
        with pytest.raises(Planned):
            WAYS[way](lambda x: run_perturbed(layer, x, attach, training=True))(x)
        fragile.left = None
        assert_untouched(layer, before)
    np.testing.assert_array_equal(run_perturbed(layer, x, attach, training=True), expected)
    np.testing.assert_allclose(layer(x, training=True), expected, rtol=1e-6)
    assert_untouched(layer, before)


@pytest.mark.parametrize("way", WAYS)
def test_where_the_call_of_a_cell_fails(way, rng):
    cells = [FragileCell(N), FragileCell(N)]
    layer, x = K.RNN(cells), tf.constant(rng.normal(size=(B, T, D)), tf.float32)
    layer(x, training=True)
    for cell in cells:
        before, cell.armed = holdings(layer), True
        with pytest.raises(Planned):
            WAYS[way](lambda x: run_perturbed(layer, x, training=True))(x)
        cell.armed = False
        for held, expected in zip(holdings(layer), before, strict=True):
            held.pop("armed", None), expected.pop("armed", None)
            assert held.keys() == expected.keys() and all(held[name] is expected[name] for name in held)


def test_where_a_bidirectional_layer_fails(rng):
    activation = Fragile(keras.ops.tanh)
    layer, x = K.Bidirectional(K.LSTM(N)), tf.constant(rng.normal(size=(B, T, D)), tf.float32)
    layer(x)
    both = [layer.forward_layer, layer.backward_layer]
    for half in both:
        half.cell.activation = activation
    before = [holdings(half) for half in both]
    activation.arm(T + 1)
    with pytest.raises(Planned), contextlib.ExitStack() as stack:
        for half in both:
            stack.enter_context(perturbed(half, lambda sequences, mask: tf.zeros((B, T, 2))))
        layer(x)
    for half, expected in zip(both, before, strict=True):
        assert_untouched(half, expected)
        assert half.use_cudnn == "auto"


def test_where_a_measurement_fails(rng):
    activation = Fragile(keras.ops.tanh)
    model = keras.Sequential([keras.Input((T, D)), K.LSTM(N, activation=activation)])
    model.compile("sgd", "mse")
    x, (layer,) = rng.normal(size=(B, T, D)).astype("float32"), recurrent_layers(model).values()
    model(x)
    before = holdings(layer)
    measurements = [
        lambda: kg.gradients.time_step_norms(model, x, np.zeros((B, N)), layer),
        lambda: kg.gradients.loss_gradient_terms(model, x, np.zeros((B, N)), layer),
        lambda: layer_input(model, x, layer),
    ]
    for measure in measurements:
        activation.arm(2)
        with pytest.raises(Planned):
            measure()
        activation.left = None
        assert_untouched(layer, before)


MODES = {"graph": {}, "three steps at once": {"steps_per_execution": 3}, "eager": {"run_eagerly": True}}


@pytest.mark.parametrize(
    ("kind", "mode"),
    daily(
        [(kind, mode) for kind in ("SimpleRNN", "LSTM", "GRU") for mode in MODES], ("LSTM", "graph"), ("GRU", "eager")
    ),
)
def test_where_fit_fails_under_gradient_flow(kind, mode, rng, tmp_path):
    """While the step is traced; in eager mode in the middle of the second step."""
    activation = Fragile(keras.ops.tanh)
    model = keras.Sequential([keras.Input((T, D)), made(kind, activation), K.Dense(1)])
    model.compile("sgd", "mse", **MODES[mode])
    x, y = rng.normal(size=(12, T, D)).astype("float32"), rng.normal(size=(12, T, 1))
    (layer,) = recurrent_layers(model).values()
    model(x[:1])
    before, flow = holdings(layer), kg.GradientFlow(tmp_path)
    calls = T * (2 if kind == "LSTM" else 1)
    activation.arm(calls + 2 if mode == "eager" else 1)
    with pytest.raises(Planned):
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[flow])
    activation.left = None
    assert_untouched(layer, before)
    assert type(model.train_function).__name__ != "Tap"
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[flow])
    assert_untouched(layer, before)
    (record, *_) = flow.records.values()
    assert len(record.p50) >= 3 and np.all(record.p50 > 0)


@pytest.mark.parametrize("steps", daily([1, 3], 3))
def test_where_the_running_graph_fails(steps, rng, tmp_path):
    """Not Python raises, but an operation inside the loop."""

    def activation(a):
        return tf.tanh(tf.debugging.check_numerics(a, "planned"))

    model = keras.Sequential([keras.Input((T, D)), K.LSTM(N, activation=activation), K.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=steps)
    x, y = rng.normal(size=(12, T, D)).astype("float32"), rng.normal(size=(12, 1))
    (layer,) = recurrent_layers(model).values()
    flow = kg.GradientFlow(tmp_path)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[flow])
    before, x[8] = holdings(layer), np.nan
    with pytest.raises(tf.errors.InvalidArgumentError, match="planned"):
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[flow])
    assert_untouched(layer, before)
