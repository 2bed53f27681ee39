"""The laws of a cell's equations: single steps and short sequences, eagerly.

Axes: B batch, T time, D features, N units, k gates.
"""

import inspect
from itertools import chain, combinations

import numpy as np
from keras import ops

from keras_gated.engine.roles import Matrix
from keras_gated.testing.autodiff import gradients, gradients_within
from keras_gated.testing.deviation import DTYPE, PRECISE, Line, array, broken, compare
from keras_gated.testing.eager import backward, forward

B, T, D = 3, 3, 2
WIDTH, SLOPE = (1e-5, 1e-6) if PRECISE else (3e-3, 5e-3)  # of central differences, and what they allow
KINK = 0.1  # where the slopes on both sides differ by more, relative to the largest: no derivative is asked for there
ENTRIES = 200  # of each array, at most, that are varied
AUTODIFF, EXACT = 1e-9, 1e-12
# Lines of the contract.
DA = "da of the gate {} of step_gradient"
D_BEFORE = "d_before of the state {} of step_gradient"
TOTAL = "d_states of the state {} of total_gradient"
WEIGHT = "the gradient of {} of weight_gradient"


def check_equations(cell, rng):
    """Raises AssertionError for the first law that the equations of a built cell break."""
    step = Step(cell, rng)
    for law in (pure, examples, precision, total, transpose, slope, linear, retained, retaining_gate):
        law(step)
    sequence(cell, rng)


def weights_of(cell):
    """What `Equations` take, as tensors that are no variables."""
    return {name: ops.convert_to_tensor(array(w)) for name, w in cell.tensors().items()}


class Step:
    """One step of a cell on random numbers, and the functions of its equations on them."""

    def __init__(self, cell, rng):
        self.cell, self.e, self.sizes, self.rng = cell, cell.equations, cell.sizes, rng
        self.weights = weights_of(cell)

        def draw(width):
            return ops.convert_to_tensor(rng.normal(size=(B, self.e.width(width, self.sizes))), DTYPE)

        self.p = [draw("units") for _ in self.e.gates]
        self.states = [draw(width) for width in self.e.states.values()]
        self.d_states = [draw(width) for width in self.e.states.values()]

    def by_letter(self):
        """{letter: array} of what the equations declare."""
        found = {letter: array(self.weights[letter]) for letter in self.e.vectors}
        for variable, letters in self.e.matrices.items():
            widths = [self.e.width(self.e.weights[letter].columns, self.sizes) for letter in letters]
            found |= dict(zip(letters, np.split(array(self.weights[variable]), np.cumsum(widths)[:-1], 1), strict=True))
        return {letter: found[letter] for letter in self.e.weights}

    def step(self, p, states, weights):
        """-> states after, and saved.  weights: by letter, a matrix as an array or already as a function."""
        named = {
            letter: (lambda s, M=w: ops.matmul(s, M)) if isinstance(self.e.weights[letter], Matrix) else w
            for letter, w in weights.items()
            if not callable(w)
        }
        after, saved = self.e.call("step", list(p), list(states), weights={**weights, **named})
        return list(after), self.e.named_saved(*saved)

    def explicit(self, d_states=None, rows=slice(None), cast=lambda a: a):
        """{line: array}: all that the functions return, of those rows; with d_states of one's own."""
        weights = {name: cast(w) for name, w in self.weights.items()}
        p, states, d = ([cast(a[rows]) for a in of] for of in (self.p, self.states, d_states or self.d_states))
        after, saved = self.e.call("step", p, states, weights=self.e.forward_weights(weights, self.sizes))
        after, saved = list(after), self.e.named_saved(*saved)
        named = self.e.backward_weights(weights, self.sizes)
        da, d_before = self.e.call("step_gradient", saved, states, after, d, weights=named)
        total = self.e.call("total_gradient", saved, after, d, weights=named)
        of_cell = self.e.call("weight_gradient", da, saved, states, after, weights={**named, "d_states": d})
        gates = ops.split(da, len(self.e.gates), axis=-1)
        return {
            **by_name("the state {} of step", self.e.states, after),
            **by_name("saved {} of step", self.e.saved, saved),
            **by_name(DA, self.e.gates, gates),
            **by_name(D_BEFORE, self.e.states, d_before),
            **by_name(TOTAL, self.e.states, total),
            **by_name(WEIGHT, of_cell, of_cell.values()),
        }

    def derivative(self):
        """The gradients of `inputs`, by step_gradient and weight_gradient: {line: array}."""
        found = self.explicit()
        lines = {name: found[name] for name in self.lines()}
        for letter in self.e.weights:
            value = lines[WEIGHT.format(letter)]
            product = isinstance(value, tuple)
            summed = ops.matmul(ops.transpose(value[0]), value[1]) if product else ops.sum(value, axis=0)
            lines[WEIGHT.format(letter)] = summed
        return lines

    def lines(self):
        """Their names."""
        of = (DA, self.e.gates), (D_BEFORE, self.e.states), (WEIGHT, self.e.weights)
        return [line.format(name) for line, names in of for name in names]

    def inputs(self):
        """p, the states and the weights by letter, as arrays."""
        return [*map(array, (*self.p, *self.states)), *self.by_letter().values()]

    def loss(self, *inputs):
        """Of `inputs` as tensors: a number whose gradient in the states after the step is d_states; those states."""
        k, n = len(self.p), len(self.p) + len(self.states)
        after, _ = self.step(inputs[:k], inputs[k:n], dict(zip(self.e.weights, inputs[n:], strict=True)))
        return sum(ops.sum(s * d) for s, d in zip(after, self.d_states, strict=True)), after


