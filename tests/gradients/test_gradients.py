"""The laws of the measurements: each against NumPy, central differences, or a number known beforehand."""

import keras
import numpy as np
import pytest
import reference
from table import CELLS, B, D, N, T, batch, build, make
from tiers import daily

import keras_gated as kg
from keras_gated import gradients

tf = pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("of the TensorFlow backend", allow_module_level=True)

K = keras.layers


def spectral_norm(M):
    return np.linalg.svd(M, compute_uv=False)[0]


def single(U, activation="linear", W=1.0, **options):
    """A SimpleRNN of one unit."""
    layer = kg.SimpleRNN(1, activation, dtype="float64", **options)
    layer.build((None, None, 1))
    layer.set_weights([np.array([[W]]), np.array([[U]]), np.zeros(1)])
    return layer


def compiled(layers, loss="mse"):
    model = keras.Sequential(layers)
    model.compile(loss=loss)
    return model


def total(y, y_pred):
    return tf.reduce_sum(y * y_pred)


# ‖∂L/∂h_t‖ of the whole loss.


@pytest.mark.parametrize(
    ("layer", "x", "expected"),
    [
        (single(3.0), [0.3, -0.2, 0.5], [9, 3, 1]),
        (single(0.5), [0.3, -0.2, 0.5], [0.25, 0.5, 1]),
        (single(3.0, return_sequences=True), [0.3, -0.2, 0.5], [13, 4, 1]),
        (single(2.0, "tanh"), [1, 0, 0], [0.069297, 0.199978, 1]),
        (single(3.0, go_backwards=True), [0.3, -0.2, 0.5], [1, 3, 9]),
    ],
)
def test_the_loss_reaches_each_step_through_the_recurrence(layer, x, expected):
    model = compiled([keras.Input((3, 1), dtype="float64"), layer], total)
    y = np.ones((1, 3, 1) if layer.return_sequences else (1, 1))
    received = gradients.time_step_norms(model, np.reshape(x, (1, 3, 1)).astype("float64"), y, layer)
    np.testing.assert_allclose(received.dh, expected, atol=5e-7)
    assert received.dc is None


def test_the_cell_state_counts_its_way_through_the_output(rng):
    layer, given = make(CELLS["lstm"], rng, return_state=False), batch(CELLS["lstm"], rng)
    model = compiled([keras.Input((T, D), dtype="float64"), layer], total)
    target = rng.normal(size=(B, T, N))
    step_states, h, c = [], tf.zeros((B, N), "float64"), tf.zeros((B, N), "float64")
    with tf.GradientTape() as tape:
        loss = 0.0
        for t in range(T):
            c_and_h = layer.cell(given.x[:, t], [h, c])[1]
            c = tf.identity(c_and_h[1])
            tape.watch(c)
            o = c_and_h[0] / tf.tanh(c_and_h[1])
            h = o * tf.tanh(c)  # so that what follows hangs on this c
            step_states.append((h, c))
            loss = loss + tf.reduce_sum(h * target[:, t])
    wanted = tape.gradient(loss, step_states)
    received = gradients.time_step_norms(model, given.x, target, layer)
    for k, norms in enumerate(received):
        np.testing.assert_allclose(norms, [np.linalg.norm(g[k], axis=1).mean() for g in wanted], rtol=1e-6)


