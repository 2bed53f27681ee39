"""Measurements of the gradient's journey through time.

Every function takes arrays and returns arrays; nothing is written, printed or changed.  They measure any
keras.layers.RNN: ours, SimpleRNN / LSTM / GRU of Keras, RNN(cell), a half of a Bidirectional.

A layer is measured on its own input: `state_jacobian_norms(layer, x, mask)`.  For a layer inside a model,
`layer_input(model, x, layer)` finds that input, with its mask and initial state, where the layer is given as an
object or by name:

    state_jacobian_norms(*layer_input(model, x, "lstm"))

Steps are in the order of processing, but those of `time_step_norms` in the order of x.  Padded steps count in no
mean; where no example of the batch has a step, the result is NaN.  Axes: B batch, T time, N units, k gates.
"""

from keras_gated.gradients.diagnosis import Diagnosis, LayerDiagnosis, diagnose
from keras_gated.gradients.gates import GateStatistics, gate_activity, retention_time
from keras_gated.gradients.jacobians import (
    Spectrum,
    cell_state_jacobian,
    jacobian_bound,
    spectrum,
    state_jacobian_norms,
)
from keras_gated.gradients.loss_gradient import LossTerms, TimeStepNorms, loss_gradient_terms, time_step_norms
from keras_gated.gradients.trajectory import LayerInput, layer_input, recurrent_layers

__all__ = [
    "Diagnosis",
    "GateStatistics",
    "LayerDiagnosis",
    "LayerInput",
    "LossTerms",
    "Spectrum",
    "TimeStepNorms",
    "cell_state_jacobian",
    "diagnose",
    "gate_activity",
    "jacobian_bound",
    "layer_input",
    "loss_gradient_terms",
    "recurrent_layers",
    "retention_time",
    "spectrum",
    "state_jacobian_norms",
    "time_step_norms",
]
