"""What is measured, in a process of its own: `python -m benchmarks.measure CALLS`.

CALLS is a JSON list of [name of a measurement, {arguments}].  On stdout a line {"result": ...} follows for each, and
between them lines {"note": ...} say how far it is.
"""

import contextlib
import gc
import json
import os
import pathlib
import resource
import signal
import sys
import time
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
import torch

import keras_gated as kg
from benchmarks.contenders import Problem, contenders

TOLERANCE = 1e-4  # of the largest value of an array, float32
PATIENCE = 240  # seconds of processor time until a contender that is still compiling is given up


def note(text):
    print(json.dumps({"note": text}), flush=True)


def steps(cell, shape, rounds, seconds, only=None, modes=("train", "infer")):
    """Training step and inference of the contenders, interleaved.

    Args:
        cell, shape: of the `Problem`.
        rounds: how often each is timed.
        seconds: how long one timing lasts at least: short steps are repeated.
        only: names of contenders; all of them without it.
        modes: which of the two.

    Returns:
        {"train" | "infer": {contender: {"ms": [one per round], "error": e} or {"reason": why not}}}
    """
    problem = Problem(cell, shape)
    ready, results = {}, {mode: {} for mode in modes}
    for name, make in contenders(problem).items():
        if only is None or name in only:
            note(f"{name}: first call")
            contender, outcome = _prove(make, ready.get("ours"))
            if contender is not None:
                ready[name] = contender
            for of_mode in results.values():
                of_mode[name] = dict(outcome)
    for mode, of_mode in results.items():
        note(f"timing {mode}")
        calls = {name: getattr(contender, mode) for name, (contender, _) in ready.items()}
        for name, ms in interleaved(calls, rounds, seconds).items():
            of_mode[name]["ms"] = ms
    return results


def _prove(make, ours):
    """((contender, its arrays), {"error": largest deviation from ours}), or (None, {"reason": ...})."""
    try:
        with _limited(PATIENCE):
            contender = make()
            h, gradients = contender.infer(), contender.train()
    except Exception as failure:
        if ours is None:
            raise
        return None, {"reason": f"{type(failure).__name__}: {str(failure).splitlines()[0][:120]}"}
    if contender.trained is None:
        return (contender, None), {}
    arrays = contender.inferred(h) + contender.trained(gradients)
    error = max(_deviation(a, b) for a, b in zip(arrays, arrays if ours is None else ours[1], strict=True))
    if not error <= TOLERANCE:
        return None, {"reason": f"computes other numbers (relative deviation {error:.1e})"}
    return (contender, arrays), {"error": error}


def _deviation(a, b):
    return float(np.abs(a - b).max() / np.abs(b).max()) if np.isfinite(a).all() else float("inf")


@contextlib.contextmanager
def _limited(seconds):
    def stop(*_):
        raise TimeoutError(f"not ready after {seconds} s of processor time")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def interleaved(calls, rounds, seconds):
    """{name: ms of a call, one per round}: all of them one after another in each round, from another first one."""
    suspended = []  # a round in which the process was stopped for a while is run again
    signal.signal(signal.SIGCONT, lambda *_: suspended.append(True))
    repeats = {name: max(1, round(seconds / _seconds_of(call))) for name, call in calls.items()}
    ms = {name: [] for name in calls}
    while len(next(iter(ms.values()))) < rounds:
        suspended.clear()
        times = {name: _ms_of(calls[name], repeats[name]) for name in _in_turn(calls, ms)}
        for name in [] if suspended else calls:
            ms[name].append(round(times[name], 4))
    return ms


def _in_turn(calls, ms):
    names = list(calls)
    turn = len(ms[names[0]]) % len(names)
    return names[turn:] + names[:turn]


def _ms_of(call, repeats):
    time.sleep(0.005)  # threads of the library before go to sleep
    if repeats > 1:
        call()  # and the caches fill
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - started) / repeats * 1e3


def _seconds_of(call):
    call()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


# Epochs of model.fit.


def _model(layer, features, masked, jit=False):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((None, features)), *([keras.layers.Masking()] if masked else []), layer]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(1e-3), "mse", jit_compile=True if jit else "auto")
    return model


