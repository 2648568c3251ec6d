"""What README.md shows between its two markers, and the page with all answers behind it.

README has a picture and one table; docs/answers.md has every answer. Both are made from records,
several where one run does not hold everything, so that `--check` can tell whether they are theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from statistics import median

import msgspec
from markupsafe import Markup
from msgspec import Struct

from bench.analysis import machine_class
from bench.analysis.across_machines import Machine, machines_in, others, statements
from bench.analysis.families import families, family_of
from bench.analysis.questions import Answer, answers
from bench.analysis.ranking import GOALS, TRAIN, Limits, Ranking, Work, rank, works
from bench.record import FRAMEWORKS, Record
from bench.report import advised, bars, frameworks, machines, svg
from bench.report.answer import figure_of
from bench.report.content import measured_on, run_line, warnings
from bench.report.names import called, name_of, title
from bench.report.tables import advised_table, escape
from bench.report.technique_tables import Table

BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
MACHINES = "docs/machines"
ANSWERS = "docs/answers.md"
AGREEMENT, PAGE_OF_RUNS = "docs/reproducibility.json", "docs/reproducibility.md"
CHART = "docs/gains"  # beside README.md; -light.svg and -dark.svg follow
ANSWERED = """# What to use, in each framework

All answers of the run that [README.md](../README.md) shows. [report.md](report.md) has every row.

"""
HOW = "## How to read it"
TERMS = (
    "bfloat16 and int8 are short number formats. ONNX Runtime, OpenVINO, TorchInductor and LiteRT "
    "run exported models. “Distilled” is a small model that learned from a large one."
)
WINNER = (
    "There is no overall winner. Who leads on the machine measured (\\*: accuracy was not shown; "
    f"[all answers]({ANSWERS}) leave these out):"
)
PROVEN = (
    "**Same work in both** ([how](docs/numbers.md)): both start from the same weights, and their "
    "losses must match within a stated tolerance, or no ratio is shown."
)
Marks = dict[tuple[int, str | None], str]  # see bench.report.machines
FEW, MANY = 1_000, 100_000  # steps of training for which a sentence compares the advice


def read(path: Path) -> str:
    """The text of README.md, or ValueError where it cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        raise ValueError(f"{path}: cannot be read") from None


def files(path: Path, runs: list[Record]) -> dict[Path, str]:
    """README.md with what `runs` show, its charts and the page of answers: each with its text.

    What holds on the machines of docs/machines beside it is marked.
    """
    known = machines_in(path.parent / MACHINES)
    made = {path: with_tables(read(path), runs, known, agreement(path.parent / AGREEMENT, runs))}
    made[path.parent / ANSWERS] = ANSWERED + every_answer(runs, known)
    if drawn := bars.chart(_answers(runs)):
        for scheme in svg.SCHEMES:
            made[path.parent / f"{CHART}-{scheme}.svg"] = svg.standalone(drawn, scheme, bars.WIDTH)
    return made


def with_tables(
    text: str,
    runs: list[Record],
    known: Sequence[Machine] = (),
    agreed: str = "",
) -> str:
    """`text` with what `runs` show between its markers.

    ValueError where a marker is missing, or the records have no technique that ran.
    """
    return between(text, BEGIN, END, headline(runs, known, agreed))


def between(text: str, begin: str, end: str, new: str) -> str:
    """`text` with other lines between two markers. ValueError where one is missing."""
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise ValueError(f"no text between {begin} and {end} to replace")
    return f"{before}{begin}\n{new}{end}{after}"


def _works(runs: list[Record]) -> list[Work]:
    return [work for run in runs for work in works(run)]


def _answers(runs: list[Record]) -> list[Answer]:
    return [answer for run in runs for answer in answers(run)]


