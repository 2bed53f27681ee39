"""What a recurrent layer did on one sequence: the states it went through, and the Jacobian of every step.

Hidden here: where a model keeps its recurrent layers and what it feeds them, how Keras nests the states of a cell,
masks, and the order of processing.  Whoever measures sees arrays; any keras.layers.RNN will do.

All arrays are in the order of processing: step 0 of a layer with go_backwards, such as the backward half of a
Bidirectional, is the last of x.  Axes: B batch, T time, D features, S all states of the cell side by side.
"""

import contextlib
import functools
import inspect
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_gated.engine.loop import loop
from keras_gated.patching import replaced

JACOBIAN_NUMBERS = 1 << 24  # of the step Jacobians that are held at a time


class LayerInput(NamedTuple):
    """A layer and what it was called with, in the order that every measurement takes: `measure(*layer_input(...))`."""

    layer: keras.layers.RNN
    x: np.ndarray  # (B, T, D)
    mask: np.ndarray | None  # (B, T) bool, in the order of x
    initial_state: list[Any]  # as the layer takes it


class Trajectory(NamedTuple):
    """The states of a layer on x, in the order of processing."""

    x: np.ndarray  # (B, T, D), 0 where a step is masked
    states: np.ndarray  # (B, T + 1, S): the initial one in front
    valid: np.ndarray  # (B, T) bool: elsewhere the state stays as it was


def recurrent_layers(model: keras.layers.Layer) -> dict[str, keras.layers.RNN]:
    """All recurrent layers of a model, also those in submodels and in wrappers such as Bidirectional.

    Args:
        model: a Keras model, or any layer that holds others.

    Returns:
        {label: keras.layers.RNN}, in the order in which the model holds them.  A label is the names on the way
        from the model to the layer, "encoder/bidirectional/forward_lstm"; it is unique.
    """
    labels, found = {}, {}
    for path, layer in _inside(model, (), set()):
        if isinstance(layer, keras.layers.RNN):
            label = "/".join(path)
            labels[label] = labels.get(label, -1) + 1
            found[f"{label}_{labels[label]}" if labels[label] else label] = layer
    return found


def _inside(layer, path, seen):
    for inner in layer._layers:
        if id(inner) not in seen:
            seen.add(id(inner))
            yield (*path, inner.name), inner
            yield from _inside(inner, (*path, inner.name), seen)


def find(model: keras.layers.Layer, layer: keras.layers.RNN | str) -> keras.layers.RNN:
    """A recurrent layer of the model, given as an object, by its label, or by its name where only one has it.

    Raises:
        ValueError: where there is none or more than one such layer.
    """
    layers = recurrent_layers(model)
    named = [inner for label, inner in layers.items() if layer in (inner.name, label) or layer is inner]
    chosen = [layers[layer]] if isinstance(layer, str) and layer in layers else named
    if len(chosen) != 1:
        asked = repr(layer) if isinstance(layer, str) else f"{type(layer).__name__} {getattr(layer, 'name', '')!r}"
        raise ValueError(
            f"Expected one recurrent layer of the model {model.name!r}, received {asked}, which "
            f"{'several are called' if chosen else 'is none'}. It holds: {', '.join(layers) or 'no recurrent layer'}."
        )
    return chosen[0]


def layer_input(model: keras.Model, x: Any, layer: keras.layers.RNN | str) -> LayerInput:
    """What a recurrent layer receives when the model is called on x, dropout off.

    The model stays as it was, the states of stateful layers included.

    Args:
        model: a built Keras model.
        x: one batch of the model's inputs.
        layer: a keras.layers.RNN inside the model: the object, its label in `recurrent_layers`, or its name.

    Returns:
        `LayerInput`; of the first call, where the model calls the layer more than once.

    Raises:
        ValueError: where there is not exactly one such layer, or it is not called.
    """
    layer, calls = find(model, layer), []

    def note(inner_loop, sequences, initial_state, mask, training=False):
        calls.append((sequences, initial_state, mask))
        return inner_loop(sequences, initial_state, mask, training=training)

    with unchanged(model), tapped(layer, note):
        model(x, training=False)
    if not calls:
        raise ValueError(
            f"Expected the model {model.name!r} to call its layer {layer.name!r} on x; it did not. Choose another."
        )
    sequences, initial_state, mask = keras.tree.map_structure(_array, list(calls[0]))
    return LayerInput(layer, sequences, _rows(mask), initial_state)


