"""Minimal gated unit.

    p = x W + b                         projected input, for all steps at once       (B, 2N)
    f = σ(p_f + h₋ U_f)                 forget gate, the only one                    (B, N)
    h̃ = tanh(p_h + (f ⊙ h₋) U_h)        candidate state
    h = (1 - f) ⊙ h₋ + f ⊙ h̃            hidden state

Columns of W, U and b are ordered f h.  An open f forgets, as in Zhou, Wu, Zhang & Zhou (2016).
"""

import keras
from keras import ops
from keras.ops import tanh

from keras_gated.cells import Equations, Matrix, Recurrent, RecurrentCell, RetainingGate, sigmoid


def step(p, states, U_f, U_h):
    """(h₋) -> (h), and what step_gradient needs."""
    p_f, p_h = p
    (h_prev,) = states
    f = sigmoid(p_f + U_f(h_prev))
    h_tilde = tanh(p_h + U_h(f * h_prev))
    h = (1 - f) * h_prev + f * h_tilde
    return (h,), (f, h_tilde)


def step_gradient(saved, before, after, d_states, U_f_T, U_h_T):
    """Transpose of step: (dh) -> da and (dh₋).  Read against step from the bottom up."""
    f, h_tilde = saved
    (h_prev,) = before
    (dh,) = d_states
    da_h = dh * f * (1 - h_tilde**2)
    dfh = U_h_T(da_h)
    da_f = (dh * (h_tilde - h_prev) + dfh * h_prev) * f * (1 - f)
    dh_prev = dh * (1 - f) + dfh * f + U_f_T(da_f)
    return ops.concatenate([da_f, da_h], axis=-1), (dh_prev,)


def weight_gradient(da, saved, before, after):
    """dU_f = Σ_t h₋ᵀ da_f,  dU_h = Σ_t (f ⊙ h₋)ᵀ da_h."""
    f, _ = saved
    (h_prev,) = before
    da_f, da_h = ops.split(da, 2, axis=-1)
    return {"U_f": (h_prev, da_f), "U_h": (f * h_prev, da_h)}


EQUATIONS = Equations(
    gates=("f", "h"),
    states={"h": "units"},
    saved=("f", "h_tilde"),
    weights={"U_f": Matrix("h", ("f",)), "U_h": Matrix("h", ("h",))},
    step=step,
    step_gradient=step_gradient,
    weight_gradient=weight_gradient,
    retained=lambda saved: 1 - saved.f,
    retaining_gate=RetainingGate("f", -1),
)


@keras.saving.register_keras_serializable("own_cells")
class MinimalGatedCell(RecurrentCell):
    """One step of `MinimalGated`."""

    equations = EQUATIONS


@keras.saving.register_keras_serializable("own_cells")
class MinimalGated(Recurrent):
    """Minimal gated unit."""

    cell_class = MinimalGatedCell
