"""Figures of what was measured: arrays in, a matplotlib Figure out.

Norms stand on logarithmic axes.  What those cannot show is marked, not dropped: 0 at the lower edge, inf and NaN at
the upper; a time step that no example has leaves a gap.  Lines differ in colour, which are those of Okabe and Ito,
and in dash.  `figure.savefig("name.png")` writes one; in a notebook a figure that is returned is shown.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")  # matplotlib's own exponents take longer than all the rest
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1)), (0, (8, 2)), "-")


def time_steps_over_training(profiles: Any, title: str) -> Figure:
    """‖∂L/∂h_t‖ of the time steps, upwards, in one training step after another, to the right.

    The colour is logarithmic.  Zeros, which no logarithm shows, inf and NaN and time steps that no example has are
    drawn in colours of their own, which a legend names where they occur.

    Args:
        profiles: `Profiles` of one training step at least.
        title: what is measured.

    Returns:
        The figure.
    """
    norms, (shortest, longest) = profiles.norms.T, (profiles.length.min(), profiles.length.max())
    top, unit = (longest - 1, "time step t") if shortest == longest else (1, "place in the sequence, 0 first, 1 last")
    half_row, half_step = top / (2 * len(norms)), max(0.5, np.ptp(profiles.step) / (2 * norms.shape[1]))
    place = {
        "origin": "lower",
        "aspect": "auto",
        "interpolation": "nearest",
        "extent": (profiles.step[0] - half_step, profiles.step[-1] + half_step, -half_row, top + half_row),
    }
    figure = _figure((6.4, 4))
    axes, colours = figure.add_axes((0.1, 0.19, 0.68, 0.72)), figure.add_axes((0.81, 0.19, 0.025, 0.72))
    special = {
        "0": ("black", norms == 0),
        "inf": (COLOURS[1], np.isinf(norms)),
        "no example": ("white", np.isnan(norms)),
    }
    _decades(axes, colours, norms, special, "norm of the gradient, mean over the batch", **place)
    axes.set(title=title, xlabel="training step", ylabel=unit)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


def norms_over_time(
    norms: Mapping[str, np.ndarray],
    bound: np.ndarray | None = None,
    title: str = "Gradient of each time step",
    unit: str = "time step t",
) -> Figure:
    """How the gradient travels through time, with the bound of eq. rnn-jacobian-bound as a line.

    Args:
        norms: {name: (T,)} such as {"‖∂L/∂h_t‖ of lstm": time_step_norms(...).dh}, in the order of x.
        bound: (T,), such as `norms[-1] * jacobian_bound(layer, T - 1 - t)`; or None.
        title: of the figure.
        unit: of time.

    Returns:
        The figure.
    """
    figure = _figure((7, 4.4))
    axes = figure.add_subplot()
    for i, (name, values) in enumerate(norms.items()):
        _line(axes, np.arange(len(values)), values, i, name)
    if bound is not None:
        label = r"bound $(\gamma\,\sigma_{\max})^{t-k}$"
        axes.plot(np.arange(len(bound)), _drawn(bound), color="gray", linestyle=(0, (2, 2)), label=label)
    axes.set(title=title, xlabel=unit, ylabel="norm of the gradient,\nmean over the batch")
    axes.set_xlim(-0.5, max(map(len, norms.values())) - 0.5)
    return _finished(figure, axes)


def lag_map(
    norms: np.ndarray, title: str = r"$\|\partial h_t/\partial h_k\|$", label: str = "norm, mean over the batch"
) -> Figure:
    """A (T, T) matrix over t and k: `state_jacobian_norms(...)`, or `loss_gradient_terms(...).norm`.

    Args:
        norms: (T, T), of which k > t is not drawn.
        title: of the figure.
        label: of the colours.

    Returns:
        The figure.
    """
    figure, (T, _) = _figure((6.4, 5.2)), norms.shape
    axes, colours = figure.add_axes((0.11, 0.16, 0.68, 0.75)), figure.add_axes((0.82, 0.16, 0.03, 0.75))
    past = np.tri(T, dtype=bool)
    special = {
        "0": ("black", past & (norms == 0)),
        "inf": (COLOURS[1], past & np.isinf(norms)),
        "no example": ("lightgray", past & np.isnan(norms)),
        "k > t": ("white", ~past),
    }
    _decades(axes, colours, norms, special, label, origin="upper", interpolation="nearest")
    axes.set(title=title, xlabel="from step k", ylabel="to step t")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    return figure


def gates_over_time(activity: Mapping[str, Any], title: str = "Gates") -> Figure:
    """The mean of each gate with its spread, and how many are as good as shut or open.

    Args:
        activity: {gate: `GateStatistics`}, of `gate_activity`.
        title: of the figure.

    Returns:
        The figure.
    """
    figure = _figure((7, 5.6))
    means, shares = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for i, (gate, (mean, std, low, high)) in enumerate(activity.items()):
        style, t = {"color": COLOURS[i], "linestyle": DASHES[i]}, np.arange(len(mean))
        marker = _marker(mean)
        means.plot(t, mean, label=f"{gate}: mean ± std", marker=marker, **style)
        means.fill_between(t, mean - std, mean + std, color=COLOURS[i], alpha=0.15, linewidth=0)
        shares.plot(t, 100 * high, label=f"{gate} above 0.95", marker="^", markersize=3, markevery=0.1, **style)
        shares.plot(t, 100 * low, label=f"{gate} below 0.05", marker="v", markersize=3, markevery=0.1, **style)
    means.set(title=title, ylabel="gate, over units and batch", ylim=(-0.02, 1.02))
    shares.set(xlabel="time step", ylabel="share of units (%)", xlim=(-0.5, len(mean) - 0.5), ylim=(-3, 103))
    shares.xaxis.get_major_locator().set_params(integer=True)
    for axes in (means, shares):
        axes.grid(alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.set_layout_engine("constrained")
    return figure


def norms_over_training(records: Any, title: str = "Gradient norm of every training step") -> Figure:
    """Raw and clipped norm of the whole gradient.

    Args:
        records: `GradientNorms.records`, or anything with step, raw and clipped, (S,) each.
        title: of the figure.

    Returns:
        The figure.
    """
    figure = _figure((7, 4.2))
    axes = figure.add_subplot()
    for i, (name, values) in enumerate((("raw", records.raw), ("clipped", records.clipped))):
        _line(axes, records.step, values, i, name, nan="NaN")
    axes.set(title=title, xlabel="training step", ylabel="norm of the gradient")
    return _finished(figure, axes)


def png(figure: Figure) -> tuple[bytes, tuple[int, int]]:
    """-> the bytes of a PNG, and its (width, height) in pixels."""
    written = io.BytesIO()
    figure.savefig(written, format="png", pil_kwargs={"compress_level": 1})
    return written.getvalue(), figure.canvas.get_width_height()


def _figure(size):
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Figures need matplotlib, which is not installed: pip install 'keras_gated[plots]'."
        ) from error
    return Figure(figsize=size, dpi=100)


def _decades(axes, colours, values, special, label, **place):
    """An image with logarithmic colours; special is {name: (colour, where)}, named by a legend where it occurs."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, to_rgba
    from matplotlib.patches import Patch

    shown = np.ma.masked_where(~(np.isfinite(values) & (values > 0)), values)
    low, high = (np.floor(np.log10(shown.min())), np.ceil(np.log10(shown.max()))) if shown.count() else (0, 0)
    scale = ScalarMappable(LogNorm(10.0**low, 10.0 ** max(high, low + 1)), "viridis")  # whole decades
    pixels = scale.to_rgba(shown)
    special = {name: (colour, where) for name, (colour, where) in special.items() if where.any()}
    for colour, where in special.values():
        pixels[where] = to_rgba(colour)
    axes.imshow(pixels, **place)
    power = lambda value, _: "10" + f"{np.log10(value):.0f}".translate(RAISED)  # noqa: E731
    axes.figure.colorbar(scale, cax=colours, label=label, format=power).minorticks_off()
    if special:
        patches = [Patch(facecolor=colour, edgecolor="gray", label=name) for name, (colour, _) in special.items()]
        axes.figure.legend(handles=patches, loc="lower right", ncols=len(patches), frameon=False)


