"""Collect the records of several machines, and show what holds on all of them.

    twinbench machines add results/latest
    twinbench machines list
    twinbench machines page

`add` checks a run's record, removes folders and the names of hosts and users,
and writes docs/machines/<class>/results.json. docs/machines.md and README.md
are made from these records.
"""

from __future__ import annotations

import argparse
import getpass
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from bench.analysis.across_machines import Machine, machines_in, others
from bench.analysis.analyse import analyse, raw
from bench.analysis.machine_class import same_class, slug, words
from bench.analysis.reading import load
from bench.record import Record, encode
from bench.report import machines as report
from bench.report import parsers, readme
from bench.report.content import run_line
from bench.report.replace import put, write_atomically

ROOT = Path(__file__).parents[1]
DOCS, README = ROOT / "docs", ROOT / "README.md"
FOLDER, PAGE, HEADLINE = DOCS / "machines", DOCS / "machines.md", DOCS / "results.json"

# Options of a run that leave out rows.
CHOOSING = ("--technique", "--task", "--variant", "--framework", "-k")
# What a path begins with that is the same on every machine.
SYSTEM = ("/proc", "/sys", "/dev", "/usr", "/lib", "/lib64", "/bin", "/etc", "/opt")
# Names that are no one's.
COMMON = {"root", "user", "ubuntu", "runner", "docker", "localhost", "nobody", "home", "admin"}
COMMON |= {"bench", "pytest", "python", "torch", "tensorflow", "keras", "twinbench"}
ABSOLUTE = re.compile(r"(?<![\w.~:/\\])(?:file://)?(?:~|[A-Za-z]:)?(?:[/\\][\w.@+~-]+){2,}[/\\]?")
HOME = re.compile(r"(?:file://)?(?:[A-Za-z]:)?/(?:home|Users)/[^/]+/?")
ADDRESS = re.compile(r"\b[\w.+-]+@[A-Za-z][\w-]*(?:\.[\w-]+)*\b")


# What must not be published -----------------------------------------------------------------------


def names_here() -> set[str]:
    """Names of this host and its user, except generic ones such as "root"."""
    host = socket.gethostname()
    names = {host, host.partition(".")[0], Path.home().name}
    try:
        names.add(getpass.getuser())
    except (KeyError, OSError):  # a user without an entry
        names.add(os.environ.get("USER", ""))
    return {name for name in names if len(name) > 2 and name.lower() not in COMMON}


def cleaned(record: Record, names: set[str]) -> Record:
    """The record without `names`, addresses such as user@host, and folders of absolute paths.

    The last part of a path is kept. Names are removed from what people and programs wrote
    (commands, reasons, notes, the system's description), and not from what identifies a row.
    """
    record = msgspec.convert(_without_folders(msgspec.to_builtins(record)), Record)
    hide = _hiding(names)
    environment = record.environment
    return record.but(
        command=hide(record.command),
        resumed=[hide(text) for text in record.resumed],
        environment=environment.but(
            os=hide(environment.os), cpu=hide(environment.cpu), model=_each(hide, environment.model)
        ),
        techniques={
            name: notes.but(notes=[hide(text) for text in notes.notes])
            for name, notes in record.techniques.items()
        },
        cases=[
            case.but(
                reason=hide(case.reason),
                evidence=_each(hide, case.evidence),
                process=_each(hide, case.process),
            )
            for case in record.cases
        ],
        comparisons=[one.but(reason=hide(one.reason)) for one in record.comparisons],
    )


def _hiding(names: set[str]) -> Any:
    """What takes names out of a text; of None it makes None."""
    if not names:
        return lambda text: text
    known = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{known})(?![A-Za-z0-9])", re.IGNORECASE)
    return lambda text: text and pattern.sub("NAME", text)


