"""The encoder and the decoder of a `Seq2Seq`.

    h_t = cell(embedding(u), h_{t-1})             of every layer of the decoder; u is the token before y_t
    α_t, c_t = attention(h_t, encoder outputs)    where there is attention; h_t is of the uppermost layer
    h̃_t = tanh([h_t ; c_t] W_c)                   without it h_t itself
    p(y_t | ...) = softmax(h̃_t W_s + b_s)         0 for tokens that are impossible

Hidden here: that a decoder runs over all steps in one sweep where they are known and one step at a time where they are
not, and that both are the same function, in half precision, too.

Axes: B batch, T time, N units, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_gated.attention import AdditiveAttention, Memory, MultiplicativeAttention, Tensor
from keras_gated.cells.gru import GRU
from keras_gated.cells.lstm import LSTM
from keras_gated.cells.recurrent import Recurrent, RecurrentCell
from keras_gated.cells.simple_rnn import SimpleRNN
from keras_gated.engine.precision import arithmetic_dtype
from keras_gated.seq2seq.tokens import PADDING

LAYERS = {"gru": GRU, "lstm": LSTM, "simple_rnn": SimpleRNN}
ATTENTION = (None, "additive", "multiplicative")
IMPOSSIBLE = -1e9  # the logit of a token that is never written: finite, as a loss may multiply it by 0


class State(NamedTuple):
    """All that a decoder's next step depends on but the token; rows of every array belong together."""

    layers: tuple[tuple[Tensor, ...], ...]  # of each layer a tuple of its states, (B, N) in float32 at least
    memory: Memory | tuple[()]  # () without attention


