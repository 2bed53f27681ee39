"""How fast the layers are, against keras.layers, torch.nn and the bare matrix products.

Writes benchmark.md, benchmark.json and benchmark.png.  TensorFlow and PyTorch have a process each, and all that is
compared runs in turns, one at a time; every contender first proves that it computes the same numbers.
"""

import argparse
import json
import os
import pathlib
import time

from benchmark import conductor, figure, plan, report
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column


def run_all(processes, console, save):
    columns = (
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=sum(map(len, processes)))
        for entries in processes:
            progress.update(task, description=plan.title(entries[0]))
            conductor.run(entries, lambda e, note: progress.update(task, description=f"{plan.title(e)}: {note}"))
            progress.advance(task, len(entries))
            save([e for e in entries if "result" in e])
            for e in entries:
                if "failed" in e:
                    console.print(f"n/a: {plan.title(e)}: {e['failed']}")
        progress.update(task, description="")


def shape_of(text):
    try:
        B, T, D, N = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected B,T,D,N such as 32,50,32,64, received {text!r}") from None
    return B, T, D, N


def parse():
    parser = argparse.ArgumentParser(prog="benchmark.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small shape and a masked epoch, in a minute")
    parser.add_argument("--parts", nargs="+", choices=plan.PARTS, default=plan.PARTS, help="without --quick")
    parser.add_argument("--cells", nargs="+", choices=plan.CELLS, default=plan.CELLS)
    parser.add_argument("--shapes", nargs="+", type=shape_of, metavar="B,T,D,N", help="batch, time, features, units")
    parser.add_argument("--rounds", type=int, default=7, help="timings of each contender")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("logs/benchmark"), help="output folder")
    parser.add_argument("--add", action="store_true", help="to the results that are there, replacing equal ones")
    return parser.parse_args()


def main():
    arguments = parse()
    console = Console()
    path = arguments.out / "benchmark.json"
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = json.loads(path.read_text())["results"] if arguments.add and path.exists() else []
    if arguments.quick:
        shapes = arguments.shapes or plan.QUICK_SHAPES
        processes = plan.one_process(arguments.cells, shapes, arguments.rounds, seconds=0.02)
    else:
        shapes = arguments.shapes or plan.SHAPES
        processes = plan.processes(arguments.parts, arguments.cells, shapes, arguments.rounds, seconds=0.03)

    def save(entries):
        nonlocal results
        new = [json.loads(json.dumps({**e, "date": time.strftime("%Y-%m-%d %H:%M")})) for e in entries]
        replaced = [plan.identity(e) for e in new]
        results = [r for r in results if plan.identity(r) not in replaced] + new
        path.write_text(json.dumps({"machine": report.machine(), "results": results}, indent=1))

    if os.getloadavg()[0] > 0.5:
        console.print(f"Other programs are running (load {os.getloadavg()[0]:.1f}): what is measured will be noisy.")
    run_all(processes, console, save)
    tables = report.tables(results)
    for table in tables:
        console.print(report.on_terminal(table))
    (arguments.out / "benchmark.md").write_text(report.markdown(report.machine(), tables))
    figure.draw(results, arguments.out / "benchmark.png")
    console.print(f"{arguments.out}/benchmark.md, .json, .png")


if __name__ == "__main__":
    main()
