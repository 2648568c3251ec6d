"""The record of a run: its file, its certificates, its comparisons."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest

from bench.analysis.analyse import analyse, raw
from bench.harness import folders as module
from bench.harness.folders import new_folder
from bench.harness.isolated_measurements import Trained
from bench.harness.matches import Played
from bench.harness.plan import EFFORT, Technique, Variant, Workload
from bench.harness.record import Record
from bench.harness.selection import cases_of, matches
from shared.specs import TASKS, train_step_flops

TECHNIQUE = Technique(
    family="faults",
    name="made_up",
    title="Made up",
    variants=(
        Variant("plain", role="baseline"),
        Variant("changed"),
        Variant("loose", loss_tolerance=0.05),
    ),
    workloads=(Workload("digits-cnn", "small", accuracy=True),),
    differs_by_design=("nothing",),
    notes=("a note",),
)
STEP_S = 0.002
LOSSES = [2.3 - 0.01 * i for i in range(10)]
PLAIN, CHANGED = "made_up/digits-cnn-4/pt/plain", "made_up/digits-cnn-4/pt/changed"
TF_PLAIN, TF_CHANGED = "made_up/digits-cnn-4/tf/plain", "made_up/digits-cnn-4/tf/changed"
LOOSE = "made_up/digits-cnn-4/pt/loose"


def block(seconds=STEP_S, number=0, **values):
    """A block of thirty samples of `seconds` with a noise of its own."""
    noise = np.random.default_rng([number, int(seconds * 1e9)]).normal(0, 0.005, 30)
    usual = {
        "samples": list(seconds * np.exp(noise)),
        "first_call_s": 0.1,
        "losses": LOSSES,
        "weights_sha256": "a" * 64,
        "empty_s": 1e-8,
        "steps": 5,
        "shortest_s": 5 * STEP_S,
        "settings": {"threads": {"intra_op": 2}, "keeps_freed_memory": True},
        "evidence": {"operator_dtypes": {"matmul": {"float32": 3}}},
    }
    return Played(**usual | values)


def make_record(folder, technique=TECHNIQUE, **environment):
    amount = EFFORT["default"]
    record = Record(
        folder, command="pytest bench/", effort="default", amount=amount, environment=environment
    )
    record.add(technique, cases_of(technique, "module", "default"))
    return record


def fill(record, found=None, blocks=8):
    """One match of all cases, each taking STEP_S a step but for what `found` says by id."""
    number = record.add_match([entry.case for entry in record.entries.values()])
    for index in range(blocks):
        played = {
            case_id: (found or {}).get(case_id, taking(1))(100 * place + index)
            for place, case_id in enumerate(record.entries)
        }
        record.add_block(number, index, played)
    return record


def taking(factor, **values):
    return lambda index: block(factor * STEP_S, index, **values)


def comparison(found, numerator, denominator):
    (one,) = [
        c
        for c in found["comparisons"]
        if (c["numerator"], c["denominator"]) == (numerator, denominator)
    ]
    return one


def case(found, case_id):
    (one,) = [c for c in found["cases"] if c["id"] == case_id]
    return one


def strictly(text):
    """Parse JSON that has no NaN and no infinity."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


# The file ---------------------------------------------------------------------------------------


def test_the_record_has_the_names_that_other_programs_read(tmp_path):
    found = fill(make_record(tmp_path)).write()
    assert found == strictly((tmp_path / "results.json").read_text("utf-8"))
    assert found["schema_version"] == 3
    assert found.keys() >= {
        *("schema_version", "command", "effort", "environment", "noise_floor", "cases"),
        *("comparisons", "started", "finished", "techniques", "tasks", "seconds", "matches"),
        "blocks",
    }
    one = case(found, CHANGED)
    assert one.keys() >= {
        *("technique", "framework", "flavour", "variant", "task", "batch_size", "status"),
        *("reason", "timing", "memory", "accuracy", "artifact_bytes", "metrics"),
        *("certificate", "evidence", "id", "role", "title", "seconds"),
    }
    assert one["timing"].keys() >= {"cold_first_call_s", "warm_first_call_s", "step_s"}
    assert one["metrics"]["samples_per_s"].keys() == {"value", "unit", "ci", "samples"}
    assert found["comparisons"][0].keys() >= {
        *("technique", "variant", "task", "kind", "numerator", "denominator", "ratio", "ci"),
        *("sd", "verdict", "n", "reason", "batch_size"),
    }
    assert {c["kind"] for c in found["comparisons"]} == {"framework", "baseline", "control"}
    assert found["techniques"]["made_up"]["differs_by_design"] == ["nothing"]
    assert found["tasks"]["digits-cnn"]["metric"] == "accuracy"


