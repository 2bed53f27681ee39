"""ClipNorm against gradients clipped by hand in NumPy and given to the bare optimizer."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from tiers import daily

import keras_gated as kg
from keras_gated import clipping

IDS = np.array([1, 4, 1, 1])  # a row of the embedding is looked up three times
ROWS, WIDTH = 6, 3
SGD = keras.optimizers.SGD


def by_hand(gradients, max_norm, per_variable=False):
    """Eq. rnn-clip in float64."""
    norms = [np.sqrt(np.sum(np.asarray(g, float) ** 2)) for g in gradients]
    if not per_variable:
        norms = [np.sqrt(np.sum(np.square(norms)))] * len(norms)
    return [g * min(1, max_norm / n) for g, n in zip(gradients, norms, strict=True)]


def weights(*values, dtype="float32"):
    return [keras.Variable(np.asarray(v, dtype), dtype=dtype, name="abc"[i]) for i, v in enumerate(values)]


def step(optimizer, variables, gradients):
    dtype = variables[0].dtype
    optimizer.apply([g if isinstance(g, tf.IndexedSlices) else tf.constant(g, dtype) for g in gradients], variables)


def moved(optimizer, *gradients, dtype="float32"):
    """What an SGD of learning rate 1 takes from weights 0: the gradients it was given."""
    variables = weights(*(np.zeros(np.shape(g)) for g in gradients), dtype=dtype)
    step(optimizer, variables, gradients)
    return [-v.numpy() for v in variables]


def rows(values, indices, count):
    return tf.IndexedSlices(tf.constant(values, tf.float32), tf.constant(indices), tf.constant([count, len(values[0])]))


def assert_equal(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol, atol)


# The equation.

MODES = {
    "eager": lambda f: f,
    "graph": tf.function,
    "jit": lambda f: tf.function(f, jit_compile=True),
}
WAYS = [(mode, per_variable) for mode in MODES for per_variable in (False, True)]


@pytest.mark.parametrize(
    ("max_norm", "per_variable", "expected"),
    [
        (1, False, [[3 / 13, 4 / 13], [12 / 13]]),
        (1, True, [[0.6, 0.8], [1]]),
        (6, True, [[3, 4], [6]]),  # one of two
        (np.float32(6.5), False, [[1.5, 2], [6]]),
    ],
)
def test_gradients_are_clipped_together_or_each(max_norm, per_variable, expected):
    assert_close(moved(kg.ClipNorm(SGD(1.0), max_norm, per_variable), [3, 4], [12]), expected, rtol=1e-6)


@pytest.mark.parametrize(("mode", "per_variable"), daily(WAYS, ("eager", False), ("jit", True)))
def test_what_is_within_stays_bit_for_bit(mode, per_variable, rng):
    gradients = [rng.normal(size=shape).astype("float32") for shape in [(3, 4), (7,), ()]]
    received = MODES[mode](lambda: clipping.clip([tf.constant(g) for g in gradients], 20, per_variable))()
    assert_equal(received, gradients)
    assert_equal(moved(kg.ClipNorm(SGD(1.0), 20, per_variable), [3, 4], [12]), [[3, 4], [12]])


SIZES = [
    (1e20, "float32", 1e20),
    (3e38, "float32", 1.0),  # its norm is beyond float32, and 1 / norm below
    (1e-30, "float32", 1e-30),
    (5e-38, "float32", 5e-38),
    (300, "float16", 300),
    (1e200, "float64", 1e10),
]


def clipped_twice(mode, gradients, max_norms, per_variable):
    """-> the gradients clipped at either max_norm, and the norm of the first."""

    def run():
        tensors = [tf.constant(g) for g in gradients]
        return *(clipping.clip(tensors, c, per_variable) for c in max_norms), clipping.norm(tensors[0])

    return MODES[mode](run)()


@pytest.mark.parametrize(("mode", "per_variable"), daily(WAYS, ("eager", False), ("eager", True), ("jit", False)))
def test_no_finite_gradient_is_too_large_or_too_small(mode, per_variable):
    """Squares overflow or vanish; beside each stands a gradient that is 0."""
    for size, dtype, max_norm in SIZES:
        gradients, beyond = [np.full(4, size, dtype), np.zeros(2, "float32")], size > 1e38
        max_norms = (max_norm, max_norm if beyond else 2.1 * size)
        clipped, same, norm = clipped_twice(mode, gradients, max_norms, per_variable)
        assert_close(clipped, [np.full(4, max_norm / 2), gradients[1]], rtol=1e-6, atol=0)
        if not beyond:
            assert_equal(same, gradients)
            np.testing.assert_allclose(norm, 2 * size, rtol=1e-6)


def test_half_precision_does_not_overflow():
    """In float16 the squares of 300 overflow, and so does the sum of 300 rows of 300."""
    assert_close(moved(kg.ClipNorm(SGD(1.0)), [300, 300, 300, 300], dtype="float16"), [[0.5] * 4])
    slices = tf.IndexedSlices(
        tf.fill([300, 1], tf.constant(300, "float16")), tf.ones([300], tf.int32), tf.constant([4, 1])
    )
    variables = weights(np.zeros((4, 1)), dtype="float16")
    kg.ClipNorm(SGD(1.0)).apply([slices], variables)
    assert_equal([variables[0].numpy()], [[[0], [-1], [0], [0]]])


# Embeddings.


def test_a_row_that_is_looked_up_twice_counts_as_one():
    """Keras takes √2 for the norm of 2, and moves the row by 1.414."""
    model = keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(4, 1), keras.layers.Flatten()])
    model.compile(kg.ClipNorm(SGD(1.0)), lambda y_true, y_pred: keras.ops.sum(y_pred, axis=-1))
    before = model.get_weights()[0]
    model.fit(np.array([[1, 1]]), np.zeros((1, 2)), verbose=0)
    np.testing.assert_allclose(before - model.get_weights()[0], [[0], [1], [0], [0]], atol=1e-6)


@pytest.mark.parametrize("nonfinite", ["skip", "propagate"])
def test_a_gradient_of_rows_stays_one(nonfinite):
    class Onlooker(SGD):
        def update_step(self, gradient, variable, learning_rate):
            seen.append(gradient)
            super().update_step(gradient, variable, learning_rate)

    seen, count = [], 1_000_000
    optimizer, variables = kg.ClipNorm(Onlooker(1.0), nonfinite=nonfinite), weights(np.zeros((count, 2)))
    optimizer.build(variables)
    for mode in ("graph", "jit"):
        gradient = rows([[1, 2], [3, 4], [5, 6]], [7, 5, 7], count)
        MODES[mode](lambda g=gradient: optimizer.apply([g], variables))()
    assert_close([variables[0].numpy()[[5, 6, 7]]], [np.array([[3, 4], [0, 0], [6, 8]]) * -2 / np.sqrt(125)])
    assert len(seen) == 2 and all(isinstance(g, tf.IndexedSlices) and g.values.shape[0] == 3 for g in seen)


def test_no_vocabulary_is_too_large():
    g = tf.IndexedSlices(tf.constant([[3.0], [4.0]]), tf.constant([0, 10**11]), tf.constant([10**12, 1]))
    np.testing.assert_allclose(clipping.norm(g), 5)
    np.testing.assert_allclose(clipping.clip([g], 1)[0].values, [[0.6], [0.8]], rtol=1e-6)


def test_a_batch_without_tokens_is_no_error():
    empty = rows(np.zeros((1, 1)), [0], 4)
    empty = tf.IndexedSlices(empty.values[:0], empty.indices[:0], empty.dense_shape)
    assert_close(moved(kg.ClipNorm(SGD(1.0)), [3, 4]), [[0.6, 0.8]])
    variables = weights(np.zeros((4, 1)), np.zeros(2))
    step(kg.ClipNorm(SGD(1.0)), variables, [empty, [3, 4]])
    assert_close([-v.numpy() for v in variables], [np.zeros((4, 1)), [0.6, 0.8]])


# Every optimizer.

KEPT_OUT = {"Optimizer", "LossScaleOptimizer", "OptimizerMap"}  # the class, the one that belongs outside, a table
NAMES = [n for n in dir(keras.optimizers) if isinstance(getattr(keras.optimizers, n), type) and n not in KEPT_OUT]


needs_several = pytest.mark.skipif("MultiOptimizer" not in NAMES, reason="this Keras has no MultiOptimizer")


def several(momentum=0.9, **options):
    a_map = keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.1), {"a": SGD(0.1, momentum=momentum)})
    return keras.optimizers.MultiOptimizer(a_map, **options)


def one_for_all(optimizer):
    return keras.optimizers.MultiOptimizer(lambda variable: optimizer)


MAKE = {name: (lambda name=name: getattr(keras.optimizers, name)(learning_rate=0.1)) for name in NAMES}
if "MultiOptimizer" in NAMES:  # Keras 3.15
    MAKE["MultiOptimizer"] = several


def options(**values):
    return lambda: keras.optimizers.SGD(**{"learning_rate": 0.1, "momentum": 0.9, **values})


MAKE |= {
    "schedule": options(learning_rate=keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
    "callable": options(learning_rate=lambda: 0.05),
    "nesterov": options(nesterov=True),
    "weight_decay": options(weight_decay=0.1),
    "use_ema": options(use_ema=True, ema_momentum=0.5),
    "ema_overwrite": options(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "accumulation": options(gradient_accumulation_steps=2),
}


def some_steps(rng, count=4):
    for _ in range(count):
        yield [rng.normal(size=shape).astype("float32") * 3 for shape in [(len(IDS), WIDTH), (3, 4), (4,)]]


def summed(gradients):
    whole = np.zeros((ROWS, WIDTH))
    np.add.at(whole, IDS, gradients[0])
    return [whole, *gradients[1:]]


def sparse(gradients):
    return [rows(gradients[0], IDS, ROWS), *gradients[1:]]


def start(rng):
    return [rng.normal(size=shape).astype("float32") for shape in [(ROWS, WIDTH), (3, 4), (4,)]]


EVERY = [(name, per_variable) for name in MAKE for per_variable in (False, True)]
COMMON = [
    ("SGD", False),
    ("Adam", False),
    ("Adam", True),
    ("accumulation", False),
    ("use_ema", True),
    ("schedule", False),
]


@pytest.mark.parametrize(
    ("name", "per_variable"), daily(EVERY, *COMMON, *(case for case in EVERY if case == ("MultiOptimizer", True)))
)
def test_every_optimizer_steps_as_if_clipped_by_hand(name, per_variable, rng):
    """With an embedding: Keras's Adam squares its repeated rows one by one."""
    values, steps = start(rng), list(some_steps(rng))
    bare, ours = MAKE[name](), kg.ClipNorm(MAKE[name](), 2.0, per_variable)
    expected, received = weights(*values), weights(*values)
    given = [summed(s) for s in steps]
    if name == "accumulation":  # the bare one is given each mean twice
        given = [[(a + b) / 2 for a, b in zip(given[i - i % 2], given[i - i % 2 + 1], strict=True)] for i in range(4)]
    for gradients, by_rows in zip(given, steps, strict=True):
        step(bare, expected, by_hand(gradients, 2.0, per_variable))
        step(ours, received, sparse(by_rows))
    assert_close([v.numpy() for v in received], [v.numpy() for v in expected])
    slots = [[v.numpy() for v in optimizer.variables] for optimizer in (ours.inner_optimizer, bare)]
    assert_close(*slots)
    assert len(ours.variables) == 1 + len(slots[0])
    for optimizer, variables in ((bare, expected), (ours, received)):
        optimizer.finalize_variable_values(variables)
    assert_close([v.numpy() for v in received], [v.numpy() for v in expected])


