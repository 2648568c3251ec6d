"""The PyTorch model of a file: run with every call of a function seen, and changed where asked."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bench.port.values import distance, numpy, outputs
from shared import user_model
from shared.user_model import RECIPE, BadFile

# Before TensorFlow: the other way round the process aborts, since Triton and it bring LLVM.
with suppress(ImportError):
    importlib.import_module("triton")
KIT = importlib.import_module("pt_impl.kit.user_model")
CALLING = importlib.import_module("pt_impl.kit.calling")

DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"}
DROPOUTS |= {"feature_alpha_dropout", "dropout_", "feature_dropout"}
RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
ATTENTION = {"multi_head_attention_forward": 10, "scaled_dot_product_attention": 4}  # -> dropout_p
SHAKEN = 1e-6  # relative to a weight, as `twinbench try` tells equal work
IN_PLACE = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__")


@dataclass
class Event:
    """A call of a function: its place in the order of calls, its module, and what it gave."""

    place: int
    name: str
    function: Callable
    args: tuple
    kwargs: dict
    out: Tensor
    layer: str

    def tensors(self) -> list[Tensor]:
        """The tensors among its arguments."""
        given = [*self.args, *self.kwargs.values()]
        nested = [part for part in given if isinstance(part, (tuple, list))]
        given += [inner for part in nested for inner in part]
        return [part for part in given if isinstance(part, Tensor)]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or name."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[position] if len(self.args) > position else default

    def again(self, **changes: Any) -> Any:
        """Call the function with other arguments: `name=(position, value)`."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, (position, value) in changes.items():
            if len(args) > position and name not in kwargs:
                args[position] = value
            else:
                kwargs[name] = value
        return self.function(*args, **kwargs)

    def is_again(self, other: Event) -> bool:
        """Whether it is the same call of another run."""
        return (self.place, self.name, self.layer) == (other.place, other.name, other.layer)


# What stands for a call: given the call, its result, or None where it is left as it is.
Patch = Callable[[Event], Any]


class Calls(TorchFunctionMode):
    """Sees calls of functions of torch, which drop nothing. keep: whether to list them."""

    def __init__(self, stack: list[str], *, patches: list[Patch], keep: bool):
        super().__init__()
        self.stack, self.patches, self.keep = stack, patches, keep
        self.events: list[Event] = []
        self.place = 0
        self.see: Callable[[Event], None] | None = None

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if name in ("__get__", "__set__", "size", "dim", "numel", "stride", "is_floating_point"):
            return function(*args, **kwargs)
        if _changes_in_place(function, args, kwargs) and args and isinstance(args[0], Tensor):
            self._keep_before(args[0])
        layer = self.stack[-1] if self.stack else ""
        event = Event(self.place, name, function, args, kwargs, None, layer)
        results = (patch(event) for patch in self.patches)
        result = next((result for result in results if result is not None), None)
        if result is None:
            function, args, kwargs = _without_dropout(function, name, args, kwargs)
            result = function(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) and result else result
        if not isinstance(first, Tensor) or not first.is_floating_point() or not _is_seen(name):
            return result
        event.out = first
        self.place += 1
        if self.see:
            self.see(event)
        if self.keep:
            self.events.append(event)
        return result

    def _keep_before(self, tensor: Tensor) -> None:
        """Events that hold a tensor which is about to change get a copy of it."""
        before = None
        for event in self.events:
            if event.out is tensor or any(arg is tensor for arg in event.args):
                before = tensor.clone() if before is None else before
                event.out = before if event.out is tensor else event.out
                event.args = tuple(before if arg is tensor else arg for arg in event.args)


@dataclass
class Trace:
    """One run: the calls in order, the output's leaves, and its whole."""

    events: list[Event]
    outputs: list[Tensor]
    output: Any
    training: bool
    state: dict[str, np.ndarray]  # the buffers after it


