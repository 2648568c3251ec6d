"""Which rows are checked for what they keep, and the checks themselves: see `keeping`.

A row is checked if it changes training or predictions, and is not trained to its metric. A row
whose losses equal its baseline's needs no check. A row whose steps take `SLOWEST` times as long as
its baseline's is no gain, and is not checked: on a CPU that emulates bfloat16 such checks took a
sixth of a run. Nothing is timed here.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from statistics import median

from bench.analysis import accuracy, cases
from bench.analysis.families import OF_TRAINING
from bench.analysis.pairing import baseline, resolved
from bench.analysis.ranking import OF_UPDATES
from bench.harness import record
from bench.harness.isolated_measurements import noted
from bench.harness.matches import configured, files_of, parent_key
from bench.harness.plan import SEED, Case, Variant, Workload
from bench.harness.processes import Failed, ParentFailed, ParentKey, Processes, Worker
from bench.harness.run_plan import Plan
from bench.harness.state import RunState
from bench.record import Case as RecordedCase
from bench.record import Fidelity, LossCheck

SLOWEST = 4.0  # times its baseline's step
SEEDS = 3  # of a short training: the fewest that give an interval
PLAIN = ("train_step", "baseline", "bench.train_step.bench_baseline")


# Which --------------------------------------------------------------------------------------------


def expected(plan: Plan, state: RunState) -> list[Case]:
    """The cases that will be checked, as far as their bench files say what they change."""
    return _with_baselines(plan, state, [case for case in plan.every if _changes(case)])


def wanted(plan: Plan, state: RunState) -> list[Case]:
    """The cases to check, by what was measured: those, and others whose losses differ."""
    measured = record.measured(plan, state)
    rows = [row.but(certificate=cases.certificate(row)) for row in resolved(measured.cases)]
    of_case = {row.id: row for row in rows}
    unproven = [
        case
        for case in plan.every
        if (_changes(case) or of_case[case.id].losses)
        and not _is_hopeless(of_case[case.id], rows)
        and accuracy.of(of_case[case.id], rows, measured.tasks).kept is None
    ]
    return _with_baselines(plan, state, unproven)


def _changes(case: Case) -> bool:
    """Whether a row says that its losses are not its baseline's."""
    return bool(case.variant.changes or case.variant.loss_tolerance)


def _is_hopeless(row: RecordedCase, rows: list[RecordedCase]) -> bool:
    """Whether its step takes far longer than its baseline's, at the median of its samples."""
    times = [_step_s(one) for one in (row, baseline(row, rows)) if one]
    return len(times) == 2 and None not in times and times[0] > SLOWEST * times[1]


def _step_s(row: RecordedCase) -> float | None:
    samples = [s for match in row.timing.step_s.values() for block in match.values() for s in block]
    return median(samples) if samples else None


def _with_baselines(plan: Plan, state: RunState, rows: list[Case]) -> list[Case]:
    """The programs of these rows and of what they are compared with that have no check yet.

    A row that stands at several batch sizes is checked at the first: the check has its own.
    """
    trained = {_row(case) for case in plan.every if plan.trained(case)}
    first: dict[tuple, Case] = {}
    for case in rows:
        if _can_be_checked(plan, case) and _row(case) not in trained:
            first.setdefault((*_row(case), case.workload.mode), case)
    bases = {(c.technique, c.work, c.side): c for c in plan.every if c.is_baseline}
    chosen = []
    for case in first.values():
        base = bases.get((case.technique, case.work, case.side))
        if case.workload.mode == "predict":
            chosen.append(case)
        elif base:
            chosen += [base, case]
    programs = dict.fromkeys(plan.shown[case.id] for case in chosen)
    states = {name: state.cases[name] for name in programs}
    return [
        plan.by_id[name]
        for name, of_case in states.items()
        if of_case.status == "OK" and not (of_case.loss_check or of_case.fidelity)
    ]


def _row(case: Case) -> tuple:
    """A variant on a task: what its training says holds at any batch size, and of predictions."""
    return case.technique, case.variant.name, case.side, case.workload.task


