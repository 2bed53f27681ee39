"""Teacher forcing, and the loss and the metrics over valid tokens."""

import contextlib

import keras
import numpy as np
import pytest
from keras import ops
from table import arrays, gradients

from keras_gated.seq2seq.metrics import Perplexity, SequenceAccuracy, TokenAccuracy, TokenCrossentropy
from keras_gated.seq2seq.tokens import arranged, array, pair, target_array, teacher_forcing

START, END, V = 1, 2, 6


@pytest.mark.parametrize("words", [[], [5], [5, 3]])
@pytest.mark.parametrize("padding", [0, 2])
def test_teacher_forcing_is_exact(words, padding):
    """Off by one, the decoder would see what it is asked for, or never be asked for the end."""
    target = np.array([[START, *words, END] + [0] * padding])
    inputs, labels = arrays(teacher_forcing(ops.convert_to_tensor(target)))
    assert inputs[0].tolist() == [START, *words] + [0] * padding
    assert labels[0].tolist() == [*words, END] + [0] * padding


def log_p(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def masked(logits, mask):
    logits = ops.convert_to_tensor(logits)
    logits._keras_mask = ops.convert_to_tensor(mask)
    return logits


def test_the_mean_is_over_valid_tokens(rng):
    logits = rng.normal(size=(1, 3, V)).astype("float32")
    terms = -log_p(logits)[0, [0, 1, 2], [2, 0, 0]]
    y_true = np.array([[2, 0, 0]])
    loss = TokenCrossentropy()
    # A mask of the logits says what is valid, without one it is what is not 0.
    for mask, valid in [([True, False, True], [0, 2]), ([True, False, False], [0]), (None, [0])]:
        y_pred = logits if mask is None else masked(logits, [mask])
        assert float(loss(y_true, y_pred)) == pytest.approx(terms[valid].mean(), rel=1e-6)
        assert float(Perplexity()(y_true, y_pred)) == pytest.approx(np.exp(terms[valid].mean()), rel=1e-6)
    weighted = float(loss(y_true, masked(logits, [[True, False, True]]), sample_weight=np.array([[3.0, 9, 0.5]])))
    assert weighted == pytest.approx((3 * terms[0] + 0.5 * terms[2]) / 2, rel=1e-6)  # Keras divides by the number


def ours_and_keras(y_true, logits, sample_weight=None, mask=None, **options):
    """Value and gradient in the logits of our loss, and of Keras's, which on PyTorch wants a weight for each token."""
    kerass = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0, **options)
    by_token = None if sample_weight is None else np.array(np.broadcast_to(sample_weight, y_true.shape))
    results = []
    for loss, weights in ((TokenCrossentropy(**options), sample_weight), (kerass, by_token)):

        def total(x, loss=loss, weights=weights):
            layer = keras.layers.Identity(dtype=keras.backend.standardize_dtype(x.dtype))
            if mask is not None:
                layer.compute_mask = lambda *_: ops.convert_to_tensor(mask)
            values = loss(y_true, layer(x), sample_weight=weights)
            return ops.sum(values), values

        (gradient,), (values,) = gradients(total, [ops.convert_to_tensor(logits)])
        results.append(arrays([values, gradient]))
    return results


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "mean", "mean_with_sample_weight", "none", None])
def test_the_loss_is_that_of_keras_with_a_class_to_ignore(reduction, rng):
    y_true, logits = rng.integers(1, V, (4, 3)), rng.normal(size=(4, 3, V)).astype("float32")
    y_true[1, 1:] = y_true[3] = 0
    dropped = (y_true != 0) & (rng.random((4, 3)) > 0.3)
    for labels in (y_true, np.zeros_like(y_true)):
        for mask in (None, labels != 0, dropped & (labels != 0)):
            for shape in (None, (4, 1), (4, 3)):
                weights = None if shape is None else rng.random(shape).astype("float32")
                for dtype in ("float32", "float16"):
                    both = ours_and_keras(labels, logits.astype(dtype), weights, mask, reduction=reduction)
                    np.testing.assert_array_equal(both[0][0], both[1][0])
                    np.testing.assert_array_equal(both[0][1], both[1][1])


def test_where_the_loss_is_not_that_of_keras(rng):
    """If these were equal too, Keras's loss could replace ours."""
    y_true, logits = np.array([[3, 2, 0], [2, 0, 0], [1, 4, 5]]), rng.normal(size=(3, 3, V)).astype("float32")
    weights = np.array([0.0, 1.0, 3.0], "float32")
    by_row = float(TokenCrossentropy()(y_true, logits, weights))
    assert by_row == float(TokenCrossentropy()(y_true, logits, weights[:, None]))
    with contextlib.suppress(RuntimeError):  # PyTorch refuses what TensorFlow and JAX take for weights of three times
        kerass = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
        assert by_row != pytest.approx(float(kerass(y_true, logits, weights)), rel=1e-2)

    ours, kerass = ours_and_keras(y_true, logits, mask=np.ones((3, 3), bool))
    assert np.all(ours[1][0, 2] != 0) and np.all(kerass[1][0, 2] == 0)

    y_true, logits = np.array([[2049]]), rng.normal(size=(1, 1, 4000)).astype("float32")
    ours, kerass = ours_and_keras(y_true, logits, dtype="float16")
    assert ours[1][0, 0].argmin() == 2049 and kerass[1][0, 0].argmin() == 2048


