"""The record of a run: its file, its certificates, its comparisons."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bench.analysis.analyse import analyse, raw
from bench.analysis.reading import load
from bench.harness import folders, record
from bench.harness.answers import ColdStart, Configured
from bench.harness.folders import new_folder
from bench.harness.isolated_measurements import Trained
from bench.harness.matches import Played
from bench.harness.plan import EFFORT, Technique, Variant, Workload
from bench.harness.recorder import Recorder
from bench.harness.run_plan import Plan
from bench.harness.selection import cases_of
from bench.harness.state import RunState
from bench.record import Artifact, Conditions, Metric, encode
from shared.specs import TASKS, train_step_flops
from tests.harness.runs import state_of
from tests.records import as_read, find_case, find_comparison

ROOT = Path(__file__).resolve().parents[2]
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
MANY = replace(
    TECHNIQUE, variants=(TECHNIQUE.variants[0], *(Variant(f"variant{i}") for i in range(6)))
)
STEP_S = 0.002
LOSSES = [2.3 - 0.01 * i for i in range(10)]
PLAIN, CHANGED = "made_up/digits-cnn-4/pt/plain", "made_up/digits-cnn-4/pt/changed"
TF_PLAIN, TF_CHANGED = "made_up/digits-cnn-4/tf/plain", "made_up/digits-cnn-4/tf/changed"
LOOSE = "made_up/digits-cnn-4/pt/loose"


@dataclass
class Found:
    """A plan and what was found of it."""

    plan: Plan
    state: RunState

    def of(self, name):
        return self.state.cases[name]

    def record(self):
        return record.whole(self.plan, self.state)

    def written(self, folder):
        """The record as it is read from its file."""
        recorder = Recorder(folder, self.plan, self.state, say=print)
        recorder.write()
        return load(folder)


def nothing(technique=TECHNIQUE, **environment):
    """Nothing was found yet of a technique."""
    plan = Plan(
        {technique.name: cases_of(technique, "module", "default")},
        {technique.name: technique},
        EFFORT["default"],
    )
    return Found(plan, state_of(plan, **environment))


def block(seconds=STEP_S, number=0, **values):
    """A block of thirty samples of `seconds` with a noise of its own."""
    noise = np.random.default_rng([number, int(seconds * 1e9)]).normal(0, 0.005, 30)
    usual = {
        "samples": (seconds * np.exp(noise)).tolist(),
        "first_call_s": 0.1,
        "losses": LOSSES,
        "weights_sha256": "a" * 64,
        "empty_s": 1e-8,
        "steps": 5,
        "shortest_s": 5 * STEP_S,
        "settings": Configured(threads={"intra_op": 2}, keeps_freed_memory=True),
        "evidence": {"operator_dtypes": {"matmul": {"float32": 3}}},
    }
    return Played(**usual | values)


def play(found, match, number, played):
    """Note a block of a match."""
    for result in played.values():
        result.match, result.block = match, number
    found.state.add_block(played, Conditions(match=match, block=number))


def fill(found, taking=None, blocks=8):
    """One match of all cases, each taking STEP_S a step but for what `taking` says by id."""
    match = found.state.add_match(found.plan.every)
    for number in range(blocks):
        played = {
            case.id: (taking or {}).get(case.id, times(1))(100 * place + number)
            for place, case in enumerate(found.plan.every)
        }
        play(found, match, number, played)
    return found


def times(factor, **values):
    """Blocks whose steps take so many times as long as usual."""
    return lambda number: block(factor * STEP_S, number, **values)


def cold(first_call_s, *peaks, **fields):
    """A cold start's answer; `peaks`: bytes after import, build, the first step, steady."""
    names = ("import_bytes", "build_bytes", "first_step_peak_bytes", "steady_peak_bytes")
    usual = {
        "first_call_s": first_call_s,
        "memory": dict(zip(names, peaks or (100, 150, 220, 240), strict=True)),
        "parts": {"parameters": 40, "gradients": 40, "optimizer": 10},
        "device_peak": None,
        "modules": [],
        "wrote": False,
    }
    return ColdStart(**usual | fields)


