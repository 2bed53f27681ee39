"""Algorithm rnn-bptt in NumPy against autodiff of the equations, and against our SimpleRNN."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_gated as kg
from keras_gated import bptt

B, T, D, N, M = 3, 6, 2, 4, 5


@pytest.fixture
def given(rng):
    parameters = bptt.Parameters(*(p + rng.normal(size=p.shape) * 0.3 for p in bptt.initialize(rng, D, N, M)))
    return parameters, rng.normal(size=(B, T, D))


def targets(rng):
    weight = rng.random((B, T))
    classes, vectors = rng.integers(M, size=(B, T)), rng.normal(size=(B, T, M))

    def cross_entropy(y):
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(classes, y)
        return tf.reduce_sum(weight * losses) / B

    def squared_error(y):
        return tf.reduce_sum(weight[..., None] * (y - vectors) ** 2) / 2 / B

    return {
        "softmax_cross_entropy": (lambda y: bptt.softmax_cross_entropy(y, classes, weight), cross_entropy),
        "squared_error": (lambda y: bptt.squared_error(y, vectors, weight), squared_error),
    }


@pytest.mark.parametrize("name", ["softmax_cross_entropy", "squared_error"])
def test_gradients_are_those_of_autodiff(given, rng, name):
    parameters, x = given
    loss, loss_in_tensorflow = targets(rng)[name]
    step = bptt.train_step(parameters, x, loss, learning_rate=0.0)

    variables = [tf.Variable(p) for p in parameters]
    W_x, W_h, W_y, b, b_y = variables
    with tf.GradientTape() as tape:
        h, y = tf.zeros((B, N), tf.float64), []
        for t in range(T):
            h = tf.tanh(h @ W_h + x[:, t] @ W_x + b)
            y.append(h @ W_y + b_y)
        value = loss_in_tensorflow(tf.stack(y, axis=1))
    assert step.loss == pytest.approx(float(value), rel=1e-12)
    for ours, theirs in zip(step.gradients, tape.gradient(value, variables), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def test_the_layer_runs_the_same_algorithm(given, rng):
    parameters, x = given
    loss, loss_in_tensorflow = targets(rng)["softmax_cross_entropy"]
    layer = kg.SimpleRNN(N, return_sequences=True, dtype="float64")
    read_out = keras.layers.Dense(M, dtype="float64")
    layer.build(x.shape)
    read_out.build((B, T, N))
    layer.set_weights([parameters.W_x, parameters.W_h, parameters.b])
    read_out.set_weights([parameters.W_y, parameters.b_y])
    with tf.GradientTape() as tape:
        y = read_out(layer(x, training=True))
        value = loss_in_tensorflow(y)
    dW_x, dW_h, db, dW_y, db_y = tape.gradient(value, [*layer.trainable_variables, *read_out.trainable_variables])
    swept = bptt.forward(parameters, x)
    np.testing.assert_allclose(swept.y, y, atol=1e-12)
    gradients = bptt.backward(parameters, swept, loss(swept.y).dy)
    for ours, theirs in zip(gradients, (dW_x, dW_h, dW_y, db, db_y), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def test_each_gradient_is_clipped_by_itself():
    gradients = bptt.Parameters(*(np.array(g) for g in ([3.0, 4.0], [12.0], [0.1], [0.0], [1.0])))
    clipped = bptt.clip(gradients, 1.0)
    np.testing.assert_allclose(clipped.W_x, [0.6, 0.8])
    np.testing.assert_allclose(clipped.W_h, [1.0])
    for before, after in zip(gradients[2:], clipped[2:], strict=True):
        assert after is before  # bit for bit


def test_an_update_goes_down_the_clipped_gradient(given, rng):
    parameters, x = given
    loss, _ = targets(rng)["squared_error"]
    step = bptt.train_step(parameters, x, loss, learning_rate=0.1, max_norm=0.01)
    for p, updated, g in zip(parameters, step.parameters, step.gradients, strict=True):
        np.testing.assert_allclose(updated, p - 0.1 * g * min(1, 0.01 / np.linalg.norm(g)))


def test_it_learns_to_remember(rng):
    """The first input, asked for at the end: the loss falls from chance to nothing."""
    parameters = bptt.initialize(rng, 1, 8, 2)
    at_end = np.array([0, 0, 0, 1.0])
    losses = []
    for _ in range(300):
        bits = rng.integers(2, size=(16, 4))
        target = np.repeat(bits[:, :1], 4, axis=1)
        loss = lambda y, target=target: bptt.softmax_cross_entropy(y, target, at_end)  # noqa: E731
        parameters, value, _ = bptt.train_step(parameters, 2.0 * bits[..., None] - 1, loss, 0.3, max_norm=1.0)
        losses.append(value)
    assert losses[0] > 0.4 and np.mean(losses[-20:]) < 0.05


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda p, x: bptt.forward(p, x[0]), r"\(batch, time, 2\).*received \(6, 2\)"),
        (lambda p, x: bptt.forward(p, x[:, :0]), "at least one time step"),
        (lambda p, x: bptt.backward(p, bptt.forward(p, x), x), r"shape of y, \(3, 6, 5\), received \(3, 6, 2\)"),
        (lambda p, x: bptt.clip(p, 0), "max_norm > 0, received 0"),
        (lambda p, x: bptt.softmax_cross_entropy(bptt.forward(p, x).y, x), "integer classes"),
        (lambda p, x: bptt.softmax_cross_entropy(bptt.forward(p, x).y, -np.ones((3, 6), int)), "from -1 to -1"),
        (lambda p, x: bptt.squared_error(bptt.forward(p, x).y, x), "target of the shape of y"),
    ],
)
def test_bad_input_gets_a_clear_sentence(given, wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong(*given)
