"""Checks equations when they are made: names first, then the shapes of all that the functions return.

Hides that the functions are run on symbols, which have a shape and no numbers, so that nothing is computed on import.
"""

import inspect
from collections.abc import Mapping

import keras

from keras_gated.engine.roles import POSITIONAL, Matrix, Vector
from keras_gated.keras_internals import names_unchanged

B = 2  # the sizes of the symbols: all different, so that one in the place of another is seen
SIZES = (3, 5, 7, 11, 13, 17, 19, 23)


def check(equations):
    """Raises ValueError with one sentence that says what does not fit."""
    _check_names(equations)
    with names_unchanged():
        _Symbols(equations).check()


def _check_names(e):
    if not e.gates or len(set(e.gates)) < len(e.gates):
        raise ValueError(f"Equations expect gates to be different names, at least one, received {e.gates}.")
    if not e.states:
        raise ValueError("Equations expect at least one state, h, received none.")
    for letter, weight in e.weights.items():
        if not isinstance(weight, Matrix | Vector):
            raise ValueError(f"Equations expect each weight to be a Matrix or a Vector, received {letter}={weight!r}.")
        if letter in ("W", "b"):
            raise ValueError(f"Equations have W and b already: the weight {letter!r} needs another letter.")
        for columns in (weight.columns if isinstance(weight, Matrix) else weight.width,):
            _check_gates(e, columns, f"the weight {letter!r}")
        if isinstance(weight, Matrix) and weight.variable in e.weights:
            raise ValueError(
                f"Equations store the matrix {letter!r} as {weight.variable!r}, the name of another weight."
            )
        if isinstance(weight, Vector) and weight.variable not in (None, "bias"):
            raise ValueError(
                f"Equations store a vector under its own letter or, with variable='bias', as the second row of the "
                f"bias; {letter!r} names {weight.variable!r}."
            )
    if sum(isinstance(w, Vector) and w.variable == "bias" for w in e.weights.values()) > 1:
        raise ValueError("Equations expect at most one vector with variable='bias', received several.")
    for variable, letters in e.matrices.items():
        if len({e.weights[letter].rows for letter in letters}) > 1:
            raise ValueError(f"The matrices {', '.join(letters)} are columns of {variable!r}: they need the same rows.")
    for name, width in e.saved.items():
        _check_gates(e, width, f"saved {name!r}")
        if not name.isidentifier():
            raise ValueError(f"Equations expect names that Python can have, received {name!r} among saved.")
    for name, positional in POSITIONAL.items():
        _check_signature(e, name, positional)
    if e.memory not in e.states:
        raise ValueError(
            f"Equations expect memory to be one of the states {', '.join(e.states)}, received {e.memory!r}."
        )
    if e.retaining_gate is not None and (e.retaining_gate.gate not in e.gates or e.retaining_gate.sign not in (1, -1)):
        raise ValueError(
            f"Equations expect retaining_gate to be one of the gates {', '.join(e.gates)} with a sign of 1 or -1, "
            f"received {e.retaining_gate}."
        )


def _check_gates(e, width, whose):
    if isinstance(width, tuple) and not set(width) <= set(e.gates):
        raise ValueError(f"The width of {whose} names {', '.join(width)}; the gates are {', '.join(e.gates)}.")


def _check_signature(e, name, positional):
    function = getattr(e, name)
    if not callable(function):
        raise ValueError(f"Equations expect {name} to be a function, received {function!r}.")
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) < positional:
        raise ValueError(
            f"{_title(function)} takes {len(parameters)} arguments; as {name} it receives {positional} and the weights "
            "that it names."
        )
    vectors, matrices = e.vectors, [letter for letters in e.matrices.values() for letter in letters]
    offered = {*vectors, *(matrices if name == "step" else (f"{letter}_T" for letter in matrices))}
    offered |= {"d_states"} if name == "weight_gradient" else set()
    unknown = [p.name for p in parameters[positional:] if p.name not in offered]
    if unknown:
        raise ValueError(
            f"{_title(function)} asks for {', '.join(unknown)}, which no weight is called; as {name} it may ask for "
            f"{', '.join(sorted(offered)) or 'none'}."
        )


