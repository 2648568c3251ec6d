"""What the non-finite guard refuses: models without gradients."""

from torch import nn


def check_finite_guard(model: nn.Module) -> None:
    """Raise ValueError for a model that trains nothing."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("the model has no trainable parameters: there is no gradient to look at")
