"""GateActivity: what is written is what gate_activity and retention_time measure at that moment."""

import keras
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiers import daily

import keras_gated as kg

tf = pytest.importorskip("tensorflow")
K = keras.layers
SIZE, BATCH, T, D = 40, 8, 6, 3
STEPS = SIZE // BATCH


@pytest.fixture
def data(rng):
    x = rng.normal(size=(SIZE, T, D)).astype("float32")
    x[1:20, 4:] = 0
    return x, x[:, 0, :1]


@pytest.fixture
def model(rng):
    both = K.Bidirectional(kg.LSTM(4, return_sequences=True, dropout=0.5, seed=1), name="both")
    return compiled(both, K.GRU(3, return_sequences=True, name="theirs"), kg.SimpleRNN(3))


@pytest.fixture
def small(rng):
    return compiled(kg.LSTM(4, return_sequences=True, dropout=0.5, seed=1), K.GRU(3, name="theirs"))


def compiled(*layers):
    model = keras.Sequential([keras.Input((None, D)), K.Masking(), *layers, K.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


class Measured(keras.callbacks.Callback):
    """Measures for itself at the end of each epoch."""

    def __init__(self, x):
        super().__init__()
        self.x, self.found = x, []

    def on_epoch_end(self, epoch, logs=None):
        given = {
            label: kg.gradients.layer_input(self.model, self.x, label)
            for label, layer in kg.gradients.recurrent_layers(self.model).items()
            if not isinstance(layer, kg.SimpleRNN)
        }
        activity = {label: kg.gradients.gate_activity(*of_layer) for label, of_layer in given.items()}
        retention = {label: kg.gradients.retention_time(*of_layer) for label, of_layer in given.items()}
        self.found.append((activity, retention))


def written(folder):
    """{tag: ([step], [number])}"""
    read = EventAccumulator(str(folder / "layer_gates"), size_guidance={"tensors": 0}).Reload()
    tags = [tag for tag in read.Tags()["tensors"] if tag.startswith("gate/")]
    return {
        tag: ([e.step for e in events], [float(tf.make_ndarray(e.tensor_proto)) for e in events])
        for tag in tags
        for events in [read.Tensors(tag)]
    }


@pytest.mark.parametrize(("name", "of_lstm"), daily([("small", 1), ("model", 2)], ("small", 1)))
def test_what_is_written_is_what_is_measured(name, of_lstm, data, tmp_path, request, uncompiled):
    model = request.getfixturevalue(name)
    gates, by_hand = kg.GateActivity(tmp_path, data[0][:16]), Measured(data[0][:16])
    for _ in range(2):
        model.fit(*data, batch_size=BATCH, epochs=2, verbose=0, callbacks=[gates, by_hand])
    tags = written(tmp_path)
    names = [label for label in kg.gradients.recurrent_layers(model) if "simple" not in label]
    assert len(names) == of_lstm + 1 and len(tags) == of_lstm * (3 * 3 + 1) + (2 * 3 + 1)
    for label in names:
        steps, retention = tags[f"gate/{label}/retention"]
        assert steps == [n * STEPS for n in (0, 1, 2, 2, 3, 4)]
        after_epochs = np.array([1, 2, 4, 5])
        expected = [np.median(of_epoch[label]) for _, of_epoch in by_hand.found]
        np.testing.assert_allclose(np.array(retention)[after_epochs], expected, rtol=1e-4)
        for gate in by_hand.found[0][0][label]:
            for what in ("mean", "low", "high"):
                _, numbers = tags[f"gate/{label}/{gate}/{what}"]
                expected = [np.nanmean(getattr(activity[label][gate], what)) for activity, _ in by_hand.found]
                np.testing.assert_allclose(np.array(numbers)[after_epochs], expected, rtol=1e-4, atol=1e-6)
    assert len(set(np.round(tags[f"gate/{names[0]}/f/mean"][1], 6))) > 3  # training moved them


@pytest.mark.parametrize("name", daily(["small", "model"], "small"))
def test_it_changes_nothing_in_the_training(name, data, tmp_path, request):
    model = request.getfixturevalue(name)
    start, trained = model.get_weights(), []
    for callbacks in ([], [kg.GateActivity(tmp_path, data[0][:16], every=2)]):
        model.set_weights(start)
        model.compile(keras.optimizers.Adam(0.1), "mse")
        for layer in kg.gradients.recurrent_layers(model).values():
            layer.cell.seed_generator.state.assign([7, 7])
        model.fit(*data, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
        trained.append(model.get_weights())
    for plain, watched in zip(*trained, strict=True):
        np.testing.assert_array_equal(plain, watched)


def test_every_so_many_steps(small, data, tmp_path, uncompiled):
    small.fit(*data, batch_size=BATCH, epochs=2, verbose=0, callbacks=[kg.GateActivity(tmp_path, data[0][:4], every=3)])
    steps, _ = written(tmp_path)["gate/theirs/z/mean"]
    assert steps == [0, 3, 6, 9]


@pytest.mark.parametrize("every", [0, 1.5, -1])
def test_how_often_must_be_said(every, tmp_path):
    with pytest.raises(ValueError, match='expects every to be "epoch" or a positive integer, received'):
        kg.GateActivity(tmp_path, np.zeros((1, T, D)), every=every)


def test_a_model_without_gates_is_told(data, rng, tmp_path):
    model = keras.Sequential([keras.Input((T, D)), kg.SimpleRNN(3, name="plain"), K.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="GateActivity expects a model with an LSTM or GRU layer, .* with plain"):
        model.fit(*data, verbose=0, callbacks=[kg.GateActivity(tmp_path, data[0])])
