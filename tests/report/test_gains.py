"""What a gain is compared with, what it costs in memory, and which programs are unlike."""

from __future__ import annotations

import pytest

from bench.analysis.questions import answers
from bench.analysis.ranking import GOALS, rank, works
from bench.report import bars, frameworks, readme, tables
from bench.report.answer import text
from tests.analysis.test_ranking import GAIN, KEPT, MORE, fast, row


def picture(run):
    return [shape.text for shape in bars.chart(answers(run)).shapes if shape.kind == "label"]


def terminal(run):
    return " ".join(tables.answered(run).split())


def int8(framework, **more):
    """A file of int8, which has a runtime of its framework."""
    more = {"framework": framework, "mode": "predict", "time": GAIN, "size": 0.3} | more
    return row("post_training_quantization", "static_int8", changes_math=True, **more)


@pytest.mark.parametrize(("peak", "is_said"), [(1.4, True), (1.15, False), (0.7, False)])
def test_a_gain_in_time_says_that_it_costs_memory_where_that_was_shown(peak, is_said):
    run = fast(row(time=GAIN, peaks=[peak, 0.999 * peak, 1.001 * peak]))
    chosen = "\n".join(text([rank(works(run)[0], GOALS["train-speed"])], 1000))
    for said in (" ".join(picture(run)), terminal(run), readme.every_answer([run]), chosen):
        assert ("at 1.4x the memory" in said) is is_said
        assert ("x the memory" in said) is is_said


UNLIKE = "int8, TorchInductor against int8, LiteRT"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([int8("pt"), int8("tf")], f"{UNLIKE}*"),
        ([int8("pt", accuracy=KEPT), int8("tf", accuracy=KEPT)], UNLIKE),
        ([row(time=GAIN), row(time=GAIN, framework="tf")], "changed"),
    ],
)
def test_a_comparison_of_frameworks_names_unlike_programs_and_stars_unknown_accuracy(rows, words):
    (line, *_) = frameworks.table(answers(fast(*rows))).rows
    assert line[2] == f"no difference shown: {words}"
    (best_of_each, *_) = readme.every_answer([fast(*rows)]).partition("| **")[2].splitlines()
    assert ("unlike programs" in best_of_each) == (words == UNLIKE)


def test_the_first_sentences_say_who_leads_and_keep_unlike_programs_apart():
    led = [row(time=MORE), row(time=(0.9, 0.88, 0.92), framework="tf")]
    assert frameworks.overview(answers(fast(*led))) == {
        "train faster": "with the same technique PyTorch for small CNN (1.80x, changed)",
        "train in less memory": "not compared",
    }
    unlike = [int8("pt", time=MORE, accuracy=KEPT), int8("tf", accuracy=KEPT)]
    assert "the same technique" not in str(frameworks.overview(answers(fast(*unlike))))


def test_a_gain_over_a_file_is_not_shown_as_one_over_plain_code():
    run = fast(row(time=GAIN), int8("pt"))
    shown = picture(run)
    place = shown.index(bars.FILES)
    assert shown.index("1.67x changed") < place < shown.index("1.67x* int8, TorchInductor")
    assert "int8, TorchInductor: 1.67x (1.61–1.72) over “base”" in terminal(run)
    assert "changed: 1.67x (1.61–1.72) over" not in terminal(run)
    assert bars.FILES not in picture(fast(row(time=GAIN)))
