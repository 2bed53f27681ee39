"""What a cell is: pure functions of one step, and the names of what they pass on.

A cell writes its equations once, on keras.ops.  The sweep of sweep.py runs them through time with their own
gradient; anybody else (a single step, keras.layers.RNN, `loop`) runs `advance` and lets autodiff find it.
"""

import collections
import functools
from collections.abc import Callable
from typing import NamedTuple

import keras
from keras import ops

from keras_gated.keras_internals import rnn_loop


def _by(U):
    return lambda h: ops.matmul(h, U)


class Equations(NamedTuple):
    """The contract between a cell and whoever runs it.

    Letters: B batch, N units, k gates; every array is (B, N) unless said otherwise.

    `step(p, states, *U) -> states, saved`: one step.  p holds one array per gate, of p = x W + b; each function
    in U maps h to h U (and adds b_u where there is one) for the gates of its product: (B, N) -> (B, n N).

    `step_gradient(saved, states_prev, states, d_states, *U_T) -> da, d_states_prev`: its transpose.  da (B, kN)
    is the gradient of p; each function in U_T maps a gradient of h U back to one of h.

    `weight_gradient(da, h_prev, saved) -> (*dU,) or (*dU, db_u)`: over many steps at once, rows in place of B; one
    dU (N, n N) for each function in U.

    `total_gradient(saved, states, d_states) -> d_states`: the gradient of each state with what it does through the
    other states of the same time, which d_states, the gradient of what a step hands out, counts for them alone.
    """

    gates: tuple[str, ...]  # the blocks of W, U and b, in the order of memory
    states: tuple[str, ...]  # h first
    saved: tuple[str, ...]
    products: tuple[int, ...]  # how many gates each function in U makes, in the order of memory
    step: Callable
    step_gradient: Callable
    weight_gradient: Callable
    recurrent_bias: bool = False  # whether h U has a bias of its own, b_u
    total_gradient: Callable = lambda saved, states, d_states: d_states

    def recurrent(self, weights, h_mask=None, by=_by):
        """The functions h -> h U of `step`.  h_mask (B, N) is recurrent dropout; by(U) is how to multiply by U."""
        _, _, U, *b_u = weights

        def product(U, b_u=0.0):
            times_U = by(U)
            return lambda h: times_U(_masked(h, h_mask)) + b_u

        return [product(U[:, columns], *(b[columns] for b in b_u)) for columns in self._columns(U.shape[0])]

    def recurrent_transposed(self, weights, h_mask=None, by=_by):
        """The functions of `step_gradient`, each the transpose of its product; U is transposed here, once."""
        U_T = ops.transpose(weights[2])

        def product(U_T_part):
            times_U_T = by(U_T_part)
            return lambda du: _masked(times_U_T(du), h_mask)

        return [product(U_T[columns]) for columns in self._columns(U_T.shape[1])]

    def _columns(self, units):
        ends = [sum(self.products[: i + 1]) * units for i in range(len(self.products))]
        return [slice(end - n * units, end) for end, n in zip(ends, self.products, strict=True)]

    def advance(self, x, states, weights, x_mask=None, h_mask=None, probes=None):
        """One step from x (B, D): -> h, states, in the dtype of x.  For the probes see `watched`."""
        dtype = arithmetic_dtype(x.dtype)
        cast = lambda a: None if a is None else ops.cast(a, dtype)  # noqa: E731
        weights = [cast(w) for w in weights]
        W, b, *_ = weights
        p = ops.split(ops.matmul(_masked(cast(x), cast(x_mask)), W) + b, len(self.gates), axis=-1)
        new, saved = self.step(p, [cast(s) for s in states], *self.recurrent(weights, cast(h_mask)))
        states = new if probes is None else watched(new, probes, functools.partial(self.total_gradient, saved, new))
        states = [ops.cast(s, x.dtype) for s in states]
        return states[0], states


def watched(states, probes, total_gradient):
    """The states, unchanged.  Their probes are zeros of the same shapes, in float32 at least, whose gradients are the
    total gradients."""

    @ops.custom_gradient
    def identity(*tensors):
        def gradient(*d_states):
            return *(ops.cast(d, p.dtype) for d, p in zip(total_gradient(d_states), probes, strict=True)), *d_states

        return list(tensors[len(probes) :]), gradient

    return identity(*probes, *states)


def norm(d, axes=1):
    """(B, ...) -> (B, 1), in float32 at least; squares are taken in float64, where they can be represented.  Likewise
    over what comes behind more axes: (B, T, ...) -> (B, T, 1)."""
    squares = ops.square(ops.cast(d, "float64"))
    sums = ops.sum(squares, axis=tuple(range(axes, len(d.shape))))
    return ops.cast(ops.sqrt(sums), arithmetic_dtype(d.dtype))[..., None]


def together(x, probe, states):
    """A sequence x (B, T, ...) and, for each of the states, zeros (B, T, ...) for `watched`, as inputs of Keras's loop,
    which asks them for a shape and wants them flat.  The gradient of the probe (B, T, S) is the norm of theirs."""

    @ops.custom_gradient
    def spread(probe):
        zeros = [ops.zeros((*ops.shape(x)[:2], *s.shape[1:]), arithmetic_dtype(s.dtype)) for s in states]

        def gradient(*d_zeros):
            return ops.concatenate([norm(d, axes=2) for d in d_zeros], axis=-1)

        return zeros, gradient

    fields = collections.namedtuple("fields", ["x", *(f"probe_{i}" for i in range(len(states)))])
    return type("Together", (fields,), {"shape": x.shape})(x, *spread(probe))


def loop(step, x, states, mask, shown, go_backwards, sequences, unroll=False, probe=None):
    """Keras's loop over time, under autodiff; reversal and masks, in which its backends differ, are done here.

    Args:
        step: x_t (B, D), states -> h, states; of x_t and its probes, `together`, where there is one.
        x: (B, T, D).
        states: the initial states.
        mask: (B, T) in the order of processing, False where the state stays as it was; or None.
        shown: likewise, False where the output is 0.
        go_backwards: read x from its end.
        sequences: whether the outputs of all times are wanted.
        unroll: one copy of the step per time step instead of a loop.
        probe: zeros (B, T, S) that go along with x, as they come: see `watched`.

    Returns:
        The outputs, (B, T, N) or None, and the final states.
    """
    x = ops.flip(x, axis=1) if go_backwards else x
    x = x if mask is None else ops.where(mask[..., None], x, 0)  # no gradient may meet what padding holds
    if probe is not None:
        x = together(x, ops.flip(probe, axis=1) if go_backwards else probe, states)
    _, outputs, states = rnn_loop(
        step,
        x,
        states,
        mask=mask,
        unroll=unroll,
        input_length=x.shape[1],
        return_all_outputs=sequences,
    )
    if shown is not None and sequences:
        outputs = ops.where(shown[..., None], outputs, 0)
    return outputs if sequences else None, states


def sigmoid(a):
    """σ(a) by tanh: compiled, it takes half the time of exp and a division."""
    return 0.5 * ops.tanh(0.5 * a) + 0.5


def arithmetic_dtype(dtype):
    """Half precision is for storage and transport: equations are evaluated in float32 at least."""
    name = keras.backend.standardize_dtype(dtype)
    return "float32" if name in ("float16", "bfloat16") else name


def _masked(a, mask):
    return a if mask is None else a * mask
