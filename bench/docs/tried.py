"""`twinbench try` on models that are not the suite's, as a page: docs/try_models.md.

    python -m bench.docs.tried [--minutes N] [--effort quick] [resnet18.py ...]
    python -m bench.docs.tried --by-hand
    python -m bench.docs.tried --page

The first runs `twinbench try` on the files of docs/try_models, all or those named, and keeps what
came of it in docs/try_models.json; the second times three of the techniques by hand, to check
the figures; the third only makes the page from the record. The files need torchvision, timm,
transformers and keras-hub: `pip install 'twinbench[models]'`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from bench.analysis.ranking import NAMES, TRAIN
from bench.analysis.reading import load
from bench.analysis.verdicts import shown_less
from bench.harness import machine
from bench.harness.folders import replace_file
from bench.harness.plan import FRAMEWORKS
from bench.harness.processes import ROOT
from bench.record import DIFFERENT, Record
from bench.report import parsers
from bench.report.formatting import number, ratio
from bench.report.tables import render
from bench.report.technique_tables import Table, of_words
from shared import user_model

MODELS = ROOT / "docs" / "try_models"
RECORD, PAGE = MODELS.with_suffix(".json"), MODELS.with_suffix(".md")
BY_HAND = ROOT / "docs" / "try_by_hand.py"
MINUTES = "12"
# (file, the technique by hand, the row of `try` that is the same): one a kind of technique.
COMPARED = (
    ("resnet18.py", "bfloat16", "mixed_precision/resnet18-16/pt/bf16"),
    ("deit_tiny.py", "torch.compile", "compilation/deit_tiny-16/pt/compiled"),
    ("subclassed_keras.py", "XLA", "compilation/subclassed_keras-32/tf/compiled"),
)
COMPARED_MINUTES = "5"


class Row(Struct, frozen=True):
    """A row of `twinbench try`, and its ratio to its baseline."""

    id: str
    title: str
    mode: str
    batch_size: int
    status: str
    framework: str
    reason: str | None = None
    ratio: float | None = None
    ci: tuple[float, float] | None = None
    verdict: str | None = None


class Model(Struct, frozen=True):
    """What came of a file. `parameters`: by framework. `twins`: how many of its rows have one."""

    parameters: dict[str, int]
    batch_size: int
    paired: bool
    twins: int
    seconds: float
    machine: str
    rows: list[Row]


class Timed(Struct, frozen=True, omit_defaults=True):
    """A ratio, and how a plain loop measured it."""

    ratio: float
    ci: tuple[float, float] | None
    plain_s: float | None = None
    pairs: int | None = None
    steps: int | None = None


class ByHand(Struct, frozen=True):
    """A row of `twinbench try`, the same by hand, and with the allocator as installed."""

    tried: Timed = field(name="try")
    by_hand: Timed
    as_installed: Timed


class Tried(Struct):
    """The record: what came of each file, and what was timed by hand."""

    models: dict[str, Model] = field(default_factory=dict)
    by_hand: dict[str, ByHand] = field(default_factory=dict)


def read() -> Tried:
    """The record; an empty one where there is none."""
    return msgspec.json.decode(RECORD.read_bytes(), type=Tried) if RECORD.exists() else Tried()


def write(record: Tried) -> None:
    """Both files, the page from the record."""
    text = msgspec.json.format(msgspec.json.encode(record), indent=1)
    replace_file(RECORD, text.decode() + "\n")
    replace_file(PAGE, page(record))


# Running ------------------------------------------------------------------------------------------


def tried(path: Path, *options: str) -> Model:
    """What `twinbench try` says of a file. Raises CalledProcessError where it measures nothing."""
    with tempfile.TemporaryDirectory() as folder:
        options = [*options, "--results", folder]
        command = [sys.executable, "-m", "bench", "try", str(path), *options]
        subprocess.run(command, check=True, cwd=ROOT)
        record = load(Path(folder) / "latest")
        (data,) = (Path(folder) / "data").glob("own-*")
        about = user_model.about(data)
    return condensed(record, about)


def compared(name: str, technique: str, case: str) -> ByHand:
    """One row of `twinbench try`, and the same by hand right after it."""
    suite, _, framework, _ = case.split("/")
    options = ("--technique", suite, "--framework", framework, "--minutes", COMPARED_MINUTES)
    rows = tried(MODELS / name, *options, "-k", "not predict").rows
    row = next(row for row in rows if row.id == case)
    command = [sys.executable, str(BY_HAND), str(MODELS / name), technique]
    by_hand = []
    for allocator in ("tuned", "as installed"):
        environment = machine.process_environment(
            threads=machine.usable_threads(),
            flavour=FRAMEWORKS[framework].flavours[0],
            allocator=allocator,
        )
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        by_hand.append(msgspec.json.decode(done.stdout, type=Timed))
    return ByHand(Timed(row.ratio, row.ci), *by_hand)


def condensed(record: Record, about: dict[str, Any]) -> Model:
    """What the page shows of a record, and of the check of its file."""
    against = {c.numerator: c for c in record.comparisons if c.kind == "baseline"}
    rows = []
    for case in record.cases:
        row = Row(
            case.id, case.title, case.mode, case.batch_size, case.status, case.framework_title,
            case.reason,
        )  # fmt: skip
        if pair := against.get(case.id):
            ratio = {"ratio": pair.ratio, "ci": pair.ci, "verdict": pair.verdict}
            row = msgspec.structs.replace(row, **ratio)
        rows.append(row)
    return Model(
        parameters={
            side: sum(prod(shape) for _, shape in described["parameters"])
            for side, described in about["sides"].items()
        },
        batch_size=about["batch_size"],
        paired=about["paired"],
        twins=sum(comparison.kind == "framework" for comparison in record.comparisons),
        seconds=record.seconds["total"],
        machine=f"{record.environment.cpu}, {record.environment.threads} threads",
        rows=rows,
    )


# The page -----------------------------------------------------------------------------------------


def page(record: Tried) -> str:
    """The page, from the record alone."""
    return render(
        "tried.md.j2",
        models=record.models,
        machines=sorted({model.machine for model in record.models.values()}),
        overview=_overview(record.models),
        by_hand=_by_hand(record) if record.by_hand else None,
        first=record.by_hand and next(iter(record.by_hand.values())).by_hand,
        refused=_refused(record.models),
    )


def _overview(models: dict[str, Model]) -> Table:
    rows = []
    for name, model in models.items():
        counted = Counter(row.status for row in model.rows)
        refused = sum(counted.values()) - counted["OK"]
        sizes = " and ".join(
            f"{FRAMEWORKS[side].title} {count / 1e6:.1f} M"
            for side, count in model.parameters.items()
        )
        pair = f"; twins, {model.twins} comparisons of them" if model.paired else ""
        rows.append(
            [
                f"{name.removesuffix('.py')}: {_about(name)}",
                f"{sizes}, batch {model.batch_size}{pair}",
                f"{counted['OK']} measured, {refused} refused",
                _best(model.rows, TRAIN, None),
                _best(model.rows, "predict", 1),
                f"{model.seconds / 60:.1f}",
            ]
        )
    titles = ["model", "size", "rows", "lowest train step", "lowest prediction of one", "minutes"]
    return Table("", of_words(*titles), rows)


def _about(name: str) -> str:
    """The first sentence of a file's docstring."""
    said = ast.get_docstring(ast.parse((MODELS / name).read_text()))
    return " ".join(said.split()).partition(". ")[0].rstrip(".")


