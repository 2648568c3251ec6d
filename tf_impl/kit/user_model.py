"""A user's own model, as the suite's other models are had: built, weights in and out, its loss.

What it holds: what a function `tensorflow()` or `keras()` of a user's file returns, held to what a
train step needs, with an optimizer that can be made again for each copy of the model.
Twin: `pt_impl/kit/user_model.py`.
Where the frameworks differ: a Keras model may have no variables before its first call. Weights are
numbered in the order of `model.weights`, since Keras counts up the names of layers in a process. An
optimizer is made of its configuration, anew for each model. A loss takes (output, y) in both; one
of Keras's own classes, which take (y, output), is turned round.
"""

import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from shared.specs import Recipe
from shared.user_model import (
    BadFile,
    Logits,
    check_broadcast,
    check_order,
    first,
    leaves,
    mapped,
    one_line,
    read_by,
)
from tf_impl.kit import calling, comparing, optimizers, runtime, tracing, training


class UserModel:
    """What `make()` gives, anew for each row. `example`: inputs on the device.

    `has_logits`: whether the model's output is an object that has them; a file that was exported
    gives only these.
    """

    def __init__(self, make: Callable, *, has_logits: bool = False):
        self.make, self.has_logits = make, has_logits
        self.example = None
        self._loss = None
        self._last = None

    def build(self, weights: dict[str, np.ndarray] | None = None) -> tf.keras.Model:
        """A model with these weights. Raises BadFile where `make` returns something else."""
        model, loss, optimizer = _parts(self.make())
        if self.example is not None and (not model.built or not model.weights):
            calling.call(model, self.example, training=False)
        if weights is not None:
            import_weights(model, weights)
        self._loss, self._last = loss, optimizer
        return model

    def loss(self, output, y) -> tf.Tensor:
        """The file's loss of an output."""
        if self.has_logits and not hasattr(output, "logits"):
            output = Logits(first(output))
        if isinstance(self._loss, tf.keras.losses.Loss):
            return self._loss(y, output)
        return self._loss(output, y)

    def prediction_loss(self, output, y) -> tf.Tensor:
        """The file's loss of a prediction, of which an exported file may have only the logits.

        Where the file's loss takes more than these, the mean of their squares.
        """
        if not self.has_logits:
            return self.loss(output, y)
        logits = first(output)
        try:
            return self.loss(Logits(logits), y)
        except (AttributeError, LookupError):
            return tf.reduce_mean(tf.cast(logits, tf.float32) ** 2)

    def optimizer(self, model: tf.keras.Model, recipe: Recipe) -> tf.keras.optimizers.Optimizer:
        """The file's optimizer for a model, or, where it has none, that of `recipe`."""
        if self._last is None:
            return training.make_optimizer(model, recipe)
        return optimizers.copy_optimizer(self._last, model.trainable_variables)

    def fused_optimizer(
        self, model: tf.keras.Model, recipe: Recipe
    ) -> tf.keras.optimizers.Optimizer:
        """Keras has none."""
        raise NotImplementedError("Keras has no fused optimizer: in a compiled step XLA fuses it")


def _parts(found) -> tuple:
    """(model, loss_fn, optimizer or None), as a file has to return them."""
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise BadFile(
            "tensorflow() has to return (model, loss_fn) or (model, loss_fn, optimizer), not "
            f"{type(found).__name__}"
        )
    model, loss, optimizer = (*found, None)[:3]
    if not isinstance(model, tf.keras.Model):
        raise BadFile(
            f"tensorflow() returns a {type(model).__name__} as its model, not a keras.Model"
        )
    if not callable(loss):
        raise BadFile(f"tensorflow() returns a {type(loss).__name__} as loss_fn: give a function")
    if isinstance(loss, type):
        name = loss.__name__
        raise BadFile(
            f"tensorflow() returns the class {name} as loss_fn: give {name}(), with brackets"
        )
    if optimizer is not None and not isinstance(optimizer, tf.keras.optimizers.Optimizer):
        raise BadFile(f"tensorflow() returns a {type(optimizer).__name__} as its optimizer")
    return model, loss, optimizer


# Weights and batches -----------------------------------------------------------------------------


def _named(model: tf.keras.Model) -> dict:
    return {f"{place:04d}": variable for place, variable in enumerate(model.weights)}


def export_weights(model: tf.keras.Model) -> dict[str, np.ndarray]:
    """Copies of all weights, trained or not."""
    return {name: np.array(variable) for name, variable in _named(model).items()}


