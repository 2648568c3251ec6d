"""What changes between the records of two machines, by the rate at which whole steps compute.

A record has no tables by kind or layer. It has each step's arithmetic and time, and the machine's
fastest product. So the answer is a guess: which side uses less of what one of the machines does
better.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.analysis.machine_class import differences, words
from bench.record import FRAMEWORKS, Case, Comparison, Record
from bench.report.formatting import number, ratio

PRODUCTS = 0.25  # of the best product, below which a step is mostly other work
LEAST = 0.1  # of a rate's growth by which the sides differ, for a guess to name one


@dataclass(frozen=True)
class Turned:
    """Two rows whose ratio differs between machines. rates: FLOP/s of (PyTorch, TensorFlow).

    shares: the same over each machine's fastest float32 product.
    """

    title: str
    ratios: tuple[Comparison, Comparison]
    rates: tuple[tuple[float, float], tuple[float, float]]
    shares: tuple[tuple[float, float], tuple[float, float]]

    @property
    def growth(self) -> tuple[float, float]:
        """How many times the first machine's rate each side reaches on the second."""
        (a, b), (c, d) = self.rates
        return c / a, d / b


def turned(first: Record, second: Record) -> list[Turned]:
    """Plain pairs whose intervals of the ratio do not overlap, the most different first."""
    both = [_twins(record) for record in (first, second)]
    made = []
    for name in both[0].keys() & both[1].keys():
        (one, sides), (other, theirs) = both[0][name], both[1][name]
        if one.ci[1] >= other.ci[0] and other.ci[1] >= one.ci[0]:
            continue
        rates = tuple(tuple(c.flops / c.timing.median_s for c in cs) for cs in (sides, theirs))
        peaks = [record.environment.peak_flops["float32"] for record in (first, second)]
        shares = tuple(tuple(r / p for r in rs) for rs, p in zip(rates, peaks, strict=True))
        title = f"{one.technique} {one.variant}, {one.task_title}, batch {one.batch_size}"
        made.append(
            Turned(title.replace("baseline baseline", "plain"), (one, other), rates, shares)
        )
    return sorted(made, key=lambda one: -abs(one.ratios[1].ratio / one.ratios[0].ratio - 1))


def _twins(record: Record) -> dict[tuple, tuple[Comparison, tuple[Case, Case]]]:
    """Comparisons of baselines of both frameworks whose times and arithmetic are known."""
    cases = {case.id: case for case in record.cases}
    if not (record.environment.peak_flops or {}).get("float32") or record.environment.gpu:
        return {}
    known, programs = {}, set()
    for one in record.comparisons:
        sides = tuple(cases.get(name) for name in (one.numerator, one.denominator))
        if one.kind != "framework" or not one.ci or not all(sides) or sides[1].is_legacy:
            continue
        sides = tuple(cases.get(side.program_id, side) for side in sides)
        usable = all(s.role == "baseline" and s.flops and s.timing.median_s for s in sides)
        if usable and (program := tuple(side.id for side in sides)) not in programs:
            programs.add(program)
            known[one.technique, one.variant, one.task, one.batch_size, one.mode] = one, sides
    return known


def told(records: list[Record], names: list[str]) -> list[str]:
    """The answer as lines. Raises ValueError for more than two records."""
    if len(records) != 2:
        raise ValueError("give one record, or two from different machines")
    first, second = records
    lines = [f"{n}: {words(r.environment)}" for n, r in zip(names, records, strict=True)]
    lines += [f"  {one}" for one in differences(first.environment, second.environment)[:3]]
    every = turned(first, second)
    if not every:
        return [
            *lines,
            "No ratio of the frameworks differs between these machines beyond the intervals.",
        ]
    lines.append("Times of PyTorch over TensorFlow, and the share of the best float32 product at")
    lines.append("which a whole step computes. Why is a guess: a record has no table of its kinds.")
    best = [record.environment.peak_flops["float32"] for record in records]
    for one in every:
        lines += ["", f"{one.title}:"]
        for name, compared, shares in zip(names, one.ratios, one.shares, strict=True):
            parts = [
                f"{title} {s:.0%}" for title, s in zip(FRAMEWORKS.values(), shares, strict=True)
            ]
            lines.append(f"  {name}: {ratio(compared.ratio, compared.ci)}; {', '.join(parts)}")
        lines.append(f"  {_guess(one, best[1] / best[0])}")
    return lines


def _guess(one: Turned, best: float) -> str:
    """Which side follows the machine's products, and which does not."""
    grown = dict(zip(FRAMEWORKS.values(), one.growth, strict=True))
    ours, theirs = sorted(grown, key=grown.__getitem__)
    rates = f"on the second the best product is {number(best)} times as fast, a step "
    rates += " and ".join(f"{number(grown[name])} times in {name}" for name in FRAMEWORKS.values())
    if min(one.shares[0]) < PRODUCTS:
        return f"{rates}: a step is mostly other work, of which the records say nothing"
    if abs(best - 1) <= LEAST or abs(grown[theirs] / grown[ours] - 1) <= LEAST:
        return f"{rates}: products do not explain it"
    slow = ours if best > 1 else theirs
    if best > 1 and grown[theirs] > 1 + LEAST:
        return f"{rates}: a guess, {slow}'s libraries use less of what the second can do more"
    if best < 1 and grown[ours] < 1 - LEAST:
        return f"{rates}: a guess, {slow}'s libraries used less of what the first can do more"
    return f"{rates}: products do not explain it"
