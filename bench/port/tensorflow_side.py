"""The Keras model of a file: run with the tensors of every layer and operator seen."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from tensorflow.python.framework import op_callbacks

from bench.port.values import Index, outputs
from shared.user_model import RECIPE

RATES = ("rate", "dropout", "recurrent_dropout", "stddev")


@dataclass
class Call:
    """A call of a layer: its name with those around it, the layer, its inputs and its output."""

    name: str
    layer: Any
    inputs: tuple
    out: Any


@dataclass
class Trace:
    """One run: calls of layers in the order in which they ended, tensors by value, the output."""

    calls: list[Call]
    index: Index
    outputs: list
    output: Any
    state: dict[int, Any]  # the values of variables that are not trained, after it, by their id


class TensorFlowSide:
    """The model of `tensorflow()`, with its loss and its optimizer."""

    def __init__(self, make: Callable, x: Any, y: Any):
        self.kit = importlib.import_module("tf_impl.kit.user_model")
        self._calling = importlib.import_module("tf_impl.kit.calling")
        self.file_model = self.kit.UserModel(make)
        self.x, self.y = self.kit.to_device(x, y)
        self.file_model.example = self.x
        self.model = self.file_model.build(None)
        self.optimizer = self.file_model.optimizer(self.model, RECIPE)

    def check(self) -> None:
        """Raises BadFile where no step can be made of the model. Nothing of it is changed."""
        with kept(self.model.weights):
            self.kit.check(self.file_model, self.model, (self.x, self.y))

    def layers(self) -> list:
        """All layers, those inside others too."""
        return list(self.model._flatten_layers(include_self=False))

    def call(self, x: Any, *, training: bool) -> Any:
        """The model's output for inputs as `batch` gives them."""
        return self._calling.call(self.model, x, training=training)

    def trace(self, *, training: bool = False) -> Trace:
        """Run the model on the batch; its state stays what it is."""
        calls, index, stack, state = [], Index(), [], self.model.non_trainable_variables
        with kept(state):
            with (
                self.without_dropout(),
                _named_calls(self.model, calls, index, stack),
                _operators(index, stack),
            ):
                output = self.call(self.x, training=training)
            after = {id(variable): variable.numpy() for variable in state}
        return Trace(calls, index, outputs(output), output, after)

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """In which no layer drops anything."""
        rates = [
            (layer, name) for layer in self.layers() for name in RATES if _is_rate(layer, name)
        ]
        kept = [getattr(layer, name) for layer, name in rates]
        try:
            for layer, name in rates:
                object.__setattr__(layer, name, 0.0)  # though the layer is built
            yield
        finally:
            for (layer, name), value in zip(rates, kept, strict=True):
                object.__setattr__(layer, name, value)

    def loss(self, output: Any, y: Any | None = None) -> Any:
        """The file's loss."""
        return self.file_model.loss(output, self.y if y is None else y)

    def penalty(self) -> Any:
        """The sum of the model's own losses, such as those of regularisers; 0.0 without any."""
        return sum(self.model.losses, tf.constant(0.0))


def _is_rate(layer: Any, name: str) -> bool:
    value = getattr(layer, name, None)
    if isinstance(getattr(type(layer), name, None), property):  # that of a cell inside it
        return False
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value:
        return False
    kind = type(layer).__name__
    return name != "rate" or "rop" in kind or "Noise" in kind


@contextmanager
def kept(variables: Iterable) -> Iterator[None]:
    """In which variables may change; they are what they were after it."""
    before = [(variable, variable.numpy()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def held(layer: Any) -> list:
    """The variables of a layer, without those of layers inside it."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


@contextmanager
def _named_calls(model: Any, calls: list, index: Index, stack: list) -> Iterator[None]:
    """In which calls of layers are noted; the stack names those that have begun."""
    call = keras.Layer.__call__

    def noted(layer, *args, **kwargs):
        if layer is model:
            return call(layer, *args, **kwargs)
        stack.append(layer)
        try:
            result = call(layer, *args, **kwargs)
        finally:
            stack.pop()
        name = "/".join([*(outer.name for outer in stack), layer.name])
        given = [leaf for leaf in tf.nest.flatten((args, kwargs)) if tf.is_tensor(leaf)]
        given += [leaf.value for leaf in tf.nest.flatten(args) if isinstance(leaf, keras.Variable)]
        calls.append(Call(name, layer, tuple(given), result))
        for leaf in tf.nest.flatten(result):
            if tf.is_tensor(leaf) and not isinstance(leaf, tf.SparseTensor):
                index.add(name, type(layer).__name__, leaf)
        return result

    with mock.patch.object(keras.Layer, "__call__", noted):
        yield


@contextmanager
def _operators(index: Index, stack: list) -> Iterator[None]:
    """In which the outputs of operators are noted, but of those inside a recurrent layer."""

    def see(op_type, inputs, attrs, results, op_name=None, graph=None):
        if any(isinstance(layer, keras.layers.RNN) for layer in stack):
            return
        operator = op_type.decode() if isinstance(op_type, bytes) else op_type
        if operator in ("ReadVariableOp", "Const", "Identity", "Fill"):
            return
        name = "/".join(layer.name for layer in stack)
        for result in results:
            if getattr(result, "dtype", None) in (tf.float32, tf.float64) and hasattr(
                result, "numpy"
            ):
                index.add(name, operator, result)

    op_callbacks.add_op_callback(see)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(see)
