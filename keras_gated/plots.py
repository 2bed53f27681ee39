"""Figures of what was measured."""

import io

import numpy as np


def time_steps_over_training(profiles, title):
    """‖∂L/∂h_t‖ of the time steps, upwards, in one training step after another, to the right.

    The colour is logarithmic.  Zeros, which no logarithm shows, inf and NaN and time steps that no example has are
    drawn in colours of their own, which a legend names where they occur.

    Args:
        profiles: `Profiles` of one training step at least.
        title: what is measured.

    Returns:
        The figure.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize, to_rgba
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    norms, (shortest, longest) = profiles.norms.T, (profiles.length.min(), profiles.length.max())
    top, unit = (longest - 1, "time step t") if shortest == longest else (1, "place in the sequence, 0 first, 1 last")
    half_row, half_step = top / (2 * len(norms)), max(0.5, np.ptp(profiles.step) / (2 * norms.shape[1]))
    place = {
        "origin": "lower",
        "aspect": "auto",
        "interpolation": "nearest",
        "extent": (profiles.step[0] - half_step, profiles.step[-1] + half_step, -half_row, top + half_row),
    }
    figure = Figure(figsize=(6.4, 4), dpi=100)
    axes, colours = figure.add_axes((0.1, 0.19, 0.68, 0.72)), figure.add_axes((0.81, 0.19, 0.025, 0.72))
    with np.errstate(divide="ignore", invalid="ignore"):
        decades = np.where(np.isfinite(norms) & (norms > 0), np.log10(norms), np.nan)
    decades = np.ma.masked_invalid(decades)
    low, high = (np.floor(decades.min()), np.ceil(decades.max())) if decades.count() else (0, 0)
    scale = ScalarMappable(Normalize(low, max(high, low + 1)), cmap="viridis")
    pixels = scale.to_rgba(decades)
    special = {"0": ("black", norms == 0), "inf": ("red", np.isinf(norms)), "no example": ("white", np.isnan(norms))}
    special = {name: (colour, where) for name, (colour, where) in special.items() if where.any()}
    for colour, where in special.values():
        pixels[where] = to_rgba(colour)
    axes.imshow(pixels, **place)
    bar = figure.colorbar(scale, cax=colours, label="norm of the gradient, mean over the batch")
    bar.ax.yaxis.get_major_locator().set_params(integer=True)
    bar.ax.yaxis.set_major_formatter(lambda decade, _: f"$10^{{{decade:g}}}$")
    if special:
        patches = [Patch(facecolor=colour, edgecolor="gray", label=name) for name, (colour, _) in special.items()]
        figure.legend(handles=patches, loc="lower right", ncols=len(patches), frameon=False)
    axes.set(title=title, xlabel="training step", ylabel=unit)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


def png(figure):
    """-> the bytes of a PNG, and its (width, height) in pixels."""
    written = io.BytesIO()
    figure.savefig(written, format="png")
    return written.getvalue(), figure.canvas.get_width_height()
