"""Pages of documentation made from the code: one for each technique, and their index.

A page begins with the lines of code to add and with what published runs measured. Then it says what
the docstrings of both technique files do, what to copy, and what the benchmark measures. Files are
read, not imported.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bench.analysis.families import FAMILIES
from bench.analysis.ranking import GOALS, Work, is_large, works
from bench.analysis.reading import Row as Pair
from bench.analysis.reading import View, load, task_of, tasks, view
from bench.analysis.table import FIRST_CALL, START, Row, level
from bench.harness.plan import FRAMEWORKS, Technique, Variant, Workload
from bench.harness.processes import ROOT
from bench.harness.run_plan import techniques
from bench.record import Record, TaskFacts
from bench.report import charts, svg
from bench.report.advised import at_memory, gained
from bench.report.answer import accuracy_of
from bench.report.content import measured
from bench.report.formatting import number
from bench.report.names import FAMILY_TITLES, called, name_of, plainly, sizes, title
from bench.report.tables import escape, markdown_table
from bench.report.technique_tables import Table, of_words, tables
from shared.specs import TASKS, parameter_count, train_step_flops

FOLDER = ROOT / "docs" / "techniques"
# Tables of a page's results.
SHOWN = ("speed", "ratios", "cost", "lifetimes", "accuracy", "probed", "rates")
# Sections of a docstring: those that a page shows in this order, and those of its part on copying.
SHARED = (
    "When it helps and when it hurts",
    "Where the frameworks differ and why",
    "What it changes",
)
SECTIONS = (*SHARED, "Its twin", "Run it alone", "Copy with it")
# What a snippet may use that its file does not import.
OUTSIDE = ("ai_edge_litert.interpreter", "functools", "os", "pathlib", "shared.runtimes")
MOST_ROWS = 7  # that the index names
WIDTH = 100  # characters of a line of code
FLAVOURS = {"keras3": "Keras 3", "tf_keras": "tf_keras"}


@dataclass(frozen=True)
class Side:
    """One framework's file of a technique: its source, and its docstring in sections.

    `usage`: the lines that its head tells to add to a loop, with their imports. `needs`: the files
    of this repository that it cannot do without where it is copied.
    """

    title: str
    path: str
    source: str
    summary: str
    usage: str
    sections: dict[str, str]
    needs: list[str]


@dataclass(frozen=True)
class Function:
    """A public function of both files.

    `does`: (framework or None, its docstring's first paragraph). `alone`: (framework, settings that
    the other's does not have).
    """

    call: str
    does: list[tuple[str | None, str]]
    alone: list[tuple[str, str]]


def pages() -> dict[str, str]:
    """The text of every file by its name: the index README.md, a page and a chart a technique."""
    values_of = {name: _values(technique) for name, technique in techniques().items()}
    families: dict[str, dict] = {family: {} for family in FAMILIES}
    for name, values in values_of.items():
        families.setdefault(values["technique"].family, {})[name] = values
    index = _environment().get_template("index.md.j2")
    template = _environment().get_template("technique.md.j2")
    made = {"README.md": index.render(families=families, titles=FAMILY_TITLES, tasks=_tasks())}
    for name, values in values_of.items():
        path = f"{values['technique'].family}/{name}"
        made[f"{path}.md"] = template.render(name=name, **values)
        if values["results"] and values["results"]["chart"]:
            made[f"{path}.svg"] = svg.standalone(values["results"]["chart"])
    return made


@cache
def _environment() -> Environment:
    """Docstrings are written to be read as Markdown; what else comes from the code is escaped."""
    made = Environment(
        loader=PackageLoader("bench.docs", "."),
        autoescape=False,
        keep_trailing_newline=True,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters["literal"] = escape
    made.filters["table"] = markdown_table
    return made


def _values(technique: Technique) -> dict:
    sides = [_side(name, technique) for name in FRAMEWORKS]
    return {
        "results": _results(technique.name),
        "base": _base(technique),
        "technique": technique,
        "sides": sides,
        "summary": sides[0].summary,
        "sections": [(title, _section(title, sides)) for title in SHARED],
        "functions": _functions(sides),
        "rows": _rows(technique),
        "variants": _variants(technique),
        "workloads": [_workload(workload) for workload in technique.workloads],
    }


# Results ------------------------------------------------------------------------------------------


@cache
def _published() -> dict[str, Record]:
    """The records of docs/ and its folders, by the report beside each."""
    docs = ROOT / "docs"
    records = [docs / "results.json", *sorted(docs.glob("*/results.json"))]
    return {
        path.with_name("report.md").relative_to(docs).as_posix(): load(path) for path in records
    }


def _results(technique: str) -> dict | None:
    """What the run with most rows of a technique measured of it; None where no run has one."""
    rows = {
        report: sum(case.technique == technique for case in run.cases)
        for report, run in _published().items()
    }
    report = max(rows, key=rows.get)
    if not rows[report]:
        return None
    run = _published()[report]
    return {"measured": measured([run]), "report": report, **_parts(report, technique)}


def _base(technique: Technique) -> str:
    """What the rows are compared with, by its title in each framework."""
    base = next((one for one in technique.variants if one.role == "baseline"), None)
    if base is None:
        return "plain code"
    mode = "predict" if all(one.mode == "predict" for one in technique.workloads) else "train"
    return _joined(base.called(side, mode) for side in base.frameworks)


def _joined(titles: Iterable[str]) -> str:
    """The titles of a row in each framework, what they begin with once."""
    first, *others = dict.fromkeys(titles)
    stem = f"{first.rpartition(', ')[0]}, "
    return " / ".join([first, *(other.removeprefix(stem) for other in others)])


def _parts(report: str, name: str) -> dict:
    """A chart of a technique's ratios, and for each of its tasks the tables, large models first."""
    run = _published()[report]
    titles = sorted(tasks(run, name), key=lambda task: not is_large(task_of(task)))
    drawn, shown = [], []
    for task in titles:
        work = plainly(task)
        shown_of = view(run, name, task)
        if chart := charts.forest(_titled(shown_of)):
            drawn.append((work, chart))
        facts = run.tasks.get(task_of(task)) or TaskFacts()
        shown.append((work, [table for table in tables(shown_of, facts) if table.name in SHOWN]))
    of, chart = drawn[0] if drawn else ("", None)
    return {"chart": chart, "of": of, "tasks": shown, "gains": _gains(_works(report), name)}


def _titled(rows_of: View) -> View:
    """The same rows in plain words: int8, TorchInductor / LiteRT."""

    def titled(row: Pair) -> Pair:
        words = _joined(map(title, row.cases))
        return replace(row, label=words + row.label.removeprefix(row.cases[0].variant))

    return replace(rows_of, rows={b: list(map(titled, rows)) for b, rows in rows_of.rows.items()})


@cache
def _works(report: str) -> list[Work]:
    return works(_published()[report])


def _gains(every: list[Work], name: str) -> Table:
    """A line for each piece of work: what the technique gains there, large models first."""
    lines = []
    for work in sorted(every, key=lambda work: not work.large):
        rows = [row for row in work.members if row.case.technique == name and not row.is_baseline]
        if rows:
            sides = [[row for row in rows if row.case.framework == side] for side in FRAMEWORKS]
            size = ", ".join(filter(None, (plainly(work.title), sizes([work.task]))))
            lines.append([size, *map(_gained, sides)])
    return Table(
        "What it gains", of_words("work", *(one.title for one in FRAMEWORKS.values())), lines
    )


def _gained(rows: list[Row]) -> str:
    """Each row that gains most of some figure, and what it was shown to gain."""
    best_rows, gains = {}, {}
    for goal in {goal.figure: goal for goal in GOALS.values()}.values():
        better = [row for row in rows if row.improves(goal.figure)]
        if goal.figure in (FIRST_CALL, START) or not better:
            continue
        best = min(better, key=lambda row: level(goal.figure, row.ratios[goal.figure]))
        price = at_memory(best, goal.figure)
        gain = " ".join(filter(None, (gained(best.ratios[goal.figure], goal), price)))
        best_rows[best.case.id] = best
        gains.setdefault(best.case.id, []).append(gain)
    lines = []
    for name, row in best_rows.items():
        kept = "" if row.accuracy.kept else f"; {accuracy_of(row.accuracy)}"
        lines.append(f"{name_of(row.case, short=True)}: {', '.join(gains[name])}{kept}")
    return Markup("<br>".join(map(escape, lines))) or ("no gain shown" if rows else "not measured")


def _tasks() -> list[dict]:
    """A row for each task: its model, how many parameters, and how much work a step is."""
    return [
        {
            "name": f"{called(task.name)} ({task.name})",
            "model": MODELS[task.model.family] if getattr(task.model, "causal", True) else BERT,
            "data": f"{task.dataset.name}, {task.dataset.train_size:,} for training",
            "parameters": f"{parameter_count(task.model):,}",
            "batches": f"{task.small_batch}, {task.compute_batch}",
            "work": number(train_step_flops(task.model, task.compute_batch) / 1e9),
            "metric": f"{task.metric.replace('_', ' ')}, ±{task.margin:g}",
        }
        for task in TASKS.values()
    ]


MODELS = {
    "cnn": "convolutions with BatchNorm",
    "resnet": "CIFAR ResNet",
    "bottleneck": "ImageNet ResNet",
    "gpt": "decoder-only transformer",
    "detector": "one-stage detector (FCOS)",
}
BERT = "encoder-only transformer"  # a "gpt" that is not causal


# Docstrings ---------------------------------------------------------------------------------------


def _side(framework: str, technique: Technique) -> Side:
    described = FRAMEWORKS[framework]
    path = f"{described.package}/{technique.family}/{technique.name}.py"
    source = (ROOT / path).read_text("utf-8")
    docstring = ast.get_docstring(ast.parse(source)) or ""
    summary, *sections = re.split(rf"^({'|'.join(SECTIONS)}):\s+", docstring, flags=re.MULTILINE)
    texts = dict(zip(sections[::2], (text.strip() for text in sections[1::2]), strict=True))
    summary, usage = _head(summary)
    if usage:
        usage = "\n".join([*_imports(usage, path), "", usage]).lstrip()
    return Side(described.title, path, source, summary, usage, texts, needed(path))


def _head(text: str) -> tuple[str, str]:
    """What a docstring says before its sections, and the indented lines of code in it."""
    paragraphs = text.strip().split("\n\n")
    code = [paragraph for paragraph in paragraphs if paragraph.startswith("    ")]
    said = [paragraph for paragraph in paragraphs if paragraph not in code]
    return "\n\n".join(said), textwrap.dedent("\n\n".join(code))


def _imports(usage: str, path: str) -> list[str]:
    """The imports of what a snippet uses: what its file defines, and what that file imports."""
    nodes = list(ast.walk(ast.parse(usage)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    used = {node.id for node in names} - bound
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    defined = sorted(used & {getattr(node, "name", "") for node in tree.body})
    lines = [f"import {name}" for name in OUTSIDE if re.search(rf"(?<![\w.]){name}\.", usage)]
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            node.names = [one for one in node.names if (one.asname or one.name) in used]
            lines += [ast.unparse(node)] if node.names else []
    if defined:
        module = path.removesuffix(".py").replace("/", ".")
        line = f"from {module} import {', '.join(defined)}"
        split = "".join(f"    {name},\n" for name in defined)
        lines.append(line if len(line) <= WIDTH else f"from {module} import (\n{split})")
    return list(dict.fromkeys(lines))


def needed(path: str) -> list[str]:
    """The files that a file imports, but in its `main`, and those that these import."""
    every, new = {path}, [path]
    while new:
        files = sorted(_imported(new.pop()) - every)
        every.update(files)
        new += files
    return sorted(every - {path})


@cache
def _imported(path: str) -> frozenset[str]:
    """The files of this repository that a file imports, but in its `main`."""
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    parts = [part for part in tree.body if getattr(part, "name", "") != "main"]
    nodes = [node for part in parts for node in ast.walk(part)]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    names = [name for node in froms for name in _modules(node)]
    files = (f"{name.replace('.', '/')}.py" for name in names)
    return frozenset(file for file in files if (ROOT / file).is_file())


def _modules(node: ast.ImportFrom) -> list[str]:
    """What "from a import b" may import: a, a.b."""
    return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]


def _section(title: str, sides: list[Side]) -> str:
    """A section of both docstrings as one text: what only one says begins with its framework."""
    having = [side for side in sides if title in side.sections]
    items = [re.split(r"\n(?=- )|\n\n", _sentence(side.sections[title])) for side in having]
    if len(having) == 1:
        return _text(items[0])
    shown = []
    matches = SequenceMatcher(None, *(list(map(_words, some)) for some in items), autojunk=False)
    for how, first, last, *other in matches.get_opcodes():
        if how == "equal":
            shown += items[0][first:last]
        else:
            shown += [_by(having[0], item) for item in items[0][first:last]]
            shown += [_by(having[1], item) for item in items[1][slice(*other)]]
    return _text(shown)


def _by(side: Side, item: str) -> str:
    """A paragraph, or a line of a list, of one framework."""
    if item.startswith("1. "):
        return f"{side.title}:\n\n{item}"
    mark = "- " if item.startswith("- ") else ""
    return f"{mark}{side.title}: {item.removeprefix(mark)}"


def _text(items: list[str]) -> str:
    """Paragraphs and lists as Markdown."""
    text = "\n\n".join(items)
    return re.sub(r"(?m)(^- (?:.+\n)+)\n(?=- )", r"\1", text)


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
    """The public functions but `main`, in the order of the first file; then the second's own."""
    public = [_public(side.source) for side in sides]
    functions = []
    for name in dict.fromkeys([*public[0], *public[1]]):
        having = [side for side, named in zip(sides, public, strict=True) if name in named]
        nodes = [named[name] for named in public if name in named]
        first = [_words((ast.get_docstring(n) or "").partition("\n\n")[0]) for n in nodes]
        settings = [_settings(node.args) for node in nodes]
        shared = set.intersection(*map(set, settings))
        alone = [
            (side.title, ", ".join(text for key, text in given.items() if key not in shared))
            for side, given in zip(having, settings, strict=True)
        ]
        call = f"{name}({_parameters(nodes[0].args, shared)})"
        alone = [(title, text) for title, text in alone if text]
        functions.append(Function(call, _said(having, first), alone))
    return functions


def _said(having: list[Side], texts: list[str]) -> list[tuple[str | None, str]]:
    """What those who have a function say of it; nothing of those who say nothing."""
    said = _of_each(having, texts) if len(having) > 1 else [(having[0].title, *texts)]
    return [(title, text) for title, text in said if text]


def _public(source: str) -> dict[str, ast.FunctionDef]:
    return {
        node.name: node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name != "main" and node.name[0] != "_"
    }


def _parameters(given: ast.arguments, shared: set[str]) -> str:
    """The parameters with their defaults, without their types, which are each framework's own.

    `shared`: the settings that are among them.
    """
    bare = ast.parse(f"def f({ast.unparse(given)}): ...").body[0].args
    pairs = zip(bare.kwonlyargs, bare.kw_defaults, strict=True)
    kept = [(setting, default) for setting, default in pairs if setting.arg in shared]
    bare.kwonlyargs, bare.kw_defaults = [s for s, _ in kept], [default for _, default in kept]
    for argument in (*bare.posonlyargs, *bare.args, *bare.kwonlyargs):
        argument.annotation = None
    return ast.unparse(bare)


def _settings(given: ast.arguments) -> dict[str, str]:
    """The keyword-only parameters, each with its default."""
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    return {s.arg: f"{s.arg}={ast.unparse(d)}" if d else s.arg for s, d in pairs}


# What is measured ---------------------------------------------------------------------------------


def _rows(technique: Technique) -> list[str]:
    """Its rows in plain words, without baselines: what people look a technique up by."""
    shown = [v for v in technique.variants if v.role == "variant" and v.effort != "full"]
    names = list(dict.fromkeys(v.title or v.name.replace("_", " ") for v in shown))
    more = [f"{len(names) - MOST_ROWS} more"] if len(names) > MOST_ROWS else []
    return names[:MOST_ROWS] + more


def _variants(technique: Technique) -> list[dict]:
    """A row for each variant; what differs between the frameworks makes two rows."""
    rows: dict[tuple, dict] = {}
    for variant in technique.variants:
        row = {
            "name": variant.name,
            "role": variant.role,
            "against": variant.against,
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
    accuracy = f"{task.metric}, margin {task.margin:g}" if workload.accuracy else "—"
    if workload.trained_from != "default":
        accuracy += f" ({workload.trained_from})"
    return {
        "task": f"{called(workload.task)} ({workload.task})",
        "batch": f"{workload.batch_size} ({workload.batch})",
        "timed": unit if workload.timed else "nothing: measured in separate processes",
        "accuracy": accuracy,
        "effort": workload.effort,
    }


# Files --------------------------------------------------------------------------------------------


def differing(folder: Path) -> list[str]:
    """Names of the pages in `folder` that are missing, out of date, or of no technique."""
    wanted = pages()
    there = {name: (folder / name).read_text("utf-8") for name in _there(folder)}
    names = sorted(wanted.keys() | there.keys())
    return [name for name in names if wanted.get(name) != there.get(name)]


def _there(folder: Path) -> list[str]:
    paths = [path for kind in ("md", "svg") for path in folder.rglob(f"*.{kind}")]
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def write(folder: Path) -> None:
    """Make every page in `folder`, and delete those of no technique."""
    wanted = pages()
    for name in _there(folder):
        if name not in wanted:
            (folder / name).unlink()
    for name, text in wanted.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
