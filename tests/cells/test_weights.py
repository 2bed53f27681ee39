"""Weights to and from keras.layers and torch.nn: the same function on the other side, and back bit for bit."""

import keras
import numpy as np
import pytest
import reference
from table import (
    CELLS,
    DTYPE,
    B,
    D,
    N,
    T,
    assert_close,
    batch,
    build,
    make,
    mask_for_keras,
    values_and_gradients,
)

import keras_gated as kg

KERAS = {
    "rnn_tanh": (keras.layers.SimpleRNN, {}),
    "rnn_relu": (keras.layers.SimpleRNN, {"activation": "relu"}),
    "lstm": (keras.layers.LSTM, {}),
    "gru": (keras.layers.GRU, {"reset_after": False}),
    "gru_reset_after": (keras.layers.GRU, {"reset_after": True}),
}
OPTIONS = {"return_sequences": True, "return_state": True, "dropout": 0.2, "recurrent_dropout": 0.1, "seed": 3}


@pytest.mark.parametrize("name", KERAS)
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("dtype", sorted({"float32", DTYPE}))
def test_there_and_back_with_keras(name, use_bias, dtype, rng, uncompiled):
    cell, (kind, _), tolerance = CELLS[name], KERAS[name], {"float32": 1e-6, "float64": 1e-12}[dtype]
    layer = make(cell, rng, dtype=dtype, use_bias=use_bias, **OPTIONS)
    theirs = kg.weights.to_keras(layer)
    assert type(theirs) is kind and theirs.dtype_policy == layer.dtype_policy
    given = batch(cell, rng)
    mask, run_with = mask_for_keras(given), {"training": False}
    outputs, gradients = values_and_gradients(layer, layer, given, mask, **run_with)
    outputs_of_keras, gradients_of_keras = values_and_gradients(theirs, theirs, given, mask, **run_with)
    assert_close(outputs, outputs_of_keras, tolerance)
    states = 1 + cell.states
    assert_close(gradients[:states], gradients_of_keras[:states], 10 * tolerance)

    again = kg.weights.from_keras(theirs)
    for a, b in zip(again.get_weights(), layer.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    changed = {"forget_bias", "bias_initializer"}
    assert {k: v for k, v in again.get_config().items() if k not in changed} == {
        k: v for k, v in layer.get_config().items() if k not in changed
    }


@pytest.mark.parametrize("name", KERAS)
def test_from_keras(name, rng, uncompiled):
    kind, options = KERAS[name]
    theirs = build(kind(N, go_backwards=True, kernel_regularizer="l2", name="theirs", **options), rng)
    ours = kg.weights.from_keras(theirs)
    assert type(ours).__module__.startswith("keras_gated") and ours.name == "theirs"
    x = rng.normal(size=(B, T, D)).astype("float32")
    assert_close([ours(x)], [theirs(x)])
    assert ours.go_backwards and isinstance(ours.cell.kernel.regularizer, keras.regularizers.L2)


TORCH = {
    "rnn_tanh": (reference.torch_rnn, 1),
    "lstm": (reference.torch_lstm, 4),
    "gru_reset_after": (reference.torch_gru, 3),
}


def state_dict(rng, blocks, suffix="_l0", prefix=""):
    shapes = {"weight_ih": (blocks * N, D), "weight_hh": (blocks * N, N), "bias_ih": blocks * N, "bias_hh": blocks * N}
    return {f"{prefix}{name}{suffix}": rng.normal(size=shape).astype(DTYPE) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", TORCH)
def test_from_torch_and_back(name, rng):
    cell, (step, blocks) = CELLS[name], TORCH[name]
    weights, given = state_dict(rng, blocks), batch(cell, rng)
    layer = kg.weights.from_torch(weights, cell.layer(dtype=DTYPE, return_sequences=True, return_state=True))
    outputs, finals = reference.run(step, given.x, given.states, list(weights.values()))
    assert_close(layer(given.x, initial_state=given.states), [outputs, *finals], 1e-12)

    back = kg.weights.to_torch(layer)
    assert list(back) == list(weights)
    outputs, _ = reference.run(step, given.x, given.states, list(back.values()))
    assert_close([layer(given.x, initial_state=given.states)[0]], [outputs], 1e-12)
    if name == "gru_reset_after":
        for key in weights:
            np.testing.assert_array_equal(back[key], weights[key])
    again = kg.weights.from_torch(back, cell.layer(dtype=DTYPE))
    for a, b in zip(again.get_weights(), layer.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_layer_and_direction_of_many(rng):
    wanted = state_dict(rng, 4, "_l1_reverse", "encoder.")
    others = {**state_dict(rng, 4, "_l1", "encoder."), **state_dict(rng, 4, "_l0_reverse", "encoder.")}
    where = {"index": 1, "reverse": True, "prefix": "encoder."}
    layer = kg.weights.from_torch({**others, **wanted}, kg.LSTM(N, go_backwards=True), **where)
    alone = kg.weights.from_torch({k[8:].replace("1_reverse", "0"): v for k, v in wanted.items()}, kg.LSTM(N))
    for a, b in zip(layer.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert list(kg.weights.to_torch(layer, **where)) == list(wanted)


def test_without_biases(rng):
    weights = {k: v for k, v in state_dict(rng, 3).items() if "bias" not in k}
    layer = kg.weights.from_torch(weights, kg.GRU(N, reset_after=True, use_bias=False, dtype=DTYPE))
    back = kg.weights.to_torch(layer)
    for key in weights:
        np.testing.assert_array_equal(back[key], weights[key])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda w: kg.weights.from_torch(w, kg.GRU(N)), r"expects GRU\(reset_after=True\), received the chapter's"),
        (lambda w: kg.weights.from_torch(w, kg.LSTM(N), index=1), "weight_ih_l1.*received of these.*none.*Check index"),
        (lambda w: kg.weights.from_torch(w, kg.LSTM(N, use_bias=False)), "use_bias"),
        (lambda w: kg.weights.from_torch(w, kg.LSTM(N + 1)), r"of the shapes .*\(2, 16\).*received .*\(2, 12\)"),
        (lambda w: kg.weights.from_torch({**w, "weight_hr_l0": 0}, kg.LSTM(N)), "proj_size"),
        (lambda w: kg.weights.to_torch(kg.LSTM(N)), "has weights, received 'lstm"),
        (lambda w: kg.weights.to_keras(keras.layers.LSTM(N)), "keras_gated's LSTM.*received keras"),
        (lambda w: kg.weights.from_keras(kg.LSTM(N)), "keras's LSTM.*received keras_gated"),
        (
            lambda w: kg.weights.from_keras(build(keras.layers.LSTM(N, activation="relu"), np.random.default_rng(0))),
            "'tanh' and recurrent_activation 'sigmoid', received .'relu', 'sigmoid'",
        ),
    ],
)
def test_bad_input_gets_a_clear_sentence(wrong, message, rng):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        wrong(state_dict(rng, 4))
