"""Every private name of Keras and TensorFlow in use, and what of this package breaks without it.

Private is what Keras and TensorFlow do not export, and what their objects hold without documenting it.  Functions and
classes are imported here and nowhere else; attributes are listed here and used where they are needed.
tests/package/test_private_names.py holds that both lists are complete, and that the installed versions have every name.

Hidden here: where the names lie, and that TensorFlow is imported only by whoever runs on it.
"""

import contextlib
import importlib

import keras

# Imported, by module and name.
IMPORTS = {
    "keras.src.backend.common.global_state": "Keras counts the names of layers and operations in it. Without it "
    "checking a cell's equations changes the names that Keras gives to what a user makes later.",
    "keras.src.backend.rnn": "This is Keras's loop over time. Without it no layer runs on JAX or PyTorch, with "
    "unroll=True or under a second derivative, and GradientFlow sees no layer of Keras.",
    "keras.src.backend.get_keras_mask": "It reads the mask that a tensor carries. Without it attention drops the mask "
    "of its queries, and the loss and the metrics of Seq2Seq do not see the mask of the logits.",
    "keras.src.layers.rnn.dropout_rnn_cell.DropoutRNNCell": "By this class keras.layers.RNN knows a cell with dropout. "
    "Without it our cells have no dropout masks, and Keras does not renew them for each batch.",
    "tensorflow.python.ops.control_flow_util.GraphOrParentsInXlaContext": "It tells whether a graph is being made for "
    "XLA. Without it our layers cannot be part of a model with jit_compile=True.",
    "tensorflow.python.eager.forwardprop_util.pack_tangents": "It tells whether a ForwardAccumulator is at work. "
    "Without it forward-mode derivatives of our layers raise an error.",
}

# Read, called, set or wrapped, by the class whose objects have it.
ATTRIBUTES = {
    "keras.layers.Layer._layers": "It holds the layers inside a layer. Without it no diagnostic and no callback finds "
    "the recurrent layers of a model.",
    "keras.layers.RNN.inner_loop": "Keras runs a recurrent layer through it. Without it our layers run as "
    "keras.layers.RNN of their cells, slowly, and no diagnostic sees inside a recurrent layer.",
    "keras.layers.LSTM.use_cudnn": "Bidirectional runs past both inner loops unless it is False. Without it "
    "diagnostics and GradientFlow do not see the LSTM layers of Keras in a Bidirectional.",
    "keras.layers.GRU.use_cudnn": "Bidirectional runs past both inner loops unless it is False. Without it "
    "diagnostics and GradientFlow do not see the GRU layers of Keras in a Bidirectional.",
    "keras.layers.LSTMCell.activation": "A cell calls it on the candidate and then on c, which is how c is found. "
    "Without it GradientFlow and time_step_norms have no gradient of c for the LSTM layers of Keras.",
    "keras.Model._symbolic_build": "Keras builds loss and metrics through it. Without it Seq2Seq.fit builds them with "
    "(source, target) where they expect labels.",
    "keras.Model.make_train_function": "A tap has the training step traced by it. Without it GradientNorms and "
    "GradientFlow log nothing.",
    "keras.Model.train_function": "A tap puts itself in the place of this function. Without it GradientNorms and "
    "GradientFlow log nothing.",
    "keras.Model.distribute_strategy": "It tells how many replicas there are. Without it GradientNorms and "
    "GradientFlow log nothing.",
    "keras.Model.steps_per_execution": "It tells how many steps the device makes unseen. Without it GradientNorms and "
    "GradientFlow log nothing.",
    "keras.optimizers.Optimizer._clip_gradients": "Gradients pass here on their way to the weights. Without it "
    "GradientNorms has no clipped norms, and ClipNorm fails where gradients are accumulated.",
    "keras.optimizers.Optimizer._all_reduce_sum_gradients": "Keras sums the gradients of all replicas here. Without it "
    "GradientNorms has no clipped norms on several replicas, and ClipNorm fails there.",
    "keras.optimizers.Optimizer._learning_rate": "It holds a number, a schedule or a function. Without it "
    "GradientNorms does not log the learning rate.",
    "keras.optimizers.Optimizer._trainable_variables": "It holds the variables of an optimizer that is built. Without "
    "it ClipNorm and GradientNorms fail where apply is called with gradients alone.",
    "keras.optimizers.Optimizer._get_variable_index": "It tells which accumulated gradient belongs to a variable. "
    "Without it ClipNorm fails where gradients are accumulated.",
    "keras.optimizers.Optimizer._accumulated_gradients": "It holds the sums of gradients so far. Without it ClipNorm "
    "fails where gradients are accumulated.",
    "keras.optimizers.Optimizer._iterations": "Keras's apply_gradients returns it. Without it a ClipNorm returns its "
    "own, which stays 0, where that of the wrapped optimizer is expected.",
    "keras.optimizers.Optimizer._model_variables_moving_average": "keras.callbacks.SwapEMAWeights reads it. Without it "
    "that callback does not work with ClipNorm.",
    "keras.optimizers.LossScaleOptimizer.dynamic_scale": "It holds what the loss is multiplied by. Without it "
    "GradientNorms and GradientFlow fail under mixed_float16.",
    "keras.Variable.overwrite_with_gradient": "It marks the scales of float8 layers, whose gradient is their new "
    "value. Without it ClipNorm clips these scales and GradientNorms counts them.",
}


def _imported(path):
    """What stands under a path of IMPORTS.

    Raises:
        ImportError: where it is missing, with what breaks.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"keras_gated expects {path}, received Keras {keras.__version__} without it or without its backend. "
            f"{IMPORTS[path]} Take a version that keras_gated was tested with: Keras 3.13 to 3.15, TensorFlow 2.21."
        ) from error


rnn_loop = _imported("keras.src.backend.rnn")
get_keras_mask = _imported("keras.src.backend.get_keras_mask")
DropoutRNNCell = _imported("keras.src.layers.rnn.dropout_rnn_cell.DropoutRNNCell")


def in_compiled_program():
    """Whether the graph that is being made is part of a program for XLA (TensorFlow backend)."""
    import tensorflow as tf

    in_xla = _imported("tensorflow.python.ops.control_flow_util.GraphOrParentsInXlaContext")
    return in_xla(tf.compat.v1.get_default_graph())


def in_forward_mode(tensors):
    """Whether a tf.autodiff.ForwardAccumulator is at work, which may watch these tensors (TensorFlow backend).

    Whoever uses tf.custom_gradient must know, as that cannot give what an accumulator needs.
    """
    import tensorflow as tf

    pack_tangents = _imported("tensorflow.python.eager.forwardprop_util.pack_tangents")
    return bool(pack_tangents([tf.convert_to_tensor(t) for t in tensors]).indices)


@contextlib.contextmanager
def names_unchanged():
    """What is made in this context does not count in the names that Keras gives to layers and operations."""
    state = _imported("keras.src.backend.common.global_state")
    before = state.get_global_attribute("object_name_uids")
    state.set_global_attribute("object_name_uids", None)
    try:
        yield
    finally:
        state.set_global_attribute("object_name_uids", before)
