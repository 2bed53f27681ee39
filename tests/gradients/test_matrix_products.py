"""Norms of products of matrices, against NumPy's singular values of each product."""

import keras
import numpy as np
import pytest

from keras_gated.gradients import matrix_products as chain

pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("of the TensorFlow backend", allow_module_level=True)


def assert_are_norms(J, part=slice(None), tolerance=1e-6):
    received = chain.product_norms(J, part)
    B, T, S, _ = J.shape
    for b in range(B):
        for k in range(T):
            product, exponent = np.eye(S), 0.0
            for t in range(k, T):
                product = J[b, t] @ product if t > k else product
                size = np.abs(product).max() or 1.0
                product, exponent = product / size, exponent + np.log(size)
                expected = np.linalg.svd(product[part, part], compute_uv=False)[0] * np.exp(exponent)
                np.testing.assert_allclose(received[b, t, k], expected, rtol=tolerance, err_msg=f"{b, t, k}")
            assert not np.any(received[b, :k, k])


@pytest.mark.parametrize(("B", "T", "S"), [(2, 1, 3), (2, 2, 3), (3, 13, 1), (2, 33, 5), (1, 20, 40)])
def test_of_random_matrices(B, T, S, rng):
    assert_are_norms(rng.normal(size=(B, T, S, S)) / np.sqrt(S))


@pytest.mark.parametrize("cached", [1, 200, 600])  # one pair of steps at a time, some, all of one or two chains
def test_of_few_at_a_time(cached, rng, monkeypatch):
    monkeypatch.setattr(chain, "CACHED", cached)
    monkeypatch.setattr(chain, "NUMBERS", 800)
    assert_are_norms(rng.normal(size=(5, 13, 4, 4)) / 2)


def test_of_a_part_of_the_products(rng):
    assert_are_norms(rng.normal(size=(2, 20, 8, 8)) / 3, slice(2, 5))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-6), ("float32", 1e-5)])
def test_of_large_matrices(dtype, tolerance, rng):
    assert_are_norms((rng.normal(size=(1, 12, 80, 80)) / 9).astype(dtype), tolerance=tolerance)


@pytest.mark.parametrize("factor", [1e-40, 1e40])
def test_products_beyond_the_range_of_numbers_are_0_or_inf_and_those_within_exact(factor, rng):
    J = factor * rng.normal(size=(1, 20, 3, 3))
    received = chain.product_norms(J)[0]
    assert received[-1, 0] == (0 if factor < 1 else np.inf)
    assert_are_norms(J[:, :8])


def test_singular_values_that_lie_together(rng):
    """All equal, and two by two as those of rotations are."""
    Q, _ = np.linalg.qr(rng.normal(size=(24, 24)))
    assert_are_norms(np.broadcast_to(Q, (1, 20, 24, 24)))
    pairs = Q @ np.diag(np.repeat(np.linspace(0.9, 1, 12), 2)) @ Q.T
    assert_are_norms(np.broadcast_to(pairs, (1, 20, 24, 24)))


def test_what_one_half_of_the_time_lets_through_the_other_shuts_off():
    """The norm of a product far below the product of the norms."""
    early, late = np.diag([1.0, 1e-2, 0.3]), np.diag([1e-2, 1.0, 0.3])
    J = np.stack([early] * 8 + [late] * 8)[None]
    assert_are_norms(J)


def test_products_that_are_zero_and_numbers_that_are_not(rng):
    shift = np.eye(6, k=1)
    received = chain.product_norms(np.broadcast_to(shift, (1, 12, 6, 6)))[0]
    lags = np.arange(12)[:, None] - np.arange(12)
    np.testing.assert_allclose(received, (lags >= 0) & (lags < 6), atol=1e-12)
    J = rng.normal(size=(1, 12, 3, 3))
    J[0, 6, 1, 1] = np.nan
    received = chain.product_norms(J)[0]
    assert np.isnan(received[6:, :6]).all() and np.isfinite(received[6:, 6:]).all() and np.isfinite(received[:6]).all()


def test_the_largest_root_of_tridiagonal_matrices(rng):
    a, b = rng.random((9, 50)) + 1, rng.random((8, 50)) * 0.4
    matrices = np.zeros((50, 9, 9))
    for j in range(9):
        matrices[:, j, j] = a[j]
    for j in range(8):
        matrices[:, j, j + 1] = matrices[:, j + 1, j] = b[j]
    expected = np.linalg.eigvalsh(matrices)[:, -1]
    np.testing.assert_allclose(chain.largest_root(list(a), list(b)), expected, rtol=1e-9)
