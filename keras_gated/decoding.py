"""Sequences out of a step function: the likeliest token each time, by chance, by beam search (TensorFlow).

    log p(y₁ .. y_L | c) = Σ_t log p(y_t | y₁ .. y_{t-1}, c)      the chain rule; each term is log softmax of logits

Hidden here: the compiled loop over tokens, when it may stop, and that a state follows the hypothesis it belongs to.
No layer is known here.  What generates is

    step(tokens, state) -> (logits, state)

tokens (rows,) int32 are those that came last, logits (rows, V) floating are of those to come, and state is any nest of
tensors with rows in front, which comes back in the same form.  A token that must not come has the logit -inf.

Called eagerly, each function makes its graph, runs it and forgets it; within a tf.function it becomes part of that
one, so that repeated calls trace `step` once.  A small step is worth a tf.function of its own with jit_compile=True.

Axes: B batch, K beam width, L max_length, V vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import keras
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    import tensorflow as tf
else:

    class _TensorFlow:
        """The module, imported with the first call: other backends go without."""

        def __getattr__(self, name):
            return getattr(importlib.import_module("tensorflow"), name)

    tf = _TensorFlow()

PADDING, INFINITY = 0, float("inf")

Step = Callable[["tf.Tensor", Any], tuple["tf.Tensor", Any]]  # tokens, state -> logits, state
Array = TypeVar("Array")


class Generated(NamedTuple, Generic[Array]):
    """A sequence for each row of the batch: tensors, or arrays."""

    tokens: Array  # (B, L) int32: without the start token, with the end token, then 0
    log_probability: Array  # (B,) float32: Σ log p of these tokens under the model, the end token's included


class Finished(NamedTuple):
    """The best hypothesis of each row that is over."""

    score: tf.Tensor  # (B,) float32
    log_p: tf.Tensor  # (B,) float32
    tokens: tf.Tensor  # (B, L) int32


def greedy(
    step: Step, state: Any, start: ArrayLike, max_length: int | tf.Tensor, end_token: int = 2
) -> Generated[tf.Tensor]:
    """The likeliest token each time: y_t = argmax p(y_t | y₁ .. y_{t-1}, c); of equals the lowest.

    Args:
        step: see the module.
        state: nest of tensors with B rows in front.
        start: (B,) int32, the tokens that step is fed first.
        max_length: L, at least 1: a number or an int32 scalar.
        end_token: ends a sequence.

    Returns:
        Generated.  A sequence that has not ended after L tokens is cut there.

    Raises:
        ValueError: for arguments, logits or states of another form.
    """
    return _in_a_graph(_one_by_one, step, state, start, max_length, end_token, lambda log_p, t: tf.argmax(log_p, -1))


def sample(
    step: Step,
    state: Any,
    start: ArrayLike,
    max_length: int | tf.Tensor,
    end_token: int = 2,
    temperature: float | tf.Tensor = 1.0,
    top_k: int | tf.Tensor | None = None,
    top_p: float | tf.Tensor | None = None,
    seed: int | keras.random.SeedGenerator | tf.Tensor | None = None,
) -> Generated[tf.Tensor]:
    """A token by chance each time: y_t ~ p(y_t | y₁ .. y_{t-1}, c)^(1 / temperature), or of the likeliest ones alone.

    Args:
        step, state, start, max_length, end_token: as in `greedy`.
        temperature: above 1 evens the odds, towards 0 comes `greedy`.
        top_k: draws from the k likeliest tokens (of equals the lowest); 1 is `greedy`.
        top_p: draws from the smallest set of likeliest tokens whose mass reaches p, in (0, 1]: the mass at that
            temperature, among top_k.
        seed: int, keras.random.SeedGenerator or None (Keras's own), as in keras.random; or an int32 tensor (2,), as in
            tf.random.stateless_uniform.  The same seed gives the same tokens in a batch of the same size.

    Returns:
        Generated.  log_probability is the model's, whatever was drawn from: `temperature`, `top_k` and `top_p` do
        not enter.

    Raises:
        ValueError: for arguments, logits or states of another form.

    Nucleus (top_p): Holtzman et al. (2020).
    """
    _check("temperature expects a number above 0; 0 is greedy()", temperature, lambda given: given > 0)
    _check("top_k expects None or a number of at least 1", top_k, lambda given: given >= 1)
    _check("top_p expects None or a number in (0, 1]", top_p, lambda given: 0 < given <= 1)
    if not tf.is_tensor(seed):
        seed = keras.random.randint((2,), -(2**31), 2**31 - 1, "int32", seed)

    def draw(log_p, t):
        return _draw(log_p / temperature, top_k, top_p, tf.random.experimental.stateless_fold_in(seed, t))

    return _in_a_graph(_one_by_one, step, state, start, max_length, end_token, draw)


def beam_search(
    step: Step,
    state: Any,
    start: ArrayLike,
    max_length: int | tf.Tensor,
    end_token: int = 2,
    beam_width: int = 5,
    length_penalty: float | tf.Tensor = 0.0,
) -> Generated[tf.Tensor]:
    """The likeliest sequence that a search of K hypotheses at a time finds.

        score(y) = log p(y | c) / length(y)^length_penalty       0: none; 1: mean log p of a token, the end's included

    Of all continuations the K likeliest count: those that end are finished, and the best of them is kept, whatever
    comes later; the K likeliest that do not end go on.  It is over when no row has a hypothesis left that could still
    beat its finished one, which is known as log p only falls.  K = 1 is `greedy`, for `length_penalty` 0.

    Args:
        step, start, max_length, end_token: as in `greedy`.
        state: nest of tensors with B rows in front; step receives B K rows.  What step hands on untouched, such as a
            memory of the source, is not copied at each token.
        beam_width: K.
        length_penalty: 0 or greater.

    Returns:
        Generated, of the highest score; what was cut after L tokens takes part.  Of equals the earlier, then the one
        of lower tokens.

    Raises:
        ValueError: for arguments, logits or states of another form.
    """
    _check("beam_width expects a number of at least 1", beam_width, lambda given: given >= 1)
    _check("length_penalty expects a number of at least 0", length_penalty, lambda given: given >= 0)
    options = int(beam_width), length_penalty
    return _in_a_graph(_beam_search, step, state, start, max_length, end_token, *options)


def _in_a_graph(loop, step, state, start, max_length, end_token, *options):
    """The loop as part of the graph that is being made, or of one of its own."""
    state = tf.nest.map_structure(tf.convert_to_tensor, state)
    start = tf.cast(start, tf.int32)
    if start.shape.rank != 1:
        raise ValueError(f"start expects one token for each row, (batch,), received shape {tuple(start.shape)}.")
    if any(x.shape.rank == 0 or not start.shape.is_compatible_with(x.shape[:1]) for x in tf.nest.flatten(state)):
        raise ValueError(
            f"state expects tensors with {start.shape[0]} rows in front, as many as start has, received {_form(state)}."
        )
    known = tf.get_static_value(tf.convert_to_tensor(max_length))
    _check("max_length expects a number of at least 1", known, lambda given: given >= 1)
    length = int(known) if known is not None else tf.cast(max_length, tf.int32)

    def run():
        if known is None:
            tf.debugging.assert_positive(length, "max_length expects a number of at least 1")
        return Generated(*loop(step, state, start, length, end_token, *options))

    # A concrete function, since tf.function would warn of one trace per call.
    return tf.function(run, autograph=False).get_concrete_function()() if tf.executing_eagerly() else run()


def _one_by_one(step, state, start, length, end_token, choose):
    """Sequences whose next token is choose(log_p, t), out of log p (B, V) of all."""

    def going(t, last, ended, *_):
        return tf.reduce_any(~ended)

    def advance(t, last, ended, state, tokens, log_probability):
        log_p, state = _advance(step, last, state, end_token)
        token = tf.cast(choose(log_p, t), tf.int32)
        log_probability += tf.where(ended, 0.0, tf.gather(log_p, token, batch_dims=1))
        token = tf.where(ended, PADDING, token)
        return t + 1, token, ended | (token == end_token), state, _write(tokens, t, token), log_probability

    tokens = tf.zeros([_rows(start), length], tf.int32)
    begin = 0, start, tf.zeros_like(start, tf.bool), state, tokens, tf.zeros_like(start, tf.float32)
    *_, tokens, log_probability = tf.while_loop(going, advance, begin, maximum_iterations=length)
    return tokens, log_probability


def _beam_search(step, state, start, length, end_token, width, length_penalty):
    def score(log_p, t):
        return log_p / tf.cast(t, tf.float32) ** length_penalty

    def going(t, last, state, log_p, tokens, finished):
        return tf.reduce_any(score(log_p[:, 0], length) > finished.score)  # were nothing lost from here on

    def advance(t, last, state, log_p, tokens, finished):
        token_log_p, moved = _advance(step, last, state, end_token)
        log_p, parent, token = _likeliest_continuations(log_p, token_log_p)
        tokens = _write(tf.gather(tokens, parent, batch_dims=1), t, token)
        ends = token == end_token

        ended = tf.where(ends, log_p, -INFINITY)[:, :width]
        finished = _better(finished, score(ended, t + 1), ended, tokens)

        log_p, kept = tf.math.top_k(tf.where(ends, -INFINITY, log_p), width)
        parent, token, tokens = (tf.gather(x, kept, batch_dims=1) for x in (parent, token, tokens))
        return t + 1, tf.reshape(token, [-1]), _follow(parent, state, moved), log_p, tokens, finished

    rows = _rows(start)
    last, state = tf.nest.map_structure(lambda x: tf.repeat(x, width, axis=0), (start, state))
    log_p = tf.tile([[0.0] + [-INFINITY] * (width - 1)], [rows, 1])  # K copies of one hypothesis count once
    tokens = tf.zeros([rows, width, length], tf.int32)
    nothing = Finished(tf.fill([rows], -INFINITY), tf.fill([rows], -INFINITY), tokens[:, 0])
    begin = 0, last, state, log_p, tokens, nothing
    *_, log_p, tokens, finished = tf.while_loop(going, advance, begin, maximum_iterations=length)
    # What was cut takes part; where the loop ended before, `going` has seen that it cannot win.
    finished = _better(finished, score(log_p, length), log_p, tokens)
    return finished.tokens, finished.log_p


def _likeliest_continuations(log_p, token_log_p):
    """The likeliest 2 K, of which K at most end: log p (B, K) and (B K, V) -> log p, parent, token (B, 2 K)."""
    width, vocabulary = log_p.shape[1], token_log_p.shape[1]
    log_p = tf.reshape(log_p[..., None] + tf.reshape(token_log_p, [-1, width, vocabulary]), [-1, width * vocabulary])
    log_p, index = tf.math.top_k(tf.where(tf.math.is_nan(log_p), -INFINITY, log_p), 2 * width)
    return log_p, index // vocabulary, index % vocabulary


def _better(finished, score, log_p, tokens):
    """`finished`, or the best of these (B, K) where that is better."""
    best = tf.argmax(score, -1)
    score, log_p, tokens = (tf.gather(x, best, batch_dims=1) for x in (score, log_p, tokens))
    won = score > finished.score
    return Finished(
        tf.where(won, score, finished.score),
        tf.where(won, log_p, finished.log_p),
        tf.where(won[:, None], tokens, finished.tokens),
    )


def _follow(parent, before, after):
    """The state (B K, ...) that belongs to `parent` (B, K).  What step handed on as it was is the same in all K."""
    width = parent.shape[1]
    row = tf.reshape(parent + width * tf.range(tf.shape(parent)[0])[:, None], [-1])
    return tf.nest.map_structure(lambda old, new: new if new is old else tf.gather(new, row), before, after)


def _advance(step, tokens, state, end_token):
    """log p (rows, V) float32 of the next token, and the next state in the form of this one."""
    logits, after = step(tokens, state)
    logits = tf.convert_to_tensor(logits)
    vocabulary = logits.shape[-1] if logits.shape.rank == 2 else None
    if vocabulary is None or vocabulary < 2 or not logits.dtype.is_floating:
        raise ValueError(
            "step expects to return logits of shape (rows, vocabulary), floating, of a known vocabulary of 2 tokens "
            f"or more, received {_form(logits)}."
        )
    if not 0 <= end_token < vocabulary:
        raise ValueError(f"end_token expects a token below {vocabulary}, as step has logits for, received {end_token}.")
    leaves, moved = tf.nest.flatten(state), [tf.convert_to_tensor(x) for x in tf.nest.flatten(after)]
    if [x.dtype for x in leaves] != [x.dtype for x in moved] or not all(
        old.shape.is_compatible_with(new.shape) for old, new in zip(leaves, moved, strict=True)
    ):
        raise ValueError(f"step expects to return a state as it was given, {_form(state)}, received {_form(after)}.")
    moved = [new if new is old else tf.ensure_shape(new, old.shape) for old, new in zip(leaves, moved, strict=True)]
    logits = tf.ensure_shape(logits, (tokens.shape[0], None))
    return tf.nn.log_softmax(tf.cast(logits, tf.float32)), tf.nest.pack_sequence_as(state, moved)


def _draw(log_q, top_k, top_p, seed):
    """A token (B,) of each row of log q (B, V), of which the sum over V need not be 1."""
    if top_k is None and top_p is None:  # sorting a large vocabulary takes longer than all else
        return _rank(log_q, seed)
    vocabulary = log_q.shape[1]
    log_q, tokens = tf.math.top_k(log_q, vocabulary if top_k is None else tf.minimum(top_k, vocabulary))
    if top_p is not None:
        before = tf.cumsum(tf.nn.softmax(log_q), axis=-1, exclusive=True)
        log_q = tf.where(before < top_p, log_q, -INFINITY)
    return tf.gather(tokens, _rank(log_q, seed), batch_dims=1)


def _rank(log_q, seed):
    # Of a row of NaN the draw would be one past the last.
    return tf.minimum(tf.random.stateless_categorical(log_q, 1, seed, tf.int32)[:, 0], tf.shape(log_q)[1] - 1)


def _write(tokens, t, token):
    """tokens (..., L) with token (...) at place t."""
    return tf.where(tf.range(tf.shape(tokens)[-1]) == t, token[..., None], tokens)


def _rows(start):
    return tf.shape(start)[0] if start.shape[0] is None else start.shape[0]


def _form(nest):
    return tf.nest.map_structure(lambda x: f"{x.dtype.name} {tuple(x.shape)}", nest)


def _check(expectation, given, holds):
    given = tf.get_static_value(given)
    if given is not None and not holds(given):
        raise ValueError(f"{expectation}, received {given}.")
