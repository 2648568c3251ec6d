"""The priority matrix and the path of questions: rows that gain, by intervals, and their price."""

from __future__ import annotations

import json

import pytest

from bench import claims
from bench import priorities as command
from bench.analysis.priorities import ACCURACY, SIZE, TIME, Cost, path, priorities, rows
from bench.harness.schedule import techniques
from bench.report.priorities import ends, matrix, page, text
from bench.report.text import cells
from tests.analysis.planted import planted
from tests.analysis.test_choose import DOCS
from tests.report.test_report import record

BF16 = {"technique": "mixed_precision", "variant": "bf16"}
GAIN, NOTHING, LOSS = (0.5, 0.48, 0.52), (1.0, 0.98, 1.02), (2.0, 1.9, 2.1)


def row(**given):
    return rows(planted(BF16 | given))[0]


@pytest.mark.parametrize(
    ("given", "figure", "expected"),
    [
        ({"time": GAIN}, TIME, True),
        ({"time": NOTHING}, TIME, False),
        ({"time": LOSS}, TIME, False),
        ({"time": (0.98, 0.975, 0.985)}, TIME, False),  # less than 3%
        ({"time": (0.5,)}, TIME, False),  # one block
        ({"time": GAIN, "accuracy": (-3.0, -4.0, -2.0)}, TIME, False),
        ({"time": GAIN, "accuracy": (0.1, -0.3, 0.5)}, TIME, True),
        ({"size": 0.3}, SIZE, True),
        ({"accuracy": (1.0, 0.5, 1.5)}, ACCURACY, True),
        ({"accuracy": (0.2, -0.1, 0.5)}, ACCURACY, False),
    ],
)
def test_a_row_gains_only_where_its_whole_interval_says_so_and_accuracy_is_kept(
    given, figure, expected
):
    found = row(**given)
    assert found.gains(figure) is expected
    assert found.pays is expected or figure != TIME


def test_accuracy_that_was_not_measured_is_no_gain():
    found = rows(planted(BF16 | {"time": GAIN, "changes_math": True}))[0]
    assert not found.pays
    leaf = next(leaf for each in path(planted(BF16 | {"time": GAIN, "changes_math": True}))
                for leaf in each.leaves if leaf.figure == TIME)  # fmt: skip
    assert (leaf.rows, leaf.unproven, leaf.refused) == ([], 0, 1)
    said = "none advised: 1 with a gain, but not shown to keep accuracy"
    assert ends(leaf) == [said]


@pytest.mark.parametrize(
    ("accuracy", "lost"),
    [((-0.2, -0.5, 0.1), False), ((-3.0, -4.0, -2.0), True), ((-3.0,), False)],
)
def test_accuracy_is_lost_where_its_interval_says_so(accuracy, lost):
    assert row(accuracy=accuracy, changes_math=True).accuracy.lost is lost
    assert row(changes_math=True).accuracy.lost is False


def two_sizes() -> dict:
    return planted(
        BF16 | {"time": NOTHING},
        BF16 | {"time": GAIN, "task": "photos-resnet18"},
        {"technique": "compilation", "variant": "compiled", "task": "photos-resnet18"}
        | {"time": (0.45, 0.30, 0.66)},
    )


def test_the_matrix_tells_small_models_from_large_ones():
    found = {p.technique: p for p in priorities(two_sizes(), {})}
    assert found["mixed_precision"].paid(large=False) == (0, 1)
    assert found["mixed_precision"].paid(large=True) == (1, 1)
    assert found["mixed_precision"].best(TIME).case["task"] == "photos-resnet18"
    assert found["mixed_precision"].best(SIZE) is None


def test_a_model_of_the_users_is_called_neither_small_nor_large():
    leaves = [
        leaf
        for each in path(planted(BF16 | {"time": GAIN, "task": "my_model"}))
        for leaf in each.leaves
        if leaf.figure == TIME and leaf.rows
    ]
    assert leaves
    assert {leaf.large for leaf in leaves} == {None}


def test_the_matrix_begins_with_what_pays_in_the_largest_share_of_its_rows():
    paid = {"memory_format": "010", "pruning": "00", "compilation": "11", "mixed_precision": "1101"}
    record = planted(
        *(
            {"technique": name, "variant": f"{place}", "time": GAIN if pays == "1" else NOTHING}
            for name, rows in paid.items()
            for place, pays in enumerate(rows)
        )
    )
    found = [p.technique for p in priorities(record, {})]
    assert found == ["compilation", "mixed_precision", "memory_format", "pruning"]


