"""What the processor's instructions do to either framework, as a page: docs/instructions.md.

    python -m bench.docs.instructions
    python -m bench.docs.instructions --page

The first runs the plain train step of one task as the machine is and limited to AVX2, on the same
machine, and keeps times, ratios and operators in docs/instructions.json; the second only makes the
page from that record.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.analysis.reading import FRAMEWORKS, load
from bench.harness import machine
from bench.harness.folders import replace_file
from bench.harness.processes import ROOT
from bench.report import parsers
from bench.report.blocks import Table, of_words
from bench.report.figures import MISSING, number, ratio
from bench.report.tables import markdown_table

RECORD, PAGE = ROOT / "docs" / "instructions.json", ROOT / "docs" / "instructions.md"
TASK = "digits-cnn"
AS_IT_IS, AVX2 = "as it is", "limited to AVX2"
# oneDNN's name for it, that of PyTorch's own kernels, and MKL's.
LEVELS = {AS_IT_IS: {}, AVX2: dict(zip(machine.ISA_LIMITS, ("AVX2", "avx2", "AVX2"), strict=True))}
MOST = 6  # operators of a framework that the page names


def measure(limits: dict[str, str]) -> dict:
    """The plain step of both frameworks under these limits, and where its time goes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "bench/"]
        command += ["--benchmark-only", "--technique", "baseline,bottleneck", "--task", TASK]
        command += ["--variant", "baseline,plain", "--effort", "ordinary", "--results", folder]
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ | limits)
        return condensed(load(Path(folder) / "latest"))


def condensed(record: dict) -> dict:
    """What the page shows of a record."""
    environment = record["environment"]
    plain = [
        case
        for case in record["cases"]
        if (case["technique"], case["variant"]) == ("baseline", "baseline")
    ]
    between = [c for c in record["comparisons"] if c["kind"] == "framework"]
    seen = [case for case in record["cases"] if case["technique"] == "bottleneck"]
    return {
        "machine": f"{environment['cpu']}, {', '.join(environment['isa'])}",
        "limits": environment["isa_limits"],
        "packages": {
            side: environment["packages"][side][package]
            for side, package in (("pt", "torch"), ("tf", "tensorflow"))
        },
        "steps": [
            {"framework": case["framework"], "batch_size": case["batch_size"]}
            | {name: case["timing"][name] for name in ("median_s", "ci_s")}
            for case in plain
        ],
        "twins": [
            {name: found[name] for name in ("batch_size", "ratio", "ci", "verdict")}
            for found in between
            if found["variant"] == "baseline"
        ],
        "operators": [
            {name: case[name] for name in ("framework", "batch_size")}
            | {"operators": case["evidence"]["operators"]}
            for case in seen
        ],
    }


# The page -----------------------------------------------------------------------------------------

_HEAD = """# What the processor's instructions decide

How far do a CPU's instructions move the choice of framework? The same plain train step of
{task}, float32, with PyTorch {pt} and TensorFlow {tf}, twice on one machine ({machine}): as it is,
and with these variables, which keep oneDNN, PyTorch's own kernels and MKL from wider instructions.
Made by `python -m bench.docs.instructions`.

```sh
{limits}
```

{said}
"""


def page(record: dict) -> str:
    """The page, from the record alone."""
    first = record[AS_IT_IS]
    limits = " ".join(f"{name}={value}" for name, value in record[AVX2]["limits"].items())
    said = "\n".join(f"- {line}" for line in _said(record))
    about = {"machine": first["machine"], "limits": f"export {limits}", "said": said}
    head = _HEAD.format(task=TASK, **first["packages"], **about)
    parts = [head, markdown_table(_steps(record)).strip()]
    for batch in sorted({one["batch_size"] for one in first["operators"]}, reverse=True):
        parts += ["", f"## Its operators at batch {batch}", ""]
        parts += [markdown_table(_operators(record, batch)).strip()]
    return "\n".join(parts) + "\n"


def _said(record: dict) -> list[str]:
    """What the limit does to each framework's step, and to the choice between them."""
    lines = []
    for twin in sorted(record[AVX2]["twins"], key=lambda one: -one["batch_size"]):
        size = twin["batch_size"]
        longer = {
            name: number(_step(record[AVX2], side, size) / _step(record[AS_IT_IS], side, size))
            for side, name in FRAMEWORKS.items()
        }
        (before,) = (t for t in record[AS_IT_IS]["twins"] if t["batch_size"] == size)
        taken = " and ".join(f"{name}'s {times} times" for name, times in longer.items())
        same = before["verdict"] == twin["verdict"]
        lines.append(
            f"Batch {size}: {taken} as long with the limit; PyTorch ÷ TensorFlow goes from "
            f"{ratio(before['ratio'], before['ci'])} to {ratio(twin['ratio'], twin['ci'])}, and "
            + ("the choice stays." if same else "the choice does not stay.")
        )
    return lines


def _step(found: dict, side: str, size: int) -> float:
    """Seconds of a framework's plain step."""
    (own,) = (
        one["median_s"]
        for one in found["steps"]
        if (one["framework"], one["batch_size"]) == (side, size)
    )
    return own


def _steps(record: dict) -> Table:
    """Times of both frameworks at both levels, and the ratio of the frameworks."""
    titles = ["", "batch", *(f"{name} [ms]" for name in FRAMEWORKS.values())]
    titles += ["PyTorch ÷ TensorFlow", "verdict on PyTorch"]
    rows = []
    for level, found in record.items():
        for twin in sorted(found["twins"], key=lambda one: -one["batch_size"]):
            size = twin["batch_size"]
            shown = [number(1e3 * _step(found, side, size)) for side in FRAMEWORKS]
            pair = ratio(twin["ratio"], twin["ci"])
            rows.append([level, str(size), *shown, pair, twin["verdict"] or MISSING])
    return Table("", of_words(*titles), rows)


def _operators(record: dict, batch: int) -> Table:
    """What each framework's most expensive operators take at both levels."""
    titles = ["framework", "operator", "calls", *(f"{level} [ms]" for level in record)]
    titles.append("limited ÷ as it is")
    rows = []
    for side, name in FRAMEWORKS.items():
        levels = [_seconds(found, side, batch) for found in record.values()]
        named = dict.fromkeys([*levels[0]][:MOST] + [*levels[1]][:MOST])
        for operator in named:
            pair = [level.get(operator) for level in levels]
            calls = next(one["calls"] for one in pair if one)
            times = [one and one["seconds"] for one in pair]
            share = number(times[1] / times[0], places=2) if all(times) else MISSING
            shown = [number(1e3 * each) if each else MISSING for each in times]
            rows.append([name, operator, number(calls), *shown, share])
    return Table("", of_words(*titles), rows)


def _seconds(found: dict, side: str, batch: int) -> dict[str, dict]:
    """Operator -> its calls and seconds a step, the most expensive first."""
    (own,) = (
        one["operators"]
        for one in found["operators"]
        if (one["framework"], one["batch_size"]) == (side, batch)
    )
    return {one["name"]: one for one in own}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = parsers.described("python -m bench.docs.instructions", __doc__)
    parser.add_argument("--page", action="store_true", help="only make the page anew")
    given = parser.parse_args(arguments)
    if not given.page:
        record = {level: measure(limits) for level, limits in LEVELS.items()}
        replace_file(RECORD, json.dumps(record, indent=1) + "\n")
    replace_file(PAGE, page(json.loads(RECORD.read_text("utf-8"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