def _each(change: Any, value: Any) -> Any:
    """Every text within a value changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _each(change, one) for key, one in value.items()}
    return [_each(change, one) for one in value] if isinstance(value, list) else value


def _without_folders(value: Any) -> Any:
    return _each(lambda text: ADDRESS.sub("NAME", ABSOLUTE.sub(_last_part, text)), value)


def _last_part(match: re.Match) -> str:
    path = match[0].replace("\\", "/")
    if path.startswith(SYSTEM):
        return match[0]
    return "..." if HOME.fullmatch(path) else f".../{path.rstrip('/').rpartition('/')[2]}"


# What is added ------------------------------------------------------------------------------------


def checked(record: Record, path: Path, *, partial: bool) -> Record:
    """The record, if it is a complete default run. `partial`: a part of one is enough.

    Raises ValueError with one line otherwise.
    """
    if record.environment.model:
        raise ValueError(f"{path}: a run on a user's model; give one on the suite's tasks")
    if partial:
        return record
    if not record.finished:
        ended = f", ended by {record.ended}" if record.ended else ""
        raise ValueError(f"{path}: the run is not finished{ended}; finish it with --resume")
    if record.effort != "default":
        raise ValueError(f"{path}: a run of effort {record.effort}; give one of effort default")
    words_given = shlex.split(record.command)
    options = {"-k" if word[:2] == "-k" else word.partition("=")[0] for word in words_given}
    if chosen := sorted(options & set(CHOOSING)):
        raise ValueError(f"{path}: a run with {', '.join(chosen)}; run without, or give --partial")
    return record


def add(path: Path, *, replace: bool, partial: bool, hide: set[str]) -> Path:
    """Put a run's record into its folder of docs/machines, and return that. ValueError if it can't.

    `replace`: replace a record of this class. `hide`: more names to remove.
    """
    record = checked(load(path), path, partial=partial)
    whole = record if record.pooled else analyse(raw(record))
    record = cleaned(whole, names_here() | hide)
    folder = FOLDER / slug(record.environment)
    same = [one for one in read() if same_class(one.record.environment, record.environment)]
    places = {*(FOLDER / one.name for one in same), *([folder] if folder.exists() else [])}
    if places and not replace:
        there = ", ".join(sorted(place.name for place in places))
        raise ValueError(f"{path}: docs/machines has this class ({there}); replace it by --replace")
    old = {place / "results.json" for place in places}
    shown = [link for link in links() if link.resolve() in {path.resolve() for path in old}]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically({folder / "results.json": encode(record).decode()})
    for path in old - {folder / "results.json"}:
        path.unlink()
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
    for link in shown:
        point(link, folder)
    return folder


def links() -> list[Path]:
    """The links to the records that README and other pages show."""
    return [path for path in (HEADLINE, *DOCS.glob("*/results.json")) if path.is_symlink()]


def point(link: Path, folder: Path) -> None:
    """Make a link point to the record of a machine."""
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(folder / "results.json", link.parent))


def read() -> list[Machine]:
    """The machines of docs/machines in the order of their folders' names."""
    return machines_in(FOLDER)


# The command --------------------------------------------------------------------------------------


def listed() -> Iterator[str]:
    """A line for each machine: its folder, its class, its run."""
    for one in read():
        first = HEADLINE.resolve() == (FOLDER / one.name / "results.json").resolve()
        about = "; README's" if first else ""
        yield f"{one.name}: {words(one.record.environment)}; {run_line(one.record)}{about}"


def made() -> str:
    """The text of docs/machines.md."""
    first = Machine("README", load(HEADLINE))
    return report.page(first, others(first.record, read()))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (1: --check found an old page, 2: an error)."""
    parser = parsers.described("twinbench machines", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{add,list,page}")
    adding = commands.add_parser("add", help="put a run's record into docs/machines")
    adding.add_argument("path", type=Path, help="a results.json, or its folder")
    adding.add_argument(
        "--replace", action="store_true", help="replace the record of this class of machine"
    )
    adding.add_argument("--partial", action="store_true", help="accept a run of selected rows")
    adding.add_argument("--headline", action="store_true", help="show this record in README.md")
    adding.add_argument(
        "--hide",
        action="append",
        default=[],
        metavar="NAME",
        help="also remove this name; may be repeated",
    )
    commands.add_parser("list", help="list the machines")
    paging = commands.add_parser("page", help="make docs/machines.md again")
    paging.add_argument("--check", action="store_true", help="exit 1 if that page is outdated")
    given = parser.parse_args(arguments)
    try:
        return _run(given)
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def _run(given: argparse.Namespace) -> int:
    if given.command == "list":
        print("\n".join(listed()))
        return 0
    if given.command == "page":
        return put(PAGE, made(), "docs/machines", check=given.check)
    folder = add(given.path, replace=given.replace, partial=given.partial, hide=set(given.hide))
    print(folder)
    if given.headline or not HEADLINE.exists():
        point(HEADLINE, folder)
    put(PAGE, made(), "docs/machines", check=False)
    write_atomically(readme.files(README, [load(HEADLINE)]))
    print(README)
    return 0
