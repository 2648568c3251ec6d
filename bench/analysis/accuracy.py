"""What a row does to its task's metric, against its own baseline.

Exact work keeps it, and so does a difference that is no worse than the task's margin by the bound
of its interval. Accuracy that was not measured is no accuracy that was kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import inf

from bench.analysis import verdicts
from bench.analysis.pairing import baseline, work_of
from bench.analysis.values import SMALLEST_LOSS, at, is_number, is_pair
from shared.specs import more_is_better

ROUNDING = 1e-5  # relative; the first losses of bfloat16 are up to 1e-4 apart


@dataclass(frozen=True)
class Accuracy:
    """What a row does to its baseline's accuracy. `kept` is None where it was not measured.

    `asked`: not where nothing is trained or predicted in another way. `proven_on`: another task, on
    which alone its losses were shown to be its baseline's.
    """

    kept: bool | None
    asked: bool = True
    exact: bool = False
    mean: float | None = None
    ci: list[float] | None = None
    metric: str | None = None
    proven_on: str | None = None

    @property
    def lost(self) -> bool:
        """Whether it was shown to be worse than its baseline, by its whole interval.

        What is neither kept nor lost is not decided.
        """
        if self.ci is None:
            return False
        return self.ci[1] < 0 if more_is_better(self.metric) else self.ci[0] > 0


def is_untrained_model(case: dict, cases: list[dict]) -> bool:
    """Whether it has other weights, such as fewer, and was trained nowhere.

    That a smaller model is faster says nothing of what it can do.
    """
    differences = [at(each, "accuracy", "difference") for each in (case, *_siblings(case, cases))]
    trained = any(is_number(at(found, "mean")) for found in differences)
    return bool(case.get("changes_weights")) and not trained


def of(case: dict, cases: list[dict], tasks: dict, allowed: float | None = None) -> Accuracy:
    """What a case does to accuracy; `allowed`: points that it may lose, else the task's margin.

    A variant's training may stand at another batch size, and its proof of equal losses at another
    task of the same technique, where it has none of its own.
    """
    if case["role"] == "baseline":
        return Accuracy(True, exact=True)
    metric = at(tasks, case["task"], "metric")
    margin = allowed if allowed is not None else at(tasks, case["task"], "margin")
    for other in (case, *_siblings(case, cases, ("task",))):
        found = at(other, "accuracy", "difference")
        if is_number(at(found, "mean")):
            mean, ci = found["mean"], at(found, "ci")
            worst = None
            if is_pair(ci):
                worst = ci[0] if more_is_better(metric) else -ci[1]
            kept = None if worst is None or not is_number(margin) else worst >= -margin
            return Accuracy(kept, mean=mean, ci=ci if is_pair(ci) else None, metric=metric)
    if _exact(case, cases, tasks):
        return Accuracy(True, exact=True)
    if not at(case, "certificate", "losses"):
        proven = [s for s in _siblings(case, cases) if at(s, "certificate", "losses")]
        if proven and all(_exact(s, cases, tasks) for s in proven):
            others = {other["task"] for other in proven}
            proven_on = None if case["task"] in others else ", ".join(sorted(others))
            return Accuracy(True, exact=True, proven_on=proven_on)
    return Accuracy(None)


def _siblings(case: dict, cases: list[dict], also: Iterable[str] = ()) -> list[dict]:
    """The same variant of the same technique and framework at other workloads."""
    same = ("technique", "variant", "role", "framework", "flavour", *also)
    return [
        other
        for other in cases
        if other["variant"] == case["variant"]  # of most it is not, and the others cost more
        and other is not case
        and other["status"] == "OK"
        and all(other.get(k) == case.get(k) for k in same)
    ]


def _exact(case: dict, cases: list[dict], tasks: dict) -> bool:
    """Whether a case's losses are its baseline's, but for float32's rounding.

    A row that is known to change the mathematics is not exact, however close its losses are.
    """
    if case.get("changes_math") or case.get("changes_weights"):
        return False
    base = baseline(case, cases)
    both = (at(c, "certificate", "losses") or [] for c in (case, base))
    bar = at(tasks, case["task"], "rounding") or ROUNDING
    return agree(tasks, case["task"], *both, bar=bar)


def agree(tasks: dict, task: str, ours: list, theirs: list, bar: float = inf) -> bool:
    """Whether there are losses on both sides, and all that both have agree within the parity bar.

    And within `bar`, where that is less.
    """
    parity = at(tasks, task, "parity")
    bar = min(bar, parity) if is_number(parity) else None
    if not ours or not theirs or not all(map(is_number, [bar, *ours, *theirs])):
        return False
    least = SMALLEST_LOSS * max(map(abs, theirs))  # a loss may come to 0
    return all(abs(a - b) <= bar * max(abs(b), least) for a, b in zip(ours, theirs, strict=False))


def difference_at_any(
    case: dict, other: dict, cases: list[dict], tasks: dict, looks: list | None = None
) -> dict | None:
    """The `difference` of two cases of one piece of work, or that of both at another.

    As in `of`: what a training at one batch size has shown holds for the variant.
    """
    both = ([each, *_siblings(each, cases, ("task",))] for each in (case, other))
    pairs = ((a, b) for a, b in product(*both) if work_of(a) == work_of(b))
    return next(filter(None, (difference(*pair, tasks, looks) for pair in pairs)), None)


def difference(
    case: dict, other: dict | None, tasks: dict, looks: list | None = None
) -> dict | None:
    """The metric of a case less that of another, by the seeds that both were trained with.

    None where one has none, or not at every seed.
    `looks`: numbers of seeds after which who is decided is trained no further.
    """
    ours, theirs = ((each or {}).get("accuracy") or {} for each in (case, other))
    ours, theirs = ours.get("per_seed") or [], theirs.get("per_seed") or []
    seeds, task = min(len(ours), len(theirs)), tasks.get(case["task"]) or {}
    if (
        not {"metric", "margin"} <= task.keys()
        or not seeds
        or not all(map(is_number, [*ours, *theirs]))
    ):
        return None
    return verdicts.compare_accuracy(
        ours[:seeds],
        theirs[:seeds],
        margin=task["margin"],
        more_is_better=more_is_better(task["metric"]),
        looks=tuple(looks or ()),
    )