class Encoder(keras.layers.Layer):
    """Reads sources: embedding, recurrent layers and, where it is bidirectional, the bridges to the decoder.

    All sizes are known, so it has its weights from the start.

    Args:
        vocabulary, embedding_dim, units, cell, layers, bidirectional, dropout: as in `Seq2Seq`.
        sequences: whether the outputs of all times are wanted.
        dtype: policy.

    Call arguments:
        source: (B, T_x) integers.

    Returns:
        The outputs of the uppermost layer, (B, T_x, N or 2N), or the last; which of them are valid, (B, T_x); and
        the decoder's initial states, a tuple for each layer.
    """

    def __init__(
        self,
        vocabulary: int,
        embedding_dim: int,
        units: int,
        cell: str | type[keras.layers.Layer] | keras.layers.Layer,
        layers: int,
        bidirectional: bool,
        dropout: float,
        sequences: bool,
        dtype: str | keras.DTypePolicy,
    ):
        super().__init__(name="encoder", dtype=dtype, autocast=False)
        self.embedding = keras.layers.Embedding(vocabulary, embedding_dim, name="embedding", dtype=dtype)
        self.embedding.build()
        self.recurrent, self.bridges = [], []
        self.features = embedding_dim
        for n in range(layers):
            wanted = {"return_sequences": sequences or n < layers - 1, "return_state": True}
            layer = _layer(cell, units, dropout, name=f"layer_{n}", dtype=dtype, **wanted)
            widths, out = layer.cell.widths, layer.cell.output_size
            if bidirectional:
                layer = keras.layers.Bidirectional(layer, name=f"layer_{n}", dtype=dtype)
                for state, width in widths.items():
                    bridge = keras.layers.Dense(width, name=f"bridge_{n}_{state}", dtype=dtype)
                    bridge.build((None, 2 * width))
                    self.bridges.append(bridge)
            layer.build((None, None, self.features))
            self.features = 2 * out if bidirectional else out
            self.recurrent.append(layer)
        self.built = True

    def call(self, source: Tensor, training: bool = False) -> tuple[Tensor, Tensor, tuple[tuple[Tensor, ...], ...]]:
        valid = source != PADDING
        x, states, bridges = source, [], iter(self.bridges)
        for n, layer in enumerate(self.recurrent):
            run = layer if n else functools.partial(_embedded, self.embedding, layer)
            x, *final = run(x, mask=valid, training=training)
            if self.bridges:
                both = zip(final[: len(final) // 2], final[len(final) // 2 :], strict=True)
                final = [next(bridges)(ops.concatenate(pair, axis=-1)) for pair in both]
            states.append(tuple(final))
        return x, valid, tuple(states)


class Decoder(keras.layers.Layer):
    """Writes targets: embedding, recurrent layers, attention and logits.

    Args:
        vocabulary, embedding_dim, units, cell, layers, attention, dropout: as in `Seq2Seq`.
        value_features: of what attention attends to.
        impossible: tokens that are never written.
        dtype: policy.

    Call arguments:
        tokens: (B, T), those before the ones that are asked for.
        state: `State`, of `start`.
        valid: (B, T), False where tokens are padding.

    Returns:
        Logits (B, T, V), in float32 at least, and attention's weights (B, T, T_x), or None.
    """

    def __init__(
        self,
        vocabulary: int,
        embedding_dim: int,
        units: int,
        cell: str | type[keras.layers.Layer] | keras.layers.Layer,
        layers: int,
        attention: Literal["additive", "multiplicative"] | None,
        dropout: float,
        value_features: int,
        impossible: Sequence[int],
        dtype: str | keras.DTypePolicy,
    ):
        super().__init__(name="decoder", dtype=dtype, autocast=False)
        self.arithmetic_dtype = arithmetic_dtype(self.compute_dtype)
        self.embedding = keras.layers.Embedding(vocabulary, embedding_dim, name="embedding", dtype=dtype)
        self.embedding.build()
        self.recurrent, features = [], embedding_dim
        for n in range(layers):
            layer = _layer(cell, units, dropout, name=f"layer_{n}", dtype=dtype, return_sequences=True)
            layer.build((None, None, features))
            features = layer.cell.output_size
            self.recurrent.append(layer)
        self.attention = self.combine = None
        if attention is not None:
            additive = attention == "additive"
            kind, sizes = (AdditiveAttention, [units]) if additive else (MultiplicativeAttention, [])
            self.attention = kind(*sizes, name="attention", dtype=dtype)
            self.attention.build((None, None, features), (None, None, value_features))
            self.combine = keras.layers.Dense(units, "tanh", use_bias=False, name="combine", dtype=dtype)
            self.combine.build((None, None, features + value_features))
            features = units
        self.dropout = keras.layers.Dropout(dropout, name="dropout", dtype=dtype)
        self.logits = Logits(vocabulary, impossible, name="logits", dtype=self.arithmetic_dtype)
        self.logits.build((None, None, features))
        self.built = True

    def start(self, outputs: Tensor, valid: Tensor, states: tuple[tuple[Tensor, ...], ...]) -> State:
        """The `State` before the first step, of what the encoder returns."""
        states = tuple(tuple(ops.cast(s, self.arithmetic_dtype) for s in of_layer) for of_layer in states)
        return State(states, () if self.attention is None else self.attention.memory(outputs, valid))

    def call(
        self, tokens: Tensor, state: State, valid: Tensor | None = None, training: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        x = tokens
        for n, (layer, states) in enumerate(zip(self.recurrent, state.layers, strict=True)):
            run = layer if n else functools.partial(_embedded, self.embedding, layer)
            x = run(x, initial_state=list(states), mask=valid, training=training)
        return self._read_out(x, state.memory, training)

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """One step: tokens (B,) -> logits (B, V), and the state after it."""
        x, after = self.embedding(tokens), []
        for layer, states in zip(self.recurrent, state.layers, strict=True):
            weights = {name: ops.cast(w, self.compute_dtype) for name, w in layer.cell.tensors().items()}
            # In float32: a sweep rounds to half precision what it hands out, but not the states it goes on with.
            x = ops.cast(x, self.arithmetic_dtype)
            h, states = layer.cell.equations.advance(x, states, weights, layer.cell.sizes)
            x = ops.cast(h, self.compute_dtype)
            after.append(tuple(states))
        logits, _ = self._read_out(x[:, None], state.memory)
        return logits[:, 0], State(tuple(after), state.memory)

    def _read_out(self, h, memory, training=False):
        weights = None
        if self.attention is not None:
            context, weights = self.attention.attend(h, memory)
            h = self.combine(ops.concatenate([h, context], axis=-1))
        return self.logits(self.dropout(h, training=training)), weights


@keras.saving.register_keras_serializable("keras_gated")
class Logits(keras.layers.Dense):
    """A Dense layer of one logit for each token; of `impossible` tokens it is so low that their probability is 0."""

    def __init__(self, units: int, impossible: Sequence[int], **options: Any):
        super().__init__(units, **options)
        self.impossible = impossible

    def call(self, inputs, training=None):
        lowered = np.isin(np.arange(self.units), self.impossible) * IMPOSSIBLE
        return ops.matmul(inputs, self.kernel) + (self.bias + ops.cast(lowered, self.compute_dtype))

    def get_config(self):
        return {**super().get_config(), "impossible": list(self.impossible)}


def _embedded(embedding, layer, tokens, training=False, **given):
    """layer(embedding(tokens)).  In training a small vocabulary is multiplied by W first: see `Recurrent.behind`."""
    directions = [layer.forward_layer, layer.backward_layer] if hasattr(layer, "forward_layer") else [layer]
    V, D = embedding.embeddings.shape
    if not training or 2 * V > D or directions[0].cell.dropout or keras.backend.backend() != "tensorflow":
        return layer(embedding(tokens), training=training, **given)
    one_hot = ops.take(ops.eye(V, dtype=embedding.compute_dtype), tokens, axis=0)
    table = ops.cast(embedding.embeddings, embedding.compute_dtype)
    with contextlib.ExitStack() as stack:
        for direction in directions:
            stack.enter_context(direction.behind(table))
        return layer(one_hot, training=training, **given)


def _layer(cell, units, dropout, **options):
    """A recurrent layer of the given kind of cell."""
    if not isinstance(cell, RecurrentCell):
        return layer_class(cell)(units, dropout=dropout, **options)
    config = {name: value for name, value in cell.get_config().items() if name not in ("name", "dtype", "trainable")}
    return layer_class(cell)(**{**config, "dropout": dropout or cell.dropout}, **options)


def layer_class(cell):
    """The class of layers of a name, a cell, or a class of cells or layers of ours; None of anything else."""
    if isinstance(cell, str):
        return LAYERS.get(cell)
    kind = cell if isinstance(cell, type) else type(cell)
    if issubclass(kind, RecurrentCell):
        return kind.layer_class
    return kind if issubclass(kind, Recurrent) and isinstance(cell, type) else None