@pytest.mark.parametrize("kind", daily([kg.LSTM, K.LSTM, kg.GRU, K.GRU, K.SimpleRNN], kg.LSTM, K.GRU))
def test_padded_steps_count_in_no_mean(kind, rng):
    """Short rows alone, without padding, have the norms that they have in the batch."""
    layer = build(kind(N, return_sequences=True, name="layer"), rng)
    tokens = np.array([[3, 1, 2, 4, 0], [1, 2, 0, 0, 0], [0, 0, 0, 0, 0]])
    embedding = K.Embedding(5, D, mask_zero=True)
    model = compiled([keras.Input((None,)), embedding, layer], total)
    y = (rng.normal(size=(3, T, N)) * (tokens != 0)[..., None]).astype("float32")
    received = gradients.time_step_norms(model, tokens, y, "layer")
    alone = [
        gradients.time_step_norms(model, tokens[i : i + 1, :n], y[i : i + 1, :n], "layer") for i, n in ((0, 4), (1, 2))
    ]
    for norms, long, short in zip(received, *alone, strict=True):
        if norms is not None:
            np.testing.assert_allclose(norms[:2], (long[:2] + short) / 2, rtol=1e-5)
            np.testing.assert_allclose(norms[2:4], long[2:], rtol=1e-5)
            assert np.isnan(norms[4])


def test_measuring_the_loss_leaves_the_model_as_it_was(rng):
    dropout, x = K.Dropout(0.5, seed=3), rng.normal(size=(B, T, D)).astype("float32")
    model = compiled([keras.Input((T, D)), dropout, K.BatchNormalization(), kg.GRU(N, name="gru"), K.Dense(1)])
    before = [np.array(v) for v in model.variables]
    first, again = (gradients.time_step_norms(model, x, np.ones((B, 1)), "gru").dh for _ in range(2))
    gradients.loss_gradient_terms(model, x, np.ones((B, 1)), "gru")
    assert np.array_equal(first, again)
    assert all(np.array_equal(a, v) for a, v in zip(before, model.variables, strict=True))


# ‖∂h_t/∂h_k‖.


@pytest.mark.parametrize(
    ("kind", "units"),
    daily(
        [(kg.SimpleRNN, 5), (kg.SimpleRNN, 70), (K.SimpleRNN, 5), (K.SimpleRNN, 70)],
        (kg.SimpleRNN, 70),
        (K.SimpleRNN, 5),
    ),
)
def test_of_a_linear_layer_it_is_the_norm_of_a_power_of_U(kind, units, rng):
    layer = build(kind(units, activation="linear", dtype="float64"), rng)
    W, U, b = layer.get_weights()
    layer.set_weights([W, U / np.abs(np.linalg.eigvals(U)).max() * 0.9, b])
    U = layer.get_weights()[1]
    received = gradients.state_jacobian_norms(layer, rng.normal(size=(B, 12, D)))
    expected = [
        [spectral_norm(np.linalg.matrix_power(U, t - k)) if t >= k else 0 for k in range(12)] for t in range(12)
    ]
    np.testing.assert_allclose(received, expected, rtol=1e-6)


def state_jacobian(cell, x, states, weights, mask, t, k):
    """∂h_t/∂h_k of one example by central differences of the NumPy reference, h_k alone changed."""
    history, state = [], list(states)
    for i in range(t + 1):
        state = cell.reference(x[i], *state, *weights) if mask[i] else state
        history.append(state)
    columns = []
    for n in range(N):
        ends = []
        for e in (1e-6, -1e-6):
            state = [history[k][0] + e * np.eye(N)[n], *history[k][1:]]
            for i in range(k + 1, t + 1):
                state = cell.reference(x[i], *state, *weights) if mask[i] else state
            ends.append(state[0])
        columns.append((ends[0] - ends[1]) / 2e-6)
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("name", ["rnn_tanh", "rnn_sigmoid", "lstm", "gru", "gru_reset_after"])
def test_it_is_the_slope_of_the_reference_and_padding_counts_in_no_mean(name, rng):
    cell = CELLS[name]
    layer, given = make(cell, rng), batch(cell, rng, size=4)
    mask = given.mask.copy()
    mask[:, 2] = False  # a step that no example has
    x = np.where(mask[..., None], given.x, np.nan)
    received = gradients.state_jacobian_norms(layer, x, mask, given.states)
    for t in range(T):
        for k in range(T):
            rows = [n for n in range(4) if mask[n, t] and mask[n, k]]
            if k > t:
                assert received[t, k] == 0
            elif not rows:
                assert np.isnan(received[t, k])
            else:
                norms = [
                    spectral_norm(
                        state_jacobian(
                            cell, given.x[n], [s[n] for s in given.states], layer.get_weights(), mask[n], t, k
                        )
                    )
                    for n in rows
                ]
                np.testing.assert_allclose(received[t, k], np.mean(norms), rtol=1e-6)
    assert np.isnan(received[2, :3]).all()


