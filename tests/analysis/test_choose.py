"""Advice: only what keeps accuracy, at the figures that were measured; and what it says of others.

The first part asks the published records, whose answers are worked out here in another way: from
their JSON, without `bench.analysis`.
"""

from __future__ import annotations

import copy
import json
import re
from math import exp, log
from pathlib import Path
from statistics import fmean, median

import pytest

from bench import choose
from bench.analysis import decisions
from bench.analysis.decisions import GOALS, Limits
from bench.analysis.reading import load
from bench.report.answer import text
from tests.report.test_report import record

DOCS = Path(__file__).parents[2] / "docs"
PUBLISHED = sorted(path.parent for path in DOCS.glob("**/results.json"))
WORK = "digits-cnn, batch 64"


def published(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text("utf-8"))


def by_id(run: dict) -> dict[str, dict]:
    return {case["id"]: case for case in run["cases"]}


def blocks_of(timing: dict) -> list[list[float]]:
    """Samples by block; newer records have them by match, then by block."""
    found = timing["step_s"]
    if isinstance(found, dict):
        return [block for match in found.values() for block in match.values()]
    return found


def keeps_accuracy(run: dict, case: dict) -> bool:
    """By the bound of the interval, or by the first ten losses; worked out from the record alone.

    Where a case has neither, its variant at another workload may show it.
    """
    if case["role"] == "baseline":
        return True
    task = run["tasks"][case["task"]]
    same = ("technique", "variant", "framework", "flavour")
    kin = [c for c in run["cases"] if all(c.get(k) == case.get(k) for k in same)]
    for other in [case, *(c for c in kin if c["task"] == case["task"])]:
        if other["accuracy"] and other["accuracy"]["difference"]:
            low, high = other["accuracy"]["difference"]["ci"] or (-1e9, 1e9)
            worst = low if task["metric"] == "accuracy" else -high
            return worst >= -task["margin"]
    return any(_same_losses(run, other) for other in [case, *kin])


def _same_losses(run: dict, case: dict) -> bool:
    keys = ("technique", "task", "batch_size", "mode", "framework", "flavour")
    for base in run["cases"]:
        if base["role"] == "baseline" and all(base.get(k) == case.get(k) for k in keys):
            pair = [(c["certificate"] or {}).get("losses") for c in (case, base)]
            bar = 1e-5  # what float32 rounds; bfloat16 was seen at 9e-5
            return None not in pair and all(
                abs(a - b) <= bar * abs(b) for a, b in zip(*pair, strict=True)
            )
    return False


# The published records ---------------------------------------------------------------------------


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda path: path.name)
def test_every_answer_keeps_accuracy_and_has_the_row_s_own_figure(folder):
    run, raw = load(folder), published(folder)
    cases, seen = by_id(raw), 0
    for work in decisions.works(run):
        for goal in work.goals:
            found = decisions.answer(run, work, goal, Limits())
            for option in filter(None, (found and found.best, found and found.cheapest)):
                case, figure = cases[option.case["id"]], found.figure(option)
                if work.kind in (decisions.TRAIN, decisions.PREDICT):
                    assert keeps_accuracy(raw, case), case["id"]
                if goal.figure == "time":
                    timing = case["timing"]
                    assert figure.value == timing["median_s"]
                    whole = exp(fmean(log(median(block)) for block in blocks_of(timing)))
                    assert figure.value == pytest.approx(whole, rel=0.03)
                    if timing["ci_s"]:
                        assert [figure.low, figure.high] == timing["ci_s"]
                if goal.figure == "size":
                    assert figure.value == figure.low == figure.high == case["artifact_bytes"]
                seen += 1
    assert seen


@pytest.mark.parametrize("name", ["smaller_models", "all_techniques", "export", "avx2"])
def test_the_best_is_the_smallest_figure_of_all_rows_that_keep_accuracy(name):
    run, raw = load(DOCS / name), published(DOCS / name)
    for found in choose.advise(run, None, Limits()):
        if found.goal.figure != "time":
            continue
        case = found.best.case
        keys = ("task", "batch_size", "mode")
        times = [
            other["timing"]["median_s"]
            for other in raw["cases"]
            if all(other[k] == case[k] for k in keys)
            and other["status"] == "OK"
            and other["role"] == "variant"
            and other["timing"]["median_s"]
            and keeps_accuracy(raw, other)
        ]
        assert found.figure(found.best).value <= min(times, default=float("inf"))