def _line(axes, x, values, i, name, nan=None):
    """Line i of a logarithmic plot; nan is what NaN is called, where it is more than a gap."""
    values = np.asarray(values, np.float64)
    shown = _drawn(values)
    axes.plot(x, shown, color=COLOURS[i], linestyle=DASHES[i], marker=_marker(shown), label=name)
    edge = axes.get_xaxis_transform()
    marks = {"0": ("v", 0, values == 0), "inf": ("^", 1, np.isinf(values)), nan: ("x", 1, np.isnan(values))}
    for what, (marker, height, where) in marks.items():
        if what and where.any():
            style = {"color": COLOURS[i], "marker": marker, "linestyle": "none", "clip_on": False, "zorder": 3}
            axes.plot(x[where], np.full(where.sum(), height), transform=edge, label=f"{name}: {what}", **style)


def _drawn(values):
    values = np.asarray(values, np.float64)
    return np.where(np.isfinite(values) & (values > 0), values, np.nan)


def _marker(values):
    """Points that have no neighbour would be invisible as a line."""
    there = np.isfinite(np.pad(values, 1, constant_values=np.nan))
    alone = there[1:-1] & ~there[:-2] & ~there[2:]
    return "o" if alone.any() else None


def _finished(figure, axes):
    if not np.isfinite(axes.dataLim.minposy):  # nothing but marks, to which matplotlib gives no logarithmic axis
        axes.set_ylim(0.1, 10)
    axes.set_yscale("log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.margins(x=0.01)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.set_layout_engine("constrained")
    return figure