def test_a_copy_of_the_last_run_stays_what_it_is(tmp_path):
    (tmp_path / "latest").mkdir()
    with pytest.raises(OSError, match="its latest is a folder, not a link to the last run"):
        new_folder(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "latest"]


def cold(first_call_s, *peaks):
    """A cold start's answer; `peaks`: bytes after import, build, the first step, steady."""
    names = ("import_bytes", "build_bytes", "first_step_peak_bytes", "steady_peak_bytes")
    return {
        "first_call_s": first_call_s,
        "memory": dict(zip(names, peaks or (100, 150, 220, 240), strict=True)),
        "parts": {"parameters": 40, "gradients": 40, "optimizer": 10},
        "device_peak": None,
        "modules": [],
    }


def test_break_even_is_the_extra_first_call_over_what_a_step_gains(tmp_path):
    record = fill(make_record(tmp_path), {CHANGED: taking(0.5)})
    record.entries[PLAIN].cold = [cold(s) for s in (0.9, 1.0, 1.1)]
    record.entries[CHANGED].cold = [cold(s) for s in (10.0, 11.0, 13.0)]
    metrics = case(record.as_dict(), CHANGED)["metrics"]
    ratio = comparison(record.as_dict(), CHANGED, PLAIN)
    step = case(record.as_dict(), PLAIN)["timing"]["median_s"]
    found = metrics["break_even_steps"]
    assert found["value"] == pytest.approx(10.0 / (step * (1 - ratio["ratio"])))
    least, most = ((e / (step * (1 - r))) for e, r in zip((9.0, 12.0), ratio["ci"], strict=True))
    assert found["ci"] == pytest.approx([least, most])
    assert metrics["cold_first_calls_s"]["value"] == 11.0
    assert metrics["cold_first_calls_s"]["samples"] == [10.0, 11.0, 13.0]
    own = case(record.as_dict(), CHANGED)["timing"]["median_s"]
    for steps in (100, 1_000, 10_000):
        total = metrics[f"total_{steps}_steps_s"]["value"]
        assert total == pytest.approx(11.0 + (steps - 1) * own)


def test_what_is_no_faster_never_breaks_even_and_a_cheap_first_call_does_at_once(tmp_path):
    record = fill(make_record(tmp_path), {CHANGED: taking(1.5)})
    for name, seconds in ((PLAIN, 5.0), (CHANGED, 1.0)):
        record.entries[name].cold = [cold(seconds)] * 3
    assert case(record.as_dict(), CHANGED)["metrics"]["break_even_steps"]["value"] is None
    record = fill(make_record(tmp_path), {CHANGED: taking(0.5)})
    for name, seconds in ((PLAIN, 5.0), (CHANGED, 1.0)):
        record.entries[name].cold = [cold(seconds)] * 3
    assert case(record.as_dict(), CHANGED)["metrics"]["break_even_steps"]["value"] == 0.0


def test_one_cold_start_makes_no_break_even(tmp_path):
    record = fill(make_record(tmp_path), {CHANGED: taking(0.5)})
    record.entries[PLAIN].cold = record.entries[CHANGED].cold = [cold(1.0)]
    assert "break_even_steps" not in case(record.as_dict(), CHANGED)["metrics"]


def test_a_probe_s_figures_stand_beside_the_derived_ones(tmp_path):
    record = fill(make_record(tmp_path))
    record.entries[PLAIN].probed = {"largest_batch": {"value": 640, "unit": "samples"}}
    metrics = case(record.as_dict(), PLAIN)["metrics"]
    assert metrics["largest_batch"] == {"value": 640, "unit": "samples", "ci": None}
    assert "samples_per_s" in metrics


