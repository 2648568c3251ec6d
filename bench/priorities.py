"""List what each technique gains and costs, by the problem it solves.

    twinbench priorities results/latest

The problems are: too slow, out of memory, too large to ship, does not
converge. Each lists the rows that were shown to help, with figures and cost.
"""

from __future__ import annotations

import ast
import io
import json
import shlex
import sys
import tokenize
from functools import cache
from pathlib import Path
from typing import Any

from bench.analysis.families import families
from bench.analysis.questions import Cost, priorities
from bench.analysis.reading import load
from bench.docs import needed
from bench.report import parsers
from bench.report.priorities import page, text
from bench.report.replace import put

ROOT = Path(__file__).parents[1]
PAGE, MODELS = ROOT / "docs" / "priorities.md", ROOT / "docs" / "any_model.json"
OWN = {"torch", "tensorflow", "keras", "numpy", "bench", "shared", "pt_impl", "tf_impl"}
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


# What a technique costs --------------------------------------------------------------------------


def code_lines(source: str) -> int:
    """The number of lines with code: without blank lines, comments and docstrings."""
    held = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - _docstrings(ast.parse(source)))


def _docstrings(tree: ast.Module) -> set[int]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            lines.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def packages(source: str) -> set[str]:
    """The packages that a file imports, except the standard library, the framework and ours."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "runtimes.openvino_package":
            names.add("openvino")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "runtimes.package":
            names |= {each.value for each in node.args[:1] if isinstance(each, ast.Constant)}
    return {name.split(".")[0] for name in names} - OWN - sys.stdlib_module_names


def costs(models: dict[str, Any] | None) -> dict[tuple[str, str], Cost]:
    """The cost of every technique in each framework; `models`: the record of the zoo, or None."""
    by_technique = {}
    for technique, family in families().items():
        for framework in ("pt", "tf"):
            place = f"{framework}_impl/{family}/{technique}.py"
            if not (ROOT / place).is_file():  # a name of older records
                continue
            files = [_file(each) for each in (place, *needed(place))]
            cells = (models or {}).get("cells", {}).get(framework, {}).get(technique, {})
            by_technique[technique, framework] = Cost(
                sum(lines for lines, _ in files),
                tuple(sorted(set().union(*(imported for _, imported in files)))),
                sum(_refuses(cell) for cell in cells.values()) if cells else None,
                len(cells) or None,
            )
    return by_technique


@cache
def _file(path: str) -> tuple[int, frozenset[str]]:
    """Its lines of code, and the packages that it imports; techniques share files."""
    source = (ROOT / path).read_text("utf-8")
    return code_lines(source), frozenset(packages(source))


def _refuses(cell: dict) -> bool:
    variants = cell.get("variants", {}).values()
    return "refused" in (cell.get("status"), *(variant.get("status") for variant in variants))


def read_models(path: Path) -> dict[str, Any] | None:
    """The record of the zoo, or None if there is none."""
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text("utf-8"))
    except ValueError:
        raise ValueError(f"{path}: not JSON, or cut off before its end") from None
    if not isinstance(record, dict) or not isinstance(record.get("cells"), dict):
        raise ValueError(f"{path}: not a record of `python -m tests.zoo`: it has no cells")
    return record


# The command -------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (1: --check found an old page, 2: an error)."""
    parser = parsers.described("twinbench priorities", __doc__)
    parser.add_argument("path", type=Path, help="a results.json, or its folder")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--write", action="store_true", help="make docs/priorities.md again")
    kinds.add_argument("--check", action="store_true", help="exit 1 if that page is outdated")
    given = parser.parse_args(arguments)
    try:
        record = load(given.path)
        ranked = priorities(record, costs(read_models(MODELS)))
        if not ranked:
            raise ValueError(f"{given.path}: no technique was measured, only baselines")
        if given.check or given.write:
            place = shlex.quote(given.path.as_posix())
            return put(PAGE, page(record, ranked, place), place, check=given.check)
        print("\n".join(text(record, ranked)))
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0