def by_name(line, names, arrays):
    return {line.format(name): a for name, a in zip(names, arrays, strict=True)}


def tensors(arrays):
    return [ops.convert_to_tensor(a, DTYPE) for a in arrays]


def pure(step):
    first, second = _flat(step.explicit()), _flat(step.explicit())
    lines = [Line(name, second[name], a) for name, a in first.items()]
    compare(step.cell, "pure", lines, "as in the call before", 0)


def examples(step):
    whole = _flat(step.explicit())
    for n in range(B):
        alone = _flat(step.explicit(rows=slice(n, n + 1)))
        lines = [Line(f"{name}, row {n},", a[n : n + 1], alone[name]) for name, a in whole.items()]
        compare(step.cell, "examples", lines, "as where the row is alone", EXACT)


def precision(step):
    exact = _flat(step.explicit())
    try:
        single = step.explicit(cast=lambda a: ops.cast(a, "float32"))
    except Exception as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise broken(step.cell, "precision", f"in float32 the functions fail: {said}") from error
    single = _flat(single)
    for name, a in single.items():
        if a.dtype != "float32":
            raise broken(step.cell, "precision", f"{name} is {a.dtype}. Cast constants to the dtype of what they meet.")
    compare(step.cell, "precision", [Line(n, single[n], a) for n, a in exact.items()], "as in float64", 1e-4)


def total(step):
    within = gradients_within(step.loss, tensors(step.inputs()))
    if within is not None:
        received, expected = step.explicit(), by_name(TOTAL, step.e.states, within)
        lines = [Line(name, received[name], d) for name, d in expected.items()]
        compare(step.cell, "total", lines, "by automatic differentiation of step in its states", AUTODIFF)


def transpose(step):
    received, (expected, _) = step.derivative(), gradients(step.loss, tensors(step.inputs()))
    lines = [Line(name, received[name], d) for name, d in zip(step.lines(), expected, strict=True)]
    compare(step.cell, "transpose", lines, "by automatic differentiation of step", AUTODIFF)