def test_memory_and_accuracy_have_their_names(tmp_path):
    record = fill(make_record(tmp_path))
    entry = record.entries[PLAIN]
    entry.cold = [cold(0.7, 100, 150, 220, 240)]
    entry.trained = Trained([91.0, 92.0, 93.0])
    found = case(record.write(), PLAIN)
    assert found["memory"]["steady_peak_bytes"] == 240
    assert found["memory"]["rest_bytes"] == 240 - 100 - 90
    assert found["timing"]["cold_first_call_s"] == 0.7
    assert found["accuracy"]["per_seed"] == [91.0, 92.0, 93.0]
    assert found["accuracy"]["mean"] == 92.0
    assert found["accuracy"]["ci"][0] < 92.0 < found["accuracy"]["ci"][1]


def test_repeated_memory_carries_its_scatter(tmp_path):
    record = fill(make_record(tmp_path))
    starts = [(100, 150, 220, 240), (110, 150, 230, 280), (90, 150, 220, 260)]
    record.entries[PLAIN].cold = [cold(0.7, *peaks) for peaks in starts]
    record.entries[CHANGED].cold = [cold(0.7)]
    found = record.write()
    memory = case(found, PLAIN)["memory"]
    assert memory["samples"]["above_import_bytes"] == [140, 170, 170]
    assert memory["above_import_bytes"] == pytest.approx(160)
    assert memory["above_import_ci"][0] < 140 < 180 < memory["above_import_ci"][1]
    assert memory["steady_peak_bytes"] == 260
    assert case(found, CHANGED)["memory"]["above_import_ci"] is None  # measured once


def test_sizes_are_exact_and_of_trained_weights_where_accuracy_is(tmp_path):
    record = fill(make_record(tmp_path))
    for name in (PLAIN, CHANGED):
        artifact = {"bytes": 1000, "compressed_bytes": 300}
        record.entries[name].cold = [cold(0.7) | {"artifact": artifact}]
    sizes = [{"bytes": 1000, "compressed_bytes": each} for each in (910, 930, 920)]
    record.entries[CHANGED].trained = Trained([95.0, 96.0, 94.0], sizes)
    found = record.write()
    initial, trained = (case(found, name)["metrics"] for name in (PLAIN, CHANGED))
    assert initial["compressed_artifact"]["value"] == 300
    assert trained["compressed_artifact"]["value"] == 920
    assert trained["compressed_artifact"]["samples"] == [910, 930, 920]
    assert trained["artifact"]["value"] == case(found, CHANGED)["artifact_bytes"] == 1000
    for metrics in (initial, trained):
        assert metrics["artifact"]["ci"] is metrics["compressed_artifact"]["ci"] is None


def test_what_makes_rows_comparable_stands_in_the_record(tmp_path):
    changed = replace(TECHNIQUE.variants[1], changes="weights", title="changed in plain words")
    variants = (TECHNIQUE.variants[0], changed, TECHNIQUE.variants[2])
    found = fill(make_record(tmp_path, replace(TECHNIQUE, variants=variants))).write()
    plain, other = case(found, PLAIN), case(found, CHANGED)
    assert (plain["changes_math"], plain["changes_weights"]) == (False, False)
    assert (other["changes_math"], other["changes_weights"]) == (True, True)
    assert plain["loss_tolerance"] == TASKS["digits-cnn"].parity
    assert case(found, LOOSE)["loss_tolerance"] == 0.05
    assert (plain["title"], other["title"]) == ("plain", "changed in plain words")
    assert plain["flops"] == train_step_flops(TASKS["digits-cnn"].model, 4)


def test_memory_that_could_not_be_seen_stays_unknown(tmp_path):
    record = fill(make_record(tmp_path))
    record.entries[PLAIN].cold = [cold(0.7, None, None, None, None)]
    assert case(record.write(), PLAIN)["memory"]["rest_bytes"] is None


def test_nan_and_infinity_and_what_nothing_reckons_with_become_null(tmp_path):
    """So that the record can be read: training in float64 may come to 1e300."""
    bad = [math.nan, math.inf, -math.inf, 1e300, *LOSSES[4:]]
    record = fill(make_record(tmp_path, peak_flops={"float32": np.float64("nan")}))
    record.entries[PLAIN].blocks[0, 0].losses = bad
    record.write()
    found = strictly(record.path.read_text("utf-8"))
    assert case(found, PLAIN)["certificate"]["losses"] == [None] * 4 + LOSSES[4:]
    assert found["environment"]["peak_flops"]["float32"] is None


