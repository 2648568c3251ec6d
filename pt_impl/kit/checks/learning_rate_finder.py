"""What the learning-rate finder refuses: settings out of range, and rates that others move."""

import math

from torch.optim import Optimizer


def check_learning_rate_finder(
    optimizer: Optimizer,
    lowest: float,
    highest: float,
    steps: int,
    window: int,
    divergence: float,
) -> None:
    """Raise ValueError for settings out of range, a scheduler at the optimizer, and no rate."""
    if not 0 < lowest < highest or divergence <= 0:
        raise ValueError(
            "a range test needs 0 < lowest < highest and divergence above 0, "
            f"not {lowest}, {highest}, {divergence}"
        )
    if window < 3 or window % 2 == 0 or steps < 2 * window:
        raise ValueError(
            "a range test needs an odd window of 3 or more and steps of twice that or more, "
            f"not window={window}, steps={steps}"
        )
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ValueError(
            "a scheduler stands at the optimizer: find the rate first, then make the scheduler"
        )
    if max(float(group["lr"]) for group in optimizer.param_groups) <= 0:
        raise ValueError("the optimizer has no rate above 0, so its groups have no ratio")


def check_rate(optimizer: Optimizer, rate: float) -> None:
    """Raise ValueError where a step has moved the rate that it was given."""
    found = max(float(group["lr"]) for group in optimizer.param_groups)
    if not math.isclose(found, rate, rel_tol=1e-6):  # a tensor holds it in float32
        raise ValueError("the step sets the rate itself: leave its scheduler out")
