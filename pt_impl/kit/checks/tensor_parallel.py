"""What tensor parallelism refuses: layers that can't be split, and parameters of others."""

import torch
from torch import nn


def check_tensor_parallel(model: nn.Module) -> None:
    """Raise NotImplementedError for a model that uses a parameter twice."""
    if len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters())):
        raise NotImplementedError("a parameter is used twice: parts would train copies of it")


def check_layer(name: str, layer: nn.Module) -> None:
    """Raise NotImplementedError for a layer other than nn.Linear."""
    if not isinstance(layer, nn.Linear):
        kind = type(layer).__name__
        raise NotImplementedError(f"pairs: {name} is a {kind}, only Linear is split")


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters of each group.

    Raises NotImplementedError for parameters that are not the model's.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names.get(id(own)) for own in group["params"]] for group in optimizer.param_groups]
    if any(None in group for group in groups):
        raise NotImplementedError(
            "the optimizer has parameters that the model has not, such as a loss's own: make them"
            " the model's"
        )
    return groups
