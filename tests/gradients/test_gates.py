"""What gates do: against NumPy, against the same weights in Keras, and numbers known beforehand."""

import keras
import numpy as np
import pytest
import reference
from reference import sigmoid
from table import CELLS, B, D, N, T, batch, build, make

import keras_gated as kg
from keras_gated import gradients


def gates_by_hand(name, given, h, weights):
    """{gate: (B, T, N)} from h (B, T, N), the hidden states before each step; the chapter's z."""
    W, U, b = weights
    b = b.reshape(-1, W.shape[1]).sum(axis=0)
    letters, used = ("ifco", "ifo") if name == "lstm" else ("zrh", "zr")
    a = given.x @ W + h @ U + b
    return {
        g: sigmoid(block) for g, block in zip(letters, np.split(a, len(letters), axis=-1), strict=True) if g in used
    }


def masked_mean(values, valid):
    return np.array([v[m].mean() if m.any() else np.nan for v, m in zip(values.swapaxes(0, 1), valid.T, strict=True)])


@pytest.mark.parametrize("name", ["lstm", "gru", "gru_reset_after"])
def test_gates_are_those_of_the_equations_padding_left_out(name, rng):
    cell = CELLS[name]
    layer, given = make(cell, rng), batch(cell, rng, size=6)
    mask = given.mask.copy()
    mask[:, 2] = False
    mask[1:, 1] = True
    layer.set_weights([3 * w for w in layer.get_weights()])  # so that some are shut and some open
    h, _ = reference.run(cell.reference, given.x, given.states, layer.get_weights(), mask)
    started = np.cumsum(mask, axis=1) > 0
    h = np.where(started[..., None], h, given.states[0][:, None])
    h_prev = np.concatenate([given.states[0][:, None], h[:, :-1]], axis=1)
    expected = gates_by_hand(name, given, h_prev, layer.get_weights())
    x = np.where(mask[..., None], given.x, np.nan)
    received = gradients.gate_activity(layer, x, mask, given.states)
    assert list(received) == list(expected)
    for gate, values in expected.items():
        statistics = received[gate]
        assert statistics.mean.shape == (T,) and np.isnan(statistics.mean[2])
        std = [values[mask[:, t], t].std() if mask[:, t].any() else np.nan for t in range(T)]
        for got, want in zip(
            statistics,
            [
                masked_mean(values, mask),
                np.array(std),
                masked_mean(values < 0.05, mask),
                masked_mean(values > 0.95, mask),
            ],
            strict=True,
        ):
            np.testing.assert_allclose(got, want, atol=1e-12)
        assert np.nanmax(statistics.low) > 0 and np.nanmin(statistics.high) < np.nanmax(statistics.high)


@pytest.mark.parametrize("layer", [kg.LSTM(N), kg.GRU(N), kg.GRU(N, reset_after=True)])
def test_gates_of_a_keras_layer_are_those_of_ours_with_its_weights(layer, rng):
    layer = build(layer, rng)
    theirs, x, mask = kg.weights.to_keras(layer), rng.normal(size=(B, T, D)), rng.random((B, T)) > 0.3
    in_keras_loop = keras.layers.RNN(layer.cell)
    in_keras_loop.build((None, None, D))
    for other in (theirs, in_keras_loop):
        received, expected = (gradients.gate_activity(one, x, mask) for one in (other, layer))
        assert list(received) == list(expected)
        for gate in expected:
            np.testing.assert_allclose(received[gate], expected[gate], atol=1e-6)
        times = [gradients.retention_time(one, x, mask) for one in (other, layer)]
        np.testing.assert_allclose(*times, rtol=1e-4)


@pytest.mark.parametrize(("b_f", "expected"), [(0.0, 1.4427), (5.0, 148.9), (np.inf, np.inf)])
def test_retention_of_a_known_bias(b_f, expected):
    layer = build(kg.LSTM(N, dtype="float64"), np.random.default_rng(0))
    W, U, b = layer.get_weights()
    b[N : 2 * N] = b_f
    layer.set_weights([0 * W, 0 * U, b])
    received = gradients.retention_time(layer, np.zeros((B, T, D)))
    np.testing.assert_allclose(received, np.full(N, expected), rtol=1e-4)


@pytest.mark.parametrize("layer", [kg.SimpleRNN(N), keras.layers.SimpleRNN(N)])
def test_a_layer_without_gates_is_an_error(layer, rng):
    layer = build(layer, rng)
    for function in (gradients.gate_activity, gradients.retention_time):
        with pytest.raises(ValueError, match="(?s)gates.*LSTM or GRU.*SimpleRNNCell"):
            function(layer, np.zeros((B, T, D)))


@pytest.mark.parametrize("kind", [kg.LSTM, keras.layers.GRU])
def test_gates_of_a_layer_in_half_precision(kind, rng):
    half, whole = build(kind(N, dtype="mixed_bfloat16"), rng), build(kind(N), rng)
    whole.set_weights(half.get_weights())
    x = rng.normal(size=(B, T, D))
    received, expected = (gradients.gate_activity(layer, x) for layer in (half, whole))
    for gate in expected:
        np.testing.assert_allclose(received[gate].mean, expected[gate].mean, atol=0.02)
