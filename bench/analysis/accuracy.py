"""Whether a row keeps its baseline's accuracy.

It does if it computes the same, or if the worse end of the interval of its metric's difference is
within the task's margin. A row that was not trained to its metric may have a check instead, of the
loss of a short training or of a trained model's predictions (`checks`). Accuracy that was not
measured does not count as kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

from bench.analysis import verdicts
from bench.analysis.bounds import Looks
from bench.analysis.pairing import baseline
from bench.analysis.values import SMALLEST_LOSS
from bench.record import KEPT, LOST, AccuracyDifference, Case, Fidelity, LossCheck, TaskFacts
from shared.specs import more_is_better

ROUNDING = 1e-5  # relative; the first losses of bfloat16 are up to 1e-4 apart
Tasks = dict[str, TaskFacts]


@dataclass(frozen=True)
class Accuracy:
    """What a row does to its baseline's accuracy. `kept` is None if that was not measured.

    `asked`: False if nothing is trained or predicted differently. `proven_on`: another task, the
    only one on which its losses were shown to equal its baseline's. `check`: the check that decides
    if the row was not trained to its metric; `mean` and `ci` are then of the loss, or of the
    points.
    """

    kept: bool | None
    asked: bool = True
    exact: bool = False
    mean: float | None = None
    ci: tuple[float, float] | None = None
    metric: str | None = None
    proven_on: str | None = None
    check: LossCheck | Fidelity | None = None

    @property
    def what(self) -> str:
        """What was judged: "accuracy", "loss" of a short training, or "predictions"."""
        if self.check is None:
            return "accuracy"
        return "loss" if isinstance(self.check, LossCheck) else "predictions"

    @property
    def trained(self) -> bool:
        """Whether it was trained to its metric."""
        return self.mean is not None and self.check is None

    @property
    def lost(self) -> bool:
        """Whether its whole interval is worse than the baseline; undecided if not kept, too."""
        if self.check:
            return self.check.verdict == LOST
        if self.ci is None:
            return False
        return self.ci[1] < 0 if more_is_better(self.metric) else self.ci[0] > 0


def facts(tasks: Tasks, task: str) -> TaskFacts:
    """The facts of a task; empty ones if the record does not describe it."""
    return tasks.get(task) or TaskFacts()


def is_untrained_model(case: Case, cases: Sequence[Case]) -> bool:
    """Whether it has other weights than the baseline, such as fewer, and was never trained."""
    return case.changes_weights and not any(map(_trained, (case, *_siblings(case, cases))))


def _trained(case: Case) -> AccuracyDifference | None:
    """How far its metric is from that of its baseline, where both were trained."""
    difference = case.accuracy.difference if case.accuracy else None
    return difference if difference and difference.mean is not None else None


def of(case: Case, cases: Sequence[Case], tasks: Tasks, allowed: float | None = None) -> Accuracy:
    """What a case does to accuracy. `allowed`: points that it may lose; default: the task's margin.

    If the case has no training or check at its batch size, the variant's at another one counts. If
    it has no proof of equal losses, one at another task of the technique counts. A check does not
    answer if `allowed` is given.
    """
    if case.role == "baseline":
        return Accuracy(True, exact=True)
    task = facts(tasks, case.task)
    margin = task.margin if allowed is None else allowed
    same = (case, *_siblings(case, cases, same_task=True))
    for other in same:
        if difference := _trained(other):
            ci = difference.ci
            worst = None if ci is None else ci[0] if more_is_better(task.metric) else -ci[1]
            kept = None if worst is None or margin is None else worst >= -margin
            return Accuracy(kept, mean=difference.mean, ci=ci, metric=task.metric)
    if _exact(case, cases, tasks):
        return Accuracy(True, exact=True)
    for other in same if allowed is None else ():
        if other.mode == case.mode and (checked := _checked(other)):
            return checked
    if not case.losses:
        proven = [other for other in _siblings(case, cases) if other.losses]
        if proven and all(_exact(other, cases, tasks) for other in proven):
            others = {other.task for other in proven}
            proven_on = None if case.task in others else ", ".join(sorted(others))
            return Accuracy(True, exact=True, proven_on=proven_on)
    return Accuracy(None)


def _checked(case: Case) -> Accuracy | None:
    """What its check says, if it had one."""
    loss, predictions = case.loss_check, case.fidelity
    if loss and loss.verdict:
        told, metric, difference = loss, "loss", loss.difference
    elif predictions and predictions.verdict:
        told, metric, difference = predictions, "accuracy", predictions.points
    else:
        return None
    mean, ci = (difference.mean, difference.ci) if difference else (None, None)
    return Accuracy(told.verdict == KEPT, mean=mean, ci=ci, metric=metric, check=told)


def _siblings(case: Case, cases: Sequence[Case], *, same_task: bool = False) -> list[Case]:
    """The same variant of the same technique and framework at other workloads."""
    return [
        other
        for other in cases
        if other.variant == case.variant  # of most it is not, and the others cost more
        and other is not case
        and other.status == "OK"
        and (other.technique, other.role, other.side) == (case.technique, case.role, case.side)
        and (not same_task or other.task == case.task)
    ]


def _exact(case: Case, cases: Sequence[Case], tasks: Tasks) -> bool:
    """Whether a case's losses are its baseline's, but for float32's rounding.

    A row that is known to change the mathematics is not exact, however close its losses are.
    """
    if case.changes_math or case.changes_weights:
        return False
    base, task = baseline(case, cases), facts(tasks, case.task)
    return agree(task, case.losses, base.losses if base else [], bar=task.rounding or ROUNDING)


def agree(
    task: TaskFacts, losses: list[float | None], others: list[float | None], bar: float = inf
) -> bool:
    """Whether both have losses, and those that both have agree within the parity bar and `bar`."""
    if not losses or not others or task.parity is None or None in (*losses, *others):
        return False
    bar = min(bar, task.parity)
    least = SMALLEST_LOSS * max(map(abs, others))  # a loss may come to 0
    pairs = zip(losses, others, strict=False)
    return all(abs(a - b) <= bar * max(abs(b), least) for a, b in pairs)


def difference_at_any(
    case: Case,
    other: Case,
    cases: Sequence[Case],
    tasks: Tasks,
    looks: Looks = (),
) -> AccuracyDifference | None:
    """The `difference` of two cases, or else of the same variants at another batch size."""
    both = ([each, *_siblings(each, cases, same_task=True)] for each in (case, other))
    pairs = ((a, b) for a, b in product(*both) if a.work == b.work)
    return next(filter(None, (difference(*pair, tasks, looks) for pair in pairs)), None)


def difference(
    case: Case, other: Case | None, tasks: Tasks, looks: Looks = ()
) -> AccuracyDifference | None:
    """The metric of one case minus that of another, over the seeds that both were trained with.

    None if one lacks the metric at a seed. `looks`: numbers of seeds after which decided cases are
    trained no further.
    """
    values, base = (_per_seed(each) for each in (case, other))
    seeds, task = min(len(values), len(base)), facts(tasks, case.task)
    if not seeds or task.metric is None or task.margin is None or None in (*values, *base):
        return None
    return verdicts.compare_accuracy(
        values[:seeds],
        base[:seeds],
        margin=task.margin,
        more_is_better=more_is_better(task.metric),
        looks=looks,
    )


def _per_seed(case: Case | None) -> list[float | None]:
    return case.accuracy.per_seed if case and case.accuracy else []
