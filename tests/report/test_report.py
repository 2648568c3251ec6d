"""The report: what it says, that it fits, that nothing in a record can harm it."""

from __future__ import annotations

import csv
import functools
import io
import json
import re
import subprocess
import sys
import unicodedata
from itertools import pairwise
from math import isclose, nan
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from msgspec import to_builtins

from bench.analysis import machine_class
from bench.analysis.pairing import baseline
from bench.analysis.questions import answers
from bench.analysis.ranking import works as decided
from bench.analysis.reading import load, view
from bench.analysis.reading import tasks as tasks_of
from bench.record import (
    Accuracy,
    AccuracyDifference,
    Case,
    Certificate,
    Comparison,
    Conditions,
    Control,
    Environment,
    Memory,
    Metric,
    NoiseFloor,
    Record,
    TaskFacts,
    TechniqueNotes,
    Timing,
    encode,
)
from bench.report import bars, command, csv_export, formatting, frameworks, readme
from bench.report import page as html_page
from bench.report.content import build, merge
from bench.report.files import FORMATS, write_reports
from bench.report.tables import answered, escape, markdown, terminal
from bench.report.text import plain, wrap
from tests import workers
from tests.records import (
    TASKS,
    find_case,
    find_comparison,
    small_run,
    whole_run,
    with_case,
    with_comparison,
    with_environment,
)

ROOT = Path(__file__).resolve().parents[2]
DASH = "—"
BF16 = "digits-cnn-64/pt/bf16"
FP32 = "digits-cnn-64/pt/fp32"
TF_BF16 = "digits-cnn-64/tf/bf16"

# Reading what was rendered -----------------------------------------------------------------------


def columns(line: str) -> int:
    """Cells of a terminal that `line` takes: a mark that combines with a letter takes none."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in line)
    return len(line) + wide - sum(unicodedata.category(c) in ("Mn", "Mc", "Me") for c in line)


def block(text: str, title: str) -> list[str]:
    """The lines of the terminal's table with this title."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    end = next(
        i for i in range(start, len(lines)) if not lines[i] and not lines[i + 1].startswith("batch")
    )
    return lines[start:end]


def row(text: str, title: str, batch: int, variant: str) -> str:
    """One row of a terminal table, its continuation lines joined."""
    lines = block(text, title)
    lines = lines[lines.index(f"batch {batch}") + 1 :]
    start = next(
        i for i, line in enumerate(lines) if re.match(rf"{re.escape(variant)}(  |$)", line)
    )
    rest = iter(lines[start + 1 :])
    found = [lines[start]]
    for line in rest:
        if not line.startswith(" "):
            break
        found.append(line)
    return " ".join(" ".join(found).split())


def tokens(text: str) -> list:
    """What GitHub's reader makes of Markdown."""
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)


def markdown_tables(text: str) -> list[list[list[str]]]:
    """The text of every cell of every table."""
    found: list[list[list[str]]] = []
    read = tokens(text)
    for token, inside in pairwise(read):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type in ("td_open", "th_open"):
            found[-1][-1].append("".join(child.content for child in inside.children or []))
    return found


def markdown_row(text: str, head: str, variant: str, batch: int) -> dict[str, str]:
    """A row as head -> cell, of the first table that has this column and batch size."""
    read = tokens(text)
    titles = [read[n - 2].content for n, token in enumerate(read) if token.type == "table_open"]
    for title, table in zip(titles, markdown_tables(text), strict=True):
        names = [title.removesuffix(":").rpartition(", ")[2], *(line[0] for line in table[1:])]
        if head in table[0] and f"batch {batch}" in names:
            line = table[names.index(variant, names.index(f"batch {batch}"))]
            return dict(zip(table[0], line, strict=True))
    raise AssertionError(f"no table with {head!r} and batch {batch}")


def detail_row(run: Record, title: str, variant: str) -> dict[str, str]:
    """A row of digits-cnn, batch 64, in a table that report.html has and report.md leaves out."""
    tasks = [task for part in build(run).techniques for task in part.tasks]
    tables = [table for task in tasks if task.title == "digits-cnn" for table in task.tables]
    (table,) = [table for table in tables if table.detail and table.title.startswith(title)]
    names = [row[0] for row in table.rows]
    row = table.rows[names.index(variant, names.index("batch 64"))]
    return dict(zip([column.title for column in table.columns], row, strict=True))


# What it says ------------------------------------------------------------------------------------


def test_speed_shows_both_frameworks_side_by_side():
    run = with_case(
        whole_run(),
        BF16,
        timing={"median_s": 0.0125, "ci_s": (0.0123, 0.01268)},
        metrics={"samples_per_s": {"value": 5119.7}},
    )
    run = with_case(
        run,
        TF_BF16,
        timing={"median_s": 0.2, "ci_s": (0.195, 0.205)},
        metrics={"samples_per_s": {"value": 320.0}},
    )
    expected = ["12.5 (12.3–12.7)", "5,120", "200 (195–205)", "320"]
    assert row(terminal(run), "digits-cnn · Speed", 64, "bf16") == " ".join(["bf16", *expected])
    cells = markdown_row(markdown(run), "PyTorch samples/s", "bf16", 64)
    assert list(cells.values()) == ["bf16", *expected]
    assert list(cells)[1] == "PyTorch step [ms] (95% interval)"


def test_ratios_show_own_baseline_twin_and_verdict():
    faster = {"ratio": 0.5, "ci": (0.48, 0.52), "verdict": "faster, less accurate"}
    run = with_comparison(whole_run(), BF16, FP32, **faster)
    twins = {"ratio": 1.0104, "ci": (0.99, 1.03), "verdict": "inconclusive"}
    run = with_comparison(run, BF16, TF_BF16, **twins)
    cells = markdown_row(markdown(run), "PyTorch ÷ TensorFlow", "bf16", 64)
    assert cells["PyTorch ÷ own baseline"] == "0.500 (0.480–0.520) faster, less accurate"
    assert cells["PyTorch ÷ TensorFlow"] == "1.010 (0.990–1.030) inconclusive"
    text = row(terminal(run), "digits-cnn · Ratios", 64, "bf16")
    assert "0.500 (0.480–0.520)" in text
    assert "1.010 (0.990–1.030)" in text
    assert "inconclusive" in text
    assert "below 1: the first is faster" in block(terminal(run), "digits-cnn · Ratios")[0]
    assert "baseline" in row(terminal(run), "digits-cnn · Ratios", 64, "fp32")


