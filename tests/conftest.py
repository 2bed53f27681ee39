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
if keras.backend.backend() == "tensorflow":
    importlib.import_module("tensorflow").debugging.disable_traceback_filtering()


@pytest.fixture
def rng():
    keras.utils.set_random_seed(SEED)
    return np.random.default_rng(SEED)


@pytest.fixture
def tf():
    """TensorFlow, for a test of what there is on that backend alone."""
    if keras.backend.backend() != "tensorflow":
        pytest.skip("of the TensorFlow backend")
    return importlib.import_module("tensorflow")


def pytest_collection_modifyitems(items):
    """The slow ones first, or one of them may run alone when all others are done."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
