"""What a record would have said had its run ended early, or played fewer rounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean

from bench.analysis import comparisons, pairing
from bench.analysis.bounds import LOOKS
from bench.analysis.fit import Fit, Samples, fit
from bench.analysis.sequential import DECIDED, Pair, judge
from bench.analysis.verdicts import FEWEST_SEEDS, Ratio
from bench.record import Case, Comparison, Record

FEWER = 15  # rounds


@dataclass
class Told:
    """How verdicts of one design agree with those of all blocks and rounds.

    decided: after how many blocks
    lost: what all tell and this does not
    gained: what this tells and all do not
    contradicted: where they tell different things
    widths: the sum of the intervals' widths, each to that of all
    """

    decided: Counter = field(default_factory=Counter)
    blocks: int = 0
    count: int = 0
    agree: int = 0
    lost: list[str] = field(default_factory=list)
    gained: list[str] = field(default_factory=list)
    contradicted: list[str] = field(default_factory=list)
    widths: float = 0.0

    def add(self, name: str, verdict: str | None, whole: str | None) -> None:
        """Count one comparison."""
        self.count += 1
        told, known = verdict in DECIDED, whole in DECIDED
        if told and known and verdict != whole:
            self.contradicted.append(f"{name}: {verdict}, {whole} by all")
        elif known and not told:
            self.lost.append(f"{name}: {verdict}, {whole} by all")
        elif told and not known:
            self.gained.append(f"{name}: {verdict}, {whole} by all")
        else:
            self.agree += 1


@dataclass
class Replay:
    """Three designs beside all blocks and rounds of a record: an early end, fewer rounds, both."""

    early: Told = field(default_factory=Told)
    fewer: Told = field(default_factory=Told)
    both: Told = field(default_factory=Told)


def replay(record: Record) -> Replay:
    """Judge every comparison of a record as if its run had ended early, and with fewer rounds."""
    designs = Replay()
    for samples, compared in works(record):
        whole, short = fit(samples), fit(fewer(samples))
        kept = [(c, p) for c, p in compared if len(whole.shared(p.top, p.bottom)) >= LOOKS[1]]
        judged = [whole.ratio(pair.top, pair.bottom) for _, pair in kept]
        _early(designs.early, whole, kept, judged)
        _early(designs.both, short, kept, judged)
        for (comparison, pair), known in zip(kept, judged, strict=True):
            some = short.ratio(pair.top, pair.bottom)
            designs.fewer.add(_name(comparison), some.verdict, known.verdict)
            designs.fewer.widths += _width(some) / _width(known)
    return designs


def _early(told: Told, of: Fit, kept: list[tuple[Comparison, Pair]], judged: list[Ratio]) -> None:
    """Each comparison ends at the first look that decides it."""
    early = judge(of, [pair for _, pair in kept], LOOKS)
    for (comparison, _), result, known in zip(kept, early, judged, strict=True):
        told.add(_name(comparison), result.verdict, known.verdict)
        told.decided[result.look] += 1
        told.blocks += result.look or result.n


def noise_of(record: Record) -> dict[str, list[float]]:
    """How the log ratios of a record scatter about their means, by the frameworks of the pair."""
    noise: dict[str, list[float]] = {}
    for samples, compared in works(record):
        fitted = fit(samples)
        for _, pair in compared:
            values = fitted.log_ratios(pair.top, pair.bottom)
            if len(values) >= LOOKS[1]:  # of fewer the deviation is hardly known
                wider = (len(values) / (len(values) - 1)) ** 0.5  # a mean is nearer than the truth
                name = " ÷ ".join(dict.fromkeys(pair.kin[1:]))
                noise.setdefault(name, []).extend(
                    wider * (value - fmean(values)) for value in values
                )
    return noise


def accuracy_noise_of(record: Record) -> dict[str, list[float]]:
    """How rows' metric scatters over seeds about its mean difference, by task, in its margins."""
    noise: dict[str, list[float]] = {}
    for case in record.cases:
        baseline = pairing.baseline(case, record.cases)
        ours, theirs = (
            side.accuracy.per_seed if side and side.accuracy else [] for side in (case, baseline)
        )
        if None in (*ours, *theirs):
            continue
        differences = [a - b for a, b in zip(ours, theirs, strict=False)]
        if case.role == "baseline" or len(differences) <= FEWEST_SEEDS or not any(differences):
            continue
        wider = (len(differences) / (len(differences) - 1)) ** 0.5
        scale, mean = wider / record.tasks[case.task].margin, fmean(differences)
        noise.setdefault(case.task, []).extend(scale * (one - mean) for one in differences)
    return noise


