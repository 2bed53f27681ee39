"""The encoder-decoder as a Keras model: data, losses, metrics, optimizers, callbacks, replicas, saving."""

import subprocess
import sys

import keras
import numpy as np
import pytest
from table import arrays, assert_close

import keras_gated as kg
from keras_gated.seq2seq.metrics import TokenCrossentropy

V = 8
ATTENTIVE = {"bidirectional": True, "attention": "additive"}
FULL = {"cell": "lstm", "layers": 2, **ATTENTIVE}


def pairs(rng, n, longest=4):
    """Sequences and their reversal, padded on the right."""
    source, target = np.zeros((n, longest), "int32"), np.zeros((n, longest + 2), "int32")
    for row, length in enumerate(rng.integers(1, longest + 1, n)):
        words = rng.integers(3, V, length)
        source[row, :length] = words
        target[row, : length + 2] = [1, *words[::-1], 2]
    return source, target


def make(units=6, dtype="float32", seed=0, **options):
    keras.utils.set_random_seed(seed)
    return kg.Seq2Seq(V, V, units, dtype=dtype, **options)


def compiled(optimizer="sgd", units=6, model_options=None, **options):
    model = make(units, **(model_options or {}))
    model.compile(optimizer, **options)
    return model


def weights_after(model, *data, **options):
    history = model.fit(*data, **{"batch_size": 8, "shuffle": False, "verbose": 0, **options})
    return [*model.get_weights(), *(np.array(values) for values in history.history.values())]


def test_every_form_of_data(rng, tf, uncompiled):
    source, target = pairs(rng, 24)
    model = compiled()
    start = model.get_weights()
    expected = weights_after(model, (source, target), validation_data=(source[:8], target[:8]))
    dataset = tf.data.Dataset.from_tensor_slices((source, target)).batch(8)
    lists = [[t for t in row if t] for row in source.tolist()], [[t for t in row if t] for row in target.tolist()]
    forms = [
        [source, target],
        [dataset],
        [dataset.map(lambda s, t: ((s, t),))],
        [lists],
        [(source.astype("int64"), tf.constant(target))],
    ]
    valid = [(source[:8], target[:8]), ((source[:8], target[:8]),), dataset.take(1), [lists[0][:8], lists[1][:8]]]
    for n, data in enumerate(forms):
        model.set_weights(start)
        received = weights_after(model, *data, validation_data=valid[n % 4], batch_size=None if n in (1, 2) else 8)
        assert_close(received, expected, 1e-6)


def test_one_batch_at_a_time(rng, uncompiled):
    source, target = pairs(rng, 8)
    one, other = compiled(), compiled()
    one.fit((source, target), batch_size=8, verbose=0)
    other.train_on_batch(source, target)
    assert_close(other.get_weights(), one.get_weights(), 1e-4)
    one.reset_metrics()  # those of fit go on in test_on_batch, in some versions of Keras
    logs = one.test_on_batch(source, target, return_dict=True)
    assert logs == pytest.approx(one.evaluate((source, target), verbose=0, return_dict=True), rel=1e-6)
    assert one.predict((source, target), verbose=0).shape == (8, 5, V)


def test_logs_are_of_valid_tokens_of_the_whole_epoch(rng, tf, uncompiled):
    """Against `score`, over batches of different lengths."""
    model = compiled()
    parts = [pairs(rng, n, longest) for n, longest in [(5, 2), (3, 6), (1, 4)]]

    def generator():
        yield from parts

    shape = tf.TensorSpec((None, None), "int32")
    dataset = tf.data.Dataset.from_generator(generator, output_signature=(shape, shape))
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(3))
    logs = model.evaluate(dataset, verbose=0, return_dict=True)
    scores = [model.score(*part) for part in parts]
    counts = [np.count_nonzero(target[:, 1:]) for _, target in parts]
    assert logs["perplexity"] == pytest.approx(np.exp(-sum(s.sum() for s in scores) / sum(counts)), rel=1e-5)
    losses = [-s.sum() / n for s, n in zip(scores, counts, strict=True)]
    assert logs["loss"] == pytest.approx(np.average(losses, weights=[5, 3, 1]), rel=1e-5)  # Keras's mean over batches
    assert set(logs) == {"loss", "perplexity", "token_accuracy", "sequence_accuracy"}


