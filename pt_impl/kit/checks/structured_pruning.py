"""What structured pruning refuses: models without channels to take, and copies that go wrong."""

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from pt_impl.kit.channels import Channels, Group, makes_channels, outputs


def check_structured_pruning(model: nn.Module, share: float) -> None:
    """Raise ValueError for another share, pruning masks, and a model without layers to cut."""
    if not 0.0 <= share < 1.0:
        raise ValueError(f"share must be at least 0 and below 1, not {share!r}")
    if prune.is_pruned(model):
        raise ValueError("the model has pruning masks: finalize it first")
    if not any(makes_channels(module) for module in model.modules()):
        raise ValueError("the model has no convolution or linear layer to take channels from")


def copied(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode; NotImplementedError where Python cannot make one."""
    try:
        with torch.no_grad():  # TorchScript copies parameters by an operator: they were no leaves
            twin = copy.deepcopy(model).eval()
    except Exception as error:  # of `weight_norm` after a pass with gradients: a computed tensor
        raise NotImplementedError(f"Python cannot copy the model: {_one_line(error)}") from error
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
    return twin


def groups_to_cut(model: nn.Module, channels: Channels) -> tuple[list[Group], dict[str, str]]:
    """Return the groups that may be cut, and the layers that stay whole: name -> why.

    Layers that make the model's outputs are in neither.
    """
    owners = Counter(p for m in model.modules() for p in m.parameters(recurse=False))
    shared = {parameter for parameter, count in owners.items() if count > 1}
    groups, whole = [], dict(channels.lost)
    for group in channels.groups:
        why = _why_whole(model, group, shared, channels.not_run)
        if why:
            whole[group.name] = why
        elif not group.ends:
            groups.append(group)
    return groups, whole


def _why_whole(model: nn.Module, group: Group, shared: set, not_run: list[str]) -> str:
    if group.ends:
        return "" if all(group.ends) else "they can't be followed into the outputs"
    parameters = dict(model.named_parameters())
    for use in group.uses:
        if len({channel for channel, _ in use.channels}) < len(use.channels):
            return "some of them are combined with others of them"
        if use.name in parameters:
            continue
        module = model.get_submodule(use.name)
        if isinstance(module, nn.MultiheadAttention):
            return "nn.MultiheadAttention has one width for its inputs, heads and outputs"
        if getattr(module, "transposed", False) and module.groups > 1:
            return f"{type(module).__name__} groups them with other channels"
        if isinstance(module, nn.LSTM):
            return "nn.LSTM reads them, which torch_pruning cannot cut"
        if not shared.isdisjoint(module.parameters(recurse=False)):
            return f"{type(module).__name__} shares its weight with another module"
    for name in not_run:
        first, second = (*parameters[name].shape, 0, 0)[:2]
        if first == group.size or (second and second % group.size == 0):
            return f"{name!r}, which the example does not run, may read them"
    most = max(group.runs)
    odd = [runs for runs in group.runs if most % runs]
    return f"it is divided into {most} and into {odd[0]} groups" if odd else ""


def check_groups(groups: list[Group], whole: dict[str, str]) -> None:
    """Raise NotImplementedError where no group of channels is left to cut."""
    if not groups:
        reason = in_words(whole) or "all of them are its outputs"
        raise NotImplementedError(f"no layer of the model can lose channels: {reason}")


def in_words(whole: dict[str, str]) -> str:
    """Return the first three layers that stay whole, with their reasons."""
    said = [f"{name!r}: {reason}" for name, reason in list(whole.items())[:3]]
    return "; ".join(said) + (f"; and {len(whole) - 3} more" if len(whole) > 3 else "")


@torch.no_grad()
def fault(smaller: nn.Module, model: nn.Module, x, removed: dict, training: bool) -> str:
    """Return why the smaller model does not compute what the model does without the channels.

    "" where it does: that is the model in which no layer reads them, and in which they hold noise,
    so that whatever else depends on them shows. removed: (layer, side) -> channels, as in
    `kit/channels.py`.
    """
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    bar = max(1e-4, *(4 * torch.finfo(dtype).eps for dtype in dtypes))  # half rounds more
    for mode in {False, training}:
        try:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                found = outputs(smaller, x, mode)
            with torch.random.fork_rng(), _unread(model, smaller, removed):
                torch.manual_seed(0)
                wanted = outputs(model, x, mode)
        except Exception as error:  # whatever the model's code raises
            return f"the model's code needs the channels it has: {_one_line(error)}"
        if len(found) != len(wanted) or not all(map(partial(_near, bar), found, wanted)):
            return "the smaller model computes something else: its channels can't be followed"
    return ""


def _near(bar: float, ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    ours, theirs = ours.double(), theirs.double()
    return bool((ours - theirs).norm() <= bar * theirs.norm() + 1e-12)


@contextmanager
def _unread(model: nn.Module, smaller: nn.Module, removed: dict) -> Iterator[None]:
    """Until the context ends, no layer of the model reads the channels, and they hold noise."""
    noise, parameters = torch.Generator().manual_seed(0), dict(model.named_parameters())
    with ExitStack() as stack:
        for (name, side), channels in removed.items():
            if name in parameters:
                continue
            module, gone = model.get_submodule(name), sorted(channels)
            if side == "in":
                hook = module.register_forward_pre_hook(partial(_silence, gone))
            elif side == "out":
                hook = module.register_forward_hook(partial(_disturb, gone, noise))
            elif isinstance(module, nn.LayerNorm | nn.GroupNorm):  # they read all channels
                cut = smaller.get_submodule(name)
                hook = module.register_forward_hook(partial(_normalize_rest, gone, cut))
            else:
                continue
            stack.callback(hook.remove)
        yield


def _silence(gone: list[int], module: nn.Module, inputs: tuple) -> tuple:
    x, *more = inputs
    return x.index_fill(_axis(module, x), torch.tensor(gone, device=x.device), 0.0), *more


def _disturb(gone: list[int], noise, module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    axis, gone = _axis(module, output), torch.tensor(gone, device=output.device)
    part = output.index_select(axis, gone)
    drawn = torch.randn(part.shape, generator=noise).to(part) * 100 * (1 + output.abs().amax())
    return output.index_copy(axis, gone, drawn)


def _normalize_rest(gone, smaller: nn.Module, module, inputs: tuple, output: Tensor) -> Tensor:
    """Of a norm over channels: what the smaller one makes of those that stay."""
    (x,), axis = inputs, _axis(module, inputs[0])
    rest = torch.tensor([c for c in range(x.shape[axis]) if c not in set(gone)], device=x.device)
    return output.index_copy(axis, rest, smaller(x.index_select(axis, rest)))


def _axis(module: nn.Module, x: Tensor) -> int:
    """The axis of the channels in what a module reads or makes."""
    if isinstance(module, nn.Linear):
        return -1
    if isinstance(module, nn.LayerNorm):  # subclasses have images, with channels second
        return -1 if x.shape[-1] == module.normalized_shape[-1] else 1
    return 1 if isinstance(module, nn.GroupNorm) else 1 - module.weight.ndim


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
