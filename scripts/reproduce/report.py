"""What was found, as JSON, in Markdown and for the terminal."""

import importlib.metadata
import os
import pathlib
import platform
import time

from reproduce.claim import verdict
from reproduce.plan import TUNED
from rich import box
from rich.table import Table

import keras_gated

PACKAGES = ("tensorflow", "keras", "numpy")


def machine():
    """Where and with what it ran."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        **versions,
        "keras_gated": keras_gated.__version__,
        "python": platform.python_version(),
    }


def rows(claims, store):
    """A dictionary for each claim: its texts, its verdict, its checks, and what its runs gave."""
    made = []
    for claim in claims:
        results = [(run, result) for run in claim.runs if (result := store.result(run)) is not None]
        holds, checks = verdict(claim, results)
        texts = {key: getattr(claim, key) for key in ("name", "says", "published", "setting")}
        done = store.stored(claim.runs)
        made.append(
            {
                **texts,
                "verdict": holds,
                "checks": [check._asdict() for check in checks],
                "done": len(results),
                "planned": len(claim.runs),
                "seconds": round(sum(run["seconds"] for run in done)),
                "runs": done,
            }
        )
    return made


def markdown(of_machine, made, quick):
    versions = ", ".join(f"{package} {of_machine[package]}" for package in (*PACKAGES, "keras_gated", "python"))
    hold, refuted, incomplete = (
        sum(row["verdict"] == kind for row in made) for kind in ("holds", "does not hold", "incomplete")
    )
    lines = [
        "# Claims held against published numbers",
        "",
        f"{of_machine['date']}, {of_machine['processor']}, {of_machine['cores']} cores, {versions}. "
        f"{minutes(made)} minutes of processor time. {TUNED}",
    ]
    if quick:
        lines += ["", "The quick form: one seed, less training. It shows that everything runs, not what holds."]
    unknown = f", {incomplete} are not all run" if incomplete else ""
    lines += ["", f"{hold} of {len(made)} claims hold, {refuted} do not{unknown}.", ""]
    lines += ["| claim | published | demanded | found | |", "| --- | --- | --- | --- | --- |"]
    for row in made:
        name, published = f"**{row['name']}**: {row['says']}", row["published"]
        if not row["checks"]:
            lines.append(f"| {name} | {published} | | {row['done']} of {row['planned']} runs are there | incomplete |")
        for check in row["checks"]:
            sign = "holds" if check["holds"] else "**does not hold**"
            lines.append(f"| {name} | {published} | {check['demanded']} | {check['found']} | {sign} |")
            name = published = ""
    lines += ["", "## Settings", "", "| claim | ours | runs | minutes |", "| --- | --- | ---: | ---: |"]
    lines += [f"| {row['name']} | {row['setting']} | {row['done']} | {row['seconds'] / 60:.1f} |" for row in made]
    return "\n".join(lines) + "\n"


def minutes(made):
    """Of all runs, each once."""
    seconds = {(str(run["setting"]), run["seed"]): run["seconds"] for row in made for run in row["runs"]}
    return f"{sum(seconds.values()) / 60:.0f}"


def on_terminal(made):
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
    for column in ("claim", "demanded", "found", ""):
        table.add_column(column)
    for row in made:
        name = row["name"]
        if not row["checks"]:
            table.add_row(name, "", f"{row['done']} of {row['planned']} runs are there", "incomplete")
        for check in row["checks"]:
            table.add_row(name, check["demanded"], check["found"], "holds" if check["holds"] else "[red]does not hold")
            name = ""
        table.add_section()
    return table
