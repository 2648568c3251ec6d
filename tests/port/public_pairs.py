"""`twinbench port` on public models that both frameworks have: a record, a part of docs/port.md.

    python -m tests.port.public_pairs [--check | --page] [resnet50 ...]

Compares the files of tests/port/public, all or those named, each in a process, and keeps what came
of it in docs/port_public_pairs.json. `--page` only makes the part of the page from the record,
`--check` says whether it is what the record gives. bert needs transformers and keras-hub:
`pip install 'twinbench[models]'`.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
from msgspec import Struct, field

from bench.analysis import machine_class
from bench.harness import machine
from bench.harness.folders import replace_file
from bench.harness.processes import ROOT
from bench.port.causes import CATALOGUE
from bench.port.report import STEPS
from bench.report import parsers
from bench.report.formatting import MISSING
from bench.report.tables import markdown_table
from bench.report.technique_tables import Table, of_words

MODELS = Path(__file__).with_name("public")
RECORD, PAGE = ROOT / "docs" / "port_public_pairs.json", ROOT / "docs" / "port.md"
BEGIN, END = "<!-- public pairs -->\n", "<!-- public pairs end -->\n"
LIMIT_S = 1200


class Difference(Struct, frozen=True):
    """A finding, as `bench.port.report.Finding` has it."""

    step: str
    layer_pt: str
    layer_tf: str
    size: float | None  # None where shapes differ
    cause: str | None
    verified: bool
    places: int


class Pair(Struct, frozen=True):
    """What came of a file. seconds: on the clock. processor_seconds: of all threads together."""

    title: str
    parameters: dict[str, int]
    findings: list[Difference]
    equal: list[str]
    notes: list[str]
    certified_steps: int
    seconds: float
    processor_seconds: float = 0.0


class Pairs(Struct):
    """The record: where it was made, and what came of each file."""

    machine: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    pairs: dict[str, Pair] = field(default_factory=dict)


def read() -> Pairs:
    """The record; an empty one where there is none."""
    return msgspec.json.decode(RECORD.read_bytes(), type=Pairs) if RECORD.exists() else Pairs()


def compared(name: str) -> Pair:
    """A file, compared in a process. Raises ValueError with the error of the comparison."""
    path = MODELS / f"{name}.py"
    command = [sys.executable, "-m", "tests.port.port_worker", "--parameters", str(path)]
    quiet = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=quiet, timeout=LIMIT_S, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    if not lines:
        raise ValueError(f"{name}: {done.stderr[-2000:]}")
    answer = json.loads(lines[0].removeprefix("REPORT "))
    if "error" in answer:
        raise ValueError(f"{name}: {answer['error']}")
    certificate = answer["certificate"] or {}
    return Pair(
        title=ast.get_docstring(ast.parse(path.read_text("utf-8"))).rstrip("."),
        parameters=answer["parameters"],
        findings=msgspec.convert(answer["findings"], list[Difference]),
        equal=answer["equal"],
        notes=answer["notes"],
        certified_steps=certificate.get("steps", 0),
        seconds=answer["took"],
        processor_seconds=answer["processor"],
    )


# The page ----------------------------------------------------------------------------------------


def section(record: Pairs) -> str:
    """The part of the page, from the record alone."""
    packages = ", ".join(f"{name} {version}" for name, version in record.packages.items())
    lines = [f"Compared on {record.machine}, with {packages}.", ""]
    lines.append(markdown_table(_overview(record)))
    for pair in record.pairs.values():
        lines += [f"<details><summary>{_short(pair)}</summary>", ""]
        lines += [f"- {_sentence(finding)}" for finding in pair.findings] or ["- Nothing differs."]
        lines += ["", "</details>", ""]
    if left := sorted(_names() - set(record.pairs)):
        lines += [f"Not in the record: {', '.join(left)}.", ""]
    return "\n".join(lines)


def _names() -> set[str]:
    """The pairs that there are."""
    return {path.stem for path in MODELS.glob("*.py")}


def _short(pair: Pair) -> str:
    """Its models, without the size of images and where weights come from."""
    return pair.title.partition(",")[0]


def _overview(record: Pairs) -> Table:
    rows = []
    for pair in record.pairs.values():
        counts = " and ".join(f"{count / 1e6:.1f} M" for count in pair.parameters.values())
        named = sum(finding.verified for finding in pair.findings)
        steps = str(pair.certified_steps) if pair.certified_steps else MISSING
        shown = [str(len(pair.findings)), str(named), steps]
        used = f"{pair.processor_seconds:.0f}" if pair.processor_seconds else MISSING
        rows.append([_short(pair), counts, *shown, f"{pair.seconds:.0f}", used])
    titles = ["pair", "parameters (PyTorch, TensorFlow)", "differences", "with a verified cause"]
    titles += ["training steps certified equal", "seconds", "processor seconds"]
    return Table("", of_words(*titles), rows)


def _sentence(finding: Difference) -> str:
    """One difference: where, how large, why."""
    names = dict.fromkeys(filter(None, (finding.layer_pt, finding.layer_tf)))
    layers = " / ".join(f"`{name}`" for name in names)
    where = f"{STEPS[finding.step]}{', first at ' if layers else ''}{layers}"
    many = f", the same in {finding.places} places" if finding.places > 1 else ""
    size = "other shapes" if finding.size is None else f"{finding.size:.1e}"
    if finding.cause is None:
        return f"{where}: {size}, without a verified cause."
    title = CATALOGUE[finding.cause].title
    return f"{where}: {size}{many}. Cause: {title} (`{finding.cause}`)."


def page(record: Pairs) -> str:
    """The page with this part anew."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{section(record)}\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (1: not compared, or out of date)."""
    parser = parsers.described("python -m tests.port.public_pairs", __doc__)
    known = sorted(_names())
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--page", action="store_true", help="only make the page anew")
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if it is old")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(known):
        parser.error(f"no such pair: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    record, failed = read(), []
    if given.check:
        return int(page(record) != PAGE.read_text("utf-8"))
    for name in [] if given.page else given.names or known:
        try:
            pair = compared(name)
        except (ValueError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr)
            failed.append(name)
            continue
        record = read()  # anew: other pairs may have been compared meanwhile
        record.pairs[name] = pair
        record.machine = machine_class.words(machine.describe(machine.usable_threads()))
        record.packages |= _packages()
        record.pairs = dict(sorted(record.pairs.items()))
        text = msgspec.json.format(msgspec.json.encode(record), indent=1)
        replace_file(RECORD, text.decode() + "\n")
    replace_file(PAGE, page(record))
    return 1 if failed else 0


def _packages() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in ("torch", "torchvision", "transformers", "tensorflow", "keras", "keras-hub"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


if __name__ == "__main__":
    sys.exit(main())
