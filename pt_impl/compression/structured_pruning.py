"""Structured pruning: whole channels leave a network, which becomes a smaller one.

What it changes: of the channels that each convolution and dense layer makes, those whose filters
have the smallest L1 norm go (Li et al., 2017, "Pruning Filters for Efficient ConvNets", section
3.1), with their normalisation entries and with what later layers would have read of them. Where
layers make the same channels (they are added, multiplied, or filtered one by one), they lose the
same ones: those are a dependency group (Fang et al., 2023, "DepGraph: Towards Any Structural
Pruning"). The result is an ordinary dense model with fewer channels: less arithmetic, less memory,
a smaller file, on any hardware and in any runtime. Removing a share s of all channels leaves about
(1 - s)^2 of the multiply-accumulates and weights, since each layer loses inputs and outputs.

Its twin: `tf_impl/compression/structured_pruning.py`.

Where the frameworks differ and why:
- Which layer feeds which stands in a Keras model's graph. A PyTorch model is code, so here
  `torch_pruning` finds the groups in the graph that autograd records of one pass, and `forward`
  stays as it is over smaller modules: code that splits or reshapes channels by fixed numbers would
  break, so such groups stay whole. Subclassed Keras models have no graph and are refused.
- `nn.MultiheadAttention` has one width for what it reads, its heads and what it gives, so channels
  that it reads stay. Keras's layer has three widths, and loses what it reads.
- Flattened images are ordered channel by channel here (NCHW), pixel by pixel there (NHWC).
- `torch.nn.utils.prune.ln_structured` only masks channels, and saves nothing. TensorFlow Model
  Optimization has no structured pruning.

When it helps and when it hurts: it is the kind of pruning that makes a model faster everywhere. It
costs more accuracy than single weights do at the same share, since a channel cannot be picked
apart: train the smaller model on. From a start at random, training the small model from scratch is
as good (Liu et al., 2019, "Rethinking the Value of Network Pruning"). Kernels gain little where
the channels that stay no longer fill vector registers: prefer counts that are multiples of 8 or 16.

Run it alone: `python -m pt_impl.compression.structured_pruning` prints sizes and times of smaller
models.
"""

import copy
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch_pruning as tp
from torch import Tensor, nn
from torch.nn.utils import prune
from torch_pruning._helpers import _HybridIndex
from torch_pruning.dependency import index_mapping

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NORMS = (*_BATCH_NORMS, *_INSTANCE_NORMS, nn.LayerNorm, nn.GroupNorm)
_CUT = (*_CONVOLUTIONS, *_TRANSPOSED, nn.Linear, *_NORMS, nn.PReLU, nn.Embedding)
_READS = ("in_channels", "in_features")
_MAKES = ("out_channels", "out_features", "num_features", "num_channels", "embedding_dim")
# What autograd calls operators that change no channel by another: element by element, pixel by
# pixel within a channel, or another order of axes.
_WITHIN_CHANNELS = re.compile(
    r"(Add|Sub|Mul|Div|Neg|Abs|Pow|Exp|Log|Sqrt|Rsqrt|Clamp(Min|Max)?|Maximum|Minimum|Where|Relu"
    r"|LeakyRelu|Elu|Gelu|Silu|Sigmoid|Tanh|Hardtanh|Hardswish|Hardsigmoid|Softplus|Mish|Alias"
    r"|AsStrided|Clone|ToCopy|NativeDropout|MaxPool[123]D(WithIndices)?|AvgPool[123]D|MkldnnMaxPool[23]D"
    r"|Adaptive(Avg|Max)Pool[123]D|MkldnnAdaptiveAvgPool2D|ConstantPadNd|UpsampleNearest[123]D"
    r"|UpsampleBilinear2D|Permute|Transpose|Unsqueeze|Squeeze|View|UnsafeView|ReshapeAlias|Cat|T"
    r")Backward\d+$"
)
_REDUCTIONS = re.compile(r"(Mean|Amax|Sum|Select)Backward\d+$")
_PRODUCTS = re.compile(r"(Addmm|Mm|View|UnsafeView|T)Backward\d+$")


