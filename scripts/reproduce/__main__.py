"""The chapter's claims, held against published numbers.

Writes reproduction.md, reproduction.json and reproduction.png.  Each finished run is kept in the folder `runs`
below: what was interrupted goes on where it was, and what is there is not run again.
"""

import argparse
import json
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from reproduce import conductor, figure, plan, report
from reproduce.store import Store
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def run_all(runs, processes, store, console):
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        whole = progress.add_task(f"{len(runs)} runs", total=sum(run.seconds for run in runs))
        bars, done = {}, dict.fromkeys(range(len(runs)), 0.0)

        def told(changes):
            for index, share in changes.items():
                if share is None and index in bars:
                    progress.remove_task(bars.pop(index))
                elif share is not None:
                    if index not in bars:
                        bars[index] = progress.add_task(title(runs[index]), total=1.0)
                    progress.update(bars[index], completed=share)
                done[index] = 1.0 if share is None else share
            left = sum(share < 1 for share in done.values())
            seconds = sum(run.seconds * done[index] for index, run in enumerate(runs))
            progress.update(whole, completed=seconds, description=f"{left} of {len(runs)} runs left")

        def failed(run, exception):
            console.print(f"n/a: {title(run)}: {type(exception).__name__}: {exception}")

        conductor.run_all(runs, processes, store, told, failed)


def title(run):
    telling = ("cell", "biases", "lag", "max_norm")
    return " ".join([run.family, *(str(run.setting[key]) for key in telling if key in run.setting), f"seed {run.seed}"])


def parse():
    parser = argparse.ArgumentParser(prog="reproduce.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="every claim with one seed and less training")
    parser.add_argument("--claims", nargs="+", metavar="NAME", help="those whose names contain one of these words")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="each on one core")
    parser.add_argument(
        "--out", type=pathlib.Path, help="output folder (logs/reproduction, or logs/reproduction-quick)"
    )
    return parser.parse_args()


def main():
    arguments = parse()
    console = Console()
    out = arguments.out or pathlib.Path("logs/reproduction-quick" if arguments.quick else "logs/reproduction")
    claims = plan.claims(arguments.quick, arguments.claims)
    if not claims:
        names = ", ".join(claim.name for claim in plan.claims(arguments.quick))
        sys.exit(f"--claims expects words out of these names: {names}; received {' '.join(arguments.claims)}.")
    store = Store(out / "runs")
    runs = plan.runs(claims)
    missing = [run for run in runs if store.result(run) is None]
    if missing:
        expected = sum(run.seconds for run in missing) / 60 / arguments.processes
        console.print(f"{len(claims)} claims, {len(missing)} of {len(runs)} runs to do, about {expected:.0f} minutes")
        run_all(missing, arguments.processes, store, console)
    made = report.rows(claims, store)
    of_machine = report.machine()
    (out / "reproduction.json").write_text(json.dumps({"machine": of_machine, "claims": made}, indent=1))
    (out / "reproduction.md").write_text(report.markdown(of_machine, made, arguments.quick))
    figure.draw(made, out / "reproduction.png")
    console.print(report.on_terminal(made))
    console.print(f"{out}/reproduction.md, .json, .png")
    if incomplete := [row["name"] for row in made if row["verdict"] == "incomplete"]:
        sys.exit(f"Runs failed, so that not all is known of {', '.join(incomplete)}; this command tries them again.")


if __name__ == "__main__":
    main()
