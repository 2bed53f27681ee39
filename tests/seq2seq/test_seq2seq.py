"""The encoder-decoder as a function: against NumPy, its gradients, its step, scores and what it generates."""

import itertools

import keras
import numpy as np
import pytest
import reference
from keras import ops
from table import DTYPE, arrays, assert_close, gradients
from tiers import daily

import keras_gated as kg
from keras_gated.cells.recurrent import Recurrent
from keras_gated.seq2seq.metrics import crossentropies

V_X, V_Y, N, E = 7, 5, 3, 4
START, END = 1, 2
MODELS = {
    "plain": {},
    "lstm": {"cell": "lstm", "layers": 2, "bidirectional": True, "attention": "additive"},
    "gru": {"cell": kg.GRUCell(N, reset_after=True), "layers": 2, "attention": "multiplicative"},
    "rnn": {"cell": "simple_rnn", "bidirectional": True},
}
STEPS = {kg.SimpleRNN: reference.simple_rnn("tanh"), kg.LSTM: reference.lstm}
SOURCE = np.array([[3, 6, 4, 5, 0], [0, 3, 0, 6, 2], [0, 0, 0, 0, 0], [5, 0, 0, 0, 0]])
TARGET = np.array([[1, 3, 4, 3, 2], [1, 4, 2, 0, 0], [1, 2, 0, 0, 0], [1, 3, 3, 0, 0]])


def make(name, rng, scale=0.7, **options):
    model = kg.Seq2Seq(V_X, V_Y, N, **{"embedding_dim": E, **MODELS[name], **options})
    model.set_weights([rng.normal(size=w.shape) * scale for w in model.get_weights()])
    return model


@pytest.fixture(scope="module")
def whole():
    """A model with everything: the tests that only call it share what it has compiled."""
    return make("lstm", np.random.default_rng(0), 1.5)


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


def step_of(layer):
    gru = reference.gru_reset_after if getattr(layer.cell, "reset_after", False) else reference.gru
    return STEPS.get(type(layer), gru), len(layer.cell.equations.states), weights_of(layer)


def weights_of(layer):
    return [w.astype("float64") for w in layer.get_weights()]


def log_probability(model, source, target):
    """By tests/reference.py, of one pair."""
    encoder, decoder = model.encoder, model.decoder
    layers = [
        [step_of(d) for d in ((layer.forward_layer, layer.backward_layer) if encoder.bridges else (layer,))]
        for layer in encoder.recurrent
    ]
    bridges = np.array([weights_of(b) for b in encoder.bridges], object).reshape(len(layers), -1, 2)
    values, states = reference.encoder(
        source, *weights_of(encoder.embedding), layers, list(bridges) if len(encoder.bridges) else None
    )
    score = W_c = None
    if decoder.attention is not None:
        kinds = {kg.AdditiveAttention: reference.additive, kg.MultiplicativeAttention: reference.multiplicative}
        score, (W_c,) = kinds[type(decoder.attention)](*weights_of(decoder.attention)), weights_of(decoder.combine)
    return reference.decoder(
        target[: np.count_nonzero(target)],
        [0, START],
        states,
        values,
        source != 0,
        *weights_of(decoder.embedding),
        [step_of(layer) for layer in decoder.recurrent],
        score,
        W_c,
        *weights_of(decoder.logits),
    )


def test_it_is_the_reference(name, rng, uncompiled):
    """Padding on the left, inside, and nothing else; a target without its end."""
    model = make(name, rng, dtype=DTYPE)
    expected = [log_probability(model, source, target) for source, target in zip(SOURCE, TARGET, strict=True)]
    assert_close([model.score(SOURCE, TARGET)], [np.array(expected)], 1e-12)


def walk(model, source, target):
    """log p by public one-token steps, and all logits."""
    state, total, all_logits = model.encode(source), 0.0, []
    for t in range(target.shape[1] - 1):
        logits, state = model.step(ops.convert_to_tensor(target[:, t]), state)
        all_logits.append(logits)
        label = target[:, t + 1]
        total += np.where(label != 0, -arrays([crossentropies(label, logits)])[0], 0)
    return total, np.stack(arrays(all_logits), axis=1)


