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
from functools import cache
from pathlib import Path

from tests.zoo.cells import REFUSED, ROOT, TECHNIQUES, TRACEBACK, WORKS
from tests.zoo.foreign import TRAITS

RECORD, PAGE = ROOT / "docs" / "any_model.json", ROOT / "docs" / "any_model.md"
FRAMEWORKS = {"pt": "PyTorch", "tf": "TensorFlow (Keras 3)"}
IN_PART = "in part"  # a cell that works, of which a variant is refused
LIMIT_S = 300  # for a cell: one that compiles takes a minute, on a busy machine more


# Which cells there are --------------------------------------------------------------------------


@cache
def models(framework: str) -> dict[str, list[str]]:
    """The models of a framework's zoo with their traits, read without importing a framework."""
    tree = ast.parse((ROOT / "tests" / "zoo" / f"{framework}.py").read_text())
    rows = next(node.value for node in ast.walk(tree) if _assigned(node) == "rows")
    found = {}
    for row in rows.elts:
        traits = row.elts[4].value.split()
        found[row.elts[0].value] = [trait.replace("_", " ") for trait in traits]
    return found


@cache
def applied(framework: str, technique: str) -> list[str]:
    """The models that a technique is applied to: all, or a few where it takes long.

    Memory format is of images, and applied where there are some.
    """
    if technique == "memory_format":
        return [name for name, traits in models(framework).items() if "images" in traits]
    tree = ast.parse((ROOT / "tests" / "zoo" / f"cells_{framework}.py").read_text())
    few = next(ast.literal_eval(node.value) for node in tree.body if _assigned(node) == "FEW")
    return list(few.get(technique, models(framework)))


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
    """A digest of what decides a cell: the code of the technique's file, of what it imports, and of
    the zoo. Docstrings and comments are no part of it.

    What is imported for the example at a file's end alone, such as the tasks, is no part of it.
    """
    file = ROOT / f"{framework}_impl" / TECHNIQUES[technique] / f"{technique}.py"
    digest = hashlib.sha256()
    for needed in sorted(_imported(file, set())):
        digest.update(_code(needed))
    digest.update(_code(ROOT / "tests" / "zoo" / f"{framework}.py"))
    digest.update(_cells_of(framework, technique).encode())
    return digest.hexdigest()[:16]


def _imported(file: Path, found: set[Path]) -> set[Path]:
    """A file of the project and those that it imports, wherever in it, and theirs in turn."""
    if file not in found:
        found.add(file)
        for needed in _imports(file):
            _imported(needed, found)
    return found


