"""What sparse inference refuses: models without zeros enough, and kernels that MKL cannot take."""

import copy

import torch
from torch import nn
from torch.nn.utils import prune


def check_sparse_inference(model: nn.Module, min_sparsity: float) -> list[str]:
    """Return the names of the linear layers with so many zeros.

    Raises ValueError for another min_sparsity, a model with pruning masks and where no layer has so
    many; NotImplementedError for kernels that are not float32 or float64.
    """
    if not 0.0 < min_sparsity <= 1.0:
        raise ValueError(f"min_sparsity must be above 0 and at most 1, not {min_sparsity!r}")
    if prune.is_pruned(model):
        raise ValueError("the model has pruning masks: finalize it first")
    names = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and isinstance(module.weight, nn.Parameter)  # and no tensor that a hook computes
        and 1.0 - module.weight.count_nonzero().item() / module.weight.numel() >= min_sparsity
    ]
    if not names:
        raise ValueError(f"no linear layer of the model has {min_sparsity:.0%} of zeros: prune it")
    for name in names:
        if (dtype := model.get_submodule(name).weight.dtype) not in (torch.float32, torch.float64):
            raise NotImplementedError(f"{name}.weight is {dtype}: MKL multiplies float32, float64")
    return names


def copied(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode; NotImplementedError where Python cannot make one."""
    try:
        return copy.deepcopy(model).eval()
    except Exception as error:  # of `weight_norm` after a pass with gradients: a computed tensor
        line = " ".join(str(error).split())
        raise NotImplementedError(f"Python cannot copy the model: {line}") from error
