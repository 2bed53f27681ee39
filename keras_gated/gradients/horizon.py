"""How many steps before the loss a gradient has faded: the horizon of norms that are given time step by time step."""

import numpy as np

FADED = 0.01  # of the gradient at the loss


def horizon(norms, times, backwards=False):
    """How many steps before the loss the gradient has faded below 1 % of what it is there.

    "At the loss" is where the layer ends, or the last step before at which a gradient arrives.

    Args:
        norms: (..., R) ‖∂L/∂h_t‖, NaN where there is nothing.
        times: (..., R) ascending, the t of each.
        backwards: whether the layer goes from the last t to the first.

    Returns:
        (...,) the lag in steps; where it fades nowhere, how many steps there are before the loss; NaN where no
        gradient arrives at all, or the one at the loss is not finite.
    """
    if not backwards:  # from the loss on
        norms, times = norms[..., ::-1], times[..., ::-1]
    arriving = norms > 0
    start = np.argmax(arriving, axis=-1)
    reference = at(norms, start)
    after = np.arange(norms.shape[-1]) >= start[..., None]
    faded = after & (norms < FADED * reference[..., None])
    end = np.where(faded.any(axis=-1), np.argmax(faded, axis=-1), last(after & ~np.isnan(norms)))
    lag = np.abs(at(times, end) - at(times, start))
    return np.where(arriving.any(axis=-1) & np.isfinite(reference), lag, np.nan)


def at(values, index):
    return np.take_along_axis(values, index[..., None], axis=-1)[..., 0]


def last(mask):
    """The index of the last True."""
    return mask.shape[-1] - 1 - np.argmax(mask[..., ::-1], axis=-1)
