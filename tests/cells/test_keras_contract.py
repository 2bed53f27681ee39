"""The contract of keras.layers.RNN, fault by fault as users of Keras, TensorFlow and PyTorch reported them.

A test that asks for `tf` is of the TensorFlow backend alone; scripts/backends.sh runs the others elsewhere.
"""

import inspect
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import ops
from table import CELLS, DTYPE, B, D, N, T, arrays, assert_close, batch, build, gradients, make

import keras_gated as kg
from keras_gated.cells.options import CellOptions


@pytest.fixture(params=["rnn_tanh", "lstm", "gru", "gru_reset_after"])
def cell(request):
    return CELLS[request.param]


def single(W, U, b, activation="tanh", **options):
    """A SimpleRNN with one unit and given weights."""
    layer = kg.SimpleRNN(1, activation, **options)
    layer.build((None, None, 1))
    layer.set_weights([np.array([[W]]), np.array([[U]]), np.array([b])])
    return layer


# Masks.


def test_no_masked_step_leaks_into_the_state():
    """Three masked steps of a cell with a bias: going through them would give 0.994641."""
    x = np.array([0.0, 0, 0, 1]).reshape(1, 4, 1)
    h = single(1.0, 1.0, 1.0)(x, mask=np.array([[False, False, False, True]]))
    assert_close([h], [[[0.964028]]])


@pytest.mark.parametrize(("left", "right"), [(0, 1), (1, 0), (0, 5), (5, 0), (1, 5)])
def test_padding_on_either_side_changes_no_final_state(cell, left, right, rng, uncompiled):
    layer, given = make(cell, rng), batch(cell, rng)
    x = np.pad(given.x, ((0, 0), (left, right), (0, 0)), constant_values=9.0)
    mask = np.pad(np.ones((B, T), bool), ((0, 0), (left, right)))
    _, *finals = layer(x, initial_state=given.states, mask=mask)
    _, *expected = layer(given.x, initial_state=given.states)
    assert_close(finals, expected, 1e-12)


def test_an_initial_state_does_not_make_keras_forget_the_mask(cell, rng, uncompiled):
    """A decoder behind Embedding(mask_zero=True): Keras drops the mask when there are two tensors."""
    tokens = np.array([[3, 1, 2, 0, 0], [1, 2, 3, 4, 0]])
    embedding = keras.layers.Embedding(5, D, mask_zero=True)
    layer = build(cell.layer(return_state=True, return_sequences=True), rng)
    states = [rng.normal(size=(2, N)).astype("float32") for _ in range(cell.states)]
    expected = layer(embedding(tokens), initial_state=states, mask=tokens != 0)
    assert_close(layer(embedding(tokens), initial_state=states), expected, 0)

    inputs, initial = keras.Input((None,), dtype="int32"), [keras.Input((N,)) for _ in range(cell.states)]
    model = keras.Model([inputs, *initial], layer(embedding(inputs), initial_state=initial))
    assert_close(model([tokens, *states]), expected, 1e-6)

    twice = keras.layers.Bidirectional(cell.layer())
    both = twice(embedding(tokens), initial_state=states * 2)
    assert_close([both], [twice(embedding(tokens), initial_state=states * 2, mask=tokens != 0)], 0)


def test_a_stacked_layer_still_sees_the_mask(cell, rng, uncompiled):
    tokens = np.array([[3, 1, 2, 0, 0], [1, 2, 3, 4, 0]])
    lower, upper = build(cell.layer(return_sequences=True), rng), build(cell.layer(), rng, N)
    model = keras.Sequential([keras.layers.Embedding(5, D, mask_zero=True), lower, upper])
    received = model(tokens)
    for row, length in enumerate((3, 4)):
        x = model.layers[0](tokens[row : row + 1, :length])
        assert_close([received[row : row + 1]], [upper(lower(x))], 1e-6)


@pytest.mark.parametrize("states", [True, False])
def test_a_batch_of_nothing_but_padding(cell, rng, states, uncompiled):
    layer, given = make(cell, rng), batch(cell, rng)
    mask = ops.zeros((B, T), "bool")

    def total(x, *initial):
        y, *finals = layer(x, initial_state=list(initial) or None, mask=mask, training=True)
        return ops.sum(y**2) + sum(ops.sum(s**2) for s in finals), y, *finals

    tensors = [ops.convert_to_tensor(a) for a in (given.x, *(given.states if states else []))]
    found, (y, *finals) = gradients(total, tensors, layer.trainable_variables)
    assert not np.any(arrays([y]))
    assert_close(finals, given.states if states else [np.zeros((B, N))] * cell.states, 0)
    dx, *others = arrays(found)
    assert not np.any(dx) and all(np.all(np.isfinite(g)) for g in others)


