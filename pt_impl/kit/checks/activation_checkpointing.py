"""What activation checkpointing refuses: blocks that cannot run twice, and names of none."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._pytree import tree_leaves  # torch has no public one

KERNELS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def check_kernel(kernel: str) -> SDPBackend:
    """Return PyTorch's name of a kernel of attention; ValueError for one that there is not."""
    if kernel not in KERNELS:
        raise ValueError(f"kernel: {kernel!r} is none of {', '.join(KERNELS)}")
    return KERNELS[kernel]


def check_activation_checkpointing(
    model: nn.Module, blocks: str, recomputed: Callable
) -> dict[str, nn.Module]:
    """Return the submodules that `blocks` names, by name, but for those inside another of them.

    recomputed: the function that takes the place of the `forward` of a recomputed block.

    Raises ValueError for names that no submodule has and for blocks that are recomputed already;
    NotImplementedError for blocks that are TorchScript, that their owner never calls, or under
    torch's old `spectral_norm`.
    """
    found = _find(model, blocks)
    modules = dict(model.named_modules())
    for name, module in found.items():
        if getattr(vars(module).get("forward"), "func", None) is recomputed:
            raise ValueError(f"blocks: {name!r} is recomputed already")
        if isinstance(module, torch.jit.ScriptModule):
            raise NotImplementedError(
                f"blocks: {name!r} is TorchScript, which takes no other forward: name the block"
                " around it"
            )
        if isinstance(modules[name.rpartition(".")[0]], nn.MultiheadAttention):
            raise NotImplementedError(
                f"blocks: MultiheadAttention reads the weights of {name!r} and never calls it"
            )
        if any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()):
            raise NotImplementedError(
                f"blocks: a hook of {name!r} makes its weight, which a second run would find of a"
                " later pass: take torch.nn.utils.parametrizations.spectral_norm"
            )
    return found


def check_offload(inputs) -> None:
    """Raise NotImplementedError for inputs of a block that are on the host already."""
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if any(leaf.device.type == "cpu" and leaf.requires_grad for leaf in leaves):
        raise NotImplementedError("offload: the activations of a block are on the host already")


def check_unchanged(name: str) -> AbstractContextManager:
    """Return a context that keeps what a block's second run has to find as it is now.

    Raises NotImplementedError in the backward pass where it was changed in place after the block.
    """

    def keep(tensor: Tensor) -> tuple[Tensor, int]:
        return tensor.detach() if tensor.requires_grad else tensor, tensor._version

    def read(kept: tuple[Tensor, int]) -> Tensor:
        tensor, version = kept
        if tensor._version != version:
            raise NotImplementedError(
                f"an input of block {name!r}, or a product that is kept of it, is changed in place "
                "after it, so that its second run would find another one: write h = h + 1 in the "
                "place of h += 1"
            )
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(keep, read)


def _find(model: nn.Module, blocks: str) -> dict[str, nn.Module]:
    # Containers such as ModuleList never run themselves, so there is nothing to recompute.
    modules = {name: module for name, module in model.named_modules() if name and _runs(module)}
    chosen: dict[str, None] = {}
    for pattern in filter(None, map(str.strip, blocks.split(","))):
        names = [name for name in modules if fnmatchcase(name, pattern)]
        if not names:
            known = ", ".join(modules)
            raise ValueError(f"blocks: the model has no block {pattern!r}; it has {known}")
        chosen |= dict.fromkeys(names)
    inside = {n for n in chosen for other in chosen if n.startswith(f"{other}.")}
    return {name: modules[name] for name in chosen if name not in inside}


def _runs(module: nn.Module) -> bool:
    """Whether it has a forward; the class of TorchScript's modules has none to be asked for."""
    scripted = isinstance(module, torch.jit.ScriptModule)
    return scripted or type(module).forward is not nn.Module.forward
