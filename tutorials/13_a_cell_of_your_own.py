# %% [markdown]
# # A cell of your own
#
# **Question.** I have read of another recurrent cell. What do I have to write, and how do I know that it is right?
#
# The minimal gated unit (Zhou, Wu, Zhang & Zhou 2016) is a GRU with one gate, which resets and updates:
#
# $$f = \sigma(x W_f + h_{-} U_f + b_f) \qquad \tilde h = \tanh(x W_h + (f \odot h_{-}) U_h + b_h)$$
# $$h = (1 - f) \odot h_{-} + f \odot \tilde h$$
#
# A cell is its equations, written down twice: `step`, and below it the transpose, read from the bottom up. The third
# function says what each matrix multiplied and the gradient of that product. The product x W + b, the loop over time,
# masks, dropout, precision and saving are not the cell's business. These are the forty lines:

# %%
import keras
from keras import ops

import keras_gated as kg


def step(p, states, U_f, U_h):
    p_f, p_h = p  # x W + b
    (h_prev,) = states
    f = kg.cells.sigmoid(p_f + U_f(h_prev))
    h_tilde = ops.tanh(p_h + U_h(f * h_prev))
    return ((1 - f) * h_prev + f * h_tilde,), (f, h_tilde)


def step_gradient(saved, before, after, d_states, U_f_T, U_h_T):
    f, h_tilde = saved
    (h_prev,), (dh,) = before, d_states
    da_h = dh * f * (1 - h_tilde**2)
    dfh = U_h_T(da_h)
    da_f = (dh * (h_tilde - h_prev) + dfh * h_prev) * f * (1 - f)
    return ops.concatenate([da_f, da_h], axis=-1), (dh * (1 - f) + dfh * f + U_f_T(da_f),)


def weight_gradient(da, saved, before, after):
    (h_prev,) = before
    da_f, da_h = ops.split(da, 2, axis=-1)
    return {"U_f": (h_prev, da_f), "U_h": (saved.f * h_prev, da_h)}


equations = kg.cells.Equations(
    gates=("f", "h"),
    states={"h": "units"},
    saved=("f", "h_tilde"),
    weights={"U_f": kg.cells.Matrix("h", ("f",)), "U_h": kg.cells.Matrix("h", ("h",))},
    step=step,
    step_gradient=step_gradient,
    weight_gradient=weight_gradient,
    retained=lambda saved: 1 - saved.f,
)


@keras.saving.register_keras_serializable("tutorial")
class MinimalGatedCell(kg.cells.RecurrentCell):
    equations = equations


@keras.saving.register_keras_serializable("tutorial")
class MinimalGated(kg.cells.Recurrent):
    cell_class = MinimalGatedCell


# %% [markdown]
# ## Is it right?
#
# `check_cell` holds all laws against it: the gradients against automatic differentiation and against central
# differences, masks, a run in two pieces, half precision, saving. It says nothing: they hold.

# %%
kg.testing.check_cell(MinimalGatedCell)

# %% [markdown]
# Would it have noticed? In this step_gradient the path through the product f ⊙ h₋ to the gate is forgotten, a mistake
# with which the network still learns something:

# %%
import dataclasses


def forgetful(saved, before, after, d_states, U_f_T, U_h_T):
    f, h_tilde = saved
    (h_prev,), (dh,) = before, d_states
    da_h = dh * f * (1 - h_tilde**2)
    da_f = dh * (h_tilde - h_prev) * f * (1 - f)
    return ops.concatenate([da_f, da_h], axis=-1), (dh * (1 - f) + U_h_T(da_h) * f + U_f_T(da_f),)


class ForgetfulCell(kg.cells.RecurrentCell):
    equations = dataclasses.replace(equations, step_gradient=forgetful)


class Forgetful(kg.cells.Recurrent):
    cell_class = ForgetfulCell


try:
    kg.testing.check_cell(ForgetfulCell)
    complaint = "none"
except AssertionError as error:
    complaint = str(error)
print(complaint)

