"""What holds for every cell, on every backend.  Each law names the mistake that it would catch.

`check_cell` holds the laws of the equations and, with four compiled programs for each kind of cell, those of the layer.
What else there is runs step by step, without a compiler, or is slow.

A test that asks for `tf` is of the TensorFlow backend alone; scripts/backends.sh runs the others elsewhere.
"""

import functools
from itertools import combinations

import keras
import numpy as np
import pytest
import reference
from own_cells import OWN_CELLS
from table import (
    CELLS,
    DTYPE,
    PRECISE,
    B,
    D,
    N,
    T,
    arrays,
    assert_close,
    build,
    compiled,
    gradients,
    loop_of,
    loss,
    make,
    mask_for_keras,
    values_and_gradients,
)
from table import batch as batch_of_states_of_one_width
from tiers import daily

import keras_gated as kg
from keras_gated.testing.layer import step_by_step

ALL_CELLS = {**CELLS, **OWN_CELLS}
GATED = [name for name, cell in ALL_CELLS.items() if cell.gates > 1]
TANH = ["rnn_tanh", "lstm", "gru", "gru_reset_after"]
DROPOUT = {"dropout": 0.4, "recurrent_dropout": 0.3, "seed": 7}


@pytest.fixture(params=ALL_CELLS if PRECISE else [*TANH, *OWN_CELLS], ids=str)  # activations: backends/values.py there
def cell(request):
    return ALL_CELLS[request.param]


@pytest.fixture(params=TANH, ids=str)
def tanh_cell(request):
    """One cell of each kind, for laws that do not depend on the activation."""
    return ALL_CELLS[request.param]


@pytest.fixture
def no_compiler():
    with step_by_step():
        yield


def batch(cell, rng, **sizes):
    given, widths = batch_of_states_of_one_width(cell, rng, **sizes), cell.layer().cell.widths.values()
    states = [rng.normal(size=(len(given.x), width)).astype(DTYPE) for width in widths]
    return given._replace(states=states)


def call(layer, given, mask=None, **options):
    return layer(given.x, initial_state=given.states, mask=mask, **options)


@pytest.mark.parametrize("name", ALL_CELLS)
def test_a_cell_and_its_layer_obey_the_laws(name):
    kg.testing.check_cell(ALL_CELLS[name].layer(), compiled=False)


@pytest.mark.parametrize("name", daily(ALL_CELLS, "lstm", "gru"))
def test_they_obey_them_compiled(name):
    kg.testing.check_cell(ALL_CELLS[name].layer())


@pytest.mark.slow
def test_they_obey_them_for_other_numbers_and_units(cell):
    config = cell.layer().cell.get_config()
    kg.testing.check_cell(type(cell.layer().cell).from_config({**config, "units": 5}), compiled=False, seed=1)


def test_a_step_is_the_equations(cell, rng):
    layer, given = make(cell, rng), batch(cell, rng)
    h, states = layer.cell(given.x[:, 0], given.states)
    _, expected = reference.run(cell.reference, given.x[:, :1], given.states, layer.get_weights())
    assert_close([h, *states], [expected[0], *expected], 1e-12)


@pytest.mark.parametrize("name", GATED)
def test_swapping_two_gate_blocks_changes_the_output(name, rng):
    """Of a step, in the reference: these numbers tell all orders of the blocks apart."""
    cell = ALL_CELLS[name]
    layer, given = make(cell, rng), batch(cell, rng)
    weights = layer.get_weights()
    (_, *_), (expected, *_) = reference.run(cell.reference, given.x[:, :1], given.states, weights)
    columns = cell.gates * N
    for first, second in combinations(range(cell.gates), 2):
        order = list(range(cell.gates))
        order[first], order[second] = order[second], order[first]
        layer.set_weights([swapped(w, order) if w.shape[-1] == columns else w for w in weights])
        h, _ = layer.cell(given.x[:, 0], given.states)
        assert np.abs(arrays([h])[0] - expected).max() > 1e-3


def swapped(w, order):
    return np.concatenate([np.split(w, len(order), axis=-1)[i] for i in order], axis=-1)


