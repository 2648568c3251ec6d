"""Plants faults in the harness, one at a time: do its tests notice?

tests/validation/faults.py has them, each with the tests that must fail. Others are drawn at random:
an operator or a number of the source is replaced (DeMillo, Lipton and Sayward, 1978). Some of these
change nothing and can't be noticed. Faults are planted in a copy of the tree.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shared import scratch
from shared.choices import unknown

ROOT = Path(__file__).resolve().parents[2]
SOUND_S = 1800.0  # for tests without a fault
LIMIT_S, TIMES = 60.0, 3.0  # for those of a fault, or so many times what they take without it
KILLED, SURVIVED, BROKEN = "killed", "survived", "broken"
PASSED, FAILED = 0, 1  # pytest's exit statuses
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "results", "build")


@dataclass(frozen=True)
class Outcome:
    """The result for a fault, how it is known, and how long it took."""

    status: str
    how: str
    seconds: float


def known() -> tuple:
    """All faults. Raises ValueError outside a checkout."""
    # By its path: packages that are installed may have a `tests` of their own.
    path = ROOT / "tests" / "validation" / "faults.py"
    if not path.exists():
        raise ValueError("tests/validation is missing: run this in a checkout of the repository")
    spec = importlib.util.spec_from_file_location("faults", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.FAULTS


# What is drawn: in which files, and the tests that should notice.
DRAWN = {
    "bench/analysis": ("tests/analysis", "tests/harness/test_record.py", "tests/report"),
    "bench/report": ("tests/report", "tests/analysis"),
}
OTHERS = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
}


@dataclass(frozen=True)
class Drawn:
    """A random fault: a whole file that replaces another."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def drawn(folder: str, count: int, seed: int) -> list[Drawn]:
    """So many random faults in the files of a folder. Raises ValueError if it has no tests."""
    if folder not in DRAWN:
        raise ValueError(f"--of: {unknown(folder, DRAWN)}")
    places = [
        (path, number)
        for path in sorted((ROOT / folder).glob("*.py"))
        for number, _ in enumerate(_places(ast.parse(path.read_text("utf-8"))))
    ]
    chosen = random.Random(seed).sample(places, min(count, len(places)))
    return [_drawn(path, number, _tests(path, DRAWN[folder])) for path, number in chosen]


def _tests(path: Path, places: tuple[str, ...]) -> tuple[str, ...]:
    """The test files of these places, those of the file's own name first."""
    files: list[Path] = []
    for place in places:
        files += (
            sorted((ROOT / place).glob("test_*.py")) if (ROOT / place).is_dir() else [ROOT / place]
        )
    files.sort(key=lambda file: file.stem != f"test_{path.stem}")
    return tuple(file.relative_to(ROOT).as_posix() for file in files)


def _places(tree: ast.AST) -> list[tuple[ast.AST, int]]:
    """Every node that has something to exchange, and which of its operators that is."""
    places = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            places += [(node, n) for n, op in enumerate(node.ops) if type(op) in OTHERS]
        elif (
            isinstance(node, ast.BoolOp)
            or (isinstance(node, ast.BinOp) and type(node.op) in OTHERS)
            or (isinstance(node, ast.Constant) and isinstance(node.value, int | float))
        ):
            places.append((node, 0))
    return places


def _drawn(path: Path, number: int, tests: tuple[str, ...]) -> Drawn:
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    node, place = _places(tree)[number]
    before = ast.unparse(node)
    if isinstance(node, ast.Compare):
        node.ops[place] = OTHERS[type(node.ops[place])]()
    elif isinstance(node, ast.Constant):
        node.value = _other(node.value)
    else:
        node.op = OTHERS[type(node.op)]()
    file = path.relative_to(ROOT).as_posix()
    name = f"line {node.lineno}: {before} -> {ast.unparse(node)}"
    return Drawn(name, file, text, ast.unparse(tree), tests)


def _other(value: bool | int | float) -> bool | int | float:
    """Another value: one more, or twice a float that is too large to differ from one more."""
    if isinstance(value, bool):
        return not value
    return value + 1 if value + 1 != value else 2 * value