def test_the_accumulated_gradient_is_clipped_once():
    optimizer, variables = kg.ClipNorm(SGD(1.0, gradient_accumulation_steps=2)), weights(np.zeros(2))
    step(optimizer, variables, [[3, 0]])
    assert_equal([variables[0].numpy()], [[0, 0]])
    step(optimizer, variables, [[0, 4]])
    assert_close([-variables[0].numpy()], [[0.6, 0.8]])
    assert int(optimizer.iterations) == 1


@pytest.mark.parametrize("make", [SGD, pytest.param(several, marks=needs_several)])
def test_a_scaled_loss_is_unscaled_before_clipping(make):
    optimizer = make(momentum=0.0, loss_scale_factor=8.0)
    learning_rate = 0.01 if make is SGD else 0.1
    ours = kg.ClipNorm(optimizer, 1.0)
    assert float(ours.scale_loss(2.0)) == 16
    again = kg.ClipNorm.from_config(ours.get_config())
    assert again.loss_scale_factor == 8 and again.inner_optimizer.loss_scale_factor is None
    assert_close(moved(ours, [2.4, 3.2]), [[0.3 * learning_rate, 0.4 * learning_rate]])
    assert_close(moved(again, [24, 32]), [[0.6 * learning_rate, 0.8 * learning_rate]])