@cache
def _imports(file: Path) -> list[Path]:
    tree, names = ast.parse(file.read_text()), []
    tree.body = [node for node in tree.body if getattr(node, "name", None) != "main"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    files = [(ROOT / name.replace(".", "/")).with_suffix(".py") for name in names]
    return list(filter(Path.is_file, files))


def _cells_of(framework: str, technique: str) -> str:
    """The code of a technique's cells, and of what it uses in their file."""
    named: dict[str, ast.stmt] = {}
    for node in _undocumented(ROOT / "tests" / "zoo" / f"cells_{framework}.py").body:
        names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
        stored = (n.id for n in names if isinstance(n.ctx, ast.Store))
        named |= dict.fromkeys([node.name] if hasattr(node, "name") else stored, node)
    used, new = {}, {technique, "run"}
    while new:
        name = new.pop()
        if name in named.keys() - used.keys() - {"FEW", "CELLS"}:  # which cells there are
            used[name] = ast.dump(named[name])
            new |= {n.id for n in ast.walk(named[name]) if isinstance(n, ast.Name)}
    return "".join(used[name] for name in sorted(used))


def _assigned(node: ast.stmt) -> str:
    """The name that a plain assignment gives a value."""
    return getattr(node.targets[0], "id", "") if isinstance(node, ast.Assign) else ""


@cache
def _code(file: Path) -> bytes:
    return ast.dump(_undocumented(file)).encode()


def _undocumented(file: Path) -> ast.Module:
    """A file without its docstrings."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


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
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        settings = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
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
    lines = [  # one a technique
        f'"{framework}": {{\n'
        + ",\n".join(f'"{t}": {json.dumps(c, ensure_ascii=False)}' for t, c in cells.items())
        + "\n}"
        for framework, cells in kept.items()
    ]
    text = '{"cells": {\n' + ",\n".join(lines) + "\n}}"
    draft = RECORD.with_suffix(".draft")
    draft.write_text(text + "\n")
    draft.replace(RECORD)


def update(chosen: dict[str, list[tuple[str, str]]], report: Callable) -> None:
    """Run the chosen cells, one after another, into the record."""
    cells = read()
    for framework, those in chosen.items():
        # Of the files as they are before: those that change meanwhile are run anew.
        sources = {technique: source(framework, technique) for technique in TECHNIQUES}
        for technique, model, found in run(those, framework, report):
            found["source"] = sources[technique]
            cells.setdefault(framework, {}).setdefault(technique, {})[model] = found
            write(cells)


def bad(framework: str) -> list[tuple[str, str]]:
    """The cells that the record lacks, or that are wrong or a traceback in it."""
    found = read().get(framework, {})
    return [
        (technique, model)
        for technique, model in every_cell(framework)
        if found.get(technique, {}).get(model, {}).get("status") not in (WORKS, REFUSED)
    ]


def stale(framework: str) -> list[tuple[str, str]]:
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


_HEAD = """# Does a technique work with a model like mine?

Each technique was applied, unchanged, to {models} that it was not written for, and compared
with plain framework code. A refused model is left as it was; the reasons are
[below](#what-is-refused-and-why). What is not listed there works.

"""
_MEANING = """
- *Works*: at its neutral setting a technique equals plain code, to the rounding of float32 (of
  float64 where plain float32 is off by more than half a percent{exact}). A technique that
  changes the mathematics is as near as rounding, or does what its definition says.
- *In part*: some variants are refused, such as one file format.
- What starts processes or takes long was applied to a few models, memory format to models of
  images, varying lengths to language models that take any. Input pipelines take no model.
- PyTorch's files for LiteRT and ExecuTorch need [other packages](install.md) and are not here.

Made by `python -m tests.zoo` from [any_model.json](any_model.json), which has every cell.

"""


def page(cells: dict) -> str:
    """The page, from the record alone."""
    counts = {framework: count(cells[framework]) for framework in FRAMEWORKS}
    told = " and ".join(f"{len(models(f))} models of {title}" for f, title in FRAMEWORKS.items())
    lines = [_HEAD.format(models=told).rstrip(), ""]
    titles = [
        f"{title}: {share(counts[framework]):.0%} work" for framework, title in FRAMEWORKS.items()
    ]
    lines += [f"| technique | {' | '.join(titles)} |", "|:---|:---|:---|"]
    for technique in TECHNIQUES:
        told = [_told(cells[framework].get(technique, {})) for framework in FRAMEWORKS]
        lines.append(f"| {technique.replace('_', ' ')} | {' | '.join(told)} |")
    lines += [_MEANING.format(exact=_in_float64(cells)), "## The models", "", *_traits()]
    lines += ["", "## What is refused, and why", ""]
    for technique in TECHNIQUES:
        lines += _reasons(technique, cells)
    return "\n".join(lines).rstrip() + "\n"


def _in_float64(cells: dict) -> str:
    """Where float64 decided: how many cells of which models."""
    found = Counter(
        model
        for by_technique in cells.values()
        for by_model in by_technique.values()
        for model, cell in by_model.items()
        if any(variant.get("in") == "float64" for variant in cell.get("variants", {}).values())
    )
    told = ", ".join(f"{count} cells of {model}" for model, count in found.items())
    return f": {told}" if told else ""


def _told(found: dict[str, dict]) -> str:
    """How many models a technique works with, of them how many in part, and the few others."""
    others = [model for model, cell in found.items() if cell["status"] != WORKS]
    parts = sum(_mark(cell) == IN_PART for cell in found.values())
    worked = len(found) - len(others)
    told = f"{worked} of {len(found)}" if others else f"all {len(found)}"
    told += f" ({parts} in part)" if parts else ""
    return told + (f": not {', '.join(others)}" if 0 < len(others) <= 3 else "")


def _traits() -> Iterator[str]:
    yield f"| a model with | {' | '.join(FRAMEWORKS.values())} |"
    yield "|:---|:---|:---|"
    for trait, words in TRAITS.items():
        having = [
            ", ".join(name for name, traits in models(framework).items() if trait in traits)
            for framework in FRAMEWORKS
        ]
        yield f"| {words} | {' | '.join(having)} |"


def _reasons(technique: str, cells: dict) -> Iterator[str]:
    """A line for each reason: the framework, the variant where others work, and the models."""
    for framework, title in FRAMEWORKS.items():
        found: dict[tuple[str, str], list[str]] = {}
        for model, cell in cells[framework].get(technique, {}).items():
            if cell["status"] != WORKS:
                found.setdefault(("", cell["reason"]), []).append(model)
                continue
            for name, variant in cell["variants"].items():
                if variant["status"] == REFUSED:
                    found.setdefault((f", {name} only", variant["reason"]), []).append(model)
        for (variant, reason), names in found.items():
            name = technique.replace("_", " ")
            yield f"- **{name}**, {title}{variant}: {_escaped(reason)} ({', '.join(names)})"


def _mark(cell: dict | None) -> str:
    if cell is None:
        return ""
    part = any(variant["status"] == REFUSED for variant in cell.get("variants", {}).values())
    return IN_PART if cell["status"] == WORKS and part else cell["status"]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def started() -> Callable[[], float]:
    """A clock from now on."""
    start = time.monotonic()
    return lambda: time.monotonic() - start
