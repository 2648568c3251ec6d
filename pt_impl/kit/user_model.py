"""A user's own model, as the suite's other models are had: built, weights in and out, its loss.

What it holds: what a function `pytorch()` of a user's file returns, or `keras()` with Keras on
PyTorch, held to what a train step needs, with an optimizer that can be made again for each copy of
the model.
Twin: `tf_impl/kit/user_model.py`.
Where the frameworks differ: weights are called as in `state_dict`; there they are numbered, since
Keras counts up the names of layers in a process. An optimizer belongs to its parameters, and a
model's own is used; there a new one is made of its configuration. A loss takes (output, y) in both;
one of Keras's own classes, which take (y, output), is turned round there.
"""

import inspect
import math
import sys
import weakref
from collections.abc import Callable
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from pt_impl.kit import calling, comparing, runtime, signatures, training
from pt_impl.kit.keras_modules import KerasModule, KerasOptimizer
from shared import keras_models
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


class UserModel:
    """What `make()` gives, anew for each row. `example`: inputs on the device.

    `has_logits`: whether the model's output is an object that has them; a file that was exported
    gives only these.
    """

    def __init__(self, make: Callable, *, has_logits: bool = False):
        self.make, self.has_logits = make, has_logits
        self.example = None
        self._loss, self._reads_model, self._builds = None, False, 0
        self._owners = WeakTensorKeyDictionary()  # parameter -> its model, for a loss that reads it
        self._optimizers: WeakKeyDictionary = WeakKeyDictionary()
        self._remade: Callable | None = None  # holds no parameters, so that a model can go

    def build(self, weights: dict[str, np.ndarray] | None = None) -> nn.Module:
        """A model with these weights. Raises BadFile where `make` returns something else."""
        model, loss, optimizer = _parts(self.make())
        if isinstance(model, KerasModule):
            return self._build_keras(model, loss, optimizer, weights)
        model.to(runtime.device())
        lazy = any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters())
        if lazy and self.example is not None:
            with torch.no_grad():
                calling.call(model, self.example)
        if weights is not None:
            import_weights(model, weights)
        self._loss, self._builds = loss, self._builds + 1
        ours = {id(parameter) for parameter in model.parameters()}
        self._reads_model = any(
            id(parameter) in ours for parameter in read_by(loss, _parameters_of)
        )
        if self._reads_model:
            vars(model)["loss_of_file"] = loss  # a loss holds its model: only that may hold it
            for parameter in model.parameters():
                self._owners[parameter] = weakref.ref(model)
        if optimizer is not None:
            self._optimizers[model], self._remade = optimizer, _remake(optimizer, model)
        return model

    def _build_keras(self, model: KerasModule, loss, optimizer, weights) -> KerasModule:
        """The same of a Keras model: a loss of Keras takes (y, output)."""
        if self.example is not None and (not model.keras_model.built or not model.named_weights()):
            with torch.no_grad():
                calling.call(model.eval(), self.example)
        if weights is not None:
            model.import_weights(weights)
        keras = sys.modules["keras"]
        turned = isinstance(loss, keras.losses.Loss)
        self._loss = (lambda output, y: loss(y, output)) if turned else loss
        if optimizer is not None:
            kind, config = type(optimizer), optimizer.get_config()
            self._remade = lambda other: KerasOptimizer(other, kind.from_config(config))
        return model.train()

    def loss(self, output, y) -> Tensor:
        """The file's loss of an output; one that reads its model, that of the model of the output.

        Raises NotImplementedError where such a loss is asked for an output of another model. While
        torch.compile traces, an output has no history: the only model that was built is its.
        """
        if self.has_logits and not hasattr(output, "logits"):
            output = Logits(first(output))
        if not self._reads_model or (self._builds == 1 and torch.compiler.is_compiling()):
            return self._loss(output, y)
        return self._made_with(output)(output, y)

    def _made_with(self, output) -> Callable:
        """The loss that the file made together with the model that an output is of."""
        given = calling.tensors(getattr(output, "logits", output))
        left, seen = [tensor.grad_fn for tensor in given], set()
        if not any(left):
            return self._loss  # nothing is trained with it
        while left:
            node = left.pop()
            if node is not None and node not in seen:
                seen.add(node)
                owner = self._owners.get(node.variable) if hasattr(node, "variable") else None
                if owner is not None:
                    return owner().loss_of_file
                left += [other for other, _ in node.next_functions]
        raise NotImplementedError(
            "the file's loss reads the model that it was made with, and another one is trained here"
        )

    def prediction_loss(self, output, y) -> Tensor:
        """The file's loss of a prediction, of which an exported file may have only the logits.

        Where the file's loss takes more than these, or what its model's forward leaves in the
        model, which a file has not, the mean of their squares.
        """
        if self._reads_model:
            return first(output).float().square().mean()
        if not self.has_logits:
            return self.loss(output, y)
        logits = first(output)
        try:
            return self.loss(Logits(logits), y)
        except (AttributeError, LookupError):
            return logits.float().square().mean()

    def optimizer(self, model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
        """The file's optimizer of a model, or, where it has none, that of `recipe`."""
        if self._remade is None:
            return training.make_optimizer(model, recipe)
        found = self._optimizers.get(model)
        return self._remade(model) if found is None else found

    def fused_optimizer(self, model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
        """The same optimizer as one kernel for all parameters, where torch has one for it."""
        optimizer = self.optimizer(model, recipe)
        if "fused" not in optimizer.defaults:
            raise NotImplementedError(f"torch has no fused {type(optimizer).__name__}")
        for group in (optimizer.defaults, *optimizer.param_groups):
            group.update(fused=True, foreach=None)
        return optimizer


def _parts(found) -> tuple:
    """(model, loss_fn, optimizer or None), as a file has to return them."""
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise BadFile(
            "pytorch() has to return (model, loss_fn) or (model, loss_fn, optimizer), not "
            f"{type(found).__name__}"
        )
    model, loss, optimizer = (*found, None)[:3]
    if keras_models.is_keras(model):
        return _parts_of_keras(model, loss, optimizer)
    _refuse_keras(model)
    if not isinstance(model, nn.Module):
        raise BadFile(f"pytorch() returns a {type(model).__name__} as its model, not an nn.Module")
    if not callable(loss):
        raise BadFile(f"pytorch() returns a {type(loss).__name__} as loss_fn: give a function")
    if isinstance(loss, type):
        name = loss.__name__
        raise BadFile(
            f"pytorch() returns the class {name} as loss_fn: give {name}(), with brackets"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise BadFile(f"pytorch() returns a {type(optimizer).__name__} as its optimizer")
    ours = set(map(id, model.parameters()))
    if optimizer is not None and not any(
        id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]
    ):
        raise BadFile("the optimizer has no parameter of the model: make it of model.parameters()")
    if optimizer is not None and _needs_closure(optimizer):
        raise BadFile(
            f"the optimizer {type(optimizer).__name__} calls the model itself, several times a step"
            " (its step needs a closure): give one that takes the gradients, such as AdamW"
        )
    return model, loss, optimizer


def _parts_of_keras(model, loss, optimizer) -> tuple:
    """The same of a Keras model, as a module of PyTorch's."""
    keras = sys.modules["keras"]
    if keras.config.backend() != "torch":
        raise BadFile(
            f"Keras runs on {keras.config.backend()} here: leave KERAS_BACKEND to the run, which "
            "sets it to torch"
        )
    if not callable(loss) or isinstance(loss, type):
        raise BadFile("keras() has to give a loss of keras.losses, or a function (output, y)")
    if optimizer is not None and not isinstance(optimizer, keras.Optimizer):
        raise BadFile(f"keras() returns a {type(optimizer).__name__} as its optimizer")
    return KerasModule(model), loss, optimizer


def _refuse_keras(model) -> None:
    """Raise BadFile where a model is Keras's, or a part of it is."""
    keras = sys.modules.get("keras")
    if not hasattr(keras, "Layer"):
        return
    parts = model.modules() if isinstance(model, nn.Module) else [model]
    if any(isinstance(part, keras.Layer) for part in parts):
        on = "PyTorch" if keras.config.backend() == "torch" else "another backend than PyTorch"
        raise BadFile(
            f"this is a Keras model on {on}: give it as tensorflow(), where Keras runs on "
            "TensorFlow, or give pytorch() a model of PyTorch's own modules"
        )


def _parameters_of(value) -> list[nn.Parameter] | None:
    """The parameters of a module, or one by itself; None of anything else."""
    if isinstance(value, nn.Module):
        return list(value.parameters())
    return [value] if isinstance(value, nn.Parameter) else None


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _remake(optimizer: torch.optim.Optimizer, model: nn.Module) -> Callable:
    """How to make an optimizer of the same kind, over the same parameters, for another model."""
    kind, defaults = type(optimizer), dict(optimizer.defaults)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [
        group | {"params": [names.get(id(parameter)) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]

    def make(other: nn.Module) -> torch.optim.Optimizer:
        parameters, taken = dict(other.named_parameters()), inspect.signature(kind).parameters
        if not all(parameters.keys() >= set(group["params"]) for group in groups):
            raise NotImplementedError("its optimizer has parameters that the model has not")
        theirs = [g | {"params": [parameters[name] for name in g["params"]]} for g in groups]
        return kind(theirs, **{name: v for name, v in defaults.items() if name in taken})

    return make


# Weights and batches -----------------------------------------------------------------------------


def export_weights(model: nn.Module) -> dict[str, np.ndarray]:
    """Copies of all tensors that `state_dict` holds; of a Keras model, of its weights."""
    if isinstance(model, KerasModule):
        return model.export_weights()
    state = model.state_dict().items()
    return {name: _array(tensor) for name, tensor in state if isinstance(tensor, Tensor)}


def _array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()


def import_weights(model: nn.Module, weights: dict[str, np.ndarray]) -> None:
    """Copy `weights` into a model; its extra state stays. ValueError where they do not fit."""
    if isinstance(model, KerasModule):
        return model.import_weights(weights)
    given = {n: v for n, v in model.state_dict().items() if not isinstance(v, Tensor)}
    given |= {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
    try:
        model.load_state_dict(given)
    except RuntimeError as error:
        lines = str(error).splitlines()
        raise ValueError(f"the weights do not fit the model: {lines[-1].strip()}") from None


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> trainable parameter."""
    if isinstance(model, KerasModule):
        return model.trained()
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def reseed(model: nn.Module, seed: int) -> None:
    """Begin the model's random numbers anew, such as those of its dropout."""
    runtime.set_seed(seed)
    if isinstance(model, KerasModule):
        model.reseed(seed)


def parameter_count(model: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def to_device(x, y) -> tuple:
    """Copy arrays, and structures of them, to the device as they are."""
    return mapped(_tensor, x), mapped(_tensor, y)


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array, order="C")).to(runtime.device())


def resident_batches(batches: list[tuple]) -> list[tuple]:
    """Copy batches to the device, so that a timed step waits for no input."""
    return [to_device(x, y) for x, y in batches]


# What a train step needs -------------------------------------------------------------------------


def check(file_model: UserModel, model: nn.Module, batch: tuple) -> dict:
    """Call model and loss on a batch. Raises BadFile with what to do where no step can be made.

    Returns {"has_logits": whether the output is an object that has them, "targets_first": whether
    the loss takes (y, output), "has_optimizer": whether the file has one, "own_step": the name of
    a step that the model brings and that is not used, or None}.
    """
    x, y = batch
    model.train()
    output = _fits("model", lambda: calling.call(model, x), x)
    loss = _fits("loss_fn(output, y)", lambda: file_model.loss(output, y), x)
    check_order(file_model._loss)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.dim():
        said = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise BadFile(f"loss_fn gives no scalar but {said}: return the mean over the batch")
    if not math.isfinite(loss.item()):
        raise BadFile(
            f"the loss of the first batch is {loss.item()}: look at the data and the model"
        )
    check_broadcast(file_model.loss, output, y)
    if isinstance(model, KerasModule) and model.keras_model.losses:
        raise BadFile(
            "the Keras model adds losses (regularizers, add_loss), and a step of PyTorch"
            " adds none: write them into loss_fn"
        )
    if not named_parameters(model):
        raise BadFile("the model has no parameter that is trained")
    if not loss.requires_grad:
        raise BadFile("the loss depends on no parameter: don't detach the output, nor use no_grad")
    return {
        "has_logits": not isinstance(output, Tensor) and hasattr(output, "logits"),
        "targets_first": False,
        "has_optimizer": file_model._remade is not None,
        "own_step": "training_step" if hasattr(model, "training_step") else None,  # Lightning's
    }


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory could not be allocated; on a CPU that is a RuntimeError of its allocator."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "DefaultCPUAllocator" in str(error)


def _fits(what: str, function: Callable, x):
    """What a call gives, or why the batch is none for it."""
    try:
        return function()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        doubles = any(getattr(leaf, "dtype", None) == torch.float64 for leaf in leaves(x))
        hint = "; x is float64: give float32" if doubles else ""
        raise BadFile(f"the batch does not fit {what}: {one_line(error)}{hint}") from error


def repeatable(model: nn.Module, x) -> float:
    """How far two predictions of the same inputs are apart; 0 for a model that draws no numbers.

    Raises BadFile where a model leaves inputs behind for which it predicts something else.
    """
    predict, copies = training.make_predict(model), [mapped(Tensor.clone, x) for _ in range(2)]
    first, second = (_tensors(predict(each)) for each in copies)
    apart = comparing.apart(first, second)
    if comparing.apart(first, _tensors(predict(copies[0]))) > 1e-5 >= apart:
        raise BadFile(
            "the model changes its inputs in place, and a run uses each batch many times: write"
            " x = x - mean instead of x.sub_(mean), or begin with x = x.clone()"
        )
    return apart


def _tensors(output):
    return dict(signatures.named_tensors(getattr(output, "logits", output)))