@pytest.mark.parametrize("name", daily(["lstm", "gru", "gru_reset_after", "rnn_tanh"], "lstm"))
def test_a_keras_layer_and_keras_loop_give_what_ours_gives(name, rng):
    layer = build(CELLS[name].layer(), rng)
    x, mask = rng.normal(size=(B, T, D)), rng.random((B, T)) > 0.3
    expected = gradients.state_jacobian_norms(layer, x, mask)
    for other in (kg.weights.to_keras(layer), K.RNN(layer.cell), K.RNN(K.StackedRNNCells([layer.cell]))):
        if not other.built:
            other.build((None, None, D))
        np.testing.assert_allclose(gradients.state_jacobian_norms(other, x, mask), expected, rtol=1e-4, atol=1e-7)


def test_of_stacked_cells_it_is_that_of_the_uppermost(rng):
    lower, upper = kg.LSTMCell(4, dtype="float64"), kg.GRUCell(N, dtype="float64")
    stack = build(K.RNN(K.StackedRNNCells([lower, upper]), dtype="float64"), rng)
    under = K.RNN(lower, return_sequences=True, dtype="float64")
    over, x = K.RNN(upper, dtype="float64"), rng.normal(size=(B, T, D))
    received = gradients.state_jacobian_norms(stack, x)
    over.build((None, None, 4))
    np.testing.assert_allclose(received, gradients.state_jacobian_norms(over, np.array(under(x))), rtol=1e-6)


def test_the_backward_half_of_a_bidirectional_goes_the_other_way(rng):
    both = build(K.Bidirectional(kg.GRU(N, return_sequences=True, name="gru", dtype="float64"), dtype="float64"), rng)
    x = rng.normal(size=(B, T, D))
    model = keras.Sequential([keras.Input((T, D), dtype="float64"), both])
    received = gradients.state_jacobian_norms(*gradients.layer_input(model, x, "backward_gru"))
    forward = kg.GRU(N, dtype="float64")
    forward.build((None, None, D))
    forward.set_weights(both.backward_layer.get_weights())
    np.testing.assert_allclose(received, gradients.state_jacobian_norms(forward, x[:, ::-1]), rtol=1e-9)


# The bound and the spectrum.


BOUNDED = {
    "tanh": lambda: kg.SimpleRNN(8),
    "sigmoid": lambda: kg.SimpleRNN(8, "sigmoid"),
    "relu": lambda: kg.SimpleRNN(8, "relu"),
    "Keras's": lambda: K.SimpleRNN(8),
    "in Keras's loop": lambda: K.RNN(kg.SimpleRNNCell(8)),
}


@pytest.mark.parametrize("name", daily(BOUNDED, "tanh", "sigmoid", "relu"))
def test_the_bound_is_never_exceeded_and_is_not_idle(name, rng):
    layer = build(BOUNDED[name](), rng)
    lags = np.arange(10)[:, None] - np.arange(10)
    for scale in (0.2, 1.0, 2.0):
        layer.set_weights([w if i != 1 else scale * w for i, w in enumerate(layer.get_weights())])
        norms = gradients.state_jacobian_norms(layer, 0.1 * rng.normal(size=(B, 10, D)))
        bound = gradients.jacobian_bound(layer, lags)
        assert np.all((norms <= bound * (1 + 1e-5))[lags >= 0])
        assert norms[1, 0] > 0.2 * bound[1, 0]


def test_the_bound_by_hand():
    layer = single(0.5, "sigmoid")
    assert gradients.jacobian_bound(layer, 3) == pytest.approx((0.25 * 0.5) ** 3)
    np.testing.assert_allclose(gradients.jacobian_bound(single(-3.0), [0, 1, 4]), [1, 3, 81])
    assert gradients.jacobian_bound(single(3.0), 1e4) == np.inf


