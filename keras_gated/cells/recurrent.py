"""The recurrent cell and the recurrent layer, abstract: what the final ones in cells/ share.

Hides weights and their options, dropout masks, the meaning of masks, configuration, and who runs the equations: `sweep`
on TensorFlow, Keras's own loop elsewhere and for unroll=True.
"""

import contextlib
import inspect
import numbers
import re

import keras
from keras import ops

from keras_gated.cells.options import LAYER_PARAMETERS, RNN_PARAMETERS, WEIGHT_OPTIONS, parameters_of, signature_of
from keras_gated.engine.loop import loop
from keras_gated.engine.precision import arithmetic_dtype
from keras_gated.keras_internals import DropoutRNNCell, in_forward_mode

SNAKE_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # LSTMCell -> lstm_cell


class RecurrentCell(keras.layers.Layer, DropoutRNNCell):
    """One step of a recurrent network, for keras.layers.RNN and StackedRNNCells.

    Final classes set `equations`, and `sizes` where a width is not N.  Weights: kernel W (D, kN), bias b (kN,), or
    (2, kN) where the recurrent product has a bias of its own, and those that the equations declare, such as
    recurrent_kernel U (N, kN).

    Args:
        units: N, the size of each state.
        use_bias: whether there is a bias.
        kernel_initializer, recurrent_initializer, bias_initializer: of W, U and b; likewise
        kernel_regularizer, recurrent_regularizer, bias_regularizer, and
        kernel_constraint, recurrent_constraint, bias_constraint.  As in Keras.
        dropout: share of the features of x that are dropped, in [0, 1).
        recurrent_dropout: share of the units of h₋ that are dropped in the recurrent product, in [0, 1).
            Either mask is drawn once per sequence and is the same at all its steps.
        seed: integer, of the dropout masks.
        **kwargs: those of keras.layers.Layer.

    Call arguments:
        inputs: x, (B, D).
        states: the previous states, (B, N) each.
        training: whether dropout is active.
        perturbations: zeros for each state, see engine/perturbation.py.

    Returns:
        h (B, N), and the list of states.

    Raises:
        ValueError: for units or a dropout share out of range.
    """

    equations = None  # `Equations`; may be a property
    layer_class = None  # the `Recurrent` of this cell

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        cls.__signature__ = signature_of(cls, parameters_of(RecurrentCell.__init__), LAYER_PARAMETERS)

    def __init__(
        self,
        units,
        use_bias=True,
        kernel_initializer="glorot_uniform",
        recurrent_initializer="orthogonal",
        bias_initializer="zeros",
        kernel_regularizer=None,
        recurrent_regularizer=None,
        bias_regularizer=None,
        kernel_constraint=None,
        recurrent_constraint=None,
        bias_constraint=None,
        dropout=0.0,
        recurrent_dropout=0.0,
        seed=None,
        **kwargs,
    ):
        given = locals()
        name = type(self).__name__
        if not isinstance(units, numbers.Integral) or units < 1:
            raise ValueError(f"{name} expects units to be a positive integer, received {units!r}.")
        for share in ("dropout", "recurrent_dropout"):
            if not isinstance(given[share], numbers.Real) or not 0 <= given[share] < 1:
                raise ValueError(f"{name} expects {share} in [0, 1), received {given[share]!r}.")
        super().__init__(**kwargs)
        self.units = int(units)
        self.use_bias = use_bias
        for option, module in WEIGHT_OPTIONS.items():
            setattr(self, option, module.get(given[option]))
        self.dropout = dropout
        self.recurrent_dropout = recurrent_dropout
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)

    @property
    def sizes(self):
        """{name of a size in the equations: its value}."""
        return {"units": self.units}

    @property
    def widths(self):
        """{state: its width}."""
        return {state: self.equations.width(width, self.sizes) for state, width in self.equations.states.items()}

    @property
    def state_size(self):
        widths = list(self.widths.values())
        return widths[0] if len(widths) == 1 else widths

    @property
    def output_size(self):
        return next(iter(self.widths.values()))

    def get_initial_state(self, batch_size=None):
        return [ops.zeros((batch_size, width), dtype=self.compute_dtype) for width in self.widths.values()]

    def initial_bias(self, shape, dtype=None):
        return self.bias_initializer(shape, dtype=dtype)

    def build(self, input_shape):
        columns, equations = len(self.equations.gates) * self.units, self.equations
        self.kernel = self._add("kernel", "kernel", (input_shape[-1], columns), self.kernel_initializer)
        shapes = equations.shapes(self.sizes)
        first = [name for name in shapes if name == "recurrent_kernel"]  # saved files have it before the bias
        for name in first:
            self._add_recurrent(name, shapes[name])
        rows = (2,) if equations.recurrent_bias else ()
        self.bias = self._add("bias", "bias", (*rows, columns), self.initial_bias) if self.use_bias else None
        for name in shapes:
            if name not in (*first, equations.recurrent_bias):
                self._add_recurrent(name, shapes[name])

    def _add_recurrent(self, name, shape):
        """A weight that the equations declare, as an attribute of that name."""
        weight = self.equations.weights.get(name)
        if name in self.equations.matrices:
            variable = self._add(name, "recurrent", shape, self.recurrent_initializer)
        else:
            variable = self.add_weight(name=name, shape=shape, initializer=weight.initializer)
        setattr(self, name, variable)

    def _add(self, name, option, shape, initializer):
        return self.add_weight(
            name=name,
            shape=shape,
            initializer=initializer,
            regularizer=getattr(self, f"{option}_regularizer"),
            constraint=getattr(self, f"{option}_constraint"),
        )

    embedding = None  # see `Recurrent.behind`

    def tensors(self):
        """The weights as `Equations` take them: {"W", "b", and each that the equations declare}."""
        equations = self.equations
        tensors = {n: ops.convert_to_tensor(getattr(self, n)) for n in self._declared()}
        W = ops.convert_to_tensor(self.kernel)
        if self.embedding is not None:
            dtype = arithmetic_dtype(self.compute_dtype)
            W = ops.matmul(ops.cast(self.embedding, dtype), ops.cast(W, dtype))
        names = ["b", *([equations.recurrent_bias] if equations.recurrent_bias else [])]
        b = ops.convert_to_tensor(self.bias) if self.use_bias else ops.zeros((len(names), W.shape[1]), W.dtype)
        biases = ops.unstack(ops.reshape(b, (len(names), W.shape[1])))
        return {"W": W, **dict(zip(names, biases, strict=True)), **tensors}

    def _declared(self):
        """The names of the variables that the equations declare, but for the second row of the bias."""
        return [name for name in self.equations.shapes(self.sizes) if name != self.equations.recurrent_bias]

    def call(self, inputs, states, training=False, perturbations=None):
        nested = keras.tree.is_nested(states)
        x_mask = self.get_dropout_mask(inputs) if training else None
        h_mask = self.get_recurrent_dropout_mask(states[0] if nested else states) if training else None
        states = states if nested else [states]
        x = ops.cast(inputs, self.compute_dtype)
        h, states = self.equations.advance(x, states, self.tensors(), self.sizes, x_mask, h_mask, perturbations)
        return h, states if nested else states[0]

    def get_config(self):
        options = {name: module.serialize(getattr(self, name)) for name, module in WEIGHT_OPTIONS.items()}
        own = ("units", "use_bias", "dropout", "recurrent_dropout", "seed")
        return {**super().get_config(), **{name: getattr(self, name) for name in own}, **options}


