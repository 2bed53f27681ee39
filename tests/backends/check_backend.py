"""What is to be said of another backend beyond the laws.  Run by scripts/backends.sh, after TensorFlow's values."""

import os
import socket
import subprocess
import sys

import keras
import numpy as np
import pytest
import values
from table import CELLS, B, D, N, T

import keras_gated as kg


def test_tensorflow_is_not_needed():
    assert keras.backend.backend() == os.environ["KERAS_BACKEND"]
    code = "import sys, numpy, keras_gated as kg; kg.LSTM(3)(numpy.ones((1, 2, 3))); print('tensorflow' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_values_and_gradients_are_those_of_tensorflow():
    with np.load(os.environ["TENSORFLOW_VALUES"]) as file:
        expected = dict(file)
    received = values.all_values()
    assert set(expected) == set(received) and len(received) > 150
    for name, a in received.items():
        np.testing.assert_allclose(a, expected[name], rtol=1e-5, atol=1e-5 * np.abs(expected[name]).max(), err_msg=name)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_a_model_trains_and_survives_saving(name, tmp_path):
    layer = CELLS[name].layer
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((T, D)),
            keras.layers.Bidirectional(layer(return_sequences=True, dropout=0.1, recurrent_dropout=0.1)),
            layer(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.02), "mse")
    x = np.random.default_rng(0).normal(size=(64, T, D)).astype("float32")
    losses = model.fit(x, x[:, 0, :1], batch_size=8, epochs=20, verbose=0).history["loss"]
    assert losses[-1] < 0.8 * losses[0]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)


def test_gradient_norms_says_what_it_needs(tmp_path):
    model = keras.Sequential([keras.Input((T, D)), kg.GRU(N)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="expects the TensorFlow backend"):
        model.fit(np.ones((2, T, D)), np.ones((2, N)), verbose=0, callbacks=[kg.GradientNorms(tmp_path)])


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="compares with torch.nn")
@pytest.mark.parametrize("name", ["rnn_tanh", "lstm", "gru_reset_after"])
def test_weights_of_torch_nn(name):
    """Two layers in both directions, layer by layer, and the gradient of x."""
    import torch

    theirs = {"rnn_tanh": torch.nn.RNN, "lstm": torch.nn.LSTM, "gru_reset_after": torch.nn.GRU}[name]
    theirs = theirs(D, N, 2, bidirectional=True, batch_first=True)
    x = torch.randn(B, T, D)
    gradients, h = [], x.clone().requires_grad_()
    ours = h
    for index in range(2):
        both = []
        for reverse in (False, True):
            layer = CELLS[name].layer(return_sequences=True, go_backwards=reverse)
            both.append(kg.weights.from_torch(theirs.state_dict(), layer, index, reverse)(ours))
        ours = torch.cat([both[0], both[1].flip(1)], -1)
    expected = theirs(h)[0]
    for y in (ours, expected):
        gradients.append(torch.autograd.grad((y**2).sum(), h)[0].numpy())
    np.testing.assert_allclose(ours.detach(), expected.detach(), atol=1e-6)
    np.testing.assert_allclose(*gradients, atol=1e-5)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
    "adam": lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_overwrite_frequency=2),
    "several": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.Lion(0.1), {"a": keras.optimizers.RMSprop(0.1)})
    ),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}
START = [np.full(4, 0.5), np.full((2, 2), -0.5)]


def after_steps(optimizer, steps, dtype="float32"):
    """The weights after steps, as the trainer of this backend makes them, and the optimizer."""
    variables = [keras.Variable(w, dtype=dtype, name=n) for n, w in zip("ab", START, strict=True)]
    optimizer.build(variables)
    apply = {"jax": _apply_on_jax, "torch": _apply_on_torch}[keras.backend.backend()](optimizer, variables)
    for gradients in steps:
        apply([keras.ops.convert_to_tensor(g, dtype) for g in gradients])
    return [v.numpy() for v in variables], optimizer


def _apply_on_jax(optimizer, variables):
    import jax

    pure = jax.jit(optimizer.stateless_apply)

    def apply(gradients):
        weights, state = pure([v.value for v in optimizer.variables], gradients, [v.value for v in variables])
        for v, value in zip([*variables, *optimizer.variables], [*weights, *state], strict=True):
            v.assign(value)

    return apply


def _apply_on_torch(optimizer, variables):
    import torch

    return torch.no_grad()(lambda gradients: optimizer.apply(gradients, variables))


