"""What a memory format refuses: unknown ones, and models without images."""

from torch import nn

_NAMES = ("channels_last", "channels_first")


def check_memory_format(model: nn.Module, memory_format: str) -> None:
    """Raise ValueError for an unknown format and for a model without 4-D parameters.

    Raises NotImplementedError for 5-D parameters, which have other formats.
    """
    check_name(memory_format)
    # Buffers are no weights: a causal mask is 4-D, and a table of positions may be 5-D.
    ranks = {parameter.dim() for parameter in model.parameters()}
    if 5 in ranks:
        raise NotImplementedError(
            "torch has no channels_last for 5-D tensors such as the weights of Conv3d: they have"
            " torch.channels_last_3d"
        )
    if 4 not in ranks:
        raise ValueError("the model has no 4-D parameter, so there is no convolution to convert")


def check_name(memory_format: str) -> None:
    """Raise ValueError for an unknown format."""
    if memory_format not in _NAMES:
        raise ValueError(
            f"unknown memory format {memory_format!r}: choose one of {', '.join(_NAMES)}"
        )
