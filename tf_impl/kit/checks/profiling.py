"""What profiling refuses: too few steps, and steps that XLA compiled."""

from collections.abc import Callable

_XLA = ("XlaLaunch", "_XlaRun", "_XlaCompile", "XlaLaunchV2")
_ONE_OPERATOR = (
    "XLA runs the whole step as one operator, whose parts the profiler does not tell apart: "
    "profile it without, by jit_compile=False"
)


def check_profiling(step: Callable, steps: int, warmup: int, turns: int) -> None:
    """Raise ValueError for less than one step a turn, and for no step of warm-up.

    And NotImplementedError for a step that is compiled by XLA.
    """
    if steps < turns or warmup < 1:
        raise ValueError(
            f"profiling needs {turns} steps and one of warm-up, or more: {steps}, {warmup}"
        )
    if getattr(step, "_jit_compile", None):
        raise NotImplementedError(_ONE_OPERATOR)


def check_operator(kind: str, part: str) -> None:
    """Raise NotImplementedError for what XLA compiled, but for an optimizer's own update."""
    if kind in _XLA and part != "optimizer":
        raise NotImplementedError(_ONE_OPERATOR)
