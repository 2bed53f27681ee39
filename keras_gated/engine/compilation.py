"""Which graphs are traced and compiled, and how often (TensorFlow).

Hides two caches, both bounded: a graph is traced once for each set of shapes and settings, a compiled program is made
once for each.  What a call computes does not depend on them.  TensorFlow itself keeps the machine code of a program for
as long as the process lives.
"""

import functools

import tensorflow as tf

from keras_gated.keras_internals import in_compiled_program

GRAPHS = 256  # of each kind that are kept; the least recently used one is dropped


def traced_once(function):
    """function(static, *tensors) as a graph that is traced once for tensors of these shapes.  Tracing takes nearly as
    long as compiling, and Keras traces a step of training twice.  Inside an outer jit it is inlined, since a batch is
    divided differently there."""

    @functools.wraps(function)
    def run(static, *tensors):
        if in_compiled_program():
            return function(static, *tensors)
        return _graph(function, static, _shapes(tensors))(*tensors)

    return run


def compiled(function, static, *tensors):
    """function(static, *tensors) as a program of XLA, of the same name inside and outside of an outer jit."""
    return _program(function, static, _shapes(tensors))(*tensors)


def programs():
    """How many compiled programs are kept in this process.  XLA compiles each once for every number of rows of a shard,
    and where T is known when the graph is made for every T; where it is unknown, one program serves all."""
    return _program.cache_info().currsize


def forget():
    """Empties both caches: for tests that change the engine's choices."""
    _graph.cache_clear()
    _program.cache_clear()


def _shapes(tensors):
    """Static shapes, so that what is known of them stays known; and the structure, which None changes."""
    return tuple(None if a is None else a.shape for a in tf.nest.flatten(tensors))


@functools.lru_cache(maxsize=GRAPHS)
def _graph(function, static, shapes):
    return tf.function(functools.partial(function, static), autograph=False)


@functools.lru_cache(maxsize=GRAPHS)
def _program(function, static, shapes):
    def opaque(*tensors):  # otherwise a tape of higher order would make TensorFlow differentiate the loops
        return tf.nest.map_structure(tf.stop_gradient, function(static, *tensors))

    return tf.function(opaque, jit_compile=True, autograph=False)
