"""What the processor's instructions do to either framework, as a page: docs/instructions.md.

    python -m bench.docs.instructions
    python -m bench.docs.instructions --page

The first runs the plain train step of one task as the machine is and limited to AVX2, on the same
machine, and keeps times, ratios and operators in docs/instructions.json; the second only makes the
page from that record.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.analysis.reading import load
from bench.harness import machine
from bench.harness.folders import replace_file
from bench.harness.processes import ROOT
from bench.record import FRAMEWORKS, Record
from bench.report import parsers
from bench.report.formatting import MISSING, number, ratio
from bench.report.names import called
from bench.report.tables import render
from bench.report.technique_tables import Table, of_words

RECORD, PAGE = ROOT / "docs" / "instructions.json", ROOT / "docs" / "instructions.md"
TASK = "digits-cnn"
AS_IT_IS, AVX2 = "as it is", "limited to AVX2"
# oneDNN's name for it, that of PyTorch's own kernels, and MKL's.
LEVELS = {AS_IT_IS: {}, AVX2: dict(zip(machine.ISA_LIMITS, ("AVX2", "avx2", "AVX2"), strict=True))}
MOST = 6  # operators of a framework that the page names


class Step(Struct, frozen=True):
    """The plain step of a framework at a batch size."""

    framework: str
    batch_size: int
    median_s: float
    ci_s: tuple[float, float] | None


class Twins(Struct, frozen=True):
    """The ratio of both frameworks' steps."""

    batch_size: int
    ratio: float
    ci: tuple[float, float] | None
    verdict: str | None


class Operator(Struct, frozen=True):
    """An operator's calls and seconds a step."""

    name: str
    calls: float
    seconds: float


class Profile(Struct, frozen=True):
    """The operators of a framework's step, the most expensive first."""

    framework: str
    batch_size: int
    operators: list[Operator]


class Level(Struct, frozen=True):
    """What the page shows of the run under some limits."""

    machine: str
    limits: dict[str, str]
    packages: dict[str, str]
    steps: list[Step]
    twins: list[Twins]
    operators: list[Profile]

    def step_s(self, framework: str, batch_size: int) -> float:
        """Seconds of a framework's plain step."""
        return _only(self.steps, framework, batch_size).median_s

    def operators_of(self, framework: str, batch_size: int) -> dict[str, Operator]:
        """By their names."""
        profile = _only(self.operators, framework, batch_size)
        return {operator.name: operator for operator in profile.operators}


Levels = dict[str, Level]


def _only(entries: list, framework: str, batch_size: int):
    """The entry of a framework and a batch size."""
    place = (framework, batch_size)
    (only,) = (entry for entry in entries if (entry.framework, entry.batch_size) == place)
    return only


