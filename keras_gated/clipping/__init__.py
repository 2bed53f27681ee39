"""Clipping gradients by their norm (eq. rnn-clip): of a list, on an optimizer, and with which threshold."""

from keras_gated.clipping.clip import clip, norm
from keras_gated.clipping.clip_norm import ClipNorm
from keras_gated.clipping.suggestion import Suggestion, suggest_max_norm

__all__ = ["ClipNorm", "Suggestion", "clip", "norm", "suggest_max_norm"]