def agreement(path: Path, runs: list[Record]) -> str:
    """How far whole runs agree, in a sentence from their record; "" where there is none."""
    if not path.exists():
        return ""
    made = msgspec.json.decode(path.read_bytes(), type=_Reproduced)
    shown = {run.started for run in runs}
    share, count = _share(made.pairs, "agree"), len(made.runs)
    if shown <= {one.started for one in made.runs}:
        return f"{count} whole runs on this class of machine agree in {share} of their ratios."
    sentence = (
        f"The run above is a single one. {count} whole runs on another class of machine agree in "
        f"{share} of their ratios."
    )
    if not made.apart or not shown <= {one.started for one in made.others}:
        return sentence
    return (
        f"{sentence} With the run above {_share(made.apart, 'agree')} agree in size and "
        f"{_share(made.apart, 'same')} in verdict, and at most "
        f"{max(pair.of.opposite for pair in made.apart)} are opposite: trust directions more than "
        "sizes."
    )


def _share(pairs: list[_Pair], name: str) -> str:
    """The median over pairs of runs, of their ratios, that agree in size or in verdict."""
    shares = [getattr(pair.of, name) / pair.of.ratios for pair in pairs if pair.of.ratios]
    return f"{median(shares):.0%}" if shares else ""


class _Agree(Struct):
    ratios: int
    agree: int
    same: int
    opposite: int


class _Pair(Struct):
    of: _Agree


class _Run(Struct):
    started: str


class _Reproduced(Struct):
    """What is read here of `bench.validation.reproduce.Reproduced`."""

    runs: list[_Run]
    others: list[_Run]
    pairs: list[_Pair]
    apart: list[_Pair]