def remove_channels(model: nn.Module, x, *, share: float) -> nn.Module:
    """Return a smaller copy of `model`: `share` of the channels of its layers are gone.

    Cut are convolutions and `nn.Linear`, but those whose channels are the model's outputs. What
    else can't be followed from channel to channel stays whole, and a warning names it. `model`
    itself is left as it was; make a new optimizer for the copy.
    x: example input: a tensor, a tuple of the positional arguments, a dict of the named ones.
    share: at least 0 and below 1. Of n channels the round(n * (1 - share)) whose filters have the
    largest L1 norm stay, at least one, in their order; of equal ones the first. Norms of layers
    that make the same channels are added up; within groups (of a convolution, of `nn.GroupNorm`)
    each loses as many.

    The copy's outputs are compared with those of the original in which nothing reads what was
    removed. Raises ValueError for another share, a model with pruning masks and one without such
    layers; NotImplementedError, with the reason, where Python cannot copy the model, no layer can
    be cut or the outputs would differ.
    Source: Li et al. (2017); `torch_pruning.DependencyGraph` (Fang et al., 2023).
    """
    if not 0.0 <= share < 1.0:
        raise ValueError(f"share must be at least 0 and below 1, not {share!r}")
    if prune.is_pruned(model):
        raise ValueError("the model has pruning masks: finalize it first")
    if not any(_makes_channels(module) for module in model.modules()):
        raise ValueError("the model has no convolution or linear layer to take channels from")
    smaller = _copy(model).eval()
    groups, whole = _groups(smaller, x)
    if not groups:
        reason = _line(whole) or "all of them are its outputs"
        raise NotImplementedError(f"no layer of the model can lose channels: {reason}")
    removed = {}  # (module or parameter, "in" or "out") -> the channels that go
    for name, group in groups.items():
        weakest = _weakest(group, share)
        if share and not weakest:
            whole[name] = (
                f"its groups of {group.size // group.parts} channels lose none at this share"
            )
        for item in group.items:
            removed.setdefault((item.module, item.side), set()).update(
                channel for channel, root in item.channels if root in weakest
            )
    if any(removed.values()):
        _cut_and_compare(smaller, x, removed)
    if whole:
        warnings.warn(f"left whole: {_line(whole)}", stacklevel=2)
    for module, source in zip(smaller.modules(), model.modules(), strict=True):
        module.training = source.training
    return smaller


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # of `weight_norm` after a pass with gradients: a computed tensor
        line = " ".join(str(error).split())
        raise NotImplementedError(f"Python cannot copy the model: {line}") from error


class _Group(NamedTuple):
    """Channels that go together: as many as its root layer makes, in `parts` equal runs."""

    size: int
    parts: int
    items: list  # of _Item


class _Item(NamedTuple):
    """What a group cuts off one module: which of its channels are which of the root's."""

    module: nn.Module
    side: str | tuple  # "in", "out", "both"; or the name and axis of a parameter of its own
    channels: list  # of (channel here, channel of the root)


def _makes_channels(module: nn.Module) -> bool:
    """Whether it is a convolution or dense layer that mixes the channels that it reads."""
    return isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED, nn.Linear)) and not _depthwise(module)


def _depthwise(module: nn.Module) -> bool:
    return isinstance(module, _CONVOLUTIONS) and 1 < module.groups == module.in_channels


def _call(model: nn.Module, x):
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def _tensors(output) -> list[Tensor]:
    """All tensors of an output: of tuples, lists, dicts and dataclasses."""
    if isinstance(output, Tensor):
        return [output]
    if is_dataclass(output) and not isinstance(output, dict):
        output = vars(output)
    parts = output.values() if isinstance(output, dict) else output
    nested = isinstance(output, (dict, list, tuple))
    return [tensor for part in parts for tensor in _tensors(part)] if nested else []


def _groups(model: nn.Module, x) -> tuple[dict[str, _Group], dict[str, str]]:
    """The groups that can be cut, by a layer's name, and the layers that can't: name -> why."""
    graph, outputs = _trace_all(model, x)
    names = {module: name for name, module in model.named_modules()}
    owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    layers = [module for module in model.modules() if _makes_channels(module)]
    most = sum(_channels(layer) + _reads(layer) for layer in layers)
    found, whole, seen = {}, {}, set()
    # The widest first: what a narrower one makes may be a part of it.
    for layer in sorted(layers, key=_channels, reverse=True):
        if layer in seen:
            continue
        if layer not in graph.module2node:
            whole[names[layer]] = "it is no part of the outputs, or another module reads its weight"
            continue
        try:
            members = _members(graph, layer, most)
            seen |= {member.node.module for member in members if member.side == "out"}
            found[names[layer]] = _group(model, layer, members, outputs, owners)
        except _Whole as reason:
            if str(reason):
                whole[names[layer]] = str(reason)
    return found, whole


