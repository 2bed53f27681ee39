"""Where a model keeps its recurrent layers, what it feeds them, and what they do on it."""

import keras
import numpy as np
import pytest
import reference
from keras import ops
from table import CELLS, B, D, N, T, assert_close, batch, build, make

import keras_gated as kg
from keras_gated.gradients import layer_input, recurrent_layers
from keras_gated.gradients.trajectory import output_columns, trajectory

TOKENS = np.array([[3, 1, 2, 0, 0], [1, 2, 3, 4, 0], [0, 0, 2, 2, 0]])


def nested_model():
    """Layers in a submodel, in a Bidirectional, and two of one name."""
    tokens, inner = keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")
    embed = keras.layers.Embedding(5, D, mask_zero=True, name="embed")
    encoder = keras.Model(inner, keras.layers.LSTM(N, return_sequences=True, name="lstm")(embed(inner)), name="encoder")
    both = keras.layers.Bidirectional(kg.GRU(N, return_sequences=True, name="gru"), name="both")
    h = both(keras.layers.Embedding(5, D, mask_zero=True)(tokens))
    h = keras.layers.Concatenate()([encoder(tokens), h])
    h = keras.layers.LSTM(N, name="lstm")(h)
    return keras.Model(tokens, keras.layers.Dense(1)(h))


def test_every_recurrent_layer_is_found_once_and_in_order():
    labels = ["both/forward_gru", "both/backward_gru", "encoder/lstm", "lstm"]
    model = nested_model()
    found = recurrent_layers(model)
    assert sorted(found) == sorted(labels) and list(found)[-1] == "lstm"
    assert list(found).index("both/forward_gru") + 1 == list(found).index("both/backward_gru")
    assert [layer.go_backwards for layer in found.values()] == [label == "both/backward_gru" for label in found]
    assert len({id(layer) for layer in found.values()}) == 4
    assert list(recurrent_layers(nested_model())) == list(found)


def test_layers_that_share_a_name_or_an_object():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = kg.GRU(N, name="gru"), kg.GRU(N, name="gru")
            self.again = self.first

        def call(self, x):
            return self.first(x) + self.second(x)

    model = Model()
    assert recurrent_layers(model) == {"gru": model.first, "gru_1": model.second}


def test_a_layer_is_given_as_an_object_by_label_or_by_name():
    model = nested_model()
    layers = recurrent_layers(model)
    for layer in (layers["both/backward_gru"], "both/backward_gru", "backward_gru"):
        assert layer_input(model, TOKENS, layer).layer is layers["both/backward_gru"]
    assert layer_input(model, TOKENS, "lstm").layer is layers["lstm"]  # a label before a name


@pytest.mark.parametrize("layer", ["gru", keras.layers.LSTM(N, name="other"), None])
def test_another_layer_is_an_error_that_names_those_there_are(layer):
    with pytest.raises(ValueError, match="(?s)one recurrent layer.*is none.*both/forward_gru"):
        layer_input(nested_model(), TOKENS, layer)


def test_a_name_that_two_layers_have_is_an_error():
    layers = [keras.Sequential([kg.GRU(N, return_sequences=True, name="gru")], name=name) for name in ("a", "b")]
    model = keras.Sequential([keras.Input((T, D)), *layers])
    with pytest.raises(ValueError, match="several are called"):
        layer_input(model, np.zeros((B, T, D)), "gru")


def test_a_layer_receives_what_the_layers_before_it_give(rng):
    model = nested_model()
    embedding = model.get_layer("encoder").get_layer("embed")
    given = layer_input(model, TOKENS, "encoder/lstm")
    assert_close([given.x], [embedding(TOKENS)], 0)
    assert np.array_equal(given.mask, TOKENS != 0)
    assert [s.shape for s in given.initial_state] == [(3, N)] * 2


def test_an_initial_state_is_received_too(rng):
    x, states = keras.Input((T, D)), [keras.Input((N,)), keras.Input((N,))]
    model = keras.Model([x, *states], kg.LSTM(N)(x, initial_state=states))
    arrays = [rng.normal(size=s).astype("float32") for s in ((B, T, D), (B, N), (B, N))]
    given = layer_input(model, arrays, model.layers[-1])
    assert_close([given.x, *given.initial_state], arrays, 0)
    assert_close([trajectory(*given).states[:, -1, :N]], [model(arrays)], 1e-6)