@pytest.mark.parametrize(
    ("name", "dtype"),
    daily(
        [(name, dtype) for name in MODELS for dtype in ("float32", "mixed_float16")],
        ("gru", "mixed_float16"),
    ),
)
def test_a_step_is_what_the_sweep_does(name, dtype, rng, uncompiled):
    """Of half precision a step may round as the sweep does, but not its state, too: 30 steps of that would differ, most
    in a GRU.  (Where a processor multiplies float16 itself, what is rounded differs by the shape of the product.)"""
    tolerance = {"float32": 1e-6, "mixed_float16": 5e-4}[dtype]
    if dtype == "mixed_float16" and keras.backend.backend() != "tensorflow":
        tolerance = 1e-2  # Keras's loop rounds the states that it goes on with
    model = make(name, rng, dtype=dtype)
    target = np.concatenate([np.ones((4, 1), int), rng.integers(3, V_Y, (4, 30))], axis=1)
    total, logits = walk(model, SOURCE, target)
    assert_close([logits[..., 2:]], [arrays([model((SOURCE, target))])[0][..., 2:]], tolerance)
    assert_close([total], [model.score(SOURCE, target)], tolerance)


@pytest.mark.parametrize(("name", "wide"), daily([("plain", True), ("lstm", True), ("gru", False)], ("plain", True)))
def test_gradients_are_slopes(name, wide, rng, tf, monkeypatch, uncompiled):
    """Also where tokens, in training alone, are multiplied by E W instead of their embedding by W."""
    model = make(name, rng, dtype=DTYPE, embedding_dim=2 * V_X if wide else E)
    folded, behind = [], Recurrent.behind
    monkeypatch.setattr(Recurrent, "behind", lambda layer, embedding: folded.append(layer) or behind(layer, embedding))

    def total():
        losses = crossentropies(TARGET[:, 1:], model((SOURCE, TARGET), training=True))
        return ops.sum(ops.where(TARGET[:, 1:] != 0, losses, 0)), losses

    found, _ = gradients(total, [], model.trainable_variables)
    assert len(folded) == wide * (3 if name == "lstm" else 2)
    for variable, gradient in zip(
        model.trainable_variables, arrays([ops.convert_to_tensor(g) for g in found]), strict=True
    ):
        value, direction = ops.convert_to_numpy(variable), rng.normal(size=variable.shape)
        sides = []
        for step in (1e-5, -1e-5):
            variable.assign(value + step * direction)
            sides.append(-model.score(SOURCE, TARGET).sum())
        variable.assign(value)
        slope = (sides[0] - sides[1]) / 2e-5
        assert np.sum(gradient * direction) == pytest.approx(slope, rel=1e-6, abs=1e-8), variable.path


@pytest.mark.parametrize("name", daily(MODELS, "lstm", "gru"))
def test_padding_of_a_source_changes_nothing(name, rng, uncompiled):
    model = make(name, rng)
    wide = np.pad(SOURCE, ((0, 0), (2, 3)))
    assert_close([model.score(wide, TARGET)], [model.score(SOURCE, TARGET)], 1e-6)
    assert_close([model.score(SOURCE, np.pad(TARGET, ((0, 0), (0, 4))))], [model.score(SOURCE, TARGET)], 1e-6)


def all_targets(length):
    """All sequences that end within `length` tokens, and all beginnings of that length that do not."""
    words = [w for n in range(length + 1) for w in itertools.product(range(3, V_Y), repeat=n)]
    rows = [[START, *w, END] for w in words if len(w) < length] + [[START, *w] for w in words if len(w) == length]
    target = np.zeros((len(rows), length + 1), int)
    for n, row in enumerate(rows):
        target[n, : len(row)] = row
    return target


@pytest.mark.parametrize("name", daily(MODELS, "lstm", "rnn"))
def test_probabilities_of_all_sequences_sum_to_1(name, rng, uncompiled):
    """Were any left to padding or to the start token, which no sequence holds, they would not."""
    model, target = make(name, rng, 1.5), all_targets(4)
    assert len(np.unique(target, axis=0)) == 31
    for source in SOURCE:
        total = np.exp(model.score(np.repeat(source[None], len(target), axis=0), target)).sum()
        assert total == pytest.approx(1, abs=1e-6)


