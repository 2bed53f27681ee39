"""Every public function says what it takes and what it returns."""

import importlib
import inspect

import keras
import pytest

import keras_gated as kg
from keras_gated.cells.options import CellOptions, LayerOptions

PACKAGES = ["keras_gated", *(f"keras_gated.{name}" for name in ("gradients", "clipping", "seq2seq", "callbacks"))]
MODULES = [f"keras_gated.{name}" for name in ("bptt", "tasks", "weights", "plots", "attention", "decoding")]


def public(name):
    module = importlib.import_module(name)
    if name in PACKAGES:
        members = {member: getattr(module, member) for member in module.__all__}
    else:
        members = {member: value for member, value in vars(module).items() if not member.startswith("_")}
        members = {member: value for member, value in members.items() if getattr(value, "__module__", None) == name}
    return {f"{name}.{member}": value for member, value in members.items()}


def functions(value, name):
    """(name, function) of what is public in a function or a class, but for the hooks that Keras calls in callbacks."""
    if inspect.isfunction(value):
        yield name, value
    elif inspect.isclass(value):
        for member, attribute in vars(value).items():
            attribute = getattr(attribute, "fget", getattr(attribute, "__func__", attribute))
            hidden = member.startswith(("_", "on_")) and member != "__init__"
            if inspect.isfunction(attribute) and not hidden:
                yield f"{name}.{member}", attribute


def missing(function):
    """The parameters without a hint, and "return", which a constructor does not need."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    unknown = [p.name for p in parameters if p.annotation is p.empty]
    returns = function.__name__ == "__init__" or signature.return_annotation is not signature.empty
    return unknown + ([] if returns else ["return"])


@pytest.mark.parametrize("module", PACKAGES + MODULES)
def test_every_public_function_has_hints(module):
    found = dict(pair for name, value in public(module).items() for pair in functions(value, name))
    assert found
    assert {name: lacking for name, function in found.items() if (lacking := missing(function))} == {}


THEIRS = {
    getattr(kg, name): getattr(keras.layers, name)
    for name in ("SimpleRNN", "LSTM", "GRU", "SimpleRNNCell", "LSTMCell", "GRUCell")
}
OF_KERAS_ALONE = {"activation", "recurrent_activation", "unit_forget_bias", "reset_after", "use_cudnn", "kwargs"}


@pytest.mark.parametrize("ours", THEIRS, ids=lambda kind: kind.__name__)
def test_every_option_is_in_the_signature(ours):
    """What help() shows, and what editors read from the typed dictionary of the options, are the same."""
    shown, taken = inspect.signature(ours).parameters, inspect.signature(THEIRS[ours].__init__).parameters
    assert set(taken) - OF_KERAS_ALONE - {"self"} <= set(shown)
    options = LayerOptions if issubclass(ours, keras.layers.RNN) else CellOptions
    own = [n for n, p in inspect.signature(ours.__init__).parameters.items() if p.kind is not p.VAR_KEYWORD]
    assert set(shown) == {*own, *options.__annotations__} - {"self"}
    assert {n: p.annotation for n, p in shown.items() if p.annotation is p.empty} == {}
    assert all(shown[n].default is not inspect.Parameter.empty for n in shown if n != "units")
    assert "units" not in inspect.signature(ours(2)).parameters  # a layer is called otherwise than it is made
    ours(**{name: p.default for name, p in shown.items() if name != "units"}, units=2)
