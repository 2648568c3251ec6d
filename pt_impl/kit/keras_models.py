"""Models of the suite in Keras 3 on PyTorch: built, their optimizer and loss, and what a call ran.

What it holds: what `train_step/keras_backend.py` is measured with. The models are those of
`shared/keras_models.py`, as in TensorFlow. Importing this file chooses Keras's backend.
Twin: `tf_impl/kit/keras_models.py`.
Where the frameworks differ: the suite's images are NCHW here and become a view that is NHWC.
"""

import os
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
from torch import Tensor

from pt_impl.kit import operators
from shared import keras_models
from shared.specs import ModelSpec, Recipe

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported

import keras


def build(spec: ModelSpec, weights: dict[str, np.ndarray] | None = None) -> keras.Model:
    """The model of an image spec, with canonical `weights` if given; it is an `nn.Module`, too."""
    model = keras_models.build(keras, spec)
    if weights is not None:
        keras_models.import_weights(model, weights)
    return model


def make_optimizer(model: keras.Model, recipe: Recipe) -> keras.Optimizer:
    """Keras's optimizer of a recipe. Raises ValueError for another rule than "sgd"."""
    if recipe.optimizer != "sgd":
        raise ValueError(f"{recipe.optimizer} is no optimizer of an image task: sgd is")
    optimizer = keras.optimizers.SGD(recipe.learning_rate, momentum=recipe.momentum)
    optimizer.build(model.trainable_variables)
    return optimizer


def state_of(optimizer: keras.Optimizer) -> SimpleNamespace:
    """What a Keras optimizer keeps, as an optimizer of PyTorch has it: by its bytes."""
    kept = {variable.path: {"value": variable.value} for variable in optimizer.variables}
    return SimpleNamespace(state=kept)


def cross_entropy() -> keras.losses.Loss:
    """The mean cross-entropy of logits (n, classes) and labels (n,)."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def images(x: Tensor) -> Tensor:
    """Images (n, c, h, w) as Keras takes them, (n, h, w, c): a view."""
    return x.permute(0, 2, 3, 1)


def ran(model: keras.Model, function: Callable, *inputs) -> dict:
    """What a call of a step or prediction ran: the backend of the weights, and graphs.

    Calls `function` three times, since the first two may compile.
    """
    backend = type(model.weights[0].value).__module__.partition(".")[0]
    return {"backend": backend, **operators.executed_graphs(function, *inputs)}