# Direction and states.


def test_directions_by_hand():
    x = np.array([1.0, 2, 3]).reshape(1, 3, 1)
    forward = single(1.0, 1.0, 0.0, "linear", return_sequences=True)
    backward = single(1.0, 1.0, 0.0, "linear", return_sequences=True, go_backwards=True)
    assert_close([forward(x), backward(x)], [[[[1], [3], [6]]], [[[3], [5], [6]]]])
    both = keras.layers.Bidirectional(kg.SimpleRNN(1, "linear", return_sequences=True, return_state=True))
    both.build((None, None, 1))
    both.set_weights([np.ones((1, 1)), np.ones((1, 1)), np.zeros(1)] * 2)
    y, *states = both(x)
    assert_close([y, *states], [[[[1, 6], [3, 5], [6, 3]]], [[6]], [[6]]])


OTHER = {  # a value that is not the default, for every argument
    "activation": "relu",
    "forget_bias": 3.0,
    "reset_after": True,
    "use_bias": False,
    "kernel_initializer": "he_normal",
    "recurrent_initializer": "he_uniform",
    "bias_initializer": "ones",
    "kernel_regularizer": "l1",
    "recurrent_regularizer": "l2",
    "bias_regularizer": "l1",
    "kernel_constraint": "max_norm",
    "recurrent_constraint": "unit_norm",
    "bias_constraint": "non_neg",
    "dropout": 0.25,
    "recurrent_dropout": 0.125,
    "seed": 9,
    "return_sequences": True,
    "return_state": True,
    "stateful": True,
    "unroll": True,
    "activity_regularizer": "l2",
    "trainable": False,
    "dtype": "float64",
}
SET_BY_BIDIRECTIONAL = {"go_backwards", "zero_output_for_mask", "name"}


@pytest.mark.parametrize("kind", [kg.SimpleRNN, kg.LSTM, kg.GRU])
def test_bidirectional_keeps_every_option(kind):
    own = [p for p in inspect.signature(kind.__init__).parameters if p not in ("self", "units", "options")]
    of_rnn = set(inspect.signature(keras.layers.RNN.__init__).parameters) - {"self", "cell", "kwargs"}
    assert set(OTHER) >= {*own, *CellOptions.__annotations__, *of_rnn} - SET_BY_BIDIRECTIONAL
    names = [*own, *(name for name in OTHER if name not in ("activation", "forget_bias", "reset_after"))]
    default = kind(3).get_config()
    for name in names:
        config = kind(3, **{name: OTHER[name]}).get_config()
        assert config[name] != default.get(name)
        both = keras.layers.Bidirectional(kind(3, **{name: OTHER[name]}))
        for layer in (both.forward_layer, both.backward_layer):
            assert type(layer) is kind and layer.get_config()[name] == config[name]


def test_bidirectional_hands_gradients_to_all_initial_states(rng, uncompiled):
    layer = keras.layers.Bidirectional(kg.LSTM(N, dtype=DTYPE), dtype=DTYPE)
    x, *states = (ops.convert_to_tensor(rng.normal(size=s).astype(DTYPE)) for s in [(B, T, D), *[(B, N)] * 4])
    layer(x, initial_state=states)

    def total(*states):
        y = layer(x, initial_state=list(states))
        return ops.sum(y), y

    found, (y,) = gradients(total, states)
    h, backward_h = np.split(*arrays([y]), 2, axis=-1)
    assert_close([h], [layer.forward_layer(x, initial_state=states[:2])], 0)
    assert_close([backward_h], [layer.backward_layer(x, initial_state=states[2:])], 0)
    assert all(np.abs(g).min() > 0 for g in arrays(found))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_two_halves_with_a_carried_state_are_one_run(cell, bidirectional, rng, uncompiled):
    x = rng.normal(size=(B, 6, D)).astype("float32")

    def wrapped(layer):
        return keras.layers.Bidirectional(layer) if bidirectional else layer

    layer = wrapped(cell.layer(stateful=True))
    first, second = arrays([layer(x[:, :3]), layer(x[:, 3:])])
    layer.reset_state()
    assert_close([layer(x[:, :3])], [first])
    if not bidirectional:
        layer.reset_state()
        assert_close([layer(x)], [second])
    else:  # the backward layer carries its own state from one piece into the next
        forward, backward = layer.forward_layer, layer.backward_layer
        layer.reset_state()
        assert_close([forward(x)], [second[:, :N]])
        swapped = np.concatenate([x[:, 3:], x[:, :3]], axis=1)
        assert_close([backward(swapped)], [second[:, N:]])