def test_a_pair_that_is_no_row_is_named():
    cells = markdown_row(
        markdown(whole_run()), "PyTorch ÷ TensorFlow", "best: PyTorch bf16 ÷ TensorFlow fp32", 64
    )
    assert cells["PyTorch ÷ own baseline"] == DASH
    assert cells["PyTorch ÷ TensorFlow"].startswith("0.481 (")


def test_unlike_work_has_a_reason_and_no_ratio():
    cells = markdown_row(markdown(whole_run()), "PyTorch ÷ TensorFlow", "as_installed", 16)
    assert cells["PyTorch ÷ TensorFlow"] == "not comparable"
    text = terminal(whole_run())
    assert "not comparable" in row(text, "text-gpt · Ratios", 16, "as_installed")
    assert "as_installed: PyTorch ÷ TensorFlow: first losses differ: 4.585" in text
    assert "as_installed    2 of 3 pairs match" in text


def test_memory_is_shown_above_import_and_split():
    memory = {"import_bytes": 2e8, "steady_peak_bytes": 3.21e8}
    memory |= {"parameters_bytes": 1e7, "rest_bytes": 9.1e7}
    run = with_case(whole_run(), BF16, memory=memory)
    cells = detail_row(run, "Memory above import", "bf16")
    assert (cells["PyTorch peak"], cells["PyTorch parameters"]) == ("121", "10.0")
    assert cells["PyTorch rest"] == "91.0"
    text = row(terminal(run), "digits-cnn · First call", 64, "bf16")
    assert text.split()[1:5] == ["0.412", "0.0210", "18.0", "121"]


def test_device_memory_has_columns_where_there_is_a_device():
    heads = detail_row(whole_run(), "Memory above import", "bf16")
    assert not any("GPU" in head for head in heads)
    peak = {"allocated": 512_000_000, "reserved": 1_024_000_000}
    run = with_case(whole_run(), TF_BF16, memory={"device_peak": peak})
    run = with_environment(run, gpu={"name": "H200", "driver": "13.2"})
    cells = detail_row(run, "Memory above import", "bf16")
    assert (cells["TensorFlow GPU reserved"], cells["PyTorch GPU reserved"]) == ("1,020", DASH)
    rest = terminal(run).partition("(continued)")[2]
    assert row(rest, "variant", 64, "bf16").endswith("512")
    assert "H200, the driver's CUDA 13.2" in " ".join(terminal(run).split())
    more = {"compute_capability": "9.0", "memory_bytes": "85017493504", "cuda": "13.0"}
    said = " ".join(terminal(with_environment(run, gpu=more)).split())
    wanted = "H200, 79.2 GiB, compute capability 9.0, CUDA 13.0, the driver's CUDA 13.2"
    assert wanted in said
    assert "What to use on H200, " in said


def test_what_the_first_program_of_a_machine_took_is_said_once():
    assert "First compile" not in terminal(whole_run())
    run = with_environment(whole_run(), first_compile_s={"pt": 9.81})
    assert "PyTorch took 9.81 s to compile one operator" in " ".join(terminal(run).split())


def test_accuracy_shows_mean_difference_and_verdict():
    difference = {"mean": -1.234, "ci": (-1.5, -0.968), "verdict": "worse"}
    trained = {"mean": 96.5, "ci": (96.1, 96.9), "difference": difference}
    run = with_case(whole_run(), TF_BF16, accuracy=trained)
    cells = markdown_row(markdown(run), "PyTorch mean", "bf16", 64)
    assert cells["TensorFlow mean"] == "96.50 ± 0.40"
    assert cells["TensorFlow difference to baseline"] == "-1.23 ± 0.27 worse"
    assert "worse" in row(terminal(run), "digits-cnn · Accuracy in %", 64, "bf16")
    assert not any(line.startswith("text-gpt · Bits") for line in terminal(run).splitlines())


def without(run, name):
    """The run without a case."""
    return run.but(cases=[case for case in run.cases if not case.id.endswith(name)])


def test_a_variant_of_one_framework_has_a_dash_in_the_other():
    run = without(whole_run(), "text-gpt-16/tf/bf16")
    text = row(terminal(run), "text-gpt · Speed", 16, "bf16")
    assert text.endswith(f"{DASH} {DASH}")


def test_tf_keras_stands_in_a_row_of_its_own():
    text = markdown(whole_run())
    cells = markdown_row(text, "PyTorch samples/s", "bf16, tf_keras", 64)
    assert cells["PyTorch samples/s"] == DASH
    assert cells["TensorFlow samples/s"] == "12,400"
    ratio = markdown_row(text, "PyTorch ÷ TensorFlow", "bf16, tf_keras", 64)
    assert ratio["PyTorch ÷ TensorFlow"].startswith("0.790")
    assert "TensorFlow (tf_keras) bf16" in terminal(whole_run())


def test_no_row_with_figures_of_pytorch_is_called_tf_keras():
    run = whole_run()
    named = [
        row
        for technique in {case.technique for case in run.cases}
        for task in tasks_of(run, technique)
        for rows in view(run, technique, task).rows.values()
        for row in rows
    ]
    assert [row for row in named if row.tf and row.tf.is_legacy]
    assert not [row.label for row in named if row.pt and row.label.endswith(", tf_keras")]


def test_a_technique_that_has_tf_keras_alone_stands_beside_its_twin():
    run = without(whole_run(), TF_BF16)
    cells = markdown_row(markdown(run), "PyTorch samples/s", "bf16 (TensorFlow: tf_keras)", 64)
    assert DASH not in cells.values()


def test_every_status_stands_in_the_table_and_has_its_reason():
    run = whole_run()
    for text in (terminal(run), " ".join(markdown(run).split())):
        flat = " ".join(text.split()).replace("**", "")
        assert (
            "UNSUPPORTED: PyTorch fp16: needs a CUDA GPU; none was found "
            "(digits-cnn batch 64; text-gpt batch 16)" in flat
        )
        assert "FAILED: TensorFlow compiled: the worker was killed by SIGKILL" in flat
        assert "NOT_APPLIED: PyTorch compiled: no product ran in bfloat16" in flat
    line = row(terminal(run), "text-gpt · Speed", 16, "compiled")
    assert line == f"compiled NOT_APPLIED {DASH} FAILED {DASH}"


def test_a_failed_case_shows_no_figure_even_if_it_has_some():
    run = with_case(whole_run(), BF16, status="FAILED", reason="died in block 5")
    line = row(terminal(run), "digits-cnn · Speed", 64, "bf16")
    assert line.startswith(f"bf16 FAILED {DASH} ")
    assert "died in block 5" in terminal(run)


