"""What magnitude pruning refuses: schedules that never end, and models without layers to mask."""

from torch import nn
from torch.nn.utils import prune

from pt_impl.kit.masks import maskable, refuse_shared

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


def check_pruning(
    model: nn.Module,
    final_sparsity: float,
    begin_step: int,
    end_step: int,
    frequency: int,
    min_weights: int,
) -> None:
    """Raise ValueError for settings that cannot work, masks, and a model without such layers.

    NotImplementedError for a kernel that two layers share.
    """
    if not 0.0 <= final_sparsity < 1.0:
        raise ValueError(f"final_sparsity must be at least 0 and below 1, not {final_sparsity!r}")
    if not 0 <= begin_step < end_step:
        raise ValueError(
            f"begin_step must be at least 0 and below end_step, not {begin_step!r} and {end_step!r}"
        )
    if frequency < 1:
        raise ValueError(f"frequency must be at least 1, not {frequency!r}")
    if (end_step - begin_step) % frequency:
        raise ValueError(
            f"no update would fall on end_step, where final_sparsity is reached: {end_step} - "
            f"{begin_step} must be a multiple of the frequency, {frequency}"
        )
    if prune.is_pruned(model):
        raise ValueError("the model has pruning masks already: finalize it first")
    layers = prunable(model, min_weights)
    if not layers:
        least = f" of {min_weights} weights or more" if min_weights else ""
        raise ValueError(f"the model has no dense or convolution layer{least} to prune")
    refuse_shared(model, layers)


def check_step(step: int) -> None:
    """Raise ValueError for a step below 1."""
    if step < 1:
        raise ValueError(f"steps are counted from 1, not from {step!r}")


def prunable(model: nn.Module, min_weights: int) -> dict[str, nn.Module]:
    """Return dense and convolution layers of at least so many weights: name -> layer.

    Not depthwise convolutions, which have few weights: TensorFlow Model Optimization leaves them
    dense, too.
    """
    return {
        name: layer
        for name, layer in maskable(model, (nn.Linear, *_CONVOLUTIONS)).items()
        if layer.weight.numel() >= min_weights
        and not 1 < getattr(layer, "groups", 1) == getattr(layer, "in_channels", 0)
    }
