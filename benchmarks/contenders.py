"""The layers that are compared, and the matrix products that none of them can do without.

A contender is two functions of no arguments on one problem: `infer`, the outputs h of all times, and `train`, a
training step: the gradients of L = Σ h ⊙ R, R random, in x and in all weights.  Both return a list of tensors of the
contender's own library; `inferred` and `trained` carry their values into our order of gates and signs.

Axes as in the package: B batch, T time, D features, N units, k gates.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
import torch

import keras_gated as kg

OURS = {
    "SimpleRNN": kg.SimpleRNN,
    "LSTM": kg.LSTM,
    "GRU": kg.GRU,
    "GRU after": functools.partial(kg.GRU, reset_after=True),
}
TORCH = {"SimpleRNN": torch.nn.RNN, "LSTM": torch.nn.LSTM, "GRU after": torch.nn.GRU}
PRODUCTS = {"SimpleRNN": (1,), "LSTM": (4,), "GRU": (2, 1), "GRU after": (3,)}  # gates of each product with h
LONGEST_UNROLL = 100
SMALLEST_BATCH = 8  # below, two lanes are slower than one


class Contender(NamedTuple):
    """One way to compute the layer."""

    infer: Callable
    train: Callable
    inferred: Callable = None  # what infer returns -> arrays [h]
    trained: Callable = None  # what train returns -> arrays [dx, dW, dU, db] in our letters; None: computes no layer


class Problem:
    """One cell at one shape, with random data and weights."""

    def __init__(self, cell, shape, seed=0):
        self.cell, self.shape = cell, tuple(shape)
        B, T, D, N = shape
        rng = np.random.default_rng(seed)
        self.x = rng.normal(size=(B, T, D)).astype("float32")
        self.R = rng.normal(size=(B, T, N)).astype("float32")
        keras.utils.set_random_seed(seed)
        self.layer = self.ours()
        self.layer.build((B, T, D))
        W, U, b = self.layer.get_weights()
        self.layer.set_weights([W, U, b + rng.normal(size=b.shape, scale=0.1)])

    def ours(self):
        return OURS[self.cell](self.shape[-1], return_sequences=True)


def contenders(problem):
    """{name: a function that makes the `Contender`}, ours first."""
    makers = {
        "ours": lambda: of_tensorflow(problem, problem.layer),
        "ours, jit": lambda: of_tensorflow(problem, problem.layer, jit=True),
        "keras": lambda: of_tensorflow(problem, of_keras(problem)),
        "keras, jit": lambda: of_tensorflow(problem, of_keras(problem), jit=True),
    }
    if problem.shape[1] <= LONGEST_UNROLL:
        makers["keras, unroll"] = lambda: of_tensorflow(problem, of_keras(problem, unroll=True))
    if problem.cell in TORCH:
        makers["torch"] = lambda: of_torch(problem, onednn=False)
        makers["torch, oneDNN"] = lambda: of_torch(problem, onednn=True)
    makers["products"] = lambda: products_of_tensorflow(problem)
    makers["products, torch"] = lambda: products_of_torch(problem)
    return makers


# TensorFlow.


def of_keras(problem, unroll=False):
    """The layer of keras.layers with the weights of ours; on a CPU there is no cuDNN to use."""
    layer = kg.weights.to_keras(problem.layer)
    config = {**layer.get_config(), "unroll": unroll}
    if problem.cell != "SimpleRNN":
        config["use_cudnn"] = False
    copy = type(layer).from_config(config)
    copy.build(problem.x.shape)
    copy.set_weights(layer.get_weights())
    return copy


def of_tensorflow(problem, layer, jit=False):
    x, R = tf.constant(problem.x), tf.constant(problem.R)

    @tf.function(autograph=False, jit_compile=jit or None)
    def infer(x):
        return [layer(x, training=False)]

    @tf.function(autograph=False, jit_compile=jit or None)
    def train(x, R):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x, training=True) * R)
        return tape.gradient(loss, [x, *(v.value for v in layer.trainable_weights)])

    def trained(results):
        dx, *d_weights = (r.numpy() for r in results)
        if layer is not problem.layer:  # their gradients are carried over as if they were weights
            theirs = of_keras(problem)
            theirs.set_weights(d_weights)
            d_weights = kg.weights.from_keras(theirs).get_weights()
        return [dx, *d_weights]

    return Contender(lambda: infer(x), lambda: train(x, R), lambda results: [results[0].numpy()], trained)


# PyTorch.


def of_torch(problem, onednn):
    module = TORCH[problem.cell](problem.shape[2], problem.shape[3], batch_first=True)
    state = {name: torch.from_numpy(a.copy()) for name, a in kg.weights.to_torch(problem.layer).items()}
    module.load_state_dict(state)
    names, parameters = zip(*module.named_parameters(), strict=True)
    R, x = torch.from_numpy(problem.R), torch.from_numpy(problem.x)
    x_watched = torch.from_numpy(problem.x).requires_grad_()

    def infer():
        with torch.inference_mode(), torch.backends.mkldnn.flags(enabled=onednn):
            return [module(x)[0]]

    def train():
        with torch.backends.mkldnn.flags(enabled=onednn):
            return torch.autograd.grad((module(x_watched)[0] * R).sum(), [x_watched, *parameters])

    def trained(results):
        dx, *d_weights = (r.numpy() for r in results)
        state = dict(zip(names, d_weights, strict=True))
        if problem.cell != "GRU after":  # b_ih + b_hh is our b, and each has its gradient
            state["bias_hh_l0"] = np.zeros_like(state["bias_hh_l0"])
        layer = problem.ours()
        return [dx, *kg.weights.from_torch(state, layer).get_weights()]

    return Contender(infer, train, lambda results: [results[0].numpy()], trained)


# The bound.


def products_of_tensorflow(problem):
    """Only x W for all times at once and T products h U; in training also T products da Uᵀ, and at once xᵀ da, h₋ᵀ da
    and da Wᵀ.  The operands of the steps are four rows that take turns: they stay in the cache, and no product can be
    moved out of the loop.  Two compiled programs side by side, as in the package."""
    B = problem.shape[0]
    lanes = [B] if B < SMALLEST_BATCH else [B // 2, B - B // 2]
    arguments = [_operands(problem, rows) for rows in lanes]
    arguments = tf.nest.map_structure(tf.constant, arguments)

    def run(training):
        lane = tf.function(_lane_of_products(problem, training), jit_compile=True, autograph=False)
        return tf.function(lambda arguments: [lane(*a) for a in arguments], autograph=False)

    infer, train = run(training=False), run(training=True)
    return Contender(lambda: infer(arguments)[0], lambda: train(arguments)[0])


def _lane_of_products(problem, training):
    T = problem.shape[1]

    def turn(rows, t):
        return tf.reshape(tf.slice(rows, [t % 4, 0, 0], [1, *rows.shape[1:]]), rows.shape[1:])

    def lane(x, W, h_all, h, U, da, d_steps):
        def step(t, sums):
            h_t = turn(h, t)
            return t + 1, [s + tf.matmul(h_t, u) for s, u in zip(sums, U, strict=True)]

        def step_back(t, sums):
            return t + 1, [s + tf.matmul(turn(d, t), u) for s, d, u in zip(sums, d_steps, U_T, strict=True)]

        zeros = [tf.zeros((h.shape[1], u.shape[1])) for u in U]
        results = [tf.matmul(x, W), tf.while_loop(lambda t, *_: t < T, step, (0, zeros))[1]]
        if training:
            U_T = [tf.transpose(u) for u in U]
            zeros = [tf.zeros(h.shape[1:]) for _ in U]
            results += [
                tf.while_loop(lambda t, *_: t < T, step_back, (0, zeros))[1],
                tf.matmul(x, da, transpose_a=True),
                tf.matmul(h_all, da, transpose_a=True),
                tf.matmul(da, W, transpose_b=True),
            ]
        return tf.nest.flatten(results)

    return lane


def products_of_torch(problem):
    """The same products by PyTorch, each of them on all cores."""
    x, W, h_all, h, U, da, d_steps = tf.nest.map_structure(torch.from_numpy, _operands(problem, problem.shape[0]))
    T = problem.shape[1]
    U_T = [u.T.contiguous() for u in U]
    results = [d[0].clone() for d in d_steps]
    result_back = h[0].clone()

    def infer():
        with torch.inference_mode():
            for t in range(T):
                for u, result in zip(U, results, strict=True):
                    torch.mm(h[t % 4], u, out=result)
            return [x @ W]

    def train():
        with torch.inference_mode():
            infer()
            for t in range(T):
                for d, u in zip(d_steps, U_T, strict=True):
                    torch.mm(d[t % 4], u, out=result_back)
            return [x.T @ da, h_all.T @ da, da @ W.T]

    return Contender(infer, train)


def _operands(problem, rows):
    """x (B T, D), W (D, kN), h (B T, N) and four rows of it (4, B, N), U [(N, nN)], da (B T, kN) and [(4, B, nN)]."""
    _, T, D, N = problem.shape
    groups = PRODUCTS[problem.cell]
    k = sum(groups)
    rng = np.random.default_rng(1)

    def normal(*shape):
        return rng.normal(size=shape, scale=0.1).astype("float32")

    U = [normal(N, n * N) for n in groups]
    d_steps = [normal(4, rows, n * N) for n in groups]
    at_once = normal(rows * T, D), normal(D, k * N), normal(rows * T, N)
    return [*at_once, normal(4, rows, N), U, normal(rows * T, k * N), d_steps]
