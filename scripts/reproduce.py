#!/usr/bin/env python3
"""What of the chapter holds: makes .venv with what is needed, once, and runs `python -m reproduction` in it."""

import importlib.util
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
IN_ENVIRONMENT = """
(cd "$0" && source scripts/environment.sh && environment tutorials) && exec "$0/.venv/bin/python" -m reproduction "$@"
"""


def main():
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    needed = ("keras_gated", "matplotlib", "rich", "tensorflow", "turkish_treebanks")
    if all(importlib.util.find_spec(name) for name in needed):
        command = [sys.executable, "-m", "reproduction", *sys.argv[1:]]
    else:
        command = ["bash", "-c", IN_ENVIRONMENT, str(ROOT), *sys.argv[1:]]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