def test_controls_belong_to_the_noise_and_are_no_rows():
    run = whole_run()
    before = [len(table) for table in markdown_tables(markdown(run))]
    base = find_case(run, FP32)
    control = base.but(id="control", role="control", variant="control")
    again = find_comparison(run, BF16, FP32).but(kind="control", numerator="control")
    run = run.but(cases=[*run.cases, control], comparisons=[*run.comparisons, again])
    assert [len(table) for table in markdown_tables(markdown(run))] == before
    controls = next(t for t in markdown_tables(markdown(run)) if t[0][0] == "framework")
    assert controls[1] == ["PyTorch", "digits-cnn", "1.004 (0.991–1.017)", "2.1%", "equivalent"]
    assert "half-width of 28 ratios' intervals: median 2.1%, 90% below 4.4%" in terminal(run)


def test_environment_and_noise_stand_above_the_tables():
    text = terminal(whole_run())
    above = text[: text.index("digits-cnn · Speed")]
    for words in ("Xeon", "24.0 GiB", "torch 2.15.0", "bfloat16 490 GFLOP/s", "A/A controls"):
        assert words in above, words


def test_evidence_is_compact_and_covers_all_tasks():
    flat = " ".join(terminal(whole_run()).split())
    assert "TensorFlow bf16 convolution: bfloat16 9; matmul: bfloat16 3–4" in flat
    assert "PyTorch bf16 ÷" not in flat[flat.index("Took effect") :]


def test_the_largest_difference_of_losses_in_any_block_is_shown():
    run = whole_run()
    blocks = list(find_case(run, BF16).blocks)
    for place, factor in ((0, 1.0002), (5, 1.01)):
        losses = [loss * factor if n == 3 else loss for n, loss in enumerate(blocks[place].losses)]
        blocks[place] = blocks[place].but(losses=losses)
    run = with_case(run, BF16, blocks=blocks)
    said = "bf16 4 of 4 pairs match; losses apart by at most 1.0e-02"
    assert said in " ".join(terminal(run).split())
    twin = find_case(run, TF_BF16).but(id="the same program", variant="same")
    run = with_case(run, TF_BF16, program=twin.id, blocks=[])  # what it shows is the other's
    assert said in " ".join(terminal(run.but(cases=[*run.cases, twin])).split())


def test_what_differs_by_design_is_listed():
    for text in (terminal(whole_run()), markdown(whole_run())):
        assert "- PyTorch casts per operator (autocast); Keras per layer (dtype policy)." in text


def test_quick_run_says_so_and_gives_no_interval_or_verdict():
    quick = whole_run("quick")
    for text in (terminal(quick), markdown(quick)):
        assert "PROVISIONAL: one block, no intervals, no verdicts." in " ".join(text.split("!!"))
        assert "one block, no interval" in " ".join(text.split())
        body = text[text.index("Speed") : text.index("Differs by design")]
        body = body.replace("the first is faster", "").replace("margin ±", "")
        assert not re.search("faster|slower|equivalent|inconclusive|noisy|±|interval", body)
        assert "noisy" not in text  # nor does the legend speak of them
    assert "PROVISIONAL" not in terminal(whole_run()) + markdown(whole_run())


def test_the_first_pass_of_a_run_is_as_provisional_as_a_quick_one():
    first = whole_run("quick").but(effort="default", finished=False)
    assert "PROVISIONAL: one block" in " ".join(terminal(first).split())
    shown = terminal(first).partition("\ntwinbench\n")[0]
    assert ": bf16: 1.78x, one block, no interval" in shown
    assert not re.search(r"\d–\d", shown)  # no interval
    assert "* " not in shown.replace("*: ", "")  # nor anyone ahead


def test_baselines_alone_of_one_block_are_provisional_too():
    run = whole_run("quick").but(effort="default", comparisons=[])
    run = run.but(cases=[case for case in run.cases if case.role == "baseline"])
    assert "PROVISIONAL: one block" in " ".join(terminal(run).split())


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (None, "NOT FINISHED: the run goes on, or was cut short."),
        ("minutes", "ENDED IN TIME (--minutes): intervals hold"),
        ("interrupted", "INTERRUPTED: intervals hold"),
    ],
)
def test_a_run_that_is_not_finished_says_why(ended, words):
    run = whole_run().but(finished=False, ended=ended)
    for text in (terminal(run), html_page.html(run)):
        assert words in " ".join(text.replace("!! ", "").split())
    assert words in " ".join(markdown(run).split())
    assert words not in markdown(whole_run())


def test_variants_have_their_titles_beside_their_names():
    title = "bfloat16 wherever autocast has it"
    run = whole_run()
    run = run.but(cases=[c.but(title=title) if c.variant == "bf16" else c for c in run.cases])
    assert f"bf16: {title}" in markdown(run).replace("**", "")
    assert f"<dt>bf16</dt><dd>{title}</dd>" in html_page.html(run)
    assert re.search(f"bf16 +{title}", terminal(run))
    assert f"PT* {title}: 1." in " ".join(terminal(run).split())


def test_rows_of_one_program_show_the_figures_of_the_one_that_was_measured():
    """Another technique's fp32 is the same program: one row of the decisions, and a note."""
    run = whole_run()
    source = find_case(run, FP32)
    shown = source.but(
        id="clipping/digits-cnn-64/pt/plain",
        technique="clipping",
        variant="plain",
        title="no clipping",
        program=source.id,
        timing=source.timing.but(step_s={}),
    )
    clipping = TechniqueNotes(title="Clipping")
    run = run.but(cases=[*run.cases, shown], techniques=run.techniques | {"clipping": clipping})
    (work,) = [w for w in decided(run) if (w.batch_size, w.kind) == (64, "train")]
    (row,) = [row for row in work.rows if row.case.id in (source.id, shown.id)]
    assert row.case.id == source.id
    assert [each.case.id for each in row.repeats] == [shown.id]
    assert "plain is the same program as fp32 of mixed_precision" in markdown(run)
    lines = {line["id"]: line for line in csv.DictReader(io.StringIO(csv_export.csv_text(run)))}
    assert lines[shown.id]["blocks"] == lines[source.id]["blocks"] == "8"
    assert lines[shown.id]["program"] == source.id


def test_a_busy_machine_is_warned_of():
    assert "BUSY" not in terminal(whole_run())
    run = with_environment(whole_run(), load=9.22)
    for text in (terminal(run), markdown(run)):
        assert "BUSY MACHINE: load 9.2 on 4 cores before the run." in text
    quiet = Conditions(match=0, block=0, others=0.01)
    blocks = [quiet, quiet.but(others=None)]
    assert "BUSY" not in terminal(run.but(blocks=blocks))  # while steps were timed nothing else ran
    blocks += [quiet.but(others=0.2), quiet.but(stolen=0.1)]
    said = " ".join(markdown(run.but(blocks=blocks)).split())
    assert "BUSY MACHINE: in 2 of 3 blocks other programs took more than 5% of the cores" in said


