# %% [markdown]
# # Why the simple RNN forgets
#
# **Question.** How far is a change of one hidden state felt, and what decides it?
#
# Between step k and step t stand t - k Jacobians, one behind the other (eq. rnn-jacobian), and their norm is bounded
# (eq. rnn-jacobian-bound):
#
# $$\frac{\partial h_t}{\partial h_k} = \prod_{j=k+1}^{t} \frac{\partial h_j}{\partial h_{j-1}}
#   \qquad \left\|\frac{\partial h_t}{\partial h_k}\right\| \le (\gamma\, \sigma_{max}(W_h))^{t-k}$$
#
# γ is the steepest slope of the activation, 1 for tanh. Below 1 the bound forces the gradient to vanish; above 1 it
# allows it to explode, but promises nothing.

# %%
import keras
import numpy as np

import keras_gated as kg

rng = np.random.default_rng(2)
N, T = 64, 60
x = 0.5 * rng.normal(size=(16, T, 8)).astype("float32")

# %% [markdown]
# Three networks whose recurrent kernels are orthogonal matrices times 0.8, 1 and 1.5: all singular values are equal,
# so that σ_max says everything about the kernel.

# %%
layers = {}
for scale in (0.8, 1.0, 1.5):
    layer = kg.SimpleRNN(N, recurrent_initializer=keras.initializers.Orthogonal(gain=scale, seed=0))
    layer.build(x.shape)
    layers[scale] = layer
    print(f"W_h = {scale} Q:", kg.gradients.spectrum(layer))

# %% [markdown]
# `state_jacobian_norms` returns the norms of all pairs (t, k), the mean over the batch. Its last row is what step T -
# 1 still feels of the steps before it.

# %%
lag = np.arange(T)
felt = {scale: kg.gradients.state_jacobian_norms(layer, x) for scale, layer in layers.items()}
bounds = {scale: kg.gradients.jacobian_bound(layer, lag) for scale, layer in layers.items()}

# %%
import pathlib

import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
for scale, color in zip(layers, ("#0072b2", "#009e73", "#d55e00"), strict=True):
    axes.semilogy(lag, felt[scale][-1, ::-1], color=color, label=rf"measured, $\sigma_{{max}}$ = {scale}")
    axes.semilogy(lag, bounds[scale], "--", color=color, label="its bound")
axes.axhline(0.01, color="0.6", linewidth=1)
axes.set(
    title="What is left of a change after so many steps", xlabel="lag t - k", ylabel=r"$\|\partial h_t/\partial h_k\|$"
)
axes.set_ylim(1e-12, 1e4)
axes.legend(ncols=3, fontsize="small")
pathlib.Path("logs").mkdir(exist_ok=True)
figure.savefig("logs/03_why_the_simple_rnn_forgets.png", dpi=130)

# %% [markdown]
# **What we saw.** No measured norm is above its bound. With 0.8 a hundredth is left after fewer than 20 steps,
# whatever the input: that is the bound's doing. Even with an orthogonal kernel the change fades, because tanh' < 1
# wherever the units do anything. With 1.5 the bound grows beyond 10¹⁰; what is measured stays many decades below it,
# for saturated units have a slope near 0.


# %%
def horizon(scale):
    """The first lag at which less than 1 % is left."""
    return int(np.argmax(felt[scale][-1, ::-1] < 0.01))


print({scale: horizon(scale) for scale in layers})
k, t = np.tril_indices(T)[::-1]
for scale in layers:
    assert np.all(felt[scale][t, k] <= bounds[scale][t - k] * (1 + 1e-5))
assert 0 < horizon(0.8) < 20
assert 0 < horizon(1.0) < T
assert felt[1.5][-1, 0] < 1e-3 * bounds[1.5][-1]

# %% [markdown]
# **Where the literature disagrees.** The chapter says that a simple RNN cannot learn dependencies beyond a few dozen
# steps. This is what happens from the usual start with plain gradient descent, not a law: Pascanu, Mikolov & Bengio
# (2013) reached 100 % on the temporal order problem with a tanh RNN at lengths from 50 to 200, with clipping and a
# term in the loss that keeps the Jacobians from shrinking.
#
# **Exercises.**
# 1. Multiply x by 0.01. What becomes of the orthogonal kernel's curve? (It stays near 1: the units are in the linear
#    part.)
# 2. Take `activation="sigmoid"`: γ is 1/4. Which σ_max would the bound need to reach 1? (4.)
# 3. Plot `keras_gated.plots.lag_map(felt[1.5])`. Do all rows look alike?