def slope(step):
    """Rows and matrices are varied in one call, a few rows for each of their entries; vectors in a call for each."""
    inputs, received = step.inputs(), [array(a) for a in step.derivative().values()]
    rows, entries = len(step.p) + len(step.states), []
    for k, a in enumerate(inputs):
        places = list(np.ndindex(a.shape[1:] if k < rows else a.shape))
        some = step.rng.permutation(len(places))[:ENTRIES]
        entries += [(k, places[place]) for place in some]
    at_once = [entry for entry in entries if inputs[entry[0]].ndim == 2]
    one_by_one = [entry for entry in entries if inputs[entry[0]].ndim == 1]
    (middle,) = _values(step, inputs, [None], 0)
    below, above = (
        [*_values(step, inputs, at_once, shift), *_values_of_vectors(step, inputs, one_by_one, shift)]
        for shift in (-WIDTH, WIDTH)
    )
    slopes, bends = [a.copy() for a in received], [np.zeros(a.shape) for a in received]
    for (k, place), low, high in zip([*at_once, *one_by_one], below, above, strict=True):
        at, over = ((slice(None), *place), 1) if k < rows else (place, (0, 1))
        slopes[k][at] = np.sum(high - low, axis=over) / (2 * WIDTH)
        bends[k][at] = np.abs(np.sum(high - 2 * middle + low, axis=over)) / WIDTH
    largest = max(np.abs(d).max(initial=0) for d in slopes)
    slopes = [np.where(b > KINK * largest, a, d) for a, b, d in zip(received, bends, slopes, strict=True)]
    lines = [Line(*line) for line in zip(step.lines(), received, slopes, strict=True)]
    compare(step.cell, "slope", lines, "by central differences of step", SLOPE)


def _values(step, inputs, entries, shift):
    """What every row adds to `Step.loss`, (entries, B, ·), where each entry in turn, a column of rows or a number of a
    matrix, is shifted."""
    k, n = len(step.p), len(step.p) + len(step.states)
    tiled = [np.repeat(a[None], len(entries), axis=0) for a in inputs[:n]]
    weights = {}
    for which, (letter, w) in enumerate(zip(step.e.weights, inputs[n:], strict=True), n):
        weights[letter] = ops.convert_to_tensor(w, DTYPE)
        if w.ndim == 2:
            left, right = (np.zeros((len(entries), 1, size)) for size in w.shape)
            for entry, (_, (i, j)) in ((e, entries[e]) for e in range(len(entries)) if _is_of(entries[e], which)):
                left[entry, :, i], right[entry, :, j] = 1, shift
            weights[letter] = _shifted_product(weights[letter], *(np.repeat(a, B, 1) for a in (left, right)))
    for e, entry in enumerate(entries):
        if entry is not None and entry[0] < n:
            tiled[entry[0]][e, :, *entry[1]] += shift
    flat = tensors(a.reshape(-1, a.shape[-1]) for a in tiled)
    after, _ = step.step(flat[:k], flat[k:], weights)
    rows = [array(s).reshape(len(entries), B, -1) * array(d) for s, d in zip(after, step.d_states, strict=True)]
    return np.concatenate(rows, axis=-1)


def _is_of(entry, which):
    return entry is not None and entry[0] == which


def _shifted_product(M, left, right):
    """s -> s M, where each row has an M of its own with one number shifted: it adds (s · left) right."""
    left, right = tensors(a.reshape(-1, a.shape[-1]) for a in (left, right))
    return lambda s: ops.matmul(s, M) + ops.sum(s * left, axis=-1, keepdims=True) * right


def _values_of_vectors(step, inputs, entries, shift):
    for which, place in entries:
        shifted = [a.copy() if k == which else a for k, a in enumerate(inputs)]
        shifted[which][place] += shift
        yield _values(step, shifted, [None], 0)[0]


def linear(step):
    for factor in (0, -1000):
        once, received = (_flat(step.explicit([f * d for d in step.d_states])) for f in (1, factor))
        lines = [
            Line(name, received[name], factor * a)
            for name, a in once.items()
            if name in step.lines()[: len(step.p) + len(step.states)]
        ]
        compare(step.cell, "linear", lines, f"as it is {factor} times as large where d_states are not", AUTODIFF)


