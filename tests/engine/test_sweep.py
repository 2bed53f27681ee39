"""The engine's own choices: whatever they are, the numbers stay those of Keras's loop over the same equations."""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from synthetic import EQUATIONS, arguments, built
from table import assert_close
from tiers import daily

import keras_gated as kg
from keras_gated.engine import compilation, scan, segments, shards, sweep

D, N, M = 2, 3, 2


@pytest.fixture
def choose(monkeypatch):
    """Forces a choice of the engine, and forgets what was traced under another one."""

    def forget():
        sweep._eager.cache_clear()
        compilation.forget()

    def choose(**constants):
        for name, value in constants.items():
            (module,) = (m for m in (scan, segments, shards) if hasattr(m, name))
            monkeypatch.setattr(module, name, value)
        forget()

    yield choose
    forget()


def loop_of(layer):
    names = ("return_sequences", "return_state", "go_backwards", "zero_output_for_mask", "dtype")
    config = layer.get_config()
    return keras.layers.RNN(layer.cell, **{name: config[name] for name in names})


def results(run, layer, x, states, mask, training=True):
    """Outputs and final states, and the gradients of a loss in which each has a weight of its own."""
    layer.cell.seed_generator.state.assign([1, 2])
    tensors = [tf.convert_to_tensor(x), *map(tf.convert_to_tensor, states)]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        outputs = run(tensors[0], initial_state=tensors[1:], mask=mask, training=training)
        total = tf.add_n([tf.reduce_sum(tf.sin((1.3 + k) * y)) for k, y in enumerate(outputs)])
    return [*outputs, *tape.gradient(total, [*tensors, *layer.trainable_variables])]


def traced(layer, B, T, masked=True, D=D):
    """The same as a graph for known or unknown sizes."""
    states = [tf.TensorSpec((B, n), tf.float64) for n in layer.cell.widths.values()]
    mask = [tf.TensorSpec((B, T), tf.bool)] * masked
    signature = [tf.TensorSpec((B, T, D), tf.float64), states, *mask]

    @tf.function(input_signature=signature, autograph=False)
    def run(x, states, mask=None):
        return results(layer, layer, x, states, mask)

    return run


FULL = dict(return_sequences=True, return_state=True, dtype="float64")
DROPOUT = dict(dropout=0.3, recurrent_dropout=0.3, seed=1)
BLOCKS = dict(LARGE_BYTES=0, BLOCK=1, FEW_ROWS=(2, 64))
CHUNKED = dict(WHOLE_BYTES=0, CHUNK_BYTES=1, SMALLEST_BATCH=1, SMALLEST_INFERENCE=0)
CHOICES = {
    "4 steps a chunk, 2 shards": (CHUNKED, {**FULL, **DROPOUT, "go_backwards": True}, True),
    "some more steps, 1 shard": (dict(WHOLE_BYTES=0, CHUNK_BYTES=5_000, SMALLEST_BATCH=1000), FULL, False),
    "one chunk, blocks": ({**CHUNKED, "CHUNK_BYTES": 1 << 30, **BLOCKS}, {**FULL, **DROPOUT}, False),
    "no chunks, last output": (dict(SMALLEST_BATCH=1), {**FULL, "return_sequences": False}, True),
    "zeros where masked": (CHUNKED, {**FULL, "zero_output_for_mask": True}, True),
}


@pytest.mark.parametrize(
    "name", daily(CHOICES, "4 steps a chunk, 2 shards", "one chunk, blocks", "no chunks, last output")
)
def test_chunks_shards_and_blocks_change_nothing(name, rng, choose):
    choice, options, masked = CHOICES[name]
    choose(**choice)
    layer = built(rng, **options)
    x, states, mask = arguments(rng, B=9, T=23)  # neither shards nor chunks come out even
    mask = mask if masked else None
    expected = results(loop_of(layer), layer, x, states, mask)
    assert_close(traced(layer, 9, 23, masked)(x, states, *([mask] * masked)), expected, 1e-10)
    inferred = tf.function(layer, autograph=False)(tf.constant(x), mask=mask)
    assert_close(inferred, loop_of(layer)(tf.constant(x), mask=mask), 1e-10)


@pytest.mark.parametrize(
    ("B", "T"),
    [(None, None), pytest.param(None, 6, marks=pytest.mark.slow), pytest.param(9, None, marks=pytest.mark.slow)],
)
def test_sizes_that_only_the_running_graph_knows(B, T, rng, choose):
    """Segments of time: less than one, exactly one, several and a rest; shards that share rows, or hold one each."""
    choose(SEGMENT=7, **CHUNKED, **BLOCKS)
    layer = built(rng, **FULL, **DROPOUT, go_backwards=True)
    run = traced(layer, B, T)
    for size, length in [(1, 6), (9, 7), (9, 23), (35, 6)]:
        if (B or size, T or length) == (size, length):
            x, states, mask = arguments(rng, size, length)
            expected = results(loop_of(layer), layer, x, states, mask)
            assert_close(run(x, states, mask), expected, 1e-10)


