"""Which channels of a module belong together, as `torch_pruning` finds them.

It follows them through what autograd records of one pass, and takes what it does not know for
operators on single elements. So this is a guess: compare the smaller model's outputs.

Twin: `tf_impl/kit/channels.py`.
Where the frameworks differ: Keras models have graphs. A module is code, traced for one example.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch_pruning as tp
from torch import Tensor, nn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MAKERS = (*_CONVOLUTIONS, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)


class Use(NamedTuple):
    """What a module has of a group, or a parameter that is no layer's of PyTorch."""

    name: str
    side: str  # "in": it reads the channels, "out": it makes them, "both": one by one
    cut: Callable  # (module or parameter, sorted channels) -> it without them
    channels: list  # of (channel here, channel of the group)


class Group(NamedTuple):
    """Channels that go together: all that a layer makes, and those that others make of them."""

    name: str  # of the layer
    size: int
    runs: list[int]  # into how many parts layers divide them, such as grouped convolutions
    uses: list[Use]
    ends: list[bool]  # for each place in the model's outputs that they reach: whether it has them


class Channels:
    """The groups of a model in evaluation mode, which is left as it is. x: as a step takes it.

    `lost` are layers whose channels can't be followed: name -> why. `not_run` are the parameters
    that the example does not use. `training` is whether the pass was one of training, since parts
    run only there, such as auxiliary heads.

    Raises NotImplementedError where `torch_pruning` cannot trace the model.
    """

    def __init__(self, model: nn.Module, x) -> None:
        self.groups, self.lost, self.training = [], {}, False
        trace = _Trace(model, x, training=False)
        if trace.not_run:
            try:
                more = _Trace(model, x, training=True)
            except NotImplementedError:  # such as a model that then takes labels, too
                more = trace
            self.training = len(more.not_run) < len(trace.not_run)
            trace = more if self.training else trace
        self.not_run, seen = trace.not_run, set()
        # The widest first: what a narrower one makes may be a part of it.
        for layer in sorted(filter(makes_channels, trace.names), key=_width, reverse=True):
            if layer not in seen:
                found, why = trace.follow(layer)
                seen |= {node.module for node, cut in found if trace.side(cut) == "out"}
                if why:
                    self.lost[trace.names[layer]] = why
                else:
                    self.groups.append(trace.group(layer, found))


def makes_channels(module: nn.Module) -> bool:
    """Whether it is a convolution or dense layer that mixes the channels that it reads."""
    return isinstance(module, _MAKERS) and not is_depthwise(module)


def is_depthwise(module: nn.Module) -> bool:
    """Whether it is a convolution that filters channels one by one."""
    return isinstance(module, _CONVOLUTIONS) and 1 < module.groups == module.out_channels


def outputs(model: nn.Module, x, training: bool) -> list[Tensor]:
    """Return the tensors that the model gives.

    training: the mode of modules that hold others; dropout and normalization stay in evaluation.
    """
    for module in model.modules():
        module.training = training and any(module.children())
    x = copy.deepcopy(x)  # code may change it in place
    by_name = isinstance(x, Mapping)
    return _tensors(model(**x) if by_name else model(*x) if isinstance(x, tuple) else model(x))


def _tensors(output) -> list[Tensor]:
    """The tensors of tuples, lists, mappings and dataclasses."""
    if is_dataclass(output) and not isinstance(output, Mapping):
        output = vars(output)
    if isinstance(output, Mapping | list | tuple):
        parts = output.values() if isinstance(output, Mapping) else output
        return [tensor for part in parts for tensor in _tensors(part)]
    return [output] if isinstance(output, Tensor) else []


class _Channel(NamedTuple):  # as index mappings of torch_pruning take them
    idx: int
    root_idx: int


