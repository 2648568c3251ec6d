"""What one update of BatchNorm's statistics a step refuses."""

from torch import nn


def check_accumulated_statistics(model: nn.Module) -> None:
    """Raise NotImplementedError for layers that do not say what they have seen."""
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise NotImplementedError(
            "accumulated statistics: SyncBatchNorm does not say how many values its replicas saw"
        )
