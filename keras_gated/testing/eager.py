"""Equations over time, eagerly and in the plainest way: what the engine's sweep must equal, without a compiler.

Axes: B batch, D features, N units, k gates.  Sequences are lists with one array (B, n) for each step.
"""

import keras
from keras import ops

from keras_gated.engine.roles import Matrix


def forward(equations, sizes, weights, x, states, mask=None):
    """-> for each step (saved, states before, states after).  mask: for each step (B, 1), False where it is none."""
    named, steps = equations.forward_weights(weights, sizes), []
    for t, x_t in enumerate(x):
        p = ops.split(ops.matmul(x_t, weights["W"]) + weights["b"], len(equations.gates), axis=-1)
        after, saved = equations.call("step", p, list(states), weights=named)
        if mask is not None:
            after = [ops.where(mask[t], new, old) for new, old in zip(after, states, strict=True)]
        steps.append((equations.named_saved(*saved), list(states), list(after)))
        states = after
    return steps


def backward(equations, sizes, weights, x, steps, d_outputs, d_states):
    """-> dx of each step, gradients of the initial states, and of the weights as they are stored."""
    named, rows = equations.backward_weights(weights, sizes), []
    for step, d_output in zip(reversed(steps), reversed(d_outputs), strict=True):
        d_states = [d_states[0] + d_output, *d_states[1:]]
        da, d_before = equations.call("step_gradient", *step, d_states, weights=named)
        rows.insert(0, (da, *step, d_states))
        d_states = list(d_before)
    da, saved, before, after, d_rows = keras.tree.map_structure(lambda *parts: ops.concatenate(parts), *rows)
    of_cell = equations.call("weight_gradient", da, saved, before, after, weights={**named, "d_states": d_rows})
    found = {"W": ops.matmul(ops.transpose(ops.concatenate(x)), da), "b": ops.sum(da, axis=0)}
    for letter, value in of_cell.items():
        matrix = isinstance(equations.weights[letter], Matrix)
        found[letter] = ops.matmul(ops.transpose(value[0]), value[1]) if matrix else ops.sum(value, axis=0)
    dx = [ops.matmul(row[0], ops.transpose(weights["W"])) for row in rows]
    return dx, d_states, equations.joined(found, join=lambda parts: ops.concatenate(parts, axis=1))
