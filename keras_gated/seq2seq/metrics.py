"""The loss and the metrics of targets, over the tokens that count.

Hidden here: that Keras's own means weigh the tokens of a batch by how much padding it has.

Where the logits carry a Keras mask it says which tokens are valid; elsewhere those that are not 0, which is padding.

Axes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import keras
from keras import ops

from keras_gated.attention import Tensor
from keras_gated.keras_internals import get_keras_mask
from keras_gated.seq2seq.tokens import PADDING


def crossentropies(labels, logits):
    """-log p of each label (B, T), from logits (B, T, V), in float32 at least."""
    logits = ops.cast(logits, keras.backend.result_type(logits.dtype, "float32"))
    return ops.sparse_categorical_crossentropy(ops.cast(labels, "int32"), logits, from_logits=True)


def _valid(y_true, y_pred):
    mask = get_keras_mask(y_pred)
    return ops.cast(y_true, "int32") != PADDING if mask is None else ops.cast(mask, "bool")


def _weights(valid, sample_weight):
    """(B, T): 0 for tokens that do not count, else what sample_weight (B,), (B, 1) or (B, T) says."""
    weights = ops.cast(valid, "float32")
    if sample_weight is None:
        return weights
    sample_weight = ops.cast(sample_weight, "float32")
    return weights * (sample_weight if len(sample_weight.shape) == 2 else sample_weight[:, None])


@keras.saving.register_keras_serializable("keras_gated")
class TokenCrossentropy(keras.losses.Loss):
    """-log p(y_t), from logits, averaged over the valid tokens of the batch; 0 for a batch without any.

    Value and gradient are those of keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0), but
    for three cases.  A mask of the logits may let a label 0 count, which Keras always leaves out.  Weights of rows may
    be (B,) on every backend, and (B, 1) on PyTorch: there Keras raises an error, or takes (B,) for weights of time
    steps where B is T.  Labels stay integers: in a loss of dtype float16 Keras rounds those above 2048.

    Args:
        reduction, name, dtype: as in keras.losses.Loss.

    Call arguments:
        y_true: labels, (B, T).
        y_pred: logits, (B, T, V).
        sample_weight: None, or (B,), (B, 1) or (B, T).
    """

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str = "token_crossentropy",
        dtype: str | keras.DTypePolicy | None = None,
    ):
        super().__init__(name=name, reduction=reduction, dtype=dtype)

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        return crossentropies(y_true, y_pred)

    def __call__(self, y_true, y_pred, sample_weight=None):
        y_pred = ops.convert_to_tensor(y_pred)
        valid = _valid(y_true, y_pred)
        losses = ops.where(valid, self.call(y_true, y_pred), 0)
        weights = _weights(valid, sample_weight)
        if self.reduction in ("sum_over_batch_size", "mean"):  # which divide by the number of all tokens
            dtype = keras.backend.result_type(self.dtype, "float32")
            count = ops.sum(ops.cast(valid, dtype))
            weights = ops.cast(weights, dtype) * ops.divide_no_nan(ops.cast(ops.size(valid), dtype), count)
        return _Reduced(name=self.name, reduction=self.reduction, dtype=self.dtype)(losses, losses, weights)


class _Reduced(keras.losses.Loss):
    """Keras's reduction over the tokens and over replicas, of losses that are known already."""

    def call(self, y_true, y_pred):
        return y_pred


class _TokenMean(keras.metrics.Mean):
    """A mean over the valid tokens of all batches, of whatever lengths they are."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_pred = ops.convert_to_tensor(y_pred)
        valid = _valid(y_true, y_pred)
        values, weights = self.of_batch(y_true, y_pred, valid, _weights(valid, sample_weight))
        return super().update_state(ops.reshape(values, (-1,)), ops.reshape(weights, (-1,)))


@keras.saving.register_keras_serializable("keras_gated")
class Perplexity(_TokenMean):
    """exp of the mean of -log p(y_t), from logits, over all valid tokens; 1 where there was none."""

    def __init__(self, name: str = "perplexity", dtype: str | keras.DTypePolicy | None = None):
        super().__init__(name=name, dtype=dtype)

    def of_batch(self, y_true: Tensor, y_pred: Tensor, valid: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return crossentropies(y_true, y_pred), weights

    def result(self) -> Tensor:
        return ops.exp(super().result())


@keras.saving.register_keras_serializable("keras_gated")
class TokenAccuracy(_TokenMean):
    """The share of valid tokens that have the largest logit."""

    def __init__(self, name: str = "token_accuracy", dtype: str | keras.DTypePolicy | None = None):
        super().__init__(name=name, dtype=dtype)

    def of_batch(self, y_true: Tensor, y_pred: Tensor, valid: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return _correct(y_true, y_pred), weights


@keras.saving.register_keras_serializable("keras_gated")
class SequenceAccuracy(_TokenMean):
    """The share of sequences in which every valid token has the largest logit; sequences without any do not count."""

    def __init__(self, name: str = "sequence_accuracy", dtype: str | keras.DTypePolicy | None = None):
        super().__init__(name=name, dtype=dtype)

    def of_batch(self, y_true: Tensor, y_pred: Tensor, valid: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        tokens = ops.sum(ops.cast(valid, "float32"), axis=1)
        return ops.all(_correct(y_true, y_pred) | ~valid, axis=1), ops.divide_no_nan(ops.sum(weights, axis=1), tokens)


def _correct(y_true, y_pred):
    return ops.cast(ops.argmax(y_pred, axis=-1), "int32") == ops.cast(y_true, "int32")
