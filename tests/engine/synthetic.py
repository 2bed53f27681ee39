"""One cell that needs everything the engine has: two states of different widths, three matrices, a vector, a recurrent
bias, saved arrays of several widths, and a weight whose gradient needs that of the states.

    [a_a a_g] = x W + h₋ U + b + b_u        pre-activations                     (B, 2N)
    a = tanh(a_a + s₋ V)                                                        (B, N)
    g = σ(a_g)                              gate
    m = tanh((a ⊙ g) P)                                                         (B, M)
    e = tanh(Σ v ⊙ s₋)                                                          (B, 1)
    s = v ⊙ s₋ + e m                        the narrower state                  (B, M)
    q = tanh(mean s)                                                            (B, 1)
    h = g ⊙ h₋ + q (1 - g) ⊙ a              the state that is put out           (B, N)
"""

import keras
import numpy as np
from keras import ops

from keras_gated.cells.recurrent import Recurrent, RecurrentCell
from keras_gated.engine.contract import Equations, sigmoid
from keras_gated.engine.roles import Matrix, Vector


def total(a):
    return ops.sum(a, axis=-1, keepdims=True)


def step(p, states, U, V, P, v, b_u):
    p_a, p_g = p
    h_prev, s_prev = states
    u_a, u_g = ops.split(U(h_prev) + b_u, 2, axis=-1)
    a = ops.tanh(p_a + u_a + V(s_prev))
    g = sigmoid(p_g + u_g)
    m = ops.tanh(P(a * g))
    e = ops.tanh(total(v * s_prev))
    s = v * s_prev + e * m
    q = ops.tanh(total(s) / s.shape[-1])
    h = g * h_prev + q * (1 - g) * a
    return (h, s), (a, g, m, e)


def total_gradient(saved, after, d_states):
    a, g, _, _ = saved
    _, s = after
    dh, ds = d_states
    q = ops.tanh(total(s) / s.shape[-1])
    return dh, ds + total(dh * (1 - g) * a) * (1 - q**2) / s.shape[-1]


def of_memory(saved, before, after, d_states):
    """The gradients of what P makes, of v and of s₋, as far as they come from s."""
    _, _, m, e = saved
    _, s_prev = before
    _, ds = total_gradient(saved, after, d_states)
    de = total(ds * m) * (1 - e**2)
    return ds * e * (1 - m**2), ds * s_prev + de * s_prev, ds, de


def step_gradient(saved, before, after, d_states, U_T, V_T, P_T, v):
    a, g, _, _ = saved
    h_prev, _ = before
    _, s = after
    dh, _ = d_states
    q = ops.tanh(total(s) / s.shape[-1])
    dk, _, ds, de = of_memory(saved, before, after, d_states)
    dw = P_T(dk)
    da = (dh * q * (1 - g) + dw * g) * (1 - a**2)
    dg = (dh * (h_prev - q * a) + dw * a) * g * (1 - g)
    du = ops.concatenate([da, dg], axis=-1)
    return du, (dh * g + U_T(du), ds * v + de * v + V_T(da))


def weight_gradient(da, saved, before, after, d_states):
    a, g, _, _ = saved
    h_prev, s_prev = before
    dk, dv, _, _ = of_memory(saved, before, after, d_states)
    da_a, _ = ops.split(da, 2, axis=-1)
    return {"U": (h_prev, da), "V": (s_prev, da_a), "P": (a * g, dk), "v": dv, "b_u": da}


EQUATIONS = Equations(
    gates=("a", "g"),
    states={"h": "units", "s": "memory"},
    saved={"a": "units", "g": "units", "m": "memory", "e": 1},
    weights={
        "U": Matrix("h", ("a", "g")),
        "V": Matrix("s", ("a",), variable="memory_kernel"),
        "P": Matrix("units", "memory", variable="projection_kernel"),
        "v": Vector("memory", initializer="ones"),
        "b_u": Vector(("a", "g"), variable="bias"),
    },
    step=step,
    step_gradient=step_gradient,
    weight_gradient=weight_gradient,
    total_gradient=total_gradient,
    memory="s",
)


@keras.saving.register_keras_serializable("tests")
class SyntheticCell(RecurrentCell):
    equations = EQUATIONS

    def __init__(self, units, memory=2, **options):
        super().__init__(units, **options)
        self.memory = memory

    @property
    def sizes(self):
        return {"units": self.units, "memory": self.memory}

    def get_config(self):
        return {**super().get_config(), "memory": self.memory}


@keras.saving.register_keras_serializable("tests")
class Synthetic(Recurrent):
    cell_class = SyntheticCell

    def __init__(self, units, memory=2, **options):
        super().__init__(units, memory=memory, **options)


def built(rng, features=2, units=3, **options):
    """A layer with random, distinct weights."""
    layer = Synthetic(units, **options)
    layer.build((None, None, features))
    layer.set_weights([rng.normal(size=w.shape) * 0.6 for w in layer.get_weights()])
    return layer


def arguments(rng, B, T, D=2, N=3, M=2, dtype="float64"):
    """x, initial states and a mask with holes, padding on either side, and a row of nothing else."""
    mask = rng.random((B, T)) > 0.4
    mask[0] = False
    x, h, s = (rng.normal(size=size).astype(dtype) for size in ((B, T, D), (B, N), (B, M)))
    return x, [h, s], np.asarray(mask)
