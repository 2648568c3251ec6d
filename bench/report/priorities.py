"""Which techniques gain, and the path of questions, for the terminal and as a page."""

from __future__ import annotations

from dataclasses import replace

from markupsafe import Markup

from bench.analysis.families import FORMER, families
from bench.analysis.questions import FIGURES, Leaf, Priority, by_bound, path
from bench.analysis.table import GAINED, RATE, TIME, Row, level
from bench.record import FRAMEWORKS, Record
from bench.report.answer import HEADS, accuracy_of, gain_of
from bench.report.content import measured, run_line, warnings
from bench.report.formatting import MISSING, number
from bench.report.names import called, name_of
from bench.report.tables import escape, grid, markdown_table
from bench.report.technique_tables import Table, of_words
from bench.report.text import hanging, plain, wrap

SHOWN = 3  # rows at the end of a path


# Words -------------------------------------------------------------------------------------------


def where(row: Row) -> str:
    """Variant and technique in plain words, and the work."""
    case = row.case
    flavour = "" if case.framework_title in FRAMEWORKS.values() else f"{case.framework_title}: "
    return f"{flavour}{name_of(case)}, {called(case.task)}, batch {case.batch_size}"


def leaf_title(leaf: Leaf) -> str:
    """PyTorch, a large model: time."""
    size = {True: ", a large model", False: ", a small model", None: ""}[leaf.large]
    return f"{FRAMEWORKS[leaf.framework]}{size}: {HEADS[leaf.goal.figure]}"


def ends(leaf: Leaf) -> list[str]:
    """The rows at which a path ends, and how many others there were."""
    sentences = [_sentence(row, leaf.goal.figure) for row in leaf.rows[:SHOWN]]
    rest = {
        "more with a gain": len(leaf.rows) - len(sentences),
        "not shown to gain": leaf.unproven,
        "measured once, without an interval": leaf.once,
        "with a gain, but not shown to keep accuracy": leaf.refused,
    }
    counted = "; ".join(f"{count} {words}" for words, count in rest.items() if count)
    return sentences + (
        [f"{'others' if sentences else 'none advised'}: {counted}"] if counted else []
    )


def _sentence(row: Row, name: str) -> str:
    takes = f"takes {row.price}" if row.price else ""
    gain = "" if name == GAINED else gain_of(row.ratios[name], name)
    parts = "; ".join(filter(None, (gain, accuracy_of(row.accuracy), takes)))
    return f"{where(row)}: {parts}"


# The techniques ----------------------------------------------------------------------------------


def paying(ranked: list[Priority]) -> tuple[list[dict[str, Priority]], str]:
    """The techniques that gain in a framework, each by framework; and a sentence on the others."""
    by_technique: dict[str, dict[str, Priority]] = {}
    for each in ranked:
        by_technique.setdefault(each.technique, {})[each.framework] = each
    paid = {each.technique for each in ranked if each.paid}
    others = ", ".join(name for name in by_technique if name not in paid).replace("_", " ")
    shown = [sides for name, sides in by_technique.items() if name in paid]
    return shown, f"No gain shown with accuracy kept: {others}." if others else ""


def matrix(techniques: list[dict[str, Priority]]) -> Table:
    """A line for each technique: what it gains in each framework, and what it costs."""
    columns = of_words("technique", *FRAMEWORKS.values(), "costs")
    lines = []
    for sides in techniques:
        ordered = [sides.get(framework) for framework in FRAMEWORKS]
        name = next(filter(None, ordered)).technique.replace("_", " ")
        lines.append([name, *map(_gains, ordered), _costs(list(filter(None, ordered)))])
    return Table("What pays", columns, lines)


def _gains(priority: Priority | None) -> str:
    """The largest gain in each figure of large models and of small ones, and how many rows gain."""
    if priority is None:
        return "not measured"
    gains: dict[str, list[str]] = {}
    for large in (True, False, None):
        rows = [row for work, row in priority.rows if work.large is large]
        for figure in FIGURES:
            if (best := _best(rows, figure)) and figure == GAINED:
                gains.setdefault(called(best.case.task), []).append(accuracy_of(best.accuracy))
            elif best:
                kept = "" if best.accuracy.kept else "*"
                gain = gain_of(best.ratios[figure], figure, short=figure in (TIME, RATE))
                gains.setdefault(called(best.case.task), []).append(f"{gain}{kept}")
    if not gains:
        return f"no gain shown ({len(priority.rows)} tried)"
    parts = [f"{task}: {', '.join(some)}" for task, some in gains.items()]
    if len(priority.rows) > 1:
        parts.append(f"{priority.paid} of {len(priority.rows)} rows gain")
    return "; ".join(parts)


