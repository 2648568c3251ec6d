"""What the implementations of an optimizer refuse: settings out of range, integers as weights."""

from torch import nn


def check_optimizer_implementations(
    learning_rate: float, weight_decay: float, beta1: float, beta2: float, eps: float
) -> None:
    """Raise ValueError for a setting out of range."""
    if min(learning_rate, weight_decay, eps) < 0 or not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(
            "learning_rate, weight_decay and eps must be at least 0, beta1 and beta2 in [0, 1)"
        )


def check_sgd(learning_rate: float, momentum: float) -> None:
    """Raise ValueError for a setting out of range."""
    if learning_rate < 0 or not 0 <= momentum < 1:
        raise ValueError("learning_rate must be at least 0 and momentum in [0, 1)")


def check_floating(model: nn.Module) -> None:
    """Raise NotImplementedError for parameters that torch's fused kernels refuse."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise NotImplementedError(f"torch's fused kernels update no {parameter.dtype}: {name}")
