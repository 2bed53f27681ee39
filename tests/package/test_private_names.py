"""Private names of Keras and TensorFlow: all in keras_internals.py, and all there in what is installed.

A test that fails here says what of this package breaks.
"""

import ast
import pathlib
import re

import keras
import pytest

import keras_gated as kg
from keras_gated import keras_internals
from keras_gated.keras_internals import ATTRIBUTES, IMPORTS, get_keras_mask, in_compiled_program, in_forward_mode

PACKAGE = pathlib.Path(kg.__file__).parent
ROOT = pathlib.Path(__file__).parents[2]
PRIVATE_MODULES = ("keras.src", "tensorflow.python")
LISTED = {path.rpartition(".")[2] for path in ATTRIBUTES}
OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
OF_OUR_OBJECTS = {"_charts"}  # which another module of ours calls


# That they exist.


@pytest.mark.parametrize("path", IMPORTS)
def test_what_is_imported_exists(path, tf):
    keras_internals._imported(path)


@pytest.fixture(scope="module")
def objects():
    """{class: one of its objects, which has been used}."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2, use_ema=True)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    model.compile(optimizer, "mse")
    for each in (optimizer, scaled):
        each.build(model.trainable_variables)
    return {
        "keras.Model": model,
        "keras.Variable": keras.Variable(0.0),
        "keras.layers.Layer": keras.layers.Bidirectional(keras.layers.LSTM(1)),
        "keras.layers.RNN": keras.layers.RNN(keras.layers.GRUCell(1)),
        "keras.layers.LSTM": keras.layers.LSTM(1),
        "keras.layers.GRU": keras.layers.GRU(1),
        "keras.layers.LSTMCell": keras.layers.LSTMCell(1),
        "keras.optimizers.Optimizer": optimizer,
        "keras.optimizers.LossScaleOptimizer": scaled,
    }


@pytest.mark.parametrize("path", ATTRIBUTES)
def test_what_objects_hold_exists(path, objects, tf):
    owner, _, name = path.rpartition(".")
    assert hasattr(objects[owner], name), f"{owner} has no {name} in Keras {keras.__version__}. {ATTRIBUTES[path]}"


@pytest.mark.parametrize("path", ["keras.src.backend.missing", "keras.src.missing.name", "no_such_module.name"])
def test_who_imports_a_missing_name_is_told_what_breaks(path, monkeypatch):
    monkeypatch.setitem(IMPORTS, path, "Without it the moon has no phases.")
    with pytest.raises(ImportError, match=rf"expects {re.escape(path)}, received Keras.*the moon has no phases"):
        keras_internals._imported(path)


# That they mean what they meant.


@pytest.mark.parametrize("implementation", [1, 2])
def test_an_lstm_cell_calls_its_activation_on_the_candidate_and_then_on_c(implementation, rng):
    """gradients/perturbed.py counts these calls to find c."""
    cell, seen = keras.layers.LSTMCell(2, activation=lambda a: seen.append(a) or keras.ops.tanh(a)), []
    cell.implementation = implementation
    zeros = keras.ops.zeros((1, 2))
    _, (_, c) = cell(keras.ops.convert_to_tensor(rng.normal(size=(1, 3)), "float32"), [zeros, zeros])
    assert len(seen) == 2 and seen[1] is c


def test_an_inner_loop_that_is_set_on_a_layer_is_run(rng):
    layer, calls = keras.layers.SimpleRNN(2), []
    vars(layer)["inner_loop"] = lambda *args, **given: (
        calls.append(given) or type(layer).inner_loop(layer, *args, **given)
    )
    layer(rng.normal(size=(1, 3, 2)).astype("float32"))
    assert {"sequences", "initial_state", "mask", "training"} == set(calls[-1])


def test_whether_a_program_is_compiled(tf):
    seen = []

    def look():
        seen.append(in_compiled_program())
        return tf.while_loop(lambda i: i < 1, lambda i: seen.append(in_compiled_program()) or i + 1, [0])[0]

    for jit_compile in (False, True):
        tf.function(look, jit_compile=jit_compile, autograph=False)()
        assert set(seen) == {jit_compile}
        seen.clear()
    assert not in_compiled_program()


def test_whether_an_accumulator_is_at_work(tf):
    watched = tf.constant([1.0])
    with tf.autodiff.ForwardAccumulator(watched, tf.constant([1.0])):
        assert in_forward_mode([watched * 2])
    with tf.GradientTape() as tape:
        tape.watch(watched)
        assert not in_forward_mode([watched])


def test_the_mask_of_a_tensor_is_read():
    embedded = keras.layers.Embedding(3, 2, mask_zero=True)(keras.ops.convert_to_tensor([[1, 0]]))
    assert keras.ops.convert_to_numpy(get_keras_mask(embedded)).tolist() == [[True, False]]
    assert get_keras_mask(keras.ops.zeros((1, 2))) is None


@pytest.mark.parametrize(
    ("layer", "name"), [(kg.SimpleRNN, "simple_rnn_cell"), (kg.LSTM, "lstm_cell"), (kg.GRU, "gru_cell")]
)
def test_a_layers_cell_is_called_as_in_saved_files(layer, name):
    layer = layer(2, name="layer")
    layer.build((None, None, 3))
    assert layer.cell.name == name
    assert [w.path for w in layer.weights] == [f"layer/{name}/{w}" for w in ("kernel", "recurrent_kernel", "bias")]


# That there are no others.


def imported(tree):
    """(line, name) of what a module imports, also by a string, and of what it reaches through a public package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            yield node.lineno, f"tensorflow{name[2:]}" if name.startswith("tf.") else name


