"""Recurrent layers for Keras 3, written from the equations, that show you their gradients."""

from keras_gated import bptt, cells, clipping, decoding, gradients, tasks, testing, weights
from keras_gated.attention import AdditiveAttention, MultiplicativeAttention
from keras_gated.callbacks import GateActivity, GradientFlow, GradientNorms
from keras_gated.cells.gru import GRU, GRUCell
from keras_gated.cells.lstm import LSTM, LSTMCell
from keras_gated.cells.simple_rnn import SimpleRNN, SimpleRNNCell
from keras_gated.clipping import ClipNorm, suggest_max_norm
from keras_gated.seq2seq import Seq2Seq

__version__ = "0.2.0.dev0"

__all__ = [
    "AdditiveAttention",
    "ClipNorm",
    "GRU",
    "GRUCell",
    "GateActivity",
    "GradientFlow",
    "GradientNorms",
    "LSTM",
    "LSTMCell",
    "MultiplicativeAttention",
    "Seq2Seq",
    "SimpleRNN",
    "SimpleRNNCell",
    "bptt",
    "cells",
    "clipping",
    "decoding",
    "gradients",
    "suggest_max_norm",
    "tasks",
    "testing",
    "weights",
]
