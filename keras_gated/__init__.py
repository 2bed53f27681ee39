"""Recurrent layers for Keras 3, written from the equations, that show you their gradients."""

from keras_gated import bptt, clipping, gradients, tasks, weights
from keras_gated.callbacks import GateActivity, GradientFlow, GradientNorms
from keras_gated.cells.gru import GRU, GRUCell
from keras_gated.cells.lstm import LSTM, LSTMCell
from keras_gated.cells.simple_rnn import SimpleRNN, SimpleRNNCell
from keras_gated.clipping import ClipNorm, suggest_max_norm

__version__ = "0.1.0"

__all__ = [
    "ClipNorm",
    "GRU",
    "GRUCell",
    "GateActivity",
    "GradientFlow",
    "GradientNorms",
    "LSTM",
    "LSTMCell",
    "SimpleRNN",
    "SimpleRNNCell",
    "bptt",
    "clipping",
    "gradients",
    "suggest_max_norm",
    "tasks",
    "weights",
]