class _Member(NamedTuple):
    """What stands in the graph where channels of a root layer go."""

    node: tp.dependency.Node
    side: str  # "in", "out", "both"
    channels: list  # of (channel here, channel of the root)


def _members(graph: tp.DependencyGraph, root: nn.Module, most: int) -> list[_Member]:
    """Follow the channels of a root layer through the graph, each pair of them once.

    `get_pruning_group` follows lists of them and need not end: where code swaps halves and adds
    (rotary positions) it meets ever new orders, and numbers beyond all channels. Nowhere can there
    be more than all layers read and make together: `most`.
    """
    index_mapping.update_index_mapping(graph)
    cut = graph.get_pruner_of_module(root).prune_out_channels
    every = [_HybridIndex(channel, channel) for channel in range(_channels(root))]
    found = {(graph.module2node[root], cut): dict.fromkeys(every)}
    open_ends = [(graph.module2node[root], cut, every)]
    while open_ends:
        node, handler, pairs = open_ends.pop()
        for dependency in node.dependencies:
            if not dependency.is_triggered_by(handler):
                continue
            there = pairs
            for mapping in filter(None, dependency.index_mapping):
                there = mapping(there)
            place = dependency.target, dependency.handler
            new = [pair for pair in there if pair not in found.get(place, ())]
            if any(channel >= most for channel, _ in new):
                raise _Whole("torch_pruning loses count of them")
            if new:
                found.setdefault(place, {}).update(dict.fromkeys(new))
                open_ends.append((*place, new))
    return [
        _Member(node, _side(node.module, handler), [tuple(pair) for pair in pairs])
        for (node, handler), pairs in found.items()
    ]


class _Whole(Exception):
    """Why a group can't be cut; nothing for the model's outputs, which are not to be."""


def _trace_all(model: nn.Module, x) -> tuple[tp.DependencyGraph, set]:
    """Trace the model, with the parts that run in training alone where it has such."""
    graph, outputs = _trace(model, x)
    modules = set(model.modules())
    read = {module.out_proj for module in modules if isinstance(module, nn.MultiheadAttention)}
    layers = set(filter(_makes_channels, modules - read))  # it reads that one's weight, no call
    if layers <= set(graph.module2node):
        return graph, outputs
    try:
        more, ends = _trace(model, x, training=True)
    except NotImplementedError:  # such as a model that then takes labels, too
        return graph, outputs
    known, found = layers.intersection(graph.module2node), layers.intersection(more.module2node)
    return (more, ends) if known < found else (graph, outputs)


def _trace(model: nn.Module, x, training: bool = False) -> tuple[tp.DependencyGraph, set]:
    """The dependencies that autograd's record of a pass shows, and the ends of that record.

    training: of modules that hold others, whose code may run auxiliary heads; dropout and
    normalization stay in evaluation.
    """
    needs = {parameter: parameter.requires_grad for parameter in model.parameters()}
    outputs = []

    def forward(model, x):
        for module in model.modules():
            module.training = training and any(module.children())
        outputs.extend(t for t in _tensors(_call(model, x)) if t.grad_fn is not None)
        return outputs

    try:
        for parameter in needs:  # what is frozen would not be recorded
            parameter.requires_grad_(parameter.is_floating_point())
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = tp.DependencyGraph().build_dependency(
                model, x, forward_fn=forward, verbose=False
            )
    except Exception as error:  # whatever the model's code or the tracer raises
        reason = "its code shuffles channels" if isinstance(error, ZeroDivisionError) else error
        raise NotImplementedError(f"torch_pruning can't trace the model: {reason}") from error
    finally:
        model.eval()
        for parameter, need in needs.items():
            parameter.requires_grad_(need)
    return graph, {output.grad_fn for output in outputs}


def _channels(layer: nn.Module) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def _reads(layer: nn.Module) -> int:
    return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels


def _side(module: nn.Module, handler: Callable) -> str:
    if not _makes_channels(module):
        return "both"
    return "in" if handler.__name__ == "prune_in_channels" else "out"


