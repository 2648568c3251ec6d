"""Settings of learning-rate schedules that are refused, the same for both frameworks."""

from __future__ import annotations


def check_schedule(steps: int, warmup: int, final: float) -> None:
    """Raise ValueError unless 0 <= warmup < steps and 0 <= final <= 1."""
    if not 0 <= warmup < steps or not 0 <= final <= 1:
        raise ValueError(
            "a schedule needs 0 <= warmup < steps and 0 <= final <= 1, "
            f"not warmup={warmup}, steps={steps}, final={final}"
        )


def check_one_cycle(steps: int, rising: float, initial: float, final: float) -> None:
    """Raise ValueError for a cycle that cannot rise and fall."""
    if steps < 2 or not 0 < rising < 1 or not 0 < final <= initial <= 1 or rising * steps == 1:
        raise ValueError(
            "one cycle needs steps of 2 or more, rising between 0 and 1, in other than one step, "
            f"and 0 < final <= initial <= 1, not steps={steps}, rising={rising}, "
            f"initial={initial}, final={final}"
        )


def check_batch_sizes(batch_size: int, reference_batch_size: int) -> None:
    """Raise ValueError for a batch size below 1."""
    if batch_size < 1 or reference_batch_size < 1:
        raise ValueError(f"batch sizes are 1 or more, not {batch_size}, {reference_batch_size}")
