# %% [markdown]
# # Watching a training run
#
# **Question.** Has the network begun to learn the long dependency, and where would I see it?
#
# The loss says so last. Before it falls, the error has to reach the time steps where the answer is. Three callbacks
# write that to TensorBoard, next to Keras's own:
#
# - `GradientNorms`: the norm of every training step's gradient, before and after clipping;
# - `GradientFlow`: ‖∂L/∂h_t‖ of every time step of every training step, and the *horizon*: how many steps before the
#   loss less than 1 % of it is left;
# - `GateActivity`: what the gates do on a fixed batch.
#
# The task: the first of 60 inputs is +1 or -1, then comes noise; at the end, which was it?

# %%
import pathlib
import tempfile

import keras
import numpy as np

import keras_gated as kg

rng = np.random.default_rng(5)
T, n = 60, 2048
sign = rng.choice([-1.0, 1.0], n)
x = 0.1 * rng.normal(size=(n, T, 1))
x[:, 0, 0] = sign
x, y = x.astype("float32"), (sign > 0).astype("float32")[:, None]

keras.utils.set_random_seed(0)
layers = [keras.Input((T, 1)), kg.LSTM(16, forget_bias=1, name="lstm"), keras.layers.Dense(1)]
model = keras.Sequential(layers)
loss = keras.losses.BinaryCrossentropy(from_logits=True)
model.compile(kg.ClipNorm(keras.optimizers.Adam(3e-3), max_norm=1.0), loss, metrics=["accuracy"])

# %% [markdown]
# All of them share one folder. `GradientNorms` stands first, so that its entries in the logs reach the callbacks
# behind.

# %%
folder = tempfile.mkdtemp()  # in a project of your own: "logs/some_name"
norms, flow = kg.GradientNorms(folder), kg.GradientFlow(folder)
gates = kg.GateActivity(folder, x[:64])
callbacks = [norms, flow, gates, keras.callbacks.TensorBoard(folder)]
history = model.fit(x, y, batch_size=64, epochs=20, verbose=2, callbacks=callbacks)
print(f"tensorboard --logdir {folder} --samples_per_plugin scalars=100000,images=100")

# %% [markdown]
# TensorBoard opens with prepared charts on the page *Custom Scalars*; the heat maps are under *Images*. The same
# numbers are in Python, every training step of them:

# %%
horizon = flow.records["lstm/c"].horizon
arrives = flow.records["lstm/c"].first / flow.records["lstm/c"].last
accuracy = np.array(history.history["accuracy"])
print("horizon of ∂L/∂c at the begin of each epoch:", horizon[:: n // 64].astype(int))

# %%
import matplotlib.pyplot as plt

figure, (above, middle, below) = plt.subplots(3, 1, sharex=True, figsize=(7, 6.4), layout="constrained")
above.semilogy(norms.records.step, arrives)
above.axhline(0.01, color="0.6", linewidth=1)
above.set(title="What reaches the first time step, relative to the last", ylabel="∂L/∂c, first / last")
middle.plot(norms.records.step, horizon)
middle.set(title="How far back 1 % of the error reaches", ylabel="horizon, steps")
epoch_ends = n // 64 * np.arange(1, 21)
below.plot(epoch_ends, accuracy, "o-")
below.set(title="Which sign came first?", xlabel="training step", ylabel="accuracy", ylim=(0.4, 1.02))
pathlib.Path("logs").mkdir(exist_ok=True)
figure.savefig("logs/10_watching_a_run.png", dpi=130)

# %% [markdown]
# **What we saw.** For a dozen epochs the accuracy says that nothing happens. The horizon says otherwise: it moves
# back step by step, what reaches the first time step grows by orders of magnitude, and when it is there, the task is
# learnt within an epoch. Afterwards the error is short again: there is little left to be wrong about.

# %%
assert len(norms.records.raw) == len(horizon) == 20 * n // 64  # no training step is lost
learnt = int(np.argmax(accuracy > 0.8))  # the epoch
assert learnt > 2 and accuracy[-1] > 0.9
before = slice(0, learnt * n // 64)
assert accuracy[: learnt - 1].max() < 0.6  # guessing
assert arrives[before].max() > 100 * arrives[0] and horizon[before].max() > horizon[0] + 5
for run in ("gradients", "time_steps", "layer_gates"):
    assert list(pathlib.Path(folder, run).glob("events*"))

# %% [markdown]
# **Exercises.**
# 1. Start with `forget_bias=0`. Does the horizon move at all within twenty epochs? (From 9 steps to 9.)
# 2. Give `GradientFlow(folder, every=10)`. What gets smaller, and what stays exact? (The events; `records` hold each
#    tenth step.)
# 3. `flow.profiles["lstm"]` is the last epoch, 128 rows wide. Draw it with
#    `keras_gated.plots.time_steps_over_training`.
