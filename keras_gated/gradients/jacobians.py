"""How a change of a state is felt later: step Jacobians and their products, the bound, the spectrum.

Hides which part of the whole state is h, and how the cells of each library hold what is bounded.

Axes: B batch, T time, N units, k gates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from numpy.typing import ArrayLike

from keras_gated.cells.meaning import meaning_of
from keras_gated.gradients.gates import gates_on
from keras_gated.gradients.matrix_products import product_norms
from keras_gated.gradients.trajectory import mean_of_valid, output_columns, step_jacobians, trajectory

STEEPEST = {"tanh": 1.0, "relu": 1.0, "sigmoid": 0.25, "linear": 1.0, "softsign": 1.0, "elu": 1.0}  # γ = max |f'|


class Spectrum(NamedTuple):
    """Of each block of the recurrent kernel, in the order of memory: h; i f c o; or z r h."""

    sigma_max: np.ndarray  # (k,) largest singular value
    radius: np.ndarray  # (k,) spectral radius; NaN of blocks that are not square


def state_jacobian_norms(
    layer: keras.layers.RNN, x: ArrayLike, mask: ArrayLike | None = None, initial_state: Any = None
) -> np.ndarray:
    """How far a change of one hidden state is felt: ‖∂h_t/∂h_k‖₂ of all pairs of steps (eq. rnn-jacobian).

    The product of the Jacobians of the whole state, of which the rows and columns of h count: for an LSTM the change
    of h_k alone, carried on by h and c.

    Args:
        layer: a keras.layers.RNN that has weights (TensorFlow backend).
        x, mask, initial_state: as in `gate_activity`.

    Returns:
        (T, T): [t, k] is the largest singular value, 1 for k = t, 0 for k > t; the mean over the examples that have
        both steps.  Accurate to about 1e-7 (relative); in float32 with more than 64 numbers in the state to about
        1e-5, which is faster.
    """
    given, part = trajectory(layer, x, mask, initial_state), output_columns(layer)
    norms = np.concatenate([product_norms(J, part) for _, J in step_jacobians(layer, given)])
    mean = mean_of_valid(norms, given.valid[:, :, None] & given.valid[:, None, :])
    return np.tril(mean)


def jacobian_bound(layer: keras.layers.RNN, lag: ArrayLike) -> Any:
    """(γ σ_max(W_h))^lag, which ‖∂h_t/∂h_{t-lag}‖ of a simple RNN never exceeds (eq. rnn-jacobian-bound).

    Args:
        layer: SimpleRNN of keras_gated or keras.layers, or a keras.layers.RNN of their cells.
        lag: t - k, a number or an array; masked steps between k and t do not count.

    Returns:
        The bound, of the shape of lag.  γ is the steepest slope of the activation: 1 for tanh, 0.25 for sigmoid.

    Raises:
        ValueError: for gated cells, which have no such bound, and for an activation of unknown slope.
    """
    activation = getattr(layer.cell, "activation", None)
    name = activation if isinstance(activation, str) else getattr(activation, "__name__", repr(activation))
    if len(_blocks(layer)) > 1 or name not in STEEPEST:
        raise ValueError(
            f"jacobian_bound expects a SimpleRNN with an activation out of {', '.join(STEEPEST)}, received "
            f"{type(layer.cell).__name__} with {name!r}. state_jacobian_norms measures any layer."
        )
    with np.errstate(over="ignore"):
        return (STEEPEST[name] * spectrum(layer).sigma_max[0]) ** np.asarray(lag, np.float64)


def spectrum(layer: keras.layers.RNN) -> Spectrum:
    """Largest singular value and spectral radius of each block of the recurrent kernel.

    Below 1 / γ the first says that gradients of a simple RNN vanish; the second above 1, that they may explode.

    Args:
        layer: a keras.layers.RNN whose cell has a recurrent_kernel (N, kN).

    Returns:
        `Spectrum`, NaN where a block holds inf or NaN.

    Raises:
        ValueError: for another cell.
    """
    blocks = _blocks(layer)
    finite = np.isfinite(blocks).all(axis=(1, 2))
    found = Spectrum(*np.full((2, len(blocks)), np.nan))
    found.sigma_max[finite] = np.linalg.svd(blocks[finite], compute_uv=False)[:, 0]
    if blocks.shape[1] == blocks.shape[2]:
        found.radius[finite] = np.abs(np.linalg.eigvals(blocks[finite])).max(axis=-1)
    return found


def _blocks(layer):
    """(k, N, N) float64; of a projected state, fewer rows than columns."""
    U = ops.convert_to_numpy(recurrent_kernel(layer)).astype(np.float64)
    k = len(meaning_of(layer.cell).blocks) or U.shape[1] // len(U)
    return np.stack(np.split(U, k, axis=1))


def recurrent_kernel(layer):
    U, blocks = getattr(layer.cell, "recurrent_kernel", None), len(meaning_of(layer.cell).blocks)
    if U is None or len(U.shape) != 2 or U.shape[1] % (blocks or U.shape[0]):
        raise ValueError(
            f"Expected a built layer whose cell has a recurrent_kernel (N, kN), received {layer.name!r} with a "
            f"{type(layer.cell).__name__}. Put stacked cells into layers of their own."
        )
    return U


def cell_state_jacobian(
    layer: keras.layers.RNN, x: ArrayLike, mask: ArrayLike | None = None, initial_state: Any = None
) -> np.ndarray:
    """The diagonal of ∂c_t/∂c_{t-1}, the gates held fixed: f_t (eq. rnn-lstm-cec).

    Its product over a lag is what the constant error carousel leaves of the error.

    Args:
        layer: an LSTM of keras_gated or keras.layers, a keras.layers.RNN of their cells, or one of another cell that
            has a state besides h and says what a step retains of it.
        x, mask, initial_state: as in `gate_activity`.

    Returns:
        (B, T, N); 1 where a step is masked and c stays.

    Raises:
        ValueError: for a layer without a forget gate.
    """
    found, meaning = gates_on(layer, x, mask, initial_state), meaning_of(layer.cell)
    if found.retained is None or meaning.memory == meaning.states[0]:
        raise ValueError(
            f"cell_state_jacobian expects an LSTM, received {layer.name!r} with the gates "
            f"{', '.join(found.values)}. For what a GRU retains see retention_time."
        )
    return np.where(found.valid[..., None], found.retained, 1)
