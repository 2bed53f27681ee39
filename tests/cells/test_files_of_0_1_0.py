"""Files that version 0.1.0 wrote load, and give the values that it gave."""

import pathlib

import keras
import numpy as np
import pytest

import keras_gated as kg

FOLDER = pathlib.Path(__file__).parents[1] / "data/version_0_1_0"
VALUES = dict(np.load(FOLDER / "values.npz"))
LAYERS = ["simple_rnn", "lstm", "gru", "gru_reset_after", "bidirectional", "cells", "clip_norm"]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_0_1_0(name, uncompiled):
    model = keras.models.load_model(FOLDER / f"{name}.keras")
    np.testing.assert_allclose(model(VALUES["x"]), VALUES[name], atol=1e-6)
    if name == "lstm":
        assert model.layers[0].get_config()["forget_bias"] == 2.0 and model.layers[0].cell.dropout == 0.1


def test_attention_of_0_1_0():
    model = keras.models.load_model(FOLDER / "attention.keras")
    for i, y in enumerate(model(VALUES["x"])):
        np.testing.assert_allclose(y, VALUES[f"attention_{i}"], atol=1e-6)


def test_an_optimizer_of_0_1_0_goes_on_where_it_was(tf):
    model = keras.models.load_model(FOLDER / "clip_norm.keras")
    assert isinstance(model.optimizer, kg.ClipNorm) and model.optimizer.max_norm == 0.5
    x = VALUES["x"]
    model.fit(x, x[:, 0, :1], batch_size=3, verbose=0)
    np.testing.assert_allclose(model(x), VALUES["clip_norm_trained"], atol=1e-5)


def test_an_encoder_decoder_of_0_1_0(tf, uncompiled):
    model = keras.models.load_model(FOLDER / "seq2seq.keras")
    source, target = VALUES["source"], VALUES["target"]
    np.testing.assert_allclose(model.score(source, target), VALUES["score"], atol=1e-5)
    np.testing.assert_allclose(model.evaluate((source, target), verbose=0), VALUES["evaluated"], atol=1e-5)
