"""A process that holds the contenders of one library: `python -m benchmark.worker tensorflow|torch`.

Two thread pools in one process disturb each other, so each library has its own.  Commands come as lines of JSON on
stdin, [name, {arguments}]; answers go to stdout, {"result": ...}, after any number of {"note": ...} on the way.
"""

import contextlib
import gc
import json
import os
import pathlib
import signal
import sys
import time
import warnings

import numpy as np
from benchmark.problem import Problem
from benchmark.sequences import Sequences

TOLERANCE = 1e-4  # of the largest value of an array, float32
TINY = (8, 10, 8, 16)  # B, T, D, N
PATIENCE = 240  # seconds of processor time until a contender that is still compiling is given up
LIBRARY = sys.argv[1]
calls = {}  # (contender, mode): what is timed
lasts = {}  # (contender, mode): seconds of one call
suspended = []  # filled when the process was stopped for a while


def note(text):
    print(json.dumps({"note": text}), flush=True)


def steps(cell, shape, reference, only=None):
    """Prepares the contenders: each is run once, and its numbers are compared with ours, which are kept in a file.

    Returns:
        {contender: {"error": largest deviation from ours} or {"reason": why it is not timed}}
    """
    calls.clear()
    lasts.clear()
    outcomes, problem = {}, Problem(cell, shape)
    for name, make in _contenders(problem).items():
        if only is None or name in only:
            note(f"{name}: first call")
            try:
                with _limited(PATIENCE):
                    contender = make()
                    h, gradients = contender.infer(), contender.train()
            except Exception as failure:
                if name == "ours":
                    raise
                outcomes[name] = {"reason": f"{type(failure).__name__}: {str(failure).splitlines()[0][:120]}"}
                continue
            outcomes[name] = {}
            if contender.arrays is not None:
                outcomes[name] = _compared(name, contender.arrays(h, gradients), reference)
            if "reason" not in outcomes[name]:
                calls[name, "train"], calls[name, "infer"] = contender.train, contender.infer
    return outcomes


def writers(cell, shape, reference):
    """Prepares the encoder-decoders of `cell`, LSTM; the loss of two training steps and what is written is compared."""
    calls.clear()
    lasts.clear()
    outcomes = {}
    for name, make in _writers(Sequences(shape)).items():
        note(f"{name}: first call")
        writer = make()
        arrays = [np.array([writer.train(), writer.train()], float), writer.greedy(), writer.beam()]
        outcomes[name] = _compared(name, [np.asarray(a) for a in arrays], reference)
        if "reason" not in outcomes[name]:
            calls.update({(name, mode): call for mode, call in writer._asdict().items()})
    return outcomes


def _writers(problem):
    if LIBRARY == "torch":
        from benchmark.writers_with_torch import writers
    else:
        from benchmark.writers_with_tensorflow import writers
    return writers(problem)


def _contenders(problem):
    if LIBRARY == "torch":
        from benchmark.with_torch import contenders
    else:
        from benchmark.with_tensorflow import contenders
    return contenders(problem)


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


def _compared(name, arrays, reference):
    if name == "ours":
        np.savez(reference, *arrays)
    with np.load(reference) as ours:
        error = max(_deviation(a, ours[key]) for key, a in zip(ours.files, arrays, strict=True))
    return {"error": error} if error <= TOLERANCE else {"reason": f"other numbers: relative deviation {error:.1e}"}


def _deviation(a, b):
    return float(np.abs(a - b).max() / np.abs(b).max()) if np.isfinite(a).all() else float("inf")


def masked_epoch(cell, shape, batches):
    """Prepares the contenders: each has its first epoch, whose losses are compared.  Returns as `steps`."""
    from benchmark.with_tensorflow import masked_epochs

    return _epochs(masked_epochs(cell, shape, batches), "ours", 10 * TOLERANCE)