def misplaced(faults: Sequence) -> list[str]:
    """The names of faults whose text is not in its file exactly once."""
    return [
        fault.name
        for fault in faults
        if not (ROOT / fault.file).is_file()
        or (ROOT / fault.file).read_text("utf-8").count(fault.old) != 1
    ]


def plant(faults: Sequence, minutes: float | None = None) -> Iterator[tuple[object, Outcome]]:
    """Plant each fault in a copy of the tree and run its tests, until time is over.

    Raises ValueError if a fault has no place, or if tests fail without any.
    """
    if names := misplaced(faults):
        raise ValueError(f"{names[0]}: its text is not in its file exactly once")
    end = time.monotonic() + (60 * minutes if minutes else float("inf"))
    with scratch.folder() as folder:
        tree = folder / "tree"
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        sound: dict[frozenset[str], Outcome] = {}  # by tests, whatever their order
        for fault in faults:
            tests = fault.tests
            before = sound.get(frozenset(tests))
            before = before or _run(tree, tests, min(end, time.monotonic() + SOUND_S))
            if time.monotonic() >= end:
                return
            if before.status != SURVIVED:
                raise ValueError(f"{' '.join(tests)}: fails without a fault ({before.how})")
            sound[frozenset(tests)] = before
            limit = max(LIMIT_S, TIMES * before.seconds)
            with _planted(tree / fault.file, fault.old, fault.new):
                outcome = _run(tree, tests, min(end, time.monotonic() + limit))
            if time.monotonic() >= end:  # whose tests had less time than others
                return
            yield fault, outcome


@contextmanager
def _planted(path: Path, old: str, new: str) -> Iterator[None]:
    text = path.read_text("utf-8")
    path.write_text(text.replace(old, new), "utf-8")
    try:
        yield
    finally:
        path.write_text(text, "utf-8")


def _run(tree: Path, tests: Sequence[str], end: float) -> Outcome:
    """Run tests in a tree until `end`: killed where one fails, or they do not end by then."""
    start = time.monotonic()
    # Compiled code is found by the time and size of its source, which a fault may leave.
    variables = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no"]
    process = subprocess.Popen(
        [*command, "-p", "no:cacheprovider", *tests],
        cwd=tree,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=max(1.0, end - start))
    except subprocess.TimeoutExpired:
        process.terminate()
        process.communicate()
        return Outcome(KILLED, "its tests do not end", time.monotonic() - start)
    lines = output.strip().splitlines() or ["nothing was said"]
    failed = [line.removeprefix("FAILED ") for line in lines if line.startswith("FAILED ")]
    errors = [line.removeprefix("ERROR ") for line in lines if line.startswith("ERROR ")]
    how = (failed + errors + lines[-1:])[0].partition(" - ")[0]
    status = {PASSED: SURVIVED, FAILED: KILLED}.get(process.returncode, BROKEN)
    return Outcome(status, how, time.monotonic() - start)


def report(
    faults: Sequence, minutes: float | None, keep: Callable[[dict], None] = lambda outcome: None
) -> int:
    """Print a line for each fault; exit status 1 if one survives, 2 if time ended.

    keep: called with the results.
    """
    counts, survived, rows = {KILLED: 0, SURVIVED: 0, BROKEN: 0}, [], []
    for fault, outcome in plant(faults, minutes):
        counts[outcome.status] += 1
        survived += [fault.name] if outcome.status != KILLED else []
        status = {"status": outcome.status, "how": outcome.how}
        rows.append({"file": fault.file, "name": fault.name} | status)
        line = f"{outcome.status:8} {outcome.seconds:5.1f} s  {fault.file}: {fault.name}"
        print(f"{line} · {outcome.how}", flush=True)
    keep({"of": len(faults), "rows": rows})
    tried = len(rows)
    print(f"{counts[KILLED]} of {tried} faults were noticed, of {len(faults)} that there are")
    if survived:
        print(f"not noticed: {'; '.join(survived)}")
        return 1
    return 0 if tried == len(faults) else 2
