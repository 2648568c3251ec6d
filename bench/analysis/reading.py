"""Reads a record's file, and finds its rows and comparisons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from bench.analysis.declared import complete
from bench.record import INFERENCE, Case, Comparison, Record, decode


def load(path: str | Path) -> Record:
    """Read a record. `path`: a results.json or its folder.

    Rows of older records get what their benchmark files declare today, see
    `bench.analysis.declared`. Raises ValueError with one line if there is no record or it can't be
    read.
    """
    file = results_file(path)
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        run = "pytest bench/ --benchmark-only"
        raise ValueError(f"{file}: no such record; make one with: {run}") from None
    except OSError as error:
        raise ValueError(f"{file} can't be read ({error.strerror})") from None
    try:
        record = decode(text)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    environment = record.environment
    if environment.onednn == "on by default":  # older runs wrote it without asking TensorFlow
        environment = environment.but(onednn=None)
    return record.but(cases=list(map(complete, record.cases)), environment=environment)


def results_file(path: str | Path) -> Path:
    """`path`, or the results.json in it if it is a folder.

    In a folder of runs it is that of the latest. Without symbolic links, `latest` is a file with
    the name of a folder.
    """
    path = Path(path)
    if not (path / "results.json").exists() and (path / "latest").exists():
        path = path / "latest"
    if path.name == "latest" and path.is_file():
        path = path.with_name(path.read_text("utf-8").strip())
    return path / "results.json" if path.is_dir() else path


@dataclass(frozen=True)
class Row:
    """A variant at one batch size: its case in each framework that has one."""

    label: str
    pt: Case | None
    tf: Case | None

    @property
    def cases(self) -> list[Case]:
        """Its cases."""
        return [case for case in (self.pt, self.tf) if case]


@dataclass(frozen=True)
class View:
    """One technique at one task: its rows by batch size, its comparisons, its cases by id."""

    rows: dict[int, list[Row]]
    comparisons: list[Comparison]
    cases: dict[str, Case]

    def with_baseline(self, case: Case | None) -> Comparison | None:
        """The comparison of `case` with its baseline, or with the variant that it names."""
        for comparison in self.comparisons if case else ():
            if comparison.kind == "baseline" and comparison.numerator == case.id:
                base = self.cases.get(comparison.denominator)
                named = base and case.against == base.variant
                if named or (base and not case.against and base.role == "baseline"):
                    return comparison
        return None

    def twins(self, row: Row) -> Comparison | None:
        """The comparison of the row's PyTorch case with its TensorFlow case."""
        for comparison in self.comparisons if row.tf else ():
            if comparison.kind == "framework" and comparison.denominator == row.tf.id:
                twin = self.cases.get(comparison.numerator)
                if twin and twin.variant == row.tf.variant:
                    return comparison
        return None

    def others(self, batch: int) -> list[Comparison]:
        """The other comparisons at a batch size, such as best against best."""
        of_rows = [
            comparison
            for row in self.rows.get(batch, [])
            for comparison in (*map(self.with_baseline, row.cases), self.twins(row))
        ]
        return [c for c in self.comparisons if c.batch_size == batch and c not in of_rows]

    def framework(self, comparison: Comparison) -> str | None:
        """The framework of both cases; None if they differ."""
        sides = (self.cases.get(name) for name in (comparison.numerator, comparison.denominator))
        both = {case and case.framework for case in sides}
        return both.pop() if len(both) == 1 else None

    def pair(self, comparison: Comparison) -> str:
        """The pair in words; frameworks are named if they differ."""
        names = (comparison.numerator, comparison.denominator)
        first, second = map(self.cases.get, names)
        if not first or not second:
            return " ÷ ".join(names)
        if first.variant == second.variant:
            return f"{first.variant}: {first.framework_title} ÷ {second.framework_title}"
        if comparison.variant.startswith("best:"):
            return f"best: {first.full_title} ÷ {second.full_title}"
        if first.framework_title == second.framework_title:
            return f"{first.framework_title}: {first.variant} ÷ {second.variant}"
        return f"{first.full_title} ÷ {second.full_title}"


def rows_of(cases: Iterable[Case]) -> list[Row]:
    """One row per variant, with both frameworks; a second Keras flavour gets its own row."""
    variants: dict[str, dict[str, list[Case]]] = {}
    for case in cases:
        sides = variants.setdefault(case.variant, {"pt": [], "tf": []})
        sides.setdefault(case.framework, []).append(case)
    return [
        Row(_label(variant, pt, tf), pt, tf)
        for variant, sides in variants.items()
        for pt, tf in zip_longest(sides["pt"], sorted(sides["tf"], key=lambda case: case.is_legacy))
    ]


def _label(variant: str, pt: Case | None, tf: Case | None) -> str:
    """The variant, and which half of the row ran with tf_keras."""
    if not tf or not tf.is_legacy:
        return variant
    return f"{variant} (TensorFlow: tf_keras)" if pt else f"{variant}, tf_keras"


def view(record: Record, technique: str, task: str) -> View:
    """The rows and comparisons of `technique` at a task title. Controls are left out."""
    cases = [c for c in _of(record.cases, technique, task) if c.role != "control"]
    batches = dict.fromkeys(case.batch_size for case in cases)
    return View(
        rows={b: rows_of(case for case in cases if case.batch_size == b) for b in batches},
        comparisons=[c for c in _of(record.comparisons, technique, task) if c.kind != "control"],
        cases={case.id: case for case in cases},
    )


def _of(entries: list, technique: str, task: str) -> list:
    return [e for e in entries if e.technique == technique and e.task_title == task]


def task_of(title: str) -> str:
    """The name of the task that has this title."""
    return title.removesuffix(INFERENCE)


def techniques(record: Record) -> list[str]:
    """The techniques that have cases, in the order of the record."""
    return list(dict.fromkeys(case.technique for case in record.cases))


def tasks(record: Record, technique: str) -> list[str]:
    """The titles of the tasks for which `technique` has cases, in the order of the record."""
    of_technique = (case.task_title for case in record.cases if case.technique == technique)
    return list(dict.fromkeys(of_technique))
