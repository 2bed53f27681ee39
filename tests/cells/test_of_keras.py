"""Keras's own tests of its recurrent layers, run with ours in their place.

They come in Keras's wheel and are loaded from there; only the namespace `layers` that they see is changed.
"""

import importlib
import types
import unittest

import keras
import pytest
from keras.src import layers

import keras_gated as kg

MODULES = ["lstm_test", "gru_test", "simple_rnn_test", "bidirectional_test", "rnn_test", "stacked_rnn_cells_test"]
CUDNN = "there is no use_cudnn to keep or to dispatch on"
CANNOT_APPLY = {
    "gru_test.test_legacy_implementation_argument": "there is one implementation, and no argument for it",
    "bidirectional_test.test_keeps_use_cudnn": CUDNN,
    "bidirectional_test.test_fused_lstm_eligibility": CUDNN,
    "bidirectional_test.test_fused_lstm_matches_unfused": CUDNN,
    "bidirectional_test.test_fused_gru_eligibility": CUDNN,
    "bidirectional_test.test_fused_gru_matches_unfused": CUDNN,
    "bidirectional_test.test_torch_cudnn_bidirectional_gru_dispatch_fires": CUDNN,
    "gru_test.test_torch_cudnn_dispatch_fires": CUDNN,
}


@keras.saving.register_keras_serializable("tests")
class WithZNegated(keras.initializers.Initializer):
    """What another initializer gives, with its z block negated: Keras's z keeps where ours writes."""

    def __init__(self, initializer):
        self.initializer = keras.initializers.get(initializer)

    def __call__(self, shape, dtype=None):
        z, r, h = keras.ops.split(self.initializer(shape, dtype=dtype), 3, axis=-1)
        return keras.ops.concatenate([-z, r, h], axis=-1)

    def get_config(self):
        return {"initializer": keras.initializers.serialize(self.initializer)}


def lstm(kind):
    """kind under Keras's arguments."""

    def make(units, unit_forget_bias=True, implementation=2, **options):
        return kind(units, forget_bias=1.0 if unit_forget_bias else None, **options)

    return make


def gru(kind):
    defaults = {"kernel": "glorot_uniform", "recurrent": "orthogonal", "bias": "zeros"}

    def make(units, reset_after=True, implementation=2, **options):
        for weight, default in defaults.items():
            name = f"{weight}_initializer"
            options[name] = WithZNegated(options.get(name, default))
        return kind(units, reset_after=reset_after, **options)

    return make


OURS = {
    "SimpleRNN": kg.SimpleRNN,
    "SimpleRNNCell": kg.SimpleRNNCell,
    "LSTM": lstm(kg.LSTM),
    "LSTMCell": lstm(kg.LSTMCell),
    "GRU": gru(kg.GRU),
    "GRUCell": gru(kg.GRUCell),
}


def cases():
    """-> {module.method: test case} of all tests in Keras's modules."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(f"keras.src.layers.rnn.{name}")
        for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
            for case in suite:
                if type(case).__module__ == module.__name__ and case._testMethodName != "test_session":
                    found[f"{name}.{case._testMethodName}"] = case
    return found


CASES = cases()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", [name for name in CASES if name not in CANNOT_APPLY])
def test_of_keras(name, monkeypatch, uncompiled):
    case = CASES[name]
    module = importlib.import_module(type(case).__module__)
    monkeypatch.setattr(module, "layers", types.SimpleNamespace(**{**vars(layers), **OURS}))
    result = unittest.TestResult()
    case.run(result)
    faults = [text for _, text in [*result.failures, *result.errors]]
    assert not faults, faults[0]


def test_the_list_of_exceptions_is_not_out_of_date():
    assert len(CASES) > 40
    assert set(CANNOT_APPLY) <= set(CASES)
