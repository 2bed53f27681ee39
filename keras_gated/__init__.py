"""Recurrent layers for Keras 3, written from the equations, that show you their gradients."""

from keras_gated import bptt, weights
from keras_gated.callbacks import GradientNorms
from keras_gated.cells.gru import GRU, GRUCell
from keras_gated.cells.lstm import LSTM, LSTMCell
from keras_gated.cells.simple_rnn import SimpleRNN, SimpleRNNCell

__version__ = "0.1.0"

__all__ = ["GRU", "GRUCell", "GradientNorms", "LSTM", "LSTMCell", "SimpleRNN", "SimpleRNNCell", "bptt", "weights"]