def import_weights(model: tf.keras.Model, weights: dict[str, np.ndarray]) -> None:
    """Copy `weights` into a model. Raises ValueError where they do not fit."""
    variables = _named(model)
    ours = {name: tuple(variable.shape) for name, variable in variables.items()}
    if ours != {name: value.shape for name, value in weights.items()}:
        raise ValueError("the weights do not fit the model: their number or a shape is another")
    for name, variable in variables.items():
        variable.assign(weights[name])


def named_parameters(model: tf.keras.Model) -> dict[str, tf.Variable]:
    """Name -> trainable variable."""
    trained = {id(variable) for variable in model.trainable_variables}
    return {name: variable for name, variable in _named(model).items() if id(variable) in trained}


def reseed(model: tf.keras.Model, seed: int) -> None:
    """Begin the model's random numbers anew, such as those of its dropout."""
    runtime.set_seed(seed)
    for place, variable in enumerate(model.variables):
        if "seed_generator_state" in variable.name:  # Keras 3 keeps them in the layers
            variable.assign(tf.cast([seed, place], variable.dtype))


def parameter_count(model: tf.keras.Model) -> int:
    """Number of trainable parameters."""
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


def to_device(x, y) -> tuple:
    """Copy arrays, and structures of them, to the device as they are."""
    with tf.device(runtime.device()):
        return mapped(tf.constant, x), mapped(tf.constant, y)


def resident_batches(batches: list[tuple]) -> list[tuple]:
    """Copy batches to the device, so that a timed step finds its input there."""
    return [to_device(x, y) for x, y in batches]


# What a train step needs -------------------------------------------------------------------------


def check(file_model: UserModel, model: tf.keras.Model, batch: tuple) -> dict:
    """Call model and loss on a batch. Raises BadFile with what to do where no step can be made.

    Returns {"has_logits": whether the output is an object that has them, "targets_first": whether
    the loss takes (y, output), "has_optimizer": whether the file has one, "own_step": the name of
    a step that the model brings and that is not used, or None}.
    """
    x, y = batch
    known = len(model.weights)
    read = read_by(file_model._loss, _weights_of)
    if {id(weight) for weight in model.weights} & {id(weight) for weight in read}:
        raise BadFile(
            "loss_fn reads the model's weights by itself, and a row trains another copy of the"
            " model: let the model say it, by kernel_regularizer or add_loss"
        )
    with tf.GradientTape() as tape:
        output = _fits("model", lambda: calling.call(model, x, training=True), x)
        loss = _fits("loss_fn(output, y)", lambda: file_model.loss(output, y), x)
    if not isinstance(file_model._loss, tf.keras.losses.Loss):
        check_order(file_model._loss)
    if not tf.is_tensor(loss) or loss.shape.rank != 0:
        said = f"of shape {tuple(loss.shape)}" if tf.is_tensor(loss) else type(loss).__name__
        raise BadFile(f"loss_fn gives no scalar but {said}: return the mean over the batch")
    if not math.isfinite(float(loss)):
        raise BadFile(
            f"the loss of the first batch is {float(loss)}: look at the data and the model"
        )
    check_broadcast(file_model.loss, output, y)
    if late := len(model.weights) - known:
        raise BadFile(
            f"{late} weights of the model appear only in training, where no step would train "
            "them: call the model once with training=True before you return it"
        )
    if not model.trainable_variables:
        raise BadFile("the model has no parameter that is trained")
    if all(part is None for part in tape.gradient(loss, model.trainable_variables)):
        raise BadFile("the loss depends on no parameter: don't leave TensorFlow in the loss")
    return {
        "has_logits": not tf.is_tensor(output) and hasattr(output, "logits"),
        "targets_first": isinstance(file_model._loss, tf.keras.losses.Loss),
        "has_optimizer": file_model._last is not None,
        "own_step": None if type(model).train_step is tf.keras.Model.train_step else "train_step",
    }


def _weights_of(value) -> list | None:
    """The weights of a layer, or one by itself; None of anything else."""
    if isinstance(value, tf.keras.layers.Layer):
        return value.weights
    is_one = isinstance(value, (tf.Variable, getattr(tf.keras, "Variable", tf.Variable)))
    return [value] if is_one else None


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory could not be allocated."""
    return isinstance(error, (MemoryError, tf.errors.ResourceExhaustedError))


def _fits(what: str, function: Callable, x):
    """What a call gives, or why the batch is none for it."""
    try:
        return function()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        doubles = any(getattr(leaf, "dtype", None) == tf.float64 for leaf in leaves(x))
        hint = "; x is float64: give float32" if doubles else ""
        raise BadFile(f"the batch does not fit {what}: {one_line(error)}{hint}") from error


def repeatable(model: tf.keras.Model, x) -> float:
    """How far two predictions of the same inputs are apart; 0 for a model that draws no numbers."""
    return comparing.apart(tracing.outputs(model, x), tracing.outputs(model, x))