def test_limited_instructions_are_told_beside_the_machine():
    run = with_environment(whole_run(), isa_limits={"ONEDNN_MAX_CPU_ISA": "AVX2"})
    for text in (terminal(run), markdown(run)):
        assert "limited by ONEDNN_MAX_CPU_ISA AVX2" in " ".join(text.split())


def test_missing_figures_are_dashes_and_never_zero():
    nothing = {"memory": None, "metrics": {}, "accuracy": None, "certificate": None}
    run = with_case(whole_run(), BF16, timing=Timing(), evidence=None, **nothing)
    run = run.but(noise_floor=NoiseFloor(), environment=Environment())
    for text in (terminal(run), markdown(run)):
        assert not re.search(r"\bnan\b|\bNone\b|\binf\b", text)
    rows = [
        row(terminal(run), f"digits-cnn · {title}", 64, "bf16")
        for title in ("Speed", "First call", "Accuracy")
    ]
    assert [line.split()[1] for line in rows] == [DASH] * 3


def test_a_run_without_any_figure_still_reports():
    run = whole_run().but(cases=[], comparisons=[], techniques={}, finished=False)
    assert "NOT FINISHED" in terminal(run)
    assert markdown_tables(markdown(run))[0][0][0] == "framework"
    assert csv_export.csv_text(run).count("\n") == 1  # the header alone


def only(folder, technique):
    """What a run of one technique by name shows: its rows of a published record."""
    run = load(ROOT / folder)
    cases = [case for case in run.cases if case.technique == technique]
    ids = {case.id for case in cases}
    pairs = [c for c in run.comparisons if {c.numerator, c.denominator} <= ids]
    return run.but(cases=cases, comparisons=pairs)


def first_screen(run):
    return " ".join(answered(run, 80).split())


@pytest.mark.parametrize(
    ("folder", "technique"), [("docs/recipes", "checkpoints"), ("docs", "batch_size_finder")]
)
def test_where_no_aim_has_a_figure_the_terminal_does_not_say_that_nothing_gained(folder, technique):
    said = first_screen(only(folder, technique))
    assert "no row beside the baselines has a figure that an aim asks for" in said
    assert "Nothing was shown" not in said


def test_a_star_is_explained_where_nothing_gains_too():
    names = "feature_distillation", "discrepancy"
    starred, plain_one = (first_screen(only("docs", name)) for name in names)
    assert "Nothing was shown to gain" in starred
    assert "Nothing was shown to gain" in plain_one
    assert "PT* no gain shown (1 tried" in starred
    assert "*: its plain code is ahead." in starred
    assert "*" not in plain_one


def test_what_was_measured_once_says_so_where_no_gain_is_shown():
    said = first_screen(only("docs", "gradient_accumulation"))
    assert re.search(r"no gain shown \(\d tried, measured once\)", said)


def test_the_terminal_keeps_to_narrower_and_wider_screens():
    for width in (60, 72, 100, 200):
        widest = max(map(columns, terminal(whole_run(), width=width).splitlines()))
        assert widest <= width
    assert "bf16_fp32_head  0.456 (0.447–0.465)" in terminal(whole_run())  # nothing wraps at 80


# Nothing in a record can harm it -----------------------------------------------------------------

HOSTILE = [
    "a | b",
    "two\nlines\r\nand more",
    "<script>alert(1)</script> &amp; <!-- table:end -->",
    "\x1b[31mred\x1b[0m\x07\x00 \x9b2J",
    "**bold** _it_ `code` ~~gone~~ [text](javascript:x) ![i](x)",
    "# title",
    "- item",
    "1. item",
    "---",
    "back\\slash \\| $x$ {{ command }} {% raw %}",
    "right-to-left \u202e and zero\u200bwidth \ud800",
    "漢字かな交じり文" * 12,
    "x" * 300,
    "",
]


def renamed(name: str) -> Record:
    """The record with `name` as a variant, a title, a task, a reason and a version."""
    run = whole_run()

    def of(entry):
        return entry.but(
            task=name if entry.task == "text-gpt" else entry.task,
            variant=name if entry.variant == "bf16" else entry.variant,
            reason=name if entry.reason else None,
        )

    first, *cases = map(of, run.cases)
    notes = TechniqueNotes(title=name, notes=[name, "plain"], differs_by_design=[name])
    control, *controls = run.noise_floor.controls
    return run.but(
        cases=[first.but(evidence={name: {name: 3}}), *cases],
        comparisons=list(map(of, run.comparisons)),
        techniques={"mixed_precision": notes},
        environment=run.environment.but(cpu=name, isa=[name], packages={"pt": {name: name}}),
        noise_floor=run.noise_floor.but(controls=[control.but(task=name, verdict=name), *controls]),
        command=name,
    )


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_terminal_neutralises(name):
    text = terminal(renamed(name))
    assert all(c.isprintable() or c == "\n" for c in text)
    assert max(map(columns, text.splitlines())) <= 80
    text.encode()


@functools.cache
def shapes_of_a_plain_name() -> list[list[int]]:
    """How many cells each row of each table has."""
    return [list(map(len, table)) for table in markdown_tables(markdown(renamed("plain")))]


FOLD = re.compile(r"<details><summary>[^<>]*</summary>\n|</details>\n")


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_markdown_shows_names_literally(name):
    text = markdown(renamed(name))
    allowed = {"text", "strong_open", "strong_close"}
    for token in tokens(text):
        assert token.type not in ("code_block", "fence", "hr")
        assert token.type != "html_block" or FOLD.fullmatch(token.content)
        for child in token.children or []:
            assert child.type in allowed, (child.type, token.content)
            assert not child.attrs
    shapes = [list(map(len, table)) for table in markdown_tables(text)]
    assert shapes == shapes_of_a_plain_name()
    bullets = [t.level for t in tokens(text) if t.type == "list_item_open"]
    assert set(bullets) == {1}
    text.encode()


def test_markdown_escape_gives_the_text_back():
    for name in HOSTILE:
        (inline,) = [t for t in tokens(f"- x {escape(name)}") if t.type == "inline"]
        assert "".join(c.content for c in inline.children) == f"x {plain(name)}".strip()


