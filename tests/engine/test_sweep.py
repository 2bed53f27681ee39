"""The engine's own choices: whatever they are, the numbers stay the same."""

import os
import subprocess
import sys
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from table import CELLS, D, N, assert_close, batch, build, loop_of, make, values_and_gradients

import keras_gated as kg
from keras_gated.engine import compilation as lane
from keras_gated.engine import scan as program
from keras_gated.engine import sweep


@pytest.fixture(params=["rnn_tanh", "lstm", "gru", "gru_reset_after"])
def cell(request):
    return CELLS[request.param]


@pytest.fixture
def choose(monkeypatch):
    """Forces a choice of the engine, and forgets what was traced under another one."""

    def forget():
        sweep._traced.cache_clear()
        lane._graph.cache_clear()

    def choose(**constants):
        for name, value in constants.items():
            (module,) = (m for m in (program, lane, sweep) if hasattr(m, name))
            monkeypatch.setattr(module, name, value)
        forget()

    yield choose
    forget()


BLOCKS = dict(LARGE_BYTES=0, BLOCK=1)  # U cut into blocks of columns, for FEW_ROWS


@pytest.mark.parametrize(
    "choice",
    [
        dict(WHOLE_BYTES=0, CHUNK_BYTES=1, SMALLEST_BATCH=1),
        dict(WHOLE_BYTES=0, CHUNK_BYTES=5_000, SMALLEST_BATCH=1000),
        dict(WHOLE_BYTES=0, CHUNK_BYTES=1 << 30, SMALLEST_BATCH=1, **BLOCKS),
        dict(WHOLE_BYTES=1 << 30, SMALLEST_BATCH=1),
    ],
    ids=["4 steps, 2 lanes", "some more steps, 1 lane", "a chunk of all steps, 2 lanes, blocks", "no chunks, 2 lanes"],
)
def test_chunks_lanes_and_blocks_change_nothing(cell, rng, choose, choice):
    choose(SMALLEST_INFERENCE=0, **choice)
    given = batch(cell, rng, size=9, length=23)  # neither lanes nor chunks come out even
    layer = make(cell, rng, go_backwards=True, dropout=0.3, recurrent_dropout=0.3, seed=1)
    seed = np.asarray(layer.cell.seed_generator.state)
    results = []
    for run in (layer, loop_of(layer)):
        layer.cell.seed_generator.state.assign(seed)
        results.append(values_and_gradients(run, layer, given, given.mask))
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, 1e-10)
    inferred = [run(tf.constant(given.x), mask=tf.constant(given.mask)) for run in (layer, loop_of(layer))]
    assert_close(*inferred, 1e-10)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("gru_reset_after", (None, None)),
        ("lstm", (None, 6)),
        ("gru", (9, None)),
    ],
)
def test_unknown_batch_and_time(name, rng, choose, known):
    choose(WHOLE_BYTES=0, CHUNK_BYTES=1, FEW_ROWS=(2, 64), **BLOCKS)  # and no mask: the outputs do for h
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

    for size, length in [(1, 6), (9, 1), (9, 30), (3, 30), (7, 6), (8, 6), (3, 6)]:
        if (known[0] or size, known[1] or length) == (size, length):
            x = tf.constant(rng.normal(size=(size, length, D)))
            assert_close(traced(x), values_and_gradients_of(loop_of(layer), x), 1e-10)


@pytest.mark.parametrize(
    ("name", "sequences", "whole_bytes"),
    [
        ("rnn_tanh", True, 0),
        ("lstm", True, 1 << 30),
        ("lstm", False, 0),
        ("gru", True, 1 << 30),
        ("gru_reset_after", True, 0),
    ],
)
def test_spans_of_time_change_nothing(name, rng, choose, sequences, whole_bytes):
    """Where T is unknown, one program runs over it span by span: less than one, exactly one, several and a rest."""
    choose(SPAN=7, WHOLE_BYTES=whole_bytes, CHUNK_BYTES=1, SMALLEST_BATCH=2)
    cell = CELLS[name]
    options = dict(return_sequences=sequences, go_backwards=True, dropout=0.3, recurrent_dropout=0.3, seed=1)
    layer = make(cell, rng, **options)
    seed = np.asarray(layer.cell.seed_generator.state)

    def run(x, states, mask, way=layer):
        with tf.GradientTape() as tape:
            tape.watch([x, *states])
            results = way(x, initial_state=states, mask=mask, training=True)
            total = tf.add_n([tf.reduce_sum(tf.sin(a)) for a in results])
        return [*results, *tape.gradient(total, [x, *states, *layer.trainable_variables])]

    states = [tf.TensorSpec((None, N), tf.float64)] * len(layer.cell.equations.states)
    signature = [tf.TensorSpec((None, None, D), tf.float64), states, tf.TensorSpec((None, None), tf.bool)]
    spans = tf.function(run, input_signature=signature, autograph=False)
    infer = tf.function(lambda x, mask: layer(x, mask=mask), input_signature=signature[::2], autograph=False)
    loop = partial(run, way=loop_of(layer))
    for size, length in [(7, 3), (7, 7), (3, 14), (5, 23)]:  # and lanes filled up, or with rows in common
        given = batch(cell, rng, size=size, length=length)
        results = []
        for way in (spans, loop):
            layer.cell.seed_generator.state.assign(seed)
            results.append(way(tf.constant(given.x), [tf.constant(s) for s in given.states], tf.constant(given.mask)))
        assert_close(*results, 1e-10)
        x, mask = tf.constant(given.x), tf.constant(given.mask)
        assert_close(infer(x, mask), loop_of(layer)(x, mask=mask), 1e-10)


