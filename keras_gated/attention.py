"""Attention of a decoder to the outputs of an encoder: additive and multiplicative.

    e_ts = score(q_t, v_s)          one number for each query and each value        (B, T_q, T_v)
    α_t  = softmax_s(e_ts)          over the valid values; exactly 0 at the others
    c_t  = Σ_s α_ts v_s             context                                          (B, T_q, D_v)

    additive         score(q, v) = w · tanh(q W + v U)        Bahdanau, Cho & Bengio (2015)
    multiplicative   score(q, v) = q · (v U)                  Luong, Pham & Manning (2015), "general"

Hidden here: precision, and what padding may hold.

Axes: B batch, T_q queries, T_v values, D_q and D_v their features, A units.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_gated.keras_internals import get_keras_mask

Tensor = Any  # of the backend, whichever that is
NEVER = -1e30  # the score of a masked value: e to its power is 0 beside any other


class Memory(NamedTuple):
    """What queries attend to, computed once for all of them."""

    values: Tensor  # (B, T_v, D_v), 0 where they are masked
    keys: Tensor  # (B, T_v, A) or (B, T_v, D_q): what the score sees of them
    valid: Tensor  # (B, T_v) bool


class Attention(keras.layers.Layer):
    """What both have in common; final classes say what keys and scores are.

    Scores, softmax and context are evaluated in float32 at least.

    Call arguments:
        query: (B, T_q, D_q).
        values: (B, T_v, D_v).
        mask: (B, T_v), False where a value is padding: its weight is exactly 0, and what it holds, inf and NaN
            included, changes neither values nor gradients.  A row without a valid value gets the context 0.
        return_attention_scores: return the weights α as well.
        values_mask: where Keras puts the mask that values carry.

    Returns:
        The context, (B, T_q, D_v); with return_attention_scores, also α, (B, T_q, T_v).

    Raises:
        ValueError: for arrays of another rank, other features than it was built for, or a mask that does not fit.
    """

    def __init__(self, **options: Any):
        super().__init__(**{"autocast": False, **options})
        self.supports_masking = True

    @abstractmethod
    def keys(self, values: Tensor) -> Tensor:
        """(B, T_v, D_v) -> what the score sees of them."""

    @abstractmethod
    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        """e, (B, T_q, T_v)."""

    @property
    def arithmetic_dtype(self) -> str:
        return keras.backend.result_type(self.compute_dtype, "float32")

    def build(self, query_shape: tuple[int | None, ...], values_shape: tuple[int | None, ...]) -> None:
        for name, shape in (("query", query_shape), ("values", values_shape)):
            if len(shape) != 3:
                raise ValueError(
                    f"{type(self).__name__} expects {name} of shape (batch, time, features), received {tuple(shape)}. "
                    "For a single query add an axis of one time step."
                )
        self.query_features, self.value_features = query_shape[-1], values_shape[-1]
        self._build(self.query_features, self.value_features)

    def call(
        self,
        query: Tensor,
        values: Tensor,
        mask: Tensor | None = None,
        return_attention_scores: bool = False,
        values_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        memory = self.memory(values, values_mask if mask is None else mask)
        context, weights = self.attend(query, memory)
        return (context, weights) if return_attention_scores else context

    def memory(self, values: Tensor, mask: Tensor | None = None) -> Memory:
        """`Memory` of values (B, T_v, D_v): for `attend`, where queries come one after another."""
        self._check("values", values.shape, self.value_features)
        values = ops.cast(values, self.arithmetic_dtype)
        if mask is None:
            mask = ops.ones(ops.shape(values)[:2], "bool")
        elif len(mask.shape) != 2 or None not in (mask.shape[1], values.shape[1]) and mask.shape[1] != values.shape[1]:
            raise ValueError(
                f"{type(self).__name__} expects a mask of shape {tuple(values.shape[:2])}, received "
                f"{tuple(mask.shape)}: one value for each of values."
            )
        mask = ops.cast(mask, "bool")
        values = ops.where(mask[..., None], values, 0)
        return Memory(values, self.keys(values), mask)

    def attend(self, query: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """-> context (B, T_q, D_v) in the compute dtype, and α (B, T_q, T_v) in float32 at least."""
        self._check("query", query.shape, self.query_features)
        valid = memory.valid[:, None]
        e = self.scores(ops.cast(query, self.arithmetic_dtype), memory.keys)
        weights = ops.where(valid, ops.softmax(ops.where(valid, e, NEVER)), 0)
        return ops.cast(ops.matmul(weights, memory.values), self.compute_dtype), weights

    def _check(self, name, shape, features):
        if len(shape) != 3 or shape[-1] != features:
            raise ValueError(
                f"{type(self).__name__} {self.name!r} expects {name} of shape (batch, time, {features}), received "
                f"{tuple(shape)}."
            )

    def _add(self, name, shape):
        return self.add_weight(name=name, shape=shape, initializer="glorot_uniform")

    def _tensor(self, weight):
        """As Keras hands it to a layer that is called, whoever calls."""
        return ops.cast(ops.cast(weight, self.compute_dtype), self.arithmetic_dtype)

    def compute_mask(self, query: Tensor, previous_mask: Any = None) -> Tensor | None:
        return get_keras_mask(query)


@keras.saving.register_keras_serializable("keras_gated")
class AdditiveAttention(Attention):
    """Attention by a small network: e_ts = w · tanh(q_t W + v_s U), α_t = softmax(e_t), c_t = Σ_s α_ts v_s.

    Weights: query_kernel W (D_q, A), key_kernel U (D_v, A), score_kernel w (A,).

    Args:
        units: A.
        **options: those of keras.layers.Layer.  What is called, returned and masked: see `Attention`.

    Reference: Bahdanau, Cho & Bengio, Neural machine translation by jointly learning to align and translate (2015),
    where the query is the decoder's state *before* the step.
    """

    def __init__(self, units: int, **options: Any):
        super().__init__(**options)
        if not isinstance(units, int) or units < 1:
            raise ValueError(f"AdditiveAttention expects units to be a positive integer, received {units!r}.")
        self.units = units

    def _build(self, query_features, value_features):
        self.query_kernel = self._add("query_kernel", (query_features, self.units))
        self.key_kernel = self._add("key_kernel", (value_features, self.units))
        self.score_kernel = self._add("score_kernel", (self.units,))

    def keys(self, values: Tensor) -> Tensor:
        return ops.matmul(values, self._tensor(self.key_kernel))

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        projected = ops.matmul(query, self._tensor(self.query_kernel))
        return ops.matmul(ops.tanh(projected[:, :, None] + keys[:, None]), self._tensor(self.score_kernel))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("keras_gated")
class MultiplicativeAttention(Attention):
    """Attention by a bilinear form: e_ts = q_t · (v_s U), α_t = softmax(e_t), c_t = Σ_s α_ts v_s.

    Weights: key_kernel U (D_v, D_q), so that query and values may differ in size.

    Args:
        **options: those of keras.layers.Layer.  What is called, returned and masked: see `Attention`.

    Reference: Luong, Pham & Manning, Effective approaches to attention-based neural machine translation (2015).
    """

    def _build(self, query_features, value_features):
        self.key_kernel = self._add("key_kernel", (value_features, query_features))

    def keys(self, values: Tensor) -> Tensor:
        return ops.matmul(values, self._tensor(self.key_kernel))

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        return ops.matmul(query, ops.transpose(keys, (0, 2, 1)))