STRATEGIES = {
    "greedy": {"strategy": "greedy"},
    "beam": {"strategy": "beam", "beam_width": 3},
    "beam by the letter": {"strategy": "beam", "length_penalty": 1.0},
    "sample": {"strategy": "sample", "seed": 1},
    "sample of few": {"strategy": "sample", "seed": 1, "temperature": 0.5, "top_k": 2, "top_p": 0.9},
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    daily(
        [(name, strategy) for name in ("plain", "lstm") for strategy in STRATEGIES],
        ("plain", "greedy"),
        ("lstm", "beam by the letter"),
        ("plain", "sample of few"),
    ),
)
def test_what_is_generated_has_the_score_it_says(name, strategy, rng, tf, whole, uncompiled):
    model = whole if name == "lstm" else make(name, rng, 1.5)
    tokens, log_probability = model.generate(SOURCE, 6, **STRATEGIES[strategy])
    assert tokens.shape == (4, 6) and tokens.dtype == np.int32 and not np.isin(tokens, [START]).any()
    target = np.concatenate([np.full((4, 1), START), tokens], axis=1)
    assert_close([log_probability], [model.score(SOURCE, target)], 1e-5)
    ended = (tokens == END).cumsum(axis=1) - (tokens == END) > 0
    assert not tokens[ended].any() and tokens[~ended].all()


def test_beam_search_that_keeps_all_finds_the_likeliest(tf, uncompiled):
    model, target = make("gru", np.random.default_rng(0), 1.0), all_targets(4)
    model.decoder.logits.bias.assign(np.zeros(V_Y))  # or the end comes too soon for a choice
    found = model.generate(SOURCE, 4, "beam", beam_width=V_Y**4)
    assert (found.tokens != model.generate(SOURCE, 4).tokens).any()
    for source, tokens, log_p in zip(SOURCE, *found, strict=True):
        scores = model.score(np.repeat(source[None], len(target), axis=0), target)
        assert tokens.tolist() == target[scores.argmax(), 1:].tolist() and log_p == pytest.approx(scores.max(), 1e-5)


@pytest.mark.parametrize("strategy", daily(["greedy", "beam", "beam by the letter"], "beam"))
def test_rows_do_not_see_each_other(strategy, whole, tf, uncompiled):
    model, options = whole, STRATEGIES[strategy]
    together = model.generate(SOURCE, 5, **options)
    for batch_size in (1, 3):
        received = model.generate(SOURCE, 5, **options, batch_size=batch_size)
        np.testing.assert_array_equal(received.tokens, together.tokens)
    received = model.generate(SOURCE[2:3], 5, **options)
    np.testing.assert_array_equal(received.tokens, together.tokens[2:3])
    assert_close([model.score(SOURCE, TARGET, batch_size=3)], [model.score(SOURCE, TARGET)], 1e-6)


def test_a_source_is_encoded_once(whole, tf):
    model = whole
    expected, state = model.generate(SOURCE, 5), model.encode(SOURCE)
    rows = [[token for token in row] for row in SOURCE.tolist()]
    for source in (state, rows, SOURCE.astype("int64"), tf.constant(SOURCE)):
        np.testing.assert_array_equal(model.generate(source, 5, batch_size=3).tokens, expected.tokens)
    assert_close([model.score(state, TARGET, batch_size=3)], [model.score(SOURCE, TARGET)], 1e-6)
    assert_close(model.generate([[5], [3, 6, 4, 5]], 5), [a[[3, 0]] for a in expected], 1e-6)


def test_samples_follow_their_seed(rng, tf):
    model = make("plain", rng)
    source = np.repeat(SOURCE[:1], 64, axis=0)
    first, again, other = (model.generate(source, 5, "sample", seed=seed).tokens for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    parts = model.generate(source, 5, "sample", seed=3, batch_size=32).tokens
    assert (parts[:32] != parts[32:]).any()  # batches do not repeat each other
    drawn = [model.generate(source, 5, "sample").tokens for _ in range(2)]
    assert (drawn[0] != drawn[1]).any()


def test_calls_make_no_new_graphs(rng, tf):
    model = make("plain", rng)

    def call(B, T, n):
        source = rng.integers(3, V_X, (B, T))
        model.generate(source, 3 + n, "sample", temperature=0.5 + n, top_k=2 + n, seed=n)
        model.generate(source, 3 + n, "beam", beam_width=2, length_penalty=0.1 * n)
        model.score(source, np.pad(TARGET[:1], ((0, 0), (0, n))).repeat(B, axis=0))

    call(3, 4, 0)
    call(5, 6, 1)
    made = [f.experimental_get_tracing_count() for f in model._functions.values()]
    call(2, 9, 2)
    call(7, 3, 3)
    assert [f.experimental_get_tracing_count() for f in model._functions.values()] == made and max(made) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "lstm"])