def with_accuracy(found, **by_id):
    """Trained with four seeds; so far from the usual figure."""
    base = np.array([95.0, 96.0, 94.0, 95.5])
    for name, difference in by_id.items():
        found.of(name).trained = Trained(per_seed=(base + difference).tolist())
    return found


# The file ---------------------------------------------------------------------------------------


def test_the_file_holds_the_record_and_nothing_that_json_has_not(tmp_path):
    """Training in float64 may come to 1e300, which nothing reckons with."""
    found = fill(nothing())
    found.of(PLAIN).blocks[0].losses = [math.nan, math.inf, -math.inf, 1e300, *LOSSES[4:]]
    read = found.written(tmp_path)
    assert encode(read) == encode(as_read(found.record()).but(seconds=read.seconds))
    assert find_case(read, PLAIN).certificate.losses == [None] * 4 + LOSSES[4:]
    assert {c.kind for c in read.comparisons} == {"framework", "baseline", "control"}
    assert read.techniques["made_up"].differs_by_design == ["nothing"]
    assert read.tasks["digits-cnn"].metric == "accuracy"
    assert find_case(read, PLAIN).process["threads"] == {"intra_op": 2}


def test_break_even_is_the_extra_first_call_over_what_a_step_gains():
    found = fill(nothing(), {CHANGED: times(0.5)})
    found.of(PLAIN).cold_starts = [cold(s) for s in (0.9, 1.0, 1.1)]
    found.of(CHANGED).cold_starts = [cold(s) for s in (10.0, 11.0, 13.0)]
    made = found.record()
    changed, ratio = find_case(made, CHANGED), find_comparison(made, CHANGED, PLAIN)
    step = find_case(made, PLAIN).timing.median_s
    even = changed.metrics["break_even_steps"]
    assert even.value == pytest.approx(10.0 / (step * (1 - ratio.ratio)))
    least, most = ((e / (step * (1 - r))) for e, r in zip((9.0, 12.0), ratio.ci, strict=True))
    assert even.ci == pytest.approx((least, most))
    assert changed.metrics["cold_first_calls_s"].value == 11.0
    assert changed.metrics["cold_first_calls_s"].samples == [10.0, 11.0, 13.0]
    for steps in (100, 1_000, 10_000):
        total = changed.metrics[f"total_{steps}_steps_s"].value
        assert total == pytest.approx(11.0 + (steps - 1) * changed.timing.median_s)


@pytest.mark.parametrize(
    ("factor", "starts", "value"),
    [
        (1.5, 3, None),  # what is no faster never breaks even
        (0.5, 3, 0.0),  # a cheap first call does at once
        (0.5, 1, "none"),  # one cold start tells of none
    ],
)
def test_where_there_is_a_break_even(factor, starts, value):
    found = fill(nothing(), {CHANGED: times(factor)})
    for name, seconds in ((PLAIN, 5.0), (CHANGED, 1.0)):
        found.of(name).cold_starts = [cold(seconds)] * starts
    even = find_case(found.record(), CHANGED).metrics.get("break_even_steps")
    assert (even.value if even else "none") == value


def test_a_probe_s_figures_stand_beside_the_derived_ones():
    found = fill(nothing())
    found.of(PLAIN).probed = {"largest_batch": Metric(value=640, unit="samples")}
    metrics = find_case(found.record(), PLAIN).metrics
    assert (metrics["largest_batch"].value, metrics["largest_batch"].unit) == (640, "samples")
    assert "samples_per_s" in metrics