def test_an_interrupted_write_leaves_the_old_record_whole(tmp_path, monkeypatch):
    record = fill(make_record(tmp_path), blocks=2)
    before = record.write()

    def interrupted(source, target):
        assert strictly(source.read_text("utf-8"))["finished"] is True
        raise KeyboardInterrupt

    record.top["finished"] = True
    monkeypatch.setattr(module.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        record.write()
    assert strictly(record.path.read_text("utf-8")) == before
    assert before["finished"] is False


WRITER = """
import sys
from pathlib import Path
from tests.harness.test_record import fill, make_record
record = fill(make_record(Path(sys.argv[1])), blocks=3)
record.write()
print("written", flush=True)
while True:
    record.write()
"""


@pytest.mark.timeout(60)
def test_a_reader_never_sees_half_a_record_whenever_the_writer_is_killed(tmp_path):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=module.__file__.split("/bench/")[0],
    )
    try:
        assert writer.stdout.readline() == b"written\n"
        path = tmp_path / "results.json"
        read = [strictly(path.read_text("utf-8")) for _ in range(100)]
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    assert all(found == read[0] for found in [*read, strictly(path.read_text("utf-8"))])


# Folders ----------------------------------------------------------------------------------------


class Now(datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz=None):
        return datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "datetime", Now)
    found: list = []
    threads = [
        threading.Thread(target=lambda: found.append(new_folder(tmp_path))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 8
    assert all(folder.is_dir() for folder in found)
    assert (tmp_path / "2026-01-02T03-04-05Z") in found
    assert (tmp_path / "latest").resolve() in found
    left = {path.name for path in tmp_path.iterdir()} - {folder.name for folder in found}
    assert left == {"latest"}


def test_latest_points_to_the_newest_and_survives_a_move(tmp_path):
    results = tmp_path / "deep" / "results"
    first, second = new_folder(results), new_folder(results)
    assert (results / "latest").resolve() == second != first
    (second / "results.json").write_text("{}")
    results.rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "latest" / "results.json").exists()


def test_without_symbolic_links_latest_is_a_file_with_the_name(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError("symbolic link privilege not held")

    monkeypatch.setattr(module.Path, "symlink_to", refuse)
    new_folder(tmp_path)
    second = new_folder(tmp_path)
    assert (tmp_path / "latest").read_text() == second.name


# Certificates -----------------------------------------------------------------------------------


def changed_losses(step, factor):
    return [loss * (factor if i == step else 1) for i, loss in enumerate(LOSSES)]


def test_equal_work_is_compared(tmp_path):
    found = fill(make_record(tmp_path), {CHANGED: taking(0.5)}).as_dict()
    one = comparison(found, CHANGED, PLAIN)
    assert (one["verdict"], one["reason"], one["kind"]) == ("faster", None, "baseline")
    assert one["ratio"] == pytest.approx(0.5, rel=0.01)
    assert one["ci"][0] < one["ratio"] < one["ci"][1]
    assert one["n"] == 8
    assert comparison(found, CHANGED, TF_CHANGED)["kind"] == "framework"
    assert comparison(found, PLAIN, TF_PLAIN)["verdict"] == "equivalent"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"weights_sha256": "b" * 64}, "initial weights differ"),
        ({"losses": changed_losses(2, 1.001)}, "loss of step 3 differs by 1.0e-03, allowed 1e-05"),
        ({"losses": changed_losses(9, 1.00002)}, "loss of step 10 differs by 2.0e-05"),
        ({"losses": changed_losses(0, math.nan)}, "loss of step 1 differs by inf"),
        ({"losses": changed_losses(5, math.inf)}, "loss of step 6 differs by inf"),
    ],
)
def test_other_work_is_not_comparable(tmp_path, values, reason):
    found = fill(make_record(tmp_path), {CHANGED: taking(0.5, **values)}).as_dict()
    for other in (PLAIN, TF_CHANGED):
        one = comparison(found, CHANGED, other)
        assert one["verdict"] == "not comparable"
        assert one["reason"].startswith(reason)
        assert one["ratio"] == pytest.approx(0.5, rel=0.01)  # shown, but judged no win
    assert comparison(found, PLAIN, TF_PLAIN)["verdict"] == "equivalent"