def test_what_is_exported_serves(name, rng, tf, tmp_path):
    """`encode` and `step` become part of a graph of one's own, a function of tokens alone."""
    model, archive = make(name, rng, 1.5), keras.export.ExportArchive()

    def serve(source):
        start = tf.fill([tf.shape(source)[0]], START)
        return kg.decoding.beam_search(model.step, model.encode(source), start, 5, beam_width=3)._asdict()

    archive.track(model)
    archive.add_endpoint("serve", serve, input_signature=[tf.TensorSpec((None, None), tf.int64)])
    archive.write_out(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(tmp_path / "served")
    for source in (SOURCE, SOURCE[:2, :3]):
        expected = model.generate(source, 5, "beam", beam_width=3)
        assert_close([served.serve(tf.constant(source))[key] for key in expected._fields], expected, 1e-6)


def test_attention_weights(rng, whole, uncompiled):
    model = whole
    weights = model.attention_weights(SOURCE, TARGET, batch_size=3)
    assert weights.shape == (4, TARGET.shape[1] - 1, SOURCE.shape[1])
    assert not np.moveaxis(weights, 1, 2)[SOURCE == 0].any()
    np.testing.assert_allclose(weights[[0, 1, 3]].sum(axis=2), 1, atol=1e-6)
    assert weights[0].std(axis=0).max() > 1e-3  # it moves
    with pytest.raises(ValueError, match="expects a model with attention"):
        make("plain", rng).attention_weights(SOURCE, TARGET)


def test_generation_elsewhere_is_told(rng, monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(NotImplementedError, match="generate needs the TensorFlow backend, Keras runs on jax"):
        make("plain", rng).generate(SOURCE, 5)


WRONG = [
    ({"units": 0}, "units to be a positive integer, received 0"),
    ({"embedding_dim": 2.5}, "embedding_dim to be a positive integer, received 2.5"),
    ({"cell": "rnn"}, r"cell to be one of \('gru', 'lstm', 'simple_rnn'\), or a cell of ours, received 'rnn'"),
    ({"cell": keras.layers.GRUCell(N)}, "cell to be one of .* received <GRUCell"),
    ({"cell": kg.LSTMCell(N + 1)}, "a cell of 3 units, as its layers have, received 4"),
    ({"attention": "dot"}, r"attention to be one of \(None, 'additive', 'multiplicative'\), received 'dot'"),
    ({"end_token": V_Y}, "end_token in 1 .. 4, the target_vocabulary but padding, received 5"),
    ({"start_token": 0}, "start_token in 1 .. 4"),
    ({"dropout": 1}, r"dropout in \[0, 1\), received 1"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_arguments_that_are_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        kg.Seq2Seq(**{"source_vocabulary": V_X, "target_vocabulary": V_Y, "units": N, **options})


def test_calls_that_are_wrong(rng, tf):
    model = make("plain", rng)
    for options, message in [
        ({"max_length": 0}, "max_length to be at least 1, received 0"),
        ({"strategy": "best"}, r"strategy to be one of \('greedy', 'beam', 'sample'\), received 'best'"),
        ({"beam_width": 0}, "beam_width to be at least 1"),
        ({"length_penalty": -1}, "length_penalty to be at least 0"),
        ({"temperature": 0}, "temperature to be above 0"),
        ({"top_k": 0}, "top_k to be None or at least 1"),
        ({"top_p": 1.5}, r"top_p to be None or in \(0, 1\], received 1.5"),
        ({"batch_size": 0}, "batch_size to be at least 1"),
        ({"source": SOURCE + 5}, "source tokens in 0 .. 6, its source_vocabulary, received 5 .. 11"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.generate(**{"source": SOURCE, "max_length": 5, **options})
    with pytest.raises(ValueError, match="one target for each source, received 3 and 4 rows"):
        model.score(SOURCE[:3], TARGET)
    with pytest.raises(ValueError, match="start token 1"):
        model.score(SOURCE, TARGET[:, 1:])
    other = kg.Seq2Seq(V_X, V_Y, N + 2, attention="additive")
    with pytest.raises(ValueError, match=r"a state of sizes \(\[\[3\]\], \[\]\).*received \(\[\[5\]\], \[5\]\)"):
        model.generate(other.encode(SOURCE), 5)
