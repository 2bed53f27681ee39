"""The cells once more, in NumPy float64, one example at a time, from the chapter's equations alone.

Imports nothing of the package.  Letters and order of memory are those of the cells' docstrings.
"""

import numpy as np


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def simple_rnn(activation):
    f = {
        "tanh": np.tanh,
        "relu": lambda a: np.maximum(a, 0),
        "sigmoid": sigmoid,
        "linear": lambda a: a,
    }[activation]

    def step(x, h, W, U, b):
        """eq. rnn-hidden"""
        return (f(x @ W + h @ U + b),)

    return step


def lstm(x, h, c, W, U, b):
    """eq. rnn-lstm-f .. rnn-lstm-h"""
    W_i, W_f, W_c, W_o = np.split(W, 4, axis=1)
    U_i, U_f, U_c, U_o = np.split(U, 4, axis=1)
    b_i, b_f, b_c, b_o = np.split(b, 4)
    f = sigmoid(x @ W_f + h @ U_f + b_f)
    i = sigmoid(x @ W_i + h @ U_i + b_i)
    o = sigmoid(x @ W_o + h @ U_o + b_o)
    c_tilde = np.tanh(x @ W_c + h @ U_c + b_c)
    c = f * c + i * c_tilde
    h = o * np.tanh(c)
    return h, c


def gru(x, h, W, U, b):
    """eq. rnn-gru-z .. rnn-gru-h"""
    W_z, W_r, W_h = np.split(W, 3, axis=1)
    U_z, U_r, U_h = np.split(U, 3, axis=1)
    b_z, b_r, b_h = np.split(b, 3)
    z = sigmoid(x @ W_z + h @ U_z + b_z)
    r = sigmoid(x @ W_r + h @ U_r + b_r)
    h_tilde = np.tanh(x @ W_h + (r * h) @ U_h + b_h)
    return ((1 - z) * h + z * h_tilde,)


def gru_reset_after(x, h, W, U, b):
    """The reset gate after the product, with a bias of its own in the second row of b."""
    W_z, W_r, W_h = np.split(W, 3, axis=1)
    U_z, U_r, U_h = np.split(U, 3, axis=1)
    (b_z, b_r, b_h), (bu_z, bu_r, bu_h) = (np.split(row, 3) for row in b)
    z = sigmoid(x @ W_z + b_z + h @ U_z + bu_z)
    r = sigmoid(x @ W_r + b_r + h @ U_r + bu_r)
    h_tilde = np.tanh(x @ W_h + b_h + r * (h @ U_h + bu_h))
    return ((1 - z) * h + z * h_tilde,)


def minimal_gated(x, h, W, U, b):
    """Zhou et al. (2016): one gate, which resets and updates."""
    W_f, W_h = np.split(W, 2, axis=1)
    U_f, U_h = np.split(U, 2, axis=1)
    b_f, b_h = np.split(b, 2)
    f = sigmoid(x @ W_f + h @ U_f + b_f)
    h_tilde = np.tanh(x @ W_h + (f * h) @ U_h + b_h)
    return (h + f * (h_tilde - h),)


def peephole_lstm(x, h, c, W, U, b, w_i, w_f, w_o):
    """Gers et al. (2002): i and f see the old cell state, o the new one."""
    a_i, a_f, a_c, a_o = np.split(x @ W + h @ U + b, 4)
    i, f = sigmoid(a_i + c * w_i), sigmoid(a_f + c * w_f)
    c = f * c + i * np.tanh(a_c)
    return sigmoid(a_o + c * w_o) * np.tanh(c), c


def layer_norm_lstm(x, h, c, W, U, b, g_x, g_h, g_c, b_c):
    """Ba et al. (2016), with the biases before and behind the first normalisation in the rows of b."""

    def norm(a):
        return (a - a.mean()) / np.sqrt(a.var() + 1e-3)

    a_i, a_f, a_c, a_o = np.split(norm(x @ W + b[0]) * g_x + norm(h @ U) * g_h + b[1], 4)
    c = sigmoid(a_f) * c + sigmoid(a_i) * np.tanh(a_c)
    return sigmoid(a_o) * np.tanh(norm(c) * g_c + b_c), c


def projected_lstm(x, h, c, W, U, b, W_r):
    """Sak et al. (2014): h is the projection of what an LSTM puts out."""
    m, c = lstm(x, h, c, W, U, b)
    return m @ W_r, c


