"""Diagnoses of known cases, and the command line."""

import json
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
from tiers import daily

import keras_gated as kg
from keras_gated.__main__ import main
from keras_gated.gradients import diagnose

pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("of the TensorFlow backend", allow_module_level=True)

T, D = 60, 3
K = keras.layers


def model_with(*layers):
    model = keras.Sequential([keras.Input((None, D)), *layers, K.Dense(1, name="read_out")])
    model.compile(loss="mse")
    model.optimizer.build(model.trainable_variables)  # or Keras warns where it is loaded
    return model


def batch(rng, steps=T, scale=1.0, examples=8):
    return (scale * rng.normal(size=(examples, steps, D))).astype("float32"), rng.normal(size=(examples, 1))


def only(diagnosis):
    (layer,) = diagnosis.layers.values()
    return layer


def with_radius(layer, radius):
    layer.build((None, None, D))
    W, U, b = layer.get_weights()
    layer.set_weights([W, radius * U / np.abs(np.linalg.eigvals(U)).max(), b])
    return layer


REGIMES = {1.5: "exploding", 0.5: "vanishing", 1.0: "healthy"}
RADII = [
    (kind, activation, radius)
    for kind in (kg.SimpleRNN, K.SimpleRNN)
    for activation in ("linear", "tanh")
    for radius in REGIMES
]


@pytest.mark.parametrize(
    ("kind", "activation", "radius"),
    daily(
        RADII,
        *((kg.SimpleRNN, "linear", radius) for radius in REGIMES),
        (kg.SimpleRNN, "tanh", 0.5),
        (K.SimpleRNN, "tanh", 1.5),
    ),
)
def test_the_spectral_radius_decides(kind, activation, radius, rng, uncompiled):
    layer, regime = with_radius(kind(16, activation=activation), radius), REGIMES[radius]
    steps, scale = 30, 1e-9 if activation == "tanh" else 1.0  # where tanh is linear
    found = only(diagnose(model_with(layer), *batch(rng, steps, scale)))
    assert found.regime == regime and found.steps == steps
    assert found.radius == {"h": pytest.approx(radius, rel=1e-5)}
    assert found.growth == pytest.approx(radius, rel=0.02)  # U is orthogonal
    low, high = found.growth_interval
    assert low <= found.growth <= high and high - low < 0.01
    if regime == "vanishing":
        assert found.horizon == 7 and "fades to 1 % after 7 of 30 steps" in found.advice  # 0.5^6 > 0.01 > 0.5^7
        assert "forget_bias=4) would retain 0.58" in found.advice and found.exploding == 0
    elif regime == "exploding":
        assert found.horizon is None and "spectral radius 1.5" in found.advice and "ClipNorm" in found.advice
        assert found.exploding == pytest.approx(24 / 30)  # 1.5^5 < 10 < 1.5^6
    else:
        assert "reaches all 30 steps" in found.advice


@pytest.mark.parametrize(
    ("kind", "go_backwards"),
    daily([(kg.LSTM, False), (kg.LSTM, True), (K.LSTM, False), (K.LSTM, True)], (kg.LSTM, False)),
)
def test_a_forget_bias_of_1_forgets_and_5_does_not(kind, go_backwards, rng):
    def diagnosed(bias):
        layer = kind(16, go_backwards=go_backwards)
        layer.build((None, None, D))
        W, U, b = layer.get_weights()
        layer.set_weights([0.1 * W, 0.1 * U, np.repeat([0, bias, 0, 0], 16)])
        return only(diagnose(model_with(layer), *batch(rng)))

    short, long = diagnosed(1), diagnosed(5)
    assert (short.regime, long.regime) == ("vanishing", "healthy")
    assert short.horizon in (14, 15, 16)  # σ(1)^15 = 0.009
    assert short.growth == pytest.approx(0.731, abs=0.01) and long.growth == pytest.approx(0.993, abs=0.01)
    change = "forget_bias=5" if kind is kg.LSTM else "A bias of 5 of the gate f"  # Keras's LSTM has no such option
    assert f"{change} would retain 0.67 of it over all 60" in short.advice  # σ(5)^60
    assert short.retention[0] == pytest.approx(3.19, rel=0.05) and long.retention[0] == pytest.approx(149, rel=0.05)
    assert long.high["f"] > 0.9 and "shut" not in long.advice
    assert set(short.norms) == {"h", "c"} and short.norms["c"].shape == (T,)


