"""GradientNorms in every way in which Keras trains, against a manual GradientTape loop and a run without it.

In each: every true step once and in order, one tag per trainable variable, norms those of the tape, and the same
weights to the last bit.  What Keras 3.15 itself cannot do is not here: with several replicas on the TensorFlow backend
gradient_accumulation_steps, jit_compile=True and steps_per_execution > 1 (on CPUs), and more than one host; and a
dataset of unknown length on several replicas does not train the same weights twice, with or without the callback.
"""

import math
import os
import pickle
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from monitoring import BATCH, Subclassed, dense, numbers, read
from tiers import daily

import keras_gated as kg

EPOCHS = 2
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def even():
    return tuple(a[:40] for a in numbers())


def words():
    x = np.random.default_rng(0).integers(0, 4, size=(43, 6))  # 0 is padding where there is a mask
    return x, (x[:, :1] + x[:, 2:3] / 3).astype("float32")


# Models.


def recurrent():
    x = keras.Input((None, 3))
    return keras.Model(x, keras.layers.Dense(1)(keras.layers.Bidirectional(kg.LSTM(3))(x)))


def embedding(size=4, **options):
    table = keras.layers.Embedding(size, 2, embeddings_initializer="glorot_uniform", **options)
    over_time = kg.GRU(3) if table.mask_zero else keras.layers.Flatten()
    return keras.Sequential([keras.Input((6,), dtype="int32"), table, over_time, keras.layers.Dense(1)])


def nested():
    x = keras.Input((4, 3))
    inner = keras.Sequential([keras.Input((12,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(3)], name="inner")
    return keras.Model(x, keras.layers.Dense(1)(inner(keras.layers.Flatten()(x))))


def frozen():
    model = dense()
    model.layers[1].trainable = False
    return model


class InParts(Subclassed):
    """Calls `apply` for the variables of each part in turn."""

    def parts(self):
        return [self.out.trainable_variables, self.hidden.trainable_variables]

    def train_step(self, data):
        x, y = data
        self(x)
        self.optimizer.build(self.trainable_variables)
        replicas = self.distribute_strategy.num_replicas_in_sync
        for part in self.parts():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2) / replicas
            self.optimizer.apply(tape.gradient(loss, part), part)
        return {"loss": loss}


class AllAtOnce(InParts):
    def parts(self):
        return [self.trainable_variables]


class OnlySome(InParts):
    def parts(self):
        return [self.out.trainable_variables]


# Optimizers.


def several():
    parts = keras.optimizers.OptimizerMap(Adam(0.01, clipnorm=0.3), {"out/.*": SGD(0.1, global_clipnorm=0.2)})
    return keras.optimizers.MultiOptimizer(parts)


def several_chosen_late():
    parts = {1: SGD(0.1, global_clipnorm=0.2), 2: Adam(0.01, clipvalue=0.05)}
    return keras.optimizers.MultiOptimizer(lambda variable: parts[len(variable.shape)])


def shortened(optimizer, variables, gradients):
    """What the optimizer makes of dense gradients, and of the sparse ones they come from, by hand."""
    if hasattr(optimizer, "optimizers"):
        chosen = [optimizer._optimizer_map(v) for v in variables]
        used = list(gradients)
        for part in {id(c): c for c in chosen}.values():
            mine = [i for i, c in enumerate(chosen) if c is part]
            for i, g in zip(mine, shortened(part, None, [gradients[i] for i in mine]), strict=True):
                used[i] = g
        return used
    dense = [np.asarray(tf.convert_to_tensor(g), np.float64) for g in gradients]
    if isinstance(optimizer, kg.ClipNorm):
        size = math.sqrt(sum(np.sum(g**2) for g in dense))
        sizes = [np.linalg.norm(g) for g in dense] if optimizer.per_variable else [size] * len(dense)
        return [g * min(1, optimizer.max_norm / s) for g, s in zip(dense, sizes, strict=True)]
    as_keras = [np.asarray(g.values if isinstance(g, tf.IndexedSlices) else g) for g in gradients]
    if optimizer.global_clipnorm:
        size = math.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in as_keras))
        return [g * min(1, optimizer.global_clipnorm / size) for g in dense]
    if optimizer.clipnorm:
        sizes = [np.linalg.norm(g) for g in as_keras]
        return [g * min(1, optimizer.clipnorm / s) for g, s in zip(dense, sizes, strict=True)]
    if optimizer.clipvalue:
        return [np.clip(g, -optimizer.clipvalue, optimizer.clipvalue) for g in dense]
    return dense