def said(folder: str, *options: str, capsys) -> str:
    assert choose.main([str(DOCS / folder), *options]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_fastest_prediction_is_not_the_one_that_lost_twelve_points(capsys):
    out = said("smaller_models", "--goal", "latency", "--task", "digits-cnn", capsys=capsys)
    best = re.search(r"best (.*?) why", out)[1]
    assert "2_distilled_int8" in best
    assert "0.744 ms (0.719–0.771)" in best
    assert "accuracy +1.81" in best
    assert "0.600" not in out
    options = ("--goal", "latency", "--task", "digits-cnn", "--all")
    every = said("smaller_models", *options, capsys=capsys)
    assert re.search(r"left out PyTorch channels_80 \(\w+\): 0.786 ms \(0.753–0.819\)", every)


def test_the_smallest_file_is_not_the_one_that_lost_seventy_points(capsys):
    out = said("smaller_models", "--goal", "size", "--task", "digits-cnn", capsys=capsys)
    best = re.search(r"best (.*?) why", out)[1]
    assert "static_int8" in best
    assert "0.0416 MB" in best
    assert "ptq_2" not in best
    assert "qat_2" not in best


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda path: path.name)
def test_no_interval_is_made_up(folder):
    """Brackets only where the record has an interval; sizes have none."""
    run = load(folder)
    for work in decisions.works(run):
        for goal in work.goals:
            if found := decisions.answer(run, work, goal, Limits()):
                for option in (found.best, *found.equal, *found.rest):
                    figure = found.figure(option)
                    metrics, timing = option.case["metrics"] or {}, option.case["timing"] or {}
                    if figure.kind == "interval":
                        pairs = [timing.get("ci_s"), *(m["ci"] for m in metrics.values())]
                        assert [figure.low, figure.high] in pairs
                    if goal.name in ("memory", "size"):
                        out = "\n".join(text([found], 80, every=True))
                        assert not re.search(r"\([\d.,]+–[\d.,]+\)", out)


def test_one_table_holds_all_techniques_of_a_piece_of_work_and_baselines_of_two_programs():
    (work,) = [
        w
        for w in decisions.works(load(DOCS / "smaller_models"))
        if w.title == "digits-cnn, batch 128, prediction"
    ]
    assert {o.case["technique"] for o in work.options} == {
        "compression",
        "post_training_quantization",
        "quantization_aware_training",
        "structured_pruning",
    }
    times = {
        round(1e3 * o.figures["time"].value, 2)
        for o in work.options
        if o.is_baseline and o.case["framework"] == "pt" and "time" in o.figures
    }
    assert times == {1.19, 1.76}  # TorchInductor, eager


def test_what_is_beaten_is_nowhere_better():
    for folder in PUBLISHED:
        for work in decisions.works(load(folder)):
            for option in (o for o in work.options if o.beaten):
                by = option.beaten
                for name in decisions.DECIDING:
                    if name in option.figures:
                        ours, theirs = by.figures[name].value, option.figures[name].value
                        more = name in decisions.MORE_IS_BETTER
                        assert ours >= theirs if more else ours <= theirs
                assert by.work <= option.work


def test_pipelines_devices_and_export_take_part_with_their_own_figures(capsys):
    assert "2,020 samples/s" in said("input_pipelines", "--task", "photos", capsys=capsys)
    assert "16,700 samples/s" in said("parallel", "--task", "digits-cnn", capsys=capsys)
    assert "litert (export): 0.0199 ms" in said("export", capsys=capsys)


def test_a_thousand_steps_do_not_repay_the_compiler(capsys):
    options = ("--goal", "train-speed", "--task", "digits-cnn")
    whole = said("all_techniques", *options, "--steps", "1000", capsys=capsys)
    assert "best PyTorch channels_last (memory_format): 5.75 s" in whole
    ever = said("all_techniques", *options, "--steps", "100000", capsys=capsys)
    assert "best PyTorch 2_compiled (stacking: channels_last + compile)" in ever


# Made-up runs ------------------------------------------------------------------------------------


@pytest.fixture
def run():
    return record()


def advice(run, goal, work=WORK, **limits):
    """The answer for one piece of work."""
    found = choose.advise(run, goal, Limits(**limits))
    (found,) = [a for a in found if a.work.title.startswith(work)]
    return found