@pytest.mark.parametrize("layer", [kg.LSTM(N), K.GRU(N), K.SimpleRNN(N, activation="exponential")])
def test_a_layer_without_a_bound_is_an_error(layer, rng):
    with pytest.raises(ValueError, match="jacobian_bound expects a SimpleRNN with an activation out of tanh"):
        gradients.jacobian_bound(build(layer, rng), 1)


@pytest.mark.parametrize("layer", [kg.LSTM(2), K.LSTM(2), kg.GRU(2), kg.SimpleRNN(2), K.RNN(K.GRUCell(2))])
def test_the_spectrum_of_each_block(layer, rng):
    layer = build(layer, rng)
    U = layer.get_weights()[1].astype(float)
    sigma_max, radius = gradients.spectrum(layer)
    assert sigma_max.shape == radius.shape == (U.shape[1] // 2,)
    for k in range(len(radius)):
        block = U[:, 2 * k : 2 * k + 2]
        sizes = np.roots([1, -np.trace(block), np.linalg.det(block)])
        assert radius[k] == pytest.approx(np.abs(sizes).max(), rel=1e-6)
        assert sigma_max[k] == pytest.approx(np.sqrt(np.linalg.eigvalsh(block.T @ block)[-1]), rel=1e-6)


def test_a_cell_without_a_recurrent_kernel_is_an_error(rng):
    stack = build(K.RNN(K.StackedRNNCells([K.GRUCell(N)])), rng)
    with pytest.raises(ValueError, match="recurrent_kernel.*StackedRNNCells.*layers of their own"):
        gradients.spectrum(stack)


# The constant error carousel.


@pytest.mark.parametrize("kind", [kg.LSTM, K.LSTM])
def test_with_the_gates_held_fixed_the_error_carousel_is_the_product_of_f(kind, rng):
    layer = build(kind(N, dtype="float64"), rng)
    x, weights = rng.normal(size=(B, T, D)), layer.get_weights()
    f = gradients.cell_state_jacobian(layer, x)
    assert f.shape == (B, T, N)
    for n in range(B):
        h, c = np.zeros(N), np.zeros(N)
        held = []  # h before each step, and so every gate, of the run that was measured
        for t in range(T):
            held.append(h)
            h, c = reference.lstm(x[n, t], h, c, *weights)

        def carried(c, n=n, held=held):
            for t in range(T):
                c = reference.lstm(x[n, t], held[t], c, *weights)[1]
            return c

        slopes = np.stack([(carried(c + e) - carried(c - e)) / 2 for e in np.eye(N)], axis=1)  # linear: exact
        np.testing.assert_allclose(slopes, np.diag(f[n].prod(axis=0)), rtol=1e-9, atol=1e-12)


def test_a_masked_step_carries_the_cell_state_on_whole(rng):
    layer, given = make(CELLS["lstm"], rng), batch(CELLS["lstm"], rng)
    f = gradients.cell_state_jacobian(layer, given.x, given.mask, given.states)
    assert np.all(f[~given.mask] == 1) and np.all((f[given.mask] > 0) & (f[given.mask] < 1))


def test_a_layer_without_a_forget_gate_has_no_carousel(rng):
    with pytest.raises(ValueError, match="cell_state_jacobian expects an LSTM.*z, r.*retention_time"):
        gradients.cell_state_jacobian(build(kg.GRU(N), rng), np.zeros((B, T, D)))


# The double sum.


OPTIONS = [
    ("lstm", "return_sequences"),
    ("lstm", "zero_output_for_mask"),
    ("gru", "go_backwards"),
    ("gru_reset_after", "return_sequences"),
    ("rnn_tanh", "go_backwards"),
    ("rnn_tanh", "zero_output_for_mask"),
]


@pytest.mark.parametrize(
    ("name", "option"),
    daily(OPTIONS, ("gru", "go_backwards")),
)
def test_the_terms_add_up_to_the_gradient(name, option, rng):
    """Of a model with a mask, in which the layer's outputs are used as they come."""
    cell, options = CELLS[name], {option: True}
    layers = [cell.layer(dtype="float64", name="ours", **{"return_sequences": False, **options})]
    if name != "rnn_tanh" or not options.get("zero_output_for_mask"):
        layers.append(kg.weights.to_keras(build(layers[0], rng)))
    for layer in layers:
        build(layer, rng)
        masking, dense = K.Masking(dtype="float64"), K.Dense(2, dtype="float64")
        model = compiled([keras.Input((T, D), dtype="float64"), masking, layer, dense])
        given = batch(cell, rng)
        x = given.x * given.mask[..., None]
        y = rng.normal(size=model(x).shape)
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x=x, y=tf.constant(y), y_pred=model(x))
        expected = tape.gradient(loss, layer.cell.recurrent_kernel.value).numpy()
        received = gradients.loss_gradient_terms(model, x, y, layer)
        np.testing.assert_allclose(received.total, expected, atol=1e-8 * np.abs(expected).max())
        assert received.norm.shape == (T, T) and not np.any(np.triu(received.norm, 1))