def test_another_batch_size_of_a_stateful_layer_is_an_error(rng):
    layer = kg.GRU(N, stateful=True)
    layer(rng.normal(size=(B, T, D)))
    with pytest.raises(ValueError, match="(?s)batch size.*Expected batch size: 3.*Received batch size: 4"):
        layer(rng.normal(size=(4, T, D)))


ONE_CELL_FAILS = [True, False] if keras.backend.backend() == "jax" else [True]  # with unroll


@pytest.mark.parametrize("units", [[3], [3, 6]])
@pytest.mark.parametrize("unroll", [False, True])
def test_cells_in_keras_rnn_return_their_states(units, unroll, rng):
    if len(units) == 1 and unroll in ONE_CELL_FAILS:
        pytest.skip("see the next test")
    layer = keras.layers.RNN([kg.LSTMCell(n) for n in units], return_state=True, unroll=unroll)
    y, *states = layer(rng.normal(size=(2, 5, 4)).astype("float32"))
    shapes = [s.shape[1] for s in keras.tree.flatten(states)]
    assert shapes == [n for n in units for _ in range(2)]
    assert_close([y], [keras.tree.flatten(states)[-2]], 0)


@pytest.mark.parametrize("kind", [keras.layers.LSTMCell, kg.LSTMCell])
@pytest.mark.parametrize("return_state", [False, True])
@pytest.mark.parametrize("unroll", ONE_CELL_FAILS)
def test_a_list_of_one_cell_is_a_fault_of_keras(kind, return_state, unroll, rng):
    """StackedRNNCells unpacks the states of its only cell, and these loops, without a mask, feed them back as they are.

    When this fails, Keras has mended it: then the case belongs into the test above.
    """
    layer = keras.layers.RNN([kind(3)], unroll=unroll, return_state=return_state)
    with pytest.raises(
        (IndexError, ValueError, TypeError), match="out of range|not enough values|lengths do not match"
    ):
        layer(rng.normal(size=(2, 5, 4)).astype("float32"))


# Lengths.


def test_any_length_of_an_unknown_time_axis(cell, rng, uncompiled):
    layer = cell.layer()
    model = keras.Sequential([keras.Input((None, D)), layer])
    for length in (1, 7, 50):
        x = rng.normal(size=(B, length, D)).astype("float32")
        assert_close([model.predict(x, verbose=0)], [keras.layers.RNN(layer.cell)(x)], 1e-5)


def test_no_step_at_all_is_told_by_the_running_graph(tf):
    cell = CELLS["lstm"]
    """Where the length is unknown until then; Keras's predict is such a graph from its second length on."""
    layer = cell.layer()
    graph = tf.function(layer, autograph=False, input_signature=[tf.TensorSpec((None, None, D))])
    model = keras.Sequential([keras.Input((None, D)), layer])
    for length in (1, 2):
        model.predict(np.ones((B, length, D)), verbose=0)
    for run in (graph, lambda x: model.predict(x, verbose=0)):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="at least one time step, received"):
            run(np.ones((B, 0, D), "float32"))


def test_ragged_input_is_told_what_to_do(cell, tf):
    with pytest.raises(ValueError, match="RaggedTensor.*to_tensor.*mask"):
        cell.layer()(tf.ragged.constant([[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]], ragged_rank=1))


# Several devices.


