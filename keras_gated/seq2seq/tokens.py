"""Tokens: sequences of integers, sources and targets, and pairs of them as Keras hands them around.

A source holds its tokens anywhere.  A target is the start token, its tokens, the end token, and then padding, 0, alone.

Axes: B batch, T tokens.
"""

import keras
import numpy as np
from keras import ops

PADDING = 0


def teacher_forcing(target):
    """Target <s> a b </s> (B, T + 1) -> inputs <s> a b and labels a b </s>, (B, T) each.

    Rows are padded on the right; where there is no label, there is no input.
    """
    labels = target[:, 1:]
    return ops.where(labels == PADDING, PADDING, target[:, :-1]), labels


def is_concrete(tokens):
    """Whether their values are known: not those of a graph that is being made."""
    return isinstance(tokens, (list, tuple, np.ndarray)) or hasattr(tokens, "numpy")


def array(tokens, name, vocabulary):
    """(B, T) int32, of arrays, tensors, or lists of any lengths, which are padded on the right.

    Raises:
        ValueError: for anything else, and for tokens outside the vocabulary.
    """
    if isinstance(tokens, (list, tuple)) and all(isinstance(row, (list, tuple, np.ndarray)) for row in tokens):
        tokens = _padded(tokens)
    tokens = ops.convert_to_numpy(tokens)
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu" or not tokens.size:
        raise ValueError(
            f"Seq2Seq expects {name} tokens, integers of shape (batch, time), received {tokens.dtype} of shape "
            f"{tokens.shape}."
        )
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ValueError(
            f"Seq2Seq expects {name} tokens in 0 .. {vocabulary - 1}, its {name}_vocabulary, received "
            f"{tokens.min()} .. {tokens.max()}."
        )
    return tokens.astype(np.int32, copy=False)


def _padded(rows):
    tokens = np.full((len(rows), max(map(len, rows), default=0)), PADDING, np.int64)
    for n, row in enumerate(rows):
        tokens[n, : len(row)] = row
    return tokens


def target_array(tokens, vocabulary, start_token):
    """`array`, of rows that are targets, or padding alone.

    Raises:
        ValueError: for others, too.
    """
    tokens = array(tokens, "target", vocabulary)
    started = (tokens[:, 0] == start_token) | ~tokens.any(axis=1)
    holes = ((tokens[:, :-1] == PADDING) & (tokens[:, 1:] != PADDING)).any(axis=1)
    wrong = ~started | holes | (tokens.shape[1] < 2)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"Seq2Seq expects each row of target to be the start token {start_token}, tokens, the end token, and then "
            f"padding, 0, alone; received in row {row}: {tokens[row].tolist()}."
        )
    return tokens


def pair(x, y=None):
    """source and target, given as x=(source, target) or as x=source and y=target.

    Raises:
        ValueError: for anything else.
    """
    if y is None and isinstance(x, (tuple, list)) and len(x) == 2:
        return x
    several = isinstance(x, dict) or isinstance(x, (tuple, list)) and any(len(np.shape(a)) > 1 for a in x)
    if y is None or several:
        raise ValueError(
            "Seq2Seq expects pairs: (source, target) as x, or source as x and target as y, or a pipeline of either; "
            f"received x {_described(x)} and y {_described(y)}. To write targets call generate(source)."
        )
    return x, y


def _described(x):
    if isinstance(x, (tuple, list)):
        return f"({', '.join(map(_described, x))})"
    return f"of shape {tuple(x.shape)}" if hasattr(x, "shape") else type(x).__name__


def arranged(data):
    """A batch of pairs, as it comes from Keras -> ((source, target), labels, sample_weight): as Keras wants it."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    source, target = pair(x, y)
    if sample_weight is not None and len(sample_weight.shape) == 1:
        sample_weight = sample_weight[:, None]
    elif sample_weight is not None and sample_weight.shape[1] != 1:
        sample_weight = sample_weight[:, 1:]  # of the labels
    return (source, target), target[:, 1:], sample_weight