def test_the_path_orders_by_the_bound_not_by_the_lucky_mean():
    question = path(two_sizes())[0]
    large = next(leaf for leaf in question.leaves if leaf.large)
    assert [r.technique for r in large.rows] == ["mixed_precision", "compilation"]
    small = next(leaf for leaf in question.leaves if not leaf.large)
    assert ends(small) == ["none advised: 1 not shown to gain"]


def test_every_sentence_of_the_path_is_a_row_with_its_figure():
    said = " ".join(" ".join(text(two_sizes(), priorities(two_sizes(), {}))).split())
    words = "PyTorch bf16 (mixed precision), photos-resnet18, batch 64: 0.500 (0.480–0.520) of its"
    assert f"{words} baseline's time; same work" in said
    assert "Is a prediction too slow? ------------------------- no row of this record" in said


@pytest.mark.parametrize(
    ("given", "counts"),
    [
        ({"time": (0.5, 0.48, 0.52), "changes_math": True}, (0, 0, 1)),
        ({"time": (1.5, 1.4, 1.6), "changes_math": True}, (1, 0, 0)),
        ({"time": NOTHING, "changes_math": True}, (1, 0, 0)),
        ({"time": (0.5,)}, (0, 1, 0)),
        ({"time": NOTHING}, (1, 0, 0)),
        ({"accuracy": (1.0,)}, (0, 0, 1)),
        ({"accuracy": (0.0,)}, (0, 1, 0)),
        ({"accuracy": (-1.0,)}, (0, 1, 0)),
        ({"accuracy": (0.2, -0.1, 0.5)}, (1, 0, 0)),
    ],
)
def test_a_leaf_counts_what_does_not_gain(given, counts):
    figure = ACCURACY if "accuracy" in given else TIME
    (leaf,) = (x for each in path(planted(BF16 | given)) for x in each.leaves if x.figure == figure)
    assert leaf.rows == []
    assert (leaf.unproven, leaf.once, leaf.refused) == counts


def test_gains_in_accuracy_are_ordered_by_their_lower_bound():
    gains = {"lucky": (2.0, 0.2, 3.8), "sure": (1.0, 0.5, 1.5), "least": (0.3, 0.1, 0.5)}
    record = planted(*(BF16 | {"variant": name, "accuracy": own} for name, own in gains.items()))
    (found,) = priorities(record, {})
    assert found.best(ACCURACY).case["variant"] == "sure"
    (leaf,) = (x for each in path(record) for x in each.leaves if x.figure == ACCURACY)
    assert [row.case["variant"] for row in leaf.rows] == ["sure", "lucky", "least"]


def test_a_row_answers_questions_of_its_own_framework_mode_and_family():
    rates = {"metrics": {"samples_per_s": ([20, 19, 21], [10, 9, 11])}}
    record = planted(
        BF16 | {"time": GAIN},
        BF16 | {"time": GAIN, "variant": "fp16", "framework": "tf"},
        {"technique": "export", "variant": "exported", "time": GAIN, "mode": "predict"},
        {"technique": "shards", "variant": "sharded"} | rates,
        {"technique": "data_parallel", "variant": "two", "framework": "tf"} | rates,
    )
    found = {
        (each.question.words, leaf.framework, row.case["variant"])
        for each in path(record)
        for leaf in each.leaves
        for row in leaf.rows
    }
    assert found == {
        ("Is a train step too slow?", "pt", "bf16"),
        ("Is a train step too slow?", "tf", "fp16"),
        ("Is a prediction too slow?", "pt", "exported"),
        ("Does training wait for its data?", "pt", "sharded"),
        ("Is one device too slow, or too small?", "tf", "two"),
    }


def test_an_update_alone_is_no_train_step():
    update = {"technique": "optimizer_implementations", "variant": "fused", "time": GAIN}
    by_words = {each.question.words: each.leaves for each in path(planted(update))}
    assert by_words["Is a train step too slow?"] == []
    assert by_words["Is the optimizer's update too slow?"][0].rows


