"""Advice: only what keeps accuracy, at the figures that were measured; and what it says of others.

The first part asks the published records, whose answers are worked out here in another way: from
their JSON, without `bench.analysis`.
"""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from math import exp, log
from pathlib import Path
from statistics import fmean, median

import numpy as np
import pytest
from tests.analysis.test_early_stopping import measured

from bench import choose
from bench.analysis import decisions, reading, schema
from bench.analysis.analyse import analyse, raw
from bench.analysis.decisions import GOALS, Limits
from bench.harness.isolated_measurements import Trained
from bench.harness.plan import EFFORT
from bench.harness.record import Record
from bench.harness.schedule import techniques
from bench.harness.selection import cases_of
from bench.report.answer import lines, rounded, text, why
from bench.report.figures import number
from tests.report.test_report import record

DOCS = Path(__file__).parents[2] / "docs"
PUBLISHED = sorted(path.parent for path in DOCS.glob("**/results.json"))
WORK = "digits-cnn, batch 64"


@cache
def once(folder: Path) -> dict:
    return reading.load(folder)


def load(path: Path) -> dict:
    """Published records are read once: nothing here changes them."""
    return once(path) if path in PUBLISHED else reading.load(path)


@cache
def works_of(folder: Path) -> list[decisions.Work]:
    return decisions.works(once(folder))


def works(run: dict) -> list[decisions.Work]:
    """Those of a published record are looked at once."""
    known = next((folder for folder in PUBLISHED if once(folder) is run), None)
    return works_of(known) if known else decisions.works(run)


@pytest.fixture(autouse=True)
def read_once(monkeypatch):
    monkeypatch.setattr(choose, "load", load)
    monkeypatch.setattr(choose, "works", works)


def published(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text("utf-8"))


def by_id(run: dict) -> dict[str, dict]:
    return {case["id"]: case for case in run["cases"]}


def fastest(samples: list[float]) -> float:
    """The mean of the fastest third, of two at least."""
    return fmean(sorted(samples)[: max(2, round(len(samples) / 3))])


def seconds_of(run: dict, case: dict) -> float | None:
    """The geometric mean over blocks of its fastest third, at the speed of the median match.

    How fast the machine was in a match is told by those of the same work that play in all of them.
    None for who left before others: its time is that of others in blocks that it did not play.
    """
    kin = [c for c in run["cases"] if all(c[k] == case[k] for k in ("task", "batch_size", "mode"))]
    played = [c["timing"]["step_s"] for c in kin if c["timing"]["step_s"] and c["status"] == "OK"]
    program = next(c for c in kin if c["id"] == (case["program"] or case["id"]))
    every = {block for each in played for blocks in each.values() for block in blocks}
    if every != {block for blocks in program["timing"]["step_s"].values() for block in blocks}:
        return None
    found = []
    for match, blocks in program["timing"]["step_s"].items():
        for block, samples in blocks.items():
            matches = sorted({m for each in played for m in each if block in each[m]})
            joint = [each for each in played if all(block in each.get(m, ()) for m in matches)]
            speeds = {
                m: fmean(log(fastest(each[m][block])) for each in joint) for m in matches if joint
            }
            shift = median(speeds.values()) - speeds[match] if joint else 0.0
            found.append(log(fastest(samples)) + shift)
    return exp(fmean(found))


