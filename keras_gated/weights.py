"""Weights to and from keras.layers and torch.nn.

Hidden here: how each library orders, splits and signs what are the same equations.

- Keras and PyTorch have the update gate of a GRU on the other side, h = z ⊙ h₋ + (1 - z) ⊙ h̃.  As
  1 - σ(a) = σ(-a), the z block of kernel, recurrent kernel and bias is negated.
- PyTorch stores transposed matrices, orders a GRU r z h, and has two biases everywhere.  Where the equations only
  see their sum, they are added up on the way in, and the second is 0 on the way out.
"""

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np
from numpy.typing import ArrayLike

from keras_gated.cells.gru import GRU
from keras_gated.cells.lstm import LSTM
from keras_gated.cells.simple_rnn import SimpleRNN

KERAS = {SimpleRNN: keras.layers.SimpleRNN, LSTM: keras.layers.LSTM, GRU: keras.layers.GRU}
TORCH_ARRAYS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
TORCH_GATES = {SimpleRNN: [0], LSTM: [0, 1, 2, 3], GRU: [1, 0, 2]}  # our gate k is block TORCH_GATES[k] of PyTorch


def to_keras(layer: SimpleRNN | LSTM | GRU) -> keras.layers.SimpleRNN | keras.layers.LSTM | keras.layers.GRU:
    """The layer of keras.layers that computes the same, weights included.

    Args:
        layer: our SimpleRNN, LSTM or GRU.

    Raises:
        ValueError: for another layer, and for one without weights.
    """
    kind = _kind(layer, "to_keras", KERAS)
    config = layer.get_config()
    if kind is LSTM:
        config["unit_forget_bias"] = config.pop("forget_bias") == 1
    return _carried_over(layer, KERAS[kind].from_config(config))


def from_keras(layer: keras.layers.SimpleRNN | keras.layers.LSTM | keras.layers.GRU) -> SimpleRNN | LSTM | GRU:
    """Our layer that computes the same as a layer of keras.layers, weights included.

    Args:
        layer: keras.layers.SimpleRNN, LSTM or GRU.

    Raises:
        ValueError: for another layer, for one without weights, and for activations that our equations do not have.
    """
    kinds = {theirs: ours for ours, theirs in KERAS.items()}
    kind = kinds[_kind(layer, "from_keras", kinds)]
    config = {**layer.get_config(), "seed": layer.cell.seed}  # keras.layers.SimpleRNN leaves the seed out
    if kind is not SimpleRNN:
        activations = config.pop("activation"), config.pop("recurrent_activation")
        if activations != ("tanh", "sigmoid"):
            raise ValueError(
                f"from_keras expects {kind.__name__} with activation 'tanh' and recurrent_activation 'sigmoid', "
                f"received {activations}. Only keras.layers has others."
            )
    if kind is LSTM:
        config["forget_bias"] = 1.0 if config.pop("unit_forget_bias") else None
    return _carried_over(layer, kind.from_config(config))


def from_torch(
    state_dict: Mapping[str, ArrayLike],
    layer: SimpleRNN | LSTM | GRU,
    index: int = 0,
    reverse: bool = False,
    prefix: str = "",
) -> SimpleRNN | LSTM | GRU:
    """Loads one layer of torch.nn.RNN, LSTM or GRU into a layer of ours.

    Args:
        state_dict: of the module, or of a model that holds it: name to tensor or array.  PyTorch is not needed.
        layer: our SimpleRNN (of the same activation), LSTM or GRU(reset_after=True); built or not.
        index: which of the module's layers, from 0.
        reverse: whether its backward direction; give that to a layer with go_backwards=True.
        prefix: what stands before the names, such as "encoder.".

    Returns:
        The layer.

    Raises:
        ValueError: for a missing name, for shapes that do not fit, and for the reset gate before the product.
    """
    kind = _torch_kind(layer, "from_torch", built=False)
    names = _torch_names(layer, index, reverse, prefix)
    there = [name for name in state_dict if name in _torch_names(layer, index, reverse, prefix, TORCH_ARRAYS)]
    if sorted(there) != sorted(names):
        raise ValueError(
            f"from_torch expects {', '.join(names)} for {kind.__name__} {layer.name!r}, and received of these and "
            f"the like {', '.join(there) or 'none'}; the state dict holds {', '.join(state_dict)}. Check index, "
            "reverse, prefix and use_bias; an LSTM with proj_size has no counterpart."
        )
    W, U, *biases = (_from_blocks(np.asarray(state_dict[name]), kind) for name in names)
    if biases and not layer.cell.equations.recurrent_bias:
        biases = [biases[0] + biases[1]]
    elif biases:
        biases = [np.stack(biases)]
    if not layer.built:
        layer.build((None, None, W.shape[0]))
    expected, received = ([tuple(w.shape) for w in ws] for ws in (layer.weights, (W, U, *biases)))
    if expected != received:
        raise ValueError(
            f"from_torch expects weights of the shapes {expected} for {kind.__name__} {layer.name!r}, received "
            f"{received}. Units and features must be those of the module."
        )
    layer.set_weights([W, U, *biases])
    return layer


