"""Contenders on TensorFlow: our layers, keras.layers in its three modes, and the bare matrix products."""

import tempfile

import keras
import numpy as np
import tensorflow as tf
from benchmark.plan import WATCHED_STEPS
from benchmark.problem import Contender, Problem, products

import keras_gated as kg

LONGEST_UNROLL = 100
SMALLEST_BATCH = 8  # below, two programs side by side are slower than one


def contenders(problem):
    """{name: a function that makes the `Contender`}, ours first."""
    makers = {
        "ours": lambda: of_layer(problem, problem.layer),
        "ours, jit": lambda: of_layer(problem, problem.layer, jit=True),
        "keras": lambda: of_layer(problem, of_keras(problem)),
        "keras, jit": lambda: of_layer(problem, of_keras(problem), jit=True),
    }
    if problem.shape[1] <= LONGEST_UNROLL:
        makers["keras, unroll"] = lambda: of_layer(problem, of_keras(problem, unroll=True))
    makers["products"] = lambda: of_products(problem)
    return makers


def of_keras(problem, **options):
    """The layer of keras.layers with the weights of ours."""
    converted = kg.weights.to_keras(problem.layer)
    if problem.cell != "SimpleRNN":
        options["use_cudnn"] = False
    layer = type(converted).from_config({**converted.get_config(), **options})
    layer.build(problem.x.shape)
    layer.set_weights(converted.get_weights())
    return layer


def of_layer(problem, layer, jit=False):
    x, R = tf.constant(problem.x), tf.constant(problem.R)

    @tf.function(autograph=False, jit_compile=jit or None)
    def infer(x):
        return layer(x, training=False)

    @tf.function(autograph=False, jit_compile=jit or None)
    def train(x, R):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x, training=True) * R)
        return tape.gradient(loss, [x, *(v.value for v in layer.trainable_weights)])

    def arrays(h, gradients):
        dx, *d_weights = (g.numpy() for g in gradients)
        if layer is not problem.layer:  # their gradients are carried over as if they were weights
            theirs = of_keras(problem)
            theirs.set_weights(d_weights)
            d_weights = kg.weights.from_keras(theirs).get_weights()
        return [h.numpy(), dx, *d_weights]

    return Contender(lambda: infer(x), lambda: train(x, R), arrays)


def of_products(problem):
    """Compiled programs side by side, as our layers are."""
    B = problem.shape[0]
    batches = [B] if B < SMALLEST_BATCH else [B // 2, B - B // 2]
    operands = tf.nest.map_structure(tf.constant, [products(problem, batch) for batch in batches])

    def run(training):
        lane = tf.function(_products_of_a_lane(problem.shape[1], training), jit_compile=True, autograph=False)
        return tf.function(lambda: [lane(*of_lane) for of_lane in operands], autograph=False)

    return Contender(run(training=False), run(training=True))


def _products_of_a_lane(T, training):
    def loop(step, *carried):
        return tf.while_loop(lambda t, *_: t < T, lambda t, *carried: (t + 1, *step(*carried)), (0, *carried))[1:]

    def lane(x, W, h, U, da, da_step):
        def step(products):
            return ([tf.matmul(products[0][:, :units], u) for u in U],)

        def step_back(das, dhs):
            das = [tf.concat([dh, d[:, units:]], axis=1) for d, dh in zip(das, dhs, strict=True)]
            return das, [tf.matmul(d, u) for d, u in zip(das, U_T, strict=True)]

        units = h.shape[1]
        results = [tf.matmul(x, W), loop(step, da_step)]
        if training:
            U_T = [tf.transpose(u) for u in U]
            results += [
                loop(step_back, da_step, [d[:, :units] for d in da_step])[1],
                tf.matmul(x, da, transpose_a=True),
                tf.matmul(h, da, transpose_a=True),
                tf.matmul(da, W, transpose_b=True),
            ]
        return tf.nest.flatten(results)

    return lane


# model.fit.


def layers(cell, features, units):
    """{name: (layer that returns the last output, jit)} with equal weights."""
    problem = Problem(cell, (1, 1, features, units))
    ours = problem.ours(return_sequences=False)
    ours.set_weights(problem.layer.get_weights())
    theirs = [kg.weights.to_keras(ours) for _ in range(2)]
    return {"ours": (ours, False), "keras": (theirs[0], False), "keras, jit": (theirs[1], True)}


def model(layer, features, masked, jit):
    keras.utils.set_random_seed(0)
    masking = [keras.layers.Masking()] if masked else []
    made = keras.Sequential([keras.Input((None, features)), *masking, layer, keras.layers.Dense(1)])
    made.compile(keras.optimizers.Adam(1e-3), "mse", jit_compile=True if jit else "auto")
    return made


def masked_epochs(cell, shape, batches):
    """{name: a function that runs an epoch of model.fit, and returns its loss}: random lengths, padded and masked."""
    B, T, D, N = shape
    rng = np.random.default_rng(0)
    x = rng.normal(size=(B * batches, T, D)).astype("float32")
    x[np.arange(T) >= rng.integers(T // 10, T + 1, size=len(x))[:, None]] = 0
    y = rng.normal(size=(len(x), 1)).astype("float32")

    def epoch_of(layer, jit):
        of_layer = model(layer, D, masked=True, jit=jit)
        return lambda: of_layer.fit(x, y, batch_size=B, shuffle=False, verbose=0).history["loss"][0]

    return {name: epoch_of(layer, jit) for name, (layer, jit) in layers(cell, D, N).items()}


def watched_epochs(cell, contender, shape):
    """{name: a function that runs an epoch of model.fit without or with callbacks, and returns its loss}."""
    B, T, D, N = shape
    rng = np.random.default_rng(0)
    x = rng.normal(size=(B * WATCHED_STEPS, T, D)).astype("float32")
    y = x[:, 0, :1]

    def epoch_of(*callbacks):
        keras.utils.set_random_seed(0)
        kind = getattr(kg if contender == "ours" else keras.layers, cell)
        made = keras.Sequential([keras.Input((T, D)), kind(N, return_sequences=True), kind(N), keras.layers.Dense(1)])
        made.compile(keras.optimizers.Adam(1e-3), "mse")
        options = {"batch_size": B, "shuffle": False, "verbose": 0}
        with_own_folder = [callback(tempfile.mkdtemp()) for callback in callbacks]
        return lambda: made.fit(x, y, callbacks=with_own_folder, **options).history["loss"][0]

    return {
        "no callback": epoch_of(),
        "GradientNorms": epoch_of(kg.GradientNorms),
        "both": epoch_of(kg.GradientNorms, kg.GradientFlow),
    }


def batches_of_many_lengths(shape, lengths, last_batch):
    """A dataset of (x, y), one batch of each length and a short one at the end."""
    B, _, D, _ = shape
    rng = np.random.default_rng(0)
    sizes = [(B, T) for T in rng.permutation(lengths)] + [(last_batch, max(lengths))]
    batches = [(rng.normal(size=(*size, D)).astype("float32"), np.ones((size[0], 1), "float32")) for size in sizes]
    signature = tf.TensorSpec((None, None, D)), tf.TensorSpec((None, 1))
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
