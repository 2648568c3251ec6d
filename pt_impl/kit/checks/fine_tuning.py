"""What fine-tuning refuses: settings out of range, and models with nothing to train."""

import math
from collections import Counter

from torch import nn


def check_fine_tuning(head: nn.Module) -> None:
    """Raise ValueError for a head without parameters to train."""
    if not any(parameter.requires_grad for parameter in head.parameters()):
        raise ValueError("the head has no trainable parameters: there is nothing to train")


def check_lora(model: nn.Module, rank: int, alpha: float) -> None:
    """Raise ValueError for settings out of range, and for a model without layers to adapt."""
    if rank < 1:
        raise ValueError(f"rank must be 1 or more, not {rank!r}")
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha must be above 0 and finite, not {alpha!r}")
    if any(nn.utils.parametrize.is_parametrized(module) for module in model.modules()):
        raise ValueError("the model has parametrized weights: merge or remove them first")
    if not dense_layers(model):
        raise ValueError("the model has no nn.Linear whose weight is its alone: nothing to adapt")


def dense_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the layers that can be adapted, in the model's order.

    Subclasses stay as they are: their owners, such as attention, may read the weight themselves. So
    do weights that two modules share: merging would change the other one, too.
    """
    owners = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
    weights = [(m, m._parameters.get("weight")) for m in model.modules() if type(m) is nn.Linear]
    return [module for module, weight in weights if owners[weight] == 1]