class Recurrent(keras.layers.RNN):
    """A recurrent layer; final classes name their cell as `cell_class`, whose `layer_class` they become.

    Args (all by keyword):
        use_bias, kernel_initializer, recurrent_initializer, bias_initializer, kernel_regularizer,
        recurrent_regularizer, bias_regularizer, kernel_constraint, recurrent_constraint, bias_constraint,
        dropout, recurrent_dropout, seed: see `RecurrentCell`.
        return_sequences: return h of every step, (B, T, N), instead of the last, (B, N).
        return_state: return the final states as well, (B, N) each.
        go_backwards: read x from its end; the outputs follow the order of processing.
        stateful: start from where the previous batch ended.
        unroll: run Keras's loop, unrolled, under autodiff, instead of the sweep.  The values are the same.
        zero_output_for_mask: masked steps put out 0 instead of repeating the previous output.
        activity_regularizer, name, dtype, trainable: as in keras.layers.Layer.

    Call arguments:
        sequences: x, (B, T, D).
        initial_state: (B, N) for each state; zeros without it.
        mask: (B, T), False where a step is padding.  It leaves the state as it was; its output repeats the
            previous one (0 before the first valid step); what x holds there, inf and NaN included, changes
            neither values nor gradients.
        training: whether dropout is active.
        sequences_mask: where Keras puts the mask that x carries, when there is an initial_state as well.

    Raises:
        ValueError: for x of another rank, without time steps or with other features than the layer was built
            for, and for a wrong number of initial states.
    """

    cell_class = None

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        if not (isinstance(cls.cell_class, type) and issubclass(cls.cell_class, RecurrentCell)):
            raise ValueError(f"{cls.__name__} expects cell_class to be a RecurrentCell, received {cls.cell_class!r}.")
        cls.__signature__ = signature_of(cls, inspect.signature(cls.cell_class).parameters, RNN_PARAMETERS)
        if "cell_class" in vars(cls):
            cls.cell_class.layer_class = cls

    def __init__(self, units, **options):
        cell_class = self.cell_class
        of_cell = {name: options[name] for name in inspect.signature(cell_class).parameters if name in options}
        of_cell["name"] = SNAKE_CASE.sub("_", cell_class.__name__).lower()
        of_layer = {n: v for n, v in options.items() if n not in of_cell or n in LAYER_PARAMETERS}
        super().__init__(cell_class(units, **of_cell), **of_layer)

    def build(self, sequences_shape, initial_state_shape=None):
        self._check(sequences_shape)
        super().build(sequences_shape, initial_state_shape)

    def call(self, sequences, initial_state=None, mask=None, training=False, sequences_mask=None):
        if type(sequences).__name__ == "RaggedTensor":
            raise ValueError(
                f"{type(self).__name__} expects a dense tensor, received a RaggedTensor. Call its to_tensor(), and "
                "pass a mask that is True where there was data: tf.sequence_mask(ragged.row_lengths())."
            )
        self._check(sequences.shape)
        if initial_state is not None:
            self._check_states(initial_state, sequences.shape[0])
        mask = sequences_mask if mask is None else mask
        x = ops.cast(sequences, self.compute_dtype)  # integers are not cast by Keras
        return super().call(x, initial_state=initial_state, mask=mask, training=training)

    @contextlib.contextmanager
    def behind(self, embedding):
        """For a while x is one-hot, (B, T, V), and what the layer reads is x E, with E (V, D) an embedding.

        As (x E) W = x (E W), products over the steps are of V instead of D features: faster where V is small.
        """
        vars(self.cell)["embedding"] = embedding  # past Keras, which would track it
        try:
            yield
        finally:
            del vars(self.cell)["embedding"]

    def _features(self):
        """How many x has."""
        return (self.cell.kernel if self.cell.embedding is None else self.cell.embedding).shape[0]

    def _check(self, shape):
        name, shape = type(self).__name__, tuple(shape)
        if len(shape) != 3:
            raise ValueError(
                f"{name} expects x of shape (batch, time, features), received {shape}. "
                f"For a single step call {name}Cell."
            )
        if shape[1] == 0:
            raise ValueError(f"{name} expects at least one time step, received x of shape {shape}. Drop such batches.")
        if self.cell.built and shape[2] != self._features():
            raise ValueError(
                f"{name} {self.name!r} was built for {self._features()} features, received x of shape "
                f"{shape}. Use one layer per number of features."
            )

    def _check_states(self, states, batch):
        widths = self.cell.widths
        shapes = [tuple(s.shape) for s in keras.tree.flatten(states)]
        expected = [(batch, width) for width in widths.values()]
        if len(shapes) != len(expected) or not all(map(_fits, shapes, expected)):
            same = ", ".join(map(str, dict.fromkeys(expected)))
            raise ValueError(
                f"{type(self).__name__} expects initial_state to hold {len(expected)} arrays ({', '.join(widths)}) of "
                f"shape {same}, received {len(shapes)} of {', '.join(map(str, shapes))}."
            )

    def inner_loop(self, sequences, initial_state, mask, training=False, perturbation=None):
        mask = self._mask(keras.tree.flatten(mask)[0], sequences)
        shown = None
        if mask is not None:
            seen = ops.cumsum(ops.cast(mask, "int32"), axis=1) > 0
            shown = mask if self.zero_output_for_mask else seen
        run = self._loop if self.unroll or keras.backend.backend() != "tensorflow" else self._sweep
        outputs, states = run(sequences, list(initial_state), mask, shown, training, perturbation)
        last = states[0] if shown is None else ops.where(shown[:, -1:], states[0], 0)
        return last, outputs if self.return_sequences else last, list(states)

    def _mask(self, mask, sequences):
        """The mask as booleans (B, T), in the order of processing."""
        if mask is None:
            return None
        mask = ops.squeeze(mask, -1) if len(mask.shape) == 3 else mask
        if not _fits(mask.shape, sequences.shape[:2]):
            raise ValueError(
                f"{type(self).__name__} expects a mask of shape {tuple(sequences.shape[:2])}, received "
                f"{tuple(mask.shape)}: one value for each time step of x."
            )
        mask = ops.cast(mask, "bool")
        return ops.flip(mask, axis=1) if self.go_backwards else mask

    def _sweep(self, sequences, initial_state, mask, shown, training, perturbation):
        from keras_gated.engine.sweep import Masks, Options, sweep

        cell, weights = self.cell, self.cell.tensors()
        if in_forward_mode([sequences, *initial_state, *weights.values()]):
            return self._loop(sequences, initial_state, mask, shown, training, perturbation)
        options = Options(
            cell.equations,
            features=self._features(),
            sizes=tuple(cell.sizes.items()),
            sequences=self.return_sequences,
            save=bool(training),
        )
        x_mask = cell.get_dropout_mask(sequences[:, 0]) if training else None
        h_mask = cell.get_recurrent_dropout_mask(initial_state[0]) if training else None
        masks = Masks(mask, shown, x_mask, h_mask)
        return sweep(options, sequences, initial_state, weights, masks, self.go_backwards, perturbation)

    def _loop(self, sequences, initial_state, mask, shown, training, perturbation):
        if self.stateful:  # the variables behind these states change while their gradient is still to come
            initial_state = [ops.copy(s) for s in initial_state]

        def step(inputs, states):
            x, *zeros = inputs if perturbation is not None else [inputs]
            return self.cell(x, list(states), training=training, perturbations=zeros or None)

        return loop(
            step,
            sequences,
            initial_state,
            mask,
            shown,
            go_backwards=self.go_backwards,
            sequences=self.return_sequences,
            unroll=self.unroll,
            perturbation=perturbation,
        )

    def get_config(self):
        config = super().get_config()
        del config["cell"]
        of_cell = self.cell.get_config()
        return {**of_cell, **config}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


def _snake_case(name):
    """LSTMCell -> lstm_cell.  Saved weights are found by this name."""
    return re.sub("(?<=.)(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _fits(shape, expected):
    """Whether two shapes are equal as far as both are known."""
    pairs = zip(shape, expected, strict=True) if len(shape) == len(expected) else [(0, 1)]
    return all(a is None or b is None or a == b for a, b in pairs)