@pytest.mark.slow
def test_two_replicas_train_like_one(rng, replicas):
    x = rng.normal(size=(48, 6, 3)).astype("float32")
    x[::3, 4:] = 0

    def trained():
        keras.utils.set_random_seed(0)
        both = keras.layers.Bidirectional(kg.LSTM(4, return_sequences=True))
        layers = [both, kg.GRU(3, return_sequences=True), kg.SimpleRNN(3), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((6, 3)), keras.layers.Masking(), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse")
        model.fit(x, x[:, 0, :1], batch_size=16, epochs=2, shuffle=False, verbose=0)
        return model

    alone = trained()
    with replicas.scope():
        together = trained()
    assert together.distribute_strategy.num_replicas_in_sync == 2
    for a, b in zip(alone.get_weights(), together.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5)


# Saving.


def models():
    """Of named outputs: every layer alone, and in both directions, and the LSTM, which has two states, elsewhere."""
    x = keras.Input((None, D))
    layers = {name: CELLS[name].layer for name in ("rnn_tanh", "lstm", "gru", "gru_reset_after")}
    yield "alone", keras.Model(x, {name: layer(seed=1, dropout=0.1)(x) for name, layer in layers.items()})
    yield "both", keras.Model(x, {name: keras.layers.Bidirectional(layer())(x) for name, layer in layers.items()})
    lstm = layers["lstm"]
    inner = keras.Sequential([keras.Input((None, D)), lstm(return_sequences=True)])
    places = {
        "cell": keras.layers.RNN(lstm().cell)(x),
        "cells": keras.layers.RNN([lstm().cell, lstm().cell])(x),
        "nested": lstm()(inner(x)),
        "initial_state": lstm()(x, initial_state=[keras.layers.Dense(N)(x[:, 0]) for _ in range(2)]),
    }
    yield "elsewhere", keras.Model(x, places)


LOAD = """
import sys, numpy as np, keras, keras_gated
folder = sys.argv[1]
x, results = np.load(folder + "/x.npy"), {}

def keep(when):
    outputs = model.predict(x, verbose=0)
    results.update({f"{name} {output} {when}": y for output, y in outputs.items()})
    return outputs

for name in sys.argv[2:]:
    model = keras.models.load_model(f"{folder}/{name}.keras")
    kinds = {type(l).__module__ for l in model._flatten_layers() if hasattr(l, "equations")}
    assert kinds and all(k.startswith("keras_gated.cells.") for k in kinds), kinds
    outputs = keep("loaded")
    if name == "elsewhere":
        model.fit(x, {output: 0 * y for output, y in outputs.items()}, verbose=0)
        keep("trained")
    model.load_weights(f"{folder}/{name}.weights.h5")
    keep("weights")
np.savez(folder + "/results.npz", **results)
"""


@pytest.mark.slow
def test_a_new_process_loads_what_was_saved(rng, tmp_path):
    x = rng.normal(size=(4, T, D)).astype("float32")
    np.save(tmp_path / "x.npy", x)
    expected = {}

    def keep(when):
        expected.update({f"{name} {output} {when}": y for output, y in model.predict(x, verbose=0).items()})

    names = []
    for name, model in models():
        names.append(name)
        model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
        if name == "elsewhere":
            model.compile(keras.optimizers.Adam(0.01), "mse")
            y = {output: np.zeros((len(x), *tensor.shape[1:])) for output, tensor in model.output.items()}
            model.fit(x, y, epochs=2, verbose=0)
        model.save(tmp_path / f"{name}.keras")
        model.save_weights(tmp_path / f"{name}.weights.h5")
        keep("loaded")
        keep("weights")
        if name == "elsewhere":  # the optimizer's state comes along
            model.fit(x, y, verbose=0)
            keep("trained")
    subprocess.run([sys.executable, "-c", LOAD, str(tmp_path), *names], check=True)
    with np.load(tmp_path / "results.npz") as file:
        results = dict(file)
    assert set(results) == set(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(results[key], value, atol=1e-6 if key.endswith("trained") else 1e-7, err_msg=key)


@pytest.mark.slow
def test_without_the_import_loading_is_a_clear_error(rng, tmp_path):
    keras.Sequential([keras.Input((None, D)), kg.LSTM(N)]).save(tmp_path / "model.keras")
    code = "import sys, keras; keras.models.load_model(sys.argv[1])"
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.keras")], capture_output=True, text=True)
    assert run.returncode != 0 and "keras_gated>LSTM" in run.stderr


def test_clones_and_frozen_layers(cell, rng, uncompiled):
    model = keras.Sequential([keras.Input((None, D)), cell.layer(trainable=False), keras.layers.Dense(1)])
    clone = keras.models.clone_model(model)
    assert type(clone.layers[0]) is type(model.layers[0])
    assert clone.layers[0].get_config() == model.layers[0].get_config()
    clone.compile("sgd", "mse")
    frozen = clone.layers[0].get_weights()
    x = rng.normal(size=(4, T, D)).astype("float32")
    clone.fit(x, x[:, 0, :1], verbose=0)
    for a, b in zip(frozen, clone.layers[0].get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_an_exported_model_serves_any_length(cell, rng, tmp_path, tf):
    model = keras.Sequential([keras.Input((None, D)), keras.layers.Bidirectional(cell.layer())])
    model.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(tmp_path / "served")
    for size, length in [(1, 1), (3, 7), (9, 20)]:
        x = rng.normal(size=(size, length, D)).astype("float32")
        assert_close([served.serve(x)], [model(x)], 1e-6)
