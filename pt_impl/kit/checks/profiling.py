"""What profiling refuses: too few steps."""


def check_profiling(steps: int, warmup: int, turns: int) -> None:
    """Raise ValueError for less than one step a turn, and for no step of warm-up."""
    if steps < turns or warmup < 1:
        raise ValueError(
            f"profiling needs {turns} steps and one of warm-up, or more: {steps}, {warmup}"
        )