@pytest.mark.slow
def test_the_models_of_the_quickstart(monkeypatch):
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[2] / "scripts"))
    import quickstart

    x, _, y, _ = quickstart.load()
    models = {name: quickstart.build(layer, x.shape[1:]) for name, layer in quickstart.LAYERS.items()}
    found = {name: diagnose(model, x[:64], y[:64]).layers["recurrent"] for name, model in models.items()}
    simple, short, long = (
        found[name] for name in ("SimpleRNN(64)", "LSTM(64, forget_bias=1)", "LSTM(64, forget_bias=5)")
    )
    assert [layer.regime for layer in (simple, short, long)] == ["vanishing", "vanishing", "healthy"]
    assert 80 < simple.horizon < 108 and 15 < short.horizon < 35
    assert "LSTM(units, forget_bias=6) would retain 0.77" in simple.advice
    assert "after 24 of 108 steps. forget_bias=6 would retain 0.77" in short.advice
    assert 2 < short.retention[0] < 5 and long.retention[0] > 100


@pytest.mark.parametrize(("kind", "advice"), [(kg.GRU, "A bias of -5 of"), (K.GRU, "A bias of 5 of")])
def test_a_gru_is_told_the_bias_of_its_own_update_gate(kind, advice, rng, uncompiled):
    layer = kind(16)
    layer.build((None, None, D))
    found = only(diagnose(model_with(layer), *batch(rng)))
    assert found.regime == "vanishing" and advice in found.advice
    W, U, b = layer.get_weights()
    b[..., :16] = (-5 if kind is kg.GRU else 5) / (1 if b.ndim == 1 else 2)
    layer.set_weights([0.1 * W, 0.1 * U, b])
    assert only(diagnose(model_with(layer), *batch(rng))).regime == "healthy"


def test_lags_count_from_the_end_of_each_example(rng):
    """Padding counts neither as vanishing nor in the mean."""
    layer = with_radius(kg.SimpleRNN(8, "linear"), 0.5)
    x, y = batch(rng, 30, examples=6)
    x[:3, 20:] = 0  # three are shorter
    x[:, 16:18] = 0  # and all have a hole
    found = only(diagnose(model_with(K.Masking(), layer), x, y))
    assert found.steps == 28 and found.horizon == 7
    np.testing.assert_allclose((found.norms["h"] / found.norms["h"][0])[:18], 0.5 ** np.arange(18), rtol=1e-4)


def test_gates_that_are_shut_are_named(rng):
    layer = kg.LSTM(16, forget_bias=5)
    layer.build((None, None, D))
    W, U, b = layer.get_weights()
    b[:16] = -9
    layer.set_weights([W, U, b])
    assert "Most units have i shut or open" in only(diagnose(model_with(layer), *batch(rng))).advice


@pytest.mark.parametrize(
    ("where", "words"), [("x", "x holds"), ("weights", "the model has weights"), ("y", "the loss is")]
)
def test_numbers_that_are_not_finite(where, words, rng, uncompiled):
    model, (x, y) = model_with(kg.GRU(4)), batch(rng)
    if where == "weights":
        model.set_weights([np.full_like(w, np.nan) for w in model.get_weights()])
    {"x": x, "y": y}.get(where, np.zeros((1, 1)))[0] = np.nan
    found = only(diagnose(model, x, y))
    assert found.regime == "exploding" and found.advice.startswith(words)
    assert np.isinf(found.norms["h"]).any() and found.exploding > 0
    assert str(found) and "nan" not in found.advice.replace("loss is nan", "")


def test_no_gradient_at_all(rng):
    model = model_with(kg.GRU(4))
    model.layers[-1].set_weights([np.zeros((4, 1)), np.zeros(1)])
    found = only(diagnose(model, *batch(rng)))
    assert found.regime == "vanishing" and found.steps == 0 and "no gradient arrives" in found.advice


def test_every_layer_of_a_model_and_what_it_prints(rng, uncompiled):
    both = K.Bidirectional(kg.GRU(4, return_sequences=True, name="gru"), name="both")
    model = model_with(both, K.LSTM(4, name="lstm"))
    before = [np.array(v) for v in model.variables]
    found = diagnose(model, *batch(rng, 20, examples=1))
    assert list(found.layers) == ["both/forward_gru", "both/backward_gru", "lstm"]
    assert all(label in str(found) for label in found.layers) and str(found).startswith("loss ")
    assert np.isnan(found.layers["lstm"].growth_interval).all()  # one example has no spread
    assert all(np.array_equal(a, v) for a, v in zip(before, model.variables, strict=True))
    as_read = json.loads(json.dumps(found.to_dict()))
    assert as_read["layers"]["lstm"]["norms"]["c"] == found.layers["lstm"].norms["c"].tolist()
    assert as_read["layers"]["lstm"]["horizon"] == found.layers["lstm"].horizon


