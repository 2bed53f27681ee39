# %% [markdown]
# # Bringing a Keras or PyTorch model along
#
# **Question.** I have a trained model with `keras.layers.LSTM`, or a state dict of `torch.nn.GRU`. What do I have to
# do?
#
# The equations are the same; what differs is order, sign and number of the arrays. A GRU's update gate is on the
# other side in both libraries: since 1 - σ(a) = σ(-a), its weights change sign. PyTorch orders a GRU r z h,
# transposes, and has two biases.

# %%
import keras
import numpy as np

import keras_gated as kg

rng = np.random.default_rng(7)
t = np.arange(60) + rng.uniform(0, 30, (512, 1))
wave = (np.sin(0.3 * t) + 0.5 * np.sin(0.71 * t + 1) + 0.05 * rng.normal(size=t.shape)).astype("float32")[..., None]
x, y = wave[:, :-1], wave[:, 1:]  # the next value

keras.utils.set_random_seed(0)
theirs = keras.Sequential(
    [
        keras.Input((None, 1)),
        keras.layers.LSTM(24, return_sequences=True),
        keras.layers.GRU(24, return_sequences=True),
        keras.layers.Dense(1),
    ]
)
theirs.compile(keras.optimizers.Adam(1e-2), "mse")
theirs.fit(x, y, batch_size=64, epochs=8, verbose=2)

# %% [markdown]
# `kg.weights.from_keras` makes the equal layer, weights included; `keras.models.clone_model` walks through the model.

# %%
RECURRENT = (keras.layers.SimpleRNN, keras.layers.LSTM, keras.layers.GRU)


def converted(layer):
    if isinstance(layer, RECURRENT):
        return kg.weights.from_keras(layer)
    return layer.__class__.from_config(layer.get_config())


ours = keras.models.clone_model(theirs, clone_function=converted)
for new, old in zip(ours.layers, theirs.layers, strict=True):
    if not isinstance(old, RECURRENT):
        new.set_weights(old.get_weights())
print([f"{layer.__module__}.{type(layer).__name__}" for layer in ours.layers])
before = theirs.predict(x, verbose=0), ours.predict(x, verbose=0)

# %% [markdown]
# From here on it is a model like any other: it trains on, it can be watched and diagnosed, and it goes back.

# %%
ours.compile(kg.ClipNorm(keras.optimizers.Adam(1e-2), max_norm=1.0), "mse")
history = ours.fit(x, y, batch_size=64, epochs=4, verbose=2)
back = kg.weights.to_keras(ours.layers[1])
print(kg.gradients.diagnose(ours, x[:64], y[:64]))

# %% [markdown]
# PyTorch: a state dict is names and arrays; torch need not be installed. This one has the shapes of
# `torch.nn.GRU(3, 5)`, whose reset gate comes after the product.

# %%
state_dict = {
    "weight_ih_l0": rng.normal(size=(15, 3)),
    "weight_hh_l0": 0.3 * rng.normal(size=(15, 5)),
    "bias_ih_l0": rng.normal(size=15),
    "bias_hh_l0": rng.normal(size=15),
}
gru = kg.weights.from_torch(state_dict, kg.GRU(5, reset_after=True, return_sequences=True))
sequence = rng.normal(size=(2, 7, 3)).astype("float32")


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


h, by_the_manual = np.zeros((2, 5)), []  # the equations in the documentation of torch.nn.GRU
for step in range(7):
    i_r, i_z, i_n = np.split(sequence[:, step] @ state_dict["weight_ih_l0"].T + state_dict["bias_ih_l0"], 3, axis=1)
    h_r, h_z, h_n = np.split(h @ state_dict["weight_hh_l0"].T + state_dict["bias_hh_l0"], 3, axis=1)
    r, z = sigmoid(i_r + h_r), sigmoid(i_z + h_z)
    h = (1 - z) * np.tanh(i_n + r * h_n) + z * h
    by_the_manual.append(h)

# %%
import pathlib

import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
axes.plot(y[0, :, 0], ".", color="0.6", label="the series")
axes.plot(before[0][0, :, 0], linewidth=4, alpha=0.4, label="prediction of keras.layers")
axes.plot(before[1][0, :, 0], "--", label="of the converted model")
axes.set(title="One series, predicted a step ahead", xlabel="time step t", ylabel="value")
axes.legend(ncols=3, fontsize="small")
pathlib.Path("logs").mkdir(exist_ok=True)
figure.savefig("logs/12_bringing_a_model_along.png", dpi=130)

# %% [markdown]
# **What we saw.** The converted model predicts the same, trains on, and goes back; the PyTorch weights compute what
# PyTorch's manual says.

# %%
np.testing.assert_allclose(*before, atol=1e-4)
assert history.history["loss"][-1] < 1.1 * theirs.evaluate(x, y, verbose=0)
hidden = ours.layers[0](x[:8])
np.testing.assert_allclose(back(hidden), ours.layers[1](hidden), atol=1e-5)
np.testing.assert_allclose(gru(sequence), np.stack(by_the_manual, axis=1), atol=1e-5)

# %% [markdown]
# **Exercises.**
# 1. Convert a `Bidirectional`. (Its halves are `layer.forward_layer` and `layer.backward_layer`: convert each, and
#    wrap.)
# 2. Load only the second layer of a two-layer `torch.nn.LSTM`: `index=1`.
# 3. Convert a `keras.layers.LSTM(activation="relu")`. What does the error say, and why? (Our equations have tanh and
#    σ.)
