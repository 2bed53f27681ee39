"""Tables and a figure of what was measured."""

import itertools
import os
import pathlib
import platform
import statistics
import time
from importlib.metadata import version
from typing import NamedTuple

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from rich import box
from rich import table as rich_table

MODES = {"train": "training step", "infer": "inference"}
KERAS = ("keras", "keras, jit", "keras, unroll")
TORCH = ("torch", "torch, oneDNN")
PRODUCTS = ("products", "products, torch")
COLORS = {"SimpleRNN": "#009e73", "LSTM": "#d55e00", "GRU": "#0072b2", "GRU after": "#56b4e9"}
NONE = "–"


class Table(NamedTuple):
    title: str
    columns: tuple
    rows: list
    notes: str = ""


def machine():
    """Where and with what it was measured."""
    packages = ("tensorflow", "keras", "torch", "numpy", "keras_gated")
    return {
        "name": platform.node(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor():
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    flags = next((line for line in lines if line.startswith("flags")), "")
    return f"{model}{', AVX-512' if 'avx512f' in flags else ''}"


# Numbers.


def ms(measured, name):
    return statistics.median(measured[name]["ms"])


def ratio(measured, name, ours="ours"):
    """How many times faster ours is: the median of the ratios of all rounds, each of two neighbours in time."""
    pairs = zip(measured[name]["ms"], measured[ours]["ms"], strict=True)
    return statistics.median(a / b for a, b in pairs)


def fastest(measured, names):
    """The fastest of these contenders, or None if none was timed."""
    timed = [name for name in names if "ms" in measured.get(name, {})]
    return min(timed, key=lambda name: ms(measured, name), default=None)


def compared(measured, names):
    """(ratio to the fastest of them, its name), or (None, None)."""
    name = fastest(measured, names)
    return (None, None) if name is None or "ms" not in measured["ours"] else (ratio(measured, name), name)


def in_jit(measured):
    timed = all("ms" in measured.get(name, {}) for name in ("ours, jit", "keras, jit"))
    return ratio(measured, "keras, jit", "ours, jit") if timed else None


def geometric_mean(numbers):
    numbers = [n for n in numbers if n is not None]
    return statistics.geometric_mean(numbers) if numbers else None


def _of(results, part):
    return [r for r in results if r["part"] == part]


def _shape(arguments):
    return ",".join(map(str, arguments["shape"]))


def _number(n, digits=3):
    if n is None:
        return NONE
    return f"{n:.{max(0, digits - len(str(int(abs(n)))))}f}" if n >= 1 else f"{n:.2f}"


def _kind(name):
    """Which of Keras's modes, or whether oneDNN was on."""
    return NONE if name is None else {"keras": "default", "torch": "plain"}.get(name, name.split(", ")[-1])


# Tables.


def tables(results):
    made = [_grid(results, mode) for mode in MODES]
    made += [_reasons(results), _masked(results), _lengths(results), _first(results), _memory(results)]
    made += [_growth(results, axis) for axis in "TN"] + [_threads(results)]
    return [table for table in made if table.rows]


def _grid(results, mode):
    rows, means = [], []
    cells = itertools.groupby(_by_cell(_of(results, "grid")), key=lambda r: r["arguments"]["cell"])
    for cell, of_cell in cells:
        ratios = []
        for r in of_cell:
            measured = r["result"][mode]
            keras, torch, products = (compared(measured, names) for names in (KERAS, TORCH, PRODUCTS))
            jit = in_jit(measured)
            ratios.append((keras[0], torch[0], products[0], jit))
            numbers = f"{_number(keras[0])} {_kind(keras[1])}", _with_kind(torch), _percent(products[0]), _number(jit)
            rows.append((cell, _shape(r["arguments"]), _number(ms(measured, "ours")), *numbers))
        keras, torch, products, jit = map(geometric_mean, zip(*ratios, strict=True))
        means.append((cell, "mean", "", _number(keras), _number(torch), _percent(products), _number(jit)))
    columns = ("cell", "B,T,D,N", "ours,\nms", "Keras\n/ ours", "torch\n/ ours", "products\n/ ours", "both\nin jit")
    return Table(
        f"Time of a {MODES[mode]}" if mode == "train" else "Time of inference",
        columns,
        rows + means,
        "How many times faster ours is than the fastest mode of keras.layers (default, jit_compile, unroll) and of "
        "torch.nn (with oneDNN or plain); what part of our time the bare matrix products need; and ours against Keras, "
        "both inside jit_compile=True. GRU after: reset gate after the product, the only form that PyTorch has.",
    )


def _by_cell(results):
    order = list(COLORS)
    return sorted(results, key=lambda r: order.index(r["arguments"]["cell"]))


def _with_kind(pair):
    return NONE if pair[0] is None else f"{_number(pair[0])} {_kind(pair[1])}"


def _percent(share):
    return NONE if share is None else f"{share:.0%}"


def _reasons(results):
    rows = []
    for r in _of(results, "grid"):
        mode = next(iter(r["result"].values()))
        rows += [
            (r["arguments"]["cell"], _shape(r["arguments"]), n, m["reason"]) for n, m in mode.items() if "reason" in m
        ]
    return Table("Not timed", ("cell", "B,T,D,N", "contender", "reason"), rows)


def _masked(results):
    rows = []
    for r in _of(results, "masked"):
        measured, arguments = r["result"], r["arguments"]
        ratios = [_number(ratio(measured, name)) for name in ("keras", "keras, jit")]
        rows.append((arguments["cell"], _shape(arguments), _number(ms(measured, "ours")), *ratios))
    return Table(
        "A masked epoch of model.fit",
        ("cell", "B,T,D,N", "ours, ms", "Keras / ours", "Keras in jit / ours"),
        rows,
        "Random lengths from T/10 to T, padded and masked.",
    )


def _lengths(results):
    rows = []
    for cell, of_cell in itertools.groupby(_by_cell(_of(results, "lengths")), key=lambda r: r["arguments"]["cell"]):
        by = {r["arguments"]["contender"]: r["result"] for r in of_cell}
        for name, result in by.items():
            count = result["compilations"]
            rows.append(
                (
                    cell,
                    name,
                    _number(result["first_s"]),
                    _number(result["second_s"]),
                    NONE if count is None else str(count),
                )
            )
    columns = ("cell", "layer", "first epoch, s", "second epoch, s", "compilations")
    return Table("An epoch with 60 lengths from 20 to 200, and a short last batch", columns, rows)


def _first(results):
    rows, key = [], lambda r: (r["arguments"]["cell"], r["arguments"]["contender"])
    for cell in COLORS:
        of_cell = [r for r in _of(results, "first") if r["arguments"]["cell"] == cell]
        names = dict.fromkeys(r["arguments"]["contender"] for r in of_cell)
        seconds = {n: statistics.median(r["result"]["first_s"] for r in of_cell if key(r)[1] == n) for n in names}
        rows += [(cell, name, _number(s), _number(s / seconds["ours"])) for name, s in seconds.items()]
    columns = ("cell", "layer", "first training step, s", "/ ours")
    return Table("First call: tracing and compiling", columns, rows, "Median of fresh processes.")


def _memory(results):
    rows = []
    for r in _by_cell(_of(results, "memory")):
        arguments, result = r["arguments"], r["result"]
        numbers = _number(result["with_first_MiB"], 4), _number(result["steady_MiB"], 4)
        rows.append((arguments["cell"], arguments["contender"], _shape(arguments), *numbers))
    columns = ("cell", "layer", "B,T,D,N", "with the first call, MiB", "later steps, MiB")
    return Table("Peak memory of a training step, beyond data and weights", columns, rows)


def growth(results, axis, names):
    """{cell: [(T or N, ms of the fastest of these)]}"""
    place, fixed = {"T": (1, 3), "N": (3, 1)}[axis]
    curves = {}
    for r in _by_cell(_of(results, "growth")):
        shape, measured = r["arguments"]["shape"], r["result"]["train"]
        name = fastest(measured, names)
        if shape[fixed] == {"T": 32, "N": 50}[axis] and name:
            curves.setdefault(r["arguments"]["cell"], []).append((shape[place], ms(measured, name)))
    return {cell: sorted(points) for cell, points in curves.items()}


def _growth(results, axis):
    rows = []
    all_curves = {name: growth(results, axis, names) for name, names in GROWING.items()}
    for cell in all_curves["ours"]:
        for name, curves in all_curves.items():
            points = curves.get(cell, [])
            rows += [
                (
                    cell,
                    name,
                    *(_number(m / (size if axis == "T" else 1) * (1e3 if axis == "T" else 1)) for size, m in points),
                )
            ]
    sizes = sorted({size for curve in all_curves["ours"].values() for size, _ in curve})
    unit = "µs per time step" if axis == "T" else "ms"
    columns = ("cell", "layer", *(f"{axis} = {size}" for size in sizes))
    where = "B = 16, D = 8, N = 32" if axis == "T" else "B = 16, T = 50, D = 32"
    return Table(f"Training step against {axis}, {unit} ({where})", columns, rows)


GROWING = {"ours": ("ours",), "keras": KERAS, "torch": TORCH}


def _threads(results):
    rows = []
    for r in _by_cell(_of(results, "threads")):
        measured = r["result"]["train"]
        keras = compared(measured, KERAS)
        one_lane = _number(ratio(measured, "ours, jit")) if "ms" in measured["ours, jit"] else NONE
        numbers = _number(ms(measured, "ours")), one_lane, _with_kind(keras), _with_kind(compared(measured, TORCH))
        rows.append((r["arguments"]["cell"], r["setting"], _shape(r["arguments"]), *numbers))
    columns = ("cell", "threads", "B,T,D,N", "ours, ms", "one lane / ours", "Keras / ours", "torch / ours")
    return Table("Training step on one thread", columns, rows, "One lane: ours inside jit_compile=True.")


def markdown(of_machine, made):
    lines = [
        "# How fast the layers are",
        "",
        f"{of_machine['date']}, {of_machine['processor']}, {of_machine['cores']} cores, "
        + ", ".join(f"{p} {of_machine[p]}" for p in ("tensorflow", "keras", "torch", "python"))
        + ". Medians; every contender computed the same outputs and gradients (float32, 1e-4).",
    ]
    for table in made:
        aligned = [":---" if not _numeric(table, i) else "---:" for i in range(len(table.columns))]
        columns = [column.replace("\n", " ") for column in table.columns]
        lines += ["", f"## {table.title}", "", *([table.notes, ""] if table.notes else [])]
        lines += [f"| {' | '.join(row)} |" for row in (columns, aligned, *table.rows)]
    return "\n".join(lines) + "\n"


def on_terminal(table):
    shown = rich_table.Table(title=table.title, caption=table.notes or None, box=box.SIMPLE_HEAD, collapse_padding=True)
    for i, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if _numeric(table, i) else "left", no_wrap=True)
    for row in table.rows:
        shown.add_row(*row)
    return shown


def _numeric(table, i):
    return all(row[i][:1].isdigit() or row[i] in ("", NONE) for row in table.rows) and "B,T" not in table.columns[i]


# The figure.


def draw(results, path):
    figure = plt.figure(figsize=(15, 13), layout="constrained")
    panels = figure.subplot_mosaic([["train", "infer"], ["T", "N"]], height_ratios=[2, 1])
    for mode in MODES:
        _draw_ratios(panels[mode], _by_cell(_of(results, "grid")), mode)
    for axis in "TN":
        _draw_growth(panels[axis], results, axis)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_ratios(axes, of_grid, mode):
    labels = []
    for y, r in enumerate(of_grid):
        measured, cell = r["result"][mode], r["arguments"]["cell"]
        for names, marker, filled in ((KERAS, "o", True), (TORCH, "^", False)):
            value, _ = compared(measured, names)
            if value is not None:
                color = COLORS[cell]
                axes.plot(value, y, marker, color=color, markerfacecolor=color if filled else "none", markersize=8)
        labels.append(f"{cell}  {_shape(r['arguments'])}")
    axes.axvline(1, color="0.3", linewidth=1)
    axes.set(xscale="log", xlabel="times faster than the other (right of 1: ours is faster)", title=MODES[mode])
    axes.set_yticks(range(len(labels)), labels if mode == "train" else [""] * len(labels))
    axes.invert_yaxis()
    axes.grid(axis="both", color="0.9")
    axes.plot([], [], "o", color="0.3", label="fastest mode of keras.layers")
    axes.plot([], [], "^", color="0.3", markerfacecolor="none", label="torch.nn")
    axes.legend(loc="best")


def _draw_growth(axes, results, axis):
    for (name, names), style in zip(GROWING.items(), ("o-", "s--", "^:"), strict=True):
        for cell, points in growth(results, axis, names).items():
            axes.plot(*zip(*points, strict=True), style, color=COLORS[cell], label=f"{cell}, {name}", markersize=4)
    axes.set(xscale="log", yscale="log", ylabel="training step, ms")
    axes.set_xlabel("time steps T (B = 16, D = 8, N = 32)" if axis == "T" else "units N (B = 16, T = 50, D = 32)")
    axes.grid(color="0.9")
    axes.legend(fontsize=8, ncols=2)
