"""How fast the layers are, against keras.layers, torch.nn and the bare matrix products.

Writes benchmark.md, benchmark.json and benchmark.png.  Each measurement runs in a process of its own, all that are
compared with one another in the same one; every contender first proves that it computes the same numbers.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import report

CELLS = ("SimpleRNN", "LSTM", "GRU", "GRU after")
SHAPES = ((32, 50, 32, 64), (64, 100, 64, 128), (32, 200, 64, 256), (128, 100, 128, 512), (1, 1000, 8, 64))
SHAPES += ((16, 2000, 8, 32),)
QUICK_SHAPES = ((32, 20, 32, 64),)
PARTS = ("grid", "masked", "lengths", "memory", "first", "growth", "threads")
TIMES = (100, 300, 1000, 3000, 10000)
UNITS = (32, 64, 128, 256, 512, 1024)
AGAINST = ("ours", "keras", "keras, jit", "torch", "torch, oneDNN")
THREADS = {
    "all cores": ([], {}),
    "taskset -c 0": (["taskset", "-c", "0"], {}),
    "OMP_NUM_THREADS=1": ([], {"OMP_NUM_THREADS": "1"}),
    "tf.config.threading 1": ([], {"TF_THREADS": "1", "OMP_NUM_THREADS": "1"}),
}


def entry(part, name, setting="", repeat=0, **arguments):
    return {"part": part, "setting": setting, "repeat": repeat, "name": name, "arguments": arguments}


def identity(e):
    return [e[key] for key in ("part", "setting", "repeat", "arguments")]


def plan(parts, cells, shapes, rounds, seconds, quick):
    """The processes to run: lists of entries."""
    timing = {"rounds": rounds, "seconds": seconds}
    whole = {cell: cell for cell in cells if cell != "GRU after"}
    largest = max(shapes, key=lambda shape: shape[0] * shape[1] * shape[3])
    entries = {part: [] for part in PARTS}
    entries["grid"] = [entry("grid", "steps", cell=c, shape=s, **timing) for c in cells for s in shapes]
    shape, batches = (shapes[0], 4) if quick else ((64, 100, 32, 64), 10)
    entries["masked"] = [
        entry("masked", "masked_epoch", cell=c, shape=shape, batches=batches, rounds=rounds) for c in whole
    ]
    for cell in whole:
        of_cell = {"cell": cell, "shape": (32, 200, 16, 64), "last_batch": 13}
        lengths = [round(20 + 180 * i / 59) for i in range(60)]
        entries["lengths"] += [
            entry("lengths", "lengths_epoch", contender=c, lengths=lengths, **of_cell) for c in ("ours", "keras")
        ]
        names = ["ours", "keras", "keras, jit", *(["keras, unroll"] if largest[1] <= 100 else [])]
        entries["memory"] += [entry("memory", "memory", cell=cell, contender=c, shape=largest) for c in names]
        entries["first"] += [
            entry("first", "first_call", repeat=i, cell=cell, contender=c, shape=shapes[0])
            for i in range(3)
            for c in names
        ]
        growing = [(16, T, 8, 32) for T in TIMES] + [(16, 50, 32, N) for N in UNITS]
        of_growth = {"only": AGAINST, "modes": ["train"], **timing}
        entries["growth"] += [entry("growth", "steps", cell=cell, shape=s, **of_growth) for s in growing]
        of_threads = {"shape": shapes[0], "only": ("ours, jit", *AGAINST), **timing}
        entries["threads"] += [entry("threads", "steps", setting, cell=cell, **of_threads) for setting in THREADS]
    if quick:
        return [entries["grid"] + entries["masked"][:1]]
    return [[e] for part in parts for e in entries[part]]


def run(entries, failed, noted):
    """Runs one process, and adds to each entry its result, or why there is none."""
    prefix, variables = THREADS[entries[0]["setting"] or "all cores"]
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "-1"}
    calls = json.dumps([[e["name"], e["arguments"]] for e in entries])
    command = [*prefix, sys.executable, "-m", "benchmarks.measure", calls]
    waiting = list(entries)
    with tempfile.TemporaryFile("w+") as said:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, env={**environment, **variables}, text=True
        ) as process:
            for line in process.stdout:
                message = json.loads(line)
                if "note" in message:
                    noted(waiting[0], message["note"])
                else:
                    waiting.pop(0)["result"] = message["result"]
        said.seek(0)
        lines = said.read().splitlines()
    for e in waiting:
        e["failed"] = lines[-1] if lines else f"exit status {process.returncode}"
        failed.append(e)


def title(e):
    arguments = e["arguments"]
    shape = "x".join(map(str, arguments["shape"]))
    return " ".join(filter(None, (e["part"], arguments["cell"], shape, arguments.get("contender"), e["setting"])))


def run_all(processes, console, save):
    failed = []
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=sum(map(len, processes)))
        for entries in processes:
            progress.update(task, description=title(entries[0]))
            run(entries, failed, lambda e, note: progress.update(task, description=f"{title(e)}: {note}"))
            progress.advance(task, len(entries))
            save([e for e in entries if "result" in e])
    for e in failed:
        console.print(f"n/a: {title(e)}: {e['failed']}")


def chosen_shape(text):
    try:
        B, T, D, N = map(int, text.replace(",", "x").split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected B,T,D,N such as 32,50,32,64, received {text!r}") from None
    return B, T, D, N


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small shape and a masked epoch, in a minute")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=CELLS)
    parser.add_argument("--shapes", nargs="+", type=chosen_shape, metavar="B,T,D,N")
    parser.add_argument("--rounds", type=int, default=7, help="timings of each contender")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("logs/benchmark"), help="output folder")
    parser.add_argument("--add", action="store_true", help="to the results that are there, replacing equal ones")
    arguments = parser.parse_args()
    arguments.shapes = arguments.shapes or (QUICK_SHAPES if arguments.quick else SHAPES)
    return arguments


def main():
    arguments = parse()
    console = Console()
    path = arguments.out / "benchmark.json"
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = json.loads(path.read_text())["results"] if arguments.add and path.exists() else []
    seconds = 0.01 if arguments.quick else 0.03
    processes = plan(arguments.parts, arguments.cells, arguments.shapes, arguments.rounds, seconds, arguments.quick)

    def save(entries):
        nonlocal results
        new = [json.loads(json.dumps({**e, "date": time.strftime("%Y-%m-%d %H:%M")})) for e in entries]
        replaced = [identity(n) for n in new]
        results = [r for r in results if identity(r) not in replaced] + new
        path.write_text(json.dumps({"machine": report.machine(), "results": results}, indent=1))

    run_all(processes, console, save)
    if results:
        tables = report.tables(results)
        for table in tables:
            console.print(report.on_terminal(table))
        (arguments.out / "benchmark.md").write_text(report.markdown(report.machine(), tables))
        report.draw(results, arguments.out / "benchmark.png")
        console.print(f"{arguments.out}/benchmark.md, .json, .png")


if __name__ == "__main__":
    main()
