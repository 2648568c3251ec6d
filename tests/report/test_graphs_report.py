"""Graphs of twins side by side, and a sentence where twins are not equally fast."""

from __future__ import annotations

import copy

import pytest

from bench.report.content import build
from bench.report.page import html
from bench.report.tables import markdown, terminal
from tests.report.test_report import case, comparison, small

PAIR = ("digits-cnn-64/pt/bf16", "digits-cnn-64/tf/bf16")
GRAPHS = {
    "pt": {"exported": {"Conv": 4, "Relu": 4}, "optimized": {"Conv": 4}},
    "tf": {"exported": {"Conv": 4, "Relu": 4, "Transpose": 2}, "optimized": {"Conv": 4}},
}


@pytest.fixture
def results():
    """A record with graphs in the proofs of one pair of twins, found slower."""
    found = copy.deepcopy(small())
    for name in PAIR:
        held = GRAPHS["pt" if "/pt/" in name else "tf"]
        case(found, name)["evidence"]["graph_operators"] = {"digits-cnn": held}
    comparison(found, *PAIR).update(ratio=1.2, ci=[1.1, 1.3], verdict="slower")
    return found


SENTENCE = (
    "bf16, batch 64: PyTorch ÷ TensorFlow is 1.200 (1.100–1.300), slower; exported, PyTorch's "
    "graph has 8 nodes, TensorFlow's 10 (Transpose 0 and 2); optimized, PyTorch's graph has 4 "
    "nodes, TensorFlow's 4 (the same operators)."
)


def task_of(results):
    (technique,) = build(results).techniques
    (task,) = technique.tasks
    return task


def test_operators_that_differ_are_named_where_twins_are_not_equivalent(results):
    assert task_of(results).graphs == [SENTENCE]


@pytest.mark.parametrize("verdict", ["equivalent", "not comparable", None])
def test_nothing_is_explained_that_needs_no_explanation(results, verdict):
    comparison(results, *PAIR)["verdict"] = verdict
    assert task_of(results).graphs == []


@pytest.mark.parametrize("verdict", ["faster", "inconclusive", "noisy"])
def test_whatever_is_not_equivalent_is_explained(results, verdict):
    comparison(results, *PAIR)["verdict"] = verdict
    (said,) = task_of(results).graphs
    assert f", {verdict}; exported, " in said


def test_nodes_and_operators_stand_side_by_side(results):
    (table,) = (t for t in task_of(results).tables if t.title == "Operators of the graphs")
    heads = [(column.group, column.head) for column in table.columns[1:]]
    assert heads == [(f, s) for f in ("PyTorch", "TensorFlow") for s in ("exported", "optimized")]
    assert table.rows == [
        ["bf16", "", "", "", ""],
        ["nodes", "8", "4", "10", "4"],
        ["Conv", "4", "4", "4", "4"],
        ["Relu", "4", "0", "4", "0"],
        ["Transpose", "0", "0", "2", "0"],
    ]


def test_a_side_without_a_graph_has_a_dash(results):
    del case(results, PAIR[1])["evidence"]["graph_operators"]
    task = task_of(results)
    (table,) = (t for t in task.tables if t.title == "Operators of the graphs")
    assert table.rows[1] == ["nodes", "8", "4", "—", "—"]
    assert task.graphs == []


def test_every_report_has_both_and_the_proofs_do_not_repeat_them(results):
    title = "How the graphs of twins differ"
    for text in (terminal(results), markdown(results), html(results)):
        told, _, _ = text.partition('<pre id="json"')  # the record itself, which the page has too
        joined = " ".join(told.replace("\\", "").split())
        assert title in joined
        assert "Transpose 0 and 2" in joined
        assert "Operators of the graphs" in joined
        assert "graph_operators" not in joined
    assert all(len(line) <= 80 for line in terminal(results).splitlines())
    for text in (terminal(small()), markdown(small()), html(small())):
        assert title not in text


@pytest.mark.parametrize(
    "graphs", [None, [], "x", {"digits-cnn": 3}, {"digits-cnn": {"exported": [1]}}, {"other": {}}]
)
def test_a_record_with_something_else_there_is_read_all_the_same(results, graphs):
    for name in PAIR:
        case(results, name)["evidence"]["graph_operators"] = graphs
    assert task_of(results).graphs == []
    assert terminal(results)