def _can_be_checked(plan: Plan, case: Case) -> bool:
    """Whether its task has a check of its mode, and nothing else tells what it keeps.

    Another model has other weights, and a step that is the optimizer's update alone trains nothing.
    """
    task, trains = case.task, case.workload.mode == "train"
    return (
        bool(task.loss_check if trains else task.deployed)
        and case.variant.role == "variant"
        and case.timed
        and case.settled
        and case.variant.measured.accuracy
        and case.variant.changes != "weights"
        and case.family not in OF_TRAINING
        and case.technique != OF_UPDATES
        and not plan.amount.first_pass_alone
    )


def deployed(plan: Plan) -> list[Case]:
    """One plain case for each task of which the run trains a model for predictions.

    It is PyTorch's if the run has that; both frameworks start from the same weights.
    """
    predicted: dict[str, list[str]] = {}
    for case in plan.every:
        if case.workload.mode == "predict" and case.task.deployed:
            predicted.setdefault(case.workload.task, []).append(case.framework)
    if plan.amount.first_pass_alone:
        return []
    variant = Variant("baseline", role="baseline", title="plain step, float32")
    return [
        Case(
            *PLAIN,
            framework="pt" if "pt" in frameworks else frameworks[0],
            flavour=None if "pt" in frameworks else "keras3",
            variant=variant,
            workload=Workload(task, "compute"),
        )
        for task, frameworks in predicted.items()
    ]


# Checks -------------------------------------------------------------------------------------------


@dataclass
class Checked:
    """The result of a case's check, or why there is none."""

    loss: LossCheck | None = None
    predictions: Fidelity | None = None
    seconds: float = 0.0
    status: str = "OK"
    reason: str | None = None


def check(
    processes: Processes,
    which: list[Case],
    *,
    data: dict[str, str],
    threads: int,
    done: Callable[[Case, Checked], None],
) -> None:
    """Check each case in a process with one thread, as many at once as there are threads.

    `done` is called with each result when it is ready, one after the other.
    """
    keys = {case.id: replace(parent_key(case, 1), arm="main") for case in which}
    failures = processes.start_parents(keys.values())

    def checked(case: Case) -> Checked:
        result, key = Checked(), keys[case.id]
        if failure := failures.get(key):
            result.status, result.reason = "FAILED", f"check: {failure}"
            return result
        with noted("check", result):
            started = processes.fork(key, "check-" + case.id.replace("/", "-"))
            with configured(started, processes.limits) as worker:
                _check(processes, worker, case, data[case.workload.task], result)
        return result

    pool = ThreadPoolExecutor(threads)
    try:
        running = {pool.submit(checked, case): case for case in which}
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                done(running.pop(future), future.result())
    finally:
        processes.stop_parents()  # and with them whatever is still checked, so that no thread waits
        pool.shutdown(cancel_futures=True)


def _check(processes: Processes, worker: Worker, case: Case, data: str, result: Checked) -> None:
    limit, work = processes.limits.train, {"case": case.message(), "data": data}
    if case.workload.mode == "predict":
        files = files_of(processes, case, SEED)
        result.predictions = worker.ask(
            limit, "check_predictions", **work, weights_seed=SEED, files=files
        )
        return
    answers = [worker.ask(limit, "check_loss", **work, seed=seed) for seed in range(SEEDS)]
    task = case.task.loss_check
    result.loss = LossCheck(
        steps=task.steps,
        batch_size=task.batch_size,
        learning_rate=task.learning_rate,
        samples=task.held_out,
        first=[answer.first for answer in answers],
        per_seed=[answer.held_out for answer in answers],
    )


def train_deployed(
    processes: Processes, which: list[Case], *, data: dict[str, str], threads: int
) -> dict[str, str]:
    """Train these cases' models for predictions; returns why one failed, by task.

    As many at once as there are threads, each with one thread.
    """

    def train(case: Case) -> str | None:
        key, task = ParentKey(case.framework, case.flavour, "tuned", "main", 1), case.workload.task
        try:
            started = processes.execute(key, f"deploy-{task}")
            with configured(started, processes.limits, SEED) as worker:
                given = {"case": case.message(), "data": data[task], "seed": SEED}
                worker.ask(processes.limits.train, "deploy", **given)
        except (Failed, ParentFailed) as error:
            return str(error)
        return None

    with ThreadPoolExecutor(threads) as pool:
        reasons = list(pool.map(train, which))
    return {c.workload.task: why for c, why in zip(which, reasons, strict=True) if why}
