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


def products(problem, batch, seed=1):
    """Operands of the bare matrix products: x (B T, D), W (D, kN), h (B T, N) and four rows of it (4, B, N),
    U [(N, nN)], da (B T, kN) and four rows of it [(4, B, nN)], n gates in each product.

    What is needed: x W for all times at once and T products h U; in training also T products da Uᵀ, and at once
    xᵀ da, h₋ᵀ da and da Wᵀ.  The four rows take turns, so that they stay in the cache and nothing can be done once
    for all steps.
    """
    _, T, D, N = problem.shape
    groups = PRODUCTS[problem.cell]
    k = sum(groups)
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape, scale=0.1).astype("float32")

    at_once = normal(batch * T, D), normal(D, k * N), normal(batch * T, N)
    U, d_rows = [normal(N, n * N) for n in groups], [normal(4, batch, n * N) for n in groups]
    return [*at_once, normal(4, batch, N), U, normal(batch * T, k * N), d_rows]
