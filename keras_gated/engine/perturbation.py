"""Zeros added to the states of a recurrence, whose gradients are the gradients of the states.

For each state of each step there is a zero.  It changes no value; what automatic differentiation calls its gradient is
∂L/∂state, the total one: through the recurrence, and through the other states of the same step.

Hides how such zeros get into Keras's loop over time, and that their gradients leave it as norms.
"""

import collections

from keras import ops

from keras_gated.engine.precision import arithmetic_dtype, norm


def perturbed_states(states, perturbations, total_gradient):
    """The states, unchanged.  The perturbations are zeros of the same shapes, in float32 at least; their gradients are
    total_gradient(d_states), with d_states the gradients of the states each for itself."""

    @ops.custom_gradient
    def identity(*tensors):
        def gradient(*d_states):
            totals = total_gradient(d_states)
            return *(ops.cast(d, p.dtype) for d, p in zip(totals, perturbations, strict=True)), *d_states

        return list(tensors[len(perturbations) :]), gradient

    return identity(*perturbations, *states)


def with_perturbations(x, perturbation, states):
    """A sequence x (B, T, ...) and zeros (B, T, ...) for each of the states, as inputs of Keras's loop, which asks them
    for a shape and wants them flat.  The gradient of the perturbation (B, T, S) is the norm of the zeros' gradients."""

    @ops.custom_gradient
    def spread(perturbation):
        zeros = [ops.zeros((*ops.shape(x)[:2], *s.shape[1:]), arithmetic_dtype(s.dtype)) for s in states]

        def gradient(*d_zeros):
            return ops.concatenate([norm(d, axes=2) for d in d_zeros], axis=-1)

        return zeros, gradient

    fields = collections.namedtuple("fields", ["x", *(f"zeros_{i}" for i in range(len(states)))])
    return type("LoopInputs", (fields,), {"shape": x.shape})(x, *spread(perturbation))
