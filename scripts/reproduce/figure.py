"""The figure: what each claim rests on, beside what was published."""

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import StrMethodFormatter
from reproduce import adding, copying, long_lag, temporal_order

from keras_gated import tasks

COLORS = {
    "SimpleRNN": "#009e73",
    "LSTM": "#d55e00",
    "GRU": "#0072b2",
    "Bidirectional": "#0072b2",
    "LSTM, f = 1": "0.45",
    f"GRU, Adam {copying.FASTER}": "#56b4e9",
    "clipped": "#d55e00",
    "not clipped": "0.45",
}
PUBLISHED = {"color": "0.2", "linestyle": ":", "linewidth": 1.2}


def draw(rows, path):
    """rows as of report.rows.  A claim without runs has no panel."""
    panels = {
        "Long lag": _sequences,
        "Temporal order": _learning,
        "Forget bias": _biases,
        "Clipping": _clipping,
        "Adding": _adding,
        "Copying": _copying,
        "Counting": _counting,
        "Embedded Reber grammar": _strings,
        "Continual Reber grammar": _shares,
        "Next bit": _shares,
        "Tagging": _tagging,
    }
    drawn = [row for row in rows if row["runs"]]
    if not drawn:
        return
    columns = min(4, len(drawn))
    height = -(-len(drawn) // columns)
    figure, axes = plt.subplots(
        height, columns, figsize=(3.9 * columns, 3.1 * height), layout="constrained", squeeze=False
    )
    for row, of_row in zip(drawn, axes.flat, strict=False):
        panels[row["name"]](of_row, row["runs"])
        signs = {"holds": "✓", "does not hold": "✗"}
        of_row.set_title(f"{row['name']}  {signs.get(row['verdict'], '…')}", fontsize=10)
        of_row.grid(color="0.93")
        of_row.set_axisbelow(True)
        of_row.tick_params(labelsize=8)
        of_row.xaxis.label.set_size(8)
        of_row.yaxis.label.set_size(8)
    for empty in axes.flat[len(drawn) :]:
        empty.axis("off")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _of(runs, **wanted):
    return [run for run in runs if all(run["setting"].get(key) == value for key, value in wanted.items())]


def _cells(runs):
    return list(dict.fromkeys(run["setting"]["cell"] for run in runs))


def _curves(axes, runs, labels, column):
    """One line for each run: loss (1) or share right (2) over thousands of sequences."""
    for run, label in zip(runs, labels, strict=True):
        points = [(point[0] / 1000, point[column]) for point in run["result"]["curve"] if point[column] is not None]
        axes.plot(*zip(*points, strict=True), color=COLORS[label], linewidth=1, alpha=0.8)
    for label in dict.fromkeys(labels):
        axes.plot([], [], color=COLORS[label], label=label)
    axes.legend(fontsize=7, frameon=False)
    axes.set_xlabel("thousand sequences")


def _dots(axes, groups, label=""):
    """A column of dots for each name, and its median."""
    for place, (name, values) in enumerate(groups.items()):
        color = COLORS.get(name, "#d55e00")
        axes.plot(
            [place + 0.06 * (i - (len(values) - 1) / 2) for i in range(len(values))],
            values,
            "o",
            color=color,
            markersize=4,
        )
        axes.plot([place - 0.28, place + 0.28], [sorted(values)[len(values) // 2]] * 2, color=color)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_ylabel(label)


def _sequences(axes, runs):
    for place, (lag, published) in enumerate(long_lag.PUBLISHED.items()):
        solved = [run["result"]["solved"] for run in _of(runs, cell="LSTM", lag=lag)]
        axes.plot([place] * len(solved), [n or float("nan") for n in solved], "o", color=COLORS["LSTM"], markersize=4)
        axes.plot([place - 0.3, place + 0.3], [published] * 2, **PUBLISHED)
    axes.plot([], [], label="published", **PUBLISHED)
    axes.plot([], [], "o", color=COLORS["LSTM"], markersize=4, label="LSTM")
    axes.legend(fontsize=7, frameon=False)
    axes.set_xticks(range(len(long_lag.PUBLISHED)), [f"q = {lag}" for lag in long_lag.PUBLISHED])
    axes.set_ylabel("sequences until solved")
    axes.set_ylim(0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _learning(axes, runs):
    _curves(axes, runs, [run["setting"]["cell"] for run in runs], 2)
    axes.axvline(temporal_order.PUBLISHED / 1000, **PUBLISHED)
    axes.set_ylabel("share right; dotted: published")


def _biases(axes, runs):
    biases = sorted({run["setting"]["biases"]["f"] for run in runs})
    limit = max(run["setting"]["limit"] for run in runs) / temporal_order.LSTM["batch"]
    updates = {}
    for bias in biases:
        solved = [run["result"]["solved"] for run in runs if run["setting"]["biases"]["f"] == bias]
        updates[f"{bias:g}"] = [limit if n is None else n / temporal_order.LSTM["batch"] for n in solved]
    _dots(axes, updates, "updates until solved")
    axes.axhline(limit, **PUBLISHED)
    axes.set_xlabel("forget bias; dotted: not solved until then")
    axes.set_ylim(0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _clipping(axes, runs):
    _curves(axes, runs, ["clipped" if run["setting"]["max_norm"] else "not clipped" for run in runs], 2)
    axes.set_ylabel("share right")


def _adding(axes, runs):
    _curves(axes, runs, _labels(runs), 1)
    axes.axhline(tasks.adding_baseline(adding.LENGTH), **PUBLISHED)
    axes.set_yscale("log")
    axes.set_ylabel("squared error; dotted: baseline")


def _copying(axes, runs):
    rates = [run["setting"]["rate"] for run in runs]
    faster = [f", Adam {rate}" if rate == copying.FASTER else "" for rate in rates]
    _curves(axes, runs, [cell + rate for cell, rate in zip(_labels(runs), faster, strict=True)], 1)
    axes.axhline(tasks.copy_memory_baseline(copying.LENGTH), **PUBLISHED)
    axes.set_ylim(0, 0.5)
    axes.set_ylabel("cross-entropy; dotted: no memory")


def _labels(runs):
    return [run["setting"]["cell"] for run in runs]


def _counting(axes, runs):
    _dots(axes, {cell: [run["result"]["first_failing"] for run in _of(runs, cell=cell)] for cell in _cells(runs)})
    axes.axhline(145.9, **PUBLISHED)
    axes.set_ylabel("first n that fails\n(dotted: published mean, LSTM)")
    axes.set_ylim(0)


def _strings(axes, runs):
    _curves(axes, runs, _labels(runs), 2)
    axes.set_ylabel("share of strings right")


def _shares(axes, runs):
    _dots(axes, {cell: [run["result"]["accuracy"] for run in _of(runs, cell=cell)] for cell in _cells(runs)})
    axes.axhline(0.5, **PUBLISHED)
    axes.set_ylim(0.4, 1.03)
    axes.set_ylabel("share right; dotted: chance")


def _tagging(axes, runs):
    _dots(axes, {cell: [run["result"]["accuracy"] for run in _of(runs, cell=cell)] for cell in _cells(runs)})
    axes.axhline(runs[0]["result"]["baseline"], **PUBLISHED)
    axes.set_ylabel("share right; dotted: baseline")
