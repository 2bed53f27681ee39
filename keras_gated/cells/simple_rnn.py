"""The simple recurrent network (eq. rnn-hidden).

    p = x W + b             projected input, for all steps at once       (B, N)
    a = p + h₋ U            pre-activation                               (B, N)
    h = f(a)                hidden state; the chapter's f is tanh        (B, N)

The chapter writes W_x for W and W_h for U, and columns where we have rows.  Its read-out y = h W_y + b_y
(eq. rnn-output) is a keras.layers.Dense behind the layer.  Elman (1990).
"""

from functools import partial
from typing import Any, Unpack

import keras
from keras import ops

from keras_gated.cells.options import CellOptions, LayerOptions
from keras_gated.cells.recurrent import Recurrent, RecurrentCell
from keras_gated.engine.contract import Equations, sigmoid
from keras_gated.engine.roles import Matrix


def step(f, p, states, U):
    """(h₋) -> (h)."""
    (p,), (h_prev,) = p, states
    h = f(p + U(h_prev))
    return (h,), ()


def step_gradient(slope, saved, before, after, d_states, U_T):
    """Transpose of step: (dh) -> da and (dh₋).  slope is f' as a function of h."""
    (h,), (dh,) = after, d_states
    da = dh * slope(h)
    return da, (U_T(da),)


def weight_gradient(da, saved, before, after):
    """dU = Σ_t h₋ᵀ da: the engine's product."""
    (h_prev,) = before
    return {"U": (h_prev, da)}


def _equations(f, slope):
    return Equations(
        gates=("h",),
        states={"h": "units"},
        saved=(),
        weights={"U": Matrix("h", ("h",))},
        step=partial(step, f),
        step_gradient=partial(step_gradient, slope),
        weight_gradient=weight_gradient,
    )


EQUATIONS = {
    "tanh": _equations(ops.tanh, lambda h: 1 - h**2),
    "relu": _equations(ops.relu, lambda h: ops.cast(h > 0, h.dtype)),
    "sigmoid": _equations(sigmoid, lambda h: h * (1 - h)),
    "linear": _equations(lambda a: a, ops.ones_like),
}


@keras.saving.register_keras_serializable("keras_gated")
class SimpleRNNCell(RecurrentCell):
    """One step of `SimpleRNN`, for keras.layers.RNN and StackedRNNCells.

    Args:
        units: N, the size of the state.
        activation: f, one of "tanh", "relu", "sigmoid", "linear".
        **options: those of `RecurrentCell`.

    Raises:
        ValueError: for another activation.
    """

    def __init__(self, units: int, activation: str = "tanh", **options: Unpack[CellOptions]):
        super().__init__(units, **options)
        if activation not in EQUATIONS:
            raise ValueError(
                f"SimpleRNN expects activation to be one of {', '.join(EQUATIONS)}, received {activation!r}. "
                "For another function use keras.layers.SimpleRNN."
            )
        self.activation = activation

    @property
    def equations(self) -> Equations:
        return EQUATIONS[self.activation]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "activation": self.activation}


@keras.saving.register_keras_serializable("keras_gated")
class SimpleRNN(Recurrent):
    """The simple (Elman) recurrent layer, h_t = f(x_t W + h_{t-1} U + b)  (eq. rnn-hidden).

    Weights: kernel W (D, N), recurrent_kernel U (N, N), bias b (N,).

    Args:
        units: N, the size of the state.
        activation: f, one of "tanh", "relu", "sigmoid", "linear".
        **options: those of `Recurrent`, which also says what is called, returned and masked.

    Raises:
        ValueError: for another activation.

    Reference: Elman, Finding structure in time (1990).
    """

    cell_class = SimpleRNNCell

    def __init__(self, units: int, activation: str = "tanh", **options: Unpack[LayerOptions]):
        super().__init__(units, activation=activation, **options)
