"""Graphs of twins in one runtime: their operators side by side, and what they do not share.

A technique whose proof has `graph_operators` (task -> stage -> operator -> number) gets both: a
table, and a sentence for each pair of twins that was not found equally fast.
"""

from __future__ import annotations

from typing import Any

from bench.analysis.reading import View
from bench.analysis.values import is_number
from bench.record import DIFFERENT, FRAMEWORKS, Case
from bench.report.formatting import MISSING, ratio
from bench.report.technique_tables import Table, of_figures, of_words

Histogram = dict[str, int]
ELSEWHERE = ("graph_operators", "measured", "curve")  # parts of a proof with tables or charts


def histograms(case: Case | None) -> dict[str, Histogram]:
    """Stage -> operator -> number, of a case's graph; none where the record has something else."""
    graphs = (case.evidence or {}).get("graph_operators") if case else None
    stages = graphs.get(case.task) if isinstance(graphs, dict) else None
    return {
        stage: {name: count for name, count in counts.items() if is_number(count)}
        for stage, counts in (stages.items() if isinstance(stages, dict) else ())
        if isinstance(counts, dict)
    }


def without(evidence: dict[str, Any]) -> dict[str, Any]:
    """A proof but for what stands in tables and charts."""
    return {name: proof for name, proof in evidence.items() if name not in ELSEWHERE}


def table(view: View) -> Table | None:
    """Nodes and operators of each variant's graphs, both frameworks side by side.

    A graph takes any batch size, so that the first one that has it stands for all.
    """
    variants: dict[str, dict[str, dict[str, Histogram]]] = {}
    for row in (row for rows in view.rows.values() for row in rows):
        for framework, case in (("pt", row.pt), ("tf", row.tf)):
            if held := histograms(case):
                variants.setdefault(row.label, {}).setdefault(framework, held)
    sides = [held for pair in variants.values() for held in pair.values()]
    stages = list(dict.fromkeys(stage for held in sides for stage in held))
    columns = of_words("operator")
    for title in FRAMEWORKS.values():
        columns += of_figures(*stages, group=title)
    rows = []
    for label, pair in variants.items():
        sides = [pair.get(framework, {}) for framework in FRAMEWORKS]
        places = [side.get(stage) for side in sides for stage in stages]
        names = sorted({name for held in places for name in held or ()})
        rows.append([label, *[""] * len(places)])
        rows.append(["nodes", *(_count(held, None) for held in places)])
        rows += [[name, *(_count(held, name) for held in places)] for name in names]
    return Table("Operators of the graphs", columns, rows) if rows else None


def _count(held: Histogram | None, name: str | None) -> str:
    if held is None:
        return MISSING
    return str(sum(held.values()) if name is None else held.get(name, 0))


def differences(view: View) -> list[str]:
    """For each pair of twins that is not equivalent: which operators they do not share."""
    lines = []
    for batch, rows in view.rows.items():
        for row in rows:
            comparison, pt, tf = view.twins(row), histograms(row.pt), histograms(row.tf)
            verdict = comparison and comparison.verdict
            if verdict in (None, "equivalent", DIFFERENT) or not pt.keys() & tf.keys():
                continue
            figure = ratio(comparison.ratio, comparison.ci)
            stages = [_difference(stage, pt[stage], tf[stage]) for stage in pt if stage in tf]
            text = f"{row.label}, batch {batch}: PyTorch ÷ TensorFlow is {figure}, {verdict}"
            lines.append(f"{text}; {'; '.join(stages)}.")
    return lines


def _difference(stage: str, pt: Histogram, tf: Histogram) -> str:
    """How the graphs of one stage differ, in words."""
    nodes = f"{stage}, PyTorch's graph has {_count(pt, None)} nodes, TensorFlow's"
    pairs = {name: (pt.get(name, 0), tf.get(name, 0)) for name in sorted({*pt, *tf})}
    differing = [f"{name} {a} and {b}" for name, (a, b) in pairs.items() if a != b]
    return f"{nodes} {_count(tf, None)} ({', '.join(differing) or 'the same operators'})"