def test_a_variable_without_a_gradient_is_left_out():
    variables = weights([1, 1], [1, 1])
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        kg.ClipNorm(SGD(1.0)).apply([None, tf.constant([3.0, 4.0])], variables)
    assert_close([v.numpy() for v in variables], [[1, 1], [0.4, 0.2]])
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        kg.ClipNorm(SGD(1.0)).apply([None, None], variables)
    kg.ClipNorm(SGD(1.0)).apply([], variables)


def test_a_variable_that_its_gradient_overwrites_is_neither_clipped_nor_counted():
    variables = weights([1.0], [1.0])
    variables[0].overwrite_with_gradient = True
    step(kg.ClipNorm(SGD(1.0)), variables, [[1000.0], [-2.0]])
    assert_close([v.numpy() for v in variables], [[1000], [2]])


# inf and NaN.

MOVING = {
    "adam": lambda: keras.optimizers.Adam(0.1, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=2),
    "schedule": MAKE["schedule"],
    **({"several": several} if "MultiOptimizer" in NAMES else {}),
    "accumulation": MAKE["accumulation"],
    "nadam": MAKE["Nadam"],
}


@pytest.mark.parametrize(
    ("make", "per_variable"),
    daily([(make, each) for make in MOVING for each in (False, True)], ("adam", False), ("accumulation", True)),
)
def test_a_bad_step_is_as_if_it_had_not_been(make, per_variable, rng):
    """One element of one variable is enough."""
    steps, values = list(some_steps(rng)), start(rng)
    ours, undisturbed = (kg.ClipNorm(MOVING[make](), 2.0, per_variable) for _ in range(2))
    received, expected = weights(*values), weights(*values)
    bad = 0
    for i, gradients in enumerate(steps):
        step(undisturbed, expected, sparse(gradients))
        step(ours, received, sparse(gradients))
        for where in (0, 1, 2):
            spoiled = [g.copy() for g in gradients]
            spoiled[where].flat[-1] = [np.nan, np.inf, -np.inf, np.nan][i]
            before = [v.numpy() for v in (*received, *ours.inner_optimizer.variables)]
            step(ours, received, sparse(spoiled))
            assert_equal([v.numpy() for v in (*received, *ours.inner_optimizer.variables)], before)
            bad += 1
            assert int(ours.skipped_steps) == bad
    assert_equal([v.numpy() for v in received], [v.numpy() for v in expected])
    assert int(undisturbed.skipped_steps) == 0 and int(ours.iterations) == int(undisturbed.iterations)


