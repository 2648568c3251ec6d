"""Where the frameworks differ and why, as one page to look things up in: docs/differences.md.

    python -m bench.docs.differences [--check]

It is made of the causes that `twinbench port` knows (`bench/port/causes.toml`), and of the
section "Where the frameworks differ and why" of each technique's files.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from bench import docs
from bench.analysis.families import FAMILIES
from bench.harness.folders import replace_file
from bench.harness.processes import ROOT
from bench.harness.run_plan import techniques
from bench.port.causes import GROUPS, TOLD, Cause
from bench.report import parsers
from bench.report.tables import render

PAGE = ROOT / "docs" / "differences.md"
SECTION = "Where the frameworks differ and why"


@dataclass(frozen=True)
class Topic:
    """A heading of the page, and what `twinbench port` calls the cause."""

    key: str
    cause: Cause

    @property
    def title(self) -> str:
        """The heading."""
        return _capital(self.cause.title)

    @property
    def changes(self) -> tuple[str, str]:
        """The line to change on either side, with example values."""
        return self.cause.lines()

    @property
    def told(self) -> str:
        """How `twinbench port` tells it, where that is not by the change."""
        return "" if self.cause.told == "changed" else _capital(TOLD[self.cause.told])

    @property
    def defaults(self) -> list[str]:
        """A parameter and its default, as code."""
        return [f"`{one}`" for one in self.cause.defaults.split("; ") if one]


def anchor(title: str) -> str:
    """What a link to a heading ends with."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def page() -> str:
    """The page, from the code."""
    groups = {
        group: [Topic(key, cause) for key, cause in causes.items()]
        for group, causes in GROUPS.items()
    }
    families: dict[str, list[dict]] = {family: [] for family in FAMILIES}
    for technique in techniques().values():
        shown = docs.section(SECTION, technique)
        place = f"techniques/{technique.family}/{technique.name}.md"
        one = {"title": _capital(technique.title), "page": place, "parts": shown["parts"]}
        families.setdefault(technique.family, []).append(one)
    used = {family: shown for family, shown in families.items() if shown}
    return render("differences.md.j2", groups=groups, families=used, anchor=anchor)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (1: --check found the page out of date)."""
    parser = parsers.described("python -m bench.docs.differences", __doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if it is old")
    made = page()
    if parser.parse_args(arguments).check:
        if not PAGE.is_file() or PAGE.read_text("utf-8") != made:
            print(
                "docs/differences.md is not what the code gives; make it again with: "
                "python -m bench.docs.differences",
                file=sys.stderr,
            )
            return 1
        return 0
    replace_file(PAGE, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