def test_measuring_changes_nothing(rng):
    model = keras.Sequential(
        [
            keras.Input(batch_shape=(B, T, D)),
            kg.GRU(N, stateful=True, return_sequences=True, name="gru"),
            keras.layers.BatchNormalization(),
            keras.layers.LSTM(N, stateful=True, name="lstm"),
        ]
    )
    x = rng.normal(size=(B, T, D)).astype("float32")
    model(x)
    before = [np.array(v) for layer in recurrent_layers(model).values() for v in layer.states]
    assert all(np.any(state) for state in before)
    attributes = [set(vars(layer)) for layer in model.layers]
    given = layer_input(model, x, "lstm")
    assert_close([v for layer in recurrent_layers(model).values() for v in layer.states], before, 0)
    assert [set(vars(layer)) for layer in model.layers] == attributes
    assert_close(given.initial_state, before[1:], 0)


def test_a_layer_that_is_not_called_is_an_error():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.unused = kg.GRU(N, name="used"), kg.GRU(N, name="unused")

        def call(self, x):
            return self.used(x)

    model, x = Model(), np.zeros((B, T, D), "float32")
    with pytest.warns(UserWarning, match="unbuilt state"):
        model(x)
    with pytest.raises(ValueError, match="'unused' on x; it did not"):
        layer_input(model, x, "unused")


@pytest.mark.parametrize("go_backwards", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_states_are_those_of_the_reference(name, go_backwards, rng):
    cell = CELLS[name]
    layer, given = make(cell, rng, go_backwards=go_backwards), batch(cell, rng)
    x = np.where(given.mask[..., None], given.x, np.nan)  # what padding holds must not matter
    received = trajectory(layer, x, given.mask, given.states)
    h, finals = reference.run(cell.reference, given.x, given.states, layer.get_weights(), given.mask, go_backwards)
    started = np.cumsum(received.valid, axis=1) > 0
    assert np.array_equal(received.valid, given.mask[:, ::-1] if go_backwards else given.mask)
    assert_close([received.states[:, 0]], [np.concatenate(given.states, axis=1)], 0)
    assert_close([received.states[:, 1:, :N][started]], [h[started]], 1e-6)
    assert_close([received.states[:, -1]], [np.concatenate(finals, axis=1)], 1e-6)


@pytest.mark.parametrize("go_backwards", [False, True])
@pytest.mark.parametrize(
    "cell",
    [
        keras.layers.SimpleRNNCell,
        keras.layers.LSTMCell,
        keras.layers.GRUCell,
        kg.LSTMCell,
        lambda n, **options: keras.layers.StackedRNNCells([kg.LSTMCell(n + 1), keras.layers.GRUCell(n)]),
    ],
)
def test_states_are_those_that_keras_runs_through(cell, go_backwards, rng):
    layer = build(keras.layers.RNN(cell(N), return_sequences=True, return_state=True, go_backwards=go_backwards), rng)
    x, mask = rng.normal(size=(B, T, D)).astype("float32"), rng.random((B, T)) > 0.3
    h, *finals = layer(x, mask=ops.convert_to_tensor(mask))
    received = trajectory(layer, x, mask)
    assert_close([received.states[:, 1:, output_columns(layer)]], [h], 1e-5)
    finals = [ops.convert_to_numpy(s) for s in keras.tree.flatten(finals)]
    assert_close([received.states[:, -1]], [np.concatenate(finals, axis=1)], 1e-5)


def test_a_stateful_layer_starts_from_its_states_and_keeps_them(rng):
    layer = kg.GRU(N, stateful=True, return_sequences=True)
    x = rng.normal(size=(B, T, D)).astype("float32")
    first = layer(x)
    received = trajectory(layer, x)
    assert_close([received.states[:, 0]], [first[:, -1]], 0)
    assert_close([received.states[:, 1:]], [layer(x)], 1e-6)


@pytest.mark.parametrize(
    ("layer", "x", "mask", "message"),
    [
        ("lstm", (B, T, D), None, "keras.layers.RNN, received 'lstm'"),
        (keras.layers.Dense(2), (B, T, D), None, "keras.layers.RNN, received <Dense"),
        (kg.GRU(N), (B, T, D), None, "that has weights"),
        ("built", (B, D), None, r"\(batch, time, features\).*received \(3, 2\)"),
        ("built", (B, 0, D), None, r"received \(3, 0, 2\)"),
        ("built", (B, T, D), (B, T - 1), r"mask of shape \(3, 5\).*received \(3, 4\)"),
    ],
)
def test_errors_say_what_was_expected(layer, x, mask, message, rng):
    layer = build(kg.GRU(N), rng) if layer == "built" else layer
    with pytest.raises(ValueError, match=message):
        trajectory(layer, np.zeros(x), None if mask is None else np.ones(mask))