words = st.text(max_size=60) | st.sampled_from(HOSTILE)
finite = st.floats(-1e90, 1e90) | st.integers(-(10**12), 10**12)
numbers = st.none() | finite
pairs = st.none() | st.tuples(finite, finite)
above_zero = st.floats(1e-9, 1e9)
times = st.none() | above_zero
bounds = st.none() | st.tuples(above_zero, above_zero)
trees = st.recursive(
    st.none() | st.booleans() | words | numbers,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
tasks = st.sampled_from(["digits-cnn", "text-gpt", "a | b\n"])
variants = st.sampled_from(["fp32", "bf16"]) | words
batches = st.sampled_from([4, 64, 10**9])
memories = st.builds(
    Memory,
    **{
        f"{part}_bytes": numbers
        for part in ("import", "build", "steady_peak", "parameters", "gradients", "optimizer")
    },
    device_peak=st.none() | st.fixed_dictionaries({"allocated": numbers, "reserved": numbers}),
)
accuracies = st.builds(
    Accuracy,
    metric=words,
    mean=numbers,
    ci=pairs,
    difference=st.none()
    | st.builds(AccuracyDifference, mean=numbers, ci=pairs, verdict=st.none() | words),
)
metrics = st.builds(Metric, value=numbers, unit=words, ci=st.none() | st.tuples(numbers, numbers))
NAMES = ("samples_per_s", "share_of_peak", "cold_first_calls_s", "break_even_steps", "peak")


@st.composite
def cases(draw) -> Case:
    framework, variant = draw(st.sampled_from(["pt", "tf", "jax"])), draw(variants)
    task, batch = draw(tasks), draw(batches)
    timing = st.builds(
        Timing, cold_first_call_s=times, warm_first_call_s=times, median_s=times, ci_s=bounds
    )
    return Case(
        id=f"x/{task}-{batch}/{framework}/{variant}",
        technique="x",
        framework=framework,
        flavour=draw(st.sampled_from([None, "keras3", "tf_keras"])),
        variant=variant,
        role=draw(st.sampled_from(["baseline", "variant", "control"])),
        task=task,
        batch_size=batch,
        status=draw(st.sampled_from(["OK", "OK", "FAILED", "NOT_APPLIED", "UNSUPPORTED"])),
        reason=draw(st.none() | words),
        timing=draw(timing),
        memory=draw(st.none() | memories),
        accuracy=draw(st.none() | accuracies),
        artifact_bytes=draw(numbers),
        metrics={name: draw(metrics) for name in NAMES},
        certificate=draw(st.none() | st.builds(Certificate, losses=st.lists(numbers))),
        evidence=draw(st.none() | st.dictionaries(words, trees, max_size=3)),
    )


@st.composite
def records(draw) -> Record:
    some = draw(st.lists(cases(), max_size=6))
    ids = st.sampled_from([case.id for case in some] + ["gone"])
    comparisons = st.builds(
        Comparison,
        technique=st.just("x"),
        variant=variants,
        task=tasks,
        batch_size=batches,
        kind=st.sampled_from(["framework", "baseline", "control"]),
        numerator=ids,
        denominator=ids,
        ratio=times,
        ci=bounds,
        sd=st.none() | st.floats(0, 10),
        n=st.none() | st.integers(1, 20),
        verdict=st.none() | st.sampled_from(["faster", "not comparable"]) | words,
        reason=st.none() | words,
    )
    environment = st.builds(
        Environment,
        cpu=st.none() | words,
        isa=st.lists(words, max_size=3),
        gpu=st.none() | st.dictionaries(words, trees, max_size=3),
        peak_flops=st.none() | st.dictionaries(words, finite, max_size=3),
        load=numbers,
        packages=st.dictionaries(words, st.none() | st.dictionaries(words, words), max_size=2),
    )
    control = st.builds(Control, framework=words, task=words, ratio=times)
    notes = st.builds(TechniqueNotes, title=words, notes=st.lists(words, max_size=2))
    return Record(
        schema_version=3,
        command=draw(words),
        effort=draw(st.sampled_from(["quick", "default"])),
        started=draw(words),
        finished=draw(st.booleans()),
        environment=draw(environment),
        noise_floor=NoiseFloor(controls=draw(st.lists(control, max_size=2))),
        techniques={"x": draw(notes)},
        tasks={"digits-cnn": TASKS["digits-cnn"], "text-gpt": TaskFacts()},
        cases=some,
        comparisons=draw(st.lists(comparisons, max_size=4)),
    )


@settings(max_examples=40, deadline=None)
@given(records(), st.sampled_from([80, 80, 60, 120]))
def test_any_record_fits_the_terminal_and_makes_whole_tables(run, width):
    text = terminal(run, width=width)
    for line in text.splitlines():
        assert columns(line) <= width, line
    assert all(c.isprintable() or c == "\n" for c in text)
    page = markdown(run)
    tables = markdown_tables(page)
    for table in tables:
        assert len({len(line) for line in table}) == 1
    bars = sum(line.startswith("|") for line in page.splitlines())
    assert bars == sum(len(table) + 1 for table in tables)
    for made in (page, html_page.html(run), csv_export.csv_text(run)):
        made.encode()


@given(st.text(alphabet=st.characters() | st.sampled_from(" -/")), st.integers(2, 40))
def test_wrap_loses_nothing_but_blanks(text, width):
    text = plain(text)
    lines = wrap(text, width)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert all(columns(line) <= width for line in lines)


def test_wrap_breaks_at_blanks_and_within_a_word_that_is_too_long_alone():
    assert wrap("sub-model scikit-learn", 12) == ["sub-model", "scikit-learn"]
    assert wrap("+1 -1.5", 5) == ["+1", "-1.5"]
    assert wrap("12.5 (11.3–13.8)", 11) == ["12.5", "(11.3–13.8)"]
    assert wrap("x" * 25, 10) == ["x" * 10, "x" * 10, "x" * 5]
    assert wrap("two\nlines", 10) == ["two", "lines"]


# Figures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (5.2345, "5.23"),
        (0.021, "0.0210"),
        (99.96, "100"),
        (12345, "12,300"),
        (-0.5, "-0.500"),
        (1e-7, "1.00e-07"),
        (3.1e9, "3.10e+09"),
        (None, DASH),
    ],
)
def test_number(value, text):
    assert formatting.number(value) == text


def test_interval_has_the_decimals_of_its_estimate():
    assert formatting.interval([9.876, 10.234], like=9.99) == "9.88–10.23"
    assert formatting.interval([None, 1.0]) == DASH


