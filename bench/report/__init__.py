"""From results.json to tables for the terminal and for Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 2

_TOP = {
    "command": str,
    "effort": str,
    "started": str,
    "finished": bool,
    "environment": dict,
    "noise_floor": dict,
    "techniques": dict,
    "tasks": dict,
    "cases": list,
    "comparisons": list,
}
_CASE = {
    "id": str,
    "technique": str,
    "framework": str,
    "variant": str,
    "role": str,
    "task": str,
    "batch_size": int,
    "status": str,
}
_COMPARISON = {
    "technique": str,
    "variant": str,
    "task": str,
    "batch_size": int,
    "kind": str,
    "numerator": str,
    "denominator": str,
}


def load(path: str | Path) -> dict[str, Any]:
    """Read a record: `path` is a results.json or the folder that holds one.

    Raises ValueError with one clear line where there is none, or where it is truncated, of a newer
    schema, or not a record of this project.
    """
    file = results_file(path)
    try:
        results = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError(f"{file}: not JSON, or cut off before its end") from None
    try:
        check(results)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return results


def results_file(path: str | Path) -> Path:
    """`path` itself, or the results.json in it where it is a folder."""
    path = Path(path)
    return path / "results.json" if path.is_dir() else path


def write_markdown(path: str | Path) -> Path:
    """Make report.md beside the results.json at `path` again and return where it is.

    Raises ValueError as `load` does, and where the folder cannot be written.
    """
    from bench.report.tables import markdown

    target = results_file(path).with_name("report.md")
    write_atomically(target, markdown(load(path)))
    return target


def write_atomically(target: Path, text: str) -> None:
    """Replace `target` at once, so that no reader sees half of it. ValueError if it cannot be."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.write_text(text, "utf-8")
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ValueError(f"{target}: cannot be written ({error.strerror})") from None


def check(results: Any) -> None:
    """Raise ValueError unless `results` has the shape of a record that this version reads."""
    if not isinstance(results, dict) or type(results.get("schema_version")) is not int:
        raise ValueError("not a record of twinbench (no schema_version)")
    if results["schema_version"] > SCHEMA_VERSION:
        raise ValueError(
            f"schema {results['schema_version']} is newer than {SCHEMA_VERSION}, the newest that "
            "this version reads: update twinbench"
        )
    _check_fields(results, _TOP, "the record")
    for kind, entries, fields in (
        ("case", results["cases"], _CASE),
        ("comparison", results["comparisons"], _COMPARISON),
    ):
        for number, entry in enumerate(entries):
            _check_fields(entry, fields, f"{kind} {number}")
    for kind in ("techniques", "tasks"):
        for name, entry in results[kind].items():
            _check_fields(entry, {}, f"{kind} {name!r}")


def _check_fields(entry: Any, fields: dict[str, type], what: str) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"{what} is no JSON object")
    for name, kind in fields.items():
        if not isinstance(entry.get(name), kind):
            raise ValueError(f"{what} has no {name} ({kind.__name__})")
