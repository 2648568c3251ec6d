"""What to use for each aim: of small records whose answers are known, and of the published one.

The published record's figures are worked out here in another way: from its JSON's raw samples,
without `bench.analysis`.
"""

from __future__ import annotations

import json
import re
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean

import pytest

from bench.analysis.advice import advice
from bench.analysis.analyse import analyse, raw
from bench.analysis.priorities import ACCURACY, BATCH, MEMORY, RATE, SIZE, TIME
from bench.analysis.reading import load
from bench.harness.schedule import techniques
from bench.report import advised
from shared.specs import TASKS, parameter_count
from tests.analysis.planted import planted
from tests.analysis.test_choose import keeps_accuracy

DOCS = Path(__file__).parents[2] / "docs"
RAW = json.loads((DOCS / "results.json").read_text("utf-8"))
BY_ID = {case["id"]: case for case in RAW["cases"]}
FOUND = advice(load(DOCS))
SIDES = [(each, side) for each in FOUND for side in each.sides]


def row(technique="compilation", variant="changed", **effects):
    return {"technique": technique, "variant": variant, "time": GAIN} | effects


GAIN, MORE, SLOWER = (0.6, 0.58, 0.62), (0.5, 0.48, 0.52), (1.2, 1.1, 1.3)
LOST, KEPT = (-3.0, -3.5, -2.5), (0.1, -0.4, 0.6)


def asked(aim, *rows):
    """What is said of an aim, and of its PyTorch side; rows are as fast as their ratios say."""
    record = planted(*rows)
    ratios = {each["numerator"]: each["ratio"] for each in record["comparisons"]}
    for case in record["cases"]:
        case["timing"]["median_s"] *= ratios.get(case["id"], 1.0)
    (found,) = [each for each in advice(record) if each.question.aim == aim]
    return found, found.sides[0]


def name(found):
    return found and (found.case["technique"], found.case["variant"])


# Small records -----------------------------------------------------------------------------------


def test_the_row_that_gains_is_named_and_what_does_not_gain_is_not():
    _, side = asked("train faster", row(), row("memory_format", time=SLOWER))
    assert (name(side.best), side.tried, side.equal) == (("compilation", "changed"), 2, [])
    _, side = asked("train faster", row(time=(0.98, 0.9, 1.06)))
    assert (side.best, side.case["role"]) == (None, "baseline")


@pytest.mark.parametrize(
    "given",
    [
        {"accuracy": LOST},
        {"changes_math": True},  # and accuracy was not measured
        {"accuracy": (0.0, -3.0, 3.0)},  # whose bound is beyond the margin
    ],
)
def test_a_larger_gain_that_does_not_keep_accuracy_is_said_and_not_advised(given):
    dear = row("mixed_precision", time=MORE, **given)
    found, side = asked("train faster", row(), dear)
    assert name(side.best) == ("compilation", "changed")
    assert name(side.tempting) == ("mixed_precision", "changed")
    ((_, cell, _, _),) = advised.brief([found]).rows
    assert "compilation: changed" in cell or cell.startswith("changed")
    assert "; changed: 2.00x (1.92–2.08), but accuracy" in cell
    found, side = asked("train faster", dear)
    assert side.best is None
    assert found.tells
    said = " ".join(advised.sentence(found, side, []))
    assert "2.00x (1.92–2.08), but accuracy" in said


def test_a_smaller_model_that_nobody_has_trained_tempts_nobody():
    """It is faster, as any smaller one."""
    smaller = row("sparse_inference", time=MORE, changes_math=True, changes_weights=True)
    found, side = asked("train faster", smaller, row("memory_format", time=SLOWER))
    assert (side.best, side.tempting, found.tells) == (None, None, False)
    assert name(side.nearest) == ("memory_format", "changed")
    _, side = asked("train faster", smaller)
    assert (side.tempting, name(side.nearest)) == (None, ("sparse_inference", "changed"))
    _, side = asked("train faster", smaller | {"accuracy": LOST})
    assert name(side.tempting) == ("sparse_inference", "changed")


def test_memory_names_what_takes_least_with_the_price_in_time():
    own = row("activation_checkpointing", time=SLOWER, peaks=[0.5, 0.51, 0.5])
    found, side = asked("train in less memory", own)
    assert name(side.best) == ("activation_checkpointing", "changed")
    said = advised.sentence(found, side, [])[1]
    assert said.startswith("50% less memory (")
    assert "takes 1.20 times the time (1.10–1.30)" in said


