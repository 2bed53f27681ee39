"""Encoder-decoders on TensorFlow: ours, and what users of keras.layers write."""

import keras
import numpy as np
from benchmark import sequences
from benchmark.plan import WIDTH
from benchmark.sequences import Writer


def writers(problem):
    """{name: a function that makes the `Writer`}, ours first."""
    return {
        "ours": lambda: ours(problem),
        "keras": lambda: of_keras(problem, "predict"),
        "keras, on batch": lambda: of_keras(problem, "predict_on_batch"),
        "keras, jit": lambda: of_keras(problem, "predict_on_batch", jit=True),
    }


def ours(problem):
    T, (trained, writing) = problem.shape[1], (problem.ours(), problem.ours())
    return Writer(
        lambda: trained.train_on_batch((problem.source, problem.target)),
        lambda: writing.generate(problem.source, T).tokens,
        lambda: writing.generate(problem.source, T, "beam", beam_width=WIDTH).tokens,
    )


def of_keras(problem, call, jit=False):
    """With a loop that calls `predict`, as in the example on keras.io, or the faster `predict_on_batch`."""
    B, T, *_ = problem.shape
    trained, _, _ = _models(problem)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trained.compile(keras.optimizers.SGD(0.1), loss, jit_compile=jit)
    _, encoder, decoder = _models(problem)
    for model in (encoder, decoder):
        model.compile(jit_compile=jit)
    data = (problem.source, problem.target[:, :-1]), problem.target[:, 1:]

    options = {"verbose": 0} if call == "predict" else {}

    def run(model, inputs):
        return getattr(model, call)(inputs, **options)

    def step(tokens, state):
        logits, *state = run(decoder, [tokens[:, None].astype("int32"), *state])
        return _log_softmax(logits[:, 0]), state

    def follow(state, rows):
        return [s[rows] for s in state]

    return Writer(
        lambda: trained.train_on_batch(*data),
        lambda: sequences.greedy(step, run(encoder, problem.source), B, T),
        lambda: sequences.beam(step, follow, run(encoder, problem.source), B, T),
    )


def _models(problem):
    """One for training, and two that share its layers: encoder and one step of the decoder."""
    *_, V, N = problem.shape
    layers = keras.layers

    source, target = keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")
    states = [keras.Input((N,)) for _ in range(2)]
    made = {
        "encoder_embedding": layers.Embedding(V, N, mask_zero=True),
        "encoder_lstm": layers.LSTM(N, return_state=True),
        "decoder_embedding": layers.Embedding(V, N, mask_zero=True),
        "decoder_lstm": layers.LSTM(N, return_sequences=True, return_state=True),
        "logits": layers.Dense(V),
    }
    _, *encoded = made["encoder_lstm"](made["encoder_embedding"](source))
    read = made["decoder_embedding"](target)
    h, *_ = made["decoder_lstm"](read, initial_state=encoded)
    training = keras.Model([source, target], made["logits"](h))
    h, *after = made["decoder_lstm"](read, initial_state=states)
    for name, arrays in problem.by_layer().items():
        made[name].set_weights(arrays)
    return training, keras.Model(source, encoded), keras.Model([target, *states], [made["logits"](h), *after])


def _log_softmax(logits):
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
