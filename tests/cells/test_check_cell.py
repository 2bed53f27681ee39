"""check_cell catches a broken cell, by the right law and with the line, the size and the place.

Each case is one mistake.  The laws of the layer are asked one at a time, of a layer that breaks this one alone.
"""

import dataclasses
import itertools
import re

import keras
import numpy as np
import pytest
from keras import ops
from own_cells import layer_norm_lstm, minimal_gated, peephole_lstm, projected_lstm

import keras_gated as kg
from keras_gated.cells import Recurrent, RecurrentCell, RetainingGate
from keras_gated.testing import layer as laws
from keras_gated.testing.deviation import DTYPE, LAWS, PRECISE

MGU, PEEPHOLE = minimal_gated.EQUATIONS, peephole_lstm.EQUATIONS
NUMBER = r"-?(\d+(\.\d+)?(e[-+]\d+)?|inf|nan)"


def cell_of(equations, **attributes):
    kind = type("BrokenCell", (RecurrentCell,), {"equations": equations, **attributes})
    type("Broken", (Recurrent,), {"cell_class": kind})
    return kind


def changed(equations, **functions):
    """The equations with a function wrapped: each is given the old one and returns the new."""
    return dataclasses.replace(equations, **{n: wrap(getattr(equations, n)) for n, wrap in functions.items()})


def blocks(da, k):
    return ops.split(da, k, axis=-1)


def swapped_gates(old):
    def step_gradient(saved, before, after, d_states, U_f_T, U_h_T):
        da, d_before = old(saved, before, after, d_states, U_f_T, U_h_T)
        return ops.concatenate(blocks(da, 2)[::-1], axis=-1), d_before

    return step_gradient


def twice_the_gate_f(old):
    def step_gradient(saved, before, after, d_states, U_T, w_i, w_f, w_o):
        da, d_before = old(saved, before, after, d_states, U_T, w_i, w_f, w_o)
        da_i, da_f, da_c, da_o = blocks(da, 4)
        return ops.concatenate([da_i, 2 * da_f, da_c, da_o], axis=-1), d_before

    return step_gradient


def without_the_peephole_of_f(old):
    def step_gradient(saved, before, after, d_states, U_T, w_i, w_f, w_o):
        return old(saved, before, after, d_states, U_T, w_i, 0 * w_f, w_o)

    return step_gradient


def without_the_path_through_h(old):
    return lambda saved, after, d_states: d_states


def minus_w_f(old):
    def weight_gradient(da, saved, before, after):
        found = old(da, saved, before, after)
        return found | {"w_f": -found["w_f"]}

    return weight_gradient


def the_wrong_rows_of_U(old):
    def weight_gradient(da, saved, before, after):
        return old(da, saved, before, after) | {"U": (after[0], da)}

    return weight_gradient


def mean_over_the_batch(old):
    def step(p, states, U_f, U_h):
        ((h,), saved) = old(p, states, U_f, U_h)
        return (h + 0.1 * ops.mean(h, axis=0, keepdims=True),), saved

    return step


def the_rows_of_another_example(old):
    return lambda da, saved, before, after: old(da, saved, [ops.roll(before[0], 1, axis=0)], after)


def a_counter(old):
    calls = itertools.count()

    def step(p, states, U_f, U_h):
        ((h,), saved) = old(p, states, U_f, U_h)
        return (h * (1 + next(calls)),), saved

    return step


def a_state_in_float64(old):
    def step(p, states, U_f, U_h):
        ((h,), saved) = old(p, states, U_f, U_h)
        return (ops.cast(h, "float64"),), saved

    return step


def a_constant_in_float64(old):
    return lambda p, states, U_f, U_h: old([a + ops.ones_like(a, "float64") for a in p], states, U_f, U_h)


def clipped(old):
    def step_gradient(saved, before, after, d_states, U_f_T, U_h_T):
        return old(saved, before, after, [ops.clip(d, -10, 10) for d in d_states], U_f_T, U_h_T)

    return step_gradient


def stopped(old):
    def step(p, states, U_f, U_h):
        return old([p[0], ops.stop_gradient(p[1])], states, U_f, lambda s: ops.stop_gradient(U_h(s)))

    return step


def stopped_gradient(old):
    def step_gradient(saved, before, after, d_states, U_f_T, U_h_T):
        f, h_tilde = saved
        (h_prev,), (dh,) = before, d_states
        da_f = dh * (h_tilde - h_prev) * f * (1 - f)
        return ops.concatenate([da_f, 0 * da_f], axis=-1), (dh * (1 - f) + U_f_T(da_f),)

    return step_gradient


def right_for_few_rows(old):
    def weight_gradient(da, saved, before, after):
        return old(da * (1.0 if da.shape[0] < 4 else 1.5), saved, before, after)

    return weight_gradient