class _Symbols:
    """Symbols of the arrays that the functions pass on."""

    def __init__(self, equations):
        self.e = equations
        self.sizes = dict(zip(self._sizes(), SIZES, strict=False))

    def _sizes(self):
        """The names of all sizes."""
        e, names = self.e, ["units"]
        widths = [*e.states.values(), *e.saved.values()]
        for weight in e.weights.values():
            widths += weight[:2]
        for width in widths:
            if isinstance(width, str) and width not in e.states and width not in names:
                names.append(width)
        return names

    def array(self, width):
        return keras.KerasTensor((B, self.e.width(width, self.sizes)), "float32")

    def states(self):
        return [self.array(width) for width in self.e.states.values()]

    def check(self):
        e = self.e
        weights = self.weights()
        p = [self.array("units") for _ in e.gates]
        out = self.run("step", p, self.states(), weights=weights, parts="states, saved")
        self.compare("step", "states", out[0], e.states)
        self.compare("step", "saved", out[1], e.saved)
        saved = e.named_saved(*(self.array(width) for width in e.saved.values()))
        arguments = saved, self.states(), self.states(), self.states()
        da, before = self.run("step_gradient", *arguments, weights=weights, parts="da, d_before")
        self.compare("step_gradient", "da", [da], {f"the gates {' '.join(e.gates)}": e.gates})
        self.compare("step_gradient", "d_before", before, e.states)
        total = self.run("total_gradient", saved, self.states(), self.states(), weights=weights)
        self.compare("total_gradient", "d_states", total, e.states)
        rows = saved, self.states(), self.states()
        self.check_weight_gradient(self.run("weight_gradient", self.array(e.gates), *rows, weights=weights))
        if e.retained is not None:
            self.compare("retained", "the factor", [self.call("retained", saved)], {e.memory: e.states[e.memory]})

    def weights(self):
        """All that a function may ask for."""
        offered = {letter: self.array(self.e.weights[letter].width) for letter in self.e.vectors}
        offered |= {"d_states": self.states()}
        for letters in self.e.matrices.values():
            for letter in letters:
                ends = self.e.weights[letter].rows, self.e.weights[letter].columns
                offered[letter] = self.product(letter, *ends)
                offered[f"{letter}_T"] = self.product(f"{letter}_T", *reversed(ends))
        return {
            n: a if n not in self.e.vectors else keras.KerasTensor(a.shape[1:], "float32") for n, a in offered.items()
        }

    def product(self, name, rows, columns):
        def multiply(s):
            if tuple(s.shape) != tuple(self.array(rows).shape):
                raise ValueError(
                    f"{name} is applied to an array {_shown(s)}; it takes {_width(rows)}, {self.expected(rows)}"
                )
            return self.array(columns)

        return multiply

    def run(self, name, *arguments, weights, parts=None):
        result = self.call(name, *arguments, **{letter: weights[letter] for letter in self.e.asked[name]})
        if parts is not None and not (isinstance(result, tuple) and len(result) == 2):
            raise ValueError(f"{_title(getattr(self.e, name))} returns {_shown(result)}; as {name} it returns {parts}.")
        return result

    def call(self, name, *arguments, **weights):
        function = getattr(self.e, name)
        try:
            return function(*arguments, **weights)
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"{_title(function)}, as {name}, fails on arrays of the declared shapes: {first}"
            ) from error

    def compare(self, name, what, received, widths):
        received = list(received) if isinstance(received, tuple | list) else [received]
        if len(received) != len(widths):
            raise ValueError(
                f"{_title(getattr(self.e, name))} returns {len(received)} arrays as {what}; as {name} it returns "
                f"one for each of {', '.join(widths) or 'nothing'}."
            )
        for (label, width), a in zip(widths.items(), received, strict=True):
            if not hasattr(a, "shape") or tuple(a.shape) != tuple(self.array(width).shape):
                raise ValueError(
                    f"{_title(getattr(self.e, name))} returns {what} with {label} {_shown(a)}; as {name} it returns "
                    f"{self.expected(width)}"
                )

    def check_weight_gradient(self, received):
        e, title = self.e, _title(self.e.weight_gradient)
        if not isinstance(received, Mapping) or set(received) != set(e.weights):
            names = ", ".join(received) if isinstance(received, Mapping) else type(received).__name__
            raise ValueError(
                f"{title} returns {names or 'nothing'}; as weight_gradient it returns a dict with "
                f"{', '.join(e.weights)}."
            )
        for letter, weight in e.weights.items():
            value = received[letter]
            if isinstance(weight, Vector):
                self.compare("weight_gradient", f"the rows of d{letter}", [value], {letter: weight.width})
            elif not (isinstance(value, tuple) and len(value) == 2):
                raise ValueError(
                    f"{title} returns {_shown(value)} for the matrix {letter!r}; it returns the pair of what {letter} "
                    "multiplied and the gradient of the product."
                )
            else:
                ends = {f"what {letter} multiplied": weight.rows, "the gradient of the product": weight.columns}
                self.compare("weight_gradient", letter, value, ends)

    def expected(self, width):
        of = ", ".join(f"{name} = {size}" for name, size in self.sizes.items())
        return f"{_shown(self.array(width))} for {of} and a batch of {B}."


def _title(function):
    inner = getattr(function, "func", function)  # of a partial
    return f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', type(inner).__name__)}"


def _width(width):
    return " ".join(width) if isinstance(width, tuple) else str(width)


def _shown(a):
    if isinstance(a, tuple | list):
        return f"({', '.join(map(_shown, a))})"
    return f"of shape {tuple(a.shape)}" if hasattr(a, "shape") else repr(a)
