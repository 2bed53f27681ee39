# %% [markdown]
# # Gates as memory
#
# **Question.** How long does an LSTM keep what it has stored, and who decides that?
#
# Along the cell state, the gates held fixed, the error is multiplied by the forget gate, once a step (the constant
# error carousel, eq. rnn-lstm-cec):
#
# $$\frac{\partial c_t}{\partial c_{t-1}} = \mathrm{diag}(f_t) \qquad
#   \frac{\partial c_t}{\partial c_k} = \mathrm{diag}\Big(\prod_{j=k+1}^{t} f_j\Big)$$
#
# f = 1 would keep everything. Where f starts is the forget bias: σ(b_f).

# %%
import keras
import numpy as np

import keras_gated as kg

T = 100
for b_f in (0, 1, 2, 5):
    f = 1 / (1 + np.exp(-b_f))
    print(f"forget bias {b_f}: f = {f:.4f}, after {T} steps {f**T:.1e} is left")

# %% [markdown]
# "Set the forget bias to 1 or 2" is common advice (Gers, Schmidhuber & Cummins 2000; Jozefowicz, Zaremba & Sutskever
# 2015), and 1 is what Keras does. The numbers say that this is far from f ≈ 1 when the dependency is a hundred steps
# long.
#
# A task that needs a hundred steps: the first input is +1 or -1, then comes noise; at the end, which was it?

# %%
rng = np.random.default_rng(3)
n = 2048
sign = rng.choice([-1.0, 1.0], n)
x = 0.1 * rng.normal(size=(n, T, 1))
x[:, 0, 0] = sign
x, y = x.astype("float32"), (sign > 0).astype("float32")[:, None]


def network(forget_bias):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((T, 1)), kg.LSTM(16, forget_bias=forget_bias, name="lstm"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(kg.ClipNorm(keras.optimizers.Adam(3e-3), max_norm=1.0), loss, metrics=["accuracy"])
    return model


# %% [markdown]
# Before training: what is left of the error along the cell state, measured on the data. Then twelve epochs.

# %%
biases, left, arriving, accuracy = (0, 1, 2, 5), {}, {}, {}
for bias in biases:
    model = network(bias)
    f = kg.gradients.cell_state_jacobian(*kg.gradients.layer_input(model, x[:64], "lstm"))
    left[bias] = np.cumprod(f[:, ::-1], axis=1).mean(axis=(0, 2))  # over batch and units
    arriving[bias] = kg.gradients.time_step_norms(model, x[:256], y[:256], "lstm").dc
    history = model.fit(x, y, batch_size=64, epochs=12, verbose=0)
    accuracy[bias] = history.history["accuracy"]
    print(f"forget bias {bias}: {left[bias][-1]:.1e} left, accuracy {accuracy[bias][-1]:.2f}")

# %%
import pathlib

import matplotlib.pyplot as plt

figure, (retained, learnt) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
for bias, style in zip(biases, (":", "-.", "--", "-"), strict=True):
    retained.semilogy(np.arange(1, T + 1), left[bias], style, label=f"forget bias {bias}")
    learnt.plot(np.arange(1, 13), accuracy[bias], style)
retained.set(title="Left of the error along c", xlabel="lag, steps", ylabel=r"$\prod f$, mean", ylim=(1e-32, 3))
learnt.set(title="Which sign came first?", xlabel="epoch", ylabel="accuracy", ylim=(0.4, 1.02))
retained.legend()
pathlib.Path("logs").mkdir(exist_ok=True)
figure.savefig("logs/05_gates_as_memory.png", dpi=130)

# %% [markdown]
# **What we saw.** With a bias of 5 half of the error comes back over a hundred steps, and the network learns the
# task; with 0 or 1 next to nothing comes back, and after the same training it is guessing. In between it depends: a
# bias of 2 leaves three millionths, and here that is enough, for Adam divides a gradient by its own size. "Vanishing"
# is a matter of degree.

# %%
sigmoid = lambda a: 1 / (1 + np.exp(-a))  # noqa: E731
assert 1e-14 < sigmoid(1.0) ** T < 1e-13 and 1e-6 < sigmoid(2.0) ** T < 1e-5 and 0.5 < sigmoid(5.0) ** T < 0.52
assert left[5][-1] > 0.3 and left[1][-1] < 1e-9
assert arriving[5][0] > 1e6 * arriving[1][0]
assert accuracy[5][-1] > 0.95 and accuracy[0][-1] < 0.6 and accuracy[1][-1] < 0.6

# %% [markdown]
# **Exercises.**
# 1. Ask `kg.gradients.diagnose(model, x, y)` about the network with a bias of 1. Which forget bias does it advise?
# 2. Make the dependency 20 steps long. Which biases suffice? (0.73²⁰ = 0.002: even 1 has a chance.)
# 3. A bias of 5 everywhere also means that old things stay. When is that bad? (When what comes next should replace
#    them: the continual Reber grammar is such a case, Gers et al. 2000.)