def _group(model, root, members, outputs, owners) -> _Group:
    """Make a group of what `torch_pruning` found; raise _Whole where it is not to be cut."""
    size, parts, items = _channels(root), 1, []
    for node, side, channels in members:
        module = node.module
        if side != "in" and (node.type == tp.ops.OPTYPE.OUTPUT or node.grad_fn in outputs):
            raise _Whole
        if len({channel for channel, _ in channels}) < len(channels):
            raise _Whole("some of them are combined with others of them")
        if node.type == tp.ops.OPTYPE.PARAMETER:
            items.append(_Item(*_owner(model, module, size, channels), channels))
            continue
        if not isinstance(module, (*_CUT, nn.MultiheadAttention)):
            _check_operator(node, max(channels)[0] + 1)
            continue
        if side == "in" and max(channels)[0] >= _reads(module):
            raise _Whole(f"{type(module).__name__} reads something else in their place")
        runs = _check_module(module, channels, size, owners)
        if max(runs, parts) % min(runs, parts):
            raise _Whole(f"it is divided into {runs} and into {parts} groups")
        parts = max(runs, parts)
        items.append(_Item(module, side, channels))
    return _Group(size, parts, items)


def _owner(model, parameter, size, channels) -> tuple[nn.Module, tuple[str, int]]:
    """Find the module that holds a parameter of its own, which has one axis of the channels."""
    shape = list(parameter.shape)
    for module in model.modules():
        for name, own in module.named_parameters(recurse=False):
            if own is parameter and shape.count(size) == 1 and _in_order(channels, size):
                return module, (name, shape.index(size))
    raise _Whole(f"which axis of a parameter {list(parameter.shape)} holds channels is unclear")


def _in_order(channels: list, size: int) -> bool:
    return sorted(channels) == [(channel, channel) for channel in range(size)]


def _check_module(module, channels, size, owners) -> int:
    """Raise where a module can't lose these channels; return into how many runs it divides them."""
    kind = type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        raise _Whole("nn.MultiheadAttention has one width for its inputs, heads and outputs")
    if any(owners[id(parameter)] > 1 for parameter in module.parameters(recurse=False)):
        raise _Whole(f"{kind} shares its weight with another module")
    if "weight" not in module._parameters and "weight" in dir(module):
        raise _Whole(f"{kind} computes its weight")
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) > 1:
        raise _Whole("nn.LayerNorm normalizes over pixels, too")
    runs = getattr(module, "num_groups", getattr(module, "groups", 1))
    if _depthwise(module):
        if module.out_channels != module.in_channels:
            raise _Whole("a depthwise convolution makes several channels of one")
        return 1
    if runs > 1 and (isinstance(module, _TRANSPOSED) or not _in_order(channels, size)):
        raise _Whole(f"{kind} groups them with other channels")
    return runs


def _check_operator(node, count: int) -> None:
    """Raise unless an operator leaves `count` channels apart, as far as autograd's record tells."""
    record, kinds = node.grad_fn, tp.ops.OPTYPE
    if not node.inputs:
        return  # of a weight alone
    name = record.name() if hasattr(record, "name") else "an unknown operator"
    before = list(getattr(record, "_saved_self_sym_sizes", ()))
    after = list(record._input_metadata[0].shape) if hasattr(record, "_input_metadata") else []
    dims = getattr(record, "_saved_dim", ())
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    dims = [dim - 2**64 if dim >= 2**63 else dim for dim in dims]
    reduced = {dim % len(before) for dim in dims} if before else set()
    # Where channels are the last axis, too: a root mean square, as norms take it.
    last = len(before) == 2 or (before[-1:] == [count] and before.count(count) == 1)
    over = (len(before) > 3 and 1 in reduced) or (last and reduced == {len(before) - 1})
    if node.type == kinds.RESHAPE:
        flat = [before[0], math.prod(before[1:])] if before else None
        rows = 2 in (len(before), len(after)) or before[:1] == after[:1]
        same = rows and after[-1:] == before[-1:] and min(len(before), len(after)) < 4
        if after and (same or after[:2] == before[:2] or after == flat):
            return
        raise _Whole(f"they are reshaped from {before} to {after}")
    if node.type in (kinds.SPLIT, kinds.UNBIND):
        raise _Whole("they are split by the model's code")
    before_channels = name.startswith("Unsqueeze") and 1 in dims and len(after) > 4
    if node.type == kinds.EXPAND or (_WITHIN_CHANNELS.match(name) and not before_channels):
        return
    feeds = {other.type for other in node.outputs}
    if _PRODUCTS.match(name) and feeds and feeds <= {kinds.LINEAR, kinds.RESHAPE}:
        return  # a part of nn.Linear
    if name.startswith("NativeLayerNorm") and feeds == {kinds.LN}:
        return  # a part of a norm that orders axes otherwise
    if not (_REDUCTIONS.match(name) and dims and not over):
        raise _Whole(f"{name.removesuffix('0')} can't be followed from channel to channel")


