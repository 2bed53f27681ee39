"""The figure: ratios over the grid, and how the time of a training step grows."""

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from benchmark.comparison import GROWING, KERAS, TORCH, against_fastest, growth, of_part
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

COLORS = {"SimpleRNN": "#009e73", "LSTM": "#d55e00", "GRU": "#0072b2", "GRU after": "#cc79a7"}
RIVALS = {"keras.layers, its fastest mode": (KERAS, "o"), "torch.nn": (TORCH, "^")}
STYLES = {"ours": "o-", "Keras": "s--", "torch": "^:"}


def draw(results, path):
    rows = [mode for mode in (["train", "infer"], ["T", "N"]) if _has(results, mode[0])]
    if not rows:
        return
    height = {"train": 1.5 + 0.27 * len(of_part(results, "grid")), "T": 4.5}
    heights = [height[row[0]] for row in rows]
    figure = plt.figure(figsize=(13, sum(heights)), layout="constrained")
    panels = figure.subplot_mosaic(rows, height_ratios=heights)
    for name, axes in panels.items():
        if name in "TN":
            _draw_growth(axes, results, name)
        else:
            _draw_ratios(axes, of_part(results, "grid"), name)
    if "train" in panels:
        figure.legend(handles=_rivals(), loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _has(results, panel):
    return bool(of_part(results, "growth" if panel == "T" else "grid"))


def _draw_ratios(axes, of_grid, mode):
    labels = []
    for y, r in enumerate(of_grid):
        cell, shape = r["arguments"]["cell"], ", ".join(map(str, r["arguments"]["shape"]))
        for names, marker in RIVALS.values():
            value, _ = against_fastest(r["result"][mode], names)
            if value is not None:
                axes.plot(
                    value, y, marker, color=COLORS[cell], markerfacecolor=_filled(marker, COLORS[cell]), markersize=8
                )
        labels.append(f"{cell}   {shape}")
    axes.axvline(1, color="0.3", linewidth=1)
    axes.set(xscale="log", title={"train": "Training step", "infer": "Inference"}[mode])
    axes.set_xlabel("time of the other / ours   (right of 1: ours is faster)")
    _plain_numbers(axes.xaxis)
    axes.set_yticks(range(len(labels)), labels if mode == "train" else [""] * len(labels))
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)


def _rivals():
    return [
        Line2D([], [], linestyle="", marker=marker, color="0.3", markerfacecolor=_filled(marker, "0.3"), label=name)
        for name, (_, marker) in RIVALS.items()
    ]


def _filled(marker, color):
    return color if marker == "o" else "none"


def _draw_growth(axes, results, axis):
    for name, names in GROWING.items():
        for cell, points in growth(results, axis, names).items():
            axes.plot(*zip(*points, strict=True), STYLES[name], color=COLORS[cell], markersize=4)
    axes.set(xscale="log", yscale="log", ylabel="training step, ms")
    axes.set_title("Against time steps" if axis == "T" else "Against units")
    axes.set_xlabel("T   (B, D, N = 16, 8, 32)" if axis == "T" else "N   (B, T, D = 16, 50, 32)")
    _plain_numbers(axes.yaxis)
    _plain_numbers(axes.xaxis)
    cells = growth(results, axis, GROWING["ours"])
    sizes = sorted({size for points in cells.values() for size, _ in points})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.grid(color="0.92")
    lines = [Line2D([], [], color=COLORS[cell], label=cell) for cell in cells]
    lines += [Line2D([], [], linestyle=style[1:], marker=style[0], color="0.3", label=n) for n, style in STYLES.items()]
    axes.legend(handles=lines, ncols=2, loc="upper left")


def _plain_numbers(axis):
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