def _layers(cell, features, units):
    """{name: (layer, jit)} with equal weights, which return the last output."""
    ours = Problem(cell, (1, 1, features, units)).layer
    ours = type(ours).from_config({**ours.get_config(), "return_sequences": False})
    ours.build((None, None, features))
    theirs = [kg.weights.to_keras(ours) for _ in range(2)]
    return {"ours": (ours, False), "keras": (theirs[0], False), "keras, jit": (theirs[1], True)}


def masked_epoch(cell, shape, batches, rounds):
    """An epoch of model.fit over sequences of random lengths, padded to T and masked."""
    B, T, D, N = shape
    rng = np.random.default_rng(0)
    x = rng.normal(size=(B * batches, T, D)).astype("float32")
    lengths = rng.integers(T // 10, T + 1, size=len(x))
    x[np.arange(T) >= lengths[:, None]] = 0
    y = rng.normal(size=(len(x), 1)).astype("float32")
    losses, calls = {}, {}
    for name, (layer, jit) in _layers(cell, D, N).items():
        note(f"{name}: first epoch")
        model = _model(layer, D, masked=True, jit=jit)

        def epoch(model=model):
            return model.fit(x, y, batch_size=B, shuffle=False, verbose=0).history["loss"][0]

        losses[name], calls[name] = epoch(), epoch
    note("timing")
    ms = interleaved(calls, rounds, seconds=0)
    errors = {name: abs(loss / losses["ours"] - 1) for name, loss in losses.items()}
    if max(errors.values()) > 10 * TOLERANCE:
        raise ValueError(f"The losses differ: {losses}.")
    return {name: {"ms": ms[name], "error": errors[name]} for name in calls}


def lengths_epoch(cell, contender, shape, lengths, last_batch):
    """The first epoch of model.fit over batches of as many lengths, compilation included; the last batch is short."""
    B, _, D, N = shape
    rng = np.random.default_rng(0)
    sizes = [(B, T) for T in rng.permutation(lengths)] + [(last_batch, int(max(lengths)))]
    batches = [(rng.normal(size=(*size, D)).astype("float32"), np.ones((size[0], 1), "float32")) for size in sizes]
    signature = tf.TensorSpec((None, None, D)), tf.TensorSpec((None, 1))
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    layer, jit = _layers(cell, D, N)[contender]
    model = _model(layer, D, masked=False, jit=jit)
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        loss = model.fit(data, verbose=0).history["loss"][0]
        seconds.append(time.perf_counter() - started)
    count = kg.compilations() if contender == "ours" and "compilations" in kg.__all__ else None
    return {"first_s": seconds[0], "second_s": seconds[1], "loss": loss, "compilations": count}


# One contender in a fresh process.


def first_call(cell, contender, shape):
    """Seconds of the first training step, tracing and compiling included, and ms of the ones after it."""
    problem = Problem(cell, shape)
    made = contenders(problem)[contender]()
    started = time.perf_counter()
    made.train()
    first = time.perf_counter() - started
    return {"first_s": first, "ms": [_seconds_of(made.train) * 1e3 for _ in range(5)]}


def memory(cell, contender, shape):
    """MiB that training steps need at most beyond data and weights: with the first call, and from then on."""
    problem = Problem(cell, shape)
    made = contenders(problem)[contender]()
    gc.collect()
    before = _resident("VmRSS")
    made.train()
    with_first = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    for _ in range(3):
        made.train()
    return {"with_first_MiB": with_first, "steady_MiB": _resident("VmHWM") - before}


def _resident(name):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) / 1024


def main():
    warnings.filterwarnings("ignore", message="TF32 acceleration")  # said each time oneDNN is switched
    threads = int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))
    torch.set_num_threads(threads)
    if "TF_THREADS" in os.environ:
        tf.config.threading.set_intra_op_parallelism_threads(int(os.environ["TF_THREADS"]))
        tf.config.threading.set_inter_op_parallelism_threads(int(os.environ["TF_THREADS"]))
    measurements = {f.__name__: f for f in (steps, masked_epoch, lengths_epoch, first_call, memory)}
    for name, arguments in json.loads(sys.argv[1]):
        print(json.dumps({"result": measurements[name](**arguments)}), flush=True)


if __name__ == "__main__":
    main()
