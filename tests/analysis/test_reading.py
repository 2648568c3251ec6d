"""A record's rows and comparisons, and which belongs to which."""

from __future__ import annotations

import pytest

from bench.analysis.reading import results_file, tasks, techniques, view
from bench.record import Timing
from tests.records import case, comparison, planted

GAIN = (0.6, 0.58, 0.62)


def row(technique="mixed_precision", **more):
    return {"technique": technique, "variant": "changed", "time": GAIN} | more


def test_each_technique_has_its_own_work():
    record = planted(
        row("compilation", task="text-gpt"),
        row(mode="predict"),
        row("stacking", task="photos-resnet18"),
    )
    names = ["compilation", "mixed_precision", "stacking"]
    assert techniques(record) == names
    assert [tasks(record, name) for name in names] == [
        *(["text-gpt"], ["digits-cnn, inference"], ["photos-resnet18"])
    ]


def test_a_view_has_the_rows_of_one_technique_and_its_comparisons():
    record = planted(row(), row(framework="tf"), row("compilation"))
    found = view(record, "mixed_precision", "digits-cnn")
    (rows,) = found.rows.values()
    assert [(each.label, each.pt.framework, each.tf.framework) for each in rows] == [
        *(("base", "pt", "tf"), ("changed", "pt", "tf"))
    ]
    assert {case.technique for case in found.cases.values()} == {"mixed_precision"}
    base, changed = rows
    for side in ("pt", "tf"):
        gain = found.with_baseline(getattr(changed, side))
        assert gain.numerator == getattr(changed, side).id
        assert found.framework(gain) == side
        assert found.with_baseline(getattr(base, side)) is None
    assert found.others(64) == []


def test_a_view_has_the_comparison_of_twins():
    record = planted(row(), row(framework="tf"))
    base, changed = view(record, "mixed_precision", "digits-cnn").rows[64]
    twins = comparison(changed.pt, changed.tf, *GAIN, kind="framework")
    whole = view(
        record.but(comparisons=[*record.comparisons, twins]), "mixed_precision", "digits-cnn"
    )
    assert whole.framework(twins) is None
    assert whole.twins(changed) is twins
    assert whole.twins(base) is None
    assert whole.others(64) == []


def test_predictions_are_other_work_than_train_steps():
    assert case(mode="predict").task_title != case().task_title


@pytest.mark.parametrize(
    ("step_s", "count"), [({}, 0), ({"0": {"0": [1], "1": [1]}, "3": {"1": [1], "2": [1]}}, 3)]
)
def test_blocks_of_several_matches_count_once(step_s, count):
    assert Timing(step_s=step_s).block_count == count


def test_where_there_are_no_links_latest_is_a_file_that_names_a_folder(tmp_path):
    (folder := tmp_path / "2026-01-01T00-00-00Z").mkdir()
    (folder / "results.json").write_text("{}")
    (tmp_path / "latest").write_text(folder.name)
    assert results_file(tmp_path / "latest") == folder / "results.json"
    assert results_file(folder) == folder / "results.json"
    assert results_file(tmp_path) == folder / "results.json"  # of a folder of runs the latest