@contextlib.contextmanager
def tapped(layer, around):
    """For a while, the layer's loop over time is around(loop, sequences, initial_state, mask, training)."""
    before = vars(layer).get("use_cudnn")
    with replaced(layer, "inner_loop", around):
        try:
            if before is not None:
                vars(layer)["use_cudnn"] = False  # or Bidirectional runs both halves past their loops
            yield
        finally:
            if before is not None:
                vars(layer)["use_cudnn"] = before


@contextlib.contextmanager
def unchanged(model):
    """Gives all that a call of the model may move its old value back: states, statistics, metrics."""
    states = [v for layer in recurrent_layers(model).values() for v in keras.tree.flatten(layer.states or [])]
    metrics = getattr(model, "metrics_variables", [])
    before = [(v, ops.convert_to_numpy(v)) for v in (*model.non_trainable_variables, *metrics, *states)]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def trajectory(layer, x, mask=None, initial_state=None):
    """Runs the layer's cell over x, dropout off.

    Args:
        layer: a keras.layers.RNN that has weights.
        x: (B, T, D).
        mask: (B, T), in the order of x; or None.
        initial_state: as the layer takes it; by default that which it would start from.

    Returns:
        `Trajectory`.

    Raises:
        ValueError: for another layer, for one without weights, and for x or mask of another shape.
    """
    x, mask = checked(layer, np.asarray(x), mask)
    x, states, valid = states_on(layer, x, None if mask.all() else mask, initial_state)
    return Trajectory(_array(x), _array(states), mask[:, ::-1] if layer.go_backwards else mask)


def states_on(layer, x, mask=None, initial_state=None):
    """`trajectory` of tensors, also while a graph is made: -> x, states, valid, which is None where mask is."""
    if mask is not None:
        mask = ops.cast(mask, "bool")
        x = ops.where(mask[..., None], x, 0)
    x = ops.cast(x, layer.cell.compute_dtype)
    if layer.go_backwards:
        x, mask = ops.flip(x, axis=1), None if mask is None else ops.flip(mask, axis=1)
    if initial_state is None:
        initial_state = layer.states if layer.stateful and layer.states else layer.get_initial_state(ops.shape(x)[0])
    first, step = side_by_side(initial_state), step_of(layer)

    def side_by_side_step(x_t, states):
        after = step(x_t, states[0])
        return after, [after]

    states, _ = loop(side_by_side_step, x, [first], mask, None, False, True)
    if mask is not None:
        started = ops.cumsum(ops.cast(mask, "int32"), axis=1) > 0  # before, the loop puts out 0
        states = ops.where(started[..., None], states, first[:, None])
    return x, ops.concatenate([first[:, None], states], axis=1), mask


def measuring(model, measure):
    """A function x -> {label: measure(layer, x, mask, initial_state)} of the layers that a model calls on x.

    measure takes and returns tensors, or None where a layer is not to be measured; their values come out as arrays.
    The model stays as it was.  On TensorFlow the function is compiled when it is first called.
    """
    layers = recurrent_layers(model)

    def run_model(x):
        results = {}

        def tap(label, inner_loop, sequences, initial_state, mask, training=False):
            results.setdefault(label, measure(layers[label], sequences, keras.tree.flatten(mask)[0], initial_state))
            return inner_loop(sequences, initial_state, mask, training=training)

        with contextlib.ExitStack() as stack:
            for label, layer in layers.items():
                stack.enter_context(tapped(layer, functools.partial(tap, label)))
            model(x, training=False)
        return results

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        run_model = tf.function(run_model, autograph=False, reduce_retracing=True)

    def measured(x):
        with unchanged(model):
            results = run_model(keras.tree.map_structure(ops.convert_to_tensor, x))
            return keras.tree.map_structure(_array, {k: v for k, v in results.items() if v is not None})

    return measured


