"""Finished runs in files, so that what was interrupted goes on where it was."""

import hashlib
import json
import os
import pathlib
import time


class Store:
    """A folder with a file for each run, written at once or not at all."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, run):
        identity = json.dumps([run.family, run.setting, run.seed], sort_keys=True)
        return self.folder / f"{run.family}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"

    def result(self, run):
        """What was stored of a run, or None."""
        path = self.path(run)
        return json.loads(path.read_text())["result"] if path.exists() else None

    def save(self, run, result, seconds):
        whole = {"family": run.family, "setting": run.setting, "seed": run.seed, "seconds": round(seconds, 1)}
        whole |= {"date": time.strftime("%Y-%m-%d %H:%M"), "result": result}
        unfinished = self.path(run).with_suffix(".part")
        unfinished.write_text(json.dumps(whole, allow_nan=False))
        os.replace(unfinished, self.path(run))

    def stored(self, runs):
        """All that is in the files of those runs that are there."""
        return [json.loads(self.path(run).read_text()) for run in runs if self.path(run).exists()]
