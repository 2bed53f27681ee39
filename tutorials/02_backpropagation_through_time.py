# %% [markdown]
# # Backpropagation through time by hand
#
# **Question.** Where does the gradient of a recurrent network come from?
#
# The same weights act at every time step, so every time step adds to their gradient (eq. rnn-loss-grad). Algorithm
# rnn-bptt collects the sum in one sweep from the last step to the first:
#
# $$\delta_t = \frac{\partial L_t}{\partial h_t} + \delta^a_{t+1} W_h^\top \qquad
#   \delta^a_t = \delta_t \odot (1 - h_t^2) \qquad \nabla_{W_h} = \sum_t h_{t-1}^\top \delta^a_t$$

# %%
import keras
import numpy as np
import tensorflow as tf

import keras_gated as kg

keras.config.set_floatx("float64")  # so that equal means equal to ten digits
rng = np.random.default_rng(1)
B, T, D, N, M = 8, 30, 3, 5, 2
x = rng.normal(size=(B, T, D))
target = rng.normal(size=(B, T, M))

# %% [markdown]
# `kg.bptt` is the algorithm in NumPy, a line per equation: read `keras_gated/bptt.py` next to the chapter. Forward,
# and backward:

# %%
bptt = kg.bptt
parameters = bptt.initialize(rng, features=D, units=N, outputs=M)
swept = bptt.forward(parameters, x)
loss, dy = bptt.squared_error(swept.y, target)
gradients = bptt.backward(parameters, swept, dy)

# %% [markdown]
# The same network as Keras layers. TensorFlow's tape finds the gradient by automatic differentiation of the loop of
# `keras.layers.RNN`; `kg.SimpleRNN` brings its own backward sweep, compiled. Both must agree with the NumPy lines.


# %%
def gradients_of(layer):
    model = keras.Sequential([keras.Input((T, D)), layer, keras.layers.Dense(M)])
    model.set_weights([parameters.W_x, parameters.W_h, parameters.b, parameters.W_y, parameters.b_y])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((model(x, training=True) - target) ** 2) / (2 * B)
    return dict(zip(("W_x", "W_h", "b", "W_y", "b_y"), tape.gradient(loss, model.trainable_weights), strict=True))


explicit = gradients_of(kg.SimpleRNN(N, return_sequences=True))
by_tape = gradients_of(keras.layers.RNN(kg.SimpleRNNCell(N), return_sequences=True))
for name, by_hand in gradients._asdict().items():
    print(f"{name:4} {np.abs(explicit[name] - by_hand).max():.1e} {np.abs(by_tape[name] - by_hand).max():.1e}")

# %% [markdown]
# And the definition of a derivative: move one weight a little to either side.

# %%
moved = []
for small in (1e-6, -1e-6):
    W_h = parameters.W_h.copy()
    W_h[1, 2] += small
    moved.append(bptt.squared_error(bptt.forward(parameters._replace(W_h=W_h), x).y, target).value)
slope = (moved[0] - moved[1]) / 2e-6

# %% [markdown]
# With a loss at the last step only, δ is all that comes back to the earlier ones. Which steps does it reach?

# %%
import pathlib

import matplotlib.pyplot as plt

inputs = keras.Input((T, D))
layer = kg.SimpleRNN(N, name="rnn")
model = keras.Model(inputs, keras.layers.Dense(M)(layer(inputs)))
model.set_weights([parameters.W_x, parameters.W_h, parameters.b, parameters.W_y, parameters.b_y])
model.compile("sgd", "mse")
arriving = kg.gradients.time_step_norms(model, x, target[:, -1], "rnn").dh

figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
axes.semilogy(arriving, "o-")
axes.set(title="A loss at the last step only: what arrives at $h_t$")
axes.set(xlabel="time step t", ylabel=r"$\|\partial L/\partial h_t\|$")
axes.grid(alpha=0.3)
pathlib.Path("logs").mkdir(exist_ok=True)
figure.savefig("logs/02_backpropagation_through_time.png", dpi=130)

# %% [markdown]
# **What we saw.** Three ways to one gradient: by hand, explicit and compiled, automatic; and the slope agrees. On its
# way back through 29 steps the error has shrunk.

# %%
for name, by_hand in gradients._asdict().items():
    np.testing.assert_allclose(explicit[name], by_hand, atol=1e-10)
    np.testing.assert_allclose(by_tape[name], by_hand, atol=1e-10)
assert abs(slope - gradients.W_h[1, 2]) < 1e-7
assert arriving[0] < 0.1 * arriving[-1]

# %% [markdown]
# **Exercises.**
# 1. Leave the term $\delta^a_{t+1} W_h^\top$ out. Which of the five gradients stay right? ($W_y$ and $b_y$, which no
#    recurrence lies behind.)
# 2. Truncate: set δ to 0 every 10 steps. How large is the error in $\nabla_{W_h}$, relative to its norm?
# 3. `kg.gradients.loss_gradient_terms` returns the double sum term by term. Which lags carry 90 % of the gradient
#    here?