# %% [markdown]
# A mistake in a shape does not even come so far. `Equations` looks at all shapes when it is made:

# %%
try:
    dataclasses.replace(equations, retained=lambda saved: ops.concatenate([saved.f, saved.f], axis=-1))
    refusal = "none"
except ValueError as error:
    refusal = str(error)
print(refusal)

# %% [markdown]
# ## What is it good for?
#
# It is a layer like all others, with masks, `Bidirectional`, callbacks and `Seq2Seq(cell=MinimalGatedCell)`. Beside a
# GRU on the adding problem: two of sixty numbers are marked, what is their sum? Who always says the mean has a squared
# error of 1/6.

# %%
import numpy as np

T, EPOCHS = 60, 6
rng = np.random.default_rng(5)
x, y, _ = kg.tasks.adding(rng, 8_000, T, form="unit")
baseline = kg.tasks.adding_baseline(T, form="unit")


def trained(layer):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((T, 2)), layer, keras.layers.Dense(1)])
    model.compile(kg.ClipNorm(keras.optimizers.Adam(0.01), max_norm=1.0), "mse", steps_per_execution=25)
    history = model.fit(x, y, batch_size=40, epochs=EPOCHS, verbose=0, validation_split=0.1)
    return model, history.history["val_loss"]


losses, weights, times = {}, {}, {}
for layer in (kg.GRU(32, name="gru"), MinimalGated(32, name="mgu")):
    model, losses[layer.name] = trained(layer)
    weights[layer.name] = layer.count_params()
    times[layer.name] = kg.gradients.retention_time(layer, x[:100])
    print(f"{layer.name}: {weights[layer.name]} weights, error {losses[layer.name][-1]:.4f}, chance {baseline:.4f}")

# %%
import pathlib

import matplotlib.pyplot as plt

figure, (learnt, kept) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
colors = {"gru": "#0072b2", "mgu": "#d55e00"}
for name, of_epochs in losses.items():
    label = f"{name.upper()}, {weights[name]} weights"
    learnt.semilogy(np.arange(1, EPOCHS + 1), of_epochs, color=colors[name], marker="o", markersize=3, label=label)
    kept.semilogy(np.sort(times[name])[::-1], color=colors[name])
learnt.axhline(baseline, color="0.5", linestyle=":", label="always the mean")
learnt.set(title="The sum of two numbers out of 60", xlabel="epoch", ylabel="squared error")
learnt.legend(fontsize="small")
kept.axhline(T, color="0.5", linestyle="--", label="length of a sequence")
kept.legend(fontsize="small")
kept.set(title="What a unit holds, it retains for", xlabel="unit, sorted", ylabel="steps")
pathlib.Path("logs").mkdir(exist_ok=True)
figure.savefig("logs/13_a_cell_of_your_own.png", dpi=130)

# %% [markdown]
# **What we saw.** Forty lines make a cell, and one call says that they are right; of the one forgotten path it says
# which gate, by how much and where. With two thirds of the GRU's weights the cell learns the task, too. The right
# picture needs no line of ours about this cell: what it retains is `retained`, a line of its equations.

# %%
assert "law 'transpose'" in complaint and "da of the gate f of step_gradient" in complaint
assert "returns the factor with h of shape (2, 6); as retained it returns of shape (2, 3)" in refusal
assert weights["mgu"] * 3 == weights["gru"] * 2
assert losses["mgu"][-1] < baseline / 10 and losses["gru"][-1] < baseline / 10
assert times["mgu"].max() > 10

# %% [markdown]
# **Exercises.**
# 1. Start `b_f` at -3, so that the units hold what they have from the first step on. (With a `bias_initializer` it
#    hits the candidate as well: write an `initial_bias`, as `kg.LSTMCell` does.)
# 2. Write the LSTM with peepholes: vectors `kg.cells.Vector("units")`, and a `total_gradient`, since o sees c.
#    (`tests/own_cells/peephole_lstm.py`.)
# 3. Forget the minus sign in `retained=lambda saved: 1 - saved.f`. Which law is broken? (`retained`.)