def _weakest(group: _Group, share: float) -> set[int]:
    """The channels that go. Norms are summed in float64, so that twins agree."""
    norms = torch.zeros(group.size, dtype=torch.float64)
    for module, side, channels in group.items:
        if _depthwise(module) or (side == "out" and _makes_channels(module)):
            weight = module.weight.detach().double().abs().cpu()
            every = (weight.movedim(1, 0) if isinstance(module, _TRANSPOSED) else weight).flatten(1)
            here, root = torch.tensor(channels).T
            norms.index_add_(0, root, every.sum(1)[here])
    runs = norms.reshape(group.parts, -1)
    count = max(round(runs.shape[1] * (1 - share)), 1)
    weakest = runs.argsort(dim=1, descending=True, stable=True)[:, count:]
    starts = torch.arange(group.parts)[:, None] * runs.shape[1]
    return set((weakest + starts).flatten().tolist())


@torch.no_grad()
def _cut_and_compare(model: nn.Module, x, removed: dict) -> None:
    """Cut the channels off; raise where outputs are not those of the model that has them unread."""
    numbers = torch.get_rng_state()
    with _unread(removed):
        wanted = _tensors(_call(model, x))
    for (module, side), channels in removed.items():
        _cut(module, side, channels)
    torch.set_rng_state(numbers)
    try:
        found = _tensors(_call(model, x))
    except Exception as error:  # whatever the model's code raises
        raise NotImplementedError(f"the model's code needs the channels it has: {error}") from error
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    bar = max(1e-4, *(4 * torch.finfo(dtype).eps for dtype in dtypes))  # half precision rounds more
    for ours, theirs in zip(found, wanted, strict=True):
        same = ours.shape == theirs.shape
        off = (ours.double() - theirs.double()).norm() if same else math.inf
        if not off <= bar * theirs.double().norm() + 1e-12:
            raise NotImplementedError(
                "the smaller model computes something else: its channels can't be followed"
            )