def torch_lstm(x, h, c, weight_ih, weight_hh, bias_ih, bias_hh):
    """torch.nn.LSTM: columns, gates i f g o."""
    i, f, g, o = np.split(weight_ih @ x + bias_ih + weight_hh @ h + bias_hh, 4)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def torch_gru(x, h, weight_ih, weight_hh, bias_ih, bias_hh):
    """torch.nn.GRU: columns, gates r z n, and z keeps."""
    W_r, W_z, W_n = np.split(weight_ih, 3)
    U_r, U_z, U_n = np.split(weight_hh, 3)
    (b_r, b_z, b_n), (c_r, c_z, c_n) = np.split(bias_ih, 3), np.split(bias_hh, 3)
    r = sigmoid(W_r @ x + b_r + U_r @ h + c_r)
    z = sigmoid(W_z @ x + b_z + U_z @ h + c_z)
    n = np.tanh(W_n @ x + b_n + r * (U_n @ h + c_n))
    return ((1 - z) * n + z * h,)


def torch_rnn(x, h, weight_ih, weight_hh, bias_ih, bias_hh):
    """torch.nn.RNN: columns."""
    return (np.tanh(weight_ih @ x + bias_ih + weight_hh @ h + bias_hh),)


def run(step, x, states, weights, mask=None, go_backwards=False, zero_output_for_mask=False):
    """-> outputs (B, T, N) in the order of processing, and the final states."""
    outputs, finals = [], []
    for n, sequence in enumerate(x):
        valid = np.ones(len(sequence), bool) if mask is None else mask[n]
        order = range(len(sequence))[::-1] if go_backwards else range(len(sequence))
        state, output, row = [s[n] for s in states], np.zeros_like(states[0][n]), []
        for t in order:
            if valid[t]:
                state = step(sequence[t], *state, *weights)
                output = state[0]
            row.append(np.zeros_like(output) if zero_output_for_mask and not valid[t] else output)
        outputs.append(row)
        finals.append(state)
    return np.array(outputs), [np.array(s) for s in zip(*finals, strict=True)]


def additive(W, U, w):
    """Bahdanau et al. (2015)."""
    return lambda q, v: w @ np.tanh(q @ W + v @ U)


def multiplicative(U):
    """Luong et al. (2015), "general"."""
    return lambda q, v: q @ (v @ U)


def attention(score, query, values, valid):
    """-> context (D_v,) and weights (T_v,) of one query (D_q,)."""
    weights = np.zeros(len(values))
    for s in np.flatnonzero(valid):
        weights[s] = np.exp(score(query, values[s]))
    weights = weights / (weights.sum() or 1)
    return sum(a * v for a, v in zip(weights, values, strict=True)), weights


def encoder(source, embedding, layers, bridges):
    """-> the outputs of the uppermost layer (T, D) and the states of each, of one source.

    Args:
        layers: for each its directions, (step, number of states, weights) each.
        bridges: for each, (W, b) for each state; or none.
    """
    x, valid, states = embedding[source], source != 0, []
    for n, directions in enumerate(layers):
        results = []
        for backward, (step, number, weights) in enumerate(directions):
            first = [np.zeros((1, len(weights[1]))) for _ in range(number)]
            y, finals = run(step, x[None], first, weights, valid[None], backward, len(directions) == 2)
            results.append((y[0][::-1] if backward else y[0], [s[0] for s in finals]))
        x = np.concatenate([y for y, _ in results], axis=1)
        finals = [np.concatenate(s) for s in zip(*(s for _, s in results), strict=True)]
        states.append([s @ W + b for s, (W, b) in zip(finals, bridges[n], strict=True)] if bridges else finals)
    return x, states


def decoder(target, impossible, states, values, valid, embedding, layers, score, W_c, W_s, b_s):
    """Π_t p(y_t | y_1 .. y_{t-1}, c), the chain rule, as a sum of logarithms; of one target <s> .. </s>."""
    total, states = 0.0, [list(s) for s in states]
    for before, token in zip(target[:-1], target[1:], strict=True):
        x = embedding[before]
        for n, (step, _, weights) in enumerate(layers):
            states[n] = step(x, *states[n], *weights)
            x = states[n][0]
        if score is not None:
            context, _ = attention(score, x, values, valid)
            x = np.tanh(np.concatenate([x, context]) @ W_c)
        p = np.exp(x @ W_s + b_s)
        p[impossible] = 0
        total += np.log(p[token] / p.sum())
    return total
