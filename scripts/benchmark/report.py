"""Tables of what was measured, for the terminal and in Markdown."""

import itertools
import os
import pathlib
import platform
import statistics
import time
from importlib.metadata import version
from typing import NamedTuple

from benchmark import comparison
from benchmark.comparison import KERAS, PRODUCTS, TORCH, against_fastest, geometric_mean, ms, of_part, ratio
from benchmark.plan import WATCHED_STEPS, WIDTH
from rich import box
from rich import table as rich_table

NONE = "–"
EXPLAINED = (
    "Ratios above 1: ours is faster. Keras: its fastest mode (default, jit_compile or unroll). torch: with oneDNN or "
    "plain. products: the part of our time that the bare matrix products need. both in jit: Keras / ours, each inside "
    "jit_compile=True. GRU after: reset gate after the product, the only GRU of PyTorch. "
)


class Table(NamedTuple):
    title: str
    columns: tuple  # "\n" where the terminal breaks a line
    groups: list  # of rows, of texts
    notes: str = ""


def machine():
    """Where and with what it was measured."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict(line.replace("\t", "").split(":", 1) for line in lines if ":" in line)
    packages = ("tensorflow", "keras", "torch", "numpy", "keras_gated")
    return {
        "name": platform.node(),
        "processor": fields.get("model name", platform.machine()).strip(),
        "family_model": f"{fields.get('cpu family', '').strip()}/{fields.get('model', '').strip()}",
        "avx512": "avx512f" in fields.get("flags", "").split(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "date": time.strftime("%Y-%m-%d"),
    }


def tables(results):
    made = [
        _grid(results, "train", "Time of a training step"),
        _grid(results, "infer", "Time of inference"),
        _not_timed(results),
        _masked(results),
        _lengths(results),
        _first(results),
        _memory(results),
        _growth(results, "T"),
        _growth(results, "N"),
        _threads(results),
        _callbacks(results),
        _sequences(results),
    ]
    return [table for table in made if table.groups]


def _grid(results, mode, title):
    groups, means, spreads = [], [], []
    for cell, of_cell in _by_cell(of_part(results, "grid")):
        rows, all_ratios = [], []
        for r in of_cell:
            measured = r["result"][mode]
            best = [against_fastest(measured, names) for names in (KERAS, TORCH, PRODUCTS)]
            ratios = [of_best for of_best, _ in best] + [ratio(measured, "keras, jit", "ours, jit")]
            texts = [_with_kind(*best[0]), _with_kind(*best[1]), _percent(ratios[2]), _number(ratios[3])]
            rows.append((cell if not rows else "", _shape(r), _number(ms(measured, "ours")), *texts))
            all_ratios.append(ratios)
            spreads.append(comparison.spread(measured))
        keras, torch, products, jit = map(geometric_mean, zip(*all_ratios, strict=True))
        means.append((cell, "geometric mean", "", _number(keras), _number(torch), _percent(products), _number(jit)))
        groups.append(rows)
    columns = ("cell", "B,T,D,N", "ours,\nms", "Keras\n/ ours", "torch\n/ ours", "products\n/ ours", "both\nin jit")
    notes = EXPLAINED if mode == "train" else ""
    if spreads:
        notes += (
            f"The middle half of our timings spread by {statistics.median(spreads):.0%}, {max(spreads):.0%} at most."
        )
    groups = [*groups, means] if len(spreads) > len(groups) else groups
    return Table(title, columns, groups, notes)


def _not_timed(results):
    rows = []
    for r in of_part(results, "grid"):
        for name, outcome in next(iter(r["result"].values())).items():
            if "reason" in outcome:
                rows.append((r["arguments"]["cell"], _shape(r), name, outcome["reason"]))
    return Table("Not timed", ("cell", "B,T,D,N", "contender", "reason"), [rows] if rows else [])


def _masked(results):
    rows = []
    for r in of_part(results, "masked"):
        ratios = [_number(ratio(r["result"], name)) for name in ("keras", "keras, jit")]
        rows.append((r["arguments"]["cell"], _shape(r), _number(ms(r["result"], "ours")), *ratios))
    columns = ("cell", "B,T,D,N", "ours,\nms", "Keras\n/ ours", "Keras in jit\n/ ours")
    notes = "Random lengths from T/10 to T, padded to T; the loss of the first epoch is the same for all."
    return Table("A masked epoch of model.fit", columns, [rows] if rows else [], notes)


def _lengths(results):
    groups = []
    for cell, of_cell in _by_cell(of_part(results, "lengths")):
        programs = {r["arguments"]["contender"]: r["result"]["programs"] for r in of_cell}
        rows = [
            (cell, name, _number(first), _number(second), f"{loss:.5f}", str(programs[name] or NONE))
            for (_, name), (first, second, loss) in _medians(of_cell, "first_s", "second_s", "loss").items()
        ]
        groups.append(rows)
    columns = ("cell", "layer", "first\nepoch, s", "second\nepoch, s", "loss", "programs\nmade")
    title = "An epoch of 60 lengths from 20 to 200 and a short last batch"
    return Table(title, columns, groups, "Medians of fresh processes.")


def _first(results):
    groups = []
    for cell, of_cell in _by_cell(of_part(results, "first")):
        medians = _medians(of_cell, "first_s")
        rows = [
            (cell, name, shape, _number(s), _number(_over(s, medians.get((shape, "ours"), [None])[0])))
            for (shape, name), (s,) in medians.items()
        ]
        groups.append(rows)
    columns = ("cell", "layer", "B,T,D,N", "first step, s", "/ ours")
    return Table("First training step: tracing and compiling", columns, groups, "Medians of fresh processes.")


def _memory(results):
    groups = []
    for cell, of_cell in _by_cell(of_part(results, "memory")):
        medians = _medians(of_cell, "left_MiB", "with_first_MiB", "steady_MiB")
        rows = [
            (cell, name, shape, *map(_number, MiB), _number(_over(MiB[-1], medians.get((shape, "ours"), [None])[-1])))
            for (shape, name), MiB in medians.items()
        ]
        groups.append(rows)
    columns = (
        "cell",
        "layer",
        "B,T,D,N",
        "left by a\ntiny one, MiB",
        "first step,\nMiB",
        "later steps,\nMiB",
        "later\n/ ours",
    )
    return Table(
        "Peak memory of a training step",
        columns,
        groups,
        "Medians of fresh processes, beyond data and weights, and beyond what a tiny layer's first step has left: "
        "mostly the compiler, XLA.",
    )


def _medians(entries, *keys):
    """{(shape, contender): medians of these results}."""
    runs = {}
    for e in entries:
        runs.setdefault((_shape(e), e["arguments"]["contender"]), []).append([e["result"][key] for key in keys])
    return {key: [statistics.median(values) for values in zip(*of_key, strict=True)] for key, of_key in runs.items()}


def _over(a, b):
    return None if b is None else a / b


def _growth(results, axis):
    curves = {name: comparison.growth(results, axis, names) for name, names in comparison.GROWING.items()}
    sizes = sorted({size for of_cell in curves["ours"].values() for size, _ in of_cell})
    groups = []
    for cell in curves["ours"]:
        rows = []
        for name, of_name in curves.items():
            points = dict(of_name.get(cell, []))
            scale = {size: 1e3 / size if axis == "T" else 1 for size in points}
            rows.append((cell, name, *(_number(points[s] * scale[s]) if s in points else NONE for s in sizes)))
        groups.append(rows)
    what = (
        "µs for each of T time steps (B, D, N = 16, 8, 32)" if axis == "T" else "ms for N units (B, T, D = 16, 50, 32)"
    )
    return Table(f"Training step: {what}", ("cell", "layer", *map(str, sizes)), groups)


def _threads(results):
    groups = []
    for cell, of_cell in _by_cell(of_part(results, "threads")):
        rows = []
        for r in of_cell:
            measured = r["result"]["train"]
            best = [_with_kind(*against_fastest(measured, names)) for names in (KERAS, TORCH)]
            one_lane = _number(ratio(measured, "ours, jit"))
            rows.append((cell, r["setting"] or "all cores", _number(ms(measured, "ours")), one_lane, *best))
        groups.append(rows)
    columns = ("cell", "threads", "ours,\nms", "one lane\n/ ours", "Keras\n/ ours", "torch\n/ ours")
    notes = "One lane: ours inside jit_compile=True. tf.config.threading: both pools set to 1."
    return Table("Training step on one thread", columns, groups, notes)


def _callbacks(results):
    rows = []
    for r in of_part(results, "callbacks"):
        measured = r["result"]
        costs = [_percent(ratio(measured, name, "no callback") - 1) for name in ("GradientNorms", "both")]
        rows.append(
            (r["arguments"]["contender"], _shape(r), _number(ms(measured, "no callback") / WATCHED_STEPS), *costs)
        )
    columns = ("two LSTMs", "B,T,D,N", "a step without,\nms", "GradientNorms\nadds", "with GradientFlow,\nboth add")
    notes = f"model.fit, events and the heat maps at the end of each {WATCHED_STEPS:,} steps included."
    return Table("What the callbacks cost", columns, [rows] if rows else [], notes)


def _sequences(results):
    rows = []
    for r in of_part(results, "sequences"):
        B, T, *_ = r["arguments"]["shape"]
        for mode, what in (("train", "training step"), ("greedy", "greedy"), ("beam", f"beam of {WIDTH}")):
            measured = r["result"][mode]
            usual, torch = (_number(ratio(measured, name)) for name in ("keras", "torch"))
            best = _with_kind(*against_fastest(measured, ("keras", "keras, on batch", "keras, jit")))
            a_second = f"{B * T / ms(measured, 'ours') * 1e3:,.0f}"
            rows.append((what, _shape(r), _number(ms(measured, "ours")), a_second, usual, best, torch))
    columns = (
        *("encoder-decoder", "B,T,V,N", "ours,\nms", "tokens\na second"),
        *("Keras\n/ ours", "Keras,\nat its best", "torch\n/ ours"),
    )
    notes = (
        "Two LSTMs. Keras and torch: of keras.layers and torch.nn, with a Python loop over tokens; Keras's usual one "
        "calls predict, a faster one predict_on_batch (on batch; jit: compiled with jit_compile=True)."
    )
    return Table("Training and writing sequences", columns, [rows] if rows else [], notes)


def _by_cell(results):
    return [(cell, list(rs)) for cell, rs in itertools.groupby(results, key=lambda r: r["arguments"]["cell"])]


def _shape(r):
    return ",".join(map(str, r["arguments"]["shape"]))


def _number(n):
    """Three digits, but no more than two behind the point."""
    if n is None:
        return NONE
    return f"{n:.{2 if n < 9.995 else 1 if n < 99.95 else 0}f}"


def _percent(share):
    return NONE if share is None else f"{share:.0%}"


def _with_kind(number, name):
    """With the mode that was the fastest."""
    if number is None:
        return NONE
    kind = {"keras": "default", "torch": "plain"}.get(name, name.split(", ")[-1])
    return f"{_number(number)} {kind}"


def _is_numeric(table, i):
    cells = [row[i] for rows in table.groups for row in rows]
    return table.columns[i] != "B,T,D,N" and all(cell[:1].isdigit() or cell in ("", NONE) for cell in cells)


def markdown(of_machine, made):
    processor = f"{of_machine['processor']}{' with AVX-512' if of_machine['avx512'] else ''}"
    versions = ", ".join(f"{package} {of_machine[package]}" for package in ("tensorflow", "keras", "torch", "python"))
    lines = [
        "# How fast the layers are",
        "",
        f"{of_machine['date']}, {processor}, {of_machine['cores']} cores, {versions}. Medians of runs in turns; every "
        "contender computed the same outputs and gradients (float32, 1e-4).",
    ]
    for table in made:
        columns = [column.replace("\n", " ") for column in table.columns]
        aligned = ["---:" if _is_numeric(table, i) else "---" for i in range(len(columns))]
        rows = [columns, aligned, *itertools.chain(*table.groups)]
        lines += ["", f"## {table.title}", "", *([table.notes, ""] if table.notes else [])]
        lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def on_terminal(table):
    shown = rich_table.Table(title=table.title, caption=table.notes or None, box=box.SIMPLE_HEAD, collapse_padding=True)
    for i, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if _is_numeric(table, i) else "left", no_wrap=column != "reason")
    for rows in table.groups:
        for row in rows:
            shown.add_row(*row)
        if len(rows) > 1:
            shown.add_section()
    return shown
