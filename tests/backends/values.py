"""Outputs and gradients of every cell on whatever backend Keras runs on, from numbers that do not depend on it.

Run as a script it writes them to a file.
"""

import sys

import numpy as np
from table import CELLS, arrays, batch, make, values_and_gradients

OPTIONS = {
    "plain": {},
    "backwards": {"go_backwards": True, "zero_output_for_mask": True},
    "unrolled": {"unroll": True},
}
OTHER_ACTIVATIONS = ("rnn_relu", "rnn_sigmoid", "rnn_linear")


def all_values():
    """-> {name/options/masked/k: array}."""
    found = {}
    for name, cell in CELLS.items():
        for label, options in OPTIONS.items():
            for masked in (False, True):
                if name in OTHER_ACTIVATIONS and not (masked and label == "plain"):
                    continue
                rng = np.random.default_rng(1)
                layer, given = make(cell, rng, dtype="float32", **options), batch(cell, rng)
                outputs, gradients = values_and_gradients(layer, layer, given, given.mask if masked else None)
                for k, a in enumerate(arrays([*outputs, *gradients])):
                    found[f"{name}/{label}/{masked}/{k}"] = a
    return found


if __name__ == "__main__":
    np.savez(sys.argv[1], **all_values())
