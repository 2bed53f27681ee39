"""Attention: against NumPy, its gradients, masks, precision, and what a Keras layer must do."""

import keras
import numpy as np
import pytest
import reference
from keras import ops
from table import DTYPE, PRECISE, arrays, assert_close, gradients

import keras_gated as kg

B, T_Q, T_V, D_Q, D_V, A = 3, 4, 5, 2, 3, 6
KINDS = {"additive": lambda **options: kg.AdditiveAttention(A, **options), "multiplicative": kg.MultiplicativeAttention}
SCORES = {"additive": reference.additive, "multiplicative": reference.multiplicative}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def make(kind, rng, **options):
    layer = KINDS[kind](**{"dtype": DTYPE, **options})
    layer.build((None, None, D_Q), (None, None, D_V))
    layer.set_weights([rng.normal(size=w.shape) for w in layer.get_weights()])
    return layer


def given(rng):
    """query, values, mask: a hole, padding on either side, and a row of nothing else."""
    mask = np.array([[1, 0, 1, 1, 0], [0, 1, 1, 1, 1], [0] * 5], bool)
    return rng.normal(size=(B, T_Q, D_Q)).astype(DTYPE), rng.normal(size=(B, T_V, D_V)).astype(DTYPE), mask


def test_it_is_the_reference(kind, rng):
    layer, (query, values, mask) = make(kind, rng), given(rng)
    score = SCORES[kind](*(w.astype("float64") for w in layer.get_weights()))
    expected = [[reference.attention(score, q, values[n], mask[n]) for q in query[n]] for n in range(B)]
    context, weights = (np.array([[row[i] for row in rows] for rows in expected]) for i in (0, 1))
    assert_close(layer(query, values, mask=mask, return_attention_scores=True), [context, weights], 1e-12)
    assert_close([layer(query, values, mask=mask)], [context], 1e-12)
    everything = layer(query, values, mask=np.ones_like(mask))
    assert_close([layer(query, values)], [everything], 0)


def test_queries_one_by_one_are_all_at_once(kind, rng):
    layer, (query, values, mask) = make(kind, rng), given(rng)
    memory = layer.memory(ops.convert_to_tensor(values), ops.convert_to_tensor(mask))
    one_by_one = [layer.attend(ops.convert_to_tensor(query[:, t : t + 1]), memory) for t in range(T_Q)]
    received = [np.concatenate(arrays(parts), axis=1) for parts in zip(*one_by_one, strict=True)]
    assert_close(received, layer(query, values, mask=mask, return_attention_scores=True), 1e-12)


def test_gradients_are_slopes(kind, rng):
    layer, (query, values, mask) = make(kind, rng), given(rng)
    factor = rng.normal(size=(B, T_Q, D_V)).astype(DTYPE)

    def total(query, values):
        context = layer(query, values, mask=mask)
        return ops.sum(ops.sin(context) * ops.convert_to_tensor(factor)), context

    tensors = [ops.convert_to_tensor(a) for a in (query, values)]
    found, _ = gradients(total, tensors, layer.trainable_variables)
    found = arrays(found)
    assert not np.any(found[1][~mask])
    if not PRECISE:
        return
    for k, gradient in enumerate(found):
        source = (query, values, *layer.get_weights())[k]
        for index in map(tuple, np.argwhere(np.ones(source.shape))):
            sides = []
            for step in (1e-6, -1e-6):
                moved = [a.copy() for a in (query, values, *layer.get_weights())]
                before = layer.get_weights()
                moved[k][index] += step
                layer.set_weights(moved[2:])
                sides.append(float(total(*map(ops.convert_to_tensor, moved[:2]))[0]))
                layer.set_weights(before)
            assert gradient[index] == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("filler", [np.inf, np.nan, 1e30])
def test_what_padding_holds_changes_nothing(kind, filler, rng):
    layer, (query, values, mask) = make(kind, rng), given(rng)

    def total(query, values):
        context, weights = layer(query, values, mask=mask, return_attention_scores=True)
        return ops.sum(context**2), context, weights

    filled = np.where(mask[..., None], values, filler).astype(DTYPE)
    expected, received = (
        gradients(total, [ops.convert_to_tensor(a) for a in (query, v)], layer.trainable_variables)
        for v in (values, filled)
    )
    assert_close([*received[0], *received[1]], [*expected[0], *expected[1]], 0)
    context, weights = arrays(received[1])
    assert not np.any(np.moveaxis(weights, 1, 2)[~mask]) and not np.any(context[2])  # exactly 0
    np.testing.assert_allclose(weights[:2].sum(axis=2), 1, atol=1e-6)


def test_large_scores_and_little_precision(kind, rng):
    """Under half precision 20,000 · 20,000 is inf, and 1 / 5,000 of a sum of 5,000 is not 1."""
    layer = make(kind, rng, dtype="mixed_float16")
    query, values = 60.0 * rng.normal(size=(1, 2, D_Q)), 60.0 * rng.normal(size=(1, 5000, D_V))
    query, values = query.astype("float16"), values.astype("float16")
    context, weights = layer(query, values, return_attention_scores=True)
    exact = make(kind, rng, dtype="float32")
    exact.set_weights([w.astype("float16") for w in layer.get_weights()])
    same = [a.astype("float32") for a in (query, values)]
    assert keras.backend.standardize_dtype(context.dtype) == "float16"
    assert_close([weights], exact(*same, return_attention_scores=True)[1:], 1e-6)


def test_a_mask_that_values_carry_counts_and_that_of_queries_goes_on(kind):
    tokens, targets = np.array([[3, 1, 0, 0], [2, 0, 1, 3]]), np.array([[1, 2, 0], [3, 1, 2]])
    values = keras.layers.Embedding(4, D_V, mask_zero=True)(tokens)
    query = keras.layers.Embedding(4, D_Q, mask_zero=True)(targets)
    layer = KINDS[kind]()
    context, weights = layer(query, values, return_attention_scores=True)
    assert not np.any(np.moveaxis(arrays([weights])[0], 1, 2)[tokens == 0])
    np.testing.assert_array_equal(ops.convert_to_numpy(context._keras_mask), targets != 0)


def test_it_is_saved_and_loaded(kind, rng, tmp_path):
    query, values = keras.Input((None, D_Q)), keras.Input((None, D_V))
    model = keras.Model([query, values], KINDS[kind]()(query, values))
    model.save(tmp_path / "model.keras")
    q, v, _ = given(rng)
    q, v = q.astype("float32"), v.astype("float32")
    assert_close([keras.models.load_model(tmp_path / "model.keras")([q, v])], [model([q, v])], 0)


def test_errors(kind, rng):
    layer, (query, values, mask) = make(kind, rng), given(rng)
    for wrong in [(query[:, 0], values), (query, values[0]), (values, values), (query, query)]:
        with pytest.raises(ValueError, match=r"expects (query|values) of shape \(batch, time, \d\), received"):
            layer(*wrong)
    with pytest.raises(ValueError, match=r"expects query of shape \(batch, time, features\).*axis of one time step"):
        KINDS[kind]()(query[:, 0], values)
    with pytest.raises(ValueError, match=r"expects a mask of shape \(3, 5\), received \(3, 4\)"):
        layer(query, values, mask=mask[:, :4])
    with pytest.raises(ValueError, match="units to be a positive integer, received 0"):
        kg.AdditiveAttention(0)
