"""What a row does to a figure of its own baseline: a ratio, or a difference in points.

An effect has an interval where processes were repeated. Peaks of memory and first calls are mostly
measured in one process a row: these have the scatter of what the same run measured in several. The
sizes of files are exact. What a single process measured repeatedly (a probe) has its range, and
what was measured once, in a run that repeated nothing of the kind, has no bounds at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

from bench.analysis import decisions, pairing
from bench.analysis.accuracy import difference
from bench.analysis.decisions import Figure
from bench.analysis.reading import DIFFERENT, on_device, peak
from bench.analysis.scatter import SCATTERED, Scatter, processes, scatters
from bench.analysis.values import at, is_number, is_pair

# Why there is no effect, or none that decides.
NOT_MEASURED = "not measured in this record"
NO_ACCURACY = "accuracy not measured"
ONCE = "measured once, without an interval"
NOT_COMPARABLE = "not the same work"


class Effect(Figure):
    """A figure or an effect on one, with its bounds."""

    @property
    def bounded(self) -> bool:
        """Whether it has bounds to judge by."""
        return self.kind != "once"

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The bounds to judge by."""
        return (self.low, self.high) if self.bounded else None

    def turned(self) -> Effect:
        """The ratio the other way round."""
        return Effect(1 / self.value, _over(1, self.high), _over(1, self.low), self.kind)


@dataclass(frozen=True)
class Effects:
    """The effects of a record's rows."""

    record: dict[str, Any]

    def of(
        self, case: dict, figure: str, against: str | None = None
    ) -> tuple[Effect | None, str | None]:
        """The effect on `figure`, or the reason why there is none.

        The figure is "time", "memory", "size", "compressed_size", "first_call", "accuracy" (a
        difference) or the name of a metric. It is compared with the own baseline, or with the
        variant `against` of the same technique.
        """
        other = self._other(case, against)
        return (None, NOT_MEASURED) if other is None else self.between(case, other, figure)

    def between(self, case: dict, other: dict, figure: str) -> tuple[Effect | None, str | None]:
        """The figure of a row over that of any other, or the reason why that is unknown."""
        if figure == "time":
            return self._time(case, other)
        if figure == "accuracy":
            return _accuracy(self.record, case, other)
        if (
            figure == "memory"
            and len({on_device(each.get("memory")) for each in (case, other)}) > 1
        ):
            return None, NOT_COMPARABLE  # a GPU's and the host's
        pair = [_figure(each, figure) for each in (case, other)]
        if None in pair or not all(each.value for each in pair):
            return None, NOT_MEASURED
        return self._ratio(figure, *pair), None

    def value(self, case: dict, figure: str) -> tuple[Effect | None, str | None]:
        """A row's own figure."""
        found = _figure(case, figure)
        return (found, None) if found else (None, NOT_MEASURED)

    def _other(self, case: dict, against: str | None) -> dict | None:
        if against is None:
            return pairing.baseline(case, self.record["cases"])
        same = ("technique", "task", "batch_size", "mode", "framework", "flavour")
        for other in self.record["cases"]:
            alike = all(other.get(key) == case.get(key) for key in same)
            if alike and other["variant"] == against and other["status"] == "OK":
                return other
        return None

    def _time(self, case: dict, other: dict) -> tuple[Effect | None, str | None]:
        """The ratio that the run made of both, block by block."""
        asked = (case["id"], other["id"])
        for each in self.record["comparisons"]:
            pair = (each["numerator"], each["denominator"])
            if pair not in (asked, asked[::-1]):
                continue
            if each.get("verdict") == DIFFERENT:
                return None, NOT_COMPARABLE
            if is_number(each.get("ratio")):
                effect = _bounded(each["ratio"], each.get("ci"))
                return (effect if pair == asked else effect.turned()), None
        found = self._side_by_side.get((pairing.program(case), pairing.program(other)))
        return (_bounded(found.ratio, found.ci), None) if found else (None, NOT_MEASURED)

    @cached_property
    def _side_by_side(self) -> decisions.Ratios:
        every = [work.ratios for work in decisions.works(self.record)]
        return {pair: ratio for ratios in every for pair, ratio in ratios.items()}

    def _ratio(self, figure: str, ours: Effect, theirs: Effect) -> Effect:
        value = ours.value / theirs.value
        if figure in SCATTERED and "exact" not in (ours.kind, theirs.kind):
            bounds = self._scatters[figure].bounds(value, (ours.count, theirs.count))
            return _bounded(value, bounds)
        kinds = {ours.kind, theirs.kind}
        kind = next(k for k in ("once", "range", "interval", "exact") if k in kinds)
        if kind == "once":
            return Effect(value, value, value, kind)
        low, high = max(0.0, ours.low) / theirs.high, _over(ours.high, theirs.low)
        return Effect(value, low, high, kind)

    @cached_property
    def _scatters(self) -> dict[str, Scatter]:
        return scatters(self.record)


def _over(top: float, bottom: float) -> float:
    """A bound divided by a bound, which may touch 0."""
    return top / bottom if bottom > 0 else inf


def _figure(case: dict, figure: str) -> Effect | None:
    if figure == "memory":
        return _memory(case)
    if figure == "size":
        return _exact(case.get("artifact_bytes"))
    if figure == "compressed_size":
        return _exact(at(case, "metrics", "compressed_artifact", "value"))
    if figure == "first_call":
        value = at(case, "timing", "cold_first_call_s")
        return _once(value, processes(case, figure))
    metric = at(case, "metrics", figure)
    value, samples = at(metric, "value"), at(metric, "samples")
    if not is_number(value):
        return None
    if is_pair(at(metric, "ci")):
        return Effect(value, *metric["ci"], "interval")
    repeated = [v for v in samples if is_number(v)] if isinstance(samples, list) else []
    if len(repeated) > 1 and min(repeated) <= value <= max(repeated):
        return Effect(value, min(repeated), max(repeated), "range")
    if figure == "largest_batch":  # it fits, and 5% more does not
        return Effect(value, value, 1.05 * value, "range")
    return _exact(value) if figure in COUNTED else _once(value)


COUNTED = ("checkpoint", "parameters", "parameters_not_zero", "macs", "found", "plain_unhealthy")


def _memory(case: dict) -> Effect | None:
    """The device's peak, which its allocator counts, else that above the imports."""
    memory = case.get("memory")
    if on_device(memory):
        return _exact(peak(memory))
    mean = at(memory, "above_import_bytes")
    return _once(mean if is_number(mean) else peak(memory), processes(case, "memory"))


def _once(value: Any, count: int = 1) -> Effect | None:
    return Effect(value, value, value, "once", count) if is_number(value) and value > 0 else None


def _exact(value: Any) -> Effect | None:
    return Effect(value, value, value, "exact") if is_number(value) else None


def _bounded(value: float, ci: Any) -> Effect:
    if is_pair(ci):
        return Effect(value, ci[0], ci[1], "interval")
    return Effect(value, value, value, "once")


def _accuracy(record: dict, case: dict, other: dict) -> tuple[Effect | None, str | None]:
    """Points of accuracy more than the other's, by the seeds that both trained with."""
    if at(record["tasks"], case["task"], "metric") != "accuracy":
        return None, NO_ACCURACY
    found = at(case, "accuracy", "difference")
    own = pairing.baseline(case, record["cases"]) is other
    if not own and at(record["tasks"], case["task"], "margin") is not None:
        found = difference(case, other, record["tasks"], record.get("seed_looks"))
    if not is_number(at(found, "mean")):
        return None, NO_ACCURACY
    return _bounded(found["mean"], at(found, "ci")), None
