"""What a process of the pool does: one run after another, on one core."""

import gc
import importlib
import math
import os
import time

progress = None  # where runs tell how far they are


def start(queue):
    """On one core each, two processes finish about twice as many small steps as one process on two."""
    global progress
    progress = queue
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.get_logger().setLevel("ERROR")  # that sequences of several lengths are traced several times


def environment():
    """Is inherited by the processes, which must see it before they load TensorFlow."""
    os.environ.update({"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"})
    os.environ["KERAS_BACKEND"] = "tensorflow"


def perform(index, run):
    """(the result of a run, seconds of processor time)."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(run.seed)
    family = importlib.import_module(f"reproduce.{run.family}")
    started = time.process_time()
    result = family.train(run.setting, np.random.default_rng(run.seed), lambda done: progress.put((index, done)))
    seconds = time.process_time() - started
    keras.backend.clear_session()
    gc.collect()
    return plain(result), seconds


def plain(value):
    """As JSON has it: numbers that are not finite become None."""
    if isinstance(value, dict):
        return {key: plain(of_key) for key, of_key in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
