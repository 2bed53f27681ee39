"""ClipNorm: gradient clipping on the optimizer (eq. rnn-clip).

g is the gradient of all variables together or, with per_variable=True, that of each one (Algorithm rnn-bptt: "clip
each gradient").

Hides where in the step of a Keras optimizer the whole gradient exists (unscaled, summed over replicas, equal rows of an
embedding added up, and the mean where gradients are accumulated), and how a step is left out.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self

import keras
import numpy as np
from keras import ops
from numpy.typing import ArrayLike

from keras_gated.clipping.clip import LARGEST, TINY, clip, precise
from keras_gated.clipping.sparse import merged, values, with_values
from keras_gated.patching import replaced


@keras.saving.register_keras_serializable("keras_gated")
class ClipNorm(keras.optimizers.Optimizer):
    """Clips what another Keras optimizer is given (eq. rnn-clip): ClipNorm(Adam(1e-3), max_norm=1.0).

    The norm is that of the gradient which makes the step: loss scaling taken out, summed over replicas, the mean where
    gradients are accumulated, the rows that an embedding looked up several times added up (they stay sparse).  It is
    right for every finite gradient.  A gradient within max_norm arrives bit for bit.

    All else is the optimizer's own: learning rate and schedules, weight decay, EMA, accumulation, slots.  With
    mixed_float16 Keras puts its LossScaleOptimizer round the pair, as it does with any other optimizer.

    Args:
        optimizer: keras.optimizers.Optimizer or its name.  It belongs to the wrapper from now on, as
            `inner_optimizer`, and its loss_scale_factor moves to the wrapper.
        max_norm: τ.  `suggest_max_norm` finds one.
        per_variable: whether the gradient of each variable is clipped by itself, not all together.
        nonfinite: what becomes of a step with an inf or NaN in any gradient.  "skip": no weight, slot, average or
            iteration moves, and `skipped_steps` counts it; where gradients are accumulated, this one is left out and
            another one waited for.  "propagate": what Keras does.
        name: of the optimizer.

    Attributes:
        inner_optimizer: the wrapped optimizer.
        skipped_steps: keras.Variable, saved with the optimizer.

    Raises:
        ValueError: for arguments of another kind; for an optimizer that clips by itself, is a ClipNorm, or is a
            LossScaleOptimizer (put that one outside); for a MultiOptimizer whose parts accumulate.

    Pascanu, Mikolov & Bengio (2013).
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer | str | dict[str, Any],
        max_norm: float = 1.0,
        per_variable: bool = False,
        nonfinite: Literal["skip", "propagate"] = "skip",
        name: str | None = None,
    ):
        optimizer = _wrappable(optimizer)
        _check(max_norm, per_variable, nonfinite)
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = optimizer
        self.max_norm = float(max_norm)
        self.per_variable = bool(per_variable)
        self.nonfinite = nonfinite
        self.loss_scale_factor, optimizer.loss_scale_factor = optimizer.loss_scale_factor, None
        self.skipped_steps = self.add_variable((), dtype="int", aggregation="only_first_replica", name="skipped_steps")
        self._iterations = optimizer._iterations  # which apply_gradients returns

    def build(self, variables: Sequence[keras.Variable]) -> None:
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        _check_parts(self.inner_optimizer)  # a MultiOptimizer may choose them as late as here
        super().build(variables)

    # The step.

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[keras.Variable] | None = None) -> None:
        grads = list(grads)
        if not grads:
            return
        variables = self._known(trainable_variables)
        if len(grads) != len(variables):
            raise ValueError(
                f"ClipNorm expects one gradient per variable, received {len(grads)} gradients and {len(variables)} "
                "variables. Give None where a variable has no gradient."
            )
        with keras.name_scope(self.name, caller=self):
            grads = _each(self._whole, grads, variables)
            finite = True if self.nonfinite == "propagate" else self._finite(grads, variables)
            self._step(finite, grads, variables)

    def _known(self, variables):
        if variables is None:
            if not self.built:
                raise ValueError(
                    "ClipNorm expects variables where it has not been built, received gradients alone. "
                    "Call apply(gradients, variables), or build(variables) first."
                )
            return self._trainable_variables
        variables = list(variables)
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(variables)
        return variables

    def _whole(self, grads):
        """Unscaled and summed over replicas, every row of an embedding once."""
        scale = self.loss_scale_factor or 1.0
        grads = [with_values(g, lambda a: precise(a) / scale) for g in grads]
        if _several_replicas():
            grads = _this_replica().all_reduce("SUM", grads)
        return [merged(g) for g in grads]

    def _finite(self, grads, variables):
        found = [ops.all(ops.isfinite(self._kept(grads[i], variables[i]))) for i in _used(grads, variables)]
        return ops.all(ops.stack(found)) if found else True

    def _kept(self, gradient, variable):
        """What must be finite: the sum where gradients are accumulated."""
        if not self._accumulates:
            return values(gradient)
        optimizer = self.inner_optimizer
        sum_so_far = optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]
        return ops.cast(ops.add(gradient, sum_so_far), sum_so_far.dtype)

    def _step(self, finite, grads, variables):
        if _several_replicas():
            _this_replica().merge_call(self._step_of_replicas, args=(finite, grads, variables))
        elif finite is True:
            self._update(grads, variables)
        elif keras.backend.backend() == "jax":
            self._update_or_restore(finite, grads, variables)
        else:
            ops.cond(finite, lambda: self._update(grads, variables), self._skip)

    def _step_of_replicas(self, distribution, finite, grads, variables):
        """Called once for all replicas: a branch of a graph must not wait for them one by one."""

        def update():
            with self._opened():
                distribution.extended.call_for_each_replica(self._apply_clipped, args=(grads, variables))

        finite = distribution.experimental_local_results(finite)[0]  # the same in each: grads are summed
        update() if finite is True else ops.cond(finite, update, self._skip)

    def _update_or_restore(self, finite, grads, variables):
        """JAX keeps no assignment made in a branch."""
        state = [*self._trainable_variables, *self.inner_optimizer.variables]
        before = [v.value for v in state]
        self._update(grads, variables)
        for v, old in zip(state, before, strict=True):
            v.assign(ops.where(finite, v.value, old))
        self.skipped_steps.assign_add(ops.cast(ops.logical_not(finite), self.skipped_steps.dtype))

    def _skip(self):
        self.skipped_steps.assign_add(1)

    def _update(self, grads, variables):
        with self._opened():
            self._apply_clipped(grads, variables)

    def _apply_clipped(self, grads, variables):
        if not self._accumulates:
            grads = _each(self._clip_gradients, grads, variables)
        grads = [g if g is None else _like(v, g) for g, v in zip(grads, variables, strict=True)]
        self.inner_optimizer.apply(grads, variables)

    def _clip_gradients(self, grads):
        """Keras's name, and the one place where the whole gradient passes in its final form."""
        return clip(grads, self.max_norm, self.per_variable)

    @contextlib.contextmanager
    def _opened(self):
        """For a while the optimizer clips the mean that it accumulates as we do, and does not sum replicas again."""
        with contextlib.ExitStack() as stack:
            if self._accumulates:
                ours = replaced(self.inner_optimizer, "_clip_gradients", lambda _, grads: self._clip_gradients(grads))
                stack.enter_context(ours)
            if _several_replicas():
                for part in _parts(self.inner_optimizer):
                    stack.enter_context(replaced(part, "_all_reduce_sum_gradients", lambda _, pairs: list(pairs)))
            yield

    @property
    def _accumulates(self):
        return bool(self.inner_optimizer.gradient_accumulation_steps)

    # What Keras asks an optimizer, answered by the wrapped one.

    @property
    def learning_rate(self) -> Any:
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def iterations(self) -> keras.Variable:
        return self.inner_optimizer.iterations

    @property
    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        """Of a MultiOptimizer: Keras's learning rate callbacks look for them."""
        return self.inner_optimizer.optimizers

    @property
    def _model_variables_moving_average(self):
        return self.inner_optimizer._model_variables_moving_average

    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        self.inner_optimizer.finalize_variable_values(var_list)

    # State and configuration.

    @property
    def variables(self) -> list[keras.Variable]:
        return [self.skipped_steps, *self.inner_optimizer.variables]

    def set_weights(self, weights: Sequence[ArrayLike]) -> None:
        self.skipped_steps.assign(weights[0])
        self.inner_optimizer.set_weights(weights[1:])

    def save_own_variables(self, store: Any) -> None:
        store["0"] = self.skipped_steps.numpy()  # Keras saves inner_optimizer by itself

    def load_own_variables(self, store: Any) -> None:
        if len(store.keys()) == 1:  # else another optimizer's, of which Keras warns when it comes to inner_optimizer
            self.skipped_steps.assign(store["0"])

    def get_config(self) -> dict[str, Any]:
        optimizer = keras.saving.serialize_keras_object(self.inner_optimizer)
        if self.loss_scale_factor is not None:
            optimizer["config"]["loss_scale_factor"] = self.loss_scale_factor
        return {
            "optimizer": optimizer,
            "max_norm": self.max_norm,
            "per_variable": self.per_variable,
            "nonfinite": self.nonfinite,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Self:
        optimizer = keras.saving.deserialize_keras_object(config["optimizer"], custom_objects=custom_objects)
        return cls(**{**config, "optimizer": optimizer})


# Arguments.


def _wrappable(optimizer: keras.optimizers.Optimizer | str | dict[str, Any]) -> keras.optimizers.Optimizer:
    if isinstance(optimizer, str | dict):
        optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            f"ClipNorm expects a Keras optimizer, received {optimizer!r}. "
            "Give one, as in ClipNorm(keras.optimizers.Adam())."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "ClipNorm expects an optimizer that does not scale the loss, received a LossScaleOptimizer, which would "
            "not see an overflow. Put it outside: LossScaleOptimizer(ClipNorm(optimizer))."
        )
    _check_parts(optimizer)
    return optimizer