class PyTorchSide:
    """The model of `pytorch()`, with its loss and its optimizer."""

    def __init__(self, make: Callable, x: Any, y: Any):
        self.kit = KIT
        self.file_model = self.kit.UserModel(make)
        self.x, self.y = self.kit.to_device(x, y)
        self.file_model.example = self.x
        self.model = self.file_model.build(None)
        self.patches: list[Patch] = []
        self.before: Callable[[Any], Any] = lambda x: x  # what is made of its inputs
        self.now = self.x  # the inputs of the last run
        self.stack: list[str] = []
        _name_calls(self.model, self.stack)
        self.optimizer = self.file_model.optimizer(self.model, RECIPE)

    def check(self) -> None:
        """Raises BadFile where no step can be made of the model. Nothing of it is changed."""
        with kept(self.model.buffers()):
            self.kit.check(self.file_model, self.model, (self.x, self.y))
        self.trace()

    def trace(self, *, training: bool = False) -> Trace:
        """Run the model on the batch, without gradients; its state stays what it is."""
        with kept(self.model.buffers()):
            with torch.no_grad(), self.calls(training, keep=True) as calls:
                output = self.call(self.x)
            after = {name: numpy(b).copy() for name, b in self.model.named_buffers()}
        return Trace(calls.events, outputs(output), output, training, after)

    def call(self, x: Any) -> Any:
        """The model's output for inputs as `batch` gives them."""
        self.now = x
        arguments, named = CALLING.call_arguments(self.model, self.before(x))
        return self.model(*arguments, **named)

    def input(self, place: int) -> Tensor:
        """An input of the run that is going on."""
        return user_model.leaves(self.now)[place]

    @contextmanager
    def calls(self, training: bool, *, keep: bool = False) -> Iterator[Calls]:
        """In which calls are seen and changed by the patches; the model is in a mode."""
        modes = {module: module.training for module in self.model.modules()}
        self.stack.clear()
        self.model.train() if training else self.model.eval()
        mode = Calls(self.stack, patches=self.patches, keep=keep)
        # The fused path of TransformerEncoder hides its layers.
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with mode:
                yield mode
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for module, was in modes.items():
                module.training = was

    def rounding(self, events: list[Event], *, training: bool) -> list[float] | None:
        """What rounding does to each call's output, by a run in float64; None where it has none."""
        sizes: list[float] = []

        def see(event: Event) -> None:
            place = len(sizes)
            if place >= len(events) or events[place].name != event.name:
                raise BadFile("the model makes other calls in float64 than in float32")
            sizes.append(distance(numpy(event.out), numpy(events[place].out)))

        try:
            with self.in_double(), torch.no_grad(), self.calls(training) as calls:
                calls.see = see
                self.call(self.x)
        except Exception:  # the model is written for float32
            return None
        return sizes

    @contextmanager
    def in_double(self) -> Iterator[None]:
        """In which the model and the batch are float64."""
        kept = self.model, self.x
        try:
            self.model = copy.deepcopy(self.model).double()
            self.x = user_model.mapped(_double, self.x)
            yield
        finally:
            self.model, self.x = kept

    @contextmanager
    def shaken(self) -> Iterator[None]:
        """In which weights are off by what rounding may do to them; all is as before after it."""
        random = np.random.default_rng(0)
        with kept(self.model.parameters()):
            for parameter in self.model.parameters():
                noise = torch.from_numpy(random.standard_normal(tuple(parameter.shape)))
                parameter.data.mul_((1 + SHAKEN * noise).to(parameter.dtype))
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """In which weights, buffers and the optimizer change; all is as before after it."""
        state = copy.deepcopy(self.optimizer.state_dict())
        with kept([*self.model.parameters(), *self.model.buffers()]):
            yield
        self.optimizer.load_state_dict(state)
        self.model.zero_grad()

    def module(self, name: str) -> nn.Module | None:
        """A module by its name."""
        return dict(self.model.named_modules()).get(name)

    def loss(self, output: Any, y: Any | None = None) -> Tensor:
        """The file's loss."""
        return self.file_model.loss(output, self.y if y is None else y)


@contextmanager
def kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """In which tensors may change; they are what they were after it."""
    tensors = list(tensors)
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.data.copy_(value)


def _without_dropout(function, name: str, args: tuple, kwargs: dict) -> tuple:
    if name in DROPOUTS:
        return torch.clone, args[:1] or (kwargs["input"],), {}
    if name == "bernoulli_":  # of a stochastic depth that is written out
        return torch.Tensor.fill_, (args[0], kwargs.get("p", (*args[1:], 0.5)[0])), {}
    if name in RECURRENT:  # input, (sizes,) state, weights, biases, layers, dropout, ...
        place = 6 if isinstance(args[3], (list, tuple)) else 5
        args = (*args[:place], 0.0, *args[place + 1 :])
    if name in ATTENTION:
        place = ATTENTION[name]
        args = (*args[:place], 0.0, *args[place + 1 :]) if len(args) > place else args
        kwargs = kwargs | {"dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
    return function, args, kwargs


def _changes_in_place(function: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether a call writes into its first argument: by its name, or as it is told."""
    name = getattr(function, "__name__", "")
    if (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE:
        return True
    place = _place_of_inplace(function)
    return bool(kwargs.get("inplace") or (place is not None and args[place : place + 1] == (True,)))


@cache
def _place_of_inplace(function: Callable) -> int | None:
    """Which argument of a function says `inplace`; None where it has none."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of a function that is no Python
        return None
    return names.index("inplace") if "inplace" in names else None


def _is_seen(name: str) -> bool:
    if "empty" in name:  # whatever the memory held
        return False
    return not name.startswith("_") or name in ("__getitem__", "_pad_packed_sequence")


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _name_calls(model: nn.Module, stack: list[str]) -> None:
    """Have the stack name the module that is being called, of a copy of the model, too."""

    def enter(name: str) -> Callable:
        return lambda module, args: stack.append(name)

    def leave(module: nn.Module, args: tuple, output: Any) -> None:
        if stack:
            stack.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(enter(name))
        module.register_forward_hook(leave)
