"""Encoder-decoder: `Seq2Seq`, and what a model of token pairs is made of."""

from keras_gated.seq2seq.coders import Decoder, Encoder, State
from keras_gated.seq2seq.metrics import Perplexity, SequenceAccuracy, TokenAccuracy, TokenCrossentropy
from keras_gated.seq2seq.model import Seq2Seq

__all__ = [
    "Decoder",
    "Encoder",
    "Perplexity",
    "Seq2Seq",
    "SequenceAccuracy",
    "State",
    "TokenAccuracy",
    "TokenCrossentropy",
]