# One row of the table.


class Case(NamedTuple):
    model: Callable = dense
    optimizer: Callable = lambda: SGD(0.1)
    data: Callable = numbers
    mode: dict = {}  # for compile
    feed: str = "arrays"
    fits: int = 1  # each of so many epochs less
    around: Callable = lambda folder: ([], [])  # callbacks before and after ours


def fit(case, folder, watched, strategy=None):
    """-> the model, trained, and the GradientNorms if it was watched."""
    keras.utils.set_random_seed(0)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = case.model()
        model.compile(case.optimizer(), "mse", **case.mode)
    norms = kg.GradientNorms(folder)
    before, after = case.around(folder)
    for _ in range(case.fits):
        epochs = EPOCHS // case.fits
        model.fit(**fed(case, epochs), epochs=epochs, verbose=0, callbacks=[*before, *[norms] * watched, *after])
    return model, norms


def fed(case, epochs):
    x, y = case.data()

    def batches(rounds=1):
        for _ in range(rounds):
            for i in range(0, len(x), BATCH):
                yield x[i : i + BATCH], y[i : i + BATCH]

    if case.feed == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH, "shuffle": False}
    if case.feed == "generator":
        return {"x": batches(epochs), "steps_per_epoch": math.ceil(len(x) / BATCH), "shuffle": False}
    signature = tuple(tf.TensorSpec((None, *a.shape[1:]), a.dtype) for a in (x, y))
    return {
        "x": tf.data.Dataset.from_generator(batches, output_signature=signature),
        "shuffle": False,
    }  # of unknown length


def manual(case, replicas=1):
    """-> raw and clipped norm (S,), and the raw norm of each variable (S, V), NaN where a step has none."""
    keras.utils.set_random_seed(0)
    model, optimizer, (x, y) = case.model(), case.optimizer(), case.data()
    model(x[:1])
    optimizer.build(model.trainable_variables)
    optimizer.loss_scale_factor = None  # nothing is scaled here
    raw, clipped, each, waiting, many = [], [], [], [], steps_each(optimizer)
    for i in [*range(0, len(x), BATCH)] * EPOCHS:
        for part in getattr(model, "parts", lambda: [model.trainable_variables])():
            shards = np.array_split(np.arange(i, min(i + BATCH, len(x))), replicas)
            gradients = [gradient(model, part, x[shard], y[shard], replicas) for shard in shards]
            whole = used = added(gradients)
            waiting.append(whole)
            if len(waiting) == many:
                whole = [g / many for g in added(waiting)]
                kept = gradients[0] if replicas == many == 1 else whole  # sparse ones may be counted row by row
                per_replica = replicas > 1 and not isinstance(optimizer, kg.ClipNorm)
                used = added([shortened(optimizer, part, g) for g in (gradients if per_replica else [kept])])
                waiting = []
            raw.append(total(whole))
            clipped.append(total(used))
            norms = {id(v): np.linalg.norm(g) for v, g in zip(part, whole, strict=True)}
            each.append([norms.get(id(v), np.nan) for v in model.trainable_variables])
            if replicas == 1:
                optimizer.apply(gradients[0], part)
            else:  # all of them are SGD(0.1)
                for v, g in zip(part, used, strict=True):
                    v.assign_sub(0.1 * g)
    return np.array(raw), np.array(clipped), np.array(each)


def gradient(model, variables, x, y, replicas):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2) / replicas
    return tape.gradient(loss, variables)


