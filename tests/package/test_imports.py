"""The package as a whole: who imports whom, and what an import costs and prints; and that no test imports another."""

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest

import keras_gated

ROOT = pathlib.Path(keras_gated.__file__).parent
TESTS = pathlib.Path(__file__).parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
    for path in ROOT.rglob("*.py")
    if path.name != "__init__.py"
}
# Rooms from the ground up: each may import from the floors below its own, and within itself.
FLOORS = [
    {"keras_internals", "patching"},
    {"bptt", "decoding", "tasks", "attention", "plots"},  # each alone
    {"engine"},
    {"cells"},
    {"weights", "clipping", "gradients", "seq2seq"},
    {"monitor"},
    {"callbacks", "testing"},
    {"__main__"},
]


def imported(tree):
    """Every module that is imported, and every name that may be one: `from a import b` gives a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def room(module):
    return module.split(".")[0]


def ours(name):
    """The modules of this package that a module imports."""
    names = {name.removeprefix("keras_gated.") for name in imported(MODULES[name]) if name.startswith("keras_gated.")}
    rooms = set().union(*FLOORS)
    return {name for name in names if name in MODULES or name in rooms}


def test_every_room_has_its_floor():
    assert {room(name) for name in MODULES} <= set().union(*FLOORS)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_one_way(name):
    (floor,) = (n for n, rooms in enumerate(FLOORS) if room(name) in rooms)
    below = set().union(*FLOORS[:floor])
    assert {room(module) for module in ours(name)} <= below | {room(name)}


def test_no_module_imports_itself_by_way_of_others():
    graphlib.TopologicalSorter({name: ours(name) & set(MODULES) for name in MODULES}).prepare()


@pytest.mark.parametrize(
    "name", [name for name in MODULES if name in ("engine.contract", "bptt", "tasks") or room(name) == "cells"]
)
def test_the_equations_know_no_backend(name):
    assert not {"tensorflow", "jax", "torch"} & {room(module) for module in imported(MODULES[name])}


def test_importing_prints_nothing_and_draws_in_neither_matplotlib_nor_tensorboard():
    code = (
        "import sys, keras, tensorflow; before = set(sys.modules); import keras_gated as kg; kg.LSTM(8);"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "['keras_gated']"


def programs(tree):
    """Texts of more than one line that are Python: what a test hands to another process."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            try:
                yield ast.parse(node.value)
            except SyntaxError:
                continue


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_no_test_imports_another(path):
    """Neither here nor in a process of its own: what several need is a module beside table.py."""
    tests = {test.stem for test in TESTS.rglob("test_*.py")}
    tree = ast.parse(path.read_text())
    for part in (tree, *programs(tree)):
        assert not tests & {name for module in imported(part) for name in module.split(".")}
