"""Gated recurrent unit (eq. rnn-gru-z .. rnn-gru-h).

    p = x W + b                     projected input, for all steps at once       (B, 3N)
    z = σ(p_z + h₋ U_z)             update gate                                  (B, N)
    r = σ(p_r + h₋ U_r)             reset gate
    h̃ = tanh(p_h + (r ⊙ h₋) U_h)    candidate state: reset before the product
    h = (1 - z) ⊙ h₋ + z ⊙ h̃        hidden state

With reset_after=True, the form of cuDNN and PyTorch, the product h₋ U_h + b_u comes first:

    h̃ = tanh(p_h + r ⊙ (h₋ U_h + b_u))

Columns of W, U and b are ordered z r h, as in keras.layers.GRU; but there z stands on the other side,
h = z ⊙ h₋ + (1 - z) ⊙ h̃.  Cho et al. (2014); reset after: Appleyard et al. (2016).
"""

from typing import Any, Unpack

import keras
from keras import ops
from keras.ops import tanh

from keras_gated.cells.options import CellOptions, LayerOptions
from keras_gated.cells.recurrent import Recurrent, RecurrentCell
from keras_gated.engine.contract import Equations, sigmoid
from keras_gated.engine.roles import Matrix, RetainingGate, Vector


def step(p, states, U_zr, U_h):
    """(h₋) -> (h), and the gates that step_gradient needs."""
    p_z, p_r, p_h = p
    (h_prev,) = states
    u_z, u_r = ops.split(U_zr(h_prev), 2, axis=-1)
    z = sigmoid(p_z + u_z)
    r = sigmoid(p_r + u_r)
    h_tilde = tanh(p_h + U_h(r * h_prev))
    h = (1 - z) * h_prev + z * h_tilde
    return (h,), (z, r, h_tilde)


def step_gradient(saved, before, after, d_states, U_zr_T, U_h_T):
    """Transpose of step: (dh) -> da and (dh₋).  Read against step from the bottom up."""
    z, r, h_tilde = saved
    (h_prev,) = before
    (dh,) = d_states
    da_h = dh * z * (1 - h_tilde**2)
    drh = U_h_T(da_h)
    da_r = drh * h_prev * r * (1 - r)
    da_z = dh * (h_tilde - h_prev) * z * (1 - z)
    da_zr = ops.concatenate([da_z, da_r], axis=-1)
    dh_prev = dh * (1 - z) + drh * r + U_zr_T(da_zr)
    return ops.concatenate([da_zr, da_h], axis=-1), (dh_prev,)


def weight_gradient(da, saved, before, after):
    """dU_zr = Σ_t h₋ᵀ da_zr,  dU_h = Σ_t (r ⊙ h₋)ᵀ da_h: the engine's products."""
    _, r, _ = saved
    (h_prev,) = before
    da_z, da_r, da_h = ops.split(da, 3, axis=-1)
    return {"U_zr": (h_prev, ops.concatenate([da_z, da_r], axis=-1)), "U_h": (r * h_prev, da_h)}


def step_reset_after(p, states, U, b_u):
    """(h₋) -> (h), and what step_gradient_reset_after needs."""
    p_z, p_r, p_h = p
    (h_prev,) = states
    u_z, u_r, u_h = ops.split(U(h_prev) + b_u, 3, axis=-1)
    z = sigmoid(p_z + u_z)
    r = sigmoid(p_r + u_r)
    h_tilde = tanh(p_h + r * u_h)
    h = (1 - z) * h_prev + z * h_tilde
    return (h,), (z, r, h_tilde, u_h)


def step_gradient_reset_after(saved, before, after, d_states, U_T):
    """Transpose of step_reset_after: (dh) -> da and (dh₋)."""
    z, r, h_tilde, u_h = saved
    (h_prev,) = before
    (dh,) = d_states
    da_h = dh * z * (1 - h_tilde**2)
    da_r = da_h * u_h * r * (1 - r)
    da_z = dh * (h_tilde - h_prev) * z * (1 - z)
    du = ops.concatenate([da_z, da_r, da_h * r], axis=-1)
    return ops.concatenate([da_z, da_r, da_h], axis=-1), (dh * (1 - z) + U_T(du),)


def weight_gradient_reset_after(da, saved, before, after):
    """With du = [da_z, da_r, da_h ⊙ r]:  dU = Σ_t h₋ᵀ du,  db_u = Σ_t du: the engine's product and sum."""
    _, r, _, _ = saved
    (h_prev,) = before
    da_z, da_r, da_h = ops.split(da, 3, axis=-1)
    du = ops.concatenate([da_z, da_r, da_h * r], axis=-1)
    return {"U": (h_prev, du), "b_u": du}


MEANING = {"retained": lambda saved: 1 - saved.z, "retaining_gate": RetainingGate("z", -1)}  # z writes

RESET_BEFORE = Equations(
    gates=("z", "r", "h"),
    states={"h": "units"},
    saved=("z", "r", "h_tilde"),
    weights={"U_zr": Matrix("h", ("z", "r")), "U_h": Matrix("h", ("h",))},
    step=step,
    step_gradient=step_gradient,
    weight_gradient=weight_gradient,
    **MEANING,
)

RESET_AFTER = Equations(
    gates=("z", "r", "h"),
    states={"h": "units"},
    saved=("z", "r", "h_tilde", "u_h"),
    weights={"U": Matrix("h", ("z", "r", "h")), "b_u": Vector(("z", "r", "h"), variable="bias")},
    step=step_reset_after,
    step_gradient=step_gradient_reset_after,
    weight_gradient=weight_gradient_reset_after,
    **MEANING,
)


@keras.saving.register_keras_serializable("keras_gated")
class GRUCell(RecurrentCell):
    """One step of `GRU`, for keras.layers.RNN and StackedRNNCells.

    Args:
        units: N, the size of the state.
        reset_after: whether the reset gate acts after the recurrent product.
        **options: those of `RecurrentCell`.
    """

    def __init__(self, units: int, reset_after: bool = False, **options: Unpack[CellOptions]):
        super().__init__(units, **options)
        self.reset_after = reset_after

    @property
    def equations(self) -> Equations:
        return RESET_AFTER if self.reset_after else RESET_BEFORE

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "reset_after": self.reset_after}


@keras.saving.register_keras_serializable("keras_gated")
class GRU(Recurrent):
    """Gated recurrent unit (eq. rnn-gru-z .. rnn-gru-h).

        z = σ(x W_z + h₋ U_z + b_z)               r = σ(x W_r + h₋ U_r + b_r)
        h̃ = tanh(x W_h + (r ⊙ h₋) U_h + b_h)      h = (1 - z) ⊙ h₋ + z ⊙ h̃

    Weights: kernel W (D, 3N), recurrent_kernel U (N, 3N), bias b (3N,), columns in the order z r h.  The update
    gate writes, as in the chapter; in keras.layers.GRU and PyTorch z keeps: there σ(-a_z) stands for our σ(a_z).

    Args:
        units: N, the size of the state.
        reset_after: False is the chapter's, the reset gate before the product.  True is the form of cuDNN and
            PyTorch, h̃ = tanh(x W_h + b_h + r ⊙ (h₋ U_h + b_u)); the bias is then (2, 3N), b above b_u.
        **options: those of `Recurrent`, which also says what is called, returned and masked.

    Reference: Cho et al., Learning phrase representations using RNN encoder-decoder (2014).
    """

    cell_class = GRUCell

    def __init__(self, units: int, reset_after: bool = False, **options: Unpack[LayerOptions]):
        super().__init__(units, reset_after=reset_after, **options)