def _best(rows: list[Row], mode: str, size: int | None) -> str:
    """By framework, of the rows shown to take less time than their baseline, the one of the least.

    Where none was, of those of a single block, which have no interval, and say so.
    """
    parts = []
    for framework in dict.fromkeys(row.framework for row in rows):
        timed = [
            row
            for row in rows
            if row.framework == framework
            and row.mode == mode
            and row.ratio is not None
            and row.verdict != DIFFERENT
            and size in (None, row.batch_size)
        ]
        shown = [row for row in timed if shown_less(row.ci)]
        once = [row for row in timed if row.ci is None and row.ratio < 1]
        best = min(shown or once, key=lambda row: row.ratio, default=None)
        if best:
            one_block = "" if shown else ", one block"
            parts.append(f"{framework}: {best.title} {ratio(best.ratio, best.ci)}{one_block}")
        else:
            parts.append(f"{framework}: {'the plain one' if timed else 'not measured'}")
    return "; ".join(parts)


def _by_hand(record: Tried) -> Table:
    rows = []
    for name, technique, _ in COMPARED:
        if name not in record.by_hand:
            continue
        pair = record.by_hand[name]
        tried, hand, installed = pair.tried, pair.by_hand, pair.as_installed
        meet = tried.ci and tried.ci[0] <= hand.ci[1] and hand.ci[0] <= tried.ci[1]
        figures = [ratio(each.ratio, each.ci) for each in (tried, hand, installed)]
        plain = [number(1e3 * each.plain_s) for each in (hand, installed)]
        meeting = "yes" if meet else "no"
        rows.append([name.removesuffix(".py"), technique, *figures, meeting, *plain])
    titles = ["model", "technique", "twinbench try", "by hand", "by hand, allocator as installed"]
    titles += ["first two intervals meet", "plain step by hand [ms]", "the same, as installed [ms]"]
    return Table("", of_words(*titles), rows)


def _refused(models: dict[str, Model]) -> dict[str, list[str]]:
    """What was refused and why -> the models. What only lacked a package is left out."""
    refused: dict[str, list[str]] = {}
    for name, model in models.items():
        for row in model.rows:
            if row.status != "OK" and "not installed" not in (row.reason or ""):
                said = f"{row.framework} {row.title}, {NAMES[row.mode]}: {row.reason}"
                refused.setdefault(said, []).append(name.removesuffix(".py"))
    return {said: list(dict.fromkeys(names)) for said, names in refused.items()}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (1: a file could not be measured)."""
    parser = parsers.described("python -m bench.docs.tried", __doc__)
    known = sorted(path.name for path in MODELS.glob("*.py"))
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"of {', '.join(known)}")
    parser.add_argument("--minutes", default=MINUTES, help=f"for each file (default: {MINUTES})")
    parser.add_argument("--effort", default="default", help="quick: one block (default: default)")
    parser.add_argument("--by-hand", action="store_true", help="time three techniques by hand")
    parser.add_argument("--page", action="store_true", help="only make the page anew")
    given = parser.parse_args(arguments)
    if unknown := set(given.files) - set(known):
        parser.error(f"no such file: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    record, failed = read(), []
    if given.by_hand:
        for name, technique, case in COMPARED:
            if given.files and name not in given.files:
                continue
            record.by_hand[name] = compared(name, technique, case)
            write(record)
    elif not given.page:
        for name in given.files or known:
            try:
                record.models[name] = tried(
                    MODELS / name, "--minutes", given.minutes, "--effort", given.effort
                )
            except subprocess.CalledProcessError:
                failed.append(name)
                continue
            record.models = dict(sorted(record.models.items()))
            write(record)
    write(record)
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
