# %% [markdown]
# # LSTM or GRU? Counting
#
# **Question.** Two gated cells, one of them a third smaller: is there anything that the larger one can do alone?
#
# On most data the two are equals (Chung et al. 2014; Jozefowicz, Zaremba & Sutskever 2015). Their equations differ in
# one thing that can be seen. An LSTM's cell state may grow without bound; a GRU's state is a mean of what it was and
# of a number between -1 and 1, and so stays between -1 and 1 itself:
#
# $$c_t = f_t \odot c_{t-1} + i_t \odot \tilde{c}_t \qquad
#   h_t = (1 - z_t) \odot h_{t-1} + z_t \odot \tilde{h}_t$$
#
# With f = i = 1 and a candidate of ±1 an LSTM can add and subtract ones: it can count (Weiss, Goldberg & Yahav 2018).
# The task that asks for it: in aⁿbⁿcⁿ, after as many b as there were a, only c may come.

# %%
import keras
import numpy as np
from keras import ops

import keras_gated as kg

rng = np.random.default_rng(6)
LONGEST, TESTED, SYMBOLS = 30, 120, 3
x, y, mask = kg.tasks.counting(rng, 40_000, LONGEST, SYMBOLS)
print("x: ", "".join("SabcT"[k] for k in x[0].argmax(-1)[mask[0]]))
print("y: ", *("/".join("SabcT"[k] for k in np.flatnonzero(step)) for step in y[0][mask[0]][:8]), "...")

# %% [markdown]
# One recurrent layer of ten units reads the letters; at each step it says of each letter whether that may come next.
# Sequences are padded behind their ends; those steps have no right answer and weigh nothing.


# %%
def trained(layer):
    model = keras.Sequential([keras.Input((None, SYMBOLS + 2)), layer, keras.layers.Dense(SYMBOLS + 2)])
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    optimizer = kg.ClipNorm(keras.optimizers.Adam(0.01), max_norm=1.0)
    model.compile(optimizer, loss, steps_per_execution=25)
    model.fit(x, y, sample_weight=mask.astype("float32"), batch_size=32, epochs=3, verbose=0)
    return model


def first_failing(model):
    """The smallest n whose sequence is not answered right from the first letter to the last."""
    width = 1 + SYMBOLS * TESTED
    x, y = np.zeros((2, TESTED, width, SYMBOLS + 2), "float32")
    for n in range(1, TESTED + 1):
        task = kg.tasks.counting(rng, 1, n, SYMBOLS, shortest=n)
        x[n - 1, : 1 + SYMBOLS * n], y[n - 1, : 1 + SYMBOLS * n] = task.x[0], task.y[0]
    agrees = ((model.predict(x, verbose=0) > 0) == (y > 0.5)).all(axis=-1)
    padding = y.max(axis=-1) == 0
    return 1 + int(np.argmin([*(agrees | padding).all(axis=-1), False]))


# %%
cells = {"LSTM": kg.LSTM, "GRU": kg.GRU}
models, fails = {}, {"LSTM": [], "GRU": []}
for seed in range(2):
    for name, cell in cells.items():
        keras.utils.set_random_seed(seed)
        models[name, seed] = trained(cell(10, return_sequences=True, name="counter"))
        fails[name].append(first_failing(models[name, seed]))
        print(f"{name:4} start {seed}: right up to n = {fails[name][-1] - 1}, learnt from n ≤ {LONGEST}")

# %% [markdown]
# ## What they count with
#
# A cell is a function of x_t and its states, so the states can be read off by calling it step by step. Both networks
# read a⁹⁰b⁹⁰c⁹⁰, three times what they have learnt from; shown are the LSTM's c and the GRU's h, all ten units.

# %%
N = 90
x_long = kg.tasks.counting(rng, 1, N, SYMBOLS, shortest=N).x


def states(model):
    layer = model.get_layer("counter")
    state, rows = layer.get_initial_state(1), []
    for t in range(x_long.shape[1]):
        _, state = layer.cell(x_long[:, t], state)
        rows.append(ops.convert_to_numpy(state[-1])[0])
    return np.array(rows)


best = int(np.argmax(fails["LSTM"]))
c, h = states(models["LSTM", best]), states(models["GRU", best])

# %%
import pathlib

import matplotlib.pyplot as plt

figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained", width_ratios=(2, 3, 3))
colors = {"LSTM": "#d55e00", "GRU": "#0072b2"}
for place, (name, of_starts) in enumerate(fails.items()):
    axes[0].plot([place] * len(of_starts), of_starts, "o", color=colors[name])
axes[0].axhline(LONGEST, color="0.3", linestyle=":", label="longest in training")
axes[0].set(title="First n that fails", xticks=(0, 1), xticklabels=fails, xlim=(-0.6, 1.6), ylim=(0, None))
axes[0].legend()
for of_cell, name, values in ((axes[1], "LSTM", c), (axes[2], "GRU", h)):
    of_cell.plot(values, color=colors[name], linewidth=0.8)
    of_cell.set(xlabel="step", title=f"{name}: {'c' if name == 'LSTM' else 'h'} of each unit over aⁿbⁿcⁿ, n = {N}")
    for letter in (N, 2 * N):
        of_cell.axvline(letter, color="0.8", linewidth=1)
pathlib.Path("logs").mkdir(exist_ok=True)
figure.savefig("logs/06_lstm_or_gru.png", dpi=130)

# %% [markdown]
# **What we saw.** Both learn what they are shown. Beyond it the LSTM goes further, and the middle picture shows why:
# one unit counts down with every a and back up with every b, another waits until the c bring it home; two straight
# lines that end where they began. Nothing bounds them, so they go on at n = 90; what fails first is the precision of
# their slopes. The GRU cannot draw such a line. Its units run from one end of their range to the other, each at its
# own pace, and together they tell how many letters there were, as far as they have learnt to read them.
#
# So the larger cell can do something alone: add without a bound. Where nothing is to be counted, take what trains
# faster or better on your data. And it is a matter of degree: with more units and more training a GRU counts further
# too.

# %%
assert min(fails["LSTM"]) > LONGEST and np.mean(fails["LSTM"]) > np.mean(fails["GRU"])
assert np.abs(c).max() > 20  # counted, not remembered
assert np.abs(h).max() <= 1

# %% [markdown]
# **Exercises.**
# 1. Which unit counts the a, which the b? Plot `np.diff(c, axis=0)`: a counter's steps are constant.
# 2. Hold the cell state by an output that sees little of it: what does h = o tanh(c) still show of c = 80, and how
#    can the network know that the counter is back at 0? (It need not see 80: only the way through 0 matters.)
# 3. `./scripts/reproduce.sh --claims counting` asks this for n up to 300 from seven starts and holds it against
#    what Weiss et al. and Suzgun et al. published.
