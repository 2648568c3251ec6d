"""What gradient clipping refuses: bounds that are none, and models without gradients."""

from numbers import Real

from torch import nn


def check_gradient_clipping(model: nn.Module, max_norm: float) -> None:
    """Raise ValueError for a bound that is not above 0, and a model that trains nothing."""
    if not isinstance(max_norm, Real) or not max_norm > 0:
        raise ValueError(f"max_norm must be above 0 (inf does not clip), not {max_norm!r}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("the model has no trainable parameters: there is no gradient to clip")