def _width(ratio: Ratio) -> float:
    return ratio.ci[1] / ratio.ci[0] - 1


def _name(comparison: Comparison) -> str:
    return f"{comparison.numerator} ÷ {comparison.denominator}"


def table(replays: dict[str, Replay]) -> str:
    """For each design a line for each record, and one for all; then what it lost or contradicts."""
    whole, lines = _together(list(replays.values())), []
    told = f"{'agree':>7}{'lost':>6}{'gained':>7}{'other':>7}"
    ends = "".join(f"{f'at {look}':>6}" for look in LOOKS) + f"{'open':>6}{'blocks':>8}"
    early = f"ends at looks {', '.join(map(str, LOOKS))}"
    for name, title, head in (
        ("early", f"An early end ({early})", ends),
        ("fewer", f"{FEWER} rounds in all blocks", f"{'width':>7}"),
        ("both", f"Both: {FEWER} rounds, {early}", ends),
    ):
        lines += [f"{title}, beside all rounds of all blocks:"]
        lines += [f"{'record':<18}{'ratios':>7}{head}{told}"]
        for record, replayed in (replays | {"together": whole}).items():
            lines.append(_line(record, getattr(replayed, name), looks=name != "fewer"))
        for word in ("lost", "contradicted"):
            lines += [f"  {word}: {text}" for text in getattr(getattr(whole, name), word)]
        lines.append("")
    return "\n".join(lines[:-1])


def _line(name: str, told: Told, *, looks: bool) -> str:
    counts = "".join(f"{told.decided[n]:>6}" for n in (*LOOKS, None)) if looks else ""
    share = (told.blocks if looks else told.widths) / max(told.count, 1)
    middle = f"{counts}{share:>8.1f}" if looks else f"{share:>7.2f}"
    ends = f"{told.agree:>7}{len(told.lost):>6}{len(told.gained):>7}{len(told.contradicted):>7}"
    return f"{name:<18}{told.count:>7}{middle}{ends}"


def _together(replays: list[Replay]) -> Replay:
    """The sums of several records."""
    whole = Replay()
    for replayed in replays:
        for design, sums in vars(whole).items():
            for name, value in vars(sums).items():
                setattr(sums, name, value + getattr(getattr(replayed, design), name))
    return whole


def fewer(samples: Samples) -> Samples:
    """The first rounds of every block."""
    return {
        name: {
            match: {block: rounds[:FEWER] for block, rounds in blocks.items()}
            for match, blocks in matches.items()
        }
        for name, matches in samples.items()
    }


def works(record: Record) -> list[tuple[Samples, list[tuple[Comparison, Pair]]]]:
    """Each piece of work: its samples by program, and its comparisons."""
    cases = pairing.resolved(record.cases)
    by_id = {case.id: case for case in cases}
    pieces = []
    for work, samples in comparisons.samples(cases).items():
        compared = [
            (comparison, _pair(comparison, by_id))
            for comparison in record.comparisons
            if by_id[comparison.numerator].work == work
        ]
        pieces.append((samples, compared))
    return pieces


def _pair(comparison: Comparison, by_id: dict[str, Case]) -> Pair:
    top, bottom = by_id[comparison.numerator], by_id[comparison.denominator]
    kin = (comparison.kind == "control", top.framework, bottom.framework)
    return Pair(top.program_id, bottom.program_id, kin)
