"""Keras's loop over time, under automatic differentiation.

Hides in what Keras's backends differ: reversal and masks are done here.
"""

from keras import ops

from keras_gated.engine.perturbation import with_perturbations
from keras_gated.keras_internals import rnn_loop


def loop(step, x, states, mask, shown, go_backwards, sequences, unroll=False, perturbation=None):
    """Runs a step through time.

    Args:
        step: x_t (B, D), states -> h, states; with a perturbation of x_t and its zeros, see `with_perturbations`.
        x: (B, T, D).
        states: the initial states.
        mask: (B, T) in the order of processing, False where the state stays as it was; or None.
        shown: likewise, False where the output is 0.
        go_backwards: read x from its end.
        sequences: whether the outputs of all times are wanted.
        unroll: one copy of the step per time step instead of a loop.
        perturbation: zeros (B, T, S) in the order of x, one for each state.

    Returns:
        The outputs, (B, T, N) or None, and the final states.
    """
    x = ops.flip(x, axis=1) if go_backwards else x
    x = x if mask is None else ops.where(mask[..., None], x, 0)  # no gradient may meet what padding holds
    if perturbation is not None:
        x = with_perturbations(x, ops.flip(perturbation, axis=1) if go_backwards else perturbation, states)
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