EQUATIONS = {
    "gate blocks swapped": (changed(MGU, step_gradient=swapped_gates), "transpose", "da of the gate f of step_grad"),
    "a factor of 2": (changed(PEEPHOLE, step_gradient=twice_the_gate_f), "transpose", "da of the gate f of step_grad"),
    "a path to c₋ is missing": (
        changed(PEEPHOLE, step_gradient=without_the_peephole_of_f),
        "transpose",
        "d_before of the state c of step_gradient",
    ),
    "a path of one step is missing": (
        changed(PEEPHOLE, total_gradient=without_the_path_through_h),
        "total",
        "d_states of the state c of total_gradient",
    ),
    "a sign": (changed(PEEPHOLE, weight_gradient=minus_w_f), "transpose", "the gradient of w_f of weight_gradient"),
    "another state": (changed(PEEPHOLE, weight_gradient=the_wrong_rows_of_U), "transpose", "the gradient of U of wei"),
    "examples mixed forward": (changed(MGU, step=mean_over_the_batch), "examples", "the state h of step, row 0,"),
    "examples mixed backward": (
        changed(MGU, weight_gradient=the_rows_of_another_example),
        "examples",
        "the gradient of U_. of weight_gradient, what it multiplied, row 0,",
    ),
    "a counter": (changed(MGU, step=a_counter), "pure", "the state h of step"),
    "a gradient that is not linear": (changed(MGU, step_gradient=clipped), "linear", "da of the gate"),
    "a path that is hidden from autodiff": (
        changed(MGU, step=stopped, step_gradient=stopped_gradient),
        "slope",
        "da of the gate f of step_gradient",
    ),
    "weights of a single step": (changed(MGU, weight_gradient=right_for_few_rows), "sequence", "the gradient of rec"),
    "f for 1 - f": (dataclasses.replace(MGU, retained=lambda saved: saved.f), "retained", "retained"),
    "i for f": (dataclasses.replace(PEEPHOLE, retained=lambda saved: saved.i), "retained", "retained"),
    "i for f, normalised": (
        dataclasses.replace(layer_norm_lstm.EQUATIONS, retained=lambda saved: saved.i),
        "retained",
        "retained",
    ),
}
NOT_ON_JAX = {"a path of one step is missing", "a path that is hidden from autodiff"}


@pytest.mark.parametrize("name", EQUATIONS)
def test_a_mistake_in_the_equations_is_caught(name):
    if keras.backend.backend() == "jax" and name in NOT_ON_JAX:
        pytest.skip("of the other backends")
    equations, law, line = EQUATIONS[name]
    place = rf"{line}.* is {NUMBER} at \[\d(, \d+)?\], expected {NUMBER}, .* It is {NUMBER} off, where {NUMBER} is"
    with pytest.raises(AssertionError, match=f"^BrokenCell breaks the law '{law}', {re.escape(LAWS[law])}: {place}"):
        kg.testing.check_cell(cell_of(equations))


@pytest.mark.skipif(not PRECISE, reason="no float64 there")
@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (a_state_in_float64, "state h of step is float64. Cast constants"),
        (a_constant_in_float64, "in float32 the functions fail: .*double"),
    ],
)
def test_another_dtype_is_caught(wrap, message):
    with pytest.raises(AssertionError, match=f"law 'precision'.*{message}"):
        kg.testing.check_cell(cell_of(changed(MGU, step=wrap)))


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        (RetainingGate("f", 1), r"larger by 1, `retained` changes by -0\.\d+, the sign is 1"),
        (RetainingGate("f", -1, "forget_bias"), "'forget_bias' is no argument"),
    ],
)
def test_a_wrong_retaining_gate_is_caught(gate, message):
    with pytest.raises(AssertionError, match=f"law 'retaining gate'.*{message}"):
        kg.testing.check_cell(cell_of(dataclasses.replace(MGU, retaining_gate=gate)))


def test_a_gate_that_retains_needs_what_is_retained():
    with pytest.raises(AssertionError, match="law 'retaining gate'.*without `retained`"):
        kg.testing.check_cell(cell_of(dataclasses.replace(MGU, retained=None)))


class Forgetful(projected_lstm.ProjectedLSTMCell):
    def get_config(self):
        return {name: value for name, value in super().get_config().items() if name != "projection"}


class ForgetfulLayer(Recurrent):
    cell_class = Forgetful


class Changing(projected_lstm.ProjectedLSTMCell):
    def get_config(self):
        return {**super().get_config(), "projection": self.projection + 1}


class ChangingLayer(Recurrent):
    cell_class = Changing


