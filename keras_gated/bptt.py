"""Backpropagation through time for the simple RNN, line by line as in Algorithm rnn-bptt, in NumPy float64.

For reading and for checking: this is the algorithm that `sweep` runs compiled.  Row vectors, a batch of
sequences at once: B sequences of T steps, D features, N units, M outputs.

    a_t = h_{t-1} W_h + x_t W_x + b       (B, N)     eq. rnn-hidden
    h_t = tanh(a_t)                       (B, N)
    y_t = h_t W_y + b_y                   (B, M)     eq. rnn-output

The chapter's ∇_W is dW here, its δ and δ_a are dh and da.  Werbos (1990); clipping: Pascanu et al. (2013).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Parameters(NamedTuple):
    """The five parameters, or their gradients."""

    W_x: np.ndarray  # (D, N)
    W_h: np.ndarray  # (N, N)
    W_y: np.ndarray  # (N, M)
    b: np.ndarray  # (N,)
    b_y: np.ndarray  # (M,)


class Sweep(NamedTuple):
    """What the forward sweep stores."""

    x: np.ndarray  # (B, T, D)
    a: np.ndarray  # (B, T, N)
    h: np.ndarray  # (B, T + 1, N): h_0 = 0 in front
    y: np.ndarray  # (B, T, M)


class Loss(NamedTuple):
    """A loss Σ_t L_t, averaged over the batch, and its gradient in each y_t."""

    value: float
    dy: np.ndarray  # (B, T, M)


class Step(NamedTuple):
    """The outcome of one training step."""

    parameters: Parameters  # after the update
    loss: float  # before it
    gradients: Parameters  # before clipping


def initialize(rng: np.random.Generator, features: int, units: int, outputs: int) -> Parameters:
    """Glorot-uniform W_x and W_y, orthogonal W_h, zero biases, drawn from the numpy Generator rng."""

    def glorot(rows, columns):
        limit = np.sqrt(6 / (rows + columns))
        return rng.uniform(-limit, limit, (rows, columns))

    W_h, _ = np.linalg.qr(rng.normal(size=(units, units)))
    return Parameters(glorot(features, units), W_h, glorot(units, outputs), np.zeros(units), np.zeros(outputs))


def forward(parameters: Parameters, x: ArrayLike) -> Sweep:
    """Forward sweep over x (B, T, D), storing all a_t, h_t and y_t.

    Raises:
        ValueError: if x does not fit the parameters.
    """
    W_x, W_h, W_y, b, b_y = parameters
    x = np.asarray(x, dtype=np.float64)
    if x.ndim != 3 or x.shape[1] == 0 or x.shape[2] != len(W_x):
        raise ValueError(
            f"bptt expects x of shape (batch, time, {len(W_x)}) with at least one time step, received {x.shape}. "
            "Its last axis must fit the rows of W_x."
        )
    B, T, _ = x.shape
    a = np.empty((B, T, len(W_h)))
    h = np.zeros((B, T + 1, len(W_h)))
    y = np.empty((B, T, len(b_y)))
    for t in range(T):
        a[:, t] = h[:, t] @ W_h + x[:, t] @ W_x + b
        h[:, t + 1] = np.tanh(a[:, t])
        y[:, t] = h[:, t + 1] @ W_y + b_y
    return Sweep(x, a, h, y)


def backward(parameters: Parameters, sweep: Sweep, dy: ArrayLike) -> Parameters:
    """Backward sweep: the gradients of all five parameters from dy (B, T, M), the loss gradient in each y_t.

    Raises:
        ValueError: if dy has not the shape of y.
    """
    _, W_h, W_y, _, _ = parameters
    x, a, h, y = sweep
    dy = np.asarray(dy, dtype=np.float64)
    if dy.shape != y.shape:
        raise ValueError(f"bptt expects dy of the shape of y, {y.shape}, received {dy.shape}.")
    dW_x, dW_h, dW_y, db, db_y = (np.zeros_like(p, dtype=np.float64) for p in parameters)
    dh = np.zeros_like(h[:, 0])
    for t in reversed(range(x.shape[1])):
        dh = dy[:, t] @ W_y.T + dh
        da = dh * (1 - np.tanh(a[:, t]) ** 2)
        dW_y += h[:, t + 1].T @ dy[:, t]
        db_y += dy[:, t].sum(axis=0)
        dW_h += h[:, t].T @ da
        dW_x += x[:, t].T @ da
        db += da.sum(axis=0)
        dh = da @ W_h.T
    return Parameters(dW_x, dW_h, dW_y, db, db_y)


def clip(gradients: Parameters, max_norm: float) -> Parameters:
    """Rescales each gradient whose norm exceeds max_norm to that norm (eq. rnn-clip).

    Raises:
        ValueError: unless max_norm is positive.
    """
    if not max_norm > 0:
        raise ValueError(f"clip expects max_norm > 0, received {max_norm!r}. To switch clipping off pass None.")
    norms = [np.linalg.norm(g) for g in gradients]
    return Parameters(*(g * (max_norm / n) if n > max_norm else g for g, n in zip(gradients, norms, strict=True)))


def train_step(
    parameters: Parameters,
    x: ArrayLike,
    loss: Callable[[np.ndarray], Loss],
    learning_rate: float,
    max_norm: float | None = None,
) -> Step:
    """One step of Algorithm rnn-bptt: both sweeps, "clip each gradient", and θ ← θ - η ∇θ.

    Args:
        parameters: `Parameters`.
        x: (B, T, D).
        loss: a function y -> `Loss`, such as `lambda y: squared_error(y, target)`.
        learning_rate: η.
        max_norm: τ of eq. rnn-clip, for each gradient by itself; None does not clip.

    Returns:
        `Step`.
    """
    swept = forward(parameters, x)
    value, dy = loss(swept.y)
    gradients = backward(parameters, swept, dy)
    clipped = gradients if max_norm is None else clip(gradients, max_norm)
    updated = (p - learning_rate * g for p, g in zip(parameters, clipped, strict=True))
    return Step(Parameters(*updated), value, gradients)


def squared_error(y: ArrayLike, target: ArrayLike, weight: ArrayLike = 1.0) -> Loss:
    """L_t = ½ |y_t - target_t|², target (B, T, M).

    weight broadcasts against (B, T): 0 where a step has no target.
    """
    y, target = np.asarray(y, dtype=np.float64), np.asarray(target, dtype=np.float64)
    if y.shape != target.shape:
        raise ValueError(f"squared_error expects a target of the shape of y, {y.shape}, received {target.shape}.")
    weight = np.broadcast_to(weight, y.shape[:2])[..., None] / len(y)
    return Loss(float(np.sum(weight * (y - target) ** 2) / 2), weight * (y - target))


def softmax_cross_entropy(y: ArrayLike, target: ArrayLike, weight: ArrayLike = 1.0) -> Loss:
    """L_t = -log softmax(y_t)[target_t], target (B, T) holding class numbers from 0 to M - 1.

    weight broadcasts against (B, T): 0 where a step has no target.
    """
    y, target = np.asarray(y, dtype=np.float64), np.asarray(target)
    classes = y.shape[-1]
    whole = target.shape == y.shape[:2] and np.issubdtype(target.dtype, np.integer)
    if not whole or target.min() < 0 or target.max() >= classes:
        raise ValueError(
            f"softmax_cross_entropy expects integer classes from 0 to {classes - 1} of shape {y.shape[:2]}, received "
            f"{target.dtype} from {target.min()} to {target.max()} of shape {target.shape}."
        )
    weight = np.broadcast_to(weight, y.shape[:2]) / len(y)
    shifted = y - y.max(axis=-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    one_hot = np.eye(classes)[target]
    value = -np.sum(weight * np.sum(one_hot * log_p, axis=-1))
    return Loss(float(value), weight[..., None] * (np.exp(log_p) - one_hot))
