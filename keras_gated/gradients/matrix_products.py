"""The norms of all products of a chain of matrices, J_t ··· J_{k+1} for every k < t.

Hidden here: that hardly any of them is formed.  A span of time is cut in the middle, m; a product over the cut is
A_t B_k with A_t = J_t ··· J_{m+1} and B_k = J_m ··· J_{k+1}, of which there are as many as steps, not pairs; the
halves are cut likewise.  T log T products instead of T² / 2.  The largest singular value of A_t B_k is found by
Lanczos's method on (A_t B_k)ᵀ A_t B_k, for many pairs at once, so that its products are large ones.  For pairs of
which it would take long, where singular values lie close together, and for short spans, A_t B_k is formed.
"""

import functools

import numpy as np

NUMBERS = 1 << 24  # of one array at a time
CACHED = 1 << 20  # of the vectors of one round of Lanczos's method
SHORT = 4  # steps: spans that are too short to gain from products for many pairs at once
SMALL = 64  # rows: larger matrices are multiplied in float32, unless they come in float64
EVERY = 3  # steps of Lanczos's method between two looks at what it has found
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}  # relative, of the squared norm between two looks
REST = 16  # Lanczos's method ends when one pair in so many is still sought


def product_norms(J, part=slice(None)):
    """The largest singular value of each product of a chain.

    Args:
        J: (B, T, S, S) float32 or float64, B chains of T matrices; the first of each is not used.
        part: which rows and columns of the products count, as a slice.

    Returns:
        (B, T, T) float64: [b, t, k] is that of J_t ··· J_{k+1}, 1 for k = t and 0 for k > t.  Accurate to about
        1e-7 (relative); of float32 matrices of more than 64 rows to about 1e-5.
    """
    B, T, S, _ = J.shape
    J, found = J.astype("float32" if S > SMALL and J.dtype != np.float64 else "float64"), np.tile(np.eye(T), (B, 1, 1))
    spans = {T: np.zeros(1, int)}  # length: where spans of this length begin
    while spans:
        length = max(spans)
        begins = spans.pop(length)
        if length == 1:
            continue
        left = (length + 1) // 2
        for half, of_half in ((left, begins), (length - left, begins + left)):
            spans[half] = np.append(spans.get(half, np.zeros(0, int)), of_half)
        b, begin = (a.ravel() for a in np.meshgrid(np.arange(B), begins, indexing="ij"))
        at_once = max(1, NUMBERS // (length * S * max(S, length // 4)))
        for i in range(0, len(b), at_once):
            chains, cuts = b[i : i + at_once], begin[i : i + at_once] + left
            t = cuts[:, None] + np.arange(length - left)
            k = cuts[:, None] - 1 - np.arange(left)
            found[chains[:, None, None], t[:, :, None], k[:, None, :]] = _over_the_cut(J, chains, t, k, part)
    return found


def _over_the_cut(J, chains, t, k, part):
    """‖A_t B_k‖ for the steps t (P, right) and k (P, left) on either side of P cuts: -> (P, right, left)."""
    one = np.broadcast_to(np.eye(J.shape[-1], dtype=J.dtype), (len(t), 1, *J.shape[2:]))
    A, scale_A = _in_graph(_products)(J[chains[:, None], t], from_the_right=False)
    B, scale_B = _in_graph(_products)(np.append(one, J[chains[:, None], k[:, :-1]], axis=1), from_the_right=True)
    A, B = A[:, :, part], B[:, :, :, part]
    found = np.empty((len(t), t.shape[1], k.shape[1]))
    width = max(1, min(t.shape[1], CACHED // (k.shape[1] * A.shape[-1])))
    cuts = max(1, CACHED // (width * k.shape[1] * A.shape[-1]))
    for p, i in np.ndindex(-(-len(t) // cuts), -(-t.shape[1] // width)):
        here, steps = slice(p * cuts, (p + 1) * cuts), slice(i * width, (i + 1) * width)
        some = A[here, steps], B[here]
        squares = np.zeros(found[here, steps].shape)
        sought = np.ones(squares.shape, bool)
        if t.shape[1] + k.shape[1] > SHORT:
            _by_lanczos(*some, squares, sought)
        _directly(*some, squares, sought)
        found[here, steps] = np.sqrt(squares)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return found * np.exp(scale_A.numpy()[:, :, None] + scale_B.numpy()[:, None, :])


@functools.cache
def _in_graph(function):
    import tensorflow as tf

    return tf.function(function, autograph=False, reduce_retracing=True)


def _products(factors, from_the_right):
    """The products of the first 1, 2, ... factors (P, count, S, S), each divided by its largest entry.

    Returns:
        (P, count, S, S); the logarithms of the divisors, (P, count) float64.
    """
    import tensorflow as tf

    def multiplied(before, factor):
        product, scale = before
        product = tf.matmul(product, factor) if from_the_right else tf.matmul(factor, product)
        size = tf.reduce_max(tf.abs(product), axis=(1, 2), keepdims=True)
        size = tf.where(size > 0, size, 1)
        return product / size, scale + tf.math.log(tf.cast(size[:, 0, 0], scale.dtype))

    P, S = tf.shape(factors)[0], tf.shape(factors)[-1]
    empty = tf.eye(S, batch_shape=[P], dtype=factors.dtype), tf.zeros([P], tf.float64)
    products, scales = tf.scan(multiplied, tf.transpose(factors, (1, 0, 2, 3)), empty)
    return tf.transpose(products, (1, 0, 2, 3)), tf.transpose(scales)


def _by_lanczos(A, B, squares, sought):
    """Fills in ‖A_t B_k‖², A (P, right, n, S) and B (P, left, S, n), where found; the rest, some, stay `sought`."""
    import tensorflow as tf

    n, (P, right, left), tolerance = B.shape[-1], sought.shape, TOLERANCE[A.dtype.name]
    start = np.random.default_rng(0).normal(size=n)
    v = tf.broadcast_to(tf.cast(start / np.linalg.norm(start), A.dtype), (P, left, right, n))
    state, diagonal, beside = (v, tf.zeros_like(v), tf.zeros_like(v[..., :1])), [], []
    while np.count_nonzero(sought) > sought.size // REST and len(diagonal) < 2 * n:  # n would do, but for rounding
        state, alphas, betas = _in_graph(_lanczos_steps)(A, B, *state)
        diagonal.extend(alphas.numpy().astype(np.float64))
        beside.extend(betas.numpy().astype(np.float64))
        new = largest_root([a[sought] for a in diagonal], [b[sought] for b in beside[:-1]], 0.1 * tolerance)
        old, squares[sought] = squares[sought], new  # what was found stays: rounding would only repeat it
        sought[sought] = new - old > tolerance * new


def _lanczos_steps(A, B, v, v_prev, beta):
    """A few steps: the state after them, and their a_j and b_j, each (EVERY, P, right, left)."""
    import tensorflow as tf

    alphas, betas = [], []
    for _ in range(EVERY):
        u = tf.matmul(tf.transpose(tf.matmul(v, B, transpose_b=True), (0, 2, 1, 3)), A, transpose_b=True)
        u = tf.matmul(tf.transpose(tf.matmul(u, A), (0, 2, 1, 3)), B)
        alpha = tf.reduce_sum(u * v, axis=-1, keepdims=True)
        u = u - alpha * v - beta * v_prev
        beta = tf.sqrt(tf.reduce_sum(u * u, axis=-1, keepdims=True))
        v_prev, v = v, u * tf.math.reciprocal_no_nan(beta)
        alphas.append(alpha)
        betas.append(beta)
    alphas, betas = (tf.transpose(tf.stack(a)[..., 0], (0, 1, 3, 2)) for a in (alphas, betas))
    return (v, v_prev, beta), alphas, betas


def _directly(A, B, squares, sought):
    """Fills in ‖A_t B_k‖² where `sought`."""
    import tensorflow as tf

    p, t, k = np.nonzero(sought)
    at_once = max(1, NUMBERS // (A.shape[-1] * B.shape[-1]))
    for i in range(0, len(p), at_once):
        some = slice(i, i + at_once)
        M = tf.matmul(
            tf.gather_nd(A, np.stack([p[some], t[some]], 1)), tf.gather_nd(B, np.stack([p[some], k[some]], 1))
        )
        roots = tf.linalg.eigvalsh(tf.matmul(M, M, transpose_a=True))
        squares[p[some], t[some], k[some]] = np.maximum(roots[:, -1], 0)


def largest_root(diagonal, beside, accuracy=1e-10):
    """The largest eigenvalue of symmetric tridiagonal matrices with no negative ones, by bisection.

    x lies above it where all d_j = x - a_j - b_{j-1}² / d_{j-1}, the pivots of x - matrix, are positive.

    Args:
        diagonal: the a_j, m arrays of one shape.
        beside: the b_j, m - 1 arrays.
        accuracy: relative.

    Returns:
        An array of that shape.
    """
    a, b = np.stack(diagonal), np.stack([np.zeros_like(diagonal[0]), *beside])
    low, b2 = np.max(a, axis=0), b**2
    high = np.max(a + b + np.roll(b, -1, axis=0), axis=0)  # Gershgorin
    for _ in range(int(np.log2(3 / accuracy)) + 1):  # high is at most three times low
        x = 0.5 * (low + high)
        d, above = np.ones_like(x), True
        for a_j, b2_j in zip(a, b2, strict=True):
            d = x - a_j - b2_j / d
            above = above & (d > 0)
            d = np.where(d > 0, d, 1)
        low, high = np.where(above, low, x), np.where(above, x, high)
    return high
