"""Long short-term memory (eq. rnn-lstm-f .. rnn-lstm-h).

    p = x W + b             projected input, for all steps at once       (B, 4N)
    u = h₋ U                                                             (B, 4N)
    i = σ(p_i + u_i)        input gate                                   (B, N)
    f = σ(p_f + u_f)        forget gate
    c̃ = tanh(p_c + u_c)     candidate content
    o = σ(p_o + u_o)        output gate
    c = f ⊙ c₋ + i ⊙ c̃      cell state
    h = o ⊙ tanh(c)         hidden state

Columns of W, U and b are ordered i f c o, as in keras.layers.LSTM.
Hochreiter & Schmidhuber (1997); forget gate: Gers, Schmidhuber & Cummins (2000).
"""

from typing import Any, Unpack

import keras
from keras import ops
from keras.ops import tanh

from keras_gated.cells.options import CellOptions, LayerOptions
from keras_gated.cells.recurrent import Recurrent, RecurrentCell
from keras_gated.engine.contract import Equations, sigmoid
from keras_gated.engine.roles import Matrix, RetainingGate


def step(p, states, U):
    """(h₋, c₋) -> (h, c), and the gates that step_gradient needs."""
    p_i, p_f, p_c, p_o = p
    h_prev, c_prev = states
    u_i, u_f, u_c, u_o = ops.split(U(h_prev), 4, axis=-1)
    i = sigmoid(p_i + u_i)
    f = sigmoid(p_f + u_f)
    c_tilde = tanh(p_c + u_c)
    o = sigmoid(p_o + u_o)
    c = f * c_prev + i * c_tilde
    h = o * tanh(c)
    return (h, c), (i, f, c_tilde, o)


def total_gradient(saved, after, d_states):
    """Adds to dc the path of c through h."""
    _, _, _, o = saved
    _, c = after
    dh, dc = d_states
    return dh, dc + dh * o * (1 - tanh(c) ** 2)


def step_gradient(saved, before, after, d_states, U_T):
    """Transpose of step: (dh, dc) -> da and (dh₋, dc₋).  Read against step from the bottom up."""
    i, f, c_tilde, o = saved
    _, c_prev = before
    _, c = after
    dh, dc = total_gradient(saved, after, d_states)
    da_o = dh * tanh(c) * o * (1 - o)
    da_c = dc * i * (1 - c_tilde**2)
    da_f = dc * c_prev * f * (1 - f)
    da_i = dc * c_tilde * i * (1 - i)
    da = ops.concatenate([da_i, da_f, da_c, da_o], axis=-1)
    return da, (U_T(da), dc * f)


def weight_gradient(da, saved, before, after):
    """dU = Σ_t h₋ᵀ da: the engine's product."""
    h_prev, _ = before
    return {"U": (h_prev, da)}


EQUATIONS = Equations(
    gates=("i", "f", "c", "o"),
    states={"h": "units", "c": "units"},
    saved=("i", "f", "c_tilde", "o"),
    weights={"U": Matrix("h", ("i", "f", "c", "o"))},
    step=step,
    step_gradient=step_gradient,
    weight_gradient=weight_gradient,
    total_gradient=total_gradient,
    memory="c",
    retained=lambda saved: saved.f,
    retaining_gate=RetainingGate("f", 1, "forget_bias"),
)


@keras.saving.register_keras_serializable("keras_gated")
class LSTMCell(RecurrentCell):
    """One step of `LSTM`, for keras.layers.RNN and StackedRNNCells.

    Args:
        units: N, the size of each state.
        forget_bias: where b_f starts; None leaves it to bias_initializer.
        **options: those of `RecurrentCell`.
    """

    equations = EQUATIONS

    def __init__(self, units: int, forget_bias: float | None = 1.0, **options: Unpack[CellOptions]):
        super().__init__(units, **options)
        self.forget_bias = forget_bias

    def initial_bias(self, shape: tuple[int, ...], dtype: str | None = None) -> Any:
        b = self.bias_initializer(shape, dtype=dtype)
        if self.forget_bias is None:
            return b
        b_i, b_f, b_c, b_o = ops.split(b, 4)
        return ops.concatenate([b_i, ops.full_like(b_f, self.forget_bias), b_c, b_o])

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "forget_bias": self.forget_bias}


@keras.saving.register_keras_serializable("keras_gated")
class LSTM(Recurrent):
    """Long short-term memory (eq. rnn-lstm-f .. rnn-lstm-h).

        f = σ(x W_f + h₋ U_f + b_f)       i = σ(x W_i + h₋ U_i + b_i)       o = σ(x W_o + h₋ U_o + b_o)
        c̃ = tanh(x W_c + h₋ U_c + b_c)    c = f ⊙ c₋ + i ⊙ c̃                h = o ⊙ tanh(c)

    Weights: kernel W (D, 4N), recurrent_kernel U (N, 4N), bias b (4N,), columns in the order i f c o.
    States: h and c, (B, N) each.

    Args:
        units: N, the size of each state.
        forget_bias: where b_f starts, visible in get_weights().  Along the cell state the error shrinks by f a
            step: σ(1)^100 is 2.5e-14, σ(2)^100 is 3.1e-6, σ(5)^100 is 0.51.  None leaves b_f to
            bias_initializer.
        **options: those of `Recurrent`, which also says what is called, returned and masked.

    Reference: Hochreiter & Schmidhuber, Long short-term memory (1997); forget gate: Gers, Schmidhuber &
    Cummins, Learning to forget (2000).
    """

    cell_class = LSTMCell

    def __init__(self, units: int, forget_bias: float | None = 1.0, **options: Unpack[LayerOptions]):
        super().__init__(units, forget_bias=forget_bias, **options)
