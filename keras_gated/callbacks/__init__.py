"""Callbacks for model.fit that write what was measured to TensorBoard."""

from keras_gated.callbacks.gate_activity import GateActivity
from keras_gated.callbacks.gradient_flow import GradientFlow
from keras_gated.callbacks.gradient_norms import GradientNorms

__all__ = ["GateActivity", "GradientFlow", "GradientNorms"]