def the_layer_is_the_equations(cell, rng, go_backwards, zero_output_for_mask):
    masked = zero_output_for_mask is not None
    options = {"go_backwards": go_backwards, "zero_output_for_mask": bool(zero_output_for_mask)}
    layer, given = make(cell, rng, **options), batch(cell, rng)
    mask = given.mask if masked else None
    outputs, finals = reference.run(cell.reference, given.x, given.states, layer.get_weights(), mask, **options)
    assert_close(call(layer, given, mask), [outputs, *finals], 1e-12)
    last, *_ = call(make_like(layer, cell, return_sequences=False), given, mask)
    assert_close([last], [outputs[:, -1]], 1e-12)


def test_the_layer_is_the_equations(cell, rng, no_compiler):
    the_layer_is_the_equations(cell, rng, go_backwards=True, zero_output_for_mask=True)


@pytest.mark.slow
@pytest.mark.parametrize(("go_backwards", "zero_output_for_mask"), [(True, None), (False, False)])  # None: no mask
def test_the_compiled_layer_is_the_equations(cell, rng, go_backwards, zero_output_for_mask):
    the_layer_is_the_equations(cell, rng, go_backwards, zero_output_for_mask)


def make_like(layer, cell, **changes):
    """A layer with the same weights and other options."""
    config = {**layer.get_config(), **changes}
    other = type(layer).from_config({**config, "name": None})
    other.build((None, None, D))
    other.set_weights(layer.get_weights())
    return other


@pytest.mark.slow
def test_explicit_gradient_is_the_autodiff_gradient(cell, rng):
    layer, given = make(cell, rng, go_backwards=True), batch(cell, rng)
    mask = mask_for_keras(given)
    outputs, gradients = values_and_gradients(layer, layer, given, mask)
    outputs_of_loop, gradients_of_loop = values_and_gradients(loop_of(layer), layer, given, mask)
    assert_close(outputs, outputs_of_loop, 1e-12)
    assert_close(gradients, gradients_of_loop, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"),
    [("rnn_tanh", "plain"), ("lstm", "masked"), ("lstm", "dropout"), ("gru", "dropout"), ("gru_reset_after", "masked")],
)
def test_explicit_gradient_is_the_slope(name, case, rng):
    """Central differences, on every weight, input and initial state; without masks `check_cell` holds every cell."""
    cell = CELLS[name]
    layer, given = make(cell, rng, **(DROPOUT if case == "dropout" else {})), batch(cell, rng)
    mask = given.mask if case == "masked" else None
    seed = np.array([1, 2], "uint32")  # the same dropout masks for every evaluation
    layer.cell.seed_generator.state.assign(seed)
    _, gradients = values_and_gradients(layer, layer, given, mask)

    weights = layer.get_weights()
    run = compiled(
        lambda x, *states: loss(layer(x, initial_state=list(states), mask=mask, training=True)), layer.variables
    )

    def value():
        layer.cell.seed_generator.state.assign(seed)
        for variable, w in zip(layer.trainable_variables, weights, strict=True):
            variable.assign(w)
        return float(
            keras.ops.convert_to_numpy(run(*(keras.ops.convert_to_tensor(a) for a in (given.x, *given.states))))
        )

    step, tolerance = (1e-5, 1e-6) if PRECISE else (3e-3, 5e-3)
    slopes = []
    for array in [given.x, *given.states, *weights]:
        slope = np.zeros_like(array)
        for i in np.ndindex(array.shape):
            kept = array[i]
            ends = []
            for array[i] in (kept - step, kept + step):
                ends.append(value())
            array[i] = kept
            slope[i] = (ends[1] - ends[0]) / (2 * step)
        slopes.append(slope)
    assert_close(gradients, slopes, tolerance)


@pytest.mark.slow
def test_a_gradient_at_inference_is_the_same(tanh_cell, rng):
    """Without training=True nothing is stored, and the gradient runs forward again."""
    layer, given = make(tanh_cell, rng), batch(tanh_cell, rng)
    assert_close(
        values_and_gradients(layer, layer, given, training=False)[1],
        values_and_gradients(layer, layer, given, training=True)[1],
        1e-12,
    )


