"""The engine's own choices: whatever they are, the numbers stay the same."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cells import CELLS, D, assert_close, batch, build, loop_of, make, values_and_gradients

import keras_gated as kg
from keras_gated import sweep


@pytest.fixture(params=["rnn_tanh", "lstm", "gru", "gru_reset_after"])
def cell(request):
    return CELLS[request.param]


@pytest.fixture
def choose(monkeypatch):
    """Forces a choice of the engine, and forgets what was traced under another one."""

    def forget():
        sweep._traced.cache_clear()
        sweep._compiled.cache_clear()

    def choose(**constants):
        for name, value in constants.items():
            monkeypatch.setattr(sweep, name, value)
        forget()

    yield choose
    forget()


@pytest.mark.parametrize(
    ("chunk_bytes", "smallest_batch"),
    [(1, 1), (5_000, 1000), (1 << 30, 1)],
    ids=["4 steps, 2 lanes", "some more steps, 1 lane", "all steps, 2 lanes"],
)
def test_chunks_and_lanes_change_nothing(cell, rng, choose, chunk_bytes, smallest_batch):
    choose(CHUNK_BYTES=chunk_bytes, SMALLEST_BATCH=smallest_batch)
    given = batch(cell, rng, size=9, length=23)  # neither lanes nor chunks come out even
    layer = make(cell, rng, go_backwards=True, dropout=0.3, recurrent_dropout=0.3, seed=1)
    seed = np.asarray(layer.cell.seed_generator.state)
    results = []
    for run in (layer, loop_of(layer)):
        layer.cell.seed_generator.state.assign(seed)
        results.append(values_and_gradients(run, layer, given, given.mask))
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, 1e-10)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        *((name, (None, None)) for name in ("rnn_tanh", "lstm", "gru", "gru_reset_after")),
        ("lstm", (None, 6)),
        ("gru", (9, None)),
    ],
)
def test_unknown_batch_and_time(name, rng, known):
    cell = CELLS[name]
    layer = build(cell.layer(dtype="float64", return_sequences=True), rng)

    @tf.function(input_signature=[tf.TensorSpec((*known, D), tf.float64)], autograph=False)
    def traced(x):
        assert layer(x).shape[:2] == known
        return values_and_gradients_of(layer, x)

    def values_and_gradients_of(run, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = run(x, training=True)
            total = tf.reduce_sum(tf.sin(y))
        return [y, *tape.gradient(total, [x, *layer.trainable_variables])]

    for size, length in [(1, 1), (1, 6), (2, 3), (9, 6), (17, 30)]:
        if (known[0] or size, known[1] or length) == (size, length):
            x = tf.constant(rng.normal(size=(size, length, D)))
            assert_close(traced(x), values_and_gradients_of(loop_of(layer), x), 1e-10)


def test_the_graph_is_traced_once_for_all_lengths(rng):
    layer = build(CELLS["lstm"].layer(), rng)
    traced = tf.function(layer, input_signature=[tf.TensorSpec((None, None, D))], autograph=False)
    for length in (3, 4, 7):
        traced(rng.normal(size=(2, length, D)).astype("float32"))
    assert traced.experimental_get_tracing_count() == 1


def test_layers_of_several_sizes_live_in_one_process(rng):
    """They share what is compiled for the same sizes, and nothing else."""
    for features, units in [(3, 2), (5, 4), (3, 4)]:
        layer = kg.GRU(units)
        layer.build((None, None, features))
        traced = tf.function(layer, input_signature=[tf.TensorSpec((None, None, features))], autograph=False)
        x = rng.normal(size=(2, 4, features)).astype("float32")
        assert_close([traced(x), layer(x)], [keras.layers.RNN(layer.cell)(x)] * 2)
