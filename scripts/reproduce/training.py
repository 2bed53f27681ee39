"""Networks and their training on fresh sequences, none of which is seen twice."""

import math

import keras
import numpy as np
from keras import ops

import keras_gated as kg

LAYERS = {"SimpleRNN": kg.SimpleRNN, "LSTM": kg.LSTM, "GRU": kg.GRU}
GATES = {"LSTM": "ifco", "GRU": "zrh"}  # in the order of the layer's bias
TESTED = 2560  # sequences, as Hochreiter & Schmidhuber had them
STEPS_PER_EXECUTION = 20


def recurrent(setting, **options):
    """The recurrent layer of a setting."""
    if "biases" in setting:
        options["bias_initializer"] = gate_biases(setting)
        if setting["cell"] == "LSTM":
            options["forget_bias"] = None
    return LAYERS[setting["cell"]](setting["units"], **options)


def gate_biases(setting):
    """An initializer: where the bias of each gate starts, 0 if the setting does not say."""
    of_gates = [setting["biases"].get(gate, 0.0) for gate in GATES[setting["cell"]]]
    return lambda shape, dtype=None: ops.repeat(ops.convert_to_tensor(of_gates, dtype), setting["units"])


def network(setting, features, outputs, every_step=False):
    """A recurrent layer and a Dense one: x, mask -> an answer at the end of each sequence; or x -> one at every step.

    Sequences are padded behind their ends, so that with an answer at every step no mask is needed.
    """
    x = keras.Input((None, features))
    if every_step:
        return keras.Model(x, keras.layers.Dense(outputs)(recurrent(setting, return_sequences=True)(x)))
    mask = keras.Input((None,), dtype="bool")
    return keras.Model([x, mask], keras.layers.Dense(outputs)(recurrent(setting)(x, mask=mask)))


def compiled(model, setting, loss, right):
    """right: a function (y, logits) -> (B,), 1 for every sequence that is answered right."""
    rate = setting["rate"]
    if setting.get("decay"):
        rate = keras.optimizers.schedules.CosineDecay(rate, setting["limit"] // setting["batch"])
    optimizer = getattr(keras.optimizers, setting["optimizer"])(rate, global_clipnorm=setting.get("clip"))
    if setting.get("max_norm"):
        # What is not finite is let through: if it were left out, there could be no NaN.
        optimizer = kg.ClipNorm(optimizer, setting["max_norm"], nonfinite="propagate")
    metrics = [keras.metrics.MeanMetricWrapper(right, name="right")]
    model.compile(optimizer, loss, metrics=metrics, steps_per_execution=STEPS_PER_EXECUTION)
    return model


def train(model, draw, setting, note):
    """Trains on chunks of sequences: to the limit, or until all of the last `window` ones were answered right.

    Args:
        model: compiled by `compiled`.
        draw: a function n -> (inputs, y) of n new sequences.
        setting: with batch, chunk (sequences drawn at once), limit, and window or none.
        note: is told how much of the limit is done, from 0 to 1.

    Returns:
        {"solved": sequences until then or None, "curve": [[sequences, loss, share right] of each chunk]}
    """
    trained, in_a_row, curve = 0, 0, []
    window = setting.get("window", math.inf)
    while trained < setting["limit"] and in_a_row < window:
        inputs, y = draw(setting["chunk"])
        history = model.fit(inputs, y, batch_size=setting["batch"], shuffle=False, verbose=0).history
        loss, right = history["loss"][0], history["right"][0]
        trained += setting["chunk"]
        in_a_row = in_a_row + setting["chunk"] if right == 1 else 0
        curve.append([trained, loss if math.isfinite(loss) else None, right])
        note(trained / setting["limit"])
        if not math.isfinite(loss):
            break
    return {"solved": trained if in_a_row >= window else None, "curve": curve}


def shares_right(model, draw, rights, n=TESTED, at_once=256):
    """Share of n new sequences that are answered right, in each sense of the word."""
    shares = []
    for _ in range(n // at_once):
        inputs, y = draw(at_once)
        logits = model.predict(inputs, batch_size=at_once, verbose=0)
        shares.append([np.mean(ops.convert_to_numpy(right(y, logits))) for right in rights])
    return np.mean(shares, axis=0).tolist()


def share_right(model, draw, right, n=TESTED):
    (share,) = shares_right(model, draw, (right,), n)
    return share


def classes():
    """Loss of logits (B, K) against class numbers."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def largest(y, logits):
    """Right if the class has the largest output."""
    return ops.cast(ops.equal(ops.argmax(logits, axis=-1), ops.cast(ops.reshape(y, (-1,)), "int32")), "float32")


def within(tolerance):
    """Right if every output, a probability, is within the tolerance: Hochreiter & Schmidhuber's criterion."""

    def right(y, logits):
        p = ops.softmax(logits)
        error = ops.abs(p - ops.one_hot(ops.cast(ops.reshape(y, (-1,)), "int32"), p.shape[-1], dtype=p.dtype))
        return ops.cast(ops.max(error, axis=-1) < tolerance, "float32")

    return right


def next_symbols(y, logits):
    """Loss of logits (B, T, D) against the symbols that may come next; a step with none of them is padding."""
    valid = ops.max(y, axis=-1)
    of_step = ops.mean(ops.binary_crossentropy(y, logits, from_logits=True), axis=-1)
    return ops.sum(of_step * valid, axis=-1) / ops.sum(valid, axis=-1)


def padded(task, multiple=32):
    """x and y with T rounded up, so that few different lengths are traced."""
    behind = -task.x.shape[1] % multiple
    return tuple(np.pad(a, ((0, 0), (0, behind), *[(0, 0)] * (a.ndim - 2))) for a in task)
