"""What the learning-rate finder refuses: rates that others move."""

import math

from torch.optim import Optimizer


def check_learning_rate_finder(optimizer: Optimizer) -> None:
    """Raise ValueError for a scheduler at the optimizer, and for no rate above 0."""
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ValueError(
            "the optimizer has a scheduler: find the rate first, then make the scheduler"
        )
    if max(float(group["lr"]) for group in optimizer.param_groups) <= 0:
        raise ValueError("the optimizer has no rate above 0, so its groups have no ratio")


def check_rate(optimizer: Optimizer, rate: float) -> None:
    """Raise ValueError where a step has moved the rate that it was given."""
    found = max(float(group["lr"]) for group in optimizer.param_groups)
    if not math.isclose(found, rate, rel_tol=1e-6):  # a tensor holds it in float32
        raise ValueError("the step sets the rate itself: leave its scheduler out")