def test_the_states_that_a_layer_hands_out_count_as_well(rng):
    x = keras.Input((T, D), dtype="float64")
    layer = kg.LSTM(N, return_state=True, dtype="float64", name="encoder")
    outputs = K.Concatenate(dtype="float64")(layer(x))
    model = keras.Model(x, outputs)
    model.compile(loss=total)
    build(layer, rng)
    given, y = rng.normal(size=(B, T, D)), rng.normal(size=(B, 3 * N))
    with tf.GradientTape() as tape:
        loss = total(y, model(given))
    expected = tape.gradient(loss, layer.cell.recurrent_kernel.value).numpy()
    received = gradients.loss_gradient_terms(model, given, y, "encoder")
    np.testing.assert_allclose(received.total, expected, atol=1e-8 * np.abs(expected).max())


def test_each_term_by_hand():
    """h_t = 3 h_{t-1} + x_t, L = Σ_t y_t h_t: the term of t and k is y_t 3^(t-k) h_{k-1}."""
    model = compiled([keras.Input((3, 1), dtype="float64"), single(3.0, return_sequences=True)], total)
    x, y = np.array([0.3, -0.2, 0.5]), np.array([2.0, -1.0, 0.7])
    received = gradients.loss_gradient_terms(model, x.reshape(1, 3, 1), y.reshape(1, 3, 1), model.layers[0])
    before = [0, 0.3, 0.7]
    terms = np.array([[y[t] * 3.0 ** (t - k) * before[k] if t >= k else 0 for k in range(3)] for t in range(3)])
    np.testing.assert_allclose(received.norm, np.abs(terms), atol=1e-12)
    np.testing.assert_allclose(received.total, [[terms.sum()]])


# Errors.


@pytest.mark.parametrize("function", [gradients.time_step_norms, gradients.loss_gradient_terms])
def test_a_model_that_does_not_fit_is_an_error(function, rng):
    x, y = np.zeros((B, T, D), "float32"), np.zeros((B, N), "float32")
    model = keras.Sequential([keras.Input((T, D)), kg.GRU(N, name="gru")])
    with pytest.raises(ValueError, match="compiled model"):
        function(model, x, y, "gru")
    model.compile(loss="mse")
    with pytest.raises(ValueError, match="one recurrent layer.*'lstm', which is none.*gru"):
        function(model, x, y, "lstm")
    shared = kg.GRU(N, name="gru")
    inputs = keras.Input((T, D))
    twice = keras.Model(inputs, shared(inputs) + shared(inputs))
    twice.compile(loss="mse")
    with pytest.raises(ValueError, match="'gru' once, received 2 calls"):
        function(twice, x, y, "gru")