def test_outputs_that_can_be_reused_are_not_kept_twice(rng, choose):
    """Without a mask in float64 the outputs are h: over segments and chunks the same gradients come of them.  Nor does
    a mask hold the states there: what fills the last segment up is no step."""
    choose(SEGMENT=7, **CHUNKED)
    layer = built(rng, **FULL)
    x, states, _ = arguments(rng, B=5, T=16)
    expected = results(loop_of(layer), layer, x, states, None)
    assert_close(traced(layer, None, None, masked=False)(x, states), expected, 1e-10)


@pytest.mark.parametrize("way", daily(["eager", "jit", "without training"], "jit", "without training"))
def test_ways_to_run(way, rng):
    """jit: one program of all.  Without training nothing is stored, and the gradient runs forward again."""
    layer = built(rng, **FULL)
    x, states, mask = arguments(rng, B=5, T=4)
    expected = results(loop_of(layer), layer, x, states, mask)
    run = tf.function(results, autograph=False, jit_compile=True) if way == "jit" else results
    assert_close(run(layer, layer, x, states, mask, way != "without training"), expected, 1e-10)


def test_the_gradient_of_a_gradient_is_that_of_the_loop(rng, uncompiled):
    layer = built(rng, **FULL, **DROPOUT, go_backwards=True, zero_output_for_mask=True)
    x, states, mask = arguments(rng, B=3, T=2)
    assert not mask[1:].all()

    def penalty_gradients(run):
        with tf.GradientTape() as tape:
            tape.watch(tensor := tf.constant(x))
            first = results(run, layer, tensor, states, mask)[3:]
            penalty = tf.add_n([tf.reduce_sum(g**2) * (1 + k) for k, g in enumerate(first)])
        return tape.gradient(penalty, [tensor, *layer.trainable_variables])

    assert_close(penalty_gradients(layer), penalty_gradients(loop_of(layer)), 1e-9)


def test_perturbations_see_the_total_gradient_and_change_no_bit(rng):
    """Of both states, against the loop's; and values and gradients are those of the run without."""
    layer = built(rng, **FULL, go_backwards=True)
    x, states, mask = arguments(rng, B=5, T=4)
    unrolled = built(rng, **FULL, go_backwards=True, unroll=True)
    unrolled.set_weights(layer.get_weights())

    @tf.function(autograph=False)
    def run(layer, perturbed):
        zeros = tf.zeros((5, 4, 2), tf.float64)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(zeros)
            last, outputs, finals = layer.inner_loop(
                tf.constant(x), [tf.constant(s) for s in states], mask, True, perturbation=zeros if perturbed else None
            )
            total = tf.reduce_sum(tf.sin(outputs)) + tf.reduce_sum(tf.cos(finals[1]))
        gradients = tape.gradient(total, layer.trainable_variables)
        return [outputs, *finals, *gradients], tape.gradient(total, zeros) if perturbed else None

    plain, _ = run(layer, False)
    watched, norms = run(layer, True)
    assert_close(watched, plain, 0)
    assert_close([norms], [run(unrolled, True)[1]], 1e-10)
    assert np.all((np.asarray(norms) > 0).any(axis=(0, 1)))


# Shards.


