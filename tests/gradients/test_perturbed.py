"""Probes: the total gradient of every state, held by a tape over the same cell, called step by step."""

import contextlib
import itertools

import keras
import numpy as np
import pytest
from table import B, D, N, T, build
from tiers import daily

import keras_gated as kg

tf = pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("of the TensorFlow backend", allow_module_level=True)

from keras_gated.gradients.perturbed import perturbed, states  # noqa: E402

K = keras.layers
LAYERS = {
    "SimpleRNN": lambda **options: kg.SimpleRNN(N, **options),
    "LSTM": lambda **options: kg.LSTM(N, **options),
    "GRU": lambda **options: kg.GRU(N, **options),
    "GRU reset after": lambda **options: kg.GRU(N, reset_after=True, **options),
    "LSTM unrolled": lambda **options: kg.LSTM(N, unroll=True, **options),
    "RNN(LSTMCell)": lambda dtype="float32", **options: K.RNN(kg.LSTMCell(N, dtype=dtype), dtype=dtype, **options),
    "Keras's SimpleRNN": lambda **options: K.SimpleRNN(N, **options),
    "Keras's LSTM": lambda **options: K.LSTM(N, **options),
    "Keras's LSTM in parts": lambda **options: _in_parts(K.LSTM(N, **options)),
    "Keras's GRU": lambda **options: K.GRU(N, **options),
    "Keras's GRU unrolled": lambda **options: K.GRU(N, unroll=True, **options),
}


def _in_parts(layer):
    layer.cell.implementation = 1
    return layer


def norms_by_probe(layer, loss, x, mask=None):
    """(B, T, S): the gradient of a probe of the layer, where the loss is one of its outputs."""
    held = []

    def attach(sequences, mask):
        held.append(tf.zeros((*tf.unstack(tf.shape(sequences)[:2]), len(states(layer))), sequences.dtype))
        tape.watch(held[0])
        return held[0]

    with tf.GradientTape() as tape, perturbed(layer, attach):
        total = loss(layer(x, mask=mask, training=True))
    return tape.gradient(total, held[0])


def totals_by_hand(layer, weights, x, mask):
    """(B, T, S): ‖∂L/∂state‖ of L = Σ weights ⊙ outputs by a tape over single calls of the cell."""
    cell, times = layer.cell, range(x.shape[1])
    initial = cell.get_initial_state(len(x))
    now = [tf.identity(s) for s in (initial if isinstance(initial, (list, tuple)) else [initial])]
    new, outputs = {}, {}
    output = tf.zeros_like(now[0])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(now)
        for t in reversed(times) if layer.go_backwards else times:
            out, after = cell(x[:, t], list(now), training=True)
            new[t] = list(after) if isinstance(after, (list, tuple)) else [after]
            valid = mask[:, t, None]
            now = [tf.where(valid, a, b) for a, b in zip(new[t], now, strict=True)]
            outputs[t] = output = tf.where(valid, out, output)
        order = list(reversed(times)) if layer.go_backwards else list(times)
        shown = [outputs[t] for t in order] if layer.return_sequences else [outputs[order[-1]]]
        total = tf.reduce_sum(tf.stack(shown, 1) * weights[:, -len(shown) :])
    zero = tf.UnconnectedGradients.ZERO
    norms = [
        [np.linalg.norm(g, axis=1) for g in tape.gradient(total, new[t], unconnected_gradients=zero)] for t in times
    ]
    return np.transpose(norms, (2, 0, 1)) * mask[..., None]


def probed_and_by_hand(name, sequences, backwards, rng):
    """-> a function of x: the norms by probe; x; and the norms by hand, of a masked batch."""
    layer = build(LAYERS[name](return_sequences=sequences, go_backwards=backwards, dtype="float64"), rng)
    x, weights, mask = rng.normal(size=(B, T, D)), rng.normal(size=(B, T, N)), rng.random((B, T)) > 0.3
    mask[0] = False
    if name == "Keras's GRU unrolled" and backwards:  # there Keras applies the mask the wrong way round
        mask[:] = True

    def run(x):
        return norms_by_probe(layer, lambda y: tf.reduce_sum(y * (weights if sequences else weights[:, -1])), x, mask)

    return run, tf.constant(x), totals_by_hand(layer, weights, tf.constant(x), mask)


def assert_equal_to_rounding(received, expected):
    assert np.abs(received - expected).max() <= 1e-12 * np.abs(expected).max()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("sequences", "backwards"), [(True, False), (False, True)], ids=["all outputs", "backwards"])
def test_the_gradient_of_a_probe_is_the_norm_of_the_total_gradient(name, sequences, backwards, rng, uncompiled):
    run, x, expected = probed_and_by_hand(name, sequences, backwards, rng)
    assert_equal_to_rounding(run(x), expected)


COMPILED = [*zip(LAYERS, itertools.cycle((True, False))), ("LSTM", True)]