@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize("return_sequences", [False, True])
@pytest.mark.parametrize("return_state", [False, True])
@pytest.mark.slow
def test_gradients_arrive_at_whatever_is_returned(name, rng, return_sequences, return_state):
    cell = CELLS[name]
    layer = make(cell, rng, return_sequences=return_sequences, return_state=return_state)
    given = batch(cell, rng)

    def run_of(layer):
        return lambda *args, **kwargs: layer(*args, **kwargs) if return_state else [layer(*args, **kwargs)]

    ours = values_and_gradients(run_of(layer), layer, given, mask_for_keras(given))
    loop = values_and_gradients(run_of(loop_of(layer)), layer, given, mask_for_keras(given))
    for a, b in zip(ours, loop, strict=True):
        assert_close(a, b, 1e-10)


@pytest.mark.parametrize(
    ("name", "masked"),
    daily([("rnn_tanh", True), ("lstm", True), ("gru", False), ("gru_reset_after", True)], ("rnn_tanh", True)),
)
def test_eager_graph_and_jit_agree(name, rng, masked, tf):
    layer, given = make(CELLS[name], rng), batch(CELLS[name], rng)
    mask = given.mask if masked else None
    eager = values_and_gradients(layer, layer, given, mask)
    for options in ({}, {"jit_compile": True}):
        traced = tf.function(lambda: values_and_gradients(layer, layer, given, mask), autograph=False, **options)()
        for a, b in zip(eager, traced, strict=True):
            assert_close(b, a, 1e-12)
    tf.config.run_functions_eagerly(True)
    try:
        stepwise = values_and_gradients(layer, layer, given, mask)
    finally:
        tf.config.run_functions_eagerly(False)
    for a, b in zip(eager, stepwise, strict=True):
        assert_close(b, a, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("go_backwards", [False, True])
@pytest.mark.parametrize("zero_output_for_mask", [None, False, True])  # None: no mask
@pytest.mark.parametrize("return_sequences", [False, True])
def test_unrolled_is_the_same(rng, go_backwards, zero_output_for_mask, return_sequences):
    unrolled_is_the_same(rng, go_backwards, zero_output_for_mask, return_sequences)


def test_unrolled_is_the_same_step_by_step(rng, no_compiler):
    unrolled_is_the_same(rng, go_backwards=True, zero_output_for_mask=True, return_sequences=True)


def unrolled_is_the_same(rng, go_backwards, zero_output_for_mask, return_sequences):
    cell = CELLS["lstm"]
    options = {"go_backwards": go_backwards, "zero_output_for_mask": bool(zero_output_for_mask)}
    layer = make(cell, rng, return_sequences=return_sequences, **options)
    given = batch(cell, rng)
    mask = None if zero_output_for_mask is None else given.mask
    unrolled = make_like(layer, cell, unroll=True)
    ours = values_and_gradients(layer, layer, given, mask)
    for a, b in zip(ours, values_and_gradients(unrolled, unrolled, given, mask), strict=True):
        assert_close(b, a, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("graph", [False, True])
def test_a_forward_accumulator_finds_its_derivative(tanh_cell, rng, graph, tf):
    layer, given = make(tanh_cell, rng), batch(tanh_cell, rng)
    x, direction = tf.constant(given.x), tf.constant(rng.normal(size=given.x.shape))
    run = tf.function(layer, autograph=False) if graph else layer
    with tf.autodiff.ForwardAccumulator(x, direction) as accumulator:
        outputs = run(x)
    step = 1e-6
    ends = [layer(x + sign * step * direction) for sign in (-1, 1)]
    slopes = [(b - a) / (2 * step) for a, b in zip(*ends, strict=True)]
    assert_close([accumulator.jvp(y) for y in outputs], slopes, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode", "masked"),
    [("rnn_tanh", "eager", True), ("lstm", "jit", True), ("gru", "graph", False), ("gru_reset_after", "eager", True)],
)
def test_the_gradient_of_a_gradient_is_that_of_the_loop(name, mode, masked, rng, request):
    options = {"go_backwards": True, "zero_output_for_mask": True, **DROPOUT} if masked else {}
    layer, given = make(CELLS[name], rng, **options), batch(CELLS[name], rng, length=3)
    mask = given.mask if masked else None

    def penalty_gradients(run):
        layer.cell.seed_generator.state.assign([1, 2])
        x, *states = (keras.ops.convert_to_tensor(a) for a in (given.x, *given.states))

        def total(x):
            return (loss(run(x, initial_state=states, mask=mask, training=True)),)

        def penalty(x):
            first, _ = gradients(total, [x], layer.trainable_variables)
            return (sum(keras.ops.sum(g**2 * (1 + k)) for k, g in enumerate(first)),)

        return gradients(penalty, [x], layer.trainable_variables)[0]

    # Keras's own loop disagrees with itself about zero_output_for_mask; ours, unrolled, does not.
    runs = [functools.partial(penalty_gradients, run) for run in (layer, same_cell_unrolled(layer))]
    if mode != "eager":  # both of them: XLA draws other dropout masks from the same seed
        tf = request.getfixturevalue("tf")
        runs = [tf.function(run, autograph=False, jit_compile=mode == "jit") for run in runs]
    ours, loop = (run() for run in runs)
    assert_close(ours, loop, 1e-9)


def same_cell_unrolled(layer):
    unrolled = type(layer).from_config({**layer.get_config(), "unroll": True, "name": None})
    unrolled.cell = layer.cell
    return unrolled


@pytest.mark.slow
def test_the_jacobian_of_a_tape_is_found(rng, tf):
    """TensorFlow vectorises the gradient for this, and must not meet an operation it cannot convert."""
    cell = CELLS["lstm"]
    layer, given = make(cell, rng, return_sequences=False, return_state=False), batch(cell, rng)
    x = tf.constant(given.x)
    jacobians = []
    for run in (layer, loop_of(layer)):
        with tf.GradientTape() as tape:
            tape.watch(x)
            h = run(x)
        jacobians.append(tape.jacobian(h, x))
    assert_close(jacobians[:1], jacobians[1:], 1e-10)


@pytest.mark.slow
def test_a_masked_step_equals_a_missing_step(cell, rng):
    layer, given = make(cell, rng), batch(cell, rng)
    for row in range(B):
        there = given.mask[row]
        states = [s[row : row + 1] for s in given.states]
        _, *finals = layer(given.x[row : row + 1], initial_state=states, mask=given.mask[row : row + 1])
        if there.any():
            _, *short = layer(given.x[row : row + 1, there], initial_state=states)
        else:
            short = states
        assert_close(finals, short, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("filler", "unroll"), [(1e35, False), (np.inf, False), (np.nan, False), (np.nan, True)])
def test_a_padded_step_receives_no_gradient(tanh_cell, rng, filler, unroll):
    layer, given = make(tanh_cell, rng, unroll=unroll), batch(tanh_cell, rng)
    outputs, gradients = values_and_gradients(layer, layer, given, given.mask)
    assert not np.any(arrays(gradients)[0][~given.mask])
    filled = given._replace(x=np.where(given.mask[..., None], given.x, filler))
    outputs_filled, gradients_filled = values_and_gradients(layer, layer, filled, given.mask)
    assert_close(outputs_filled, outputs, 0)
    assert_close(gradients_filled, gradients, 0)


@pytest.mark.slow
def test_a_row_of_padding_keeps_its_state_and_puts_out_zero(cell, rng):
    layer, given = make(cell, rng), batch(cell, rng)
    nothing = np.zeros((B, T), bool)
    outputs, gradients = values_and_gradients(layer, layer, given, nothing)
    assert_close(outputs, [np.zeros((B, T, given.states[0].shape[1])), *given.states], 0)
    assert all(np.isfinite(g).all() for g in arrays(gradients))


@pytest.mark.slow
def test_running_in_two_pieces_equals_running_once(cell, rng):
    layer, given = make(cell, rng), batch(cell, rng)
    whole, *finals = call(layer, given, given.mask)
    first, *states = layer(given.x[:, :2], initial_state=given.states, mask=given.mask[:, :2])
    second, *states = layer(given.x[:, 2:], initial_state=states, mask=given.mask[:, 2:])
    assert_close(states, finals, 1e-12)
    first, second, whole = arrays([first, second, whole])
    assert_close([first], [whole[:, :2]], 1e-12)
    seen = np.cumsum(given.mask[:, 2:], axis=1) > 0  # before, the second piece has no output to repeat
    assert_close([second[seen]], [whole[:, 2:][seen]], 1e-12)


@pytest.mark.slow
def test_examples_of_a_batch_do_not_see_each_other(cell, rng):
    layer, given = make(cell, rng), batch(cell, rng, size=9)  # two lanes, of 4 and 5
    whole = call(layer, given, given.mask)
    for n in range(9):
        row = slice(n, n + 1)
        alone = layer(given.x[row], initial_state=[s[row] for s in given.states], mask=given.mask[row])
        assert_close(alone, [y[row] for y in whole], 1e-12)


@pytest.mark.slow
def test_reversed_input_with_go_backwards_is_the_forward_run(cell, rng):
    layer, given = make(cell, rng), batch(cell, rng)
    backward = make_like(layer, cell, go_backwards=True)
    flipped = given._replace(x=given.x[:, ::-1])
    assert_close(call(backward, flipped, given.mask[:, ::-1]), call(layer, given, given.mask), 1e-12)


KERAS = {
    "rnn_tanh": lambda **options: keras.layers.SimpleRNN(N, **options),
    "rnn_relu": lambda **options: keras.layers.SimpleRNN(N, activation="relu", **options),
    "lstm": lambda **options: keras.layers.LSTM(N, **options),
    "gru": lambda **options: keras.layers.GRU(N, reset_after=False, **options),
    "gru_reset_after": lambda **options: keras.layers.GRU(N, **options),
}


@pytest.mark.parametrize("name", KERAS)
def test_the_layer_is_that_of_keras_with_the_same_weights(name, rng, no_compiler):
    the_layer_is_that_of_keras(name, {}, rng)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERAS)
@pytest.mark.parametrize("options", [{}, {"go_backwards": True}, {"zero_output_for_mask": True}], ids=str)
def test_the_compiled_layer_is_that_of_keras_with_the_same_weights(name, options, rng):
    the_layer_is_that_of_keras(name, options, rng)


def the_layer_is_that_of_keras(name, options, rng):
    """Our z writes where Keras's keeps: 1 - σ(a) = σ(-a), so its block is negated."""
    cell = CELLS[name]
    layer, given = make(cell, rng, **options), batch(cell, rng)
    theirs = KERAS[name](dtype=DTYPE, return_sequences=True, return_state=True, **options)
    theirs.build((None, None, D))
    sign = np.repeat([-1, 1, 1], N) if name.startswith("gru") else 1
    theirs.set_weights([w * sign for w in layer.get_weights()])
    mask = mask_for_keras(given)
    outputs, gradients = values_and_gradients(layer, layer, given, mask)
    outputs_of_keras, gradients_of_keras = values_and_gradients(theirs, theirs, given, mask)
    gradients_of_keras[-3:] = [g * sign for g in arrays(gradients_of_keras[-3:])]
    assert_close(outputs, outputs_of_keras, 1e-10)
    assert_close(gradients, gradients_of_keras, 1e-10)


@pytest.mark.slow
def test_dropout_in_the_sweep_is_dropout_in_the_loop(tanh_cell, rng):
    given = batch(tanh_cell, rng)
    layer = make(tanh_cell, rng, **DROPOUT)
    mask = mask_for_keras(given)
    ours = values_and_gradients(layer, layer, given, mask)
    layer.cell.seed_generator.state.assign(keras.random.SeedGenerator(7).state)
    theirs = values_and_gradients(loop_of(layer), layer, given, mask)
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, 1e-10)
    plain = make_like(layer, tanh_cell, dropout=0.0, recurrent_dropout=0.0)
    assert_close(call(layer, given, training=False), call(plain, given), 1e-12)
    first, second = (arrays(call(layer, given, training=True))[0] for _ in range(2))
    assert np.abs(first - second).max() > 1e-3  # drawn anew for each call


