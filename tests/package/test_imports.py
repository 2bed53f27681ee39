"""The package as a whole: who imports whom, and what an import costs and prints."""

import ast
import pathlib
import subprocess
import sys

import pytest

import keras_gated

ROOT = pathlib.Path(keras_gated.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
    for path in ROOT.rglob("*.py")
    if path.name != "__init__.py"
}
# Each module may import only from what stands before it.
ORDER = [
    "equations",
    "program",
    "lane",
    "sweep",
    "recurrence",
    "cells.simple_rnn",
    "cells.lstm",
    "cells.gru",
    "attention",
    "tokens",
    "crossentropy",
    "encoder_decoder",
    "seq2seq",
    "weights",
    "clipping",
    "profiles",
    "records",
    "chain",
    "trajectory",
    "probe",
    "gates",
    "jacobians",
    "error_signal",
    "plots",
    "diagnosis",
    "gradients",
    "ring",
    "events",
    "tap",
    "norms",
    "time_steps",
    "dashboard",
    "callbacks",
    "__main__",
]
ALONE = ["bptt", "decoding", "tasks"]


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "keras_gated":
            yield from (f"keras_gated.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def test_every_module_has_its_place():
    assert sorted(MODULES) == sorted(ORDER + ALONE)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_one_way(name):
    ours = {m.removeprefix("keras_gated.") for m in imported(MODULES[name]) if m.startswith("keras_gated")}
    before = [] if name in ALONE else ALONE + ORDER[: ORDER.index(name)]
    assert ours <= {m for m in before if not (name.startswith("cells.") and m.startswith("cells."))}


@pytest.mark.parametrize(
    "name", [*(m for m in MODULES if m.startswith("cells.")), "equations", "recurrence", "bptt", "tasks"]
)
def test_the_equations_know_no_backend(name):
    assert not {"tensorflow", "jax", "torch"} & {m.split(".")[0] for m in imported(MODULES[name])}


def test_importing_prints_nothing_and_draws_in_neither_matplotlib_nor_tensorboard():
    code = (
        "import sys, keras, tensorflow; before = set(sys.modules); import keras_gated as kg; kg.LSTM(8);"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "['keras_gated']"