def test_a_sum_that_overflows_is_bad():
    """Each of two accumulated gradients is finite in float16."""
    optimizer, variables = kg.ClipNorm(SGD(1.0, gradient_accumulation_steps=2)), weights(np.zeros(2), dtype="float16")
    for gradient in ([4e4, 0], [4e4, 0], [-4e4, 2]):
        step(optimizer, variables, [gradient])
    assert int(optimizer.skipped_steps) == 1 and int(optimizer.iterations) == 1
    assert_equal([variables[0].numpy()], [[0, -1]])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("per_variable", [False, True])
def test_propagate_does_what_keras_does(per_variable, bad):
    keras_own = SGD(1.0, **{"clipnorm" if per_variable else "global_clipnorm": 1.0})
    ours = kg.ClipNorm(SGD(1.0), 1.0, per_variable, nonfinite="propagate")
    gradients = [[3.0, bad], [12.0, 5.0]]
    expected = moved(keras_own, *gradients)
    assert np.any(np.isnan(expected[0]))
    assert_close(moved(ours, *gradients), expected)
    assert int(ours.iterations) == 1 and int(ours.skipped_steps) == 0


# In model.fit, with GradientNorms.

BATCH = 4
BAD = 2  # the batch whose targets hold a NaN


def a_model(optimizer, policy=None, **mode):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Embedding(ROWS, WIDTH, dtype=policy), keras.layers.Flatten(dtype=policy)]
    model = keras.Sequential(
        [keras.Input((3,), dtype="int32"), *layers, keras.layers.Dense(2, dtype=policy), keras.layers.Dense(1)]
    )
    model.compile(optimizer, "mse", **mode)
    return model


def data(rng):
    return rng.integers(0, ROWS, size=(6 * BATCH, 3)), rng.normal(size=(6 * BATCH, 1)).astype("float32") * 5


def fit(model, x, y, callbacks=(), epochs=1):
    model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def norms_of_a_tape(model, x, y, max_norm, per_variable, bad):
    """-> (S, V) raw and clipped norms of the variables, training `model` on the way."""
    raw, clipped = [], []
    for i in range(0, len(x), BATCH):
        if i == bad * BATCH:
            continue
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x[i : i + BATCH]) - y[i : i + BATCH]) ** 2)
        gradients = [tf.convert_to_tensor(g).numpy() for g in tape.gradient(loss, model.trainable_variables)]
        raw.append([np.linalg.norm(g) for g in gradients])
        gradients = by_hand(gradients, max_norm, per_variable)
        clipped.append([np.linalg.norm(g) for g in gradients])
        model.optimizer.apply([tf.constant(g, tf.float32) for g in gradients], model.trainable_variables)
    return np.array(raw), np.array(clipped)


TRAINED = {
    "eagerly": {"run_eagerly": True},
    "two steps an execution": {"steps_per_execution": 2},
    "jit": {"jit_compile": True},
}


@pytest.mark.parametrize(
    ("way", "per_variable"),
    daily([(way, each) for way in TRAINED for each in (False, True)], ("two steps an execution", False)),
)
def test_gradient_norms_shows_what_the_optimizer_did(way, per_variable, rng, tmp_path):
    """Raw before, clipped after, the bad step as it was; and watching changes no bit."""
    mode = TRAINED[way]
    (x, y), make = data(rng), lambda: kg.ClipNorm(keras.optimizers.Adam(0.1), 1.0, per_variable)
    spoiled = y.copy()
    spoiled[BAD * BATCH] = np.nan
    norms = kg.GradientNorms(tmp_path)
    watched = fit(a_model(make(), **mode), x, spoiled, [norms])
    by_tape = a_model(keras.optimizers.Adam(0.1))
    raw, clipped = norms_of_a_tape(by_tape, x, y, 1.0, per_variable, bad=BAD)

    good = np.arange(6) != BAD
    recorded = np.transpose(list(norms.records.variables.values()))
    np.testing.assert_allclose(recorded[good], raw, rtol=1e-4)
    assert np.all(np.isnan(recorded[BAD])) and np.isnan(norms.records.raw[BAD]) and np.isnan(norms.records.clipped[BAD])
    np.testing.assert_allclose(norms.records.raw[good], np.linalg.norm(raw, axis=1), rtol=1e-4)
    np.testing.assert_allclose(norms.records.clipped[good], np.linalg.norm(clipped, axis=1), rtol=1e-4)
    assert np.all(norms.records.clipped[good] <= (5**0.5 if per_variable else 1) * 1.01) and norms.records.raw[0] > 1
    assert_close(watched.get_weights(), by_tape.get_weights(), rtol=1e-4, atol=1e-5)
    assert int(watched.optimizer.skipped_steps) == 1 and int(watched.optimizer.iterations) == 5
    assert not {"apply", "_clip_gradients"} & set(vars(watched.optimizer))
    unwatched = fit(a_model(make(), **mode), x, spoiled)
    assert_equal(watched.get_weights(), unwatched.get_weights())