@pytest.mark.parametrize("which", ["dropout", "recurrent_dropout"])
def test_a_dropout_mask_is_constant_in_time(which, rng, no_compiler):
    """h_t = x_t or h_{t-1} alone: what is dropped at one step is dropped at all."""
    cell = CELLS["rnn_linear"]
    layer = build(cell.layer(**{which: 0.5}, return_sequences=True, use_bias=False), rng, N)
    inward, around = (np.eye(N), np.zeros((N, N))) if which == "dropout" else (np.zeros((N, N)), np.eye(N))
    layer.set_weights([inward, around])
    x, h = np.ones((4, 20, N)), np.ones((4, N))
    (outputs,) = arrays([layer(x, initial_state=[h], training=True)])
    scale = outputs if which == "dropout" else outputs[:, 1:] / np.where(outputs[:, :-1] == 0, 1, outputs[:, :-1])
    assert set(np.unique(scale.round(5))) == {0, 2}
    assert np.all((outputs == 0) == (outputs[:, :1] == 0))


@pytest.mark.parametrize("unroll", [False, True])
def test_integers_are_numbers(tanh_cell, rng, unroll, no_compiler):
    layer = build(tanh_cell.layer(unroll=unroll), rng)
    x = rng.integers(-3, 4, size=(B, T, D))
    assert_close([layer(x)], [layer(x.astype("float32"))], 0)
    states = [np.zeros((B, N), "float32")] * tanh_cell.states
    assert_close([layer.cell(x[:, 0], states)[0]], [layer.cell(x[:, 0].astype("float32"), states)[0]], 0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float64", "mixed_float16", "mixed_bfloat16"])
def test_precision_follows_the_policy(tanh_cell, rng, policy):
    if policy == "float64" and not PRECISE:
        pytest.skip("Keras's operations compute in float32 here")
    layer, given = make(tanh_cell, rng, dtype=policy), batch(tanh_cell, rng)
    mask = mask_for_keras(given)
    single = make_like(layer, tanh_cell, dtype="float32")
    outputs = call(layer, given, mask)
    assert {keras.backend.standardize_dtype(y.dtype) for y in outputs} == {layer.compute_dtype}
    assert {w.dtype for w in layer.weights} == {layer.variable_dtype}
    tolerance = {"float64": 1e-6, "mixed_float16": 3e-3, "mixed_bfloat16": 3e-2}[policy]
    outputs = [keras.ops.cast(y, "float32") for y in outputs]
    assert_close(outputs, call(single, given, mask), tolerance)
    theirs = loop_of(layer)(given.x, initial_state=given.states, mask=mask)
    assert_close(outputs, [keras.ops.cast(y, "float32") for y in theirs], tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_half_precision_is_for_storage(tanh_cell, rng, policy, tf):
    """What is computed is float32's answer to the rounded question, rounded: not an error per step."""
    layer, given = make(tanh_cell, rng, dtype=policy), batch(tanh_cell, rng, length=40)
    half = layer.compute_dtype
    layer.set_weights([tf.cast(tf.cast(w, half), "float32") for w in layer.get_weights()])
    single = make_like(layer, tanh_cell, dtype="float32")
    given = batch(tanh_cell, rng, length=40)
    given = given._replace(x=tf.cast(given.x, half), states=[tf.cast(s, half) for s in given.states])
    expected = [tf.cast(y, half) for y in call(single, given)]
    received = call(layer, given)
    off = [
        np.mean(np.asarray(a, "float32") != np.asarray(b, "float32")) for a, b in zip(received, expected, strict=True)
    ]
    assert max(off) < 0.02  # float32 itself may round the other way now and then


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "stateful"), [("mixed_float16", True), ("mixed_bfloat16", False)])
def test_mixed_precision_trains(tanh_cell, rng, policy, stateful):
    layer = tanh_cell.layer(dtype=policy, stateful=stateful)
    model = keras.Sequential([keras.Input(batch_shape=(4, T, D)), layer, keras.layers.Dense(1, dtype="float32")])
    model.compile("adam", "mse")
    x = rng.normal(size=(8, T, D)).astype("float32")
    before = layer.get_weights()
    history = model.fit(x, x[:, 0, :1], batch_size=4, shuffle=False, verbose=0)  # two steps
    assert np.all(np.isfinite(history.history["loss"]))
    assert all(np.abs(a - b).max() > 0 for a, b in zip(before, layer.get_weights(), strict=True))


@pytest.mark.slow
def test_a_layer_survives_saving(tanh_cell, rng, tmp_path):
    layer = tanh_cell.layer(
        return_sequences=True, dropout=0.1, kernel_regularizer="l2", recurrent_constraint="max_norm"
    )
    model = keras.Sequential([keras.Input((None, D)), keras.layers.Bidirectional(layer)])
    x = rng.normal(size=(B, T, D)).astype("float32")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    forward = loaded.layers[0].forward_layer
    assert type(forward) is type(layer)
    assert {**forward.get_config(), "name": None} == {**model.layers[0].forward_layer.get_config(), "name": None}
    assert_close([loaded(x)], [model(x)], 0)