@pytest.mark.parametrize(("name", "backwards"), daily(COMPILED, ("Keras's LSTM", False)))
def test_compiled_or_not_the_gradient_of_a_probe_is_the_same(name, backwards, rng):
    run, x, expected = probed_and_by_hand(name, not backwards, backwards, rng)
    any_length = {} if "unrolled" in name else {"input_signature": [tf.TensorSpec((None, None, D), tf.float64)]}
    for way in (run, tf.function(run, jit_compile=True), tf.function(run, **any_length)):
        assert_equal_to_rounding(way(x), expected)


def test_cells_stacked_in_one_layer_have_a_probe_each(rng):
    cells = [kg.LSTMCell(N, name="low"), K.LSTMCell(N, name="middle"), K.GRUCell(N, name="high")]
    stacked = build(K.RNN(cells, return_sequences=True, dtype="float64"), rng)
    assert states(stacked) == ("low/h", "low/c", "middle/h", "middle/c", "high/h")
    x, weights = tf.constant(rng.normal(size=(B, T, D))), rng.normal(size=(B, T, N))
    found = norms_by_probe(stacked, lambda y: tf.reduce_sum(y * weights), x)

    one_by_one = keras.Sequential([K.RNN(cell, return_sequences=True, dtype="float64") for cell in cells])
    for layer, columns in zip(one_by_one.layers, (slice(0, 2), slice(2, 4), slice(4, 5)), strict=True):
        held = []

        def attach(sequences, mask, width=columns.stop - columns.start, held=held):
            held.append(tf.zeros((B, T, width), tf.float64))
            tape.watch(held[0])
            return held[0]

        with tf.GradientTape() as tape, perturbed(layer, attach):
            total = tf.reduce_sum(one_by_one(x, training=True) * weights)
        np.testing.assert_allclose(found[..., columns], tape.gradient(total, held[0]), rtol=1e-12)


def test_a_linear_recurrence_multiplies_the_gradient_step_by_step(rng):
    """h_t = 3 h_{t-1} + x_t, T = 3: of L = h_3 it is 9, 3, 1, and of L = h_1 + h_2 + h_3 13, 4, 1."""
    layer = kg.SimpleRNN(1, activation="linear", return_sequences=True, dtype="float64")
    layer.build((None, None, 1))
    layer.set_weights([np.ones((1, 1)), np.full((1, 1), 3.0), np.zeros(1)])
    x = tf.constant(rng.normal(size=(1, 3, 1)))
    np.testing.assert_allclose(norms_by_probe(layer, lambda y: y[0, -1, 0], x)[0, :, 0], [9, 3, 1])
    np.testing.assert_allclose(norms_by_probe(layer, tf.reduce_sum, x)[0, :, 0], [13, 4, 1])


@pytest.mark.parametrize("name", daily(LAYERS, "LSTM", "Keras's LSTM"))
def test_a_probe_changes_no_value_and_no_gradient(name, rng):
    dropout = {} if "Cell" in name else {"dropout": 0.2, "recurrent_dropout": 0.2, "seed": 1}
    layer = build(LAYERS[name](return_sequences=True, **dropout), rng)
    x, mask = tf.constant(rng.normal(size=(B, T, D)), tf.float32), rng.random((B, T)) > 0.3

    @tf.function
    def step(x, context):
        with tf.GradientTape() as tape:
            tape.watch(x)
            with context():
                y = layer(x, mask=mask, training=True)
            total = tf.reduce_sum(y * tf.cos(y))
        return [y, *tape.gradient(total, [x, *layer.trainable_weights])]

    def with_probe():
        return perturbed(layer, lambda *_: tf.zeros((B, T, len(states(layer)))))

    results = []
    for context in (contextlib.nullcontext, with_probe):
        layer.cell.seed_generator.state.assign([3, 4])
        results.append(step(x, context))
    for plain, watched in zip(*results, strict=True):
        np.testing.assert_array_equal(plain, watched)


def test_norms_whose_squares_cannot_be_represented(rng):
    for kind in (K.SimpleRNN, kg.SimpleRNN):
        layer = build(kind(N, activation="linear", return_sequences=True), rng)
        layer.cell.recurrent_kernel.assign(np.zeros((N, N)))
        norms = norms_by_probe(layer, lambda y: 1e20 * tf.reduce_sum(y), tf.ones((1, T, D)))
        np.testing.assert_allclose(norms, np.full((1, T, 1), 1e20 * np.sqrt(N)), rtol=1e-5)


def test_a_layer_with_a_loop_of_its_own_has_no_probe():
    class Own(K.RNN):
        def inner_loop(self, *args, **kwargs):
            return super().inner_loop(*args, **kwargs)

    assert states(Own(K.GRUCell(N))) is None
    assert states(K.GRU(N)) == ("h",)
