"""Runs a package of this repository, in .venv where the Python at hand has not all that it needs."""

import importlib.util
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
IN_ENVIRONMENT = """
(cd "$0" && source scripts/environment.sh && environment "$1") && exec "$0/.venv/bin/python" -m "${@:2}"
"""


def launch(package, extra, *needed):
    """Takes the place of this process; extra is the one of setup.cfg that brings what is needed."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [package, *sys.argv[1:]]
    if all(importlib.util.find_spec(name) for name in ("keras_gated", "matplotlib", "rich", "tensorflow", *needed)):
        command = [sys.executable, "-m", *command]
    else:
        command = ["bash", "-c", IN_ENVIRONMENT, str(ROOT), extra, *command]
    os.execvp(command[0], command)