@pytest.mark.parametrize(
    ("cores", "threads", "size", "infer", "expected"),
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
def test_as_many_shards_as_can_run(monkeypatch, cores, threads, size, infer, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda: threads)
    sizes = (("units", N), ("memory", M))
    options = scan.Options(EQUATIONS, features=D, sizes=sizes, sequences=False, save=not infer)
    x = tf.zeros((size, 2, D))
    rows = [shard.cut(x).shape[0] for shard in shards.shards_of(options, x)]
    assert len(rows) == expected and len(set(rows)) == 1


def test_a_batch_is_rounded_by_its_size_alone():
    for B in [*range(1, 300), 1000, 4096, 5001]:
        rows = shards.rows_of_shard(B)
        assert rows == int(shards.rows_of_shard(tf.constant(B)))
        assert B <= 2 * rows and rows <= B and (B < 8 or rows <= max((B + 1) // 2, 1.125 * B / 2 + 1))
    known = {1: 1, 7: 7, 13: 7, 20: 10, 32: 16, 50: 26, 64: 32, 100: 52, 128: 64, 200: 104}
    assert {B: shards.rows_of_shard(B) for B in known} == known
    assert len({shards.rows_of_shard(B) for B in range(1, 2049)}) == 16 + 6 * 8


# What is compiled.


def programs_of(call):
    before = compilation.programs()
    call()
    return compilation.programs() - before


def train(layer, size, length, features):
    x = tf.constant(np.ones((size, length, features), "float32"))
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(layer(x, training=True))
    return tape.gradient(y, layer.trainable_variables)


@pytest.mark.parametrize("lengths", [(1, 20, 63, 64, 65, 130)])
def test_one_program_forward_and_one_backward_for_every_length(lengths, choose):
    choose()
    layer = kg.SimpleRNN(4)
    assert programs_of(lambda: [train(layer, 9, length, 3) for length in lengths]) == 2


def test_both_halves_of_a_bidirectional_share_their_programs(choose):
    choose()
    layer = keras.layers.Bidirectional(kg.SimpleRNN(4))
    assert programs_of(lambda: train(layer, 3, 5, 3)) == 2


def test_a_perturbation_needs_no_forward_program_of_its_own(choose):
    choose()
    layer = kg.SimpleRNN(4, return_sequences=True)
    train(layer, 3, 5, 2)

    def watched():
        x, zeros = tf.ones((3, 5, 2)), tf.zeros((3, 5, 1))
        with tf.GradientTape() as tape:
            tape.watch(zeros)
            _, y, _ = layer.inner_loop(x, layer.get_initial_state(3), None, True, perturbation=zeros)
        return tape.gradient(y, zeros)

    assert programs_of(watched) == 1


def test_a_length_that_is_known_stays_known(rng, choose):
    """Each has a program of its own, whatever others there were before."""
    choose()
    layer = built(rng, return_sequences=False)
    for length in range(4, 7):
        x = tf.constant(rng.normal(size=(2, length, D)), tf.float32)
        graph = tf.function(layer, input_signature=[tf.TensorSpec(x.shape)], autograph=False)
        assert_close([graph(x)], [keras.layers.RNN(layer.cell)(x)])
    assert compilation.programs() == 3


def test_what_is_kept_is_bounded(choose, monkeypatch):
    choose()
    assert compilation._graph.cache_info().maxsize and compilation._program.cache_info().maxsize
    assert sweep._eager.cache_info().maxsize


# No history.


def bits(tensors):
    return [np.asarray(t).tobytes() for t in tensors]


SHAPES = [(13, 5), (40, 5), (13, 9), (1, 5)]


@pytest.mark.parametrize("way", ["eager", pytest.param("graph of unknown sizes", marks=pytest.mark.slow)])
def test_the_same_inputs_give_the_same_bits_in_any_order(way, rng, choose):
    """Of training and inference, whatever was called before."""
    layer = kg.GRU(4, return_sequences=True)
    layer.build((None, None, 3))
    data = {shape: rng.normal(size=(*shape, 3)).astype("float32") for shape in SHAPES}

    def run_all(order):
        choose()

        def step(x):
            with tf.GradientTape() as tape:
                y = layer(x, training=True)
                total = tf.reduce_sum(tf.sin(y))
            return [y, layer(x), *tape.gradient(total, layer.trainable_variables)]

        if way != "eager":
            step = tf.function(step, autograph=False, input_signature=[tf.TensorSpec((None, None, 3))])
        return {shape: bits(step(tf.constant(data[shape]))) for shape in order}

    forth = run_all(SHAPES)
    assert run_all(SHAPES[::-1]) == forth


@pytest.mark.slow
def test_the_same_bits_in_another_process_and_order():
    """Of fit and predict, with dropout and both directions, and under enable_op_determinism.

    In both orders fit begins with T = 5, for which Keras traces by itself; a trace for any T may have other last bits
    in the gradients of weights, and Keras makes one once T changes.
    """
    printed = []
    for order in ("forth", "back"):
        command = [sys.executable, pathlib.Path(__file__).with_name("history.py"), order]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr[-2000:]
        printed.append(run.stdout)
    assert printed[0] == printed[1] and "13, 9" in printed[0]


def test_the_engine_keeps_no_state_in_the_graph(rng):
    """No table, no variable: what a graph computes follows from its inputs, and a SavedModel has nothing to restore."""
    layer = kg.GRU(4)
    layer.build((None, None, 3))
    graph = tf.function(lambda x: layer(x, training=True), autograph=False).get_concrete_function(
        tf.TensorSpec((None, None, 3))
    )
    kinds = {op.type for op in graph.graph.get_operations()}
    kinds |= {node.op for f in graph.graph.as_graph_def().library.function for node in f.node_def}
    assert not [kind for kind in kinds if "Table" in kind or "Assign" in kind]
