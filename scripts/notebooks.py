#!/usr/bin/env python3
"""Makes a notebook of each tutorial, in the folder notebooks/ (needs jupytext: pip install '.[tutorials]')."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main():
    try:
        import jupytext
    except ImportError:
        sys.exit("scripts/notebooks.py needs jupytext, which is not installed: pip install '.[tutorials]'.")
    folder = ROOT / "notebooks" if len(sys.argv) < 2 else pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for tutorial in sorted((ROOT / "tutorials").glob("*.py")):
        notebook = jupytext.read(tutorial, fmt="py:percent")
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        jupytext.write(notebook, folder / f"{tutorial.stem}.ipynb")
        print(folder / f"{tutorial.stem}.ipynb")


if __name__ == "__main__":
    main()