def test_padding_changes_nothing_and_only_padding_is_0(rng, uncompiled):
    source, target = pairs(rng, 16)
    expected = weights_after(compiled("adam"), (source, target))
    wide = np.pad(source, ((0, 0), (0, 3))), np.pad(target, ((0, 0), (0, 2)))
    assert_close(weights_after(compiled("adam"), wide), expected, 1e-5)
    model = compiled()
    before = model.get_weights()
    history = model.fit((np.zeros_like(source), np.zeros_like(target)), verbose=0).history
    assert history["loss"] == [0] and history["token_accuracy"] == [0]
    assert_close(model.get_weights(), before, 0)


def test_weights_of_rows_and_of_tokens(rng, uncompiled):
    source, target = pairs(rng, 16)
    kept = np.arange(16) % 3 > 0
    expected = compiled().evaluate((source[kept], target[kept]), verbose=0, return_dict=True)
    by_token = kept[:, None] * np.ones(target.shape)
    by_token[:, 0] = 9  # the start token is not asked for
    for sample_weight in (kept.astype("float32"), by_token):
        logs = compiled().evaluate((source, target), sample_weight=sample_weight, verbose=0, return_dict=True)
        for name in ("perplexity", "token_accuracy", "sequence_accuracy"):
            assert logs[name] == pytest.approx(expected[name], rel=1e-5)
    doubled = weights_after(compiled(), (source, target), sample_weight=np.full(16, 2.0), batch_size=16)
    assert_close(doubled[:1], weights_after(compiled(keras.optimizers.SGD(0.02)), (source, target), batch_size=16)[:1])


def test_a_loss_and_metrics_of_ones_own_see_labels_and_mask(rng, tf, uncompiled):
    source, target = pairs(rng, 16)
    seen = []

    def watching(y_true, y_pred):
        seen.append((arrays([y_true])[0], arrays([y_pred._keras_mask])[0]))
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)

    options = {"model_options": {"attention": "multiplicative"}}
    model = compiled(loss=watching, metrics=["sparse_categorical_accuracy"], run_eagerly=True, **options)
    logs = model.evaluate((source, target), batch_size=16, verbose=0, return_dict=True)
    ours = compiled(**options).evaluate((source, target), batch_size=16, verbose=0, return_dict=True)
    assert logs["loss"] == pytest.approx(ours["loss"], rel=1e-6)
    assert logs["sparse_categorical_accuracy"] == pytest.approx(ours["token_accuracy"], rel=1e-6)
    np.testing.assert_array_equal(seen[0][0], target[:, 1:])
    np.testing.assert_array_equal(seen[0][1], target[:, 1:] != 0)


@pytest.mark.parametrize("data", ["source", "three", "weights", "target"])
def test_data_that_is_wrong(data, rng):
    source, target = pairs(rng, 8)
    given, options, message = {
        "source": (source, {}, r"expects pairs.*received x of shape \(8, 4\)"),
        "three": ((source, target, target), {}, "expects pairs"),
        "weights": ((source, target), {"class_weight": {1: 2.0}}, "no class_weight"),
        "target": ((source, target[:, 1:]), {}, "start token 1"),
    }[data]
    with pytest.raises(ValueError, match=message):
        compiled().fit(given, verbose=0, **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dtype": "mixed_float16", **FULL}, {"attention": "multiplicative"}])
def test_it_learns_under_a_clip_and_is_watched(options, rng, tf, tmp_path):
    source, target = pairs(rng, 512, 3)
    model = make(24, **options)
    model.compile(kg.ClipNorm(keras.optimizers.Adam(0.02), 1.0))
    norms, flow = kg.GradientNorms(tmp_path), kg.GradientFlow(tmp_path)
    history = model.fit((source, target), batch_size=32, epochs=6, verbose=0, callbacks=[norms, flow]).history
    assert history["perplexity"][-1] < 0.5 * history["perplexity"][0] and history["token_accuracy"][-1] > 0.7
    assert len(norms.records.raw) == 96 and np.all(norms.records.raw > 0)
    labels = {label.removesuffix("/c") for label in flow.records}
    assert {"encoder/layer_0", "decoder/layer_0"} <= labels or {"decoder/layer_0", "decoder/layer_1"} <= labels
    assert all(np.all(record.p50 > 0) for record in flow.records.values())


@pytest.mark.slow
def test_padding_counts_in_no_profile(rng, tf, tmp_path):
    source, target = pairs(rng, 16)
    records = []
    for width in (0, 5):
        wide = [np.pad(tokens, ((0, 0), (0, width))) for tokens in (source, target)]
        model, flow = compiled(), kg.GradientFlow(tmp_path / str(width))
        model.fit(*wide, batch_size=8, shuffle=False, verbose=0, callbacks=[flow])
        records.append(flow.records)
    for label in ("encoder/layer_0", "decoder/layer_0"):
        assert_close([records[1][label].p50], [records[0][label].p50], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, ATTENTIVE], ids=str)