@pytest.mark.parametrize(
    ("cores", "threads", "size", "infer", "lanes"),
    [
        (2, 0, 32, False, 2),
        (2, 0, 31, False, 2),
        (2, 0, 7, False, 1),
        (1, 0, 32, False, 1),
        (8, 1, 32, False, 1),
        (2, 0, 32, True, 1),
        (2, 0, 1_000_000, True, 2),
    ],
    ids=["even", "odd", "small", "one core", "one thread", "little to infer", "much to infer"],
)
def test_as_many_lanes_as_can_run(monkeypatch, cores, threads, size, infer, lanes):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda: threads)
    x = tf.zeros((size, 2, D))
    equations = CELLS["lstm"].layer().cell.equations
    options = sweep.Options(equations, features=D, units=N, save=not infer, go_backwards=0, sequences=0, probed=0)
    cut = [rows.cut(x).shape[0] for rows in sweep._lanes(options, x, sweep._rows(x))]
    assert len(cut) == lanes and len(set(cut)) == 1


LENGTHS = """
import sys, numpy as np, tensorflow as tf, keras_gated as kg
from keras_gated.engine import compilation as sweep
layer = kg.GRU(4)
layer.build((None, None, 3))
sizes, lengths = eval(sys.argv[1]), eval(sys.argv[2])

@tf.function(input_signature=[tf.TensorSpec((None, None, 3))], autograph=False)
def step(x):
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(layer(x, training=True))
    return tape.gradient(y, layer.trainable_variables)

for size in sizes:
    for length in lengths:
        step(np.ones((size, length, 3), "float32"))
print("programs", sweep.programs())
"""


@pytest.mark.parametrize(
    ("sizes", "lengths", "compiled"),
    [
        ((9,), (1, 20, 63, 64, 65, 200, 201), 2),
        ((10, 9, 4, 1, 7), (5,), 2),
        ((4, 9), (5,), 3 * 2),
        ((12, *(2 for _ in range(sweep.FILLED + 1))), (5,), 3 * 2),
    ],
    ids=["every length", "odd and short ones", "a small first one leaves a lane empty", "often a short one"],
)
def test_what_is_compiled_is_bounded(tmp_path, sizes, lengths, compiled):
    """XLA itself is asked: one program forward and one backward for all lengths, and for each size of a lane."""
    command = [sys.executable, "-c", LENGTHS, str(sizes), str(lengths)]
    environment = {**os.environ, "XLA_FLAGS": f"--xla_dump_to={tmp_path} --xla_dump_hlo_pass_re=NONE"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["programs", "2"]
    assert len(list(tmp_path.glob("*opaque*before_optimizations.txt"))) == compiled


def test_a_length_that_is_known_stays_known(rng):
    """Each has a program of its own, whatever others there were before."""
    layer, before = build(kg.GRU(3), rng), sweep.programs()
    for length in range(4, 7):
        x = tf.constant(rng.normal(size=(2, length, D)), tf.float32)
        traced = tf.function(layer, input_signature=[tf.TensorSpec(x.shape)], autograph=False)
        assert_close([traced(x)], [keras.layers.RNN(layer.cell)(x)])
    assert sweep.programs() == before + 3


def test_layers_of_several_sizes_live_in_one_process(rng):
    """They share what is compiled for the same sizes, and nothing else."""
    for features, units in [(3, 2), (5, 4), (3, 4)]:
        layer = kg.GRU(units)
        layer.build((None, None, features))
        traced = tf.function(layer, input_signature=[tf.TensorSpec((None, None, features))], autograph=False)
        x = rng.normal(size=(2, 4, features)).astype("float32")
        assert_close([traced(x), layer(x)], [keras.layers.RNN(layer.cell)(x)] * 2)