@contextmanager
def _unread(removed: dict) -> Iterator[None]:
    """Let nothing read the channels until the context ends: no layer, no mean over channels."""
    weights, normalizes = {}, []
    for (module, side), channels in removed.items():
        if side == "in" and channels:
            weights[module] = module.weight.detach().clone()
            here, view = torch.tensor(sorted(channels)), _by_runs(module)
            view[here // view.shape[2], :, here % view.shape[2]] = 0.0
        elif isinstance(module, (nn.LayerNorm, nn.GroupNorm)) and channels:
            count = getattr(module, "num_channels", None) or module.normalized_shape[0]
            normalizes.append(module)
            module.forward = partial(_normalize_rest, module, _rest(count, channels))
    try:
        yield
    finally:
        for module, weight in weights.items():
            module.weight.copy_(weight)
        for module in normalizes:
            del module.forward


def _normalize_rest(module: nn.Module, rest: Tensor, x: Tensor) -> Tensor:
    """What the norm gives if it has these channels alone; the others give 0."""
    rest = rest.to(x.device)
    weight, bias = (None if v is None else v[rest] for v in (module.weight, module.bias))
    if isinstance(module, nn.GroupNorm):
        part = F.group_norm(x[:, rest], module.num_groups, weight, bias, module.eps)
        return torch.zeros_like(x).index_copy(1, rest, part)
    axis = -1 if x.shape[-1] == module.normalized_shape[0] else 1  # of images, in subclasses
    part = x.index_select(axis, rest).movedim(axis, -1)
    part = F.layer_norm(part, [len(rest)], weight, bias, module.eps)
    return torch.zeros_like(x).index_copy(axis, rest, part.movedim(-1, axis))


def _by_runs(module: nn.Module) -> Tensor:
    """A view of the weight: (groups, what each makes, what each reads, ...)."""
    if isinstance(module, _TRANSPOSED):
        return module.weight.transpose(0, 1)[None]
    return module.weight.unflatten(0, (getattr(module, "groups", 1), -1))


def _rest(count: int, channels: set[int], device=None) -> Tensor:
    """The channels that stay."""
    return torch.tensor([c for c in range(count) if c not in channels], device=device)


def _cut(module: nn.Module, side: str | tuple, channels: set[int]) -> None:
    """Take the channels off a module, and off the numbers that it knows of itself."""
    if isinstance(side, tuple):
        _keep(module, *side, channels)
    elif side == "in" and getattr(module, "groups", 1) > 1:
        view = _by_runs(module)
        runs = _rest(module.in_channels, channels).reshape(len(view), -1) % view.shape[2]
        parts = [run[:, rest] for run, rest in zip(view, runs.to(view.device), strict=True)]
        module.weight = nn.Parameter(torch.cat(parts), module.weight.requires_grad)
    elif side == "in":
        _keep(module, "weight", 0 if isinstance(module, _TRANSPOSED) else 1, channels)
    else:
        second = isinstance(module, (nn.Embedding, *_TRANSPOSED))
        _keep(module, "weight", 1 if second else 0, channels)
        for name in ("bias", "running_mean", "running_var"):
            _keep(module, name, 0, channels)
    for name in {"in": _READS, "out": _MAKES, "both": _READS + _MAKES}.get(side, ()):
        if hasattr(module, name):
            setattr(module, name, getattr(module, name) - len(channels))
    if isinstance(module, nn.LayerNorm):
        module.normalized_shape = (module.normalized_shape[0] - len(channels),)
    if side == "both" and isinstance(module, _CONVOLUTIONS):  # one by one, a group each
        module.groups = module.in_channels


def _keep(module: nn.Module, name: str, axis: int, channels: set[int]) -> None:
    """Keep the other slices of a parameter or buffer along `axis`."""
    tensor = getattr(module, name, None)
    if tensor is None or not tensor.shape:
        return
    # The one slope of nn.PReLU is shared by all channels, of which one stays at least.
    if tensor.shape[axis] == 1 or tensor.shape[axis] <= max(channels, default=0):
        return
    rest = _rest(tensor.shape[axis], channels, tensor.device)
    smaller = tensor.index_select(axis, rest)
    if isinstance(tensor, nn.Parameter):
        smaller = nn.Parameter(smaller, tensor.requires_grad)
    setattr(module, name, smaller)


def _line(whole: dict[str, str]) -> str:
    said = [f"{name!r}: {reason}" for name, reason in list(whole.items())[:3]]
    return "; ".join(said) + (f"; and {len(whole) - 3} more" if len(whole) > 3 else "")


def main() -> None:
    """Print the trained digits CNN, and from there on with fewer and fewer channels."""
    import statistics
    import tempfile
    import time
    from pathlib import Path

    from pt_impl.kit import data, models, runtime, training
    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights

    task = TASKS["digits-cnn"]
    recipe, size = task.recipe, task.recipe.accuracy_batch_size
    with tempfile.TemporaryDirectory() as folder:
        folder = datasets.materialise(task.dataset, Path(folder))
        train = data.to_device(*datasets.load(folder, "train"))
        test = data.to_device(*datasets.load(folder, "test"))
    x = test[0][: task.compute_batch]
    weights = init_weights(task.model, seed=0)
    rows = {"trained": 0.0, "0% removed": 0.0, "50%": 0.5, "80%": 0.8, "90%": 0.9}
    print(f"channels    parameters  ms a batch of {len(x)}  accuracy")
    for name, share in rows.items():
        model = remove_channels(models.build(task.model, weights), x[:2], share=share)
        optimizer = training.make_optimizer(model, recipe)
        step = training.make_train_step(model, optimizer, training.cross_entropy)
        training.fit(step, *train, batch_size=size, epochs=recipe.epochs, seed=0)
        predict, times = training.make_predict(model), []
        for _ in range(50):
            start = time.perf_counter()
            predict(x)
            runtime.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=size)
        count, ms = models.parameter_count(model), statistics.median(times[10:])
        print(f"{name:10}{count:12}{ms:19.2f}{accuracy:10.1f}")
        if name == "trained":
            weights = models.export_weights(model)


if __name__ == "__main__":
    main()