def test_it_trains_compiled_as_a_whole(options, rng, tf):
    source, target = pairs(rng, 16)
    plain = weights_after(compiled(model_options=options), (source, target))
    whole = weights_after(compiled(model_options=options, jit_compile=True), (source, target))
    assert_close(whole, plain, 1e-5)


def test_dropout_is_of_training_alone(rng, uncompiled):
    source, target = pairs(rng, 16)
    model = make(dropout=0.5)
    inferred = [model((source, target)) for _ in range(2)]
    trained = [model((source, target), training=True) for _ in range(2)]
    assert_close(inferred[:1], inferred[1:], 0)
    assert np.abs(arrays(trained)[0] - arrays(trained)[1]).max() > 1e-2
    layers = [*model.encoder.recurrent, *model.decoder.recurrent]
    assert [layer.cell.dropout for layer in layers] == [0.5, 0.5]


def test_inside_another_model(rng, tmp_path, uncompiled):
    source, target = keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")
    inner = make(name="inner")
    logits = inner((source, target))
    outer = keras.Model([source, target], keras.layers.Activation("linear")(logits))
    assert logits.shape == (None, None, V)
    outer.compile("sgd", TokenCrossentropy())
    x, y = pairs(rng, 8)
    outer.fit([x, y], y[:, 1:], verbose=0)
    alone = compiled()
    alone.fit((x, y), verbose=0)
    assert_close(inner.get_weights(), alone.get_weights(), 1e-6)
    outer.save(tmp_path / "outer.keras")
    assert_close([keras.models.load_model(tmp_path / "outer.keras")([x, y])], [outer([x, y])], 1e-6)


def test_every_weight_is_called_after_its_half():
    paths = [w.path for w in make(**FULL).weights]
    assert len(set(paths)) == len(paths) and {path.split("/")[0] for path in paths} == {"encoder", "decoder"}


@pytest.mark.parametrize(
    "options",
    [
        {"cell": kg.GRU},
        {"cell": kg.LSTMCell},
        {"cell": kg.LSTMCell(6, forget_bias=3.0, recurrent_dropout=0.25), "start_token": 3, "end_token": 4},
        {**FULL, "dropout": 0.1, "embedding_dim": 3, "dtype": "mixed_bfloat16", "name": "translator"},
    ],
)
def test_its_configuration_is_complete(options):
    model = make(**options)
    config = keras.saving.serialize_keras_object(model)
    copy = keras.saving.deserialize_keras_object(config)
    assert keras.saving.serialize_keras_object(copy) == config
    assert [(w.path, w.shape) for w in copy.weights] == [(w.path, w.shape) for w in model.weights]
    for layer, other in zip(model.decoder.recurrent, copy.decoder.recurrent, strict=True):
        assert type(layer) is type(other) and layer.get_config() == other.get_config()
    assert config["config"].keys() >= {"source_vocabulary", "cell", "end_token", "dtype", "name"}


