"""Layers and cells at the public door: what they are made of, where they start, what they refuse."""

import keras
import numpy as np
import pytest
from table import arrays, assert_close

import keras_gated as kg


def test_parameters_of_the_chapter():
    """A GRU has three blocks where an LSTM has four: exactly 25 % fewer parameters."""
    counts = []
    for layer in (kg.LSTM(128), kg.GRU(128)):
        layer.build((None, None, 12))
        counts.append(layer.count_params())
    assert counts == [72_192, 54_144]
    assert counts[1] / counts[0] == 3 / 4


def test_the_carousel_of_an_lstm_that_only_has_a_candidate_bias():
    """Zero kernels: i = o = 1/2, c̃ = tanh(1), f = σ(1), so c_t = f c_{t-1} + tanh(1) / 2."""
    layer = kg.LSTM(1, forget_bias=1, kernel_initializer="zeros", recurrent_initializer="zeros", return_state=True)
    layer.build((None, None, 1))
    bias = layer.get_weights()[2]
    np.testing.assert_array_equal(bias, [0, 1, 0, 0])
    layer.cell.bias.assign(bias + [0, 0, 1, 0])
    c = [layer(np.zeros((1, t, 1)))[2] for t in (1, 2, 3)]
    assert_close(c, [[[0.380797]], [[0.659182]], [[0.862698]]], 2e-6)


@pytest.mark.parametrize(("reset_after", "expected"), [(False, 0.353409), (True, 0.059321)])
def test_the_reset_gate_stands_before_the_product(reset_after, expected):
    """U_h swaps the two units and r differs between them: the order of reset and product shows."""
    layer = kg.GRU(2, reset_after=reset_after)
    layer.build((None, None, 1))
    U = np.zeros((2, 6))
    U[:, 4:] = [[0, 1], [1, 0]]
    b = np.array([0, 0, 2, -2, 0, 0])
    layer.set_weights([np.zeros((1, 6)), U, np.stack([b, 0 * b]) if reset_after else b])
    h = layer(np.zeros((1, 1, 1)), initial_state=[np.array([[1.0, 0.0]])])
    assert_close([h], [[[0.5, expected]]], 2e-6)


@pytest.mark.parametrize("forget_bias", [-1.0, 1, 5])
def test_the_forget_bias_is_where_b_f_starts(forget_bias):
    layer = kg.LSTM(3, forget_bias=forget_bias, bias_initializer=keras.initializers.Constant(0.25))
    layer.build((None, None, 2))
    b_i, b_f, b_c, b_o = np.split(layer.get_weights()[2], 4)
    np.testing.assert_array_equal(b_f, np.full(3, forget_bias, "float32"))
    np.testing.assert_array_equal([b_i, b_c, b_o], np.full((3, 3), 0.25))


def test_without_a_forget_bias_the_initializer_has_its_way():
    layer = kg.LSTM(3, forget_bias=None, bias_initializer="random_normal")
    layer.build((None, None, 2))
    assert len(np.unique(layer.get_weights()[2])) == 12


@pytest.mark.parametrize("make", [kg.SimpleRNN, kg.LSTM, kg.GRU, lambda n, **o: kg.GRU(n, reset_after=True, **o)])
def test_every_option_reaches_the_weights(make):
    options = {
        f"{weight}_{role}": value
        for weight in ("kernel", "recurrent", "bias")
        for role, value in (("initializer", "ones"), ("regularizer", "l2"), ("constraint", "non_neg"))
    }
    layer = make(2, use_bias=True, trainable=False, name="named", activity_regularizer="l1", **options)
    layer.build((None, None, 3))
    assert layer.name == "named" and not layer.trainable_variables
    for w in layer.weights:
        assert isinstance(w.regularizer, keras.regularizers.L2)
        assert isinstance(w.constraint, keras.constraints.NonNeg)
    assert isinstance(layer.activity_regularizer, keras.regularizers.L1)
    again = type(layer).from_config(layer.get_config())
    assert again.get_config() == layer.get_config()


def test_cells_stack_in_keras_rnn(rng):
    cells = [kg.LSTMCell(3), kg.GRUCell(2), kg.SimpleRNNCell(4)]
    layer = keras.layers.RNN(cells, return_state=True)
    x = rng.normal(size=(2, 5, 3)).astype("float32")
    y, *states = layer(x)
    outer = x
    for cell, kind in zip(cells, (kg.LSTM, kg.GRU, kg.SimpleRNN), strict=True):
        single = kind(cell.units, return_sequences=True)
        single.build(outer.shape)
        single.set_weights(cell.get_weights())
        outer = single(outer)
    assert_close([y], [outer[:, -1]])
    assert [len(keras.tree.flatten(s)) for s in states] == [2, 1, 1]


def test_a_stateful_layer_goes_on_where_it_stopped(rng):
    x = rng.normal(size=(2, 6, 3)).astype("float32")
    layer = kg.LSTM(4, stateful=True)
    layer(x[:, :2])
    (pieces,) = arrays([layer(x[:, 2:])])
    layer.reset_state()
    assert_close([pieces], [layer(x)])


X = np.ones((2, 4, 3), "float32")


def built():
    layer = kg.LSTM(2, name="memory")
    layer(X)
    return layer


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: kg.LSTM(8)(np.ones((32, 8))), r"\(batch, time, features\), received \(32, 8\).*call LSTMCell"),
        (lambda: kg.GRU(8)(np.ones((2, 0, 3))), r"at least one time step.*\(2, 0, 3\)"),
        (lambda: built()(np.ones((2, 4, 5))), r"'memory' was built for 3 features, received x of shape \(2, 4, 5\)"),
        (lambda: built()(X, initial_state=[np.ones((2, 2))]), r"2 arrays \(h, c\) of shape .*, received 1 of"),
        (lambda: built()(X, initial_state=[np.ones((2, 3))] * 2), r"of shape \(2, 2\), received 2 of \(2, 3\)"),
        (lambda: built()(X, mask=np.ones((4, 2), bool)), r"mask of shape \(2, 4\), received \(4, 2\)"),
        (lambda: kg.LSTM(None), "positive integer, received None"),
        (lambda: kg.LSTM(2, dropout=None), r"dropout in \[0, 1\), received None"),
        (lambda: kg.LSTM(0), "positive integer, received 0"),
        (lambda: kg.GRU(2.5), "positive integer, received 2.5"),
        (lambda: kg.GRU(2, dropout=1), r"dropout in \[0, 1\), received 1"),
        (lambda: kg.LSTM(2, recurrent_dropout=-0.1), r"recurrent_dropout in \[0, 1\), received -0.1"),
        (lambda: kg.SimpleRNN(2, "gelu"), "tanh, relu, sigmoid, linear, received 'gelu'.*keras.layers.SimpleRNN"),
        (lambda: kg.LSTM(2, activation="relu"), "'activation'"),
    ],
)
def test_bad_input_gets_a_clear_sentence(wrong, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        wrong()