def test_an_empty_batch_is_0_and_more_padding_is_nothing(rng):
    y_true, logits = np.array([[3, 2, 0], [2, 0, 0]]), rng.normal(size=(2, 3, V)).astype("float32")
    more = np.pad(y_true, ((0, 1), (0, 4))), np.pad(logits, ((0, 1), (0, 4), (0, 0)), constant_values=7)
    for measure in (TokenCrossentropy(), Perplexity(), TokenAccuracy(), SequenceAccuracy()):
        assert float(measure(*more)) == pytest.approx(float(measure(y_true, logits)), rel=1e-6)
    empty = np.zeros((2, 3), int), logits
    assert [float(m(*empty)) for m in (TokenCrossentropy(), TokenAccuracy(), SequenceAccuracy())] == [0, 0, 0]
    assert float(Perplexity()(*empty)) == 1


def test_metrics_count_tokens_not_batches(rng):
    """Keras's Mean takes the mean over a batch's steps first, so that a token of a long batch counts for less."""
    perplexity, accuracy, whole = Perplexity(), TokenAccuracy(), SequenceAccuracy()
    terms, right, rows = [], [], []
    for B, T in [(3, 2), (2, 7), (4, 1)]:
        y_true = rng.integers(1, V, (B, T))
        y_true[rng.random((B, T)).cumsum(axis=1) > 2.5] = 0
        y_true[0] = 0
        logits = rng.normal(size=(B, T, V)).astype("float32")
        hits = rng.random((B, T)) > 0.4
        logits[hits, y_true[hits]] += 9
        correct = logits.argmax(-1) == y_true
        for metric in (perplexity, accuracy, whole):
            metric.update_state(y_true, logits)
        terms += list(-np.take_along_axis(log_p(logits), y_true[..., None], -1)[..., 0][y_true != 0])
        right += list(correct[y_true != 0])
        rows += list((correct | (y_true == 0)).all(axis=1)[1:])
    assert float(perplexity.result()) == pytest.approx(np.exp(np.mean(terms)), rel=1e-5)
    assert float(accuracy.result()) == pytest.approx(np.mean(right), rel=1e-6)
    assert float(whole.result()) == pytest.approx(np.mean(rows), rel=1e-6)
    assert 0 < np.mean(rows) < np.mean(right) < 1


@pytest.mark.parametrize("kind", [Perplexity, TokenAccuracy, SequenceAccuracy])
def test_weights_of_rows(kind, rng):
    y_true, logits = rng.integers(1, V, (5, 3)), rng.normal(size=(5, 3, V)).astype("float32")
    y_true[2:, 2] = 0
    logits[:3, np.arange(3), y_true[:3]] = logits[[[0], [1], [2]], np.arange(3), y_true[:3]] + 5
    kept = np.array([1, 3, 4])
    weights = np.isin(np.arange(5), kept).astype("float32")
    for given in (weights, weights[:, None], np.repeat(weights[:, None], 3, axis=1)):
        received = float(kind()(y_true, logits, sample_weight=given))
        assert received == pytest.approx(float(kind()(y_true[kept], logits[kept])), rel=1e-6)


def test_logits_that_are_no_numbers_for_padding(rng):
    logits = rng.normal(size=(1, 2, V)).astype("float32")
    logits[:, 1] = np.inf
    assert np.isfinite(float(TokenCrossentropy()(np.array([[2, 0]]), logits)))


@pytest.mark.parametrize("kind", [TokenCrossentropy, Perplexity, TokenAccuracy, SequenceAccuracy])
def test_configurations(kind):
    config = keras.saving.serialize_keras_object(kind(name="other"))
    assert config["registered_name"] == f"keras_gated>{kind.__name__}"
    assert keras.saving.deserialize_keras_object(config).name == "other"


def test_batches_as_keras_hands_them_around():
    source, target = np.array([[3, 4]]), np.array([[1, 5, 2]])
    weights = np.array([[7, 8, 9]])
    cases = [
        (((source, target),), None),
        ((source, target), None),
        ((source, target, np.array([5])), [[5]]),
        (((source, target), None, weights), [[8, 9]]),
        ((source, target, weights[:, :1]), [[7]]),
    ]
    for data, expected in cases:
        (x, y), labels, sample_weight = arranged(data)
        assert x is source and y is target and labels.tolist() == [[5, 2]]
        assert sample_weight is expected or sample_weight.tolist() == expected
    for x, y in [(source, None), ((source, target), target), ((source,), None), ({"a": source}, target)]:
        with pytest.raises(ValueError, match=r"expects pairs.*received x .*call generate"):
            pair(x, y)


def test_lists_become_arrays():
    assert array([[3, 4, 5], [6], []], "source", 9).tolist() == [[3, 4, 5], [6, 0, 0], [0, 0, 0]]
    assert array(np.array([[3]], "uint8"), "source", 9).dtype == np.int32


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 9]], "target tokens in 0 .. 5, its target_vocabulary, received 1 .. 9"),
        ([[-1, 2]], "received -1 .. 2"),
        (np.array([[1.0, 2.0]]), r"integers of shape \(batch, time\), received float64 of shape \(1, 2\)"),
        (np.array([1, 2]), r"received int64 of shape \(2,\)"),
        (np.zeros((0, 3), int), r"of shape \(0, 3\)"),
        ([[1, 2, 0], [3, 4, 2]], r"start token 1, tokens, the end token.*received in row 1: \[3, 4, 2\]"),
        ([[1, 0, 2]], r"padding, 0, alone; received in row 0: \[1, 0, 2\]"),
        ([[0, 1, 2]], r"received in row 0: \[0, 1, 2\]"),
        ([[1]], r"received in row 0: \[1\]"),
    ],
)
def test_what_is_no_target_is_told(tokens, message):
    with pytest.raises(ValueError, match=message):
        target_array(tokens, V, START)


def test_rows_of_padding_alone_are_targets():
    assert target_array([[1, 3, 2], [0, 0, 0]], V, START).tolist() == [[1, 3, 2], [0, 0, 0]]