def headline(runs: list[Record], known: Sequence[Machine] = (), agreed: str = "") -> str:
    """The picture and which framework is ahead, as Markdown; ValueError where nothing ran.

    `known`: machines that may show the same. `agreed`: how far runs agree.
    """
    parts = [*_warned(runs), escape(_measured(runs))]
    listed = _answers(runs)
    if bars.chart(listed):
        parts.append(_picture())
    parts.append("## PyTorch or TensorFlow?")
    parts.append(WINNER)
    leads = frameworks.overview(listed).items()
    parts.append(_bullets([f"**{aim.capitalize()}**: {escape(text)}." for aim, text in leads]))
    parts.append(advised_table(frameworks.table(listed)))
    models = f"{escape(frameworks.described(listed))} ([tasks](docs/techniques/README.md#tasks))."
    parts.append(_bullets([*map(escape, frameworks.LEGEND), TERMS, models]))
    trust = [PROVEN]
    if agreed:
        trust.append(f"**Repeated** ([runs]({PAGE_OF_RUNS})): {escape(agreed)}")
    if beside := others(runs[0], list(known)):
        stated = [statements(Machine("README", run), beside) for run in runs]
        trust.append(machines.line(beside, list(chain.from_iterable(stated))))
    parts += ["## Can I trust it?", _bullets(trust)]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _bullets(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _warned(runs: list[Record]) -> list[str]:
    """What a reader must know before any figure; ValueError where nothing ran."""
    if all(row.is_baseline for work in _works(runs) for row in work.rows):
        raise ValueError("the record has no technique that ran")
    warned = dict.fromkeys(chain.from_iterable(map(warnings, runs)))
    return [f"**{escape(warning)}**" for warning in warned]


def _measured(runs: list[Record]) -> str:
    """Measured on a CPU: AMD EPYC, 418 GFLOP/s; torch 2.15.0, tensorflow 2.21.0; November 2026."""
    environment, started = runs[0].environment, datetime.fromisoformat(runs[0].started)
    machines = dict.fromkeys(machine_class.words(run.environment) for run in runs)
    versions = [
        f"{name} {environment.packages[side][name]}"
        for side, name in (("pt", "torch"), ("tf", "tensorflow"))
        if name in (environment.packages.get(side) or {})
    ]
    device = "GPU" if environment.gpu else "CPU"
    parts = filter(None, (" and ".join(machines), ", ".join(versions), f"{started:%B %Y}"))
    return f"Measured on a {device}: {'; '.join(parts)}."


def every_answer(runs: list[Record], known: Sequence[Machine] = ()) -> str:
    """What to use for each aim at each piece of work, as Markdown; ValueError where nothing ran."""
    beside = others(runs[0], list(known))
    firsts = [Machine("README", run) for run in runs]
    of_runs = [statements(first, beside) if beside else [] for first in firsts]
    parts = [*_warned(runs), escape(f"{measured_on(runs)}. {advised.BRIEF_LEGEND}")]
    parts += [escape(machines.LEGEND)] * bool(beside)
    for first, stated in zip(firsts, of_runs, strict=True):
        parts += _tables(list(first.answers.values()), machines.marks(stated))
    parts += [HOW, escape(advised.SHOWN), escape(advised.BEST_OF_EACH)]
    parts += map(escape, conclusions(runs))
    dates = "; ".join(run_line(run) for run in runs)
    took = "".join(map(_took, runs))
    parts.append(f"Made from the record ({escape(dates)}).{took}")
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _took(run: Record) -> str:
    """How long a run took, and when there was something to see."""
    parts = [run.seconds.get(name) for name in ("total", "first_table", "intervals")]
    if None in parts[:2]:
        return ""
    took, first, *timed = (f"{seconds / 60:.0f}" for seconds in parts if seconds is not None)
    cores = run.environment.logical_cores
    timed = "".join(f", all times with intervals after {minutes}" for minutes in timed)
    return f" The run took {took} minutes on {cores} cores: a first table after {first}{timed}."


def _picture() -> str:
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{CHART}-dark.svg">'
    alt = "Bars: what techniques gain in PyTorch and in TensorFlow"
    return f'<picture>{dark}<img alt="{alt}" src="{CHART}-light.svg"></picture>'


def _tables(listed: list[Answer], marks: Marks) -> list[str]:
    """The main aims in few words, and all others folded; report.md has the same in full."""
    shown, more = advised.split(listed)
    made = [advised_table(_brief(shown, marks))] if shown else []
    if more:
        head = f"<details><summary>{len(more)} more: other work, or nothing gained</summary>"
        made.append(f"{head}\n\n{advised_table(_brief(more, marks))}\n</details>")
    return made


def _brief(listed: list[Answer], marks: Marks) -> Table:
    """What to use in few words, each row's name a link to the page of its technique."""
    table = advised.brief(listed)
    rows = []
    for answer, (work, *cells, ahead) in zip(listed, table.rows, strict=True):
        sides = [answer.sides.get(name) for name in FRAMEWORKS]
        linked = [_linked(*each) for each in zip(cells, sides, strict=True)]
        signs = [marks.get((id(answer), side), "") for side in (*FRAMEWORKS, None)]
        rows.append([work, *map(_marked, signs, (*linked, ahead))])
    return replace(table, rows=rows)


def _marked(sign: str, cell: str) -> str:
    return Markup(f"{sign} {escape(cell)}") if sign else cell


def _linked(cell: str, side: Ranking | None) -> str:
    row = side and (advised.named(side) or advised.tempting(side))
    if not row or row.case.technique not in families():
        return cell
    name, technique = escape(name_of(row.case, short=True)), row.case.technique
    page = f"techniques/{family_of(technique)}/{technique}.md"
    return Markup(escape(cell).replace(name, f"[{name}]({page})", 1))


# Conclusions -------------------------------------------------------------------------------------


def conclusions(runs: list[Record]) -> list[str]:
    """Sentences about the whole, each made from the records."""
    return list(filter(None, map(_steps, runs)))


def _steps(run: Record) -> str | None:
    """Where the number of steps decides, since a compiler has to be repaid."""
    for work in works(run):
        if work.kind != TRAIN:
            continue
        few, many = (rank(work, GOALS["train-speed"], Limits(steps=n)) for n in (FEW, MANY))
        if few and many and "compiling" in many.best.price and few.best not in many.placed("equal"):
            first, later = (
                f"{each.best.case.framework_title} {title(each.best.case)}: "
                f"{figure_of(each, each.best)}"
                for each in (few, many)
            )
            return (
                f"Compiling has to be repaid. Of {called(work.task)}, batch {work.batch_size}, "
                f"{FEW:,} training steps are fastest with {first}, {MANY:,} with {later}."
            )
    return None