def test_a_cell_of_ones_own_is_what_all_layers_have():
    model = make(cell=kg.LSTMCell(6, forget_bias=3.0, recurrent_dropout=0.25), layers=2, bidirectional=True)
    cells = [layer.forward_layer.cell for layer in model.encoder.recurrent]
    cells += [layer.cell for layer in model.decoder.recurrent]
    assert [(c.forget_bias, c.recurrent_dropout, c.units) for c in cells] == [(3.0, 0.25, 6)] * 4
    kernels = [arrays([c.kernel])[0] for c in cells]
    assert kernels[1].shape == (12, 24) and np.all(kernels[2] != kernels[3])


LOAD = """
import sys, keras, numpy as np, keras_gated
folder, data = sys.argv[1], np.load(sys.argv[1] + "/data.npz")
results = {}
for name in sys.argv[2:]:
    model = keras.models.load_model(f"{folder}/{name}.keras")
    assert type(model) is keras_gated.Seq2Seq
    for strategy in ("greedy", "beam"):
        results[f"{name} {strategy}"], results[f"{name} {strategy} p"] = model.generate(data["source"], 6, strategy)
    logs = model.fit((data["source"], data["target"]), batch_size=8, shuffle=False, verbose=0).history
    results[f"{name} loss"], results[f"{name} perplexity"] = logs["loss"], logs["perplexity"]
    model.load_weights(f"{folder}/{name}.weights.h5")
    results[f"{name} weights"] = model.generate(data["source"], 6).tokens
np.savez(folder + "/results.npz", **results)
"""


@pytest.mark.slow
def test_a_new_process_generates_the_same(rng, tmp_path, tf):
    source, target = pairs(rng, 64)
    np.savez(tmp_path / "data.npz", source=source, target=target)
    expected = {}
    for name, options in {"new": {}, "trained": {"dtype": "mixed_float16", **FULL}}.items():
        model = compiled(keras.optimizers.Adam(0.01), units=12, model_options=options)
        model.fit((source, target), batch_size=8, verbose=0, epochs=0 if name == "new" else 3)
        model.save(tmp_path / f"{name}.keras")
        model.save_weights(tmp_path / f"{name}.weights.h5")
        for strategy in ("greedy", "beam"):
            expected[f"{name} {strategy}"], expected[f"{name} {strategy} p"] = model.generate(source, 6, strategy)
        expected[f"{name} weights"] = expected[f"{name} greedy"]
        logs = model.fit((source, target), batch_size=8, shuffle=False, verbose=0).history
        expected[f"{name} loss"], expected[f"{name} perplexity"] = logs["loss"], logs["perplexity"]
        assert len(np.unique(expected[f"{name} greedy"], axis=0)) > (1 if name == "new" else 4)
    subprocess.run([sys.executable, "-c", LOAD, str(tmp_path), "new", "trained"], check=True)
    with np.load(tmp_path / "results.npz") as file:
        results = dict(file)
    assert set(results) == set(expected)
    for key, value in expected.items():  # optimizer, loss and metrics have come along
        exact = key.endswith(("greedy", "beam", "weights"))
        np.testing.assert_allclose(results[key], value, rtol=0 if exact else 1e-5)


@pytest.mark.slow
def test_two_replicas_train_like_one(rng, replicas):
    source = rng.integers(3, V, (48, 4))
    edges = [np.full((48, 1), token) for token in (1, 2, 0)]
    target = np.concatenate([edges[0], source[:, ::-1], *edges[1:]], axis=1)

    def trained():
        model = make(4, bidirectional=True, attention="multiplicative")
        model.compile(keras.optimizers.Adam(0.01))
        return model, model.fit((source, target), batch_size=16, epochs=2, shuffle=False, verbose=0).history

    alone, logs = trained()
    with replicas.scope():
        together, both = trained()
    assert together.distribute_strategy.num_replicas_in_sync == 2
    for a, b in zip(alone.get_weights(), together.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5)
    for name, values in logs.items():
        np.testing.assert_allclose(both[name], values, rtol=1e-4, err_msg=name)
    np.testing.assert_array_equal(together.generate(source, 6).tokens, alone.generate(source, 6).tokens)