def _best(rows: list[Row], figure: str) -> Row | None:
    """The row with the largest gain; where none keeps accuracy, the best that does not."""
    if gaining := by_bound(rows, figure):
        return gaining[0]
    better = [row for row in rows if figure != GAINED and row.improves(figure)]
    return min(better, key=lambda row: level(figure, row.ratios[figure]), default=None)


def _costs(sides: list[Priority]) -> str:
    """The longest first call, lines to copy, refused models and packages."""
    costs = [side.cost for side in sides if side.cost]
    refused = [f"{cost.refused} of {cost.models}" for cost in costs if cost.models]
    needs = sorted({name for cost in costs for name in cost.packages})
    parts = {
        "first call {} s": [number(max(s.first_calls)) for s in sides if s.first_calls],
        "{} lines": [f"{cost.lines:,}" for cost in costs],
        "refuses {} models": refused if any(cost.refused for cost in costs) else [],
        "needs {}": [", ".join(needs)] if needs else [],
    }
    told = [words.format(" / ".join(dict.fromkeys(some))) for words, some in parts.items() if some]
    return "; ".join(told) or MISSING


# The terminal and the page -----------------------------------------------------------------------

TITLE = "Which techniques gain, and what they cost"
STAR = "* marks where accuracy was not shown to be kept."
HOW = (
    "A gain counts if its whole 95% interval is better by more than 3% (accuracy: by any of it) "
    f"and accuracy is kept. {STAR} Of each figure the best row with a large model (a million "
    "parameters or more) and the best with a small one are shown, by the bound nearest to no gain.",
    "x means times as fast, or times the samples/s. Two numbers with a slash are of PyTorch and "
    "TensorFlow. Lines are lines of code to copy, without comments and docstrings. Some packages "
    "are needed for one of several variants only.",
)


def text(record: Record, ranked: list[Priority], width: int = 80) -> list[str]:
    """The path of questions, then the techniques."""
    lines = [*wrap(plain(measured([record])), width)]
    lines += [line for warning in warnings(record) for line in wrap(f"!! {warning}", width)]
    for question, leaves in path(record):
        lines += ["", question.words, "-" * len(question.words)]
        lines += [] if leaves else ["no row of this record answers it"]
        for leaf in leaves:
            lines.append(leaf_title(leaf))
            for words in ends(leaf):
                lines += hanging("  -", plain(words), width, 4)
    shown, others = paying(ranked)
    lines += ["", *grid(matrix(shown), width), "", STAR] if shown else []
    return [*lines, "", *wrap(plain(others), width)]


HEAD = "<!-- Made by `twinbench priorities {} --write`. Make a new record, then make it again. -->"


def page(record: Record, ranked: list[Priority], given: str) -> str:
    """The page as Markdown; `given`: the path of the record."""
    parts = [HEAD.format(given), f"# {TITLE}"]
    parts.append(f"{escape(measured([record]))} Run: {escape(run_line(record))}.")
    parts.append("[What to use](answers.md) has the best of each framework for each aim.")
    parts += [f"**{escape(warning)}**" for warning in warnings(record)]
    shown, others = paying(ranked)
    table = matrix(shown)
    rows = [[_linked(row[0]), *row[1:]] for row in table.rows]
    parts += [markdown_table(replace(table, rows=rows)), escape(others)]
    parts += [*map(escape, HOW), "[Which models are refused](any_model.md)."]
    parts.append("## By question")
    for question, leaves in path(record):
        told = "\n\n".join(map(_listed, leaves)) or "No row of this record answers it."
        parts.append(f"<details><summary>{question.words}</summary>\n\n{told}\n\n</details>")
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _listed(leaf: Leaf) -> str:
    """The end of a path in Markdown: the rows as a list, or a line where nothing is advised."""
    head, words = f"**{escape(leaf_title(leaf))}**", list(map(escape, ends(leaf)))
    if not leaf.rows:
        return f"{head}: {'; '.join(words)}"
    return "\n".join([f"{head}:", "", *(f"- {each}" for each in words)])


def _linked(name: str) -> str:
    """A technique with a link to its page; one that is gone has none."""
    technique = name.replace(" ", "_")
    family = families().get(technique)
    if technique in FORMER or family is None:
        return name
    return Markup(f"[{escape(name)}](techniques/{family}/{technique}.md)")
