# %% [markdown]
# # A cell by hand
#
# **Question.** What does an LSTM compute in one step, and where in `get_weights()` is it?
#
# The chapter's equations (eq. rnn-lstm-f to rnn-lstm-h), in row vectors:
#
# $$f = \sigma(a_f) \quad i = \sigma(a_i) \quad o = \sigma(a_o) \quad \tilde c = \tanh(a_c)$$
# $$c = f \odot c_{-} + i \odot \tilde c \qquad h = o \odot \tanh(c)$$
#
# where all four pre-activations come out of one product, $[a_i\ a_f\ a_c\ a_o] = x W + h_{-} U + b$.

# %%
import numpy as np

import keras_gated as kg

rng = np.random.default_rng(0)
x = rng.normal(size=(1, 60, 3)).astype("float32")  # one sequence: 60 time steps, 3 features
x[:, 20:] *= 0.1  # something happens first, then hardly anything

layer = kg.LSTM(4, return_sequences=True, return_state=True, forget_bias=3)
h_of_layer, _, c_of_layer = layer(x)

# %% [markdown]
# The layer has three arrays. The columns of each are ordered i f c o, four units wide each. The forget bias is no
# hidden constant: it stands in the f block of `b`.

# %%
W, U, b = layer.get_weights()
print("W", W.shape, " U", U.shape, " b", b.reshape(4, 4), sep="\n")


# %% [markdown]
# One line per equation:


# %%
def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def step(x, h_prev, c_prev):
    a_i, a_f, a_c, a_o = np.split(x @ W + h_prev @ U + b, 4, axis=-1)
    f = sigmoid(a_f)
    i = sigmoid(a_i)
    o = sigmoid(a_o)
    c_tilde = np.tanh(a_c)
    c = f * c_prev + i * c_tilde
    h = o * np.tanh(c)
    return h, c, {"f": f, "i": i, "o": o}


h, c = np.zeros((1, 4)), np.zeros((1, 4))
states, gates = [], []
for t in range(x.shape[1]):
    h, c, gate = step(x[:, t], h, c)
    states.append((h, c))
    gates.append(gate)

# %% [markdown]
# What the cell state does while hardly anything comes in: it decays, by the forget gate of that unit, and nothing
# else.

# %%
import pathlib

import matplotlib.pyplot as plt

figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 5), layout="constrained")
above.plot([c[0] for _, c in states])
above.set(title="Cell state of four units", ylabel="c")
below.plot([gate["f"][0] for gate in gates])
below.set(title="Their forget gates", xlabel="time step t", ylabel="f", ylim=(0, 1.02))
for axes in (above, below):
    axes.axvspan(20, 59, color="0.9")
above.legend([f"unit {n}" for n in range(4)] + ["hardly any input"], ncols=5, fontsize="small", loc="lower right")
pathlib.Path("logs").mkdir(exist_ok=True)
figure.savefig("logs/01_a_cell_by_hand.png", dpi=130)

# %% [markdown]
# **What we saw.** The loop of ten lines is the layer: outputs, final state and gates are equal.

# %%
h_by_hand = np.stack([h for h, _ in states], axis=1)
np.testing.assert_allclose(h_of_layer, h_by_hand, atol=1e-5)
np.testing.assert_allclose(c_of_layer, c, atol=1e-5)
activity = kg.gradients.gate_activity(layer, x)
np.testing.assert_allclose(activity["f"].mean, [gate["f"].mean() for gate in gates], atol=1e-5)
assert np.all(b[4:8] == 3)

# %% [markdown]
# **Exercises.**
# 1. Swap the blocks of i and o in `W`, `U` and `b`. By how much does `h` change at most? (Not by a rounding error:
#    the assertion above fails by some tenths.)
# 2. Write the GRU: `kg.GRU`, columns z r h̃, reset gate before the product (eq. rnn-gru-h̃). Its bias has one row.
# 3. What does `forget_bias=3` start f at? (σ(3) = 0.953; after 14 steps half of c is gone.)
