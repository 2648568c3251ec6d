"""A record's file and rows, and which comparison belongs to which."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bench.analysis.declared import complete
from bench.analysis.schema import check
from bench.analysis.values import at, is_number

DIFFERENT = "not comparable"  # the verdict
FRAMEWORKS = {"pt": "PyTorch", "tf": "TensorFlow"}


def load(path: str | Path) -> dict[str, Any]:
    """Read a record: `path` is a results.json or the folder that holds one.

    Raises ValueError with one clear line where there is none, or where it is truncated, of another
    schema, or not a record of this project (see `schema`).
    """
    file = results_file(path)
    try:
        results = json.loads(file.read_text("utf-8"), parse_constant=_no_constant)
    except FileNotFoundError:
        run = "pytest bench/ --benchmark-only"
        raise ValueError(f"{file}: there is no record; a run writes one: {run}") from None
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{file}: not JSON, or cut off before its end") from None
    try:
        check(results)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return complete(results)


def results_file(path: str | Path) -> Path:
    """`path` itself, or the results.json in it where it is a folder.

    Of a folder of runs it is that of the latest. `latest` is a file with a folder's name where
    there are no symbolic links.
    """
    path = Path(path)
    if not (path / "results.json").exists() and (path / "latest").exists():
        path = path / "latest"
    if path.name == "latest" and path.is_file():
        path = path.with_name(path.read_text("utf-8").strip())
    return path / "results.json" if path.is_dir() else path


def _no_constant(name: str) -> None:
    """NaN and Infinity, which Python's reader takes, are not JSON."""
    raise ValueError(f"{name} is not JSON")


def as_lines(record: dict) -> str:
    """A record as JSON, with a line for each entry of each list, so that it can be searched."""
    parts = []
    for name, value in record.items():
        if value and isinstance(value, list):
            text = "[\n" + ",\n".join(json.dumps(each, allow_nan=False) for each in value) + "\n]"
        else:
            text = json.dumps(value, allow_nan=False)
        parts.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def framework_title(case: dict) -> str:
    """PyTorch, TensorFlow or TensorFlow (tf_keras)."""
    name = case.get("framework")
    title = FRAMEWORKS.get(name) or str(name)
    return f"{title} (tf_keras)" if is_legacy(case) else title


def block_count(case: dict) -> int:
    """How many blocks the case's own program was timed in; those of several matches count once."""
    step_s = at(case, "timing", "step_s") or {}
    return len({block for blocks in step_s.values() for block in blocks})


def is_legacy(case: dict | None) -> bool:
    """Whether the case ran with tf_keras in place of Keras 3."""
    return at(case, "flavour") == "tf_keras"


def title_of(case: dict) -> str:
    """Framework and variant: TensorFlow (tf_keras) bfloat16."""
    return f"{framework_title(case)} {case['variant']}"


@dataclass(frozen=True)
class Row:
    """A variant at one batch size: its case in each framework, where there is one."""

    label: str
    pt: dict | None
    tf: dict | None

    @property
    def cases(self) -> list[dict]:
        """Those that there are."""
        return [case for case in (self.pt, self.tf) if case]