def test_where_the_batch_was_found_and_no_memory_measured_the_larger_batch_is_named():
    finder = {"technique": "batch_size_finder"}
    grown, less = ({"metrics": {"largest_batch": (size, 100)}} for size in (210, 80))
    record = planted(finder | {"variant": "bf16"} | grown, finder | {"variant": "fp16"} | less)
    for case in record["cases"]:
        case["memory"] = None
    (found,) = advice(record)
    assert (found.question.aim, found.figure, found.main) == ("train in less memory", BATCH, True)
    (side,) = found.sides
    assert name(side.best) == ("batch_size_finder", "bf16")
    said = " ".join(advised.lines([found], 80, 9))
    assert "PT: bf16: 2.10x the largest batch, measured 2.00" in said
    record["cases"] = [case for case in record["cases"] if case["variant"] != "bf16"]
    said = " ".join(" ".join(advised.lines(advice(record), 80, 9)).split())
    assert "the one tried was not shown to fit a larger batch;" in said
    assert "fp16: 1.25 times the memory of a sample" in said


def test_training_s_price_is_said_and_a_cheaper_gain_beside_it():
    dear = row("pruning", time=MORE, accuracy=KEPT)
    found, side = asked("train faster", dear, row("memory_format"))
    assert name(side.best) == ("pruning", "changed")
    assert name(side.cheaper) == ("memory_format", "changed")
    said = advised.sentence(found, side, [])[1]
    assert "takes 4 epochs of training" in said
    assert "easier to get: changed (memory format), 1.67x (1.61–1.72)" in said


@pytest.mark.parametrize(
    ("bounds", "named"),
    [((0.99, 1.11), "memory_format"), ((1.01, 1.09), "compilation"), ((1.06, 1.16), "compilation")],
)
def test_what_takes_less_is_named_only_where_it_is_not_told_from_the_best(bounds, named):
    """Nor where the difference may be one that does not count."""
    record = planted(row(time=(0.5, 0.48, 0.52)), row("memory_format", time=(0.55, 0.53, 0.57)))
    dear, free = (case for case in record["cases"] if case["role"] == "variant")
    for case, ratio in ((dear, 0.5), (free, 0.55)):
        case["timing"]["median_s"] *= ratio
    dear["settings"] = {"compiled": True}
    record["comparisons"].append(
        record["comparisons"][0]
        | {"numerator": free["id"], "denominator": dear["id"], "ratio": 1.1, "ci": list(bounds)}
    )
    (found,) = [each for each in advice(record) if each.question.aim == "train faster"]
    assert found.sides[0].best.technique == named


def test_one_block_gives_an_order_and_says_so():
    found, side = asked("train faster", row(time=(0.6,)), row("memory_format", time=(1.1,)))
    assert found.provisional
    assert name(side.best) == ("compilation", "changed")
    for said in (advised.sentence(found, side, [])[1], *advised.lines([found], 80, 9)[2:3]):
        assert "one block, no interval" in said
        assert not re.search(r"\(\d[\d.]*–", said)


@pytest.mark.parametrize(
    ("control", "time", "named"),
    [
        (None, 0.99, False),
        (None, 0.96, True),
        (1.12, 0.9, False),
        (0.89, 0.9, False),
        (1.12, 0.88, True),
    ],
)
def test_one_block_names_nothing_that_its_own_control_shows_of_no_difference(control, time, named):
    record = planted(row(time=(time,)))
    if control:
        record["comparisons"].append(
            record["comparisons"][0] | {"kind": "control", "ratio": control, "ci": None}
        )
    (found,) = [each for each in advice(record) if each.question.aim == "train faster"]
    assert found.provisional
    assert bool(found.sides[0].best) == named


def test_what_was_faster_in_one_block_says_why_it_is_not_named():
    found, side = asked("train faster", row(time=(0.6,), changes_math=True))
    assert (side.best, side.tempting) == (None, None)
    said = " ".join(" ".join(advised.lines([found], 80, 9)).split())
    assert "was not shown to be faster" in said
    assert re.search(r"1.67x, one block,.* no interval, accuracy not measured", said)