# Verdicts ---------------------------------------------------------------------------------------


def with_accuracy(record, **by_id):
    base = np.array([95.0, 96.0, 94.0, 95.5])
    for case_id, difference in by_id.items():
        record.entries[case_id].trained = Trained(list(base + difference))
    return record


@pytest.mark.parametrize(
    ("difference", "verdict"),
    [(-1.5, "faster, less accurate"), (-0.5, "faster"), (0.0, "faster"), (4.0, "faster")],
)
def test_a_win_that_costs_more_than_the_margin_is_no_win(tmp_path, difference, verdict):
    record = fill(make_record(tmp_path), {CHANGED: taking(0.5)})
    found = with_accuracy(record, **{PLAIN: 0, CHANGED: difference, TF_CHANGED: 0}).as_dict()
    assert comparison(found, CHANGED, PLAIN)["verdict"] == verdict
    assert comparison(found, CHANGED, TF_CHANGED)["verdict"] == verdict


def test_a_win_that_lost_accuracy_at_another_batch_is_no_win_either(tmp_path):
    work = Workload("digits-cnn", "small", accuracy=True)
    technique = replace(TECHNIQUE, workloads=(work, replace(work, batch="compute")))
    record = make_record(tmp_path, technique)
    plain, changed = (
        [name for name in record.entries if name.endswith(f"/pt/{own}")]
        for own in ("plain", "changed")
    )
    record = fill(record, dict.fromkeys(changed, taking(0.5)))
    found = with_accuracy(record, **{plain[0]: 0, changed[0]: -1.5}).as_dict()
    for pair in zip(changed, plain, strict=True):
        assert comparison(found, *pair)["verdict"] == "faster, less accurate"


@pytest.mark.parametrize(
    ("task", "batch", "lost", "kept"),
    [("text-gpt", 2, 0.1, [-0.1]), ("digits-detection", 4, -2.5, [-1.5, 9])],
)
def test_each_task_s_metric_is_lost_in_its_direction_beyond_its_margin(
    tmp_path, task, batch, lost, kept
):
    """Bits per character upwards, mean average precision downwards."""
    technique = replace(TECHNIQUE, workloads=(Workload(task, "small", accuracy=True),))
    plain, changed = (f"made_up/{task}-{batch}/pt/{name}" for name in ("plain", "changed"))
    for difference in (lost, *kept):
        record = fill(make_record(tmp_path, technique), {changed: taking(0.5)})
        found = with_accuracy(record, **{plain: 0, changed: difference}).as_dict()
        verdict = "faster" if difference in kept else "faster, less accurate"
        assert comparison(found, changed, plain)["verdict"] == verdict


@pytest.mark.parametrize(
    ("difference", "verdict"),
    [(-5, "slower"), (0, "slower"), (0.5, "slower"), (5, "slower, more accurate")],
)
def test_the_denominator_s_win_may_cost_too_much_as_well(tmp_path, difference, verdict):
    record = fill(make_record(tmp_path), {CHANGED: taking(2.0)})
    found = with_accuracy(record, **{PLAIN: 0, CHANGED: difference, TF_CHANGED: 0}).as_dict()
    assert comparison(found, CHANGED, PLAIN)["verdict"] == verdict
    assert comparison(found, CHANGED, TF_CHANGED)["verdict"] == verdict


def test_accuracy_is_compared_with_the_own_baseline(tmp_path):
    record = with_accuracy(fill(make_record(tmp_path)), **{PLAIN: 0, CHANGED: -3, TF_CHANGED: 0})
    found = record.as_dict()
    difference = case(found, CHANGED)["accuracy"]["difference"]
    assert difference["mean"] == pytest.approx(-3)
    assert difference["verdict"] == "worse"
    assert case(found, PLAIN)["accuracy"]["difference"] is None
    assert case(found, TF_CHANGED)["accuracy"]["difference"] is None  # its baseline was not trained
    assert case(found, LOOSE)["accuracy"] is None


def test_one_block_gives_ratios_without_intervals_and_verdicts(tmp_path):
    found = fill(make_record(tmp_path), {CHANGED: taking(0.5)}, blocks=1).as_dict()
    one = comparison(found, CHANGED, PLAIN)
    assert (one["ci"], one["sd"], one["verdict"], one["n"]) == (None, None, None, 1)
    assert case(found, CHANGED)["timing"]["ci_s"] is None
    assert found["noise_floor"]["median_half_width"] is None


