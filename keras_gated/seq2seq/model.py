"""Encoder and decoder: a source sequence is read, a target sequence is written.

    p(y_1, ..., y_T' | x_1, ..., x_T) = Π_t p(y_t | y_1, ..., y_{t-1}, c)

is the chain rule of the chapter (sec. rnn-seq2seq; Cho et al. 2014).  The encoder's final states are c, the decoder
starts from them, layer by layer; how both compute is in encoder_decoder.py.

Hidden here: how pairs of sequences get through a Keras model, which generates and scores as well; compiled functions
for any sizes.

Axes: B batch, T time, N units, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import numbers
from typing import Any, Literal, Self

import keras
import numpy as np
from keras import ops
from numpy.typing import ArrayLike

from keras_gated.attention import Tensor
from keras_gated.cells.recurrent import RecurrentCell
from keras_gated.decoding import Generated, beam_search, greedy, sample
from keras_gated.seq2seq.coders import ATTENTION, LAYERS, Decoder, Encoder, State, layer_class
from keras_gated.seq2seq.metrics import Perplexity, SequenceAccuracy, TokenAccuracy, TokenCrossentropy, crossentropies
from keras_gated.seq2seq.tokens import PADDING, arranged, array, is_concrete, pair, target_array, teacher_forcing

STRATEGIES = {  # the numbers that each takes
    "greedy": {},
    "beam": {"length_penalty": "float32"},
    "sample": {"temperature": "float32", "top_k": "int32", "top_p": "float32"},
}
RANGES = {
    "strategy": (f"one of {tuple(STRATEGIES)}", lambda name: name in STRATEGIES),
    "max_length": ("at least 1", lambda n: n >= 1),
    "beam_width": ("at least 1", lambda n: n >= 1),
    "length_penalty": ("at least 0", lambda n: n >= 0),
    "temperature": ("above 0", lambda n: n > 0),
    "top_k": ("None or at least 1", lambda n: n is None or n >= 1),
    "top_p": ("None or in (0, 1]", lambda n: n is None or 0 < n <= 1),
    "batch_size": ("at least 1", lambda n: n >= 1),
}


@keras.saving.register_keras_serializable("keras_gated")
class Seq2Seq(keras.Model):
    """Encoder-decoder: fit on pairs of token sequences, generate, score.

        p(y_1, ..., y_T' | x) = Π_t p(y_t | y_1, ..., y_{t-1}, x)

    Tokens are integers; 0 is padding.  A source is any tokens, with padding anywhere.  A target is the start token,
    its tokens, the end token, padding: <s> a b </s> 0.  Teacher forcing makes of it the decoder's inputs <s> a b and
    the labels a b </s>.  Padding and the start token have the probability 0, so that the probabilities of all
    sequences sum to 1.

    Attention is asked by h_t of the decoder's uppermost layer, after the step, and changes no state (Luong's order,
    for the additive score, too).  Bahdanau et al. ask with h_{t-1} and feed the context into the cell: then every step
    would have to wait for the attention of the one before, where here one sweep and two products do for all.

    Args:
        source_vocabulary, target_vocabulary: how many tokens there are, 0 and the special ones included.
        units: N, of every layer; of a bidirectional encoder, in each direction.
        cell: "gru", "lstm" or "simple_rnn"; one of our layers or cells as a class; or a cell of ours that has all
            options, such as `LSTMCell(units, forget_bias=3)` or `GRUCell(units, reset_after=True)`.
        layers: how many of encoder and decoder each.
        embedding_dim: of the vectors of both vocabularies; by default N.
        bidirectional: whether the encoder also reads from the end.  Its two final states go through one learned
            linear projection for each layer and state, s = [s→ ; s←] W + b, (2N -> N), to the decoder.
        attention: None, "additive" or "multiplicative".
        dropout: in training, the share of what each recurrent layer reads, drawn once per sequence, and of what the
            last layer reads.
        start_token, end_token: of targets.
        **options: those of keras.Model: name, dtype, trainable.

    Call arguments:
        inputs: (source, target), (B, T_x) and (B, T') integers.
        training: whether dropout is active.

    Returns:
        Logits, (B, T' - 1, V), in float32 at least, of target[:, 1:]; a Keras mask says where that is not padding.

    Raises:
        ValueError: for arguments out of range, and for arrays that are no such tokens.
    """

    def __init__(
        self,
        source_vocabulary: int,
        target_vocabulary: int,
        units: int,
        cell: str | type[keras.layers.Layer] | keras.layers.Layer = "gru",
        layers: int = 1,
        embedding_dim: int | None = None,
        bidirectional: bool = False,
        attention: Literal["additive", "multiplicative"] | None = None,
        dropout: float = 0.0,
        start_token: int = 1,
        end_token: int = 2,
        **options: Any,
    ):
        own = {name: value for name, value in locals().items() if name in OWN}
        _check(own)
        super().__init__(**{"autocast": False, **options})
        vars(self).update(_own=own, _functions={})  # past Keras, which would track and save what they hold
        self.source_vocabulary, self.target_vocabulary = source_vocabulary, target_vocabulary
        self.start_token, self.end_token = start_token, end_token
        sizes = embedding_dim or units, units, cell, layers
        policy = self.dtype_policy
        with keras.name_scope("encoder"):  # the paths of weights, which logs and tags are called after
            self.encoder = Encoder(source_vocabulary, *sizes, bidirectional, dropout, attention is not None, policy)
        impossible, features = sorted({PADDING, start_token} - {end_token}), self.encoder.features
        with keras.name_scope("decoder"):
            self.decoder = Decoder(target_vocabulary, *sizes, attention, dropout, features, impossible, policy)
        self.built = True

    def call(self, inputs: tuple[Tensor, Tensor], training: bool = False) -> Tensor:
        source, target = inputs
        tokens, labels = teacher_forcing(ops.cast(target, "int32"))
        return self.decoder(tokens, self._encode(source, training), labels != PADDING, training=training)[0]

    def compute_mask(self, inputs: tuple[Tensor, Tensor], previous_mask: Any = None) -> Tensor:
        return inputs[1][:, 1:] != PADDING

    def _encode(self, source, training=False):
        return self.decoder.start(*self.encoder(ops.cast(source, "int32"), training=training))

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """One step of the decoder: the step function that `keras_gated.decoding` takes.

        Args:
            tokens: (B,) integers: the start token, then what was written last.
            state: `State`, of `encode` or of the step before.

        Returns:
            Logits (B, V) of the next token, in float32 at least, and the state after this step.
        """
        return self.decoder.step(tokens, state)

    # Training.

    def compile(
        self,
        optimizer: keras.optimizers.Optimizer | str | dict[str, Any] = "adam",
        loss: Any = None,
        *args: Any,
        metrics: Any = None,
        weighted_metrics: Any = None,
        **options: Any,
    ) -> None:
        """As in Keras.  Without a loss it is the mean of -log p(y_t) over the valid target tokens; without metrics
        they are perplexity, token_accuracy and sequence_accuracy, of valid tokens and weighted as the loss is."""
        if metrics is None and weighted_metrics is None:
            weighted_metrics = [Perplexity(), TokenAccuracy(), SequenceAccuracy()]
        loss = TokenCrossentropy() if loss is None else loss
        super().compile(optimizer, loss, *args, metrics=metrics, weighted_metrics=weighted_metrics, **options)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None:
            self.optimizer.build(self.trainable_variables)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        *args: Any,
        validation_data: Any = None,
        class_weight: None = None,
        **options: Any,
    ) -> keras.callbacks.History:
        """As in Keras, of pairs: x=(source, target), or x=source and y=target, or a pipeline of either; arrays, or
        lists of any lengths.  sample_weight is (B,), or (B, T') with a weight for each token of the target."""
        if class_weight is not None:
            raise ValueError("Seq2Seq.fit expects no class_weight: give sample_weight the shape of target instead.")
        if isinstance(validation_data, (tuple, list)):
            *pair, sample_weight = keras.utils.unpack_x_y_sample_weight(validation_data)
            validation_data = (*self._checked(*pair), sample_weight)
        return super().fit(*self._checked(x, y), *args, validation_data=validation_data, **options)

    def evaluate(self, x: Any = None, y: Any = None, *args: Any, **options: Any) -> Any:
        """As in Keras, on what `fit` takes."""
        return super().evaluate(*self._checked(x, y), *args, **options)

    def train_step(self, *args: Any) -> Any:
        return super().train_step(*args[:-1], arranged(args[-1]))

    def test_step(self, *args: Any) -> Any:
        return super().test_step(*args[:-1], arranged(args[-1]))

    def predict_step(self, *args: Any) -> Any:
        return super().predict_step(*args[:-1], arranged(args[-1]))

    def _symbolic_build(self, iterator=None, data_batch=None):
        """Keras builds loss and metrics with a batch as it came; they want it arranged."""
        source, target, labels = (keras.KerasTensor((None, None), "int32") for _ in range(3))
        super()._symbolic_build(data_batch=((source, target), labels, None))

    def _checked(self, x, y):
        """x and y of fit, where they are arrays checked and apart: of x alone, Keras would lose the sample_weight."""
        if y is None and not is_concrete(x):
            return x, y
        source, target = pair(x, y)
        if is_concrete(source) and is_concrete(target):
            source, target = self._source(source), self._target(target)
        return source, target

    def _source(self, source):
        return array(source, "source", self.source_vocabulary)

    def _target(self, target):
        return target_array(target, self.target_vocabulary, self.start_token)

    # Generation.

    def encode(self, source: ArrayLike) -> State:
        """The decoder's `State` before its first step, for `step`, `generate` and `score`: tensors, (B, ...) each."""
        return self._compiled(self._encode)(self._source(source) if is_concrete(source) else source)

    def generate(
        self,
        source: ArrayLike | State,
        max_length: int,
        strategy: Literal["greedy", "beam", "sample"] = "greedy",
        beam_width: int = 5,
        length_penalty: float = 0.0,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        batch_size: int = 128,
    ) -> Generated[np.ndarray]:
        """Writes a target for each source (TensorFlow backend).

        Args:
            source: (B, T_x) integers, lists of any lengths, or the `State` that `encode` gave.
            max_length: L, the most tokens to write, the end token included.
            strategy: "greedy", "beam" or "sample": `greedy`, `beam_search` or `sample` of `keras_gated.decoding`.
            beam_width, length_penalty: of "beam".
            temperature, top_k, top_p: of "sample".
            seed: of "sample", an integer: the same tokens for the same sources and batch_size.
            batch_size: how many rows are decoded at once.

        Returns:
            `Generated(tokens, log_probability)`, arrays: tokens (B, L) without the start token, with the end token,
            then padding; log_probability (B,), what `score` gives for them.

        Raises:
            ValueError: for arguments out of range and tokens outside the vocabulary.
            NotImplementedError: on another backend.
        """
        given = {name: value for name, value in locals().items() if name in RANGES}
        _check_ranges(given)
        if keras.backend.backend() != "tensorflow":
            raise NotImplementedError(
                f"Seq2Seq.generate needs the TensorFlow backend, Keras runs on {keras.backend.backend()}. Save the "
                "model and load it under KERAS_BACKEND=tensorflow; fit, score and step run here."
            )
        options = {
            name: ops.convert_to_tensor(given[name], dtype)
            for name, dtype in STRATEGIES[strategy].items()
            if given[name] is not None
        }
        if strategy == "sample":
            options["seed"] = keras.random.randint((2,), -(2**31), 2**31 - 1, "int32", seed)
        run = self._compiled(self._generate, strategy, beam_width if strategy == "beam" else None)
        length = ops.convert_to_tensor(max_length, "int32")
        batches = enumerate(self._batches(source, batch_size))
        parts = [run(state, length, ops.convert_to_tensor(n), options) for n, (_, state) in batches]
        return type(parts[0])(*map(_joined, zip(*parts, strict=True)))

    def _generate(self, strategy, beam_width, state, max_length, batch, options):
        start = ops.full((ops.shape(state.layers[0][0])[0],), self.start_token, "int32")
        given = (self.step, state, start, max_length, self.end_token)
        if strategy == "greedy":
            return greedy(*given)
        if strategy == "beam":
            return beam_search(*given, beam_width, **options)
        import tensorflow as tf

        seed = tf.random.experimental.stateless_fold_in(options["seed"], batch)
        return sample(*given, **{**options, "seed": seed})

    def score(self, source: ArrayLike | State, target: ArrayLike, batch_size: int = 128) -> np.ndarray:
        """log p(y | x) of each target by the chain rule, Σ_t log p(y_t | y_1, ..., y_{t-1}, x).

        Args:
            source: (B, T_x) integers, lists of any lengths, or the `State` that `encode` gave.
            target: (B, T') integers or lists: the start token, tokens, the end token, padding.  Without the end token
                it is the probability of all sequences that begin like that.
            batch_size: how many rows are scored at once.

        Returns:
            (B,), in float32 at least.

        Raises:
            ValueError: for tokens outside the vocabulary, rows that are no target, and numbers of rows that differ.
        """
        return self._of_pairs(self._score, source, target, batch_size)

    def _score(self, state, target):
        tokens, labels = teacher_forcing(target)
        logits, _ = self.decoder(tokens, state, labels != PADDING)
        return -ops.sum(ops.where(labels == PADDING, 0, crossentropies(labels, logits)), axis=1)

    def attention_weights(self, source: ArrayLike | State, target: ArrayLike, batch_size: int = 128) -> np.ndarray:
        """How much each step of the decoder attends to each source token: α, (B, T' - 1, T_x).

        Row t is of the step that reads target[:, t] and is asked for target[:, t + 1].  It sums to 1; padding of the
        source has exactly 0.  Arguments are those of `score`.
        """
        if self.decoder.attention is None:
            raise ValueError("attention_weights expects a model with attention, received one with attention=None.")
        return self._of_pairs(self._attention_weights, source, target, batch_size)

    def _attention_weights(self, state, target):
        tokens, labels = teacher_forcing(target)
        return self.decoder(tokens, state, labels != PADDING)[1]

    # Batches.

    def _of_pairs(self, function, source, target, batch_size):
        """function(state, target) of all pairs, some rows at a time, as one array."""
        run, target = self._compiled(function), self._target(target)
        return _joined([run(state, target[rows]) for rows, state in self._batches(source, batch_size, len(target))])

    def _batches(self, source, batch_size, expected=None):
        """Yields which rows, and their `State`."""
        _check_ranges({"batch_size": batch_size})
        encoded = isinstance(source, State)
        source = self._fitting(source) if encoded else self._source(source)
        count = source.layers[0][0].shape[0] if encoded else len(source)
        if expected not in (None, count):
            raise ValueError(f"Seq2Seq expects one target for each source, received {count} and {expected} rows.")
        for begin in range(0, count, batch_size):
            rows = slice(begin, begin + batch_size)
            yield rows, _rows(source, rows) if encoded else self.encode(source[rows])

    def _fitting(self, state):
        sizes = [[s.shape[-1] for s in states] for states in state.layers], [a.shape[-1] for a in state.memory[:1]]
        layers = [list(layer.cell.widths.values()) for layer in self.decoder.recurrent]
        expected = layers, [] if self.decoder.attention is None else [self.encoder.features]
        if sizes != expected:
            raise ValueError(
                f"Seq2Seq expects a state of sizes {expected}, those of its layers and of its attention's memory, "
                f"received {sizes}. Encode the source with the model that decodes it."
            )
        return state

    def _compiled(self, function, *fixed):
        """function(*fixed, ...): on TensorFlow one graph, made anew only for sizes of another kind."""
        if keras.backend.backend() != "tensorflow":
            return functools.partial(function, *fixed)
        import tensorflow as tf

        key = function.__name__, *fixed
        if key not in self._functions:
            # A partial, since TensorFlow counts the graphs of all functions that share their code, and warns.
            partial = functools.partial(function, *fixed)
            self._functions[key] = tf.function(partial, autograph=False, reduce_retracing=True)
        return self._functions[key]

    # Saving.

    def get_config(self) -> dict[str, Any]:
        cell, names = self._own["cell"], {kind: name for name, kind in LAYERS.items()}
        if isinstance(cell, type):
            kind = layer_class(cell)
            cell = names[kind] if kind in names else kind.cell_class(self._own["units"])
        if not isinstance(cell, str):
            cell = keras.saving.serialize_keras_object(cell)
        return {**super().get_config(), **self._own, "cell": cell}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        cell = config["cell"]
        return cls(
            **{**config, "cell": keras.saving.deserialize_keras_object(cell) if isinstance(cell, dict) else cell}
        )


OWN = tuple(
    name
    for name, parameter in inspect.signature(Seq2Seq.__init__).parameters.items()
    if name != "self" and parameter.kind is not parameter.VAR_KEYWORD
)


def _check_ranges(given):
    for name, value in given.items():
        expected, holds = RANGES[name]
        if not holds(value):
            raise ValueError(f"Seq2Seq expects {name} to be {expected}, received {value!r}.")


def _check(own):
    """The arguments of a model."""
    sizes = {"embedding_dim": own["embedding_dim"]} if own["embedding_dim"] is not None else {}
    sizes |= {name: own[name] for name in ("source_vocabulary", "target_vocabulary", "units", "layers")}
    for name, size in sizes.items():
        if not isinstance(size, numbers.Integral) or size < 1:
            raise ValueError(f"Seq2Seq expects {name} to be a positive integer, received {size!r}.")
    cell = own["cell"]
    if layer_class(cell) is None:
        raise ValueError(
            f"Seq2Seq expects cell to be one of {tuple(LAYERS)}, or a cell of ours, received {cell!r}. A cell of your "
            "own needs a layer: class MyLayer(Recurrent), with cell_class = MyCell."
        )
    if isinstance(cell, RecurrentCell) and cell.units != own["units"]:
        raise ValueError(f"Seq2Seq expects a cell of {own['units']} units, as its layers have, received {cell.units}.")
    if own["attention"] not in ATTENTION:
        raise ValueError(f"Seq2Seq expects attention to be one of {ATTENTION}, received {own['attention']!r}.")
    for name in ("start_token", "end_token"):
        if not 0 < own[name] < own["target_vocabulary"]:
            raise ValueError(
                f"Seq2Seq expects {name} in 1 .. {own['target_vocabulary'] - 1}, the target_vocabulary but padding, "
                f"received {own[name]!r}."
            )


def _rows(state, rows):
    return keras.tree.map_structure(lambda a: a[rows], state)


def _joined(parts):
    return np.concatenate([ops.convert_to_numpy(part) for part in parts])
