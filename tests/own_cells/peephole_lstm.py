"""Long short-term memory whose gates see the cell state.

    p = x W + b                             projected input, for all steps at once       (B, 4N)
    u = h₋ U                                                                             (B, 4N)
    i = σ(p_i + u_i + w_i ⊙ c₋)             input gate; w_i is a vector (N,)             (B, N)
    f = σ(p_f + u_f + w_f ⊙ c₋)             forget gate
    c̃ = tanh(p_c + u_c)                     candidate content
    c = f ⊙ c₋ + i ⊙ c̃                      cell state
    o = σ(p_o + u_o + w_o ⊙ c)              output gate: it sees the new cell state
    h = o ⊙ tanh(c)                         hidden state

Columns of W, U and b are ordered i f c o.  Gers, Schraudolph & Schmidhuber (2002).
"""

import keras
from keras import ops
from keras.ops import tanh

from keras_gated.cells import Equations, Matrix, Recurrent, RecurrentCell, RetainingGate, Vector, sigmoid


def step(p, states, U, w_i, w_f, w_o):
    """(h₋, c₋) -> (h, c), and the gates that step_gradient needs."""
    p_i, p_f, p_c, p_o = p
    h_prev, c_prev = states
    u_i, u_f, u_c, u_o = ops.split(U(h_prev), 4, axis=-1)
    i = sigmoid(p_i + u_i + w_i * c_prev)
    f = sigmoid(p_f + u_f + w_f * c_prev)
    c_tilde = tanh(p_c + u_c)
    c = f * c_prev + i * c_tilde
    o = sigmoid(p_o + u_o + w_o * c)
    h = o * tanh(c)
    return (h, c), (i, f, c_tilde, o)


def total_gradient(saved, after, d_states, w_o):
    """Adds to dc the paths of c through h: tanh(c), and o."""
    _, _, _, o = saved
    _, c = after
    dh, dc = d_states
    da_o = dh * tanh(c) * o * (1 - o)
    return dh, dc + dh * o * (1 - tanh(c) ** 2) + da_o * w_o


def step_gradient(saved, before, after, d_states, U_T, w_i, w_f, w_o):
    """Transpose of step: (dh, dc) -> da and (dh₋, dc₋).  Read against step from the bottom up."""
    i, f, c_tilde, o = saved
    _, c_prev = before
    _, c = after
    dh, dc = total_gradient(saved, after, d_states, w_o)
    da_o = dh * tanh(c) * o * (1 - o)
    da_c = dc * i * (1 - c_tilde**2)
    da_f = dc * c_prev * f * (1 - f)
    da_i = dc * c_tilde * i * (1 - i)
    dc_prev = dc * f + da_f * w_f + da_i * w_i
    da = ops.concatenate([da_i, da_f, da_c, da_o], axis=-1)
    return da, (U_T(da), dc_prev)


def weight_gradient(da, saved, before, after):
    """dU = Σ_t h₋ᵀ da,  dw_i = Σ_t da_i ⊙ c₋,  dw_f = Σ_t da_f ⊙ c₋,  dw_o = Σ_t da_o ⊙ c."""
    h_prev, c_prev = before
    _, c = after
    da_i, da_f, _, da_o = ops.split(da, 4, axis=-1)
    return {"U": (h_prev, da), "w_i": da_i * c_prev, "w_f": da_f * c_prev, "w_o": da_o * c}


EQUATIONS = Equations(
    gates=("i", "f", "c", "o"),
    states={"h": "units", "c": "units"},
    saved=("i", "f", "c_tilde", "o"),
    weights={"U": Matrix("h", ("i", "f", "c", "o")), **{f"w_{gate}": Vector("units") for gate in "ifo"}},
    step=step,
    step_gradient=step_gradient,
    weight_gradient=weight_gradient,
    total_gradient=total_gradient,
    memory="c",
    retained=lambda saved: saved.f,
    retaining_gate=RetainingGate("f", 1),
)


@keras.saving.register_keras_serializable("own_cells")
class PeepholeLSTMCell(RecurrentCell):
    """One step of `PeepholeLSTM`."""

    equations = EQUATIONS


@keras.saving.register_keras_serializable("own_cells")
class PeepholeLSTM(Recurrent):
    """Long short-term memory whose gates see the cell state."""

    cell_class = PeepholeLSTMCell
