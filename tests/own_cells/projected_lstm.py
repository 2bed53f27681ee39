"""Long short-term memory that hands out a projection: h is narrower than c.

    p = x W + b             projected input, for all steps at once            (B, 4N)
    u = h₋ U                                                                  (B, 4N)
    i = σ(p_i + u_i)        input gate                                        (B, N)
    f = σ(p_f + u_f)        forget gate
    c̃ = tanh(p_c + u_c)     candidate content
    o = σ(p_o + u_o)        output gate
    c = f ⊙ c₋ + i ⊙ c̃      cell state
    m = o ⊙ tanh(c)
    h = m W_r               hidden state, P wide: W_r is (N, P)               (B, P)

Columns of W, U and b are ordered i f c o; U is (P, 4N).  Sak, Senior & Beaufays (2014).
"""

import keras
from keras import ops
from keras.ops import tanh

from keras_gated.cells import Equations, Matrix, Recurrent, RecurrentCell, RetainingGate, sigmoid


def step(p, states, U, W_r):
    """(h₋, c₋) -> (h, c), and the gates that step_gradient needs."""
    p_i, p_f, p_c, p_o = p
    h_prev, c_prev = states
    u_i, u_f, u_c, u_o = ops.split(U(h_prev), 4, axis=-1)
    i = sigmoid(p_i + u_i)
    f = sigmoid(p_f + u_f)
    c_tilde = tanh(p_c + u_c)
    o = sigmoid(p_o + u_o)
    c = f * c_prev + i * c_tilde
    h = W_r(o * tanh(c))
    return (h, c), (i, f, c_tilde, o)


def total_gradient(saved, after, d_states, W_r_T):
    """Adds to dc the path of c through h."""
    _, _, _, o = saved
    _, c = after
    dh, dc = d_states
    return dh, dc + W_r_T(dh) * o * (1 - tanh(c) ** 2)


def step_gradient(saved, before, after, d_states, U_T, W_r_T):
    """Transpose of step: (dh, dc) -> da and (dh₋, dc₋).  Read against step from the bottom up."""
    i, f, c_tilde, o = saved
    _, c_prev = before
    _, c = after
    dh, dc = total_gradient(saved, after, d_states, W_r_T)
    da_o = W_r_T(dh) * tanh(c) * o * (1 - o)
    da_c = dc * i * (1 - c_tilde**2)
    da_f = dc * c_prev * f * (1 - f)
    da_i = dc * c_tilde * i * (1 - i)
    da = ops.concatenate([da_i, da_f, da_c, da_o], axis=-1)
    return da, (U_T(da), dc * f)


def weight_gradient(da, saved, before, after, d_states):
    """dU = Σ_t h₋ᵀ da,  dW_r = Σ_t mᵀ dh."""
    _, _, _, o = saved
    h_prev, _ = before
    _, c = after
    dh, _ = d_states
    return {"U": (h_prev, da), "W_r": (o * tanh(c), dh)}


EQUATIONS = Equations(
    gates=("i", "f", "c", "o"),
    states={"h": "projection", "c": "units"},
    saved=("i", "f", "c_tilde", "o"),
    weights={
        "U": Matrix("h", ("i", "f", "c", "o")),
        "W_r": Matrix("units", "projection", variable="projection_kernel"),
    },
    step=step,
    step_gradient=step_gradient,
    weight_gradient=weight_gradient,
    total_gradient=total_gradient,
    memory="c",
    retained=lambda saved: saved.f,
    retaining_gate=RetainingGate("f", 1),
)


@keras.saving.register_keras_serializable("own_cells")
class ProjectedLSTMCell(RecurrentCell):
    """One step of `ProjectedLSTM`.

    Args:
        units: N, the width of c.
        projection: P, the width of h.
        **options: those of `RecurrentCell`.
    """

    equations = EQUATIONS

    def __init__(self, units, projection, **options):
        super().__init__(units, **options)
        self.projection = projection

    @property
    def sizes(self):
        return {**super().sizes, "projection": self.projection}

    def get_config(self):
        return {**super().get_config(), "projection": self.projection}


@keras.saving.register_keras_serializable("own_cells")
class ProjectedLSTM(Recurrent):
    """Long short-term memory that hands out a projection."""

    cell_class = ProjectedLSTMCell