def to_torch(
    layer: SimpleRNN | LSTM | GRU, index: int = 0, reverse: bool = False, prefix: str = ""
) -> dict[str, np.ndarray]:
    """The state dict of torch.nn.RNN, LSTM or GRU with the weights of our layer.

    Args:
        layer: our SimpleRNN, LSTM or GRU(reset_after=True), built.
        index, reverse, prefix: as in `from_torch`.

    Returns:
        A dict of arrays; `{name: torch.from_numpy(a) for name, a in ...}` makes tensors of them.

    Raises:
        ValueError: for a layer that is not built, and for the reset gate before the product.
    """
    kind = _torch_kind(layer, "to_torch", built=True)
    W, U, *bias = layer.get_weights()
    biases = [row for b in bias for row in (b if b.ndim == 2 else (b, np.zeros_like(b)))]
    arrays = (_to_blocks(a, kind) for a in (W, U, *biases))
    return dict(zip(_torch_names(layer, index, reverse, prefix), arrays, strict=True))


def _kind(layer, function, kinds, built=True):
    if type(layer) not in kinds:
        names = ", ".join(f"{kind.__module__.split('.')[0]}'s {kind.__name__}" for kind in kinds)
        raise ValueError(f"{function} expects {names}, received {type(layer).__module__}.{type(layer).__name__}.")
    if built and not layer.built:
        raise ValueError(f"{function} expects a layer that has weights, received {layer.name!r}. Call it once before.")
    return type(layer)


def _torch_kind(layer, function, built):
    kind = _kind(layer, function, KERAS, built)
    if kind is GRU and not layer.cell.reset_after:
        raise ValueError(
            f"{function} expects GRU(reset_after=True), received the chapter's GRU: PyTorch has no reset gate before "
            "the product. The two are different functions, and no weights make them equal."
        )
    return kind


def _carried_over(source, target):
    kernel, *_ = weights = source.get_weights()
    target.build((None, None, kernel.shape[0]))
    negated = isinstance(source, (GRU, keras.layers.GRU))
    target.set_weights([_z_negated(w) if negated else w for w in weights])
    return target


def _z_negated(w):
    z, r, h = np.split(w, 3, axis=-1)
    return np.concatenate([-z, r, h], axis=-1)


def _from_blocks(a, kind):
    """(kN, ·) of PyTorch, or a bias (kN,), -> (·, kN) of ours."""
    blocks = np.split(a.T, len(TORCH_GATES[kind]), axis=-1)
    a = np.concatenate([blocks[k] for k in TORCH_GATES[kind]], axis=-1)
    return _z_negated(a) if kind is GRU else a


def _to_blocks(a, kind):
    """(·, kN) of ours, or a bias (kN,), -> (kN, ·) of PyTorch.  The order of gates is its own inverse."""
    blocks = np.split(_z_negated(a) if kind is GRU else a, len(TORCH_GATES[kind]), axis=-1)
    return np.ascontiguousarray(np.concatenate([blocks[k] for k in TORCH_GATES[kind]], axis=-1).T)


def _torch_names(layer, index, reverse, prefix, arrays=None):
    arrays = arrays or (TORCH_ARRAYS[:4] if layer.cell.use_bias else TORCH_ARRAYS[:2])
    return [f"{prefix}{array}_l{index}{'_reverse' if reverse else ''}" for array in arrays]