def test_repeated_memory_carries_its_scatter():
    found = fill(nothing())
    starts = [(100, 150, 220, 240), (110, 150, 230, 280), (90, 150, 220, 260)]
    found.of(PLAIN).cold_starts = [cold(0.7, *peaks) for peaks in starts]
    found.of(CHANGED).cold_starts = [cold(0.7)]
    found.of(LOOSE).cold_starts = [cold(0.7, None, None, None, None)]
    plain, once, unseen = (
        find_case(found.record(), name).memory for name in (PLAIN, CHANGED, LOOSE)
    )
    assert plain.samples["above_import_bytes"] == [140, 170, 170]
    assert plain.above_import_bytes == pytest.approx(160)
    assert plain.above_import_ci[0] < 140 < 180 < plain.above_import_ci[1]
    assert plain.steady_peak_bytes == 260
    assert once.above_import_ci is None
    assert unseen.rest_bytes is None


def test_sizes_are_exact_and_of_trained_weights_where_accuracy_is():
    found = fill(nothing())
    for name in (PLAIN, CHANGED):
        artifact = Artifact(bytes=1000, compressed_bytes=300)
        found.of(name).cold_starts = [cold(0.7, artifact=artifact)]
    sizes = [Artifact(bytes=1000, compressed_bytes=size) for size in (910, 930, 920)]
    found.of(CHANGED).trained = Trained(per_seed=[95.0, 96.0, 94.0], artifacts=sizes)
    made = found.record()
    initial, trained = (find_case(made, name).metrics for name in (PLAIN, CHANGED))
    assert initial["compressed_artifact"].value == 300
    assert trained["compressed_artifact"].value == 920
    assert trained["compressed_artifact"].samples == [910, 930, 920]
    assert trained["artifact"].value == find_case(made, CHANGED).artifact_bytes == 1000
    for metrics in (initial, trained):
        assert metrics["artifact"].ci is metrics["compressed_artifact"].ci is None


def test_what_makes_rows_comparable_stands_in_the_record():
    changed = replace(TECHNIQUE.variants[1], changes="weights", title="changed in plain words")
    variants = (TECHNIQUE.variants[0], changed, TECHNIQUE.variants[2])
    made = fill(nothing(replace(TECHNIQUE, variants=variants))).record()
    plain, other = find_case(made, PLAIN), find_case(made, CHANGED)
    assert (plain.changes_math, plain.changes_weights) == (False, False)
    assert (other.changes_math, other.changes_weights) == (True, True)
    assert plain.loss_tolerance == TASKS["digits-cnn"].parity
    assert find_case(made, LOOSE).loss_tolerance == 0.05
    assert (plain.title, other.title) == ("plain", "changed in plain words")
    assert plain.flops == train_step_flops(TASKS["digits-cnn"].model, 4)


