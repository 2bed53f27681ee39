import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest

SEED = 20


@pytest.fixture
def rng():
    keras.utils.set_random_seed(SEED)
    return np.random.default_rng(SEED)
