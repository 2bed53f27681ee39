# %% [markdown]
# # Several replicas
#
# **Question.** Does training on several devices learn the same as on one, and what becomes of clipping?
#
# With `tf.distribute.MirroredStrategy` every device (replica) computes the gradient of its part of the batch; the
# parts are summed before the step. Here two logical CPUs stand for two GPUs: the code is the same.
#
# (`MultiWorkerMirroredStrategy`, over several machines, does not work with `fit` in Keras 3.15, keras issue 20585.
# There, take the JAX backend with `keras.distribution`; our layers are tested on it.)

# %%
import tempfile

import keras
import numpy as np
import tensorflow as tf

import keras_gated as kg

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
one, two = tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

rng = np.random.default_rng(6)
x = rng.normal(size=(512, 20, 4)).astype("float32")
y = np.cumsum(x[:, :, 0], axis=1)[:, -1:] / 4  # the sum of one feature


def train(strategy):
    """Weights after three epochs, and the norms of all steps."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((20, 4)), kg.GRU(16), keras.layers.Dense(1)])
        model.compile(kg.ClipNorm(keras.optimizers.Adam(3e-3), max_norm=0.5), "mse")
    with tempfile.TemporaryDirectory() as folder:
        norms = kg.GradientNorms(folder)
        model.fit(x, y, batch_size=64, epochs=3, shuffle=False, verbose=0, callbacks=[norms])
    return model.get_weights(), norms.records


# %%
of_one, records_of_one = train(one)
of_two, records = train(two)
print("replicas:", records.replicas.shape[1])
print("largest difference of a weight:", max(np.abs(a - b).max() for a, b in zip(of_one, of_two, strict=True)))

# %% [markdown]
# `GradientNorms` knows what each replica adds. The whole is not the sum of these norms: replicas partly disagree.

# %%
import pathlib

import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
axes.plot(records.step, records.replicas.sum(axis=1), ":", color="0.5", label="sum of the replicas' norms")
axes.plot(records.step, records.raw, label="norm of the sum: the gradient")
axes.plot(records.step, records.clipped, "--", label="clipped at 0.5")
for r, norms in enumerate(records.replicas.T):
    axes.plot(records.step, norms, ".", markersize=4, label=f"replica {r}")
axes.set(title="Gradient norms on two replicas", xlabel="training step", ylabel="norm", yscale="log")
axes.legend(fontsize="small", ncols=2)
pathlib.Path("logs").mkdir(exist_ok=True)
figure.savefig("logs/11_several_replicas.png", dpi=130)

# %% [markdown]
# Clipping is where replicas go wrong elsewhere: Keras's `global_clipnorm` clips each replica before the sum. Take a
# parameter w and a loss of which replica 0 has the gradient 10 and replica 1 the gradient 10, then -0.5. Clipped at
# 1, a step of length 1 is what everybody expects, both times.


# %%
def step_length(optimizer, of_second):
    """How far w moves where the replicas' gradients are 10 and of_second."""
    with two.scope():
        w = keras.Variable(0.0)
        optimizer = optimizer()
        optimizer.build([w])

    @tf.function
    def step():
        def on_replica():
            first = tf.distribute.get_replica_context().replica_id_in_sync_group == 0
            optimizer.apply([tf.where(first, 10.0, of_second)], [w])

        two.run(on_replica)

    step()
    return abs(float(w.numpy()))


keras_steps = [step_length(lambda: keras.optimizers.SGD(1.0, global_clipnorm=1.0), g) for g in (10.0, -0.5)]
our_steps = [step_length(lambda: kg.ClipNorm(keras.optimizers.SGD(1.0), 1.0), g) for g in (10.0, -0.5)]
print("Keras:", keras_steps, " ClipNorm:", our_steps)

# %% [markdown]
# **What we saw.** Two replicas learn what one learns, up to rounding. `ClipNorm` clips the gradient that makes the
# step, after the sum; clipping before it makes steps of any length up to the number of replicas.

# %%
for a, b in zip(of_one, of_two, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)
np.testing.assert_allclose(records.raw, records_of_one.raw, rtol=1e-3)
assert np.all(records.raw <= records.replicas.sum(axis=1) * 1.0001)
np.testing.assert_allclose(our_steps, [1, 1], rtol=1e-5)
assert abs(keras_steps[0] - 1) > 0.4 or abs(keras_steps[1] - 1) > 0.4

# %% [markdown]
# **Exercises.**
# 1. Use a batch of 65. Does it still learn the same? (The last row makes the parts unequal; weights by examples.)
# 2. Which of the two clips would you want if one replica's batch held an outlier? `norms.records.replicas` shows it.
