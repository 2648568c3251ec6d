"""Graphs of twins in one runtime: their operators side by side, and what they do not share.

A technique whose proof has `graph_operators` (task -> stage -> operator -> number) gets both: a
table, and a sentence for each pair of twins that was not found equally fast.
"""

from __future__ import annotations

from typing import Any

from bench.analysis.reading import DIFFERENT, FRAMEWORKS, View
from bench.analysis.values import at, is_number
from bench.report.blocks import Table, of_figures, of_words
from bench.report.figures import MISSING, ratio

Histogram = dict[str, int]
ELSEWHERE = ("graph_operators", "measured", "curve")  # parts of a proof with tables or charts


def histograms(case: dict | None) -> dict[str, Histogram]:
    """Stage -> operator -> number, of a case's graph; none where the record has something else."""
    found = at(case, "evidence", "graph_operators", at(case, "task") or "")
    stages = found.items() if isinstance(found, dict) else ()
    return {
        stage: {name: count for name, count in held.items() if is_number(count)}
        for stage, held in stages
        if isinstance(held, dict)
    }


def without(evidence: Any) -> Any:
    """A proof but for what stands in tables and charts."""
    if not isinstance(evidence, dict):
        return evidence
    return {name: proof for name, proof in evidence.items() if name not in ELSEWHERE}


def table(found: View) -> Table | None:
    """Nodes and operators of each variant's graphs, both frameworks side by side.

    A graph takes any batch size, so that the first one that has it stands for all.
    """
    variants: dict[str, dict[str, dict[str, Histogram]]] = {}
    for row in (row for rows in found.rows.values() for row in rows):
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
        places = [at(pair, framework, stage) for framework in FRAMEWORKS for stage in stages]
        names = sorted({name for held in places for name in held or ()})
        rows.append([label, *[""] * len(places)])
        rows.append(["nodes", *(_count(held, None) for held in places)])
        rows += [[name, *(_count(held, name) for held in places)] for name in names]
    return Table("Operators of the graphs", columns, rows) if rows else None


def _count(held: Histogram | None, name: str | None) -> str:
    if held is None:
        return MISSING
    return str(sum(held.values()) if name is None else held.get(name, 0))


def differences(found: View) -> list[str]:
    """For each pair of twins that was not found equivalent: which operators they do not share."""
    said = []
    for batch, rows in found.rows.items():
        for row in rows:
            comparison, ours, theirs = found.twins(row), histograms(row.pt), histograms(row.tf)
            verdict = at(comparison, "verdict")
            if verdict in (None, "equivalent", DIFFERENT) or not ours.keys() & theirs.keys():
                continue
            figure = ratio(comparison.get("ratio"), comparison.get("ci"))
            stages = [_apart(s, ours[s], theirs[s]) for s in ours if s in theirs]
            text = f"{row.label}, batch {batch}: PyTorch ÷ TensorFlow is {figure}, {verdict}"
            said.append(f"{text}; {'; '.join(stages)}.")
    return said


def _apart(stage: str, ours: Histogram, theirs: Histogram) -> str:
    """How the graphs of one stage differ, in words."""
    nodes = f"{stage}, PyTorch's graph has {_count(ours, None)} nodes, TensorFlow's"
    pairs = {name: (ours.get(name, 0), theirs.get(name, 0)) for name in sorted({*ours, *theirs})}
    apart = [f"{name} {a} and {b}" for name, (a, b) in pairs.items() if a != b]
    return f"{nodes} {_count(theirs, None)} ({', '.join(apart) or 'the same operators'})"
