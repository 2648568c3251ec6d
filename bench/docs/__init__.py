"""Pages of documentation made from the code: one for each technique, and their index.

A page sets both technique files side by side: what their docstrings say, the functions that they
share, what the benchmark measures of them, and both sources in full. Files are read, not imported.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from bench.harness.plan import FRAMEWORKS, Technique, Variant, Workload
from bench.harness.processes import ROOT
from bench.harness.schedule import techniques
from bench.report.tables import escape
from shared.specs import TASKS

FOLDER = ROOT / "docs" / "techniques"
SECTIONS = (
    "What it changes",
    "Its twin",
    "Where the frameworks differ and why",
    "When it helps and when it hurts",
    "Run it alone",
)
FLAVOURS = {"keras3": "Keras 3", "tf_keras": "tf_keras"}


@dataclass(frozen=True)
class Side:
    """One framework's file of a technique: its source, and its docstring in sections.

    `needs`: the files of this repository that it cannot do without where it is copied.
    """

    title: str
    path: str
    source: str
    summary: str
    sections: dict[str, str]
    needs: list[str]

    @property
    def fence(self) -> str:
        """Backticks that no line of the source closes."""
        longest = max(map(len, re.findall(r"`+", self.source)), default=0)
        return "`" * max(3, longest + 1)


@dataclass(frozen=True)
class Function:
    """A public function of both files. `does`: (framework or None, its docstring's first line)."""

    call: str
    does: list[tuple[str | None, str]]


def pages() -> dict[str, str]:
    """The text of every page by its file name: the index README.md, then a page a technique."""
    found = {name: _values(technique) for name, technique in techniques().items()}
    index = _environment().get_template("index.md.j2").render(pages=found)
    page = _environment().get_template("technique.md.j2")
    return {"README.md": index} | {
        f"{name}.md": page.render(name=name, **values) for name, values in found.items()
    }


@cache
def _environment() -> Environment:
    """Docstrings are written to be read as Markdown; what else comes from the code is escaped."""
    found = Environment(
        loader=PackageLoader("bench.docs", "."),
        autoescape=False,
        keep_trailing_newline=True,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    found.filters["literal"] = escape
    return found


def _values(technique: Technique) -> dict:
    sides = [_side(name, technique.name) for name in FRAMEWORKS]
    return {
        "technique": technique,
        "sides": sides,
        "summary": sides[0].summary,
        "sections": [_section(title, sides) for title in SECTIONS if title != "Its twin"],
        "functions": _functions(sides),
        "variants": _variants(technique),
        "workloads": [_workload(workload) for workload in technique.workloads],
    }


# Docstrings ---------------------------------------------------------------------------------------


def _side(framework: str, technique: str) -> Side:
    described = FRAMEWORKS[framework]
    path = f"{described.package}/{technique}.py"
    source = (ROOT / path).read_text("utf-8")
    docstring = ast.get_docstring(ast.parse(source)) or ""
    summary, *sections = re.split(rf"^({'|'.join(SECTIONS)}):\s+", docstring, flags=re.MULTILINE)
    found = dict(zip(sections[::2], (text.strip() for text in sections[1::2]), strict=True))
    return Side(described.title, path, source, summary.strip(), found, needed(path))


def needed(path: str) -> list[str]:
    """The files that a file imports when it is imported, and those that these import."""
    found, new = {path}, [path]
    while new:
        tree = ast.parse((ROOT / new.pop()).read_text("utf-8"))
        froms = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
        names = [name for node in froms for name in _modules(node)]
        own = {f"{name.replace('.', '/')}.py" for name in names} - found
        files = [file for file in sorted(own) if (ROOT / file).is_file()]
        found.update(files)
        new += files
    return sorted(found - {path})


def _modules(node: ast.ImportFrom) -> list[str]:
    """What "from a import b" may import: a, a.b."""
    return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]


def _section(title: str, sides: list[Side]) -> dict:
    """A section of both docstrings."""
    texts = [_sentence(side.sections[title]) for side in sides]
    return {"title": title, "parts": _of_each(sides, texts)}


def _of_each(sides: list[Side], texts: list[str]) -> list[tuple[str | None, str]]:
    """What each side says, with its framework's name; once and without one where both agree."""
    if len(set(map(_words, texts))) == 1:
        return [(None, texts[0])]
    return [(side.title, text) for side, text in zip(sides, texts, strict=True)]


def _words(text: str) -> str:
    return " ".join(text.split())


def _sentence(text: str) -> str:
    """A text that followed a colon, as one that begins a paragraph."""
    return text[:1].upper() + text[1:]


# Functions ----------------------------------------------------------------------------------------


def _functions(sides: list[Side]) -> list[Function]:
    """The public functions but `main`, in the order of the first file."""
    first, second = (_public(side.source) for side in sides)
    return [
        Function(
            f"{name}({_parameters(node.args)})",
            _of_each(sides, [_first_paragraph(node), _first_paragraph(second[name])]),
        )
        for name, node in first.items()
    ]


def _public(source: str) -> dict[str, ast.FunctionDef]:
    return {
        node.name: node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name != "main" and node.name[0] != "_"
    }


def _parameters(given: ast.arguments) -> str:
    """The parameters with their defaults, without their types, which are each framework's own."""
    bare = ast.parse(f"def f({ast.unparse(given)}): ...").body[0].args
    for argument in (*bare.posonlyargs, *bare.args, *bare.kwonlyargs):
        argument.annotation = None
    return ast.unparse(bare)


def _first_paragraph(node: ast.FunctionDef) -> str:
    """What its docstring begins with."""
    return _words((ast.get_docstring(node) or "").partition("\n\n")[0])


# What is measured ---------------------------------------------------------------------------------


def _variants(technique: Technique) -> list[dict]:
    """A row for each variant; what differs between the frameworks makes two rows."""
    rows: dict[tuple, dict] = {}
    for variant in technique.variants:
        row = {
            "name": variant.name,
            "role": variant.role,
            "settings": ", ".join(f"{name}={value!r}" for name, value in variant.settings.items()),
            "allocator": variant.allocator,
            "effort": variant.effort,
        }
        row = rows.setdefault(tuple(row.values()), row | dict.fromkeys(FRAMEWORKS, "—"))
        row |= {name: _runs_with(variant, name) for name in variant.frameworks}
    return list(rows.values())


def _runs_with(variant: Variant, framework: str) -> str:
    """In which flavour of a framework a variant runs, and what it needs there."""
    flavours = [f for f in FRAMEWORKS[framework].flavours if f in variant.flavours]
    named = ", ".join(FLAVOURS[f] for f in flavours if f) or "yes"
    needs = {None: "", "cuda": "needs a CUDA GPU", "compiler": "needs a C++ compiler"}
    return ", ".join(filter(None, (named if flavours else "", needs[variant.requires])))


def _workload(workload: Workload) -> dict:
    """A row of the table of workloads."""
    unit = "predictions" if workload.mode == "predict" else "train steps"
    task = TASKS[workload.task]
    return {
        "task": workload.task,
        "batch": f"{workload.batch_size} ({workload.batch})",
        "timed": unit if workload.timed else "nothing: measured in processes of its own",
        "accuracy": f"{task.metric}, margin {task.margin:g}" if workload.accuracy else "—",
        "effort": workload.effort,
    }


# Files --------------------------------------------------------------------------------------------


def differing(folder: Path) -> list[str]:
    """Names of the pages in `folder` that are missing, out of date, or of no technique."""
    wanted = pages()
    there = {path.name: path.read_text("utf-8") for path in folder.glob("*.md")}
    names = sorted(wanted.keys() | there.keys())
    return [name for name in names if wanted.get(name) != there.get(name)]


def write(folder: Path) -> None:
    """Make every page in `folder`, and delete those of no technique."""
    wanted = pages()
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.md"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (folder / name).write_text(text, "utf-8")
