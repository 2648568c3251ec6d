"""Derives the figures of one case from its measurements."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from bench.analysis import verdicts
from bench.analysis.accuracy import Tasks, difference
from bench.analysis.bounds import Looks, confidence
from bench.analysis.fit import Fit
from bench.record import (
    DIFFERENT,
    Accuracy,
    AccuracyDifference,
    Artifact,
    Block,
    Case,
    Certificate,
    ColdStart,
    Comparison,
    Environment,
    Memory,
    Metric,
    Timing,
)

LIFETIMES = (100, 1_000, 10_000)  # steps whose total time is given beside the first call's
Metrics = dict[str, Metric]


@dataclass(frozen=True)
class Context:
    """What a case is judged by.

    `base`: the case that it is compared with. `fit`: of its work. `comparison`: with `base`.
    `looks`, `seed_looks`: numbers of blocks and seeds at which the run was looked at.
    """

    base: Case | None = None
    fit: Fit | None = None
    comparison: Comparison | None = None
    looks: Looks = ()
    seed_looks: Looks = ()

    def step_time(self, case: Case) -> tuple[float, tuple[float, float] | None] | None:
        """Seconds per step with their interval; None if the case has no times."""
        if self.fit is None or not case.has_times:
            return None
        if self.looks:
            return self.fit.time_at_looks(case.program_id, confidence(self.looks))
        return self.fit.time(case.program_id)


def timing(case: Case, context: Context) -> Timing:
    """First calls and step time, with the samples."""
    step, ci = context.step_time(case) or (None, None)
    return case.timing.but(
        cold_first_call_s=_middle(cold.first_call_s for cold in case.cold_starts),
        warm_first_call_s=_middle(block.first_call_s for block in case.blocks),
        median_s=step,
        ci_s=ci,
    )


def _middle(values: Iterable[float | None]) -> float | None:
    """The median of what was measured."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def memory(case: Case) -> Memory | None:
    """Medians over the cold starts; `samples` has each.

    Memory above the imports is a mean, with its 95% interval if it was measured repeatedly.
    """
    starts = [_sizes(cold) for cold in case.cold_starts]
    if not starts:
        return None
    samples = {name: [start[name] for start in starts] for name in starts[0]}
    medians = {name: _middle(values) for name, values in samples.items()}
    known = [value for value in samples["above_import_bytes"] if value is not None]
    above = verdicts.t_interval(known) if known else None
    return Memory(**medians, samples=samples).but(
        device_peak=case.cold_starts[0].device_peak,
        above_import_bytes=above and above.mean,
        above_import_ci=above and above.ci,
    )


def _sizes(cold: ColdStart) -> dict[str, float | None]:
    sizes = cold.memory | {f"{name}_bytes": size for name, size in cold.parts.items()}
    steady, start = sizes.get("steady_peak_bytes"), sizes.get("import_bytes")
    above = None if steady is None or start is None else steady - start
    rest = None if above is None else above - sum(cold.parts.values())
    return sizes | {"rest_bytes": rest, "above_import_bytes": above}


def accuracy(case: Case, base: Case | None, tasks: Tasks, looks: Looks = ()) -> Accuracy | None:
    """The metric over seeds, and its difference from the baseline's; None unless all are there."""
    measured = case.accuracy
    if measured is None or not_finite(case):
        return measured
    mean = verdicts.t_interval(measured.per_seed, confidence(looks))
    return measured.but(mean=mean.mean, ci=mean.ci, difference=difference(case, base, tasks, looks))


def not_finite(case: Case) -> str | None:
    """Why a trained case has no accuracy: its training diverged."""
    per_seed = case.accuracy.per_seed if case.accuracy else []
    seeds = [str(seed) for seed, value in enumerate(per_seed) if value is None]
    if not seeds:
        return None
    return f"accuracy not measured: the metric is not finite at seed {', '.join(seeds)}"


def certificate(case: Case) -> Certificate | None:
    """The first block's losses and weights."""
    if not case.blocks:
        return None
    first: Block = case.blocks[0]
    return Certificate(losses=first.losses, weights_sha256=first.weights_sha256)


def artifact(case: Case) -> Metrics:
    """Size of the deployed file, as it is and compressed; of trained weights if there are any.

    The file that a probe reports has the weights that the probe says.
    """
    probed = {name: case.probed[name] for name in _SIZES if name in case.probed}
    if probed:
        return {name: Metric(value=each.value, unit="bytes") for name, each in probed.items()}
    deployed: list[Artifact] = case.trained_artifacts
    deployed = deployed or [c.artifact for c in case.cold_starts[:1] if c.artifact]
    metrics = {}
    for name, field in _SIZES.items() if deployed else ():
        sizes = [getattr(each, field) for each in deployed]
        samples = sizes if len(sizes) > 1 else None
        metrics[name] = Metric(value=median(sizes), unit="bytes", samples=samples)
    return metrics


_SIZES = {"artifact": "bytes", "compressed_artifact": "compressed_bytes"}


