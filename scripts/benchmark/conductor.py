"""Runs what is planned: starts the workers, and lets them time their contenders in turns, one at a time."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile

from benchmark import plan


class Worker:
    """A process of worker.py."""

    def __init__(self, library, setting):
        prefix, variables = plan.SETTINGS[setting]
        own = {"KERAS_BACKEND": library, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
        self.said = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "benchmark.worker", library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            env={**os.environ, **own, **variables},
            text=True,
        )

    def ask(self, command, noted=None, /, **arguments):
        """The result of a command.

        Raises:
            RuntimeError: with what the process said last, if it ended instead.
        """
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps([command, arguments]) + "\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            message = json.loads(line)
            if "result" in message:
                return message["result"]
            noted(message["note"])
        self.said.seek(0)
        lines = self.said.read().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit status {self.process.wait()}")

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.said.close()


def run(entries, noted):
    """Runs entries of the plan in the same processes, and adds to each its "result", or as "failed" why not."""
    libraries = ["tensorflow", "torch"] if entries[0]["name"] in ("steps", "writers") else ["tensorflow"]
    workers = [Worker(library, entries[0]["setting"]) for library in libraries]
    try:
        for e in entries:
            measure = {"steps": _steps, "writers": _steps, "masked_epoch": _epochs, "watched_epoch": _epochs}.get(
                e["name"], _alone
            )
            e["result"] = measure(workers, e, lambda text, e=e: noted(e, text))
    except (RuntimeError, json.JSONDecodeError) as failure:
        for e in entries:
            if "result" not in e:
                e["failed"] = str(failure)
    finally:
        for worker in workers:
            worker.close()


def _alone(workers, e, noted):
    return workers[0].ask(e["name"], noted, **e["arguments"])


def _steps(workers, e, noted):
    """{mode, such as "train": {contender: {"ms": [one per round], "error": ...} or {"reason": ...}}}"""
    arguments = dict(e["arguments"])
    rounds, seconds, modes = arguments.pop("rounds"), arguments.pop("seconds"), arguments.pop("modes")
    owner, outcomes = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for worker in workers:
            of_worker = worker.ask(e["name"], noted, reference=f"{folder}/ours.npz", **arguments)
            owner |= dict.fromkeys(of_worker, worker)
            outcomes |= of_worker
    ready = {name: owner[name] for name, outcome in outcomes.items() if "reason" not in outcome}
    results = {}
    for mode in modes:
        noted(f"timing {mode}")
        ms = _in_turns(ready, mode, rounds, seconds)
        results[mode] = {n: {**outcome, **({"ms": ms[n]} if n in ms else {})} for n, outcome in outcomes.items()}
    return results


def _epochs(workers, e, noted):
    """{contender: {"ms": [one per round], "error": ...}}"""
    arguments = dict(e["arguments"])
    rounds = arguments.pop("rounds")
    outcomes = workers[0].ask(e["name"], noted, **arguments)
    noted("timing")
    ms = _in_turns(dict.fromkeys(outcomes, workers[0]), "epoch", rounds, seconds=0)
    return {name: {**outcome, "ms": ms[name]} for name, outcome in outcomes.items()}


def _in_turns(owner, mode, rounds, seconds):
    """{contender: ms, one per round}: in each round all of them one after another, starting with another one."""
    names, done = list(owner), []
    while len(done) < rounds:
        turn = len(done) % len(names)
        order = names[turn:] + names[:turn]
        times = {name: owner[name].ask("timing", name=name, mode=mode, seconds=seconds) for name in order}
        if None not in times.values():
            done.append(times)
    return {name: [times[name] for times in done] for name in names}
