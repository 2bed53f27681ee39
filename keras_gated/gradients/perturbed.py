"""The total gradient ‖∂L/∂h_t‖ of every time step of a recurrent layer, out of a model that runs (TensorFlow).

A perturbation is a tensor of zeros, (B, T, S), one for each of the S states of a layer, that changes no value.  What
automatic differentiation calls its gradient is, row by row, the norm of ∂L/∂h_t (or ∂L/∂c_t) of that example: the
total one, through the recurrence and, for c_t, through h_t.  It is 0 where a step is masked.

Hides how the gradient of a state inside Keras's loop is seen.  Our layers hand the perturbation to their sweep, which
has a program for it; Keras's own run in Keras's loop with an identity at each state.
"""

import contextlib
import functools

import keras
from keras import tree

from keras_gated.cells.meaning import meaning_of
from keras_gated.cells.recurrent import Recurrent, RecurrentCell
from keras_gated.engine.perturbation import perturbed_states, with_perturbations
from keras_gated.gradients.trajectory import takes_training, tapped
from keras_gated.keras_internals import rnn_loop
from keras_gated.patching import replaced

RNN = keras.layers.RNN
LOOPS = [owner.inner_loop for owner in (RNN, keras.layers.LSTM, keras.layers.GRU)]  # those that are understood


def states(layer):
    """The names of the states that a perturbation of this layer sees, one for each column; None where it sees none.

    ("h", "c") for LSTM, ("h",) for others; of stacked cells those of each, as "<cell.name>/h".
    """
    if not isinstance(layer, Recurrent) and type(layer).inner_loop not in LOOPS:
        return None
    cells = _cells(layer)
    if len(cells) == 1:
        return _states(cells[0])
    return tuple(f"{cell.name}/{state}" for cell in cells for state in _states(cell))


def _cells(layer):
    return getattr(layer.cell, "cells", [layer.cell])


def _states(cell):
    return meaning_of(cell).states


def perturbed(layer, attach):
    """While this context lasts, the layer runs with a perturbation.

    Args:
        layer: a keras.layers.RNN for which `states` is not None.
        attach: sequence (B, T, ...), mask (B, T) or None -> the perturbation, zeros (B, T, S) in float32 (or float64).
    """

    def inner_loop(run, sequences, initial_state, mask, training=False):
        mask = tree.flatten(mask)[0]
        perturbation = attach(sequences, mask)
        if isinstance(layer, Recurrent):
            return run(sequences, initial_state, mask, training=training, perturbation=perturbation)
        inputs = with_perturbations(sequences, perturbation, _perturbed_states(layer, initial_state))
        return _loop_of_keras(layer, inputs, initial_state, mask, training)

    return tapped(layer, inner_loop)


def _perturbed_states(layer, states):
    """Of all states those that `states` names."""
    several = len(_cells(layer)) > 1
    pairs = zip(_cells(layer), states if several else [states], strict=True)
    return [s for cell, of_cell in pairs for s in tree.flatten(of_cell)[: len(_states(cell))]]


def _loop_of_keras(layer, inputs, initial_state, mask, training):
    """What keras.layers.RNN does, of x_t and the zeros of its states."""
    options = {"training": training} if takes_training(layer.cell) else {}

    def step(inputs, states):
        x, *zeros = inputs
        rest = iter(zeros)
        with contextlib.ExitStack() as stack:
            for cell in _cells(layer):
                wrapper = functools.partial(_perturbed_call, cell, [next(rest) for _ in _states(cell)])
                stack.enter_context(replaced(cell, "call", wrapper))
            output, states = layer.cell(x, states, **options)
        return output, states if tree.is_nested(states) else [states]

    return rnn_loop(
        step,
        inputs,
        initial_state if tree.is_nested(initial_state) else [initial_state],
        go_backwards=layer.go_backwards,
        mask=mask,
        unroll=layer.unroll,
        input_length=inputs.shape[1],
        zero_output_for_mask=layer.zero_output_for_mask,
        return_all_outputs=layer.return_sequences,
    )


def _perturbed_call(cell, zeros, call, *args, **kwargs):
    """cell.call, with a zero at each state."""
    if isinstance(cell, RecurrentCell):
        return call(*args, **kwargs, perturbations=zeros)
    carry = []

    def activation(run, a):
        """An LSTM cell calls it on the candidate and then on c: there c is perturbed, before h."""
        carry.append(_perturbed(a, zeros[1]) if carry else a)
        return run(carry[-1])

    with (
        replaced(cell, "activation", activation)
        if isinstance(cell, keras.layers.LSTMCell)
        else contextlib.nullcontext()
    ):
        output, states = call(*args, **kwargs)
    nested = tree.is_nested(states)
    h, *others = states if nested else [states]
    # Where the output is the state, one identity sees what reaches it from above and from the next step.
    perturbed_h = _perturbed(h, zeros[0])
    states = [perturbed_h, *(carry[1:] or others)]
    return perturbed_h if output is h else output, states if nested else perturbed_h


def _perturbed(state, zeros):
    (state,) = perturbed_states([state], [zeros], lambda d: d)
    return state
