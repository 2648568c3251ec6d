"""Where the frameworks differ and why, as one page to look things up in: docs/differences.md.

    python -m bench.docs.differences [--check]

It is made of the causes that `twinbench port` knows (`bench/port/causes.toml`). A link for each
technique leads to what its files say of it.
"""

from __future__ import annotations

import html
import sys
from dataclasses import dataclass
from itertools import groupby

from bench.analysis.families import FAMILIES
from bench.harness.folders import replace_file
from bench.harness.processes import ROOT
from bench.harness.run_plan import techniques
from bench.port.causes import GROUPS, TOLD, Cause
from bench.report import parsers
from bench.report.tables import render

PAGE = ROOT / "docs" / "differences.md"


@dataclass(frozen=True)
class Line:
    """A part of the page: what differs, and what each side does."""

    key: str
    cause: Cause

    @property
    def title(self) -> str:
        """What differs, for the summary, which is HTML."""
        return html.escape(_capital(self.cause.title), quote=False)

    @property
    def why(self) -> str:
        """Why it does, and whether `twinbench port` verifies it."""
        told = "" if self.cause.told == "changed" else f" ({TOLD[self.cause.told]})"
        return f"{self.cause.why}{told}"

    @property
    def pytorch(self) -> str:
        """What PyTorch does, its defaults, and the line that makes it do as TensorFlow."""
        return self._side(self.cause.pytorch, "torch.", f"As TensorFlow: {self.cause.lines()[0]}")

    @property
    def tensorflow(self) -> str:
        """What TensorFlow does, its defaults, and the line that makes it do as PyTorch."""
        changed = f"As PyTorch: {self.cause.lines()[1]}"
        return self._side(self.cause.tensorflow, ("keras.", "tensorflow."), changed)

    def _side(self, does: str, begin: str | tuple[str, ...], changed: str) -> str:
        defaults = [f"`{d}`" for d in self.cause.defaults.split("; ") if d.startswith(begin)]
        stated = [f"Default: {', '.join(defaults)}."] if defaults else []
        return "<br>".join([does, *stated, changed])


def page() -> str:
    """The page, from the code."""
    groups = {
        group: [Line(key, cause) for key, cause in causes.items()]
        for group, causes in GROUPS.items()
    }
    order = list(FAMILIES)
    every = sorted(techniques().values(), key=lambda technique: order.index(technique.family))
    families = {f: list(members) for f, members in groupby(every, key=lambda t: t.family)}
    return render("differences.md.j2", groups=groups, families=families)


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