def names(options):
    return [o.name for o in options]


def case(run, name):
    return next(c for c in run["cases"] if c["id"] == f"mixed_precision/digits-cnn-64/{name}")


def test_a_row_that_is_not_comparable_is_no_candidate(run):
    best = advice(run, "train-speed").best
    for comparison in run["comparisons"]:
        if comparison["numerator"] == best.case["id"]:
            comparison["verdict"] = "not comparable"
    found = advice(run, "train-speed")
    assert found.best.case["id"] != best.case["id"]
    assert best.case["id"] in [o.case["id"] for o, _ in found.refused]


def with_another_technique(run, losses=None):
    """The rows once more, as those of another technique."""
    more = copy.deepcopy([c for c in run["cases"] if c["task"] == "digits-cnn"])
    for entry in more:
        entry["technique"] = "compilation"
        entry["id"] = entry["id"].replace("mixed_precision", "compilation")
        if losses and entry["certificate"]:
            entry["certificate"]["losses"] = losses
    run["cases"] += more
    return run


def test_techniques_over_other_work_are_not_put_side_by_side(run):
    works = [w.title for w in decisions.works(with_another_technique(run, losses=[1.0] * 10))]
    assert f"{WORK}, train step" in works
    assert f"{WORK}, train step (compilation)" in works


@pytest.mark.parametrize(
    ("bounds", "kept"), [([-0.9, 0.1], True), ([-1.1, 0.9], False), (None, False)]
)
def test_accuracy_is_kept_by_the_bound_of_its_interval(run, bounds, kept):
    best = case(run, "pt/bf16")
    best["accuracy"]["difference"] = {"mean": -0.1, "ci": bounds, "verdict": None}
    best["certificate"]["losses"] = [value + 0.1 for value in best["certificate"]["losses"]]
    found = advice(run, "train-speed")
    assert (found.best.case["id"] == best["id"]) == kept


def test_accuracy_that_was_not_measured_is_said_and_not_passed_over(run):
    other = case(run, "pt/bf16")
    other["accuracy"] = None
    other["certificate"]["losses"] = [value + 0.1 for value in other["certificate"]["losses"]]
    found = advice(run, "train-speed")
    assert names(found.unknown) == ["PyTorch bf16"]
    said = " ".join(" ".join(text([found], 80)).split())
    assert "PyTorch bf16 (mixed_precision) has" in said
    assert "its accuracy was not measured" in said


def test_an_allowed_drop_takes_the_margin_s_place(run):
    case(run, "pt/bf16")["accuracy"]["difference"] = {"mean": -0.7, "ci": [-0.8, -0.6]}
    case(run, "pt/bf16")["certificate"] = None
    strict, lax = (advice(run, "train-speed", accuracy_drop=p) for p in (0.5, 0.9))
    assert "PyTorch bf16" in [o.name for o, _ in strict.refused]
    assert lax.best.name == "PyTorch bf16"


def test_a_memory_budget_leaves_out(run):
    case(run, "pt/bf16")["memory"]["steady_peak_bytes"] += 10**9
    found = advice(run, "train-speed", memory=500e6)
    assert ("PyTorch bf16", "takes 1.12e+03 MB") in [(o.name, why) for o, why in found.refused]


# The command -------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path, capsys):
    def go(run, *options):
        path = tmp_path / "results.json"
        path.write_text(json.dumps(run), "utf-8")
        status = choose.main([str(path), *options])
        return status, capsys.readouterr()

    return go


@pytest.mark.parametrize("options", [[], ["--all"], *(["--goal", goal] for goal in GOALS)])
def test_the_answer_holds_80_columns(capsys, options):
    assert choose.main([str(DOCS / "smaller_models"), *options]) in (0, 2)
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (record, ["--goal", "size"], "no row of this run has a size on disk"),
        (record, ["--goal", "latency"], "predictions are timed at --effort full"),
        (record, ["--goal", "memory", "--memory-budget", "1KB"], "within the limits"),
        (record, ["--goal", "memory", "--task", "nothing"], "the run has no 'nothing'; it has"),
        (lambda: record("quick"), ["--goal", "train-speed"], "run it at default effort"),
        (lambda: record("quick"), [], "run it at default effort"),
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