def retained(step):
    """Without matrices gates see the states through vectors alone, such as peepholes: one set of vectors, put to 0,
    leaves gates that see no state, and there ∂memory/∂memory₋ is the diagonal matrix of `retained`."""
    e, index = step.e, list(step.e.states).index(step.e.memory)
    if e.retained is None:
        return
    expected_is = f"∂{e.memory}/∂{e.memory}₋ of step without its matrices"
    lines = []
    for silent in chain.from_iterable(combinations(e.vectors, n) for n in range(len(e.vectors) + 1)):
        letters = {n: 0 * w if n in silent or n not in e.vectors else w for n, w in step.by_letter().items()}
        weights = dict(zip(letters, tensors(letters.values()), strict=True))

        def memory(before, weights=weights):
            states = [before if k == index else s for k, s in enumerate(step.states)]
            after, saved = step.step(step.p, states, weights)
            return ops.sum(after[index] * step.d_states[index]), e.retained(saved)

        (slope,), (factor,) = gradients(memory, [step.states[index]])
        lines.append(Line("retained", factor, slope / step.d_states[index]))
        if np.std(array(factor)) < 1e-3:  # all gates are the same: this shows nothing
            continue
        try:
            return compare(step.cell, "retained", lines[-1:], expected_is, 1e-6)
        except AssertionError:
            pass
    compare(step.cell, "retained", lines[:1], expected_is, 1e-6)


def retaining_gate(step):
    e = step.e
    if e.retaining_gate is None:
        return
    gate, sign, option = e.retaining_gate
    if option is not None and option not in inspect.signature(type(step.cell)).parameters:
        raise broken(step.cell, "retaining gate", f"its option {option!r} is no argument of the cell.")
    if e.retained is None:
        raise broken(step.cell, "retaining gate", "it is given without `retained`.")
    index = e.gates.index(gate)
    larger = [p + 1 if k == index else p for k, p in enumerate(step.p)]
    arrays = {letter: np.abs(a) if letter in e.vectors else a for letter, a in step.by_letter().items()}  # as gains are
    weights = dict(zip(arrays, tensors(arrays.values()), strict=True))
    few, many = (array(e.retained(step.step(p, step.states, weights)[1])) for p in (step.p, larger))
    change = float(np.mean(many - few))
    if not change * sign > 0:
        what = f"with a bias of the gate {gate} that is larger by 1, `retained` changes by {change:.2g}, the sign is"
        raise broken(step.cell, "retaining gate", f"{what} {sign}.")


def sequence(cell, rng):
    e, sizes, weights = cell.equations, cell.sizes, weights_of(cell)
    stored = list(weights)
    draw = lambda width: ops.convert_to_tensor(rng.normal(size=(B, width)), DTYPE)  # noqa: E731
    x, states = [draw(D) for _ in range(T)], [draw(width) for width in cell.widths.values()]
    d_outputs, d_states = [draw(cell.output_size) for _ in range(T)], [draw(width) for width in cell.widths.values()]

    def loss(*tensors):
        named = dict(zip(stored, tensors[T + len(states) :], strict=True))
        steps = forward(e, sizes, named, tensors[:T], tensors[T : T + len(states)])
        pairs = [(step[2][0], d) for step, d in zip(steps, d_outputs, strict=True)]
        pairs += zip(steps[-1][2], d_states, strict=True)
        return (sum(ops.sum(s * d) for s, d in pairs),)

    expected, _ = gradients(loss, [*x, *states, *weights.values()])
    steps = forward(e, sizes, weights, x, states)
    dx, d_initial, d_weights = backward(e, sizes, weights, x, steps, d_outputs, d_states)
    names = [f"the gradient of x of step {t}" for t in range(T)]
    names += [f"the gradient of the initial state {state}" for state in e.states]
    names += [f"the gradient of {name} over all steps" for name in stored]
    received = [*dx, *d_initial, *(d_weights[name] for name in stored)]
    lines = [Line(*line) for line in zip(names, received, expected, strict=True)]
    compare(cell, "sequence", lines, "by automatic differentiation", AUTODIFF)


def _flat(lines):
    """Each array apart; of a matrix the pair of what it multiplied and the gradient of the product."""
    flat = {}
    for name, value in lines.items():
        if isinstance(value, tuple | list):
            names = (f"{name}, what it multiplied", f"{name}, the gradient of the product")
            flat |= {n: array(a) for n, a in zip(names, value, strict=True)}
        else:
            flat[name] = array(value)
    return flat