def measure(limits: dict[str, str]) -> Level:
    """The plain step of both frameworks under these limits, and where its time goes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "bench/"]
        command += ["--benchmark-only", "--technique", "baseline,bottleneck", "--task", TASK]
        command += ["--variant", "baseline,plain", "--effort", "ordinary", "--results", folder]
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ | limits)
        return condensed(load(Path(folder) / "latest"))


def condensed(record: Record) -> Level:
    """What the page shows of a record."""
    environment = record.environment
    return Level(
        machine=f"{environment.cpu}, {', '.join(environment.isa)}",
        limits=environment.isa_limits,
        packages={
            side: environment.packages[side][package]
            for side, package in (("pt", "torch"), ("tf", "tensorflow"))
        },
        steps=[
            Step(case.framework, case.batch_size, case.timing.median_s, case.timing.ci_s)
            for case in record.cases
            if (case.technique, case.variant) == ("baseline", "baseline")
        ],
        twins=[
            Twins(twins.batch_size, twins.ratio, twins.ci, twins.verdict)
            for twins in record.comparisons
            if (twins.kind, twins.variant) == ("framework", "baseline")
        ],
        operators=[
            Profile(
                case.framework,
                case.batch_size,
                msgspec.convert(case.evidence["operators"], list[Operator]),
            )
            for case in record.cases
            if case.technique == "bottleneck"
        ],
    )


# The page -----------------------------------------------------------------------------------------


def page(levels: Levels) -> str:
    """The page, from what was measured alone."""
    first = levels[AS_IT_IS]
    batches = sorted({profile.batch_size for profile in first.operators}, reverse=True)
    return render(
        "instructions.md.j2",
        task=called(TASK),
        machine=first.machine,
        packages=first.packages,
        limits=" ".join(f"{name}={value}" for name, value in levels[AVX2].limits.items()),
        said=_said(levels),
        steps=_steps(levels),
        operators=[(batch, _operators(levels, batch)) for batch in batches],
    )


def _largest_first(twins: list[Twins]) -> list[Twins]:
    return sorted(twins, key=lambda each: -each.batch_size)


def _said(levels: Levels) -> list[str]:
    """What the limit does to each framework's step, and to the choice between them."""
    lines = []
    for limited in _largest_first(levels[AVX2].twins):
        size = limited.batch_size
        longer = {
            name: number(levels[AVX2].step_s(side, size) / levels[AS_IT_IS].step_s(side, size))
            for side, name in FRAMEWORKS.items()
        }
        (before,) = (twins for twins in levels[AS_IT_IS].twins if twins.batch_size == size)
        taken = " and ".join(f"{name}'s {times} times" for name, times in longer.items())
        same = before.verdict == limited.verdict
        lines.append(
            f"Batch {size}: {taken} as long with the limit; PyTorch ÷ TensorFlow goes from "
            f"{ratio(before.ratio, before.ci)} to {ratio(limited.ratio, limited.ci)}, and "
            + ("the choice stays." if same else "the choice does not stay.")
        )
    return lines


def _steps(levels: Levels) -> Table:
    """Times of both frameworks at both levels, and the ratio of the frameworks."""
    titles = ["", "batch", *(f"{name} [ms]" for name in FRAMEWORKS.values())]
    titles += ["PyTorch ÷ TensorFlow", "verdict on PyTorch"]
    rows = []
    for name, level in levels.items():
        for twins in _largest_first(level.twins):
            size = twins.batch_size
            shown = [number(1e3 * level.step_s(side, size)) for side in FRAMEWORKS]
            pair = ratio(twins.ratio, twins.ci)
            rows.append([name, str(size), *shown, pair, twins.verdict or MISSING])
    return Table("", of_words(*titles), rows)


def _operators(levels: Levels, batch: int) -> Table:
    """What each framework's most expensive operators take at both levels."""
    titles = ["framework", "operator", "calls", *(f"{level} [ms]" for level in levels)]
    titles.append("limited ÷ as it is")
    rows = []
    for side, title in FRAMEWORKS.items():
        profiles = [level.operators_of(side, batch) for level in levels.values()]
        for name in dict.fromkeys([*profiles[0]][:MOST] + [*profiles[1]][:MOST]):
            pair = [profile.get(name) for profile in profiles]
            calls = next(filter(None, pair)).calls
            times = [operator and operator.seconds for operator in pair]
            share = number(times[1] / times[0], places=2) if all(times) else MISSING
            shown = [number(1e3 * seconds) if seconds else MISSING for seconds in times]
            rows.append([title, name, number(calls), *shown, share])
    return Table("", of_words(*titles), rows)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = parsers.described("python -m bench.docs.instructions", __doc__)
    parser.add_argument("--page", action="store_true", help="only make the page anew")
    given = parser.parse_args(arguments)
    if not given.page:
        levels = {level: measure(limits) for level, limits in LEVELS.items()}
        text = msgspec.json.format(msgspec.json.encode(levels), indent=1)
        replace_file(RECORD, text.decode() + "\n")
    replace_file(PAGE, page(msgspec.json.decode(RECORD.read_bytes(), type=Levels)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