class _Trace:
    """What `torch_pruning` finds in a record of one pass."""

    def __init__(self, model: nn.Module, x, training: bool) -> None:
        with torch.no_grad():  # else a copy of TorchScript has no leaves
            model, found = copy.deepcopy(model), []  # its hooks stay where tracing fails

        def forward(model, x):
            found.extend(t for t in outputs(model, x, training) if t.grad_fn is not None)
            return found

        for parameter in model.parameters():  # what is frozen would not be recorded
            parameter.requires_grad_(parameter.is_floating_point())
        try:
            with torch.enable_grad():
                self.graph = tp.DependencyGraph().build_dependency(
                    model, x, forward_fn=forward, verbose=False
                )
        except Exception as error:  # whatever the model's code or the tracer raises
            reason = "its code shuffles channels" if isinstance(error, ZeroDivisionError) else error
            raise NotImplementedError(f"torch_pruning can't trace the model: {reason}") from error
        self.ends = {tensor.grad_fn: max(tensor.shape, default=1) for tensor in found}
        self.names = {m: name for name, m in model.named_modules()}
        self.parameters = {p: name for name, p in model.named_parameters()}
        nodes = self.graph.module2node
        run = {p for m in nodes if isinstance(m, nn.Module) for p in m.parameters()}
        self.not_run = [n for p, n in self.parameters.items() if p not in run and p not in nodes]

    def side(self, cut: Callable) -> str:
        reads = self.graph.is_in_channel_pruning_fn(cut)
        makes = self.graph.is_out_channel_pruning_fn(cut)
        return "both" if reads and makes else "in" if reads else "out"

    def follow(self, layer: nn.Module) -> tuple[dict, str]:
        """Follow what a layer makes: (node, cut) -> channels; and why that ends, if so.

        `get_pruning_group` follows lists of channels and need not end: where code swaps halves and
        adds (rotary positions) it meets ever new orders, and numbers beyond all channels.
        """
        if layer not in self.graph.module2node:
            return {}, "it is no part of the outputs, or another module reads its weight"
        most = sum(sum(m.weight.shape[:2]) for m in self.names if makes_channels(m))
        cut = self.graph.get_pruner_of_module(layer).prune_out_channels
        every = [_Channel(channel, channel) for channel in range(_width(layer))]
        found = {(self.graph.module2node[layer], cut): dict.fromkeys(every)}
        open_ends = [(self.graph.module2node[layer], cut, every)]
        while open_ends:
            node, cut, channels = open_ends.pop()
            for dependency in node.dependencies:
                if not dependency.is_triggered_by(cut):
                    continue
                there = channels
                for mapping in filter(None, dependency.index_mapping):
                    there = mapping(there)
                place = dependency.target, dependency.handler
                new = [channel for channel in there if channel not in found.get(place, ())]
                if any(channel.idx >= most for channel in new):
                    return found, "torch_pruning loses count of them"
                if new:
                    found.setdefault(place, {}).update(dict.fromkeys(new))
                    open_ends.append((*place, new))
        return found, ""

    def group(self, layer: nn.Module, found: dict) -> Group:
        """Put down what `follow` found by names, for other copies of the model."""
        uses, runs, ends = [], [], []
        for (node, cut), channels in found.items():
            module, side = node.module, self.side(cut)
            if side != "in" and node.grad_fn in self.ends:
                ends.append(max(channels).idx < self.ends[node.grad_fn])
            if node.type == tp.ops.OPTYPE.PARAMETER:
                cut = partial(_cut_parameter, node.pruning_dim)
                uses.append(Use(self.parameters[module], "both", cut, list(channels)))
            elif module in self.names:
                uses.append(Use(self.names[module], side, cut, list(channels)))
                if not is_depthwise(module):
                    pruner = self.graph.get_pruner_of_module(module)
                    runs.append(pruner.get_in_channel_groups(module))
        return Group(self.names[layer], _width(layer), runs, uses, ends)


def _width(layer: nn.Module) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def _cut_parameter(axis: int, parameter: nn.Parameter, channels: list[int]) -> nn.Parameter:
    rest = sorted(set(range(parameter.shape[axis])) - set(channels))
    index = torch.tensor(rest, dtype=torch.long, device=parameter.device)
    return nn.Parameter(parameter.index_select(axis, index))
