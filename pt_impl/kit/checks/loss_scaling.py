"""What loss scaling refuses: a scale that cannot work, and a model without parameters."""

from torch import nn


def check_loss_scaling(model: nn.Module, initial_scale: float, growth_interval: int) -> None:
    """Raise ValueError for settings that cannot work, and a model without parameters."""
    if initial_scale <= 0 or growth_interval < 1:
        raise ValueError("initial_scale must be positive and growth_interval at least 1")
    if next(model.parameters(), None) is None:
        raise ValueError("the model has no parameters: there is nothing to compute with")
