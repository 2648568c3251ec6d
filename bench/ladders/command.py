"""Run a whole training several times, adding one technique at a time.

    twinbench ladder image_classification
    twinbench ladder --resume results/ladders/latest
    twinbench ladder --show results/ladders/latest

Each step adds one technique to the program before it. If the technique hurts,
by a rule set in advance (bench/ladders/rule.py), it is reported and not kept.
--minutes or Ctrl-C ends the run and keeps what is measured; --resume goes on.
The results are in ladder.json, ladder.md (tables) and ladder.svg (chart).
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import sys
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from bench.harness.command import find_interpreter, this_command
from bench.harness.folders import new_folder
from bench.harness.plan import FRAMEWORKS
from bench.harness.processes import Failed
from bench.harness.progress import clock
from bench.ladders import climbing, report
from bench.ladders.ladder import Ladder
from bench.ladders.record import Climbed, load
from bench.report import parsers
from bench.report.replace import write_atomically
from bench.report.svg import standalone
from shared.choices import unknown

LADDERS = {
    "image_classification": "bench.ladders.image_classification:LADDER",
    "language_model": "bench.ladders.language_model:LADDER",
    "masked_language_model": "bench.ladders.language_model:MASKED",
    "domain_adaptation": "bench.ladders.domain_adaptation:LADDER",
}
BLOCKS = 3  # pairs of runs a rung


def find(name: str) -> Ladder:
    """The ladder called `name`; ValueError if there is none."""
    if name not in LADDERS:
        raise ValueError(f"ladder {unknown(name, LADDERS)}")
    module, _, ladder = LADDERS[name].partition(":")
    return getattr(import_module(module), ladder)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (2: an error, 130: interrupted)."""
    given = options().parse_args(arguments)
    try:
        if given.show:
            record = load(given.show)
            ladder = climbing.at_task(find(record.ladder), record.task)
            if given.write:
                write(ladder, record, given.show if given.show.is_dir() else given.show.parent)
            return _show(ladder, record)
        return _climb(given)
    except (ValueError, Failed) as error:
        print(f"twinbench ladder: {error}", file=sys.stderr)
        return 2


def options() -> argparse.ArgumentParser:
    """The command-line options."""
    parser = parsers.described("twinbench ladder", __doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help=", ".join(LADDERS))
    parser.add_argument("--minutes", type=float, metavar="N", help="end after N minutes")
    parser.add_argument(
        "--blocks",
        type=int,
        metavar="N",
        help=f"train with and without each technique N times (default: {BLOCKS})",
    )
    parser.add_argument("--framework", choices=FRAMEWORKS, help="only this framework")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("results"),
        metavar="DIR",
        help="folder for results (default: results)",
    )
    parser.add_argument(
        "--resume", type=Path, metavar="FOLDER", help="go on with an interrupted run"
    )
    parser.add_argument("--show", type=Path, metavar="FOLDER", help="print a run's tables")
    parser.add_argument("--write", action="store_true", help="with --show: also write them again")
    for name, framework in FRAMEWORKS.items():
        parser.add_argument(
            f"--{name}-python", metavar="PATH", help=f"a Python that has {framework.title}"
        )
    return parser


def _climb(given: argparse.Namespace) -> int:
    if given.minutes is not None and not given.minutes > 0:  # nor is "nan"
        raise ValueError(f"--minutes: give more than 0, not {given.minutes:g}")
    interpreters = {}
    for name in FRAMEWORKS:
        if path := getattr(given, f"{name}_python"):
            interpreters[name] = find_interpreter(path)
            if interpreters[name] is None:
                raise ValueError(f"--{name}-python: {path} is not a Python interpreter")
    if given.write:
        raise ValueError("--write needs --show FOLDER")
    ladder, record, folder = _begun(given) if given.resume else _new(given)
    beside = folder.resolve().parents[1] / "data"  # with which a climb that goes on began

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    climb = climbing.Climb(
        ladder,
        record,
        folder,
        beside if beside.is_dir() else given.results / "data",
        say=say,
        minutes=given.minutes,
        interpreters=interpreters,
    )
    say(f"{ladder.title}: about {clock(climb.left_s())} if every technique is kept · {folder}")
    status = 0
    # SIGTERM ends it as Ctrl-C does, with its processes.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if not climb.measure():
            say(f"time is over: --resume {shlex.quote(str(folder))} goes on")
    except KeyboardInterrupt:
        say(f"interrupted: --resume {shlex.quote(str(folder))} goes on")
        status = 130
    finally:
        signal.signal(signal.SIGTERM, before)
    write(climb.ladder, record, folder)
    _show(climb.ladder, record)
    return status


def _new(given: argparse.Namespace) -> tuple[Ladder, Climbed, Path]:
    if not given.name:
        raise ValueError(f"give the name of a ladder: {', '.join(LADDERS)}")
    ladder = find(given.name)
    blocks = BLOCKS if given.blocks is None else given.blocks
    if blocks < 1:
        raise ValueError(f"--blocks: give 1 or more, not {blocks}")
    frameworks = [given.framework] if given.framework else [*FRAMEWORKS]
    record = climbing.new_record(
        ladder, frameworks=frameworks, blocks=blocks, command=this_command()
    )
    return ladder, record, new_folder(given.results / "ladders")


def _begun(given: argparse.Namespace) -> tuple[Ladder, Climbed, Path]:
    record = load(given.resume)
    for option, value in (
        ("NAME", given.name),
        ("--blocks", given.blocks),
        ("--framework", given.framework),
    ):
        if value is not None:
            raise ValueError(f"--resume goes on as the run began: leave out {option}")
    record.resumed.append(datetime.now(UTC).isoformat(timespec="seconds"))
    folder = given.resume if given.resume.is_dir() else given.resume.parent
    ladder = climbing.at_task(find(record.ladder), record.task)
    return ladder, record, folder.resolve()


def write(ladder: Ladder, record: Climbed, folder: Path) -> None:
    """Write tables and chart beside the record."""
    texts = {folder / "ladder.md": report.as_markdown(ladder, record)}
    if chart := report.picture(ladder, record):
        texts[folder / "ladder.svg"] = standalone(chart)
    write_atomically(texts)


def _show(ladder: Ladder, record: Climbed) -> int:
    width = shutil.get_terminal_size().columns
    print(report.as_text(ladder, record, width), end="")
    return 0