def test_the_terminal_s_lines_fit_and_what_is_left_is_counted():
    for width, room in product((60, 80, 100), (6, 12, 23, 60)):
        lines = advised.lines(FOUND, width, room)
        assert len(lines) <= room
        assert max(map(len, lines)) <= width
        told, _ = advised.split(FOUND)
        more = re.findall(r"… and (\d+) more", lines[-1])
        named = sum(re.match(r"[a-z ]{10,25} +PT[:*]", line) is not None for line in lines)
        assert named + sum(map(int, more)) == len(told)
    assert "shown to gain" in advised.lines([], 80, 9)[0]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [row(time=(17.0, 16.0, 18.0))],
            "the one tried was not shown to be faster; changed: 17.0 times the time (16.0–18.0)",
        ),
        (
            [row(time=(1.5, 1.4, 1.6)), row("memory_format", time=(0.99, 0.9, 1.1))],
            "none of 2 tried was shown to be faster; nearest changed: 1.01x (0.91–1.11)",
        ),
        (
            [row(time=SLOWER), row("memory_format", time=(0.99, 0.9, 1.1), accuracy=LOST)],
            "none of 2 tried was shown to be faster; nearest changed: 1.20 times the time "
            "(1.10–1.30)",
        ),
        (
            [row(time=(17.0,))],
            "the one tried was not shown to be faster; changed: 17.0 times the time, one block, no "
            "interval",
        ),
    ],
)
def test_where_nothing_gains_the_terminal_says_what_comes_nearest(rows, said):
    found, side = asked("train faster", *rows)
    assert side.best is None
    assert not found.tells
    head, *lines = advised.lines([found], 80, 12)
    assert head == advised.NOTHING
    assert said in " ".join(" ".join(line[advised.LABEL :] for line in lines).split())


def test_of_two_rows_of_one_program_the_one_that_takes_less_is_named():
    """Rounding after training predicts as rounding in training does; each keeps its accuracy."""
    (technique,) = (t for n, t in techniques().items() if n == "quantization_aware_training")
    programs = {v.name: v.program for v in technique.variants if v.name in ("qat_8", "ptq_8")}
    assert programs["qat_8"] == programs["ptq_8"] is not None
    measured = raw(load(DOCS))
    for case in measured["cases"]:
        if case["technique"] == technique.name and case["variant"] == "ptq_8":
            case["program"] = case["id"].replace("ptq_8", "qat_8")
    record = analyse(measured)
    record["cases"] = [c for c in record["cases"] if c["technique"] == technique.name]
    (found,) = [each for each in advice(record) if each.question.aim == "predict faster"]
    for side in found.sides:
        assert name(side.best) == (technique.name, "ptq_8")
        assert side.best.takes == "calibration"
        assert [name(row) for row in side.equal] == [(technique.name, "qat_8")]
    for case in record["cases"]:
        case["accuracy"] = None  # before it is trained
    (found,) = [each for each in advice(record) if each.question.aim == "predict faster"]
    assert {name(side.tempting) for side in found.sides} == {(technique.name, "ptq_8")}


def test_each_aim_is_answered_before_any_is_twice():
    told, _ = advised.split(FOUND)
    aims = dict.fromkeys(each.question.aim for each in told)
    lines = advised.lines(FOUND, 80, 26)
    assert all(any(line.startswith(aim) for line in lines) for aim in aims)


# The published record ----------------------------------------------------------------------------


def source(case):
    return BY_ID[case["program"]] if case.get("program") else case


def by_blocks(case):
    """Match and block -> the samples."""
    every = source(case)["timing"]["step_s"]
    return {(m, b): samples for m, blocks in every.items() for b, samples in blocks.items()}


def fastest(samples):
    """The mean of the fastest third, of two at least."""
    return fmean(sorted(samples)[: max(2, round(len(samples) / 3))])


def time_ratio(one, other):
    """The geometric mean over joint blocks of the ratio of times; None where they share none."""
    ours, theirs = by_blocks(one), by_blocks(other)
    joint = [log(fastest(ours[k]) / fastest(theirs[k])) for k in ours.keys() & theirs.keys()]
    return exp(fmean(joint)) if joint else None


def own_baseline(case):
    keys = ("technique", "task", "batch_size", "mode", "framework", "flavour")
    (base,) = [
        c for c in RAW["cases"] if c["role"] == "baseline" and all(c[k] == case[k] for k in keys)
    ]
    return base


def own_figure(case, figure):
    if figure == SIZE:
        return case["artifact_bytes"]
    if figure == RATE:
        return case["metrics"]["samples_per_s"]["value"]
    return case["memory"]["above_import_bytes"]


def test_every_gain_is_that_of_the_raw_samples():
    seen = dict.fromkeys((TIME, SIZE, RATE, MEMORY, ACCURACY), 0)
    for each, side in SIDES:
        for best in filter(None, (side.best, side.cheaper, side.tempting)):
            case, effect = BY_ID[best.case["id"]], best.effects[each.figure]
            base = own_baseline(case)
            if each.figure == TIME:
                expected, wide = time_ratio(case, base), 0.05
            elif each.figure == ACCURACY:
                pairs = zip(
                    case["accuracy"]["per_seed"], base["accuracy"]["per_seed"], strict=False
                )
                expected, wide = fmean(a - b for a, b in pairs), 1e-6
            else:
                expected = own_figure(case, each.figure) / own_figure(base, each.figure)
                expected, wide = (1 / expected if each.figure == RATE else expected), 1e-6
            if expected is None:
                continue
            seen[each.figure] += 1
            assert effect.value == pytest.approx(expected, rel=wide), case["id"]
            assert effect.low <= effect.value <= effect.high
    assert all(seen.values()), seen


