"""`replaced`: while it lasts a wrapper lies round a method, and afterwards nothing of it is left."""

import inspect

import pytest

from keras_gated.patching import replaced


class Owner:
    def __init__(self):
        self.activation = lambda x: f"f({x})"

    def call(self, x, training=False):
        return f"call({x})"


def named(name):
    return lambda run, x: f"{name}({run(x)})"


@pytest.mark.parametrize("method", ["call", "activation"])
@pytest.mark.parametrize("left_first", ["inner", "outer"])
def test_two_contexts_may_be_left_in_either_order(method, left_first):
    """In the order in which they were entered, the first would take away both, and the second put the first back."""
    owner = Owner()
    before, plain = dict(vars(owner)), getattr(owner, method)("x")
    inner, outer = (replaced(owner, method, named(name)) for name in ("inner", "outer"))
    inner.__enter__()
    outer.__enter__()
    assert getattr(owner, method)("x") == f"outer(inner({plain}))"
    first, last = (inner, outer) if left_first == "inner" else (outer, inner)
    first.__exit__(None, None, None)
    assert getattr(owner, method)("x") == f"{'outer' if left_first == 'inner' else 'inner'}({plain})"
    last.__exit__(None, None, None)
    assert vars(owner) == before and getattr(owner, method)("x") == plain


def test_one_wrapper_may_lie_round_a_method_twice():
    owner, wrapper = Owner(), named("again")
    with replaced(owner, "call", wrapper), replaced(owner, "call", named("between")):
        with replaced(owner, "call", wrapper):
            assert owner.call("x") == "again(between(again(call(x))))"
        assert owner.call("x") == "between(again(call(x)))"
    assert list(vars(owner)) == ["activation"]


def test_a_wrapper_may_be_entered_while_the_method_runs():
    owner = Owner()

    def entering(run, x):
        with replaced(owner, "call", named("late")):
            return f"{run(x)} then {owner.call(x)[:5]}"

    with replaced(owner, "call", entering):
        with pytest.raises(RecursionError):
            owner.call("x")
        assert vars(owner)["call"].wrappers != []
    assert list(vars(owner)) == ["activation"]


def test_an_exception_takes_all_wrappers_away():
    owner = Owner()
    before = dict(vars(owner))
    with (
        pytest.raises(ZeroDivisionError),
        replaced(owner, "call", named("a")),
        replaced(owner, "activation", named("b")),
    ):
        with replaced(owner, "call", lambda run, x: 1 / 0):
            owner.call("x")
    assert vars(owner) == before


def test_what_somebody_else_sets_meanwhile_is_theirs():
    owner = Owner()
    with replaced(owner, "activation", named("ours")):
        owner.activation = theirs = lambda x: f"theirs({x})"
        with replaced(owner, "activation", named("later")):
            assert owner.activation("x") == "later(theirs(x))"
    assert owner.activation is theirs


def test_none_is_a_value_as_any_other():
    owner = Owner()
    owner.activation = None
    with replaced(owner, "activation", lambda run: "called"):
        assert owner.activation() == "called"
    assert vars(owner) == {"activation": None}


def test_the_signature_stays():
    """Whether a cell takes `training` is read from it."""
    owner = Owner()
    with replaced(owner, "call", named("a")):
        assert list(inspect.signature(owner.call).parameters) == ["x", "training"]