class Alone(minimal_gated.MinimalGatedCell):
    """It inherits the layer of another cell."""


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (lambda: Forgetful(3, 2), "law 'configuration'.*get_config leaves out projection"),
        (lambda: Changing(3, 2), "law 'configuration'.*projection of the copy differ"),
        (lambda: Alone(3), "law 'layer'.*Derive one from Recurrent, with cell_class = Alone"),
    ],
)
def test_a_mistake_in_the_cell_is_caught(cell, message):
    with pytest.raises(AssertionError, match=message):
        kg.testing.check_cell(cell())


@pytest.mark.parametrize(
    "cell", [keras.layers.LSTMCell(3), RecurrentCell, Recurrent, "gru", projected_lstm.ProjectedLSTMCell]
)
def test_what_cannot_be_checked_is_an_error(cell):
    message = "3\\), which fails.*projection.*all its arguments" if "Projected" in str(cell) else "with equations"
    with pytest.raises(ValueError, match=message):
        kg.testing.check_cell(cell)


# Layers that are right but for one thing.


def to_all(results, change):
    return [change(y) for y in results]


def broken_layer(change):
    """A minimal gated unit whose layer passes what it puts out through change(self, x, results, training)."""

    def call(self, sequences, initial_state=None, mask=None, training=False, sequences_mask=None):
        results = Recurrent.call(self, sequences, initial_state, mask, training)
        return change(self, ops.cast(sequences, self.compute_dtype), results, training)

    kind = type("BrokenCell", (RecurrentCell,), {"equations": MGU})
    type("Broken", (Recurrent,), {"cell_class": kind, "call": call})
    cell = kind(3, dtype=DTYPE)
    cell.build((None, laws.D))
    rng = np.random.default_rng(0)
    cell.set_weights([rng.normal(size=w.shape) for w in cell.get_weights()])
    return cell, laws.layer_of(cell), laws.random_batch(cell, rng)


def bends(x):
    """0, whose slope is 0, whose slope is 2."""
    return ops.sum((x - ops.stop_gradient(x)) ** 2)


LAYERS = {
    "values": (lambda self, x, y, training: to_all(y, lambda a: a + 0.001), "the outputs is"),
    "masks": (lambda self, x, y, training: to_all(y, lambda a: a + 0 * ops.sum(x)), "NaN at masked steps the outputs"),
    "pieces": (lambda self, x, y, training: to_all(y, lambda a: a + (x.shape[1] < laws.T)), "the outputs is"),
    "batch": (
        lambda self, x, y, training: to_all(y, lambda a: a + ops.cast(ops.any(x == 3), a.dtype)),
        "the outputs of example 0 is",
    ),
    "reversal": (lambda self, x, y, training: to_all(y, lambda a: a + self.go_backwards), "the outputs is"),
    "gradient": (
        lambda self, x, y, training: to_all(y, lambda a: a + (x - ops.stop_gradient(x))[0, 0, 0]),
        "the gradient of x is",
    ),
    "second_order": (lambda self, x, y, training: to_all(y, lambda a: a + bends(x)), "the gradient of x is"),
    "half_precision": (
        lambda self, x, y, training: to_all(y, lambda a: a * (1.1 if self.compute_dtype == "bfloat16" else 1)),
        "the outputs is",
    ),
    "saving": (lambda self, x, y, training: y, "register_keras_serializable"),  # no class of it is registered
}


@pytest.mark.parametrize("law", LAYERS)
def test_a_mistake_in_the_layer_is_caught(law):
    change, line = LAYERS[law]
    arguments = broken_layer(change)
    with laws.step_by_step():
        with pytest.raises(AssertionError, match=f"BrokenCell breaks the law '{law.replace('_', ' ')}'.*{line}"):
            getattr(laws, law)(*arguments)


def test_a_masked_step_that_receives_a_gradient_is_caught(monkeypatch):
    """Both runs are equally wrong here, as Keras's loop could be."""
    cell, layer, given = broken_layer(lambda self, x, y, training: y)
    gradients = laws.gradients

    def shifted(*arguments):
        found, rest = gradients(*arguments)
        return [d + 1 for d in found], rest

    monkeypatch.setattr(laws, "gradients", shifted)
    with laws.step_by_step(), pytest.raises(AssertionError, match="law 'masks'.*masked step of x receives a gradient"):
        laws.gradient(cell, layer, given)


def test_the_cell_and_the_names_of_keras_stay_as_they_were(rng):
    cell = kg.SimpleRNNCell(3, dropout=0.2)
    cell.build((None, 5))
    config, weights, name = cell.get_config(), cell.get_weights(), int(keras.layers.Dense(1).name[6:] or 0)
    with pytest.raises(AssertionError):
        kg.testing.check_cell(cell_of(EQUATIONS["a sign"][0]))
    kg.testing.check_cell(cell, compiled=False)
    assert cell.get_config() == config
    for a, b in zip(cell.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(a, b)
    assert keras.layers.Dense(1).name == f"dense_{name + 1}"
