"""What one update of BatchNorm's statistics a step refuses."""

import torch
from torch import nn


def check_accumulated_statistics(model: nn.Module) -> None:
    """Raise NotImplementedError for layers that do not say what they have seen."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and hasattr(module, "running_mean"):
            raise NotImplementedError(
                f"accumulated statistics: {name} is TorchScript, whose momentum is a constant of it"
            )
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise NotImplementedError(
            "accumulated statistics: SyncBatchNorm does not say how many values its replicas saw"
        )
