"""The options that all cells and layers share: their types, and signatures that show every one of them.

A final class takes its own options and hands on the others; `signature_of` is what help(), inspect and completion in a
running session show, `CellOptions` and `LayerOptions` what editors and type checkers read.
"""

import inspect
from collections.abc import Callable
from typing import TypedDict

import keras

WEIGHT_OPTIONS = {
    f"{weight}_{role}": module
    for weight in ("kernel", "recurrent", "bias")
    for role, module in (
        ("initializer", keras.initializers),
        ("regularizer", keras.regularizers),
        ("constraint", keras.constraints),
    )
}


Named = str | dict | Callable | None  # an initializer, regularizer or constraint, by name or as an object


class CellOptions(TypedDict, total=False):
    """The options of every cell, for editors and type checkers: see `RecurrentCell`."""

    use_bias: bool
    kernel_initializer: Named
    recurrent_initializer: Named
    bias_initializer: Named
    kernel_regularizer: Named
    recurrent_regularizer: Named
    bias_regularizer: Named
    kernel_constraint: Named
    recurrent_constraint: Named
    bias_constraint: Named
    dropout: float
    recurrent_dropout: float
    seed: int | None
    name: str | None
    dtype: str | keras.DTypePolicy | None
    trainable: bool


class LayerOptions(CellOptions, total=False):
    """The options of every layer, for editors and type checkers: see `Recurrent`."""

    return_sequences: bool
    return_state: bool
    go_backwards: bool
    stateful: bool
    unroll: bool
    zero_output_for_mask: bool
    activity_regularizer: Named


def parameters_of(function, names=None):
    """Those of the function's parameters, by name, that a caller can give by keyword."""
    parameters = inspect.signature(function).parameters
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return {n: p for n, p in parameters.items() if n != "self" and p.kind in kinds and (names is None or n in names)}


class ConstructorSignature:
    """What inspect reads as the signature of a class; its instances, which are called otherwise, do not show it."""

    def __init__(self, signature):
        self.signature = signature

    def __get__(self, instance, owner):
        if instance is not None:
            raise AttributeError("__signature__")
        return self.signature


def signature_of(cls, *handed_on):
    """The arguments of a final class: its own, then by keyword those that it hands on."""
    parameters = parameters_of(cls.__init__)
    for group in handed_on:
        for name, parameter in group.items():
            hint = LayerOptions.__annotations__.get(name, parameter.annotation)
            by_keyword = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hint)
            parameters.setdefault(name, by_keyword)
    return ConstructorSignature(inspect.Signature(list(parameters.values())))


LAYER_PARAMETERS = parameters_of(keras.layers.Layer.__init__, ("name", "dtype", "trainable"))
RNN_PARAMETERS = {
    **{n: p for n, p in parameters_of(keras.layers.RNN.__init__).items() if n != "cell"},
    **parameters_of(keras.layers.Layer.__init__, ("activity_regularizer",)),
}
