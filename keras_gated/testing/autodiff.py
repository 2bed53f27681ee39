"""Automatic differentiation of a function of tensors on whichever backend Keras runs.

Hides how each backend is asked, and what only some of them can be asked for.
"""

import keras
from keras import ops


def gradients(function, tensors, variables=()):
    """Of function(*tensors) -> number, *rest: its gradients in tensors and variables, which can be differentiated once
    more, and the rest."""
    return _on_this_backend(_ON)(function, list(tensors), list(variables))


def gradients_within(function, tensors):
    """Of function(*tensors) -> number, intermediate tensors: the gradients of the number in the latter, by all paths
    that leave them; None on JAX, which does not tell."""
    return _on_this_backend(_WITHIN)(function, list(tensors))


def _on_this_backend(implementations):
    return implementations[keras.backend.backend()]


def _on_tensorflow(function, tensors, variables):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(tensors)
        total, *rest = function(*tensors)
    return tape.gradient(total, [*tensors, *variables], unconnected_gradients="zero"), rest


def _on_jax(function, tensors, variables):
    import jax

    def total(tensors, values):
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            total, *rest = function(*tensors)
        return total, rest

    values = [v.value for v in variables]
    (of_tensors, of_values), rest = jax.grad(total, argnums=(0, 1), has_aux=True)(tensors, values)
    return [*of_tensors, *of_values], rest


def _on_torch(function, tensors, variables):
    import torch

    tensors = [t if t.requires_grad else t.clone().requires_grad_() for t in tensors]
    total, *rest = function(*tensors)
    wanted = [*tensors, *(v.value for v in variables)]
    found = torch.autograd.grad(total, wanted, create_graph=True, allow_unused=True)
    return [torch.zeros_like(t) if d is None else d for d, t in zip(found, wanted, strict=True)], rest


def _within_on_tensorflow(function, tensors):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(tensors)
        total, within = function(*tensors)
    return tape.gradient(total, within, unconnected_gradients="zero")


def _within_on_torch(function, tensors):
    import torch

    total, within = function(*(t.clone().requires_grad_() for t in tensors))
    found = torch.autograd.grad(total, within, allow_unused=True)
    return [ops.zeros_like(t) if d is None else d for d, t in zip(found, within, strict=True)]


_ON = {"tensorflow": _on_tensorflow, "jax": _on_jax, "torch": _on_torch}
_WITHIN = {"tensorflow": _within_on_tensorflow, "jax": lambda *_: None, "torch": _within_on_torch}