def _parts(optimizer):
    """The optimizers of a MultiOptimizer, or the one."""
    return getattr(optimizer, "optimizers", [optimizer])


def _check_parts(optimizer):
    for part in [optimizer, *_parts(optimizer)]:
        if isinstance(part, ClipNorm):
            raise ValueError(
                "ClipNorm expects an optimizer that does not clip, received a ClipNorm. "
                "Wrap its inner_optimizer with the smaller max_norm."
            )
        for own in ("clipnorm", "global_clipnorm", "clipvalue"):
            if getattr(part, own) is not None:
                raise ValueError(
                    f"ClipNorm expects an optimizer that does not clip, received {type(part).__name__} with "
                    f"{own}={getattr(part, own)}. Leave {own} out, and give ClipNorm the max_norm."
                )
        if part is not optimizer and part.gradient_accumulation_steps:
            raise ValueError(
                f"ClipNorm expects a MultiOptimizer whose parts do not accumulate, received {type(part).__name__} with "
                f"gradient_accumulation_steps={part.gradient_accumulation_steps}: there is no moment at which the "
                "whole gradient exists. Leave it out, or wrap each part in its own ClipNorm."
            )


def _check(max_norm, per_variable, nonfinite):
    number = isinstance(max_norm, numbers.Real) and not isinstance(max_norm, bool)
    if not (number and TINY <= max_norm <= LARGEST):
        raise ValueError(
            f"ClipNorm expects max_norm to be a finite number above 0, received {max_norm!r}. "
            "For no clipping use the optimizer alone."
        )
    if not isinstance(per_variable, bool | np.bool_):
        raise ValueError(
            f"ClipNorm expects per_variable to be True or False, received {per_variable!r}. "
            "True clips the gradient of each variable, False all together."
        )
    if nonfinite not in ("skip", "propagate"):
        raise ValueError(
            f'ClipNorm expects nonfinite to be "skip" or "propagate", received {nonfinite!r}. '
            '"skip" leaves such a step out, "propagate" does what Keras does.'
        )


# Gradients and variables.


def _used(grads, variables):
    """Where there is a gradient.  (float8 layers have variables that are overwritten by what stands there.)"""
    pairs = zip(grads, variables, strict=True)
    return [i for i, (g, v) in enumerate(pairs) if g is not None and not getattr(v, "overwrite_with_gradient", False)]


def _each(function, grads, variables):
    """The gradients, those in use replaced by `function` of their list."""
    used, grads = _used(grads, variables), list(grads)
    if used:
        for i, g in zip(used, function([grads[i] for i in used]), strict=True):
            grads[i] = g
    return grads


def _like(variable, gradient):
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return with_values(gradient, lambda a: ops.cast(a, dtype))


# Replicas of tf.distribute.


def _several_replicas():
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return tf.distribute.get_strategy().num_replicas_in_sync > 1


def _this_replica():
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    if context is None:
        raise ValueError(
            "ClipNorm expects to be applied in each replica, received gradients outside of them. Use strategy.run."
        )
    return context