def test_plus_minus_rounds_to_the_interval():
    assert formatting.plus_minus(97.3123, [97.07, 97.55]) == "97.31 ± 0.24"
    assert formatting.plus_minus(2.10512, [2.10312, 2.10712]) == "2.1051 ± 0.0020"
    assert formatting.plus_minus(0.2, None, signed=True) == "+0.20"
    assert formatting.plus_minus(0.0, [0.0, 0.0]) == "0.00 ± 0.00"
    assert formatting.plus_minus(None, [1.0, 2.0]) == DASH


def test_compact_and_merge():
    proofs = [{"dtypes": {"matmul": {"bfloat16": 3}}, "retraces": 0}, {"retraces": 2, "ok": True}]
    assert formatting.compact(merge(proofs)) == "dtypes: matmul: bfloat16 3 · retraces 0–2 · ok yes"
    assert formatting.compact({}) == formatting.compact(None) == formatting.compact("") == DASH


# Reading and writing -----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "results.json").write_bytes(encode(whole_run()))
    return tmp_path


def test_load_takes_the_file_or_its_folder(folder):
    for path in (folder, str(folder / "results.json")):
        assert encode(load(path)) == encode(whole_run())


def broken(**changes) -> str:
    return json.dumps(json.loads(encode(whole_run())) | changes)