def test_a_diagnosis_draws_itself(rng, uncompiled):
    pytest.importorskip("matplotlib")
    found = diagnose(model_with(kg.LSTM(4, name="lstm")), *batch(rng))
    (axes,) = found.plot().axes
    shown = {line.get_label(): line.get_ydata() for line in axes.lines}
    assert list(shown) == ["‖∂L/∂h_t‖ of lstm", "‖∂L/∂c_t‖ of lstm"] and "lag" in axes.get_xlabel()
    np.testing.assert_array_equal(shown["‖∂L/∂c_t‖ of lstm"], found.layers["lstm"].norms["c"])


def test_a_model_without_recurrent_layers_is_an_error(rng):
    model = keras.Sequential([keras.Input((2,)), K.Dense(1)], name="flat")
    model.compile(loss="mse")
    with pytest.raises(ValueError, match="expects a model with recurrent layers; 'flat' has none"):
        diagnose(model, np.ones((1, 2)), np.ones((1, 1)))


# The command line.


@pytest.fixture
def saved(tmp_path, rng):
    model_with(kg.LSTM(4, name="lstm")).save(tmp_path / "model.keras")
    x, y = batch(rng, examples=70)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    return tmp_path


def test_the_command_prints_what_diagnose_says(saved, capsys):
    main(["diagnose", str(saved / "model.keras"), str(saved / "data.npz"), "--examples", "8"])
    model = keras.models.load_model(saved / "model.keras")
    with np.load(saved / "data.npz") as data:
        expected = diagnose(model, data["x"][:8], data["y"][:8])
    assert capsys.readouterr().out == f"{expected}\n"
    pytest.importorskip("matplotlib")
    main(["diagnose", str(saved / "model.keras"), str(saved / "data.npz"), "--json", "--figure", str(saved / "a.png")])
    assert json.loads(capsys.readouterr().out)["layers"]["lstm"]["steps"] == T
    assert (saved / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_python_m_keras_gated_is_that_command():
    command = [sys.executable, "-m", "keras_gated", "diagnose", "none.keras", "none.npz"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1 and run.stderr.splitlines()[-1].startswith(
        "python -m keras_gated: There is no file none"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "none.keras"}, "no file .*none.keras"),
        ({"data": "none.npz"}, r"no file .*none.npz. Write one with numpy.savez"),
        ({"data": "text.npz"}, "text.npz is no .npz of arrays"),
        ({"data": "z.npz"}, "holds z, expected the arrays x and y"),
        ({"data": "wide.npz"}, r"takes x of shape \(None, None, 3\).* holds x \(8, 5, 4\) and y \(8, 1\)"),
        ({"data": "tall.npz"}, r"holds x \(8, 5, 3\) and y \(8, 7, 2\)"),
        ({"model": "flat.keras"}, "has none"),
        ({"model": "raw.keras"}, "compiled model"),
        ({"model": "text.npz"}, ""),
        ({"examples": "0"}, "--examples expects a positive number, received 0"),
    ],
)
def test_what_cannot_be_diagnosed_ends_in_one_sentence(saved, change, message, rng):
    (saved / "text.npz").write_text("x, y")
    np.savez(saved / "z.npz", z=np.ones(3))
    np.savez(saved / "wide.npz", x=np.ones((8, 5, 4)), y=np.ones((8, 1)))
    np.savez(saved / "tall.npz", x=np.ones((8, 5, 3)), y=np.ones((8, 7, 2)))
    flat = keras.Sequential([keras.Input((None, D)), K.Dense(1)])
    flat.compile(loss="mse")
    flat.optimizer.build(flat.trainable_variables)
    flat.save(saved / "flat.keras")
    keras.Sequential([keras.Input((None, D)), kg.GRU(2)]).save(saved / "raw.keras")
    given = {"model": "model.keras", "data": "data.npz", "examples": "8", **change}
    with pytest.raises(SystemExit, match=f"(?s)python -m keras_gated: .*{message}") as raised:
        main(["diagnose", str(saved / given["model"]), str(saved / given["data"]), "--examples", given["examples"]])
    assert "Traceback" not in str(raised.value)