def keeps_accuracy(run: dict, case: dict) -> bool:
    """By the bound of the interval, or by the first losses; worked out from the record alone.

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
                abs(a - b) <= bar * abs(b)
                for a, b in zip(*pair, strict=False)  # of slow steps one may have fewer
            )
    return False


# The published records ---------------------------------------------------------------------------


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda path: path.name)
def test_every_answer_keeps_accuracy_and_has_the_row_s_own_figure(folder):
    run, raw = load(folder), published(folder)
    cases, seen, timed = by_id(raw), 0, 0
    for work in works(run):
        for goal in work.goals:
            found = decisions.answer(run, work, goal, Limits())
            for option in filter(None, (found and found.best, found and found.cheapest)):
                case, figure = cases[option.case["id"]], found.figure(option)
                if work.kind in (decisions.TRAIN, decisions.PREDICT, decisions.PROBE):
                    assert keeps_accuracy(raw, case), case["id"]
                if goal.figure == "time":
                    timing = case["timing"]
                    assert figure.value == timing["median_s"]
                    if expected := seconds_of(raw, case):
                        assert figure.value == pytest.approx(expected, rel=0.03)
                        timed += 1
                    if timing["ci_s"]:
                        assert [figure.low, figure.high] == timing["ci_s"]
                if goal.figure == "size":
                    assert figure.value == figure.low == figure.high == case["artifact_bytes"]
                seen += 1
    assert seen
    assert timed


def test_the_best_is_the_smallest_figure_of_all_rows_that_keep_accuracy():
    run, raw = load(DOCS), published(DOCS)
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


def said(*options: str, capsys) -> str:
    assert choose.main([str(DOCS), *options]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_faster_prediction_that_lost_accuracy_is_left_out_at_its_own_figure(capsys):
    raw = published(DOCS)
    lost = {
        case["variant"]: 1e3 * case["timing"]["median_s"]
        for case in raw["cases"]
        if (case["task"], case["mode"], case["framework"]) == ("digits-cnn", "predict", "pt")
        and case["accuracy"]
        and case["accuracy"]["difference"]
        and case["accuracy"]["difference"]["ci"][0] < -raw["tasks"]["digits-cnn"]["margin"]
    }
    assert lost
    options = ("--goal", "latency", "--task", "digits-cnn", "--all")
    every = said(*options, capsys=capsys)
    for variant, ms in lost.items():
        (found,) = re.findall(
            rf"left out PyTorch [^():]* \([a-z_]+: {variant}\): ([\d.,]+) ms", every
        )
        assert float(found) == pytest.approx(ms, rel=0.005)
        assert not re.search(rf"(best|cheapest) PyTorch [^():]* \([a-z_]+: {variant}\)", every)


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda path: path.name)
def test_no_interval_is_made_up(folder):
    """Brackets only where the record has an interval; sizes have none."""
    run = load(folder)
    for work in works(run):
        for goal in work.goals:
            if found := decisions.answer(run, work, goal, Limits()):
                for option in (found.best, *found.equal, *found.rest):
                    figure = found.figure(option)
                    metrics, timing = option.case["metrics"] or {}, option.case["timing"] or {}
                    if figure.kind == "interval":
                        pairs = [timing.get("ci_s"), *(m["ci"] for m in metrics.values())]
                        memory, accuracy = (option.case[n] or {} for n in ("memory", "accuracy"))
                        pairs.append(memory.get("above_import_ci"))
                        pairs.append((accuracy.get("difference") or {}).get("ci"))
                        assert [figure.low, figure.high] in pairs
                    if goal.name == "size":
                        out = "\n".join(text([found], 80, every=True))
                        assert not re.search(r"\([\d.,]+–[\d.,]+\)", out)


def test_one_table_holds_all_techniques_of_a_piece_of_work_and_baselines_of_two_programs():
    raw = published(DOCS)
    (work,) = [w for w in works(load(DOCS)) if w.title == "digits-cnn, batch 128, prediction"]
    named = {o.case["technique"] for o in work.options}
    assert named | {r.case["technique"] for o in work.options for r in o.repeats} == {
        case["technique"]
        for case in raw["cases"]
        if (case["task"], case["batch_size"], case["mode"]) == ("digits-cnn", 128, "predict")
    }
    assert len(named) > 3
    programs = {
        o.case.get("program") or o.case["id"]
        for o in work.options
        if o.is_baseline and o.case["framework"] == "pt" and "time" in o.figures
    }
    assert len(programs) > 1  # TorchInductor, eager


def test_what_is_beaten_is_nowhere_better():
    for folder in PUBLISHED:
        for work in works(load(folder)):
            for option in (o for o in work.options if o.beaten):
                by = option.beaten
                for name in decisions.DECIDING:
                    if name in option.figures:
                        ours, theirs = by.figures[name].value, option.figures[name].value
                        more = name in decisions.MORE_IS_BETTER
                        assert ours >= theirs if more else ours <= theirs
                assert by.work <= option.work


@pytest.mark.parametrize(
    ("technique", "task", "metric"),
    [
        ("tuned_folder", "photos", "samples_per_s"),
        ("data_parallel", "digits-cnn", "samples_per_s"),
        ("export", "digits-cnn", "latency"),
    ],
)
def test_pipelines_devices_and_export_take_part_with_their_own_figures(
    technique, task, metric, capsys
):
    text = said("--task", task, "--all", capsys=capsys).replace(",", "")
    found = [
        (case["metrics"] or {}).get(metric, {}).get("value")
        for case in published(DOCS)["cases"]
        if case["technique"] == technique and case["task"] == task and case["status"] == "OK"
    ]
    assert any(f"{value:.3g}" in text for value in found if value and value < 1000) or any(
        f"{float(f'{value:.3g}'):.0f} samples/s" in text for value in found if value
    )


@pytest.mark.parametrize("steps", [1000, 100_000])
def test_for_few_steps_the_compiler_is_not_repaid(steps, capsys):
    """The first call and all other steps, worked out from the record."""
    raw = published(DOCS)
    totals = {
        (case["framework"], case["variant"]): first + (steps - 1) * case["timing"]["median_s"]
        for case in raw["cases"]
        if (case["task"], case["batch_size"], case["mode"]) == ("digits-cnn", 128, "train")
        and case["status"] == "OK"
        and case["timing"]["median_s"]
        and (first := case["timing"]["cold_first_call_s"])
        and keeps_accuracy(raw, case)
    }
    framework, variant = min(totals, key=totals.get)
    options = ("--goal", "train-speed", "--task", "digits-cnn", "--steps", str(steps))
    text = said(*options, capsys=capsys)
    side = {"pt": "PyTorch", "tf": "TensorFlow"}[framework]
    part = text[text.index("digits-cnn, batch 128") :]
    assert re.match(rf".*? best {side} .*?\([a-z_]+: {variant}\)", part)
    assert ("compiled" in variant) == (steps > 1000)
    share = re.match(r".*? best .*?; ([\d.]+) of its baseline's", part)[1]
    plain = next(
        case["timing"]
        for case in raw["cases"]
        if (case["task"], case["batch_size"], case["mode"]) == ("digits-cnn", 128, "train")
        and (case["technique"], case["role"]) == ("stacking", "baseline")
        and case["framework"] == framework
    )
    whole = plain["cold_first_call_s"] + (steps - 1) * plain["median_s"]
    assert float(share) == pytest.approx(totals[framework, variant] / whole, abs=1e-3)


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


def test_all_names_what_lacks_the_figure_too(run):
    case(run, "pt/bf16")["memory"] = None
    found = advice(run, "memory")
    assert [option.name for option in found.lacking] == ["PyTorch bf16"]
    said = [words for label, words in lines(found, every=True) if label == "left out"]
    assert "PyTorch bf16 (mixed_precision): its figure was not measured" in said


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
    found = decisions.works(with_another_technique(run, losses=[1.0] * 10))
    titles = [work.title for work in found]
    assert f"{WORK}, train step" in titles
    assert f"{WORK}, train step (compilation)" in titles


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
    (said,) = (words for label, words in lines(found) if label == "perhaps")
    assert said.startswith("PyTorch bf16 (mixed_precision): ")
    assert re.search(r" of its baseline's time, faster; accuracy not measured; takes ", said)


def test_a_smaller_model_that_was_trained_nowhere_is_no_perhaps(run):
    other = case(run, "pt/bf16")
    other["changes_weights"] = other["changes_math"] = True
    other["accuracy"] = None
    other["certificate"]["losses"] = [value + 0.1 for value in other["certificate"]["losses"]]
    found = advice(run, "train-speed")
    assert names(found.unknown) == []
    said = dict(lines(found))
    assert "perhaps" not in said
    assert "is another model, which was trained nowhere" in said["why"]


def test_an_allowed_drop_takes_the_margin_s_place(run):
    case(run, "pt/bf16")["accuracy"]["difference"] = {"mean": -0.7, "ci": [-0.8, -0.6]}
    case(run, "pt/bf16")["certificate"] = None
    strict, lax = (advice(run, "train-speed", accuracy_drop=p) for p in (0.5, 0.9))
    assert "PyTorch bf16" in [o.name for o, _ in strict.refused]
    assert lax.best.name == "PyTorch bf16"


def test_a_memory_budget_leaves_out(run):
    case(run, "pt/bf16")["memory"]["steady_peak_bytes"] += 10**9
    found = advice(run, "train-speed", memory=500e6)
    assert ("PyTorch bf16", "takes 1,124 MB") in [(o.name, why) for o, why in found.refused]


def test_one_block_gives_an_order_and_no_best(command):
    status, said = command(record("quick"), "--goal", "train-speed", "--task", "digits-cnn")
    out = " ".join(said.out.split())
    assert status == 0
    assert "time of a train step (provisional: one block, no interval) first PyTorch fp32" in out
    assert "in order of one block's times" in out
    assert "best" not in out.replace("times the best", "")


def test_only_what_was_measured_repeatedly_is_shown_to_be_worse():
    run = record()
    for each in run["cases"]:
        each["timing"]["cold_first_call_s"] = 30.0
    for name in ("pt/bf16", "pt/fp32"):
        first = {"value": 30.0, "unit": "s", "ci": None, "samples": [29.9, 30.0, 30.1]}
        case(run, name)["metrics"]["cold_first_calls_s"] = first
    found = advice(run, "train-speed", steps=1000)
    said = lines(found, every=True)
    worse, after = ([text for label, text in said if label == name] for name in ("worse", "next"))
    assert [text.partition(" (")[0] for text in worse] == ["PyTorch fp32"]
    assert len(after) == len(found.rest) - 1 > 1
    assert f"1 shown to be worse; {len(after)} in order of values measured once" in why(found)


# Recipes -----------------------------------------------------------------------------------------


def trained(technique="schedules", effort="default", **gained) -> dict:
    """A record of what was only trained: points gained over the baseline."""
    noise = np.array([-0.5, 0.5, 0.2, -0.2])
    technique = techniques()[technique]
    run = Record(
        Path("nowhere"), command="", effort="default", amount=EFFORT["default"], environment={}
    )
    run.add(technique, cases_of(technique, "module", effort))
    for entry in run.entries.values():
        more = gained.get(entry.case.variant.name, 0.0)
        entry.trained = Trained(list(94 + noise + more * (1 + noise / 10)))
    return analyse(run.measured()) | {"environment": {"packages": {}}}


def test_a_recipe_is_chosen_by_what_it_gains_over_its_own_baseline():
    (found,) = choose.advise(
        trained("regularization", "ordinary", decoupled=2.0, smoothing=-3.0), None, Limits()
    )
    assert found.work.kind == decisions.RECIPE
    assert found.best.case["variant"] == "decoupled"
    assert found.figure(found.best).value == pytest.approx(2.0)
    assert not found.refused  # what loses is shown to be worse, not left out
    worse = {o.case["variant"]: found.figure(o).value for o in found.rest}
    assert worse["smoothing"] == pytest.approx(-3.0)
    assert worse["none"] == 0
    said = " ".join(" ".join(text([found], 80)).split())
    assert "decoupled decay, 0.05 (regularization: decoupled): 2.00 points (1.86–2.14)" in said


def test_a_training_that_diverged_says_so_in_a_record_that_can_be_read():
    run = raw(trained("regularization", smoothing=-3.0))
    diverged = next(c for c in run["cases"] if c["variant"] == "smoothing")
    diverged["accuracy"]["per_seed"][2] = float("nan")
    found = analyse(run)
    schema.check(found)
    assert analyse(raw(found)) == found
    rows = {(c["variant"], c["framework"]): c for c in found["cases"]}
    row, twin = (rows["smoothing", side] for side in ("pt", "tf"))
    assert row["accuracy"]["mean"] is None
    assert row["reason"] == "accuracy not measured: the metric is not finite at seed 2"
    assert (twin["accuracy"]["difference"]["mean"], twin["reason"]) == (pytest.approx(-3.0), None)


def test_where_no_recipe_gains_the_plain_training_is_named():
    (found,) = choose.advise(trained("regularization", smoothing=-3.0), None, Limits())
    assert found.cheapest.is_baseline or found.best.is_baseline


def test_nothing_is_cheaper_than_a_baseline_that_is_best():
    run = load(DOCS)
    answers = choose.advise(run, None, Limits())
    best = [answer for answer in answers if answer.best.is_baseline]
    assert any(answer.cheapest for answer in best)
    for answer in answers:
        assert ("cheapest" in dict(lines(answer))) == bool(answer.cheapest and answer not in best)


def test_a_bound_is_never_advised():
    run = trained("adversarial", dann=2.0, target_labels=9.0)
    (found,) = choose.advise(run, None, Limits())
    assert found.work.kind == decisions.RECIPE
    assert found.best.case["variant"] == "dann"
    assert "target_labels" not in {o.case["variant"] for o in found.work.options}
    bounds = [c for c in run["cases"] if c["role"] == "bound" and c["accuracy"]]
    assert bounds
    for case in bounds:
        assert case["accuracy"]["difference"]["mean"] == pytest.approx(9.0)


# Side by side ------------------------------------------------------------------------------------


def drifting(looks=None, blocks=8):
    """A record whose machine's speed doubles and halves between blocks; "quick" takes 7% less."""
    given = measured({("pt", "quick"): 0.93}, blocks=blocks, looks=looks, sd=0.002)
    for entry in given["cases"]:
        for found in entry["timing"]["step_s"].values():
            for block in found:
                found[block] = [(1.0, 2.0, 0.5, 1.5)[int(block) % 4] * own for own in found[block]]
    return analyse(given) | {"effort": "default", "environment": {"packages": {}}}


