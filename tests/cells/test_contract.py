"""`Equations` refuses what does not fit when it is made, with a sentence that says what, where and what fits."""

import dataclasses

import pytest
from keras import ops
from own_cells import minimal_gated, peephole_lstm, projected_lstm

from keras_gated.cells import Equations, Matrix, Recurrent, RetainingGate, Vector

MGU, PEEPHOLE, PROJECTED = minimal_gated.EQUATIONS, peephole_lstm.EQUATIONS, projected_lstm.EQUATIONS


def transposed_da(saved, before, after, d_states, U_f_T, U_h_T):
    da, d_before = MGU.step_gradient(saved, before, after, d_states, U_f_T, U_h_T)
    return ops.transpose(da), d_before


def half_of_da(saved, before, after, d_states, U_f_T, U_h_T):
    da, d_before = MGU.step_gradient(saved, before, after, d_states, U_f_T, U_h_T)
    return ops.split(da, 2, axis=-1)[0], d_before


def a_list_of_da(saved, before, after, d_states, U_f_T, U_h_T):
    da, d_before = MGU.step_gradient(saved, before, after, d_states, U_f_T, U_h_T)
    return ops.split(da, 2, axis=-1), d_before


def no_d_before(saved, before, after, d_states, U_f_T, U_h_T):
    return MGU.step_gradient(saved, before, after, d_states, U_f_T, U_h_T)[0]


def no_saved(p, states, U_f, U_h):
    return MGU.step(p, states, U_f, U_h)[0]


def one_state(p, states, U, w_i, w_f, w_o):
    (h, _), saved = PEEPHOLE.step(p, states, U, w_i, w_f, w_o)
    return (h,), saved


def states_swapped(p, states, U, W_r):
    (h, c), saved = PROJECTED.step(p, states, U, W_r)
    return (c, h), saved


def U_of_c(p, states, U, W_r):
    U(states[1])
    return PROJECTED.step(p, states, U, W_r)


def of_one_weight(da, saved, before, after):
    return {"U_f": MGU.weight_gradient(da, saved, before, after)["U_f"]}


def summed(da, saved, before, after):
    found = PEEPHOLE.weight_gradient(da, saved, before, after)
    return found | {"w_f": ops.sum(found["w_f"], axis=0)}


def multiplied(da, saved, before, after):
    found = MGU.weight_gradient(da, saved, before, after)
    return found | {"U_h": ops.matmul(ops.transpose(found["U_h"][0]), found["U_h"][1])}


def pair_swapped(da, saved, before, after, d_states):
    found = PROJECTED.weight_gradient(da, saved, before, after, d_states)
    return found | {"W_r": found["W_r"][::-1]}


def unknown_weight(p, states, U_f, V_h):
    return MGU.step(p, states, U_f, V_h)


def untransposed(saved, before, after, d_states, U_f, U_h):
    return MGU.step_gradient(saved, before, after, d_states, U_f, U_h)


def few_arguments(saved, d_states):
    return None


def one_total(saved, after, d_states):
    return d_states[:1]


