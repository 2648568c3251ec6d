"""Advice: the best of a run for one aim, what cannot be told from it, and what is left out."""

from __future__ import annotations

import copy
import json

import pytest

from bench import choose
from bench.choose import Limits
from tests.report.test_report import record

WORK = "digits-cnn, batch 64"


@pytest.fixture
def run():
    return record()


def advice(run, goal, work=WORK, **limits):
    """The advice for one piece of work."""
    (found,) = [a for a in choose.advise(run, goal, Limits(**limits)) if a.work.startswith(work)]
    return found


def names(candidates):
    return [c.name.removesuffix(" (mixed_precision)") for c in candidates]


def case(run, name):
    return next(c for c in run["cases"] if c["id"] == f"mixed_precision/digits-cnn-64/{name}")


def test_the_fastest_step_and_what_cannot_be_told_from_it(run):
    found = advice(run, "train-speed")
    assert names([found.best]) == ["PyTorch bf16"]
    assert names(found.equal) == ["PyTorch bf16_fp32_head"]  # 2% slower, intervals of 2%
    assert names(found.rest)[:2] == ["TensorFlow bf16", "TensorFlow bf16_fp32_head"]
    assert found.best.low < found.best.value < found.best.high


def test_frameworks_are_compared_by_their_ratios_and_not_by_their_seconds(run):
    """The machine was slower while TensorFlow's rows of this record were taken."""
    before = {c.name: c.value for c in [advice(run, "train-speed").best]}
    for entry in run["cases"]:
        if entry["framework"] == "tf" and entry["timing"]["median_s"]:
            entry["timing"]["median_s"] *= 0.1
    assert {c.name: c.value for c in [advice(run, "train-speed").best]} == before


def with_another_technique(run, losses=None):
    """The rows once more, as those of a technique whose variant takes half the time."""
    more = copy.deepcopy([c for c in run["cases"] if c["task"] == "digits-cnn"])
    ratios = copy.deepcopy([c for c in run["comparisons"] if c["task"] == "digits-cnn"])
    for entry in [*more, *ratios]:
        entry["technique"] = "compilation"
        for key in ("id", "numerator", "denominator"):
            if key in entry:
                entry[key] = entry[key].replace("mixed_precision", "compilation")
    for ratio in ratios:
        if ratio["kind"] == "baseline":
            ratio["ratio"] *= 0.5
    for entry in more:
        if losses and entry["certificate"]:
            entry["certificate"]["losses"] = losses
    run["cases"] += more
    run["comparisons"] += ratios
    return run


def test_techniques_over_the_same_baseline_are_put_side_by_side(run):
    found = advice(with_another_technique(run), "train-speed")
    assert found.best.name == "PyTorch bf16 (compilation)"
    assert found.work == f"{WORK} (mixed_precision, compilation)"


def test_the_baselines_of_techniques_count_once(run):
    found = advice(with_another_technique(run), "train-speed")
    everyone = [found.best, *found.equal, *found.rest]
    assert sum(c.case["role"] == "baseline" for c in everyone) == 2


def test_techniques_over_other_work_are_not(run):
    run = with_another_technique(run, losses=[1.0] * 10)
    found = {a.work: a.best.name for a in choose.advise(run, "train-speed", Limits())}
    assert found[f"{WORK} (mixed_precision)"] == "PyTorch bf16 (mixed_precision)"
    assert found[f"{WORK} (compilation)"] == "PyTorch bf16 (compilation)"


def test_a_row_that_is_not_comparable_is_no_candidate(run):
    for comparison in run["comparisons"]:
        if comparison["numerator"] == case(run, "pt/bf16")["id"]:
            comparison["verdict"] = "not comparable"
    assert names([advice(run, "train-speed").best]) == ["PyTorch bf16_fp32_head"]


def test_a_drop_in_accuracy_leaves_out(run):
    case(run, "pt/bf16")["accuracy"]["difference"]["mean"] = -0.7
    found = advice(run, "train-speed", accuracy_drop=0.5)
    assert names([found.best]) == ["PyTorch bf16_fp32_head"]
    assert ("PyTorch bf16 (mixed_precision)", "changes the accuracy by -0.70 ± 0.30") in (
        found.left_out
    )