@pytest.mark.parametrize("looks", [None, [3, 5, 8]])
def test_rows_are_told_apart_by_their_ratio_where_intervals_of_times_overlap(looks):
    found = next(iter(choose.advise(drifting(looks), None, Limits())))
    assert found.best.case["id"] == "made_up/digits-cnn-4/pt/quick"
    others = {o.case["id"]: o for o in (*found.equal, *found.rest)}
    plain = others["made_up/digits-cnn-4/pt/plain"]
    assert found.figure(plain).low < found.figure(found.best).high  # the intervals overlap
    assert not found.equal
    assert plain.beaten.case["id"] == found.best.case["id"]
    said = " ".join(" ".join(text([found], 80, every=True)).split())
    (share,) = re.findall(r"PyTorch plain .*? (1\.\d+) \((1\.\d+)–(1\.\d+)\) times the best", said)
    assert float(share[0]) == pytest.approx(1 / 0.93, rel=0.01)
    assert float(share[1]) < 1 / 0.93 < float(share[2])


def test_rows_of_one_block_are_not_told_apart():
    (found, *_) = choose.advise(drifting([3, 5, 8], blocks=1), None, Limits())
    assert found.provisional
    assert not any(option.beaten for option in found.work.options)


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
    assert choose.main([str(DOCS), *options]) in (0, 2)
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (record, ["--goal", "size"], "no row of this run has a size on disk"),
        (trained, ["--goal", "throughput"], "no row of this run has samples per second"),
        (record, ["--goal", "batch"], "no row of this run has a largest batch that fits"),
        (record, ["--goal", "latency"], "it may have timed no predictions"),
        (record, ["--goal", "memory", "--memory-budget", "1KB"], "within the limits"),
        (record, ["--goal", "memory", "--task", "nothing"], "the run has no 'nothing'; it has"),
        (dict, ["--goal", "memory"], "not a record of twinbench"),
    ],
)
def test_what_cannot_be_answered_is_one_clear_line(command, make, options, reason):
    status, said = command(make(), *options)
    assert status == 2
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert reason in said.err


