"""Private names of Keras and TensorFlow."""

import contextlib

from keras.src.backend.common import global_state


@contextlib.contextmanager
def names_unchanged():
    """What is made in this context does not count in the names that Keras gives to layers and operations."""
    before = global_state.get_global_attribute("object_name_uids")
    global_state.set_global_attribute("object_name_uids", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("object_name_uids", before)
