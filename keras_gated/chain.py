"""The norms of all products of a chain of matrices, J_t ··· J_{k+1} for every k < t.

Hidden here: that hardly any of them is formed.  A span of time is cut in the middle, m; a product over the cut is
A_t B_k with A_t = J_t ··· J_{m+1} and B_k = J_m ··· J_{k+1}, of which there are as many as steps, not pairs; the
halves are cut likewise.  T log T products instead of T² / 2.  The largest singular value of A_t B_k is found by
Lanczos's method on (A_t B_k)ᵀ A_t B_k, for many pairs at once, so that its products are large ones.  For pairs of
which it would take long, where singular values lie close together, and for short spans, A_t B_k is formed.
"""

import numpy as np

NUMBERS = 1 << 24  # of one array at a time
CACHED = 1 << 20  # of the vectors of one round of Lanczos's method
SHORT = 4  # steps: spans that are too short to gain from products for many pairs at once
SMALL = 64  # rows: larger matrices are multiplied in float32, unless they come in float64
EVERY = 3  # steps of Lanczos's method between two looks at what it has found
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}  # relative, of the squared norm between two looks
REST = 8  # Lanczos's method ends when one pair in so many is still sought
BISECTIONS = 34


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
    import tensorflow as tf

    A = _running(lambda A, i: tf.matmul(J[chains, t[:, i]], A), J[chains, t[:, 0]], t.shape[1])
    one = np.broadcast_to(np.eye(J.shape[-1], dtype=J.dtype), J[chains, 0].shape)
    B = _running(lambda B, i: tf.matmul(B, J[chains, k[:, i - 1]]), one, k.shape[1])
    (A, scale_A), (B, scale_B) = A, B
    A, B = A[:, :, part], B[:, :, :, part]
    found = np.empty((len(t), t.shape[1], k.shape[1]))
    width = max(1, CACHED // (len(t) * k.shape[1] * A.shape[-1]))
    for i in range(0, t.shape[1], width):
        some = A[:, i : i + width]
        squares = np.zeros(found[:, i : i + width].shape)
        sought = np.ones(squares.shape, bool)
        if t.shape[1] + k.shape[1] > SHORT:
            _by_lanczos(some, B, squares, sought)
        _directly(some, B, squares, sought)
        found[:, i : i + width] = np.sqrt(squares)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return found * np.exp(scale_A[:, :, None] + scale_B[:, None, :])


def _running(multiplied, first, count):
    """A chain of products, each divided by its largest entry: (P, count, S, S), and the logarithms of the divisors."""
    import tensorflow as tf

    products, scales, total = [], [], 0.0
    for i in range(count):
        product = tf.convert_to_tensor(first) if i == 0 else multiplied(products[-1], i)
        size = tf.reduce_max(tf.abs(product), axis=(1, 2), keepdims=True)
        size = tf.where(size > 0, size, 1)
        total = total + np.log(size.numpy()[:, 0, 0].astype(np.float64))
        products.append(product / size)
        scales.append(total)
    return tf.stack(products, axis=1), np.stack(scales, axis=1)


def _by_lanczos(A, B, squares, sought):
    """Fills in ‖A_t B_k‖², A (P, right, n, S) and B (P, left, S, n), where found; the rest, some, stay `sought`."""
    import tensorflow as tf

    n, (P, right, left) = B.shape[-1], sought.shape
    A_T, B_T = tf.linalg.matrix_transpose(A), tf.linalg.matrix_transpose(B)
    start = np.random.default_rng(0).normal(size=n)
    v = tf.broadcast_to(tf.cast(start / np.linalg.norm(start), A.dtype), (P, left, right, n))
    v_prev, beta, diagonal, beside = tf.zeros_like(v), tf.zeros((), A.dtype), [], []

    def in_order(a):  # (P, left, right) -> (P, right, left)
        return a.numpy()[..., 0].swapaxes(1, 2).astype(np.float64)

    while np.count_nonzero(sought) > sought.size // REST and len(diagonal) < 2 * n:  # n would do, but for rounding
        u = tf.matmul(tf.transpose(tf.matmul(v, B_T), (0, 2, 1, 3)), A_T)
        u = tf.matmul(tf.transpose(tf.matmul(u, A), (0, 2, 1, 3)), B)
        alpha = tf.reduce_sum(u * v, axis=-1, keepdims=True)
        u = u - alpha * v - beta * v_prev
        beta = tf.sqrt(tf.reduce_sum(u * u, axis=-1, keepdims=True))
        v_prev, v = v, u * tf.math.reciprocal_no_nan(beta)
        diagonal.append(in_order(alpha))
        if len(diagonal) % EVERY == 0:
            new = largest_root([a[sought] for a in diagonal], [b[sought] for b in beside])
            old, squares[sought] = squares[sought], new  # what was found stays: rounding would only repeat it
            sought[sought] = new - old > TOLERANCE[A.dtype.name] * new
        beside.append(in_order(beta))


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


def largest_root(diagonal, beside):
    """The largest eigenvalue of symmetric tridiagonal matrices with no negative ones, by bisection.

    x lies above it where all d_j = x - a_j - b_{j-1}² / d_{j-1}, the pivots of x - matrix, are positive.

    Args:
        diagonal: the a_j, m arrays of one shape.
        beside: the b_j, m - 1 arrays.

    Returns:
        An array of that shape, accurate to 1e-10 (relative).
    """
    a, b = np.stack(diagonal), np.stack([np.zeros_like(diagonal[0]), *beside])
    low, b2 = np.max(a, axis=0), b**2
    high = np.max(a + b + np.roll(b, -1, axis=0), axis=0)  # Gershgorin
    for _ in range(BISECTIONS):
        x = 0.5 * (low + high)
        d, above = np.ones_like(x), True
        for a_j, b2_j in zip(a, b2, strict=True):
            d = x - a_j - b2_j / d
            above = above & (d > 0)
            d = np.where(d > 0, d, 1)
        low, high = np.where(above, low, x), np.where(above, x, high)
    return high