def test_what_parts_took_adds_up(tmp_path):
    record = make_record(tmp_path)
    for part, seconds in (("cold", 1.5), ("probe", 2.0), ("cold", 0.5)):
        record.spend(part, seconds)
        record.entries[PLAIN].spend(part, 2 * seconds)
    record.add_match([entry.case for entry in record.entries.values()])
    for number, seconds in enumerate((3.0, 4.0)):
        took = {"rounds": seconds, "cold": 1.0}
        record.add_block(0, number, {PLAIN: replace(block(), seconds=took)})
    found = record.as_dict()
    assert (found["seconds"]["cold"], found["seconds"]["probe"]) == (2.0, 2.0)
    assert case(found, PLAIN)["seconds"] == {"cold": 6.0, "probe": 4.0, "rounds": 7.0}


@pytest.mark.parametrize(("pt", "tf"), [(CHANGED, TF_PLAIN), (PLAIN, TF_CHANGED)])
def test_best_against_best_is_the_fastest_of_each_side(tmp_path, pt, tf):
    found = fill(make_record(tmp_path), {pt: taking(0.5), tf: taking(0.8)}).as_dict()
    (best,) = [c for c in found["comparisons"] if c["variant"].startswith("best")]
    assert (best["numerator"], best["denominator"]) == (pt, tf)
    assert best["ratio"] == pytest.approx(0.5 / 0.8, rel=0.01)
    pairs = [(c["numerator"], c["denominator"]) for c in found["comparisons"]]
    assert len(pairs) == len(set(pairs))


def test_twins_that_are_the_best_are_compared_once(tmp_path):
    record = fill(make_record(tmp_path), {CHANGED: taking(0.5), TF_CHANGED: taking(0.8)})
    assert not any(c["variant"].startswith("best") for c in record.as_dict()["comparisons"])


# Failures ---------------------------------------------------------------------------------------


def test_a_failed_case_loses_its_comparisons_alone(tmp_path):
    def dies(index):
        failed = {"samples": [], "status": "FAILED", "reason": "killed"}
        return block(number=index, **(failed if index % 100 == 3 else {}))

    found = fill(make_record(tmp_path), {CHANGED: dies}).as_dict()
    one = case(found, CHANGED)
    assert (one["status"], one["reason"]) == ("FAILED", "killed")
    assert len(one["timing"]["step_s"]["0"]) == 7  # what was measured is kept
    assert one["timing"]["median_s"] is None
    assert one["metrics"] == {}
    assert not any(CHANGED in (c["numerator"], c["denominator"]) for c in found["comparisons"])
    assert comparison(found, PLAIN, TF_PLAIN)["n"] == 8


def test_the_first_reason_stands(tmp_path):
    entry = make_record(tmp_path).entries[PLAIN]
    entry.fail("FAILED", "first")
    entry.fail("UNSUPPORTED", "second")
    assert (entry.status, entry.reason) == ("FAILED", "first")


def test_a_record_without_any_block_can_be_written(tmp_path):
    found = make_record(tmp_path).write()
    assert found["comparisons"] == []
    assert {c["status"] for c in found["cases"]} == {"OK"}
    assert found["noise_floor"]["shortest_sample_s"] is None


# Split matches ----------------------------------------------------------------------------------


def parts_of(record):
    cases = [entry.case for entry in record.entries.values()]
    return matches(cases, {case.id: case.id for case in cases})


