"""The priority matrix and the path of questions, for the terminal and as a page."""

from __future__ import annotations

from bench.analysis.questions import FIGURES, Leaf, Priority, path
from bench.analysis.table import GAINED, Row
from bench.record import FRAMEWORKS, Record
from bench.report.answer import HEADS, accuracy_of, gain_of, ratio_of
from bench.report.content import measured, run_line, warnings
from bench.report.formatting import MISSING, number, plus_minus
from bench.report.names import name_of
from bench.report.tables import escape, grid, markdown_table
from bench.report.technique_tables import Table, of_figures, of_words
from bench.report.text import hanging, plain, wrap

SHOWN = 3  # rows at the end of a path


# Words -------------------------------------------------------------------------------------------


def where(row: Row) -> str:
    """Framework, variant and technique in plain words, and the work."""
    case = row.case
    return f"{case.framework_title} {name_of(case)}, {case.task}, batch {case.batch_size}"


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


# The matrix --------------------------------------------------------------------------------------


def matrix(ranked: list[Priority]) -> Table:
    """A line for each technique and framework; a gain is that of its best row."""
    figures = [f for f in FIGURES if any(p.best(f) for p in ranked)]
    columns = of_words("technique", "framework")
    columns += of_figures(*(f"{HEADS[f]}\n(best row)" for f in figures))
    columns += of_figures("paid, small\nmodels", "paid, large\nmodels")
    columns += of_figures("first call\n[s]", "rows less\naccurate")
    columns += of_figures("lines to\ncopy", "refused\nmodels")
    columns += of_words("needs")
    return Table("Priorities", columns, [_line(each, figures) for each in ranked])


def _line(priority: Priority, figures: list[str]) -> list[str]:
    cost = priority.cost
    refused = MISSING if cost is None or not cost.models else f"{cost.refused} of {cost.models}"
    return [
        priority.technique.replace("_", " "),
        FRAMEWORKS[priority.framework],
        *(_best(priority, figure) for figure in figures),
        *(_of(priority.paid(large)) for large in (False, True)),
        _span(priority.first_calls),
        _of((priority.lossy, len(priority.rows))),
        f"{cost.lines:,}" if cost else MISSING,
        refused,
        ", ".join(cost.packages) if cost and cost.packages else MISSING,
    ]


def _best(each: Priority, name: str) -> str:
    row = each.best(name)
    if row is None:
        return MISSING
    gain = row.ratios[name]
    if name == GAINED:
        return plus_minus(gain.value, (gain.low, gain.high), signed=True)
    return ratio_of(gain).rstrip(",")


def _of(counts: tuple[int, int]) -> str:
    return f"{counts[0]} of {counts[1]}" if counts[1] else MISSING


def _span(seconds: list[float]) -> str:
    if not seconds:
        return MISSING
    low, high = number(min(seconds)), number(max(seconds))
    return low if low == high else f"{low} to {high}"


# The terminal and the page -----------------------------------------------------------------------

TITLE = "Which technique pays, and what it costs"
HOW = (
    "A gain is a share of the baseline's figure: below 1 is better, for samples/s and the largest "
    "batch above 1. It counts if its whole interval is better by more than 3% (accuracy: by any of "
    "it) and accuracy is kept. Rows are ordered by the bound nearest to no gain. A row pays if it "
    "gains in any figure.",
    "Small models have less than a million parameters. All figures are of the run's device.",
    "Lines are lines of code to copy, without comments and docstrings. Refused models are those of "
    "docs/any_model.md that the technique refuses, at least in part. Some packages are needed for "
    "one of several variants only.",
)


def text(record: Record, ranked: list[Priority], width: int = 80) -> list[str]:
    """The path of questions, then the matrix."""
    lines = [*wrap(plain(measured([record])), width)]
    lines += [line for warning in warnings(record) for line in wrap(f"!! {warning}", width)]
    for question, leaves in path(record):
        lines += ["", question.words, "-" * len(question.words)]
        lines += [] if leaves else ["no row of this record answers it"]
        for leaf in leaves:
            lines.append(leaf_title(leaf))
            for words in ends(leaf):
                lines += hanging("  -", plain(words), width, 4)
    return [*lines, "", *grid(matrix(ranked), width)]


HEAD = "<!-- Made by `twinbench priorities {} --write`. Make a new record, then make it again. -->"


def page(record: Record, ranked: list[Priority], given: str) -> str:
    """The page as Markdown; `given`: the path of the record."""
    parts = [HEAD.format(given), f"# {TITLE}"]
    parts.append(f"{escape(measured([record]))} Run: {escape(run_line(record))}.")
    parts += [f"**{escape(warning)}**" for warning in warnings(record)]
    parts.append("## A path of questions")
    for question, leaves in path(record):
        parts.append(f"### {question.words}")
        parts += [] if leaves else ["No row of this record answers it."]
        parts.append("\n".join(line for leaf in leaves for line in _listed(leaf)))
    paying = [each for each in ranked if each.paid(True)[0] + each.paid(False)[0]]
    parts += ["## Priorities", markdown_table(matrix(paying)), _without_gain(ranked, paying)]
    parts += ["## How it is made", *HOW]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _listed(leaf: Leaf) -> list[str]:
    """The end of a path as a list in Markdown: one line where nothing is advised."""
    title, words = escape(leaf_title(leaf)), list(map(escape, ends(leaf)))
    if not leaf.rows:
        return [f"- {title}: {'; '.join(words)}"]
    return [f"- {title}:", *(f"  - {each}" for each in words)]


def _without_gain(ranked: list[Priority], paying: list[Priority]) -> str:
    """Techniques without a row that pays, with their frameworks."""
    sides: dict[str, list[str]] = {}
    for each in (each for each in ranked if each not in paying):
        sides.setdefault(each.technique.replace("_", " "), []).append(FRAMEWORKS[each.framework])
    listed = [f"{name} ({', '.join(sorted(some))})" for name, some in sides.items()]
    return escape(f"No row pays: {'; '.join(listed)}.") if listed else ""