@pytest.mark.parametrize("per_variable", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clip_norm_is_the_optimizer_on_clipped_gradients(name, per_variable):
    rng = np.random.default_rng(0)
    steps = [[rng.normal(size=w.shape) * 3 for w in START] for _ in range(3)]
    if name == "accumulation":
        steps = [steps[i // 2] for i in range(6)]  # the mean is clipped, not each
    sizes = [[np.linalg.norm(g) for g in gradients] for gradients in steps]
    sizes = [size if per_variable else [np.linalg.norm(size)] * 2 for size in sizes]
    clipped = [[g * min(1, 2 / n) for g, n in zip(*pair, strict=True)] for pair in zip(steps, sizes, strict=True)]
    expected, bare = after_steps(OPTIMIZERS[name](), clipped)
    received, ours = after_steps(kg.ClipNorm(OPTIMIZERS[name](), 2.0, per_variable), steps)
    for a, b in zip(received, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)

    spoiled = [[steps[0][0], np.full((2, 2), np.inf)], [np.full(4, np.nan), steps[0][1]]]
    disturbed, other = after_steps(
        kg.ClipNorm(OPTIMIZERS[name](), 2.0, per_variable), [steps[0], spoiled[0], *steps[1:], spoiled[1]]
    )
    for a, b in zip(disturbed, received, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(other.inner_optimizer.variables, ours.inner_optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert (int(other.skipped_steps), int(ours.skipped_steps)) == (2, 0)


def test_clip_norm_of_large_gradients_and_of_half_precision():
    for size, dtype in ((1e20, "float32"), (300, "float16")):
        optimizer = kg.ClipNorm(keras.optimizers.SGD(1.0, momentum=0.9))
        received, _ = after_steps(optimizer, [[np.full(4, size), 0 * START[1]]], dtype)
        for a, b in zip(received, [0 * START[0], START[1]], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_clip_norm_in_a_model_of_half_precision_survives_saving(tmp_path):
    keras.utils.set_random_seed(0)
    layers = [kg.GRU(N, dtype="mixed_float16"), keras.layers.Dense(1, dtype="mixed_float16")]
    model = keras.Sequential([keras.Input((T, D)), *layers])
    optimizer = keras.optimizers.LossScaleOptimizer(kg.ClipNorm("adam", 0.5), initial_scale=64)
    model.compile(optimizer, "mse")
    x = np.random.default_rng(0).normal(size=(8, T, D)).astype("float32")
    model.fit(x, x[:, 0, :1], batch_size=4, epochs=2, verbose=0, shuffle=False)
    assert int(optimizer.iterations) == 4
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for m in (model, loaded):
        m.fit(x, x[:, 0, :1], batch_size=4, verbose=0, shuffle=False)
    for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


PROCESS = """
import sys, keras, numpy as np, keras_gated as kg
rank, count, address, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
x = np.random.default_rng(0).normal(size=(32, 6, 3)).astype("float32")
x[::3, 4:] = 0
y = x[:, 0, :1]

def part(i):
    "This process's rows of global batch i, of 8 rows."
    return slice(8 * i + rank * 8 // count, 8 * i + (rank + 1) * 8 // count)

def made():
    keras.utils.set_random_seed(0)
    both = keras.layers.Bidirectional(kg.LSTM(4, return_sequences=True))
    layers = [keras.layers.Masking(), both, kg.GRU(3, return_sequences=True), kg.SimpleRNN(3), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((6, 3)), *layers])
"""
TRAIN = {
    "jax": """
if count > 1:
    keras.distribution.initialize(address, count, rank)
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))

class Parts(keras.utils.PyDataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return x[part(i)], y[part(i)]

model = made()
model.compile(keras.optimizers.SGD(0.1), "mse")
model.fit(Parts(), epochs=2, verbose=0, shuffle=False)
np.savez(file, *model.get_weights())
""",
    "torch": """
import torch
module = model = made()
if count > 1:
    torch.distributed.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=count)
    module = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(module.parameters(), 0.1)
for i in [0, 1, 2, 3] * 2:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(module(torch.tensor(x[part(i)])), torch.tensor(y[part(i)])).backward()
    optimizer.step()
np.savez(file, *model.get_weights())
""",
}


def test_two_processes_train_like_one(tmp_path):
    """With fit on JAX; on PyTorch, for which Keras has no keras.distribution, with a loop of the user's own."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    program, runs = PROCESS + TRAIN[keras.backend.backend()], []
    for rank, count in ((0, 1), (0, 2), (1, 2)):
        arguments = [str(rank), str(count), address, str(tmp_path / f"{rank}_of_{count}.npz")]
        runs.append(subprocess.Popen([sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE, text=True))
    for run in runs:
        _, errors = run.communicate(timeout=300)
        assert run.returncode == 0, errors
    with np.load(tmp_path / "0_of_1.npz") as file:
        alone = dict(file)
    for rank in range(2):
        with np.load(tmp_path / f"{rank}_of_2.npz") as weights:
            for name in alone:
                np.testing.assert_allclose(weights[name], alone[name], atol=1e-6)