@pytest.mark.parametrize(
    ("make", "raw", "clipped"),
    [
        (lambda: SGD(0.0, gradient_accumulation_steps=2), [2, 5, 2, 5], [2, 1, 2, 1]),
        pytest.param(lambda: one_for_all(SGD(0.0)), [2, 8, 2, 8], [1, 1, 1, 1], marks=needs_several),
    ],
)
def test_gradient_norms_sees_accumulation_and_several_optimizers(make, raw, clipped, tmp_path):
    """Micro-steps are shown as they are, the update as it was made: from the mean, clipped."""
    x = np.array([1, 2, 1, 2], "float32")[:, None]
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.compile(kg.ClipNorm(make()), "mse")
    norms = kg.GradientNorms(tmp_path)
    model.fit(x, 0 * x, batch_size=1, shuffle=False, verbose=0, callbacks=[norms])
    np.testing.assert_allclose(norms.records.raw, raw)
    np.testing.assert_allclose(norms.records.clipped, clipped, rtol=1e-6)
    assert "_clip_gradients" not in vars(model.optimizer.inner_optimizer)


def one_weight(optimizer, x, folder, **mode):
    """y = w x from w = 1 in mixed_float16, loss (w x)²: the gradient is 2 w x²."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", dtype="mixed_float16")
    model = keras.Sequential([keras.Input((1,)), layer], name="mixed")
    model.compile(optimizer, "mse", **mode)
    norms = kg.GradientNorms(folder)
    x = np.array(x, "float32")[:, None]
    model.fit(x, 0 * x, batch_size=1, shuffle=False, verbose=0, callbacks=[norms])
    return float(model.get_weights()[0].item()), model.optimizer, norms.records


@pytest.mark.parametrize("jit_compile", [False, True])
def test_loss_scaling_is_outside_and_taken_out_first(jit_compile, tmp_path):
    """A clip of the scaled gradient would make a step of 1 / 1024."""
    scaled = keras.optimizers.LossScaleOptimizer(kg.ClipNorm(SGD(0.25)), initial_scale=1024)
    w, optimizer, records = one_weight(scaled, [1], tmp_path, jit_compile=jit_compile)
    assert w == 0.75 and float(optimizer.dynamic_scale) == 1024
    np.testing.assert_allclose([records.raw[0], records.clipped[0]], [2, 1], rtol=1e-6)


def test_an_overflow_is_the_business_of_loss_scaling(tmp_path):
    scaled = keras.optimizers.LossScaleOptimizer(kg.ClipNorm(SGD(0.25)), initial_scale=2.0**15)
    w, optimizer, records = one_weight(scaled, [2, 1], tmp_path)
    np.testing.assert_array_equal(records.raw, [np.inf, 2])
    assert w == 0.75 and float(optimizer.dynamic_scale) == 2**14
    assert int(optimizer.inner_optimizer.skipped_steps) == 0 and int(optimizer.iterations) == 1


def test_keras_wraps_the_pair_where_the_policy_is_half_precision(rng):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = a_model(kg.ClipNorm(SGD(0.1, use_ema=True), 0.01))
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert isinstance(model.optimizer.inner_optimizer, kg.ClipNorm)
    before = model.get_weights()
    x, y = data(rng)
    fit(model, x[:BATCH], y[:BATCH] / 10, [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])
    assert int(model.optimizer.iterations) == 1
    change = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(before, model.get_weights(), strict=True)))
    np.testing.assert_allclose(change, 0.001, rtol=1e-2)


# What callbacks do with an optimizer.


def test_learning_rates_are_read_and_set_through_it(rng, tmp_path):
    x, y = data(rng)
    model = a_model(kg.ClipNorm(SGD(0.5)))
    rates = [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)]
    rates += [keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=1, min_delta=1e9)]
    history = model.fit(x, y, epochs=2, verbose=0, callbacks=rates).history["learning_rate"]
    np.testing.assert_allclose(history, [0.25, 0.125])
    np.testing.assert_allclose(float(model.optimizer.inner_optimizer.learning_rate), 0.0125)
    model.optimizer.learning_rate = 0.75
    assert float(model.optimizer.inner_optimizer.learning_rate) == float(model.optimizer.learning_rate) == 0.75


@needs_several
def test_learning_rates_of_several_are_set_through_it(rng):
    model = a_model(kg.ClipNorm(several()))
    model.fit(*data(rng), verbose=0, callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)])
    np.testing.assert_allclose([float(o.learning_rate) for o in model.optimizer.optimizers], [0.05, 0.05])


def test_apply_gradients_says_which_iteration_it_was():
    optimizer, variables = kg.ClipNorm("sgd"), weights([1.0])
    assert [int(optimizer.apply_gradients([(tf.constant([2.0]), variables[0])])) for _ in range(3)] == [1, 2, 3]


# Saving.

LOAD = """
import sys, numpy as np, keras, keras_gated
folder = sys.argv[1]
data = np.load(folder + "/data.npz")
model = keras.models.load_model(folder + "/model.keras")
optimizer = model.optimizer
assert type(optimizer).__name__ == "ClipNorm" and (optimizer.max_norm, optimizer.per_variable) == (0.5, True)
loaded = [v.numpy() for v in optimizer.variables]
model.fit(data["x"], data["y"], batch_size=4, shuffle=False, verbose=0)
np.savez(folder + "/loaded.npz", *loaded)
np.savez(folder + "/trained.npz", *model.get_weights(), *(v.numpy() for v in optimizer.variables))
"""


@pytest.mark.slow
def test_a_new_process_goes_on_where_this_one_stopped(rng, tmp_path):
    x, y = data(rng)
    spoiled = y.copy()
    spoiled[BAD * BATCH] = np.inf
    model = fit(a_model(kg.ClipNorm(keras.optimizers.Adam(0.1, use_ema=True), 0.5, True)), x, spoiled)
    assert int(model.optimizer.skipped_steps) == 1
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "data.npz", x=x, y=y)
    saved = [v.numpy() for v in model.optimizer.variables]
    subprocess.run([sys.executable, "-c", LOAD, str(tmp_path)], check=True)
    with np.load(tmp_path / "loaded.npz") as loaded:
        assert_equal(loaded.values(), saved)
    fit(model, x, y)
    with np.load(tmp_path / "trained.npz") as trained:
        assert_close(trained.values(), [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)])


def test_slots_are_saved_once(rng, tmp_path):
    import h5py

    model = fit(a_model(kg.ClipNorm("adam")), *data(rng))
    model.optimizer.skipped_steps.assign(3)
    model.save_weights(tmp_path / "model.weights.h5")
    with h5py.File(tmp_path / "model.weights.h5") as file:
        assert len(file["optimizer/vars"]) == 1
        assert len(file["optimizer/inner_optimizer/vars"]) == len(model.optimizer.inner_optimizer.variables)
    saved = [v.numpy() for v in model.optimizer.variables]
    other = fit(a_model(kg.ClipNorm("adam")), *data(rng))
    other.load_weights(tmp_path / "model.weights.h5")
    assert_equal([v.numpy() for v in other.optimizer.variables], saved)
    other.optimizer.set_weights([0 * v for v in saved])
    assert not any(np.any(v.numpy()) for v in other.optimizer.variables)


@needs_several
def test_parts_of_a_multi_optimizer_can_each_be_wrapped():
    parts = {"a": kg.ClipNorm(SGD(1.0)), "b": kg.ClipNorm(SGD(1.0, gradient_accumulation_steps=2), 2.0)}
    optimizer, variables = keras.optimizers.MultiOptimizer(lambda v: parts[v.name]), weights([0.0], [0.0])
    for gradient in (3.0, 5.0):
        step(optimizer, variables, [[gradient], [gradient]])
    assert_equal([v.numpy() for v in variables], [[-2], [-2]])


def test_an_optimizer_that_has_trained_keeps_its_slots(rng):
    """Those of Keras ignore a second build, one that somebody wrote need not."""

    class Written(keras.optimizers.Adam):
        def build(self, variables):
            builds.append(variables)
            super().build(variables)

    builds, values, (first, second) = [], start(rng), some_steps(rng, 2)
    bare, variables = Written(0.1), weights(*values)
    step(bare, variables, summed(first))
    step(kg.ClipNorm(bare, 2.0), variables, sparse(second))
    assert len(builds) == 1
    bare, expected = keras.optimizers.Adam(0.1), weights(*values)
    step(bare, expected, summed(first))
    step(bare, expected, by_hand(summed(second), 2.0))
    assert_close([v.numpy() for v in variables], [v.numpy() for v in expected])


def test_weights_saved_without_it_load_with_a_warning_about_the_slots(rng, tmp_path):
    model = fit(a_model("adam"), *data(rng))
    model.save_weights(tmp_path / "model.weights.h5")
    other = fit(a_model(kg.ClipNorm("adam")), *data(rng))
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer 'adam"):
        other.load_weights(tmp_path / "model.weights.h5")
    assert_equal(other.get_weights(), model.get_weights())
    assert int(other.optimizer.skipped_steps) == 0


def test_it_is_registered_and_its_configuration_is_complete():
    assert keras.saving.get_registered_name(kg.ClipNorm) == "keras_gated>ClipNorm"
    optimizer = kg.ClipNorm(SGD(0.5, momentum=0.25), 2, True, "propagate", name="mine")
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert again.get_config() == optimizer.get_config()
    assert (again.max_norm, again.per_variable, again.nonfinite, again.name) == (2, True, "propagate", "mine")
    assert again.inner_optimizer.momentum == 0.25


# Replicas.


def applied(replicas, make, start, *steps):
    """-> weights after the steps, each a list of gradients for either replica, and the optimizer."""
    with replicas.scope():
        optimizer = make()
        variables = weights(*start)
        optimizer.build(variables)

    def tensors(gradients):
        return tuple(g if isinstance(g, tf.IndexedSlices) else tf.constant(g, tf.float32) for g in gradients)

    run = tf.function(lambda grads: replicas.run(lambda g: optimizer.apply(list(g), variables), args=(grads,)))
    for step in steps:
        run(
            replicas.experimental_distribute_values_from_function(
                lambda context, step=step: tensors(step[context.replica_id_in_sync_group])
            )
        )
    for v in [*variables, *optimizer.variables]:
        first, second = (part.numpy() for part in v.value.values)
        np.testing.assert_array_equal(first, second)
    return [v.numpy() for v in variables], optimizer


@pytest.mark.parametrize("nonfinite", ["skip", "propagate"])
def test_gradients_of_two_replicas_are_summed_before_they_are_clipped(nonfinite, replicas):
    """20 and 9.5 are both clipped to 1."""
    steps = ([[10.0]], [[10.0]]), ([[10.0]], [[-0.5]])
    (w,), _ = applied(replicas, lambda: kg.ClipNorm(SGD(1.0), nonfinite=nonfinite), [[0.0]], *steps)
    np.testing.assert_array_equal(w, [-2])


@pytest.mark.slow
def test_the_sum_over_two_replicas_stays_as_it_is_within(replicas):
    (w,), _ = applied(replicas, lambda: kg.ClipNorm(SGD(1.0), 20), [[0.0]], ([[7.0]], [[4.0]]))
    np.testing.assert_array_equal(w, [-11])


@pytest.mark.slow
def test_rows_that_both_replicas_looked_up_count_as_one(replicas):
    one, two = rows([[1.0], [2.0]], [1, 2], 4), rows([[4.0], [1.0]], [2, 1], 4)
    (w,), _ = applied(replicas, lambda: kg.ClipNorm(SGD(1.0)), [np.zeros((4, 1))], ([one], [two]))
    np.testing.assert_allclose(w[:, 0], -np.array([0, 2, 6, 0]) / 40**0.5, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["use_ema", "weight_decay", "MultiOptimizer" if "MultiOptimizer" in MAKE else "Nadam"])
def test_a_step_that_is_bad_in_one_variable_of_the_second_replica_is_left_out(name, replicas):
    good, bad = ([[1.0], [2.0, 3.0]], [[2.0], [1.0, 1.0]]), ([[1.0], [2.0, 3.0]], [[2.0], [np.inf, 1.0]])
    begin = [[1.0], [2.0, 3.0]]
    received, ours = applied(replicas, lambda: kg.ClipNorm(MAKE[name]()), begin, good, bad, good)
    expected, undisturbed = applied(replicas, lambda: kg.ClipNorm(MAKE[name]()), begin, good, good)
    assert_equal(received, expected)
    slots = [[v.numpy() for v in o.inner_optimizer.variables] for o in (ours, undisturbed)]
    assert_equal(*slots)
    assert (ours.skipped_steps.numpy(), undisturbed.skipped_steps.numpy()) == (1, 0)
    assert not {"apply", "_all_reduce_sum_gradients"} & set(vars(ours.inner_optimizer))


def test_outside_of_a_replica_it_says_where_to_call_it(replicas):
    with pytest.raises(ValueError, match="Use strategy.run"), replicas.scope():
        kg.ClipNorm(SGD(1.0)).apply([tf.constant([1.0])], [keras.Variable([1.0])])


@pytest.mark.slow
def test_two_replicas_fit_like_one(rng, replicas):
    x, y = data(rng)
    alone = fit(a_model(kg.ClipNorm(keras.optimizers.Adam(0.1), 0.5)), x, y)
    with replicas.scope():
        together = fit(a_model(kg.ClipNorm(keras.optimizers.Adam(0.1), 0.5)), x, y)
    assert_close(together.get_weights(), alone.get_weights(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_bad_second_replica_in_half_precision_is_left_out(rng, replicas):
    """Where Keras looks for overflow in the first replica alone."""
    x, y = data(rng)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with replicas.scope():
            model = a_model(kg.ClipNorm(keras.optimizers.Adam(0.1), 0.5))
        before = a_model("sgd").get_weights()
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    y[3] = np.nan
    fit(model, x[:4], y[:4] / 10)  # small, or it would see one
    assert_equal(model.get_weights(), before)
    assert model.optimizer.inner_optimizer.skipped_steps.numpy() == 1


# Arguments.


WRONG = [
    (lambda: kg.ClipNorm(None), "expects a Keras optimizer, received None. Give one"),
    (lambda: kg.ClipNorm(SGD), "expects a Keras optimizer, received <class"),
    (lambda: kg.ClipNorm(1.0), "expects a Keras optimizer, received 1.0"),
    (lambda: kg.ClipNorm("sgd", 0), "max_norm to be a finite number above 0, received 0. For no clipping"),
    (lambda: kg.ClipNorm("sgd", -1.0), "above 0, received -1.0"),
    (lambda: kg.ClipNorm("sgd", float("nan")), "above 0, received nan"),
    (lambda: kg.ClipNorm("sgd", float("inf")), "above 0, received inf"),
    (lambda: kg.ClipNorm("sgd", "1"), "above 0, received '1'"),
    (lambda: kg.ClipNorm("sgd", None), "above 0, received None"),
    (lambda: kg.ClipNorm("sgd", True), "above 0, received True"),
    (lambda: kg.ClipNorm("sgd", 1.0, "yes"), "per_variable to be True or False, received 'yes'. True clips"),
    (lambda: kg.ClipNorm("sgd", nonfinite="raise"), "\"skip\" or \"propagate\", received 'raise'. \"skip\" leaves"),
    (lambda: kg.ClipNorm("sgd", nonfinite=None), '"skip" or "propagate", received None'),
    (lambda: kg.ClipNorm(SGD(clipnorm=2.0)), "does not clip, received SGD with clipnorm=2.0. Leave clipnorm out"),
    (lambda: kg.ClipNorm(SGD(global_clipnorm=2.0)), "received SGD with global_clipnorm=2.0"),
    (lambda: kg.ClipNorm(SGD(clipvalue=2.0)), "received SGD with clipvalue=2.0"),
    (lambda: kg.ClipNorm(kg.ClipNorm("sgd")), "received a ClipNorm. Wrap its inner_optimizer"),
    (lambda: kg.ClipNorm(keras.optimizers.LossScaleOptimizer(SGD())), "Put it outside: LossScaleOptimizer"),
    (lambda: kg.ClipNorm("sgd").apply([tf.constant([1.0])]), "expects variables where it has not been built"),
    (lambda: step(kg.ClipNorm("sgd"), weights([1.0], [2.0]), [[1.0]]), "received 1 gradients and 2 variables"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_wrong_arguments_get_a_clear_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


@needs_several
@pytest.mark.parametrize("own", ["clipnorm", "gradient_accumulation_steps"])
def test_parts_that_clip_or_accumulate_are_refused(own):
    part, sentence = SGD(**{own: 2}), f"received SGD with {own}=2.*Leave it out|Leave {own} out"
    with pytest.raises(ValueError, match=sentence):
        kg.ClipNorm(keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(part)))
    for late, why in ((part, sentence), (kg.ClipNorm("sgd"), "received a ClipNorm")):
        optimizer = kg.ClipNorm(one_for_all(late))  # which asks for its parts when it is built
        with pytest.raises(ValueError, match=why):
            optimizer.build(weights([1.0]))


# suggest_max_norm.


def records(*raw):
    raw = np.array(raw, float)
    return kg.GradientNorms("unused").records._replace(raw=raw, updated=np.ones(len(raw), bool))


def test_a_suggestion_clips_the_share_it_tells(rng):
    norms = rng.lognormal(size=200)
    for percentile in (50, 75, 90):
        suggestion = kg.suggest_max_norm(records(*norms, np.inf, np.nan), percentile)
        assert suggestion.clipped_share == np.mean(norms > suggestion.max_norm)
        np.testing.assert_allclose(suggestion.clipped_share, 1 - percentile / 100)
        kg.ClipNorm("sgd", suggestion.max_norm)
    assert kg.suggest_max_norm(records(1, 2, 3), 100) == (3, 0)
    assert kg.suggest_max_norm(records(*norms)) == kg.suggest_max_norm(records(*norms), 90)


@pytest.mark.parametrize(
    ("raw", "percentile", "sentence"),
    [
        ((), 90, "a finite norm, received none. Train some steps"),
        ((np.inf, np.nan), 90, "a finite norm, received none"),
        ((0, 0, 0, 1), 50, "above 0, received 0 as their percentile 50"),
        ((1, 2), 101, "a percentile from 0 to 100, received 101"),
        ((1, 2), np.nan, "a percentile from 0 to 100, received nan"),
    ],
)
def test_records_that_suggest_nothing(raw, percentile, sentence):
    with pytest.raises(ValueError, match=sentence):
        kg.suggest_max_norm(records(*raw), percentile)
