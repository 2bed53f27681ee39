"""The contract between a cell and whoever runs it: `Equations`, the pure functions of one step and the names of what
they pass on.

A cell writes its equations once, on keras.ops.  sweep.py runs them through time with their own gradient; anybody else
(a single step, keras.layers.RNN, loop.py) calls `advance` and lets automatic differentiation find the gradient.

Hides how the weights of the equations are stored, and how functions are checked before any number is computed.
"""

import dataclasses
import functools
import inspect
from collections import namedtuple
from collections.abc import Callable, Mapping

from keras import ops

from keras_gated.engine.checking import check
from keras_gated.engine.perturbation import perturbed_states
from keras_gated.engine.precision import arithmetic_dtype
from keras_gated.engine.roles import POSITIONAL, Matrix, RetainingGate, Vector


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Equations:
    """The equations of a cell.  Making one checks it: names, arguments and the shapes of all that is returned.

    Make it once, at the top of a module: what is compiled for a cell is kept by the identity of its equations.

    Letters: B batch, N units, k gates.  A width is a size ("units", or another one that the cell's `sizes` has), the
    name of a state, a tuple of gates (N for each) or a number.

    Every function takes its first arguments by position and, by name, those weights that its signature asks for.  A
    matrix M is the function M: s -> s M in `step`, and its transpose M_T: d -> d Mᵀ in all others; a vector v is the
    array v everywhere.

    `step(p, states, ...) -> states, saved`: one step.  p is a list with one array (B, N) per gate, of p = x W + b;
    states are (B, width) each.

    `step_gradient(saved, before, after, d_states, ...) -> da, d_before`: its transpose.  before and after are the
    states; d_states is the gradient of what the step hands out, which counts each state for itself alone.  da (B, kN)
    is the gradient of p.

    `weight_gradient(da, saved, before, after, ...) -> {letter: ...}`: over many steps at once, rows in place of B.
    For a matrix M it gives the pair (s, du) of what M multiplied and the gradient of the product, (rows, ·) each: the
    engine computes dM = sᵀ du.  For a vector it gives the gradient of every row (rows, n): the engine sums.  A
    function that asks for `d_states` receives that of each step, too.

    `total_gradient(saved, after, d_states, ...) -> d_states`: adds to d_states the paths between states of one step,
    such as that from c through h.  Needed where there are such paths.

    Meaning, for whoever measures: `memory` is the state that carries memory; `retained(saved)` (B, width of memory)
    is the factor by which a step keeps it, the other gates held fixed: f of an LSTM, 1 - z of a GRU.  A gate can be
    read where `saved` has its name.
    """

    gates: tuple[str, ...]  # the blocks of W and b, in the order of memory
    states: Mapping[str, str]  # each with its width; first h, which is put out
    saved: (
        Mapping[str, tuple | str | int] | tuple[str, ...]
    )  # what step_gradient needs, with widths; "units" by default
    weights: Mapping[str, Matrix | Vector]  # by letter, besides W and b
    step: Callable
    step_gradient: Callable
    weight_gradient: Callable
    total_gradient: Callable = lambda saved, after, d_states: d_states
    memory: str | None = None  # the first state where it is not named
    retained: Callable | None = None
    retaining_gate: RetainingGate | None = None

    def __post_init__(self):
        widths = self.saved if isinstance(self.saved, Mapping) else dict.fromkeys(self.saved, "units")
        for name, value in (("gates", tuple(self.gates)), ("saved", dict(widths)), ("states", dict(self.states))):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "memory", self.memory or next(iter(self.states), None))
        check(self)

    # Sizes and storage.

    def width(self, of, sizes):
        """A width, as a number."""
        if isinstance(of, int):
            return of
        if isinstance(of, tuple):
            return len(of) * sizes["units"]
        return sizes[of] if of in sizes else self.width(self.states[of], sizes)

    @functools.cached_property
    def matrices(self):
        """{variable: [letters of its columns]}."""
        variables = {}
        for letter, weight in self.weights.items():
            if isinstance(weight, Matrix):
                variables.setdefault(weight.variable, []).append(letter)
        return variables

    @functools.cached_property
    def vectors(self):
        return [letter for letter, weight in self.weights.items() if isinstance(weight, Vector)]

    @property
    def recurrent_bias(self):
        """The letter of the vector that is stored as the second row of the bias, or None."""
        return next((letter for letter in self.vectors if self.weights[letter].variable == "bias"), None)

    def shapes(self, sizes):
        """{variable of a matrix, or letter of a vector: its shape}: what is stored besides W and b."""
        shapes = {}
        for variable, letters in self.matrices.items():
            columns = sum(self.width(self.weights[letter].columns, sizes) for letter in letters)
            shapes[variable] = (self.width(self.weights[letters[0]].rows, sizes), columns)
        return shapes | {letter: (self.width(self.weights[letter].width, sizes),) for letter in self.vectors}

    def joined(self, by_letter, join):
        """Gradients by letter -> by variable, as the weights are stored; join puts columns beside one another."""
        joined = {name: a for name, a in by_letter.items() if not isinstance(self.weights.get(name), Matrix)}
        for variable, letters in self.matrices.items():
            parts = [by_letter[letter] for letter in letters]
            joined[variable] = parts[0] if len(parts) == 1 else join(parts)
        return joined

    # Arguments of the functions.

    def forward_weights(self, weights, sizes, h_mask=None, by=None):
        """The weights that `step` asks for, by name.

        weights: {"W", "b", variable or letter: array}; h_mask (B, N): recurrent dropout; by(M): how to multiply by M.
        """
        by = by or _multiply
        named = {letter: weights[letter] for letter in self.vectors}
        for letter, M, masked in self._columns(weights, sizes, h_mask):
            named[letter] = _then(masked, by(M))
        return named

    def backward_weights(self, weights, sizes, h_mask=None, by=None):
        """The weights that all other functions ask for, by name; each matrix is transposed here, once."""
        by = by or _multiply
        named = {letter: weights[letter] for letter in self.vectors}
        for letter, M, masked in self._columns(weights, sizes, h_mask):
            named[f"{letter}_T"] = _then(by(ops.transpose(M)), masked)
        return named

    def _columns(self, weights, sizes, h_mask):
        """Yields letter, matrix, and recurrent dropout of what it multiplies."""
        for variable, letters in self.matrices.items():
            begin = 0
            for letter in letters:
                end = begin + self.width(self.weights[letter].columns, sizes)
                whole = len(letters) == 1
                M = weights[variable] if whole else weights[variable][:, begin:end]
                yield letter, M, functools.partial(apply_mask, mask=h_mask if self.is_dropped(letter) else None)
                begin = end

    def is_dropped(self, letter):
        """Whether recurrent dropout acts on what the matrix multiplies."""
        return self.weights[letter].rows == next(iter(self.states))

    def call(self, name, *arguments, weights):
        """The function of that name, of these arguments and of those weights that it asks for."""
        return getattr(self, name)(*arguments, **{letter: weights[letter] for letter in self.asked[name]})

    @functools.cached_property
    def asked(self):
        """{function: the names of what it asks for besides its positional arguments}."""
        return {
            name: tuple(inspect.signature(getattr(self, name)).parameters)[positional:]
            for name, positional in POSITIONAL.items()
        }

    @functools.cached_property
    def named_saved(self):
        """The type, a named tuple, of what `step` saves."""
        return namedtuple("Saved", self.saved)

    @property
    def wants_d_states(self):
        """Whether weight_gradient asks for d_states."""
        return "d_states" in self.asked["weight_gradient"]

    # One step.

    def advance(self, x, states, weights, sizes, x_mask=None, h_mask=None, perturbations=None):
        """One step from x (B, D): -> h, states, in the dtype of x.  For the perturbations see `perturbed_states`."""
        out, dtype = x.dtype, arithmetic_dtype(x.dtype)
        cast = lambda a: None if a is None else ops.cast(a, dtype)  # noqa: E731
        weights = {name: cast(w) for name, w in weights.items()}
        x, x_mask, h_mask = cast(x), cast(x_mask), cast(h_mask)
        p = ops.split(ops.matmul(apply_mask(x, x_mask), weights["W"]) + weights["b"], len(self.gates), axis=-1)
        forward = self.forward_weights(weights, sizes, h_mask)
        states, saved = self.call("step", p, [cast(s) for s in states], weights=forward)
        if perturbations is not None:
            backward = self.backward_weights(weights, sizes, h_mask)
            saved = self.named_saved(*saved)
            total = functools.partial(self.call, "total_gradient", saved, states, weights=backward)
            states = perturbed_states(states, perturbations, total)
        states = [ops.cast(s, out) for s in states]
        return states[0], states


def apply_mask(a, mask):
    return a if mask is None else a * mask


def _multiply(M):
    return lambda s: ops.matmul(s, M)


def _then(first, second):
    return lambda s: second(first(s))


def sigmoid(a):
    """σ(a) by tanh: compiled, it takes half the time of exp and a division."""
    return 0.5 * ops.tanh(0.5 * a) + 0.5