def edited(part: str, **changes) -> str:
    """The record with fields of a part of its first case changed."""
    results = json.loads(encode(whole_run()))
    results["cases"][0][part] |= changes
    return json.dumps(results)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (broken()[:-40], "not JSON, or cut off"),
        ("", "not JSON, or cut off"),
        ("[1, 2]", "not a record of twinbench"),
        ('{"machine_info": {}, "benchmarks": []}', "not a record of twinbench"),
        (broken(schema_version=4), "schema 4 is newer than this twinbench, which reads 3"),
        (broken(schema_version=2), "schema 2 is older than this twinbench, which reads 3"),
        (broken(schema_version=True), "not a record of twinbench"),
        (broken(cases={}), "the record: cases: expected `array`, got `object`"),
        (broken(cases=[7]), "cases 0: expected `object`, got `int`"),
        (broken(cases=[{"id": "x"}]), "cases 0: object missing required field `technique`"),
        (broken(comparisons=[{}]), "comparisons 0: object missing required field `technique`"),
        (broken(techniques={"x": 3}), "techniques: expected `object`, got `int`"),
        (broken(finished="yes"), "finished: expected `bool`, got `str`"),
        (broken(environment={"load": nan}), "not JSON"),
        (edited("timing", median_s="fast"), "cases 0: timing: median_s: expected `float | null`"),
        (edited("timing", ci_s=[0.1]), "timing: ci_s: expected `array` of length 2"),
        (edited("timing", step_s={"x": {"0": [0.1]}}), "match x, block 0: expected numbers"),
        (
            edited("timing", step_s={"0": {"0": [1e300]}}),
            "timing: step_s 0: expected `float` <= 100000.0",
        ),
        (broken(looks=[5, 3]), "looks must be at most 10 rising numbers"),
        (edited("memory", steady_peak_bytes=True), "memory: steady_peak_bytes: expected `float"),
        (edited("metrics", samples_per_s=7), "metrics: expected `object`, got `int`"),
        (edited("certificate", losses=None), "certificate: losses: expected `array`, got `null`"),
    ],
)
def test_a_record_that_is_none_gives_one_clear_line(folder, text, message):
    (folder / "results.json").write_text(text, "utf-8")
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load(folder)
    assert str(folder / "results.json") in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_load_says_what_is_not_there_or_no_text(folder):
    with pytest.raises(ValueError, match="no such record; make one with: pytest bench/"):
        load(folder / "nothing.json")
    (folder / "results.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not JSON"):
        load(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_reports_are_made_again_from_the_record_alone(folder):
    for name in FORMATS.values():
        (folder / name).write_text("old")
    assert write_reports(folder) == [folder / name for name in FORMATS.values()]
    assert (folder / "report.md").read_text("utf-8") == markdown(whole_run())
    assert (folder / "report.html").read_text("utf-8") == html_page.html(whole_run())
    assert (folder / "tables.csv").read_text("utf-8") == csv_export.csv_text(whole_run())
    assert names(folder) == ["report.html", "report.md", "results.json", "tables.csv"]


@pytest.mark.parametrize("name", FORMATS.values())
def test_a_report_that_cannot_be_written_leaves_nothing_half(folder, name):
    (folder / name).mkdir()
    with pytest.raises(ValueError, match=f"{re.escape(name)}: cannot be written"):
        write_reports(folder, [key for key, file in FORMATS.items() if file == name])
    assert names(folder) == sorted([name, "results.json"])


def test_old_reports_stay_where_a_record_is_none(folder):
    write_reports(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    whole = (folder / "results.json").read_text("utf-8")
    (folder / "results.json").write_text(whole[: len(whole) // 2], "utf-8")
    with pytest.raises(ValueError, match="cut off"):
        write_reports(folder)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after.pop("results.json") != before.pop("results.json")
    assert after == before


def test_command_line_as_users_run_it(folder):
    run = functools.partial(workers.parent("commands").run, "bench", "report")

    made = run(str(folder))
    paths = [str(folder / name) for name in FORMATS.values()]
    assert (made.returncode, made.stdout.splitlines()) == (0, paths)
    assert all(Path(path).is_file() for path in paths)
    failed = run(str(folder / "nothing"))
    assert failed.returncode == 2
    assert failed.stderr.count("\n") == 1
    assert "Traceback" not in failed.stderr


def test_every_figure_is_made_again_from_what_was_measured(tmp_path):
    published = load(ROOT / "docs")
    twice = [c.but(ratio=2 * c.ratio) for c in published.comparisons]
    (tmp_path / "results.json").write_bytes(encode(published.but(comparisons=twice)))
    assert command.main([str(tmp_path), "--derive", "--format", "csv"]) == 0
    assert alike(to_builtins(load(tmp_path)), to_builtins(published))


def alike(one, other) -> bool:
    """The same but for last digits: each CPU's instructions add up in an order of their own."""
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[k], other[k]) for k in other)
    if isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return isclose(one, other, rel_tol=1e-9) if isinstance(other, float) else one == other


def test_a_reader_that_has_seen_enough_ends_a_command_quietly(folder):
    line = [sys.executable, "-m", "bench", "report", str(folder), "--format", "terminal"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(line, cwd=ROOT, **pipes) as reported:
        reported.stdout.close()
        assert reported.stderr.read() == b""
        assert reported.wait() == 0


@pytest.mark.parametrize(("name", "file"), FORMATS.items())
def test_one_format_writes_one_file(folder, capsys, name, file):
    assert command.main([str(folder), "--format", name]) == 0
    assert capsys.readouterr().out.strip() == str(folder / file)
    assert names(folder) == sorted([file, "results.json"])


def test_terminal_format_prints_the_tables(folder, capsys):
    assert command.main([str(folder), "--format", "terminal"]) == 0
    assert capsys.readouterr().out == terminal(whole_run())
    assert names(folder) == ["results.json"]


# README ------------------------------------------------------------------------------------------


@pytest.fixture
def page(folder) -> Path:
    path = folder / "README.md"
    path.write_text(f"# Title\n\n{readme.BEGIN}\nold\n{readme.END}\n\nThe rest.\n", "utf-8")
    return path


def test_readme_gets_a_picture_and_which_framework_is_ahead(folder, page):
    check = [str(folder), "--readme", str(page), "--check"]
    assert command.main(check) == 1
    assert "old" in page.read_text("utf-8")
    assert command.main(check[:-1]) == 0
    text = page.read_text("utf-8")
    assert text.startswith("# Title\n\n<!-- table:begin -->\nMeasured on a CPU: ")
    assert "\n<picture>" in text
    assert text.endswith("<!-- table:end -->\n\nThe rest.\n")
    (cases,) = markdown_tables(text)
    assert cases[0] == ["who is ahead", *frameworks.COLUMNS]
    assert any(row[0].startswith("train faster: small CNN, batch") for row in cases[1:])
    for scheme in ("light", "dark"):
        drawn = ElementTree.fromstring((folder / f"docs/gains-{scheme}.svg").read_text("utf-8"))
        assert re.search(r"1\.\d\dx bf16", "".join(drawn.itertext()))
    assert command.main(check) == 0
    (folder / "docs" / "gains-dark.svg").write_text("another chart")
    assert command.main(check) == 1


def test_the_page_of_answers_has_what_to_use_for_each_aim(folder, page):
    assert command.main([str(folder), "--readme", str(page)]) == 0
    text = (folder / readme.ANSWERS).read_text("utf-8")
    decided, more = markdown_tables(text)
    assert decided[0] == more[0] == ["to", "PyTorch", "TensorFlow", "ahead, best of each"]
    assert len(text.partition("| to |")[0].split()) <= 80
    (row,) = [row for row in decided if row[0].startswith("train faster: small CNN on digits,")]
    assert re.match(r"bf16: 1\.\d\dx \(\d\.\d\d–\d\.\d\d\)", row[1])
    assert text.count("<details>") == text.count("</details>") == 1


def numbers_of(run: Record) -> set[str]:
    """Every ratio, either way round, and time of a record, as README.md writes them."""
    ratios = [r for c in run.comparisons if c.ratio for r in (c.ratio, 1 / c.ratio)]
    known = set(map(formatting.number, ratios))
    for case in run.cases:
        if case.timing.median_s:
            known.add(formatting.number(1e3 * case.timing.median_s))
        base = baseline(case, run.cases) or case
        rates = [each.value_of("samples_per_s") for each in (case, base)]
        if all(rates):  # what is not timed has the ratio of its rates
            known.add(formatting.number(rates[0] / rates[1]))
    return known


def test_every_ratio_in_the_answers_is_in_their_record():
    text = (ROOT / readme.ANSWERS).read_text("utf-8")
    known = numbers_of(load(ROOT / "docs"))
    sides = "".join(line.rpartition(" | ")[0] for line in text.splitlines())  # but who is ahead
    ratios = re.findall(r"([\d.]+)x[ ,](?!the memory)", sides)
    assert len(ratios) > 5
    assert set(ratios) <= known


def test_the_picture_has_the_ratios_of_its_record_and_eight_works_at_most():
    drawn = ElementTree.fromstring((ROOT / "docs/gains-light.svg").read_text("utf-8"))
    texts = [element.text or "" for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    ratios = {found[1] for text in texts if (found := re.match(r"([\d.]+)x", text))}
    assert len(ratios) > 5
    assert ratios <= numbers_of(load(ROOT / "docs"))
    works = [text for text in texts if re.match(r"(Train|Predict|Optimizer step,) ", text)]
    assert 3 <= len(works) <= bars.MOST


def test_frameworks_are_compared_by_the_same_kind_of_program():
    """By the record's own comparisons: plain with plain, a technique with the same technique."""
    run = load(ROOT / "docs")
    listed = answers(run)
    for one in bars.chosen(listed):
        if len(one.sides) < 2:
            continue
        pt, tf = one.sides.values()
        for pair in filter(None, (frameworks.plain(pt, tf), frameworks.alike(pt, tf))):
            assert [row.case.framework for row in pair] == ["pt", "tf"]
            assert len({row.is_baseline for row in pair}) == 1
            assert pair[0].is_baseline or len({row.case.technique for row in pair}) == 1


def test_the_sentences_of_readme_are_what_its_table_shows():
    text = (ROOT / "README.md").read_text("utf-8")
    row = r"^\| \*\*predict faster\*\*: (.*?), batch \d+ \| (PyTorch|TensorFlow), ([\d.]+x) "
    rows = re.findall(row, text, re.M)
    assert rows
    (sentence,) = re.findall(r"^- \*\*Predict faster\*\*: with plain code (.*?);", text, re.M)
    for model, leader, gain in rows:
        led = re.search(rf"{leader} for (?:(?!PyTorch|TensorFlow).)*{model} \(([^)]*)\)", sentence)
        assert gain in led[1].split(", ")


def test_large_models_are_said_to_show_arithmetic():
    run = whole_run()
    assert "show overhead" not in markdown(run)
    large = {"text-gpt": "text-gpt-10m"}
    run = run.but(
        cases=[case.but(task=large.get(case.task, case.task)) for case in run.cases],
        tasks=run.tasks | {"text-gpt-10m": run.tasks["text-gpt"]},
    )
    text = markdown(run)
    assert "the framework's overhead decides in small ones, arithmetic in large ones." in text
    assert "GPT on text, batch 16, train step: 11 million parameters" in text


def test_our_own_readme_fits_its_reader():
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 150
    between = text.partition(readme.BEGIN)[2].partition(readme.END)[0]
    (cases,) = markdown_tables(between)
    assert len(cases) - 1 <= frameworks.MOST
    published = load(ROOT / "docs" / "results.json")
    assert machine_class.words(published.environment) in between


def test_the_answers_say_how_long_their_run_took():
    run, seconds = with_environment(whole_run(), logical_cores=6), {"total": 3010.0}
    seconds |= {"first_table": 290.0}
    said = "The run took 50 minutes on 6 cores: a first table after 5"
    assert f"{said}." in readme.every_answer([run.but(seconds=seconds)])
    seconds |= {"intervals": 1090.0}
    whole = f"{said}, all times with intervals after 18."
    assert whole in readme.every_answer([run.but(seconds=seconds)])
    seconds |= {"first_table": None}
    assert "The run took" not in readme.every_answer([run.but(seconds=seconds)])


def test_an_answer_links_its_technique_and_says_what_its_gain_is_over():
    """Of our own, which another test holds to its record."""
    said = (ROOT / readme.ANSWERS).read_text("utf-8")
    pages = re.findall(r"\]\((techniques/\S+\.md)\)", said)
    assert len(pages) > 20
    assert all((ROOT / "docs" / page).is_file() for page in pages)
    rows = {line.split("|")[1].strip(): line for line in said.splitlines() if line[:4] == "| **"}
    quantized = rows["**predict faster**: small CNN on digits, batch 128, 33 thousand parameters"]
    assert quantized.count("over “float32”") == 2
    proven = "**train in less memory**: deep GPT with dropout on text, batch 16"
    proven += ", 2.4 million parameters"
    assert rows[proven].count("same work, proven for GPT on text") == 2
    plain = rows["**train faster**: GPT on text, batch 2, 11 million parameters"]
    assert "over" not in plain


def test_no_name_in_a_record_breaks_the_markers_of_readme(page):
    text = page.read_text("utf-8")
    expected = readme.with_tables(text, [whole_run()])
    for name in HOSTILE:
        once = readme.with_tables(text, [renamed(name)])
        assert readme.with_tables(once, [whole_run()]) == expected


def test_readme_of_a_quick_run_says_so(page):
    assert "PROVISIONAL" in readme.with_tables(page.read_text("utf-8"), [whole_run("quick")])


@pytest.mark.parametrize(
    ("text", "message"),
    [("no markers", "no text between"), (f"{readme.END} {readme.BEGIN}", "no text between")],
)
def test_readme_without_markers_is_left_alone(folder, page, capsys, text, message):
    page.write_text(text, "utf-8")
    assert command.main([str(folder), "--readme", str(page)]) == 2
    assert message in capsys.readouterr().err
    assert page.read_text("utf-8") == text


def test_readme_needs_a_technique_that_ran(page):
    with pytest.raises(ValueError, match="no technique that ran"):
        readme.with_tables(page.read_text("utf-8"), [whole_run().but(cases=[])])


def test_our_own_readme_shows_the_committed_record():
    options = ["--readme", str(ROOT / "README.md"), "--check"]
    assert command.main([str(ROOT / "docs"), *options]) == 0


@pytest.mark.parametrize(
    "place", sorted((ROOT / "docs").glob("**/report.md")), ids=lambda path: path.parent.name
)
def test_a_published_report_is_what_its_record_gives(place):
    assert place.read_text("utf-8") == markdown(load(place.parent))


# What a probe reports ----------------------------------------------------------------------------


def with_metrics(made: dict[str, Metric]) -> Record:
    """A run whose bf16 rows have these figures of a probe, too."""
    run = whole_run()
    cases = [
        case.but(metrics=case.metrics | made)
        if (case.variant, case.status) == ("bf16", "OK")
        else case
        for case in run.cases
    ]
    return run.but(cases=cases)


def probed(count: int, name: str = "figure") -> Record:
    """`count` figures of a probe, the first of them repeated."""
    made = {
        f"{name}_{n}": Metric(value=10.0 + n, unit="s", samples=[n + 0.5]) for n in range(count)
    }
    made[f"{name}_0"] = made[f"{name}_0"].but(samples=[11.5, 8.25, 10.0])
    return with_metrics(made)


@pytest.mark.parametrize("count", [2, 4, 5, 8, 20])
def test_figures_of_a_probe_fit_80_columns(count):
    """Side by side while they are few, else a line for each case, below each other if need be."""
    text = terminal(probed(count))
    assert max(map(columns, text.splitlines())) <= 80
    start = text.index("digits-cnn · Measured apart")
    table = text[start : text.index("text-gpt · Speed")]
    for n in range(count):
        assert len(re.findall(rf"(?<![\d.]){10 + n}\.0(?![\d.])", table)) >= 2, table  # both sides
    assert ("PyTorch ──" in table) == (count <= 4)


def test_many_figures_of_a_probe_break_no_word():
    text = terminal(probed(8, "unmistakable"))
    table = text[text.index("digits-cnn · Measured apart") : text.index("text-gpt · Speed")]
    assert table.count("unmistakable") >= 8  # whole, in each head
    assert table.count("(continued)") >= 1
    parts = table.split("(continued)")
    assert all("bf16" in part and "framework" in part for part in parts)


def test_where_a_table_goes_on_the_framework_stands_over_its_columns_again():
    text = terminal(probed(4, "unmistakable"))
    table = text[text.index("digits-cnn · Measured apart") : text.index("text-gpt · Speed")]
    first, rest = table.split("(continued)")
    assert "PyTorch ──" in first
    assert all("TensorFlow ──" in part for part in (first, rest))


def test_no_interval_is_broken_between_its_bounds():
    even = {"value": 12_500.0, "ci": (11_300.0, 13_800.0)}
    text = terminal(with_case(small_run(), BF16, metrics={"break_even_steps": even}))
    table = text[text.index("digits-cnn · First call against") :].split("\n\n")[0]
    assert "(17.0–19.0)" in table
    assert "(11,300–13,800)" in table
    assert "(lowest–highest)" in table


def test_every_repetition_is_in_the_page_only():
    run = probed(5)
    text = html_page.html(run)
    assert text.count("11.5 8.25 10.0") >= 2
    assert "Every repetition" in text
    assert "Every repetition" not in terminal(run) + markdown(run)
    assert "Every repetition" not in html_page.html(whole_run())


def test_samples_a_second_by_batch_size_have_a_table_of_their_own():
    rates = {
        f"rate_{threads}_threads_batch_{size}": Metric(
            value=100.0 * threads + size, unit="samples/s", samples=[100.0 * threads + size]
        )
        for threads in (1, 2)
        for size in (1, 8, 64)
    }
    text = terminal(with_metrics(rates))
    assert max(map(columns, text.splitlines())) <= 80
    table = block(text, "digits-cnn · Samples/s by batch size")
    (line, *_) = [line for line in table if "PyTorch" in line and " 2 " in line]
    assert line.split()[-4:] == ["2", "201", "208", "264"]
    assert "Measured apart" not in text
    assert "Samples/s by batch size" not in terminal(whole_run())