def private_imports(tree):
    return [
        f"line {line}: {name}"
        for line, name in imported(tree)
        if f"{name}.".startswith(tuple(f"{m}." for m in PRIVATE_MODULES))
    ]


def is_private(name):
    return re.fullmatch(r"_[a-z]([a-z0-9_]*[a-z0-9])?", name) is not None


def own_names(trees):
    """Private functions, and attributes that our objects set on themselves."""
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "vars(self).update":
            yield from (keyword.arg for keyword in node.keywords)


def unlisted(tree, own):
    """Private attributes of other people's objects that are not in ATTRIBUTES, by name or as a string."""
    in_f_strings = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            ours = own if ast.unparse(node.value) in ("self", "cls") else OF_OUR_OBJECTS | OF_NAMED_TUPLES
            if node.attr not in ours | LISTED:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in in_f_strings:
            if is_private(node.value) and node.value not in LISTED:
                yield f"line {node.lineno}: {node.value!r}"


TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
OWN = set(own_names(TREES.values()))


@pytest.mark.parametrize("module", TREES)
def test_no_other_module_imports_what_is_private(module):
    if module != "keras_internals.py":
        assert private_imports(TREES[module]) == [], "Import it in keras_internals.py, with what breaks without it."


@pytest.mark.parametrize("folder", ["scripts", "tutorials"])
def test_scripts_and_tutorials_import_only_what_is_public(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        assert private_imports(ast.parse(path.read_text())) == [], path.name


@pytest.mark.parametrize("module", TREES)
def test_every_private_attribute_is_listed(module):
    found = list(unlisted(TREES[module], OWN))
    assert found == [], "List it in ATTRIBUTES of keras_internals.py, with what breaks without it."


def test_every_listed_name_is_used():
    text = "".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "keras_internals.py")
    assert [name for name in LISTED if not re.search(rf"\b{name}\b", text)] == []


@pytest.mark.parametrize(
    "line",
    [
        "from keras.src import backend",
        "from keras import src",
        "import tensorflow.python.eager.context",
        "tf.python.ops",
        "keras.src.backend.rnn()",
        "importlib.import_module('keras.src.backend')",
    ],
)
def test_a_private_import_would_be_noticed(line):
    assert private_imports(ast.parse(line))


@pytest.mark.parametrize(
    "line",
    [
        "layer._called",
        "model.layers[0]._losses = []",
        "self._losses_override",
        "super()._flatten_layers()",
        "getattr(cell, '_dropout_mask')",
        "replaced(optimizer, '_lock', wrapper)",
        "vars(layer)['_path'] = 1",
        "layer._write()",  # a name of ours, but of an object that may be anybody's
    ],
)
def test_a_private_attribute_would_be_noticed(line):
    assert list(unlisted(ast.parse(line), OWN))


@pytest.mark.parametrize(
    "line", ["self._write()", "row._replace(a=1)", "optimizer._clip_gradients", "f'{x}_call'", "_"]
)
def test_what_is_ours_or_listed_is_not_noticed(line):
    assert not list(unlisted(ast.parse(line), OWN))
