"""Batch-size finder: the largest batch that trains within a memory budget.

    found = find_batch_size("my_training:make_step", budget_bytes=4 << 30)
    found.batch_size  # make_step(batch_size) returned a step without arguments

What it changes: nothing in the model. It tries batch sizes, each in a fresh process, so that
nothing is left behind. Memory grows almost linearly with the batch size. After two sizes that
differ enough, a line says which size fills the budget, and a few more trials confirm it.

Its twin: `tf_impl/train_step/batch_size_finder.py`.

Where the frameworks differ and why:
- On a CPU both measure the peak of resident memory above what the imports took. PyTorch keeps
  gradients between steps. TensorFlow frees them within its graph, whose trace takes memory at any
  batch size.
- On a GPU both ask the framework's allocator (`torch.cuda.max_memory_allocated`,
  `tf.config.experimental.get_memory_info`). The allocator holds more than it gave out: leave a
  tenth of the device free.

When it helps and when it hurts: it helps where samples per second still rise with the batch size.
Each trial costs an import of the framework. It does not say whether so large a batch trains well.

Run it alone: `python -m pt_impl.train_step.batch_size_finder` tries the digits CNN with 256 MiB.

Copy with it: `pt_impl/kit/checks/batch_size_finder.py`, `pt_impl/kit/trials.py`.
"""

import math
from dataclasses import dataclass

from pt_impl.kit.checks.batch_size_finder import check_batch_size_finder, check_first
from pt_impl.kit.trials import Trial, run_trial


@dataclass(frozen=True)
class Found:
    """The largest batch size that fits and what its trial measured.

    limit: what keeps it from being larger, "budget", "maximum" or "time limit". trials: in order.
    """

    batch_size: int
    peak_bytes: int
    samples_per_s: float
    limit: str
    trials: list[Trial]


def find_batch_size(
    make_trial, *, budget_bytes: int, maximum: int = 65536, trial_seconds: float = 120.0
) -> Found:
    """Find the largest batch size whose train steps stay within `budget_bytes`.

    The size found was tried and fits. The next one, larger by a sample or at most 5%, was tried and
    does not, or it does not by the line through two sizes that were measured.

    Args:
        make_trial: "module:function", importable from here. A trial imports the module in a fresh
            process, calls function(batch_size), which returns a step without arguments, and takes a
            few steps. Its peak counts from after the imports, and holds model and optimizer too.
        maximum: the largest size of interest.
        trial_seconds: a trial that takes longer counts as not fitting.

    Raises:
        ValueError: a budget that batch size 1 exceeds or that the machine does not have, an unknown
            module or function and settings that are not positive.
        NotImplementedError: where a CPU's peak can't be read (other than Linux) and where the trial
            raises it.
        RuntimeError: where a trial fails otherwise, or the first takes too long.
    """
    check_batch_size_finder(make_trial, budget_bytes, maximum, trial_seconds)
    trials: list[Trial] = []
    size = 1
    while size:
        trials.append(run_trial(make_trial, size, budget_bytes, trial_seconds))
        check_first(trials[0], budget_bytes)
        size = _next_size(trials, budget_bytes, maximum)
    by_size = sorted(trials, key=lambda trial: trial.batch_size)
    best = [trial for trial in by_size if trial.outcome == "fits"][-1]
    limit = "maximum" if best.batch_size == maximum else "budget"
    if best is not by_size[-1] and by_size[by_size.index(best) + 1].outcome == "time limit":
        limit = "time limit"
    return Found(best.batch_size, best.peak_bytes, best.samples_per_s, limit, trials)


def _next_size(trials: list[Trial], budget: int, maximum: int) -> int | None:
    """The next batch size to try, or None when the answer is known."""
    first = trials[0]
    low = max(trial.batch_size for trial in trials if trial.outcome == "fits")
    failed = [trial.batch_size for trial in trials if trial.outcome != "fits"]
    high = min(failed, default=maximum + 1)
    step = max(1, low // 20)
    if low == maximum or (failed and high - low <= step):
        return None
    known = [t for t in trials if t.peak_bytes is not None and t.batch_size <= 2 * low]
    measured = sorted((t.batch_size, t.peak_bytes) for t in known)
    size, peak = measured[-1]
    # The other end of the line is well away, since neighbours differ by noise alone.
    base, least = [point for point in measured if point[0] <= max(1, size // 2)][-1]
    if peak - least < (budget - first.peak_bytes) / 20:  # too flat to tell
        guess = max(16 * low, budget // max(1, first.peak_bytes))
        return max(low + 1, min(math.isqrt(low * high) if failed else guess, high - 1))
    guess = int(base + (budget - least) * (size - base) / (peak - least))
    if guess < low + step:
        return None
    if failed and guess >= high:  # it failed where the line says that it fits
        return (low + high) // 2
    # Where the line is right, this size is the last trial: it fits, and 5% more does not.
    return min(max(low + step, int(0.975 * guess)), high - 1)


def main() -> None:
    """Print the trials for the digits CNN in 256 MiB."""
    found = find_batch_size("pt_impl.kit.training:digits_cnn", budget_bytes=256 << 20)
    for trial in found.trials:
        print(f"{trial.batch_size:6}  {trial.outcome:12}  peak {trial.peak_bytes} bytes")
    print(f"largest: {found.batch_size}, limited by the {found.limit}")


if __name__ == "__main__":
    main()
