"""Derives every figure, ratio and verdict of a record from what was measured.

The same measurements give the same record on any machine: nothing here starts a process, reads a
clock or imports a framework.
"""

from __future__ import annotations

from bench.analysis import cases, checks, comparisons
from bench.analysis.comparisons import Fits
from bench.analysis.pairing import baseline, compared_with, resolved
from bench.analysis.values import finite
from bench.record import Accuracy, Case, Comparison, NoiseFloor, Record, Timing


def analyse(measured: Record) -> Record:
    """The record with every derived field. Numbers that are not finite become None."""
    measured = finite(measured)
    judged = _with_accuracy(measured)
    fits = comparisons.fits(judged)
    compared = _compared(measured, judged, fits)
    of_case = {c.numerator: c for c in compared if c.kind == "baseline"}
    whole = []
    for given, case in zip(measured.cases, judged, strict=True):
        context = cases.Context(
            base=compared_with(case, judged),
            fit=fits.get(case.work),
            comparison=of_case.get(case.id),
            looks=tuple(measured.looks or ()),
            seed_looks=tuple(measured.seed_looks or ()),
        )
        timing = cases.timing(case, context)
        metrics = cases.metrics(case, measured.environment, context)
        whole.append(
            case.but(
                timing=timing.but(step_s=given.timing.step_s),
                blocks=given.blocks,
                cold_starts=given.cold_starts,
                memory=cases.memory(case),
                artifact_bytes=metrics["artifact"].value if "artifact" in metrics else None,
                metrics=metrics,
            )
        )
    floor = comparisons.noise_floor(judged, compared)
    return finite(measured.but(cases=whole, noise_floor=floor, comparisons=compared))


def compared(measured: Record) -> list[Comparison]:
    """The comparisons alone."""
    judged = _with_accuracy(measured)
    return _compared(measured, judged, comparisons.fits(judged))


def _compared(measured: Record, judged: list[Case], fits: Fits) -> list[Comparison]:
    looks, seed_looks = (tuple(each or ()) for each in (measured.looks, measured.seed_looks))
    return comparisons.compare_all(judged, measured.tasks, fits, looks, seed_looks)


def _with_accuracy(measured: Record) -> list[Case]:
    """The cases with what was measured of their programs, and their accuracy judged."""
    looks = tuple(measured.seed_looks or ())
    shown = resolved(measured.cases)
    return [
        case.but(
            certificate=cases.certificate(case),
            accuracy=cases.accuracy(case, baseline(case, shown), measured.tasks, looks),
            loss_check=checks.of_loss(case, baseline(case, shown)),
            fidelity=checks.of_predictions(case, measured.tasks),
            reason=case.reason or cases.not_finite(case),
        )
        for case in shown
    ]


def raw(record: Record) -> Record:
    """The record with measurements only; `analyse` derives the rest again."""
    measured = [_raw(case) for case in record.cases]
    return record.but(cases=measured, comparisons=[], noise_floor=NoiseFloor())


def _raw(case: Case) -> Case:
    accuracy = case.accuracy
    return case.but(
        timing=Timing(step_s=case.timing.step_s),
        accuracy=accuracy and Accuracy(metric=accuracy.metric, per_seed=accuracy.per_seed),
        loss_check=checks.raw(case.loss_check),
        fidelity=checks.raw(case.fidelity),
        memory=None,
        metrics={},
        certificate=None,
        artifact_bytes=None,
    )
