"""What 2:4 pruning refuses: models without layers to mask, and hardware without the pattern."""

import torch
from torch import nn
from torch.nn.utils import prune

from pt_impl.kit.masks import maskable, refuse_shared


def check_semi_structured_pruning(model: nn.Module) -> None:
    """Raise ValueError for masks and a model without such layers, NotImplementedError for a kernel
    that two layers share."""
    if prune.is_pruned(model):
        raise ValueError("the model has pruning masks already: finalize it first")
    layers = prunable(model)
    if not layers:
        raise ValueError("the model has no nn.Linear or nn.Conv2d to prune")
    refuse_shared(model, layers)


def prunable(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers and 2-D convolutions without groups: name -> layer."""
    layers = maskable(model, (nn.Linear, nn.Conv2d))
    return {name: layer for name, layer in layers.items() if getattr(layer, "groups", 1) == 1}


def check_compressible(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers that a GPU can multiply without their zeros: name -> layer.

    Raises ValueError for a model with masks and one without such a layer, NotImplementedError for
    another device or dtype.
    """
    if prune.is_pruned(model):
        raise ValueError("the model has pruning masks: finalize it first")
    layers = {name: layer for name, layer in model.named_modules() if _is_compressible(layer)}
    if not layers:
        raise ValueError("the model has no nn.Linear with the pattern and multiples of 64 and 32")
    for name, layer in layers.items():
        weight = layer.weight
        if not weight.is_cuda or torch.cuda.get_device_capability(weight.device) < (8, 0):
            raise NotImplementedError(
                f"{name} is on {weight.device}: only Nvidia GPUs from Ampere on multiply 2:4"
            )
        if weight.dtype not in (torch.float16, torch.bfloat16):
            raise NotImplementedError(f"{name} is {weight.dtype}: 2:4 takes float16 and bfloat16")
    return layers


def _is_compressible(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or "weight" not in module._parameters:
        return False
    if module.in_features % 64 or module.out_features % 32:
        return False
    return bool(((module.weight.unflatten(1, (-1, 4)) != 0).sum(-1) <= 2).all())
