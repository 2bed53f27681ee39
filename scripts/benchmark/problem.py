"""What all contenders compute: one cell at one shape, with the same random data and weights in every process."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import keras_gated as kg

OURS = {
    "SimpleRNN": (kg.SimpleRNN, {}),
    "LSTM": (kg.LSTM, {}),
    "GRU": (kg.GRU, {}),
    "GRU after": (kg.GRU, {"reset_after": True}),
}
PRODUCTS = {"SimpleRNN": (1,), "LSTM": (4,), "GRU": (2, 1), "GRU after": (3,)}  # gates of each product with h


class Contender(NamedTuple):
    """One way to compute it.

    Two functions without arguments: `infer`, the outputs h of all times, and `train`, a training step: the gradients
    of L = Σ h ⊙ R in x and in all weights.  Both return tensors of the contender's own library; `arrays` makes of
    them [h, dx, dW, dU, db] in our order of gates and signs.  The bare products, which compute no layer, have none.
    """

    infer: Callable
    train: Callable
    arrays: Callable | None = None


class Problem:
    """Axes as in the package: B batch, T time, D features, N units."""

    def __init__(self, cell, shape):
        self.cell, self.shape = cell, tuple(shape)
        B, T, D, N = shape
        rng = np.random.default_rng(0)
        self.x = rng.normal(size=(B, T, D)).astype("float32")
        self.R = rng.normal(size=(B, T, N)).astype("float32")
        k = sum(PRODUCTS[cell])
        W = rng.normal(size=(D, k * N), scale=D**-0.5)
        U = np.concatenate([np.linalg.qr(rng.normal(size=(N, N)))[0] for _ in range(k)], axis=1)
        self.layer = self.ours()
        *_, b = self.layer.get_weights()
        self.layer.set_weights([W, U, rng.normal(size=b.shape, scale=0.1)])

    def ours(self, **options):
        """A layer of ours, built."""
        B, T, D, N = self.shape
        kind, of_kind = OURS[self.cell]
        layer = kind(N, **of_kind, **{"return_sequences": True, **options})
        layer.build((None, None, D))
        return layer


def products(problem, batch):
    """Operands of the bare matrix products: x (B T, D), W (D, kN), h (B T, N), U [(N, nN)], da (B T, kN), and da of one
    step [(B, nN)], n gates in each product.

    What is needed: x W for all times at once and T products h U; in training also T products da Uᵀ, and at once
    xᵀ da, h₋ᵀ da and da Wᵀ.  The first N columns of h U are the next h, and da Uᵀ those of the next da: a step waits
    for the one before, as in a layer, and the orthogonal blocks of U keep the numbers in range.
    """
    _, T, D, N = problem.shape
    groups = PRODUCTS[problem.cell]
    rng = np.random.default_rng(1)

    def normal(*shape):
        return rng.normal(size=shape).astype("float32")

    W, U, *_ = problem.layer.get_weights()
    U = np.split(U, np.cumsum(groups)[:-1] * N, axis=1)
    x, h, da = normal(batch * T, D), normal(batch * T, N), normal(batch * T, W.shape[1])
    return [x, W, h, U, da, [normal(batch, n * N) for n in groups]]