def added(gradients):
    return [
        sum(np.asarray(tf.convert_to_tensor(g), np.float64) for g in column) for column in zip(*gradients, strict=True)
    ]


def total(gradients):
    return math.sqrt(sum(np.sum(np.square(g)) for g in gradients))


def steps_each(optimizer):
    return getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps or 1


def check(case, folder, strategy=None):
    model, norms = fit(case, folder, True, strategy)
    unwatched, _ = fit(case, folder / "unwatched", False, strategy)
    for a, b in zip(model.get_weights(), unwatched.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)

    raw, clipped, each = manual(case, strategy.num_replicas_in_sync if strategy else 1)
    logged, records = read(folder), norms.records
    for tag in ("grad_norm/raw", "grad_norm/clipped", "grad_norm/nonfinite"):
        np.testing.assert_array_equal(logged[tag][0], np.arange(len(raw)))
    np.testing.assert_allclose(logged["grad_norm/raw"][1], raw, rtol=1e-5)
    np.testing.assert_allclose(logged["grad_norm/clipped"][1], clipped, rtol=1e-5)
    steps, ratio = logged["grad_norm/clip_ratio"]
    many = steps_each(model.optimizer)
    np.testing.assert_array_equal(steps, np.arange(many - 1, len(raw), many))
    np.testing.assert_allclose(ratio, (clipped / raw)[many - 1 :: many], rtol=1e-5)

    tags = [tag for tag in logged if tag.startswith("grad_norm_variable/")]
    seen = [i for i in range(each.shape[1]) if not np.all(np.isnan(each[:, i]))]
    variables = [model.trainable_variables[i] for i in seen]
    assert sorted(tags) == sorted(f"grad_norm_variable/{v.path}" for v in variables)
    for v, expected in zip(variables, each[:, seen].T, strict=True):
        there = ~np.isnan(expected)
        steps, values = logged[f"grad_norm_variable/{v.path}"]
        np.testing.assert_array_equal(steps, np.flatnonzero(there))
        np.testing.assert_allclose(values, expected[there], rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(records.variables[v.path], expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(records.step, np.arange(len(raw)))
    np.testing.assert_allclose(records.raw, raw, rtol=1e-5)
    return logged, records


# The table.


class Onlooker(keras.callbacks.Callback):
    """Saves, clones and pickles in mid-fit, and meets nothing that is ours."""

    def __init__(self, folder):
        super().__init__()
        self.path = os.path.join(folder, "model.keras")

    def on_train_batch_end(self, batch, logs=None):
        met = {**vars(self.model.optimizer), **vars(self.model)}
        assert not [name for name in met if name in ("apply", "_clip_gradients", "_all_reduce_sum_gradients")]
        if batch == 1:
            self.model.save(self.path)
            saved = keras.models.load_model(self.path)
            copies = [saved, pickle.loads(pickle.dumps(self.model)), keras.models.clone_model(self.model)]
            for copy in copies:
                assert len(copy.weights) == len(self.model.weights)
            assert len(saved.optimizer.variables) == len(self.model.optimizer.variables)


def tensorboard(folder):
    return keras.callbacks.TensorBoard(folder, update_freq=10)


def checkpoints(folder):
    os.makedirs(folder, exist_ok=True)
    best = os.path.join(folder, "best.keras")
    return [
        keras.callbacks.BackupAndRestore(os.path.join(folder, "backup")),
        keras.callbacks.ModelCheckpoint(best, monitor="loss", save_freq="epoch"),
    ]


def watchers(folder):
    os.makedirs(folder, exist_ok=True)
    return [Onlooker(folder)], [Onlooker(folder)]


def clip(**options):
    return lambda: kg.ClipNorm(SGD(0.1), 0.3, **options)


def micro(**options):
    return lambda: SGD(0.1, gradient_accumulation_steps=2, **options)


JIT, FOUR, EAGER = {"jit_compile": True}, {"steps_per_execution": 4}, {"run_eagerly": True}
CASES = {
    "graph": Case(),
    "eager": Case(mode=EAGER, optimizer=lambda: SGD(0.1, global_clipnorm=0.3)),
    "jit": Case(mode=JIT, optimizer=lambda: SGD(0.1, global_clipnorm=0.3)),
    "four steps an execution, ragged": Case(mode=FOUR, optimizer=lambda: SGD(0.1, momentum=0.9, global_clipnorm=0.3)),
    "four in jit": Case(mode={**JIT, **FOUR}, optimizer=lambda: Adam(0.01, clipvalue=0.05)),
    "global_clipnorm": Case(optimizer=lambda: SGD(0.1, global_clipnorm=0.3, use_ema=True)),
    "clipnorm": Case(optimizer=lambda: SGD(0.1, clipnorm=0.2, weight_decay=0.01)),
    "clipvalue": Case(optimizer=lambda: Adam(keras.optimizers.schedules.CosineDecay(0.1, 10), clipvalue=0.05)),
    "ClipNorm": Case(optimizer=clip()),
    "ClipNorm, eager": Case(optimizer=clip(), mode=EAGER),
    "ClipNorm per variable, jit": Case(optimizer=clip(per_variable=True), mode=JIT),
    "accumulation": Case(optimizer=micro(global_clipnorm=0.2)),
    "accumulation, four, jit": Case(optimizer=micro(clipnorm=0.2), mode={**JIT, **FOUR}),
    "accumulation in ClipNorm": Case(optimizer=lambda: kg.ClipNorm(micro()(), 0.2)),
    "loss_scale_factor": Case(optimizer=lambda: SGD(0.1, loss_scale_factor=256, clipnorm=0.2)),
    "recurrent, jit": Case(model=recurrent, mode=JIT, optimizer=lambda: SGD(0.1, clipnorm=0.3)),
    "recurrent, four": Case(model=recurrent, mode=FOUR, optimizer=clip()),
    "embedding": Case(model=embedding, data=words, optimizer=lambda: SGD(0.1, global_clipnorm=0.05)),
    "embedding, clipnorm": Case(model=embedding, data=words, optimizer=lambda: SGD(0.1, clipnorm=0.05)),
    "embedding, mask_zero": Case(model=lambda: embedding(mask_zero=True), data=words, optimizer=clip()),
    "embedding of a million": Case(model=lambda: embedding(1_000_000), data=words, optimizer=clip(), mode=FOUR),
    "unbuilt": Case(model=Subclassed, mode={**JIT, **FOUR}, optimizer=lambda: Adam(0.01, global_clipnorm=0.1)),
    "nested": Case(model=nested),
    "frozen": Case(model=frozen),
    "train_step": Case(model=AllAtOnce, optimizer=clip()),
    "train_step, apply twice": Case(model=InParts, optimizer=lambda: SGD(0.1, clipnorm=0.3), mode=FOUR),
    "train_step, some variables": Case(model=OnlySome, mode=JIT),
    "several optimizers": Case(optimizer=several),
    "several, chosen late": Case(model=Subclassed, optimizer=several_chosen_late, mode=FOUR),
    "generator": Case(feed="generator", mode=FOUR),
    "unknown length": Case(feed="dataset", optimizer=clip()),
    "unknown length, four": Case(feed="dataset", mode=FOUR),
    "fit twice": Case(fits=2, mode=FOUR),
    "TensorBoard before": Case(around=lambda folder: ([tensorboard(folder)], [])),
    "TensorBoard after": Case(around=lambda folder: ([], [tensorboard(folder)]), mode=FOUR),
    "checkpoints": Case(around=lambda folder: (checkpoints(folder), [])),
    "save, clone, pickle": Case(around=watchers, optimizer=lambda: Adam(0.01, clipnorm=0.2)),
}


OF_KERAS_3_15 = {"several optimizers", "several, chosen late"}
DAILY = [
    "four steps an execution, ragged",
    "ClipNorm",
    "embedding",
    "train_step, apply twice",
    "unknown length",
]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("name", daily(CASES, *DAILY))
def test_norms_are_those_of_a_tape(name, tmp_path):
    if name in OF_KERAS_3_15 and not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("MultiOptimizer is of Keras 3.15")
    check(CASES[name], tmp_path)


# Two replicas.

REPLICATED = {
    "plain": Case(data=even),
    "eager": Case(data=even, mode=EAGER, optimizer=clip()),
    "global_clipnorm": Case(data=even, optimizer=lambda: SGD(0.1, global_clipnorm=0.3, loss_scale_factor=256)),
    "clipvalue": Case(data=even, optimizer=lambda: SGD(0.1, clipvalue=0.1, loss_scale_factor=256)),
    "ClipNorm": Case(data=even, optimizer=clip()),
    "ClipNorm per variable, unbuilt": Case(data=even, model=Subclassed, optimizer=clip(per_variable=True)),
    "embedding": Case(data=lambda: tuple(a[:40] for a in words()), model=embedding, optimizer=clip()),
    "train_step, apply twice": Case(data=even, model=InParts, optimizer=lambda: SGD(0.1, clipnorm=0.3)),
    "recurrent": Case(data=even, model=recurrent, optimizer=lambda: SGD(0.1, clipnorm=0.3)),
}


@pytest.mark.parametrize("name", daily(REPLICATED, "global_clipnorm"))
def test_norms_of_two_replicas_are_those_of_a_tape(name, replicas, tmp_path):
    logged, records = check(REPLICATED[name], tmp_path, replicas)
    parts = np.transpose([logged[f"grad_norm_replica/{r}"][1] for r in (0, 1)])
    np.testing.assert_allclose(records.replicas, parts)
    whole = records.raw[:, None]
    assert np.all(parts > 0) and np.all(parts.sum(1, keepdims=True) > 0.99999 * whole)  # the triangle inequality
    assert np.all(np.abs(parts[:, :1] - parts[:, 1:]) < 1.00001 * whole)  # and its other side
    assert not np.allclose(parts[:, 0], parts[:, 1])


@pytest.mark.slow
def test_a_second_replica_that_is_not_finite_is_seen(replicas, tmp_path):
    x, y = even()
    y[7] = np.inf
    _, norms = fit(Case(data=lambda: (x, y), optimizer=clip()), tmp_path, True, replicas)
    records = norms.records
    assert not records.finite[[0, 5]].any() and records.finite.sum() == 8
    np.testing.assert_array_equal(records.updated, records.finite)
    assert np.isfinite(records.replicas[0, 0]) and not np.isfinite(records.replicas[0, 1])


class WithoutReduction(SGD):
    """A Keras whose optimizers sum over replicas under another name."""

    def __getattribute__(self, name):
        if name == "_all_reduce_sum_gradients":
            raise AttributeError(name)
        return super().__getattribute__(name)

    def _backend_update_step(self, grads, variables, rate):
        pairs = zip(grads, [v.value for v in variables], strict=True)
        sums = keras.optimizers.Optimizer._all_reduce_sum_gradients(self, pairs)
        tf.distribute.get_replica_context().merge_call(self._distributed_tf_update_step, args=(sums, rate))


@pytest.mark.slow
def test_without_the_name_for_the_sum_over_replicas_the_rest_is_logged(replicas, tmp_path):
    case, name = Case(data=even, optimizer=lambda: WithoutReduction(0.1)), "WithoutReduction._all_reduce_sum_gradients"
    with pytest.warns(UserWarning, match=f"{name}.*grad_norm/clipped and clip_ratio is left out") as told:
        _, norms = fit(case, tmp_path, True, replicas)
    assert len([w for w in told if name in str(w.message)]) == 1
    raw, _, _ = manual(Case(data=even), 2)
    np.testing.assert_allclose(norms.records.raw, raw, rtol=1e-5)
    assert "grad_norm/clipped" not in read(tmp_path)
