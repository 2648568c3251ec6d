"""How techniques call any module: inputs by convention, modes restored, outputs in float32.

Twin: `tf_impl/kit/calling.py`.
Where the frameworks differ: a module has a mode, which is set for a call and put back; a Keras
model is told its mode in the call. Keras models have losses, modules have none.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map  # torch has no public one


def call_arguments(model: nn.Module, x) -> tuple[tuple, dict]:
    """Return the positional and the named arguments with which a model is called for x.

    A tuple is `*x` and a mapping `**x`, as PyTorch's users have it; all else is the one argument.
    """
    if isinstance(x, Mapping):
        return (), dict(x)
    return (x if isinstance(x, tuple) else (x,)), {}


def call(model: nn.Module, x):
    """Return what the model gives for x, in the mode that it is in."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put models into evaluation mode; afterwards each of their modules is in its own mode again.

    Module by module: a part may be in another mode than its model, such as a frozen BatchNorm.
    Nothing is touched, and no time lost, where all are in evaluation mode already.
    """
    training = [model for model in models if trains(model)]
    modes = {module: module.training for model in training for module in model.modules()}
    try:
        for model in training:
            model.eval()
        yield
    finally:
        for module, mode in modes.items():
            if module.training != mode:
                module.train(mode)  # some do more in it, as LoRA does


def trains(model: nn.Module) -> bool:
    """Return whether any part is in training mode: faster than a walk by `modules()`."""
    left = [model]
    while left:
        module = left.pop()
        if module.training:
            return True
        left += [part for part in module._modules.values() if part is not None]
    return False


def infer(model: nn.Module, x):
    """Return what the model gives for x in evaluation mode, without gradients.

    x is left as it is by a model that changes its inputs in place, such as by `x.sub_(mean)`.
    """
    with evaluating(model), torch.no_grad():
        return call(model, map_tensors(Tensor.clone, x))


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Let a model run inside; its buffers and the random state are then as they were before."""
    cuda = {t.device for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}
    # With its place: a model may put another tensor there.
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        with torch.random.fork_rng(list(cuda)):
            yield
    finally:
        for module, name, buffer, value in buffers:
            buffer.data.copy_(value)
            setattr(module, name, buffer)


def logits(output):
    """Return the logits of an output that has them as `.logits` or under "logits", else all of it.

    A dict is returned in the order of its keys: two models may have another one.
    """
    if isinstance(output, dict):
        in_order = dict(sorted(output.items(), key=lambda item: str(item[0])))
        return output.get("logits", in_order)
    return getattr(output, "logits", output)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a half-precision tensor in float32, any other as it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def to_float32(tree):
    """Cast every bfloat16 or float16 tensor of an output to float32, in whatever holds it."""
    return _leaf_to_float32(tree) if isinstance(tree, Tensor) else tree_map(_leaf_to_float32, tree)


def tensors(tree) -> list[Tensor]:
    """Return the tensors of a tensor, or of nested tuples, lists, dicts and dataclasses."""
    found = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf):
            found += tensors([getattr(leaf, field.name) for field in fields(leaf)])
        elif isinstance(leaf, Mapping):
            found += tensors(list(leaf.values()))
    return found


def map_tensors(function: Callable, tree):
    """Return the structure with `function` of each of its tensors; what is no tensor stays."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def rows(tree, start: int, stop: int):
    """Return the samples from `start` to `stop` of each tensor in nested tuples, lists, mappings.

    What has no first axis (numbers, None, scalars) goes with every part.
    """
    if isinstance(tree, Tensor):
        return tree[start:stop] if tree.ndim else tree
    if isinstance(tree, Mapping):
        return {key: rows(part, start, stop) for key, part in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [rows(part, start, stop) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def concatenate(parts: list):
    """Return one structure of several alike, such as of `rows`: their tensors one after another.

    What is no tensor is that of the first part.
    """

    def join(*leaves):
        return torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0]

    return tree_map(join, *parts)


def _leaf_to_float32(leaf):
    if getattr(leaf, "dtype", None) in (torch.bfloat16, torch.float16):
        return leaf.float()
    if is_dataclass(leaf):  # those that torch does not know as containers
        leaf = copy(leaf)
        for field in fields(leaf):
            object.__setattr__(leaf, field.name, to_float32(getattr(leaf, field.name)))
    elif isinstance(leaf, MutableMapping):  # as its class, whose attributes are kept
        leaf = copy(leaf)
        for held in (getattr(leaf, "__dict__", {}), leaf):
            for key, value in list(held.items()):
                held[key] = to_float32(value)
    elif isinstance(leaf, Mapping):
        return {key: to_float32(value) for key, value in leaf.items()}
    return leaf