def test_only_what_gains_and_keeps_accuracy_is_advised():
    for each, side in SIDES:
        for best in filter(None, (side.best, side.cheaper, *side.equal)):
            case, effect = BY_ID[best.case["id"]], best.effects[each.figure]
            assert effect.kind in ("interval", "range", "exact")
            gains = effect.low > 0 if each.figure == ACCURACY else effect.high < 1 / 1.03
            assert gains, case["id"]
            if each.question.family is None:
                assert keeps_accuracy(RAW, case), case["id"]
        if side.tempting:
            assert not keeps_accuracy(RAW, BY_ID[side.tempting.case["id"]])


def test_nothing_that_gains_and_keeps_accuracy_is_much_better_than_what_is_advised():
    """By the figures themselves: a better one was either not told apart or takes more to get."""
    for each, side in SIDES:
        if each.figure != TIME or not side.best:
            continue
        chosen = BY_ID[side.best.case["id"]]
        keys = ("task", "batch_size", "mode", "framework")
        named = {other.case["id"] for other in side.equal}
        for case in RAW["cases"]:
            rival = case["status"] == "OK" and case["role"] == "variant"
            rival = rival and all(case[k] == chosen[k] for k in keys) and case["timing"]["ci_s"]
            if rival and case["id"] not in named and keeps_accuracy(RAW, case):
                assert case["timing"]["median_s"] >= chosen["timing"]["median_s"], case["id"]


def test_who_is_ahead_is_so_in_the_raw_samples():
    seen = 0
    for each in FOUND:
        if each.figure != TIME or not each.between:
            continue
        ratio = time_ratio(*(BY_ID[side.case["id"]] for side in each.sides))
        if ratio is None:
            continue
        seen += 1
        assert each.between.value == pytest.approx(ratio, rel=0.06)
        if each.ahead is None:  # that a ratio is within 3% was not excluded
            bounds = (each.between.low, each.between.high)
            assert not each.between.bounded or (bounds[0] <= 1.03 and bounds[1] >= 1 / 1.03)
        elif not 0.95 < ratio < 1.05:
            assert each.ahead == ("pt" if ratio < 1 else "tf")
    assert seen > 5


def test_accuracy_is_asked_once_for_a_task_whatever_the_batch():
    found = [each for each in FOUND if each.figure == ACCURACY]
    asked = [(each.question.aim, each.task) for each in found]
    assert len(asked) == len(set(asked)) > 1
    run = planted(
        row("distillation", time=SLOWER, accuracy=(3.0, 2.5, 3.5)),
        row("quantization_aware_training", time=SLOWER, accuracy=(2.0, 1.5, 2.5)),
    )
    for case in run["cases"][2:]:
        case["batch_size"] = 4
    (one,) = [each for each in advice(run) if each.figure == ACCURACY]
    assert (one.batch_size, one.sides[0].tried) == (None, 2)


def test_a_realistic_model_comes_before_a_small_one_and_both_are_shown():
    """A large one's memory is saved where the blocks are most of it, not in the first work."""
    for aim in ("train faster", "predict faster", "train in less memory", "ship a smaller file"):
        sizes = [parameter_count(TASKS[e.task].model) for e in FOUND if e.question.aim == aim]
        shown = [e for e in advised.split(FOUND)[0] if e.question.aim == aim]
        large = [parameter_count(TASKS[e.task].model) >= 1e6 for e in shown]
        predicts = aim == "predict faster"  # of one sample, and of a batch
        assert large == ([True, True, False, False] if predicts else [True, False])
        assert sizes[0] >= 1e6 > sizes[-1]


def test_predictions_of_one_sample_and_of_a_batch_are_both_shown():
    """The route that answers one request at once is seldom the one for many together."""
    shown = [e for e in advised.split(FOUND)[0] if e.question.aim == "predict faster"]
    works = [(e.task, e.batch_size) for e in shown]
    assert {("digits-cnn", 1), ("digits-cnn", 128)} <= set(works)
    brief = advised.lines(FOUND, 80, room=60)
    assert {"digits-cnn, batch 1", "digits-cnn, batch 128"} <= {
        line[:26].rstrip() for line in brief
    }


def test_brackets_hold_the_bounds_of_an_interval_and_nothing_else():
    for each, side in SIDES:
        if side.best:
            effect = side.best.effects[each.figure]
            said = advised.gained(effect, each.figure)
            assert ("(" in said) == (effect.kind == "interval")
            assert (", measured " in said) == (effect.kind == "range")