def step_of(layer):
    """The layer's step as a function of arrays: x (R, D), all states before (R, S) -> all states after (R, S)."""
    cell = layer.cell
    options = {"training": False} if takes_training(cell) else {}
    structure = layer.get_initial_state(1)
    ends = np.cumsum([s.shape[-1] for s in keras.tree.flatten(structure)])[:-1]

    def step(x, states):
        parts = ops.split(states, [int(end) for end in ends], axis=-1) if len(ends) else [states]
        _, after = cell(x, keras.tree.pack_sequence_as(structure, parts), **options)
        return side_by_side(after)

    return step


def takes_training(cell):
    return isinstance(cell, keras.layers.Layer) and "training" in inspect.signature(cell.call).parameters


def side_by_side(states):
    return ops.concatenate([ops.convert_to_tensor(s) for s in keras.tree.flatten(states)], axis=-1)


def output_columns(layer):
    """Which of the S columns are h: the first state, in a stack of cells that of the uppermost."""
    sizes = [[s.shape[-1] for s in keras.tree.flatten(state)] for state in layer.get_initial_state(1)]
    stacked = isinstance(layer.cell, keras.layers.StackedRNNCells)
    begin = sum(map(sum, sizes[:-1])) if stacked else 0
    return slice(begin, begin + (sizes[-1] if stacked else sizes[0])[0])


def step_jacobians(layer, given):
    """The Jacobians of all steps of a `Trajectory`, some examples at a time (TensorFlow backend).

    Yields:
        rows of the batch (a slice), and J (rows, T, S, S): J[b, t, i, j] = ∂s_t[i] / ∂s_{t-1}[j], where
        s_{-1} is the initial state; the identity where a step is masked.
    """
    import tensorflow as tf

    step = step_of(layer)
    B, T, D = given.x.shape
    S = given.states.shape[-1]
    dtype = given.states.dtype

    @tf.function(input_signature=[tf.TensorSpec((None, D), given.x.dtype), tf.TensorSpec((None, S), dtype)])
    def jacobian(x, states):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(states)
            after = step(x, states)
        return tape.batch_jacobian(after, states)

    examples, steps = max(1, JACOBIAN_NUMBERS // (T * S * S)), max(1, JACOBIAN_NUMBERS // (4 * S * S))
    for begin in range(0, B, examples):
        rows = slice(begin, min(begin + examples, B))
        x, states = given.x[rows].reshape(-1, D), given.states[rows, :-1].reshape(-1, S)
        parts = [jacobian(x[i : i + steps], states[i : i + steps]) for i in range(0, len(x), steps)]
        J = np.concatenate([part.numpy() for part in parts]).reshape(-1, T, S, S)
        J[~given.valid[rows]] = np.eye(S)
        yield rows, J


def mean_of_valid(values, valid):
    """Over axis 0, of what is valid only; NaN where nothing is."""
    count = valid.sum(axis=0)
    total = np.where(valid, values, 0).sum(axis=0)
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)


def checked(layer, x, mask):
    if not isinstance(layer, keras.layers.RNN):
        raise ValueError(
            f"Expected a keras.layers.RNN, received {layer!r}. For a layer of a model, by name: "
            "measure(*keras_gated.gradients.layer_input(model, x, name))."
        )
    if not layer.built or not layer.cell.built:
        raise ValueError(
            f"Expected a layer that has weights, received {layer.name!r}. Call it, or its model, once before."
        )
    if x.ndim != 3 or x.shape[1] == 0 or len(x) == 0:
        raise ValueError(
            f"Expected x of shape (batch, time, features), the input of layer {layer.name!r}, received {x.shape}."
        )
    mask = np.ones(x.shape[:2], bool) if mask is None else _rows(np.asarray(mask)).astype(bool)
    if mask.shape != x.shape[:2]:
        raise ValueError(f"Expected a mask of shape {x.shape[:2]}, one value per time step, received {mask.shape}.")
    return x, mask


def _rows(mask):
    """(B, T), also from (B, T, 1) and from Keras's list of one."""
    mask = keras.tree.flatten(mask)[0]
    return mask[..., 0] if mask is not None and mask.ndim == 3 else mask


def _array(tensor):
    return None if tensor is None else ops.convert_to_numpy(tensor)