FUNCTIONS = [
    (MGU, "step_gradient", transposed_da, r"transposed_da returns da with the gates f h of shape \(6, 2\).*\(2, 6\)"),
    (
        MGU,
        "step_gradient",
        half_of_da,
        r"half_of_da returns da with the gates f h of shape \(2, 3\).*\(2, 6\) for units",
    ),
    (MGU, "step_gradient", a_list_of_da, r"a_list_of_da returns da with the gates f h \(of shape \(2, 3\), of shape"),
    (MGU, "step_gradient", no_d_before, r"no_d_before returns .*as step_gradient it returns da, d_before"),
    (MGU, "step", no_saved, r"no_saved returns .*as step it returns states, saved"),
    (PEEPHOLE, "step", one_state, r"one_state returns 1 arrays as states; .*one for each of h, c"),
    (
        PROJECTED,
        "step",
        states_swapped,
        r"returns states with h of shape \(2, 3\); as step it returns of shape \(2, 5\)",
    ),
    (PROJECTED, "step", U_of_c, r"U is applied to an array of shape \(2, 3\); it takes h, of shape \(2, 5\)"),
    (MGU, "weight_gradient", of_one_weight, r"of_one_weight returns U_f; .*a dict with U_f, U_h"),
    (PEEPHOLE, "weight_gradient", summed, r"the rows of dw_f with w_f of shape \(3,\); .*\(2, 3\)"),
    (MGU, "weight_gradient", multiplied, r"of shape \(3, 3\) for the matrix 'U_h'; it returns the pair"),
    (PROJECTED, "weight_gradient", pair_swapped, r"returns W_r with what W_r multiplied of shape \(2, 5\)"),
    (MGU, "step", unknown_weight, r"asks for V_h, which no weight is called; as step it may ask for U_f, U_h"),
    (MGU, "step_gradient", untransposed, r"asks for U_f, U_h, .*as step_gradient it may ask for U_f_T, U_h_T"),
    (MGU, "step_gradient", few_arguments, r"few_arguments takes 2 arguments; as step_gradient it receives 4"),
    (PEEPHOLE, "total_gradient", one_total, r"returns 1 arrays as d_states; as total_gradient .* h, c"),
    (MGU, "step", None, r"expect step to be a function, received None"),
    (
        PROJECTED,
        "retained",
        lambda saved: ops.concatenate([saved.f, saved.i], -1),
        r"returns the factor with c of shape \(2, 6\); as retained it returns of shape \(2, 3\)",
    ),
]


@pytest.mark.parametrize(("equations", "name", "function", "message"), FUNCTIONS)
def test_a_function_that_does_not_fit(equations, name, function, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        dataclasses.replace(equations, **{name: function})


WEIGHTS = [
    ({"U": "recurrent"}, "each weight to be a Matrix or a Vector, received U='recurrent'"),
    ({"W": Matrix("h", ("f",))}, "W and b already: the weight 'W' needs another letter"),
    ({"U": Matrix("h", ("f", "z"))}, "The width of the weight 'U' names f, z; the gates are f, h"),
    ({"w": Vector(("z",))}, "The width of the weight 'w' names z; the gates are f, h"),
    ({"U": Matrix("h", ("f",), variable="w"), "w": Vector("units")}, "'U' as 'w', the name of another weight"),
    ({"w": Vector("units", variable="peephole")}, "under its own letter.*'w' names 'peephole'"),
    (
        {"u": Vector(("f", "h"), variable="bias"), "v": Vector(("f", "h"), variable="bias")},
        "at most one vector with variable='bias'",
    ),
    (
        {"U_f": Matrix("h", ("f",)), "U_h": Matrix("units", ("h",))},
        "U_f, U_h are columns of 'recurrent_kernel': they need the same rows",
    ),
]


@pytest.mark.parametrize(("weights", "message"), WEIGHTS)
def test_weights_that_do_not_fit(weights, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MGU, weights=weights)


NAMES = [
    ({"gates": ()}, r"at least one, received \(\)"),
    ({"gates": ("f", "f")}, r"different names, at least one, received \('f', 'f'\)"),
    ({"states": {}}, "at least one state, h, received none"),
    ({"saved": {"f": ("z",), "h_tilde": "units"}}, "The width of saved 'f' names z; the gates are f, h"),
    ({"saved": ("f", "h~")}, "names that Python can have, received 'h~' among saved"),
    ({"saved": ("f",)}, "returns 2 arrays as saved; as step it returns one for each of f"),
    ({"saved": {"f": "units", "h_tilde": 1}}, r"returns saved with h_tilde of shape \(2, 3\); .*of shape \(2, 1\)"),
    ({"memory": "c"}, "memory to be one of the states h, received 'c'"),
    ({"retaining_gate": RetainingGate("z", 1)}, "retaining_gate to be one of the gates f, h with a sign of 1 or -1"),
    ({"retaining_gate": RetainingGate("f", 2)}, "a sign of 1 or -1, received"),
]


@pytest.mark.parametrize(("changes", "message"), NAMES)
def test_names_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MGU, **changes)


def test_equations_are_made_by_keyword():
    with pytest.raises(TypeError):
        Equations(("f", "h"))


def test_a_layer_without_a_cell_is_refused():
    with pytest.raises(ValueError, match="Nothing expects cell_class to be a RecurrentCell, received None"):
        type("Nothing", (Recurrent,), {})