def test_prices_stand_beside_the_gains():
    cost = {("mixed_precision", "pt"): Cost(120, ("torchao",), 2, 20)}
    lossy = BF16 | {"variant": "fp16", "time": GAIN, "accuracy": (-3.0, -4.0, -2.0)}
    record = planted(BF16 | {"time": GAIN}, lossy)
    table = matrix(priorities(record, cost))
    line = dict(zip((c.title for c in table.columns), table.rows[0], strict=True))
    assert line["lines to copy"] == "120"
    assert line["refused models"] == "2 of 20"
    assert line["needs"] == "torchao"
    assert line["rows less accurate"] == "1 of 2"
    assert line["first call [s]"] == "0.500"
    assert line["time (best row)"] == "0.500 (0.480–0.520)"


# What a technique costs --------------------------------------------------------------------------


def test_lines_of_code_are_counted_without_comments_and_docstrings():
    source = (
        '"""Head."""\n\n# why\nimport os\n\n\ndef f(\n    x,\n):\n    """Doc."""\n    return x\n'
    )
    assert command.code_lines(source) == 5


def test_packages_are_those_that_neither_python_nor_the_framework_brings():
    source = (
        "import os, torch\nimport torchao.quantization as q\n\ndef f():\n    from onnx import x\n"
        "    runtimes.openvino_package()\n    runtimes.package('tf2onnx.convert', 'tf2onnx')\n"
    )
    assert command.packages(source) == {"torchao", "onnx", "openvino", "tf2onnx"}


def test_every_technique_has_a_cost_in_both_frameworks():
    found = command.costs(None)
    assert {key[0] for key in found} == techniques().keys()
    assert all(cost.lines > 20 for cost in found.values())
    assert "torchao" in found["quantization_aware_training", "pt"].packages
    assert found["mixed_precision", "pt"].models is None


def test_refusals_are_counted_from_the_zoo_whole_or_in_part():
    cells_of = {
        "a": {"status": "works"},
        "b": {"status": "refused"},
        "c": {"status": "works", "variants": {"x": {"status": "refused"}}},
    }
    found = command.costs({"cells": {"pt": {"pruning": cells_of}}})
    assert (found["pruning", "pt"].refused, found["pruning", "pt"].models) == (2, 3)
    assert found["pruning", "tf"].models is None


# The command -------------------------------------------------------------------------------------


def test_the_command_prints_80_columns_and_makes_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "PAGE", tmp_path / "priorities.md")
    given = str(DOCS)
    assert command.main([given]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(cells(line) <= 80 for line in lines)
    assert command.main([*given.split(), "--check"]) == 1
    assert command.main([given, "--write"]) == 0
    assert command.main([*given.split(), "--check"]) == 0
    other = tmp_path / "results.json"
    other.write_text(json.dumps(record()), "utf-8")
    assert command.main([str(other), "--check"]) == 1


def test_bad_files_have_one_clear_line(tmp_path, monkeypatch, capsys):
    assert command.main([str(tmp_path)]) == 2
    models = tmp_path / "any_model.json"
    monkeypatch.setattr(command, "MODELS", models)
    for content in ("{", json.dumps([1])):
        models.write_text(content)
        assert command.main([str(DOCS / "avx2")]) == 2
        assert capsys.readouterr().err.count("\n") in (1, 2)


def test_what_is_better_large_is_shown_so():
    finder = {"technique": "batch_size_finder", "variant": "bf16"}
    record = planted(finder | {"metrics": {"largest_batch": (200, 100)}})
    leaf = next(each for each in path(record)[4].leaves if each.figure == "largest_batch")
    assert ends(leaf) == [
        "PyTorch bf16 (batch size finder), digits-cnn, batch 64: 2.000, measured 1.90 to 2.10, "
        "times its baseline's largest batch"
    ]


def test_what_was_measured_once_is_counted_apart():
    leaf = next(each for each in path(planted(BF16 | {"memory": 0.5}))[4].leaves)
    assert ends(leaf) == ["none advised: 1 measured once, without an interval"]


@pytest.mark.parametrize("name", ["claims", "priorities"])
def test_the_published_page_is_what_its_record_gives(name, monkeypatch, capsys):
    head = (DOCS / f"{name}.md").read_text("utf-8").splitlines()[0]
    given = head.split(f"twinbench {name} ")[1].split(" --write")[0]
    monkeypatch.chdir(DOCS.parent)
    assert {"claims": claims, "priorities": command}[name].main([*given.split(), "--check"]) == 0
    capsys.readouterr()


def test_the_page_is_the_same_each_time():
    record = two_sizes()
    assert page(record, priorities(record, {}), "docs") == page(
        record, priorities(record, {}), "docs"
    )
