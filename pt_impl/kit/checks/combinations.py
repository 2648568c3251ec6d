"""What stacked compression refuses: models that were not pruned first."""

from torch import Tensor


def check_combinations(masks: list[Tensor]) -> None:
    """Raise ValueError where no kernel has a zero. masks: of each kernel, what is not zero."""
    if all(mask.all() for mask in masks):
        raise ValueError("no kernel of the model has a zero to keep: prune it first")