def test_numbers_of_parameters_are_round():
    said = [rounded(count) for count in (12, 999, 24_310, 10_020_000)]
    assert said == ["12", "999", "24 thousand", "10 million"]


def test_the_tasks_of_a_run_are_listed_by_name(command):
    run = record()
    for case, name in zip(run["cases"][:4], ("gpt", "photos", "cnn", "few"), strict=True):
        case["task"] = name
    _, said = command(run, "--task", "nothing")
    listed = said.err.partition("it has ")[2].strip().split(", ")
    assert len(listed) > 3
    assert listed == sorted(listed)


def test_the_goal_of_accuracy_is_that_of_whatever_was_trained(capsys):
    """Distillation times a train step, combinations a prediction: both gain points, too."""
    assert choose.main([str(DOCS), "--goal", "accuracy"]) == 0
    answers = " ".join(capsys.readouterr().out.split())
    points = "points gained over the plain training best"
    assert f"digits-student, batch 64, train step: {points} PyTorch teacher's stored" in answers
    assert f"digits-cnn, batch 128, prediction: {points} TensorFlow distilled, int8" in answers
    assert choose.main([str(DOCS), "--task", "digits-student"]) == 0
    assert "points gained" not in capsys.readouterr().out


def test_a_rate_is_one_beside_the_time_of_steps_too(capsys):
    assert choose.main([str(DOCS), "--task", "photos", "--steps", "1000"]) == 0
    assert "times its baseline's samples/s" in " ".join(capsys.readouterr().out.split())


def test_the_largest_batch_is_an_aim(capsys):
    cases = [case for case in load(DOCS)["cases"] if "largest_batch" in (case["metrics"] or {})]
    most = max(case["metrics"]["largest_batch"]["value"] for case in cases)
    assert choose.main([str(DOCS), "--goal", "batch"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("digits-cnn, train step: largest batch in 537 MB above import best ")
    assert f" float32 (baseline of batch_size_finder): {number(most)} samples; baseline" in said


@pytest.mark.parametrize(
    "options",
    [
        ["--goal", "memory", "--steps", "100"],
        ["--goal", "batch", "--memory-budget", "2GB"],  # which is the run's own
    ],
)
def test_a_goal_refuses_what_it_has_no_use_for(command, run, options):
    """What else is no option, tests/test_bad_input.py draws."""
    with pytest.raises(SystemExit) as stopped:
        command(run, *options)
    assert stopped.value.code == 2
