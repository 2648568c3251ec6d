"""Graphs of twins side by side, and a sentence where twins are not equally fast."""

from __future__ import annotations

import pytest

from bench.report.content import build
from bench.report.page import html
from bench.report.tables import markdown, terminal
from tests.records import find_case, small_run, with_case, with_comparison

PAIR = ("digits-cnn-64/pt/bf16", "digits-cnn-64/tf/bf16")
GRAPHS = {
    "pt": {"exported": {"Conv": 4, "Relu": 4}, "optimized": {"Conv": 4}},
    "tf": {"exported": {"Conv": 4, "Relu": 4, "Transpose": 2}, "optimized": {"Conv": 4}},
}


def with_graphs(run, **graphs):
    """The run with these graphs in the proofs of a pair of twins, by framework."""
    for name, side in zip(PAIR, ("pt", "tf"), strict=True):
        run = with_case(run, name, evidence={"graph_operators": graphs[side]})
    return run


def with_verdict(run, verdict):
    return with_comparison(run, *PAIR, verdict=verdict)


@pytest.fixture
def run():
    """With graphs of one pair of twins, of which PyTorch is slower."""
    graphs = {side: {"digits-cnn": stages} for side, stages in GRAPHS.items()}
    slower = {"ratio": 1.2, "ci": (1.1, 1.3), "verdict": "slower"}
    return with_comparison(with_graphs(small_run(), **graphs), *PAIR, **slower)


SENTENCE = (
    "bf16, batch 64: PyTorch ÷ TensorFlow is 1.200 (1.100–1.300), slower; exported, PyTorch's "
    "graph has 8 nodes, TensorFlow's 10 (Transpose 0 and 2); optimized, PyTorch's graph has 4 "
    "nodes, TensorFlow's 4 (the same operators)."
)


def task_of(run):
    (technique,) = build(run).techniques
    (task,) = technique.tasks
    return task


def test_operators_that_differ_are_named_where_twins_are_not_equivalent(run):
    assert task_of(run).graphs == [SENTENCE]


@pytest.mark.parametrize("verdict", ["equivalent", "not comparable", None])
def test_nothing_is_explained_that_needs_no_explanation(run, verdict):
    assert task_of(with_verdict(run, verdict)).graphs == []


@pytest.mark.parametrize("verdict", ["faster", "inconclusive", "noisy"])
def test_whatever_is_not_equivalent_is_explained(run, verdict):
    (said,) = task_of(with_verdict(run, verdict)).graphs
    assert f", {verdict}; exported, " in said


def test_nodes_and_operators_stand_side_by_side(run):
    (table,) = (t for t in task_of(run).tables if t.title == "Operators of the graphs")
    heads = [(column.group, column.head) for column in table.columns[1:]]
    assert heads == [(f, s) for f in ("PyTorch", "TensorFlow") for s in ("exported", "optimized")]
    assert table.rows == [
        ["bf16", "", "", "", ""],
        ["nodes", "8", "4", "10", "4"],
        ["Conv", "4", "4", "4", "4"],
        ["Relu", "4", "0", "4", "0"],
        ["Transpose", "0", "0", "2", "0"],
    ]


def test_a_side_without_a_graph_has_a_dash(run):
    proof = find_case(small_run(), PAIR[1]).evidence
    cases = [case.but(evidence=proof) if case.id.endswith(PAIR[1]) else case for case in run.cases]
    task = task_of(run.but(cases=cases))
    (table,) = (t for t in task.tables if t.title == "Operators of the graphs")
    assert table.rows[1] == ["nodes", "8", "4", "—", "—"]
    assert task.graphs == []


def test_every_report_has_both_and_the_proofs_do_not_repeat_them(run):
    title = "How the graphs of twins differ"
    for text in (terminal(run), markdown(run), html(run)):
        told, _, _ = text.partition('<pre id="json"')  # the record itself, which the page has too
        joined = " ".join(told.replace("\\", "").split())
        assert title in joined
        assert "Transpose 0 and 2" in joined
        assert "Operators of the graphs" in joined
        assert "graph_operators" not in joined
    assert all(len(line) <= 80 for line in terminal(run).splitlines())
    for text in (terminal(small_run()), markdown(small_run()), html(small_run())):
        assert title not in text


@pytest.mark.parametrize(
    "graphs", [None, [], "x", {"digits-cnn": 3}, {"digits-cnn": {"exported": [1]}}, {"other": {}}]
)
def test_a_record_with_something_else_there_is_read_all_the_same(graphs):
    run = with_graphs(small_run(), pt=graphs, tf=graphs)
    assert task_of(run).graphs == []
    assert terminal(run)