def watched_epoch(cell, contender, shape):
    """Likewise without and with our callbacks, which change no number."""
    from benchmark.with_tensorflow import watched_epochs

    return _epochs(watched_epochs(cell, contender, shape), "no callback", 0)


def _epochs(made, first, tolerance):
    calls.clear()
    lasts.clear()
    losses = {}
    for name, epoch in made.items():
        note(f"{name}: first epoch")
        losses[name], calls[name, "epoch"] = epoch(), epoch
    errors = {name: abs(loss / losses[first] - 1) for name, loss in losses.items()}
    if max(errors.values()) > tolerance:
        raise ValueError(f"the losses differ: {losses}")
    return {name: {"error": error} for name, error in errors.items()}


def timing(name, mode, seconds):
    """ms of one call, in a row of calls that lasts as long, or None where the process was suspended meanwhile."""
    call = calls[name, mode]
    if (name, mode) not in lasts:
        lasts[name, mode] = _seconds_of(call)
    repeats = max(1, round(seconds / lasts[name, mode]))
    suspended.clear()
    time.sleep(0.005)  # the threads of the contender before go to sleep
    if lasts[name, mode] < 1:
        call()  # and ours wake up; the cache is filled
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    ms = (time.perf_counter() - started) / repeats * 1e3
    return None if suspended else round(ms, 4)


def _seconds_of(call):
    call()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


# For a fresh process each.


def lengths_epoch(cell, contender, shape, lengths, last_batch):
    """Seconds of the first two epochs of model.fit over batches of many lengths, compilation included."""
    from benchmark.with_tensorflow import batches_of_many_lengths, layers, model

    from keras_gated.engine import sweep

    data = batches_of_many_lengths(shape, lengths, last_batch)
    layer, jit = layers(cell, shape[2], shape[3])[contender]
    made, seconds = model(layer, shape[2], masked=False, jit=jit), []
    for _ in range(2):
        started = time.perf_counter()
        loss = made.fit(data, verbose=0).history["loss"][0]
        seconds.append(time.perf_counter() - started)
    programs = sweep.programs() if contender == "ours" else None
    return {"first_s": seconds[0], "second_s": seconds[1], "loss": loss, "programs": programs}


def first_call(cell, contender, shape):
    """Seconds of the first training step, tracing and compiling included, and ms of a later one."""
    made = _contenders(Problem(cell, shape))[contender]()
    started = time.perf_counter()
    made.train()
    first = time.perf_counter() - started
    return {"first_s": first, "later_ms": _seconds_of(made.train) * 1e3}


def memory(cell, contender, shape):
    """MiB that the first step of a tiny layer leaves, and what steps of this shape need at most on top of that, beyond
    data and weights: with the first call, and from then on."""
    tiny = _contenders(Problem(cell, TINY))[contender]()
    start = _resident("VmRSS")
    tiny.train()
    left = _resident("VmRSS") - start
    made = _contenders(Problem(cell, shape))[contender]()
    gc.collect()
    before, peaks = _resident("VmRSS"), []
    for steps in (1, 3):
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        for _ in range(steps):
            made.train()
        peaks.append(_resident("VmHWM") - before)
    return {"left_MiB": left, "with_first_MiB": peaks[0], "steady_MiB": peaks[1]}


def _resident(name):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) / 1024


def _set_threads():
    if LIBRARY == "torch":
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
        warnings.filterwarnings("ignore", message="TF32 acceleration")  # said each time oneDNN is switched
    elif "TF_THREADS" in os.environ:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(int(os.environ["TF_THREADS"]))
        tf.config.threading.set_inter_op_parallelism_threads(int(os.environ["TF_THREADS"]))


def main():
    _set_threads()
    signal.signal(signal.SIGCONT, lambda *_: suspended.append(True))
    known = steps, masked_epoch, watched_epoch, writers, timing, lengths_epoch, first_call, memory
    commands = {f.__name__: f for f in known}
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps({"result": commands[name](**arguments)}), flush=True)


if __name__ == "__main__":
    main()
