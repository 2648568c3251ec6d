"""What the batch-size finder refuses: settings, and a budget that no batch fits."""


def check_batch_size_finder(
    make_trial: str, budget_bytes: int, maximum: int, trial_seconds: float
) -> None:
    """Raise ValueError for a trial that is not named, and settings that are not positive."""
    if not all(str(make_trial).partition(":")):
        raise ValueError(f'make_trial must be "module:function", not {make_trial!r}')
    if min(budget_bytes, maximum, trial_seconds) <= 0:
        raise ValueError("budget_bytes, maximum and trial_seconds must be positive")


def check_first(trial, budget: int) -> None:
    """Raise where one sample takes more than the budget (ValueError) or too long (RuntimeError)."""
    if trial.outcome == "time limit":
        raise RuntimeError("a trial at batch size 1 takes longer than trial_seconds")
    if trial.outcome != "fits":
        needs = f"{trial.peak_bytes:,} bytes" if trial.peak_bytes else "all memory there is"
        raise ValueError(f"batch size 1 takes {needs}, more than the budget of {budget:,}")
