import gc
import importlib
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest

SEED = 20

# Tests spend most of their time on making graphs: their many objects are looked through less often for what is left
# over, and Keras and TensorFlow do without the frames that shorten tracebacks.  Each saves a tenth.
gc.set_threshold(100_000, 20, 20)
keras.config.disable_traceback_filtering()
ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
if ON_TENSORFLOW:
    tensorflow = importlib.import_module("tensorflow")
    tensorflow.debugging.disable_traceback_filtering()
    # Two logical devices on the one processor, for `replicas`: they can be chosen only before the first operation.
    (processor,) = tensorflow.config.list_physical_devices("CPU")
    tensorflow.config.set_logical_device_configuration(
        processor, [tensorflow.config.LogicalDeviceConfiguration() for _ in range(2)]
    )


@pytest.fixture
def rng():
    keras.utils.set_random_seed(SEED)
    return np.random.default_rng(SEED)


@pytest.fixture
def tf():
    """TensorFlow, for a test of what there is on that backend alone."""
    if not ON_TENSORFLOW:
        pytest.skip("of the TensorFlow backend")
    return tensorflow


@pytest.fixture
def uncompiled(request):
    """Where numbers are compared: day by day every tf.function runs operation by operation, and compiled with --all."""
    daily = ON_TENSORFLOW and request.config.option.markexpr == "not slow"
    if daily:
        tensorflow.config.run_functions_eagerly(True)
    yield
    if daily:
        tensorflow.config.run_functions_eagerly(False)


@pytest.fixture(scope="session")
def replicas():
    """The MirroredStrategy over both logical devices: one a session, as the collectives of two would meet."""
    if not ON_TENSORFLOW:
        pytest.skip("of the TensorFlow backend")
    return tensorflow.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(autouse=True, scope="module")
def memory_is_given_back():
    """After each module: what Keras remembers of its layers holds models, their graphs and their programs."""
    yield
    keras.backend.clear_session()
    gc.collect()


def pytest_collection_modifyitems(items):
    """The slow ones first, or one of them may run alone when all others are done."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