@dataclass(frozen=True)
class View:
    """One technique at one task: its rows by batch size, its comparisons, its cases by id."""

    rows: dict[int, list[Row]]
    comparisons: list[dict]
    cases: dict[str, dict]

    def own(self, case: dict | None) -> dict | None:
        """The comparison of `case` with its framework's baseline."""
        return next(
            (
                c
                for c in self.comparisons
                if c["kind"] == "baseline"
                and c["numerator"] == at(case, "id")
                and at(self.cases.get(c["denominator"]), "role") == "baseline"
            ),
            None,
        )

    def twins(self, row: Row) -> dict | None:
        """The comparison of PyTorch with the row's TensorFlow case, both of the row's variant."""
        return next(
            (
                c
                for c in self.comparisons
                if c["kind"] == "framework"
                and c["denominator"] == at(row.tf, "id")
                and at(self.cases.get(c["numerator"]), "variant") == at(row.tf, "variant")
            ),
            None,
        )

    def others(self, batch: int) -> list[dict]:
        """The comparisons at a batch size that are of no row: best against best, say."""
        rows = self.rows.get(batch, [])
        of_rows = [c for r in rows for c in (self.own(r.pt), self.own(r.tf), self.twins(r))]
        return [c for c in self.comparisons if c["batch_size"] == batch and c not in of_rows]

    def side(self, comparison: dict) -> str | None:
        """The framework that both cases are of; None where they are of different ones."""
        sides = (self.cases.get(comparison[r]) for r in ("numerator", "denominator"))
        both = {at(case, "framework") for case in sides}
        return both.pop() if len(both) == 1 else None

    def pair(self, comparison: dict) -> str:
        """The pair in words; the framework is named where it is not the same on both sides."""
        first, second = (self.cases.get(comparison[r]) for r in ("numerator", "denominator"))
        if not first or not second:
            return f"{comparison['numerator']} ÷ {comparison['denominator']}"
        if first["variant"] == second["variant"]:
            return f"{first['variant']}: {framework_title(first)} ÷ {framework_title(second)}"
        if comparison["variant"].startswith("best:"):
            return f"best: {title_of(first)} ÷ {title_of(second)}"
        if framework_title(first) == framework_title(second):
            return f"{framework_title(first)}: {first['variant']} ÷ {second['variant']}"
        return f"{title_of(first)} ÷ {title_of(second)}"


def rows_of(cases: Iterable[dict]) -> list[Row]:
    """One row a variant, with both frameworks; a second Keras flavour gets a row of its own."""
    variants: dict[str, dict[str, list[dict]]] = {}
    for case in cases:
        sides = variants.setdefault(case["variant"], {"pt": [], "tf": []})
        sides.setdefault(case["framework"], []).append(case)
    return [
        Row(_label(variant, pt, tf), pt, tf)
        for variant, sides in variants.items()
        for pt, tf in zip_longest(sides["pt"], sorted(sides["tf"], key=is_legacy))
    ]


def _label(variant: str, pt: dict | None, tf: dict | None) -> str:
    """The variant, and which half of the row ran with tf_keras."""
    if not is_legacy(tf):
        return variant
    return f"{variant} (TensorFlow: tf_keras)" if pt else f"{variant}, tf_keras"


def view(results: dict[str, Any], technique: str, task: str) -> View:
    """The rows and comparisons of `technique` at `task`; controls belong to the noise."""
    cases = [c for c in _of(results["cases"], technique, task) if c["role"] != "control"]
    batches = dict.fromkeys(case["batch_size"] for case in cases)
    comparisons = [
        c for c in _of(results["comparisons"], technique, task) if c["kind"] != "control"
    ]
    return View(
        rows={b: rows_of(c for c in cases if c["batch_size"] == b) for b in batches},
        comparisons=comparisons,
        cases={case["id"]: case for case in cases},
    )


def _of(entries: list[dict], technique: str, work: str) -> list[dict]:
    return [e for e in entries if e["technique"] == technique and work_of(e) == work]


INFERENCE = ", inference"


def work_of(entry: dict) -> str:
    """The task of a case or comparison; predictions are other work than train steps."""
    return entry["task"] + (INFERENCE if entry.get("mode") == "predict" else "")


def task_of(work: str) -> str:
    """The task's own name."""
    return work.removesuffix(INFERENCE)


def techniques(results: dict[str, Any]) -> list[str]:
    """Names of the techniques that have cases, in the order of the record."""
    return list(dict.fromkeys(case["technique"] for case in results["cases"]))


def tasks(results: dict[str, Any], technique: str) -> list[str]:
    """The work (see `work_of`) of which `technique` has cases, in the order of the record."""
    cases = results["cases"]
    return list(dict.fromkeys(work_of(c) for c in cases if c["technique"] == technique))


def on_device(memory: dict | None) -> bool:
    """Whether a peak is that of a GPU, which its allocator counts."""
    return is_number(at(memory, "device_peak", "allocated"))


def peak(memory: dict | None) -> float | None:
    """The peak to compare, in bytes: the GPU's; on a CPU that of the process above its imports."""
    return memory["device_peak"]["allocated"] if on_device(memory) else above_import(memory)


def above_import(memory: dict | None) -> float | None:
    """Peak of the steady state above what the process took after its imports, in bytes."""
    peak, base = at(memory, "steady_peak_bytes"), at(memory, "import_bytes")
    return peak - base if is_number(peak) and is_number(base) else None