def test_unknown_accuracy_leaves_out_unless_the_losses_are_the_baseline_s(run):
    same, other = case(run, "pt/bf16"), case(run, "tf/bf16")
    same["accuracy"] = other["accuracy"] = None
    other["certificate"]["losses"] = [value + 0.1 for value in other["certificate"]["losses"]]
    left_out = dict(advice(run, "train-speed", accuracy_drop=0.5).left_out)
    assert left_out["TensorFlow bf16 (mixed_precision)"] == "its accuracy was not measured here"
    assert "PyTorch bf16 (mixed_precision)" not in left_out


def test_a_memory_budget_leaves_out(run):
    case(run, "pt/bf16")["memory"]["steady_peak_bytes"] += 10**9
    case(run, "pt/bf16_fp32_head")["memory"] = None
    found = advice(run, "train-speed", memory=500e6)
    assert names([found.best]) == ["TensorFlow bf16"]
    reasons = dict(found.left_out)
    assert reasons["PyTorch bf16 (mixed_precision)"] == "takes 1,120 MB"
    assert reasons["PyTorch bf16_fp32_head (mixed_precision)"] == "its memory was not measured"


def test_few_steps_are_decided_by_the_first_call(run):
    case(run, "pt/bf16")["timing"]["cold_first_call_s"] = 30.0
    few, many = (advice(run, "train-speed", steps=n) for n in (100, 1_000_000))
    assert names([few.best]) != ["PyTorch bf16"]
    assert names([many.best]) == ["PyTorch bf16"]
    step = advice(run, "train-speed").best.value
    assert many.best.value == pytest.approx(30.0 + 999_999 * step)


def test_memory_was_measured_once_and_ten_percent_is_no_difference(run):
    case(run, "tf/bf16")["memory"]["steady_peak_bytes"] -= 60_000_000
    found = advice(run, "memory")
    assert names([found.best]) == ["TensorFlow bf16"]
    assert not found.equal
    assert len(found.rest) == 7
    case(run, "pt/fp32")["memory"]["steady_peak_bytes"] -= 59_000_000
    assert names(advice(run, "memory").equal) == ["PyTorch baseline"]


def test_cold_start_takes_the_range_of_repeated_ones(run):
    for name, bounds in (("pt/fp32", [0.2, 0.5]), ("pt/bf16", [0.1, 0.3])):
        entry = case(run, name)
        entry["timing"]["cold_first_call_s"] = sum(bounds) / 2
        entry["metrics"]["cold_first_calls_s"] = {"value": sum(bounds) / 2, "ci": bounds}
    found = advice(run, "cold-start")
    assert names([found.best]) == ["PyTorch bf16"]
    assert "PyTorch baseline" in names(found.equal)


# The command -------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path, capsys):
    def go(run, *options):
        path = tmp_path / "results.json"
        path.write_text(json.dumps(run), "utf-8")
        status = choose.main([str(path), *options])
        return status, capsys.readouterr()

    return go


def test_the_advice_names_its_rows_in_80_columns(command, run):
    status, said = command(run, "--goal", "train-speed", "--task", "digits-cnn")
    assert status == 0
    assert max(map(len, said.out.splitlines())) <= 80
    assert case(run, "pt/bf16")["id"] in said.out
    assert "no measurable difference" in said.out
    assert "text-gpt" not in said.out


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (record, ["--goal", "size"], "no case of this run has a size on disk\n"),
        (record, ["--goal", "latency"], "predictions are timed at --effort full"),
        (record, ["--goal", "memory", "--memory-budget", "1KB"], "within the limits"),
        (record, ["--goal", "memory", "--task", "nothing"], "the run has no 'nothing'; it has"),
        (lambda: record("quick"), ["--goal", "train-speed"], "run it at default effort"),
        (dict, ["--goal", "memory"], "not a record of twinbench"),
    ],
)
def test_what_cannot_be_answered_is_one_clear_line(command, make, options, reason):
    status, said = command(make(), *options)
    assert status == 2
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert reason in said.err


@pytest.mark.parametrize(
    "options",
    [
        ["--goal", "fame"],
        ["--goal", "memory", "--steps", "0"],
        ["--goal", "memory", "--memory-budget", "2"],
    ],
)
def test_bad_options_are_usage_errors(command, run, options):
    with pytest.raises(SystemExit) as stopped:
        command(run, *options)
    assert stopped.value.code == 2
