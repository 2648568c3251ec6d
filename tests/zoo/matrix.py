"""The matrix of techniques and models: run its cells, keep the record, write the page.

The record is `docs/any_model.json`; it is written after each cell, so that a run that was ended
goes on where it was. The page is `docs/any_model.md`, made from the record alone.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.zoo.cells import FAMILIES, REFUSED, ROOT, TECHNIQUES, TRACEBACK, WORKS, WRONG
from tests.zoo.foreign import TRAITS

RECORD, PAGE = ROOT / "docs" / "any_model.json", ROOT / "docs" / "any_model.md"
FRAMEWORKS = {"pt": "PyTorch", "tf": "TensorFlow (Keras 3)"}
LIMIT_S = 180  # for a cell


# Which cells there are --------------------------------------------------------------------------


def models(framework: str) -> dict[str, list[str]]:
    """The models of a framework's zoo with their traits, read without importing a framework."""
    tree = ast.parse((ROOT / "tests" / "zoo" / f"{framework}.py").read_text())
    rows = next(
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "rows"
    )
    found = {}
    for row in rows.elts:
        traits = row.elts[4].value.split()
        found[row.elts[0].value] = [trait.replace("_", " ") for trait in traits]
    return found


def applied(framework: str, technique: str) -> list[str]:
    """The models that a technique is applied to: all, but for those that take several processes."""
    if TECHNIQUES[technique] != "parallel":
        return list(models(framework))
    tree = ast.parse((ROOT / "tests" / "zoo" / f"cells_{framework}.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PARALLEL":
            return list(ast.literal_eval(node.value)[technique])
    return []


def every_cell(framework: str) -> list[tuple[str, str]]:
    """(technique, model), model by model."""
    by_technique = {technique: applied(framework, technique) for technique in TECHNIQUES}
    return [
        (technique, model)
        for model in models(framework)
        for technique in TECHNIQUES
        if model in by_technique[technique]
    ]


def source(framework: str, technique: str) -> str:
    """A digest of the files that decide a cell: the technique's, the kit's and the zoo's."""
    folder = ROOT / f"{framework}_impl"
    files = [
        folder / TECHNIQUES[technique] / f"{technique}.py",
        *sorted((folder / "kit").glob("*")),
    ]
    files += sorted((ROOT / "shared").glob("*.py"))
    files += [ROOT / "tests" / "zoo" / f"{stem}{framework}.py" for stem in ("", "cells_")]
    digest = hashlib.sha256()
    for file in filter(Path.is_file, files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


# Running them -----------------------------------------------------------------------------------


class Worker:
    """A process of one framework, started anew after it crashed or was too slow."""

    def __init__(self, framework: str):
        self.framework, self.process = framework, None

    def run(self, technique: str, model: str) -> dict:
        """The result of one cell."""
        if self.process is None:
            self._start()
        self.process.stdin.write(f"{technique} {model}\n")
        self.process.stdin.flush()
        try:
            line = self.lines.get(timeout=LIMIT_S)
        except queue.Empty:
            self.stop()
            return {
                "status": TRACEBACK,
                "reason": f"not done after {LIMIT_S} s",
                "seconds": LIMIT_S,
            }
        if line is None:
            code = self.process.wait()
            self.stop()
            return {"status": TRACEBACK, "reason": f"the process ended with {code}", "seconds": 0}
        return json.loads(line)

    def _start(self) -> None:
        settings = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        settings |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.zoo.worker", self.framework],
            cwd=ROOT,
            env=os.environ | settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.lines: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, args=(self.process, self.lines), daemon=True).start()
        if self.lines.get() is None:
            raise RuntimeError(f"the worker of {self.framework} did not start: run it by hand")

    @staticmethod
    def _read(process: subprocess.Popen, lines: queue.Queue) -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def run(cells: Iterable[tuple[str, str]], framework: str, report: Callable) -> Iterator[tuple]:
    """Run cells of a framework one after another; yield (technique, model, result)."""
    worker = Worker(framework)
    try:
        for technique, model in cells:
            found = worker.run(technique, model)
            report(framework, technique, model, found)
            yield technique, model, found
    finally:
        worker.stop()


def read() -> dict:
    """The record, empty if there is none: framework -> technique -> model -> cell."""
    if not RECORD.exists():
        return {framework: {} for framework in FRAMEWORKS}
    return json.loads(RECORD.read_text())["cells"]


def write(cells: dict) -> None:
    """Write the record, in the order of techniques and models, without what is gone."""
    kept = {}
    for framework in FRAMEWORKS:
        kept[framework] = {}
        for technique in TECHNIQUES:
            found = cells.get(framework, {}).get(technique, {})
            in_order = {m: found[m] for m in applied(framework, technique) if m in found}
            if in_order:
                kept[framework][technique] = in_order
    text = json.dumps({"cells": kept}, indent=1, ensure_ascii=False)
    draft = RECORD.with_suffix(".draft")
    draft.write_text(text + "\n")
    draft.replace(RECORD)


def update(chosen: dict[str, list[tuple[str, str]]], report: Callable) -> None:
    """Run the chosen cells of each framework, side by side, into the record."""
    cells, lock = read(), threading.Lock()

    def one(framework: str) -> None:
        for technique, model, found in run(chosen[framework], framework, report):
            found["source"] = source(framework, technique)
            with lock:
                cells.setdefault(framework, {}).setdefault(technique, {})[model] = found
                write(cells)

    threads = [threading.Thread(target=one, args=(f,)) for f in chosen if chosen[f]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def missing(framework: str) -> list[tuple[str, str]]:
    """The cells that the record lacks, or that were run with other files than there are now."""
    found = read().get(framework, {})
    now = {technique: source(framework, technique) for technique in TECHNIQUES}
    return [
        (technique, model)
        for technique, model in every_cell(framework)
        if found.get(technique, {}).get(model, {}).get("source") != now[technique]
    ]


# The page ---------------------------------------------------------------------------------------


def count(cells: dict) -> Counter:
    """How many cells of a framework's record have each status."""
    return Counter(cell["status"] for found in cells.values() for cell in found.values())


def share(counted: Counter) -> float:
    """Of all cells, those that work."""
    return counted[WORKS] / max(counted.total(), 1)


_HEAD = """# Any model

Every technique that takes a model, applied unchanged to models that it was not written for, and
compared with plain framework code. Made by `python -m tests.zoo` from
[any_model.json](any_model.json); a test holds page, record and code together.

- **works**: at its neutral setting a technique equals plain code (the same losses, and the same
  changes of all weights and statistics, to the rounding of float32); where it changes the
  mathematics, its outputs stay within its bound of the model's.
- **refused**: `NotImplementedError` or `ValueError` with the reason, before the model has changed.
- Input pipelines take no model and are not here. Parallel techniques start two processes or
  devices, and are applied to a few small models.
"""


def page(cells: dict) -> str:
    """The page, from the record alone."""
    lines = [_HEAD]
    lines.append("| | cells | work | refused | wrong | traceback |")
    lines.append("|:---|---:|---:|---:|---:|---:|")
    for framework, title in FRAMEWORKS.items():
        found = count(cells[framework])
        numbers = " | ".join(str(found[status]) for status in (REFUSED, WRONG, TRACEBACK))
        works = f"{found[WORKS]} ({share(found):.1%})"
        lines.append(f"| {title} | {found.total()} | {works} | {numbers} |")
    for framework, title in FRAMEWORKS.items():
        lines += ["", f"## {title}", "", *_models(framework)]
        for family, techniques in FAMILIES.items():
            lines += ["", f"### {family}", "", *_table(cells[framework], techniques)]
    return "\n".join(lines) + "\n"


def _models(framework: str) -> Iterator[str]:
    yield "| model | what it has |"
    yield "|:---|:---|"
    for name, traits in models(framework).items():
        yield f"| {name} | {', '.join(TRAITS[trait] for trait in traits)} |"


def _table(cells: dict, techniques: tuple[str, ...]) -> Iterator[str]:
    techniques = tuple(t for t in techniques if t in cells)
    in_order = dict.fromkeys(model for t in techniques for model in cells[t])
    reasons: dict[str, int] = {}
    yield "| model | " + " | ".join(name.replace("_", " ") for name in techniques) + " |"
    yield "|:---|" + ":---:|" * len(techniques)
    for model in in_order:
        marks = [_mark(cells[t].get(model), t, reasons) for t in techniques]
        yield f"| {model} | {' | '.join(marks)} |"
    for reason, number in reasons.items():
        yield f"\n<sup>{number}</sup> {reason}"


def _mark(cell: dict | None, technique: str, reasons: dict[str, int]) -> str:
    if cell is None:
        return ""
    told = [] if cell["status"] == WORKS else [f"{technique}: {_escaped(cell['reason'])}"]
    if cell["status"] == WORKS:
        for name, variant in cell["variants"].items():
            if variant["status"] == REFUSED:
                told.append(f"{technique}, {name} alone: {_escaped(variant['reason'])}")
    numbers = ", ".join(str(reasons.setdefault(reason, len(reasons) + 1)) for reason in told)
    return cell["status"] + (f" <sup>{numbers}</sup>" if numbers else "")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def started() -> Callable[[], float]:
    """A clock from now on."""
    start = time.monotonic()
    return lambda: time.monotonic() - start
