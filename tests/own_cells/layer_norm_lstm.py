"""Long short-term memory with layer normalisation.

    norm(a) = (a - mean(a)) / √(var(a) + ε)                 over the columns of a
    p = x W + b                                             projected input, for all steps at once    (B, 4N)
    a = norm(p) ⊙ g_x + norm(h₋ U) ⊙ g_h + b_a              pre-activations of i f c o                (B, 4N)
    i = σ(a_i)   f = σ(a_f)   c̃ = tanh(a_c)   o = σ(a_o)                                              (B, N)
    c = f ⊙ c₋ + i ⊙ c̃                                      cell state
    m = tanh(norm(c) ⊙ g_c + b_c)
    h = o ⊙ m                                               hidden state

Columns of W, U, b and of the gains are ordered i f c o.  The bias of Ba, Kiros & Hinton (2016), behind the
normalisation, is b_a, the second row of the bias; b stands before it.
"""

import keras
from keras import ops
from keras.ops import tanh

from keras_gated.cells import Equations, Matrix, Recurrent, RecurrentCell, RetainingGate, Vector, sigmoid

GATES = ("i", "f", "c", "o")
EPSILON = 1e-3


def norm(a):
    """norm(a), and what it multiplied by."""
    centred = a - ops.mean(a, axis=-1, keepdims=True)
    scale = ops.rsqrt(ops.mean(centred**2, axis=-1, keepdims=True) + EPSILON)
    return centred * scale, scale


def norm_gradient(d, a_hat, scale):
    """Transpose of norm."""
    return scale * (d - ops.mean(d, axis=-1, keepdims=True) - a_hat * ops.mean(d * a_hat, axis=-1, keepdims=True))


def step(p, states, U, g_x, g_h, b_a, g_c, b_c):
    """(h₋, c₋) -> (h, c), and what step_gradient needs."""
    h_prev, c_prev = states
    p_hat, p_scale = norm(ops.concatenate(p, axis=-1))
    u_hat, u_scale = norm(U(h_prev))
    a_i, a_f, a_c, a_o = ops.split(p_hat * g_x + u_hat * g_h + b_a, 4, axis=-1)
    i = sigmoid(a_i)
    f = sigmoid(a_f)
    c_tilde = tanh(a_c)
    o = sigmoid(a_o)
    c = f * c_prev + i * c_tilde
    c_hat, c_scale = norm(c)
    m = tanh(c_hat * g_c + b_c)
    h = o * m
    return (h, c), (i, f, c_tilde, o, m, p_hat, p_scale, u_hat, u_scale, c_hat, c_scale)


def total_gradient(saved, after, d_states, g_c):
    """Adds to dc the path of c through h."""
    dh, dc = d_states
    da_m = dh * saved.o * (1 - saved.m**2)
    return dh, dc + norm_gradient(da_m * g_c, saved.c_hat, saved.c_scale)


def pre_activation_gradient(saved, before, after, d_states, g_c):
    """(dh, dc) -> the gradient of a, and dc₋."""
    i, f, c_tilde, o, m, *_ = saved
    _, c_prev = before
    dh, dc = total_gradient(saved, after, d_states, g_c)
    da_o = dh * m * o * (1 - o)
    da_c = dc * i * (1 - c_tilde**2)
    da_f = dc * c_prev * f * (1 - f)
    da_i = dc * c_tilde * i * (1 - i)
    return ops.concatenate([da_i, da_f, da_c, da_o], axis=-1), dc * f


def step_gradient(saved, before, after, d_states, U_T, g_x, g_h, g_c):
    """Transpose of step: (dh, dc) -> dp and (dh₋, dc₋).  Read against step from the bottom up."""
    da, dc_prev = pre_activation_gradient(saved, before, after, d_states, g_c)
    du = norm_gradient(da * g_h, saved.u_hat, saved.u_scale)
    dp = norm_gradient(da * g_x, saved.p_hat, saved.p_scale)
    return dp, (U_T(du), dc_prev)


def weight_gradient(dp, saved, before, after, d_states, g_h, g_c):
    """dU = Σ_t h₋ᵀ du, and of each gain and bias the gradient of what it stands in.  dp does not tell da."""
    h_prev, _ = before
    dh, _ = d_states
    da, _ = pre_activation_gradient(saved, before, after, d_states, g_c)
    du = norm_gradient(da * g_h, saved.u_hat, saved.u_scale)
    da_m = dh * saved.o * (1 - saved.m**2)
    gains = {"g_x": da * saved.p_hat, "g_h": da * saved.u_hat, "g_c": da_m * saved.c_hat}
    return {"U": (h_prev, du), **gains, "b_a": da, "b_c": da_m}


EQUATIONS = Equations(
    gates=GATES,
    states={"h": "units", "c": "units"},
    saved={
        **dict.fromkeys(("i", "f", "c_tilde", "o", "m"), "units"),
        **{"p_hat": GATES, "p_scale": 1, "u_hat": GATES, "u_scale": 1, "c_hat": "units", "c_scale": 1},
    },
    weights={
        "U": Matrix("h", GATES),
        "g_x": Vector(GATES, initializer="ones"),
        "g_h": Vector(GATES, initializer="ones"),
        "b_a": Vector(GATES, variable="bias"),
        "g_c": Vector("units", initializer="ones"),
        "b_c": Vector("units"),
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
class LayerNormLSTMCell(RecurrentCell):
    """One step of `LayerNormLSTM`."""

    equations = EQUATIONS


@keras.saving.register_keras_serializable("own_cells")
class LayerNormLSTM(Recurrent):
    """Long short-term memory with layer normalisation."""

    cell_class = LayerNormLSTMCell