def metrics(case: Case, environment: Environment, context: Context) -> Metrics:
    """All other figures by name: derived ones, counts of the proof, and those of a probe."""
    counted = (case.evidence or {}).get("measured", {})
    return {
        **_rates(case, environment, context),
        **artifact(case),
        **{name: Metric(value=m["value"], unit=m["unit"]) for name, m in counted.items()},
        **_lifetimes(case, context),
        **_seen_in_training(case, context.seed_looks),
        **_checked(case),
        **_energy(case, context.looks),
        **case.probed,
    }


def _seen_in_training(case: Case, looks: Looks) -> Metrics:
    """The mean over seeds of each figure; none where a seed has none, as it missed its target."""
    seeds, metrics = case.trained_metrics, {}
    for name, first in seeds[0].items() if seeds else ():
        values = [seed[name].value for seed in seeds]
        if None in values:
            metrics[name] = Metric(unit=first.unit)
        else:
            mean = verdicts.t_interval(values, confidence(looks))
            metrics[name] = Metric(value=mean.mean, unit=first.unit, ci=mean.ci, samples=values)
    return metrics


def _checked(case: Case) -> Metrics:
    """What a check of its loss or of its predictions has found, over those of its baseline."""
    check, predictions, metrics = case.loss_check, case.fidelity, {}
    if check and check.difference:
        metrics["loss_more"] = _difference(check.difference, "nats")
    if predictions:
        share = 100 * predictions.flipped / predictions.samples
        metrics["flipped"] = Metric(value=share, unit="%", ci=(share, share))
        metrics["points_more"] = _difference(predictions.points, "points")
        if predictions.loss:
            metrics["loss_more"] = _difference(predictions.loss, "nats")
    return metrics


def _difference(found: AccuracyDifference, unit: str) -> Metric:
    return Metric(value=found.mean, unit=unit, ci=found.ci)


def _rates(case: Case, environment: Environment, context: Context) -> Metrics:
    """Samples a second, and the share of the machine's best matrix product."""
    time = context.step_time(case)
    if time is None:
        return {}
    metrics = {"samples_per_s": _per_second(case.batch_size, *time, "samples/s")}
    peak = (environment.peak_flops or {}).get(_main_dtype(case.evidence))
    if peak and case.flops:
        metrics["share_of_peak"] = _per_second(case.flops / peak, *time, "1")
    return metrics


def _per_second(amount: float, step: float, ci: tuple[float, float] | None, unit: str) -> Metric:
    """A step's amount over its time."""
    return Metric(value=amount / step, unit=unit, ci=ci and (amount / ci[1], amount / ci[0]))


def _energy(case: Case, looks: Looks) -> Metrics:
    """Joules a step and a sample by the machine's counters: the mean of each block, over blocks."""
    blocks = [block.energy_j for block in case.blocks]
    if not case.has_times or not blocks or not all(blocks):
        return {}
    mean, size = verdicts.t_interval(list(map(fmean, blocks)), confidence(looks)), case.batch_size
    ci = mean.ci
    a_sample = ci and (ci[0] / size, ci[1] / size)
    return {
        "energy_per_step": Metric(value=mean.mean, unit="J", ci=ci),
        "energy_per_sample": Metric(value=mean.mean / size, unit="J", ci=a_sample),
    }


def _main_dtype(evidence: dict[str, Any] | None) -> str | None:
    """The dtype in which most of the products and convolutions ran."""
    counts: dict[str, int] = {}
    for operators in (evidence or {}).get("operator_dtypes", {}).values():
        for dtype, count in operators.items():
            counts[dtype] = counts.get(dtype, 0) + count
    return max(counts, key=counts.get) if counts else None


def _lifetimes(case: Case, context: Context) -> Metrics:
    """What the first call costs in the long run: totals of N steps, and the break-even.

    Only where the cold start was repeated. The break-even is the number of steps after which
    the slower first call is repaid by faster steps; its interval spans that of the ratio and
    the range of the cold starts, and has no upper end where it may never be.
    """
    first = [cold.first_call_s for cold in case.cold_starts]
    fit, base, comparison = context.fit, context.base, context.comparison
    if len(first) < 2 or not fit or not case.has_times:
        return {}
    step, _ = fit.time(case.program_id)
    metrics = {
        f"total_{count}_steps_s": Metric(value=median(first) + (count - 1) * step, unit="s")
        for count in LIFETIMES
    }
    bounds = (min(first), max(first))
    metrics["cold_first_calls_s"] = Metric(value=median(first), unit="s", ci=bounds, samples=first)
    if base and base.cold_starts and comparison and comparison.verdict != DIFFERENT:
        usual = median(cold.first_call_s for cold in base.cold_starts)
        extra = [median(first) - usual, min(first) - usual, max(first) - usual]
        base_step, _ = fit.time(base.program_id)
        low, high = comparison.ci or (comparison.ratio, comparison.ratio)
        value, least, most = (
            max(0.0, more) / (base_step * (1 - ratio)) if ratio < 1 else None
            for more, ratio in zip(extra, (comparison.ratio, low, high), strict=True)
        )
        metrics["break_even_steps"] = Metric(value=value, unit="steps", ci=(least, most))
    return metrics