def test_an_interrupted_write_leaves_the_old_record_whole(tmp_path, monkeypatch):
    found = fill(nothing(), blocks=2)
    before = encode(found.written(tmp_path))

    def interrupted(source, target):
        assert json.loads(source.read_text("utf-8"))["finished"] is True
        raise KeyboardInterrupt

    found.state.finished = True
    monkeypatch.setattr(folders.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        found.written(tmp_path)
    assert encode(load(tmp_path)) == before


WRITER = """
import sys
from pathlib import Path
from bench.harness.recorder import Recorder
from tests.harness.test_record import fill, nothing
found = fill(nothing(), blocks=3)
recorder = Recorder(Path(sys.argv[1]), found.plan, found.state, say=print)
recorder.write()
print("written", flush=True)
while True:
    recorder.write()
"""


@pytest.mark.timeout(60)
def test_a_reader_never_sees_half_a_record_whenever_the_writer_is_killed(tmp_path):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert writer.stdout.readline() == b"written\n"
        read = [load(tmp_path) for _ in range(100)]
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    assert len({encode(each.but(seconds={})) for each in [*read, load(tmp_path)]}) == 1


# Folders ----------------------------------------------------------------------------------------


def test_a_copy_of_the_last_run_stays_what_it_is(tmp_path):
    (tmp_path / "latest").mkdir()
    with pytest.raises(OSError, match="is a folder, not a link to the last run"):
        new_folder(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "latest"]


class Now(datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz=None):
        return datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "datetime", Now)
    made: list = []
    threads = [threading.Thread(target=lambda: made.append(new_folder(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8
    assert all(folder.is_dir() for folder in made)
    assert (tmp_path / "2026-01-02T03-04-05Z") in made
    assert (tmp_path / "latest").resolve() in made
    left = {path.name for path in tmp_path.iterdir()} - {folder.name for folder in made}
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

    monkeypatch.setattr(folders.Path, "symlink_to", refuse)
    new_folder(tmp_path)
    second = new_folder(tmp_path)
    assert (tmp_path / "latest").read_text() == second.name


# Certificates -----------------------------------------------------------------------------------


def changed_losses(step, factor):
    return [loss * (factor if i == step else 1) for i, loss in enumerate(LOSSES)]


def test_equal_work_is_compared():
    made = fill(nothing(), {CHANGED: times(0.5)}).record()
    one = find_comparison(made, CHANGED, PLAIN)
    assert (one.verdict, one.reason, one.kind, one.n) == ("faster", None, "baseline", 8)
    assert one.ratio == pytest.approx(0.5, rel=0.01)
    assert one.ci[0] < one.ratio < one.ci[1]
    assert find_comparison(made, CHANGED, TF_CHANGED).kind == "framework"
    assert find_comparison(made, PLAIN, TF_PLAIN).verdict == "equivalent"


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
def test_other_work_is_not_comparable(values, reason):
    made = fill(nothing(), {CHANGED: times(0.5, **values)}).record()
    for other in (PLAIN, TF_CHANGED):
        one = find_comparison(made, CHANGED, other)
        assert one.verdict == "not comparable"
        assert one.reason.startswith(reason)
        assert one.ratio == pytest.approx(0.5, rel=0.01)  # shown, but judged no win
    assert find_comparison(made, PLAIN, TF_PLAIN).verdict == "equivalent"


# Verdicts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "difference", "verdict"),
    [
        (0.5, -1.5, "faster, less accurate"),
        *((0.5, difference, "faster") for difference in (-0.5, 0.0, 4.0)),
        *((2.0, difference, "slower") for difference in (-5, 0, 0.5)),
        (2.0, 5, "slower, more accurate"),  # the win is the denominator's
    ],
)
def test_a_win_that_costs_more_than_the_margin_is_no_win(factor, difference, verdict):
    found = fill(nothing(), {CHANGED: times(factor)})
    made = with_accuracy(found, **{PLAIN: 0, CHANGED: difference, TF_CHANGED: 0}).record()
    assert find_comparison(made, CHANGED, PLAIN).verdict == verdict
    assert find_comparison(made, CHANGED, TF_CHANGED).verdict == verdict


def test_a_win_that_lost_accuracy_at_another_batch_is_no_win_either():
    work = Workload("digits-cnn", "small", accuracy=True)
    found = nothing(replace(TECHNIQUE, workloads=(work, replace(work, batch="compute"))))
    plain, changed = (
        [name for name in found.state.cases if name.endswith(f"/pt/{row}")]
        for row in ("plain", "changed")
    )
    fill(found, dict.fromkeys(changed, times(0.5)))
    made = with_accuracy(found, **{plain[0]: 0, changed[0]: -1.5}).record()
    for pair in zip(changed, plain, strict=True):
        assert find_comparison(made, *pair).verdict == "faster, less accurate"


@pytest.mark.parametrize(
    ("task", "batch", "lost", "kept"),
    [("text-gpt", 2, 0.1, [-0.1]), ("digits-detection", 4, -2.5, [-1.5, 9])],
)
def test_each_task_s_metric_is_lost_in_its_direction_beyond_its_margin(task, batch, lost, kept):
    """Bits per character upwards, mean average precision downwards."""
    technique = replace(TECHNIQUE, workloads=(Workload(task, "small", accuracy=True),))
    plain, changed = (f"made_up/{task}-{batch}/pt/{name}" for name in ("plain", "changed"))
    for difference in (lost, *kept):
        found = fill(nothing(technique), {changed: times(0.5)})
        made = with_accuracy(found, **{plain: 0, changed: difference}).record()
        verdict = "faster" if difference in kept else "faster, less accurate"
        assert find_comparison(made, changed, plain).verdict == verdict


def test_accuracy_is_compared_with_the_own_baseline():
    found = with_accuracy(fill(nothing()), **{PLAIN: 0, CHANGED: -3, TF_CHANGED: 0})
    made = found.record()
    difference = find_case(made, CHANGED).accuracy.difference
    assert difference.mean == pytest.approx(-3)
    assert difference.verdict == "worse"
    assert find_case(made, PLAIN).accuracy.difference is None
    assert find_case(made, TF_CHANGED).accuracy.difference is None  # its baseline was not trained
    assert find_case(made, LOOSE).accuracy is None


def test_what_parts_took_adds_up():
    found = nothing()
    for part, seconds in (("cold", 1.5), ("probe", 2.0), ("cold", 0.5)):
        found.state.spend(part, seconds)
        found.of(PLAIN).spend(part, 2 * seconds)
    found.state.add_match(found.plan.every)
    for number, seconds in enumerate((3.0, 4.0)):
        took = {"rounds": seconds, "cold": 1.0}
        play(found, 0, number, {PLAIN: msgspec.structs.replace(block(), seconds=took)})
    made = found.record()
    assert (made.seconds["cold"], made.seconds["probe"]) == (2.0, 2.0)
    assert find_case(made, PLAIN).seconds == {"cold": 6.0, "probe": 4.0, "rounds": 7.0}


@pytest.mark.parametrize(("pt", "tf"), [(CHANGED, TF_PLAIN), (PLAIN, TF_CHANGED)])
def test_best_against_best_is_the_fastest_of_each_side(pt, tf):
    made = fill(nothing(), {pt: times(0.5), tf: times(0.8)}).record()
    (best,) = [c for c in made.comparisons if c.variant.startswith("best")]
    assert (best.numerator, best.denominator) == (pt, tf)
    assert best.ratio == pytest.approx(0.5 / 0.8, rel=0.01)
    pairs = [(c.numerator, c.denominator) for c in made.comparisons]
    assert len(pairs) == len(set(pairs))


def test_twins_that_are_the_best_are_compared_once():
    made = fill(nothing(), {CHANGED: times(0.5), TF_CHANGED: times(0.8)}).record()
    assert not any(c.variant.startswith("best") for c in made.comparisons)


# Failures ---------------------------------------------------------------------------------------


def test_a_failed_case_loses_its_comparisons_alone():
    def dies(index):
        failed = {"samples": [], "status": "FAILED", "reason": "killed"}
        return block(number=index, **(failed if index % 100 == 3 else {}))

    made = fill(nothing(), {CHANGED: dies}).record()
    one = find_case(made, CHANGED)
    assert (one.status, one.reason) == ("FAILED", "killed")
    assert len(one.timing.step_s["0"]) == 7  # what was measured is kept
    assert one.timing.median_s is None
    assert one.metrics == {}
    assert not any(CHANGED in (c.numerator, c.denominator) for c in made.comparisons)
    assert find_comparison(made, PLAIN, TF_PLAIN).n == 8


def test_the_first_reason_stands():
    case = nothing().of(PLAIN)
    case.fail("FAILED", "first")
    case.fail("UNSUPPORTED", "second")
    assert (case.status, case.reason) == ("FAILED", "first")


def test_a_record_without_any_block_can_be_written(tmp_path):
    made = nothing().written(tmp_path)
    assert made.comparisons == []
    assert {case.status for case in made.cases} == {"OK"}
    assert made.noise_floor.shortest_sample_s is None


# Split matches ----------------------------------------------------------------------------------


def test_baselines_that_play_in_several_parts_are_compared_once():
    found = nothing(MANY)
    parts = found.plan.matches()
    assert len(parts) > 1
    for part in parts:
        match = found.state.add_match(part)
        factor = 1 + match  # each part finds the machine at another speed
        for number in range(3):
            made = {c.id: block(factor * STEP_S, 100 * match + number) for c in part}
            play(found, match, number, made)
    made = found.record()
    keys = [(c.kind, c.numerator, c.denominator) for c in made.comparisons]
    assert len(keys) == len(set(keys))
    assert (("framework", PLAIN, TF_PLAIN)) in keys
    compared = {c.numerator for c in made.comparisons if c.kind == "baseline"}
    assert compared == {c.id for p in parts for c in p if c.variant.name.startswith("variant")}
    for one in made.comparisons:  # a part's speed cancels
        assert one.ratio == pytest.approx(1, rel=0.02)
    middle = float(np.exp(np.median(np.log(range(1, len(parts) + 1)))))
    for one in made.cases:  # the speed of the middle part, with what each part has to say
        assert one.timing.median_s == pytest.approx(middle * STEP_S, rel=0.02)
        played = {str(n) for n, part in enumerate(parts) if one.id in {c.id for c in part}}
        assert one.timing.step_s.keys() == played
        assert {len(blocks) for blocks in one.timing.step_s.values()} == {3}


@pytest.mark.parametrize("lost", [(), (1,), (0, 2)], ids=["whole", "one", "two"])
def test_times_and_ratios_agree_over_all_parts_and_blocks(tmp_path, lost):
    """Also where the machine drifts, and a part lacks blocks, as after an interruption."""
    random, found = np.random.default_rng(7), nothing(MANY)
    for part in found.plan.matches():
        match = found.state.add_match(part)
        for number in range(4):
            if match == 1 and number in lost:
                continue
            drift = np.exp(np.cumsum(random.normal(0, 0.1, 30)) + random.normal())
            noise = {c.id: np.exp(random.normal(0, 0.05, 30)) for c in part}
            made = {n: block(samples=(drift * STEP_S * one).tolist()) for n, one in noise.items()}
            play(found, match, number, made)
    made = found.written(tmp_path)
    times_of = {case.id: case.timing.median_s for case in made.cases}
    for one in made.comparisons:
        expected = times_of[one.numerator] / times_of[one.denominator]
        assert one.ratio == pytest.approx(expected, rel=1e-12)
    assert len(made.comparisons) > 20
    assert {one.n for one in made.comparisons} == ({4, 4 - len(lost)} if lost else {4})


def test_the_record_is_the_analysis_of_what_was_measured(tmp_path):
    """And of nothing else: not of what is derived in it."""
    found = fill(nothing(peak_flops={"float32": 1e11}), {CHANGED: times(0.5)})
    with_accuracy(found, **{PLAIN: 0, CHANGED: -3, TF_CHANGED: 0})
    for name in (PLAIN, CHANGED):
        found.of(name).cold_starts = [cold(seconds) for seconds in (1.0, 2.0)]
        found.of(name).probed = {"figure": Metric(value=1.0, unit="1", samples=[1.0])}
    made = found.written(tmp_path)
    measured = raw(made)
    assert not measured.comparisons
    assert {case.timing.median_s for case in measured.cases} == {None}
    assert made.comparisons
    assert made.noise_floor.ratios > 3
    assert encode(analyse(measured)) == encode(made)


# Figures ----------------------------------------------------------------------------------------


def test_the_noise_floor_tells_what_the_run_can_tell():
    found = fill(nothing(), {PLAIN: times(1, empty_s=2e-5, steps=7)})
    floor = found.record().noise_floor
    assert [control.framework for control in floor.controls] == ["pt", "tf"]
    assert all(control.verdict == "equivalent" for control in floor.controls)
    assert 1e-4 < floor.median_half_width <= floor.p90_half_width < 0.03
    assert floor.empty_sample_share["pt"] == pytest.approx(2e-5 / STEP_S, rel=0.02)
    assert floor.empty_sample_share["tf"] == pytest.approx(1e-8 / STEP_S, rel=0.02)
    assert floor.shortest_sample_s == pytest.approx(5 * STEP_S, rel=0.02)
