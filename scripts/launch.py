"""Runs a package of this repository, in .venv where the Python at hand has not all that it needs."""

import importlib.util
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
IN_SHELL = """
source "$0/scripts/environment.sh"
python=$1
if [ -z "$python" ]; then
  (cd "$0" && environment "$2") || exit
  python=$0/.venv/bin/python
fi
quietly "$python" -m "${@:3}"
"""


def launch(package, extra, *needed):
    """Takes the place of this process; extra is the one of setup.cfg that brings what is needed."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = all(importlib.util.find_spec(name) for name in ("keras_gated", "matplotlib", "rich", "tensorflow", *needed))
    python = sys.executable if found else ""
    os.execvp("bash", ["bash", "-c", IN_SHELL, str(ROOT), python, extra, package, *sys.argv[1:]])
