"""Command line: python -m keras_gated diagnose model.keras data.npz."""

import argparse
import json
import pathlib
import sys

EXAMPLES = 64


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m keras_gated", description="Recurrent layers and their gradients.")
    commands = parser.add_subparsers(required=True, metavar="command")
    diagnose = commands.add_parser("diagnose", help="how far the error reaches through time in a model, and why")
    diagnose.add_argument("model", type=pathlib.Path, help="a saved and compiled model, .keras")
    diagnose.add_argument("data", type=pathlib.Path, help="an .npz with the arrays x and y")
    diagnose.add_argument("--examples", type=int, default=EXAMPLES, help=f"how many to look at (default: {EXAMPLES})")
    diagnose.add_argument("--json", action="store_true", help="print JSON instead of a report")
    diagnose.add_argument("--figure", type=pathlib.Path, help="draw the error by lag into this file, such as out.png")
    diagnose.set_defaults(run=run_diagnose)
    given = parser.parse_args(arguments)
    try:
        given.run(given)
    except (ValueError, ImportError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")


def run_diagnose(given):
    x, y = _data(given.data, given.examples)
    found = _diagnosed(_model(given.model), x, y, given)
    print(json.dumps(found.to_dict(), indent=1) if given.json else found)
    if given.figure:
        found.plot().savefig(given.figure)


def _data(path, examples):
    import numpy as np

    if examples < 1:
        raise ValueError(f"--examples expects a positive number, received {examples}.")
    if not path.is_file():
        raise ValueError(f"There is no file {path}. Write one with numpy.savez({path.name!r}, x=x, y=y).")
    try:
        with np.load(path) as arrays:
            held = {name: arrays[name][:examples] for name in arrays.files}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is no .npz of arrays: {error}") from error
    if not {"x", "y"} <= set(held):
        raise ValueError(f"{path} holds {', '.join(held) or 'nothing'}, expected the arrays x and y.")
    return held["x"], held["y"]


def _model(path):
    import keras

    if not path.exists():
        raise ValueError(f"There is no file {path}. Write one with model.save({path.name!r}).")
    return keras.models.load_model(path)


def _diagnosed(model, x, y, given):
    from keras_gated.gradients import diagnose, recurrent_layers

    if not recurrent_layers(model) or not model.compiled:
        return diagnose(model, x, y)  # which says so
    try:
        return diagnose(model, x, y)
    except Exception as error:  # what Keras and TensorFlow raise for shapes that do not fit is of many kinds
        expected = [tuple(tensor.shape) for tensor in getattr(model, "inputs", None) or []]
        raise ValueError(
            f"The model takes x of shape {', '.join(map(str, expected)) or 'unknown'}, {given.data} holds x {x.shape} "
            f"and y {y.shape}. It fails with: {str(error).strip().splitlines()[0]}"
        ) from error


if __name__ == "__main__":
    main()