def test_baselines_that_play_in_several_parts_are_compared_once(tmp_path):
    variants = (TECHNIQUE.variants[0], *(Variant(f"variant{i}") for i in range(6)))
    record = make_record(tmp_path, replace(TECHNIQUE, variants=variants))
    parts = parts_of(record)
    assert len(parts) > 1
    for part in parts:
        number = record.add_match(part)
        for index in range(3):
            factor = 1 + number  # each part finds the machine at another speed
            record.add_block(
                number, index, {c.id: block(factor * STEP_S, 100 * number + index) for c in part}
            )
    found = record.as_dict()
    keys = [(c["kind"], c["numerator"], c["denominator"]) for c in found["comparisons"]]
    assert len(keys) == len(set(keys))
    assert (("framework", PLAIN, TF_PLAIN)) in keys
    compared = {c["numerator"] for c in found["comparisons"] if c["kind"] == "baseline"}
    assert compared == {c.id for p in parts for c in p if c.variant.name.startswith("variant")}
    for one in found["comparisons"]:  # a part's speed cancels
        assert one["ratio"] == pytest.approx(1, rel=0.02)
    middle = float(np.exp(np.median(np.log(range(1, len(parts) + 1)))))
    for one in found["cases"]:  # the speed of the middle part, with what each part has to say
        assert one["timing"]["median_s"] == pytest.approx(middle * STEP_S, rel=0.02)
        played = {str(n) for n, part in enumerate(parts) if one["id"] in {c.id for c in part}}
        assert one["timing"]["step_s"].keys() == played
        assert {len(blocks) for blocks in one["timing"]["step_s"].values()} == {3}


def figures_agree(found):
    """Each ratio is that of the two times; how many there are."""
    times = {one["id"]: one["timing"]["median_s"] for one in found["cases"]}
    for one in found["comparisons"]:
        expected = times[one["numerator"]] / times[one["denominator"]]
        assert one["ratio"] == pytest.approx(expected, rel=1e-12)
    return len(found["comparisons"])


@pytest.mark.parametrize("lost", [(), (1,), (0, 2)], ids=["whole", "one", "two"])
def test_times_and_ratios_agree_over_all_parts_and_blocks(tmp_path, lost):
    """Also where the machine drifts, and a part lacks blocks, as after an interruption."""
    random = np.random.default_rng(7)
    variants = (TECHNIQUE.variants[0], *(Variant(f"variant{i}") for i in range(6)))
    record = make_record(tmp_path, replace(TECHNIQUE, variants=variants))
    for part in parts_of(record):
        number = record.add_match(part)
        for index in range(4):
            if number == 1 and index in lost:
                continue
            drift = np.exp(np.cumsum(random.normal(0, 0.1, 30)) + random.normal())
            played = {
                c.id: block(samples=list(drift * STEP_S * np.exp(random.normal(0, 0.05, 30))))
                for c in part
            }
            record.add_block(number, index, played)
    found = record.write()
    assert figures_agree(found) > 20
    sizes = {c["n"] for c in found["comparisons"]}
    assert sizes == ({4, 4 - len(lost)} if lost else {4})


def test_the_record_is_the_analysis_of_what_was_measured(tmp_path):
    """And of nothing else: not of what is derived in it."""
    record = fill(make_record(tmp_path, peak_flops={"float32": 1e11}), {CHANGED: taking(0.5)})
    with_accuracy(record, **{PLAIN: 0, CHANGED: -3, TF_CHANGED: 0})
    for name in (PLAIN, CHANGED):
        record.entries[name].cold = [cold(seconds) for seconds in (1.0, 2.0)]
        record.entries[name].probed = {"figure": {"value": 1.0, "unit": "1", "samples": [1.0]}}
    record.write()
    found = strictly(record.path.read_text("utf-8"))
    measured = strictly(json.dumps(raw(found)))
    assert "comparisons" not in measured
    assert "median_s" not in json.dumps(measured)
    assert found["comparisons"]
    assert found["noise_floor"]["ratios"] > 3
    assert analyse(measured) == found


# Figures ----------------------------------------------------------------------------------------


def test_the_noise_floor_tells_what_the_run_can_tell(tmp_path):
    record = fill(make_record(tmp_path), {PLAIN: taking(1, empty_s=2e-5, steps=7)})
    floor = record.as_dict()["noise_floor"]
    assert [c["framework"] for c in floor["controls"]] == ["pt", "tf"]
    assert all(c["verdict"] == "equivalent" for c in floor["controls"])
    assert 1e-4 < floor["median_half_width"] <= floor["p90_half_width"] < 0.03
    assert floor["empty_sample_share"]["pt"] == pytest.approx(2e-5 / STEP_S, rel=0.02)
    assert floor["empty_sample_share"]["tf"] == pytest.approx(1e-8 / STEP_S, rel=0.02)
    assert floor["shortest_sample_s"] == pytest.approx(5 * STEP_S, rel=0.02)
