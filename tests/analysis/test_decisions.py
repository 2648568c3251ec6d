"""Tables and answers of small records whose answers are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.analysis import decisions, pairing
from bench.analysis.decisions import GOALS, Figure, Limits, answer, works
from bench.analysis.effects import NOT_COMPARABLE, Effects
from bench.analysis.reading import DIFFERENT, load
from bench.report.answer import decision_table, text
from tests.analysis.planted import planted

DOCS = Path(__file__).parents[2] / "docs"

SIZES = {"ms": 1e-3, "s": 1, "MB": 1e6, "samples/s": 1, "samples": 1, "points": 1}
GAIN = (0.6, 0.58, 0.62)


def row(technique="compilation", variant="changed", **effects):
    return {"technique": technique, "variant": variant} | effects


def variants(record):
    return [case for case in record["cases"] if case["role"] == "variant"]


def test_a_unit_is_of_its_size():
    assert {goal.unit: goal.size for goal in GOALS.values()} == SIZES
    assert all(goal.size == SIZES[goal.unit] for goal in GOALS.values())


def test_baselines_tell_what_is_the_same_work_whatever_their_variants_compute():
    record = planted(row(time=GAIN), row("mixed_precision", time=GAIN))
    for number, case in enumerate(variants(record)):
        case["certificate"] = {"losses": [7.0 + number], "weights_sha256": str(number)}
    (one,) = works(record)
    assert {option.case["technique"] for option in one.options} == {
        *("compilation", "mixed_precision")
    }


def test_what_was_not_timed_is_of_its_mode():
    titles = [w.title for mode in ("train", "predict") for w in works(planted(row(mode=mode)))]
    assert titles == [f"digits-cnn, batch 64, {what}" for what in ("train step", "prediction")]


# Figures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ci", "samples", "exact", "expected"),
    [
        ([1.0, 3.0], [0.5, 9.0], False, Figure(2.0, 1.0, 3.0, "interval")),
        (None, [1.5, 2.0, 4.0], False, Figure(2.0, 1.5, 4.0, "range")),
        (None, [1.5, 2.0, None], False, Figure(2.0, 1.5, 2.0, "range")),
        (None, [2.0], False, Figure(2.0, 2.0, 2.0, "once")),
        (None, [2.5, 3.0], False, Figure(2.0, 2.0, 2.0, "once")),  # not of these samples
        (None, [1.0, 1.5], False, Figure(2.0, 2.0, 2.0, "once")),
        (None, None, False, Figure(2.0, 2.0, 2.0, "once")),
        ([1.0, 3.0], [1.5, 2.5], True, Figure(2.0, 2.0, 2.0, "exact")),
    ],
)
def test_a_figure_has_the_bounds_of_what_was_repeated(ci, samples, exact, expected):
    assert decisions._figure(2.0, ci, samples, exact=exact) == expected


def test_what_was_measured_once_has_no_bounds_to_be_held_against():
    figure = Figure(2.0, 1.5, 2.5, "interval")
    assert decisions.quotient(figure, Figure(1.0, 0.5, 1.25, "range")) == (1.2, 5.0)
    assert decisions.quotient(figure, Figure(1.0, 1.0, 1.0, "exact")) == (1.5, 2.5)
    once = Figure(9.0, 9.0, 9.0, "once")
    assert decisions.quotient(figure, once) is decisions.quotient(once, figure) is None


def answered(goal, *rows):
    """Which rows are best, not told from it, shown to be worse, or only next."""
    run = planted(*rows)
    (work,) = works(run)
    found = decisions.answer(run, work, GOALS[goal], Limits())
    worse = [option for option in found.rest if option not in found.next]
    groups = ([found.best], found.equal, worse, found.next)
    return [[option.case["variant"] for option in group] for group in groups]


@pytest.mark.parametrize(("share", "worse"), [(1.029, False), (1.031, True)])
def test_a_size_within_what_counts_as_no_difference_is_not_shown_to_be_worse(share, worse):
    rest = ["changed"]
    expected = [[], rest] if worse else [rest, []]
    assert answered("size", row(size=share)) == [["base"], *expected, []]


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        # The scatter of what was repeated is also that of what was measured once.
        ([0.9, 0.901], [["changed"], [], ["other", "base"], []]),
        ([0.9, 1.0], [["changed"], ["other", "base"], [], []]),
        ([0.9], [["changed"], [], [], ["other", "base"]]),  # nothing was repeated
    ],
)
def test_a_peak_measured_once_is_told_apart_by_the_scatter_of_the_run(first, expected):
    rows = row(peaks=first), row(variant="other", memory=0.98)
    assert answered("memory", *rows) == expected


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("accuracy", Figure(0.3, 0.1, 0.6, "interval")),
        ("bits_per_character", Figure(-0.3, -0.6, -0.1, "interval")),
    ],
)
def test_more_is_gained_of_a_metric_of_which_less_is_better(metric, expected):
    case = {"role": "variant"}
    accuracy = {"metric": metric, "difference": {"mean": 0.3, "ci": [0.1, 0.6]}}
    assert decisions._gained(case | {"accuracy": accuracy}) == {"gained": expected}
    accuracy["difference"]["ci"] = None
    once = replace(expected, low=expected.value, high=expected.value, kind="once")
    assert decisions._gained(case | {"accuracy": accuracy}) == {"gained": once}
    assert decisions._gained(case | {"accuracy": None}) == {}


def test_rates_tell_a_gain_over_the_own_baseline_alone():
    def gains(record):
        (work,) = works(record)
        return {option.case["variant"]: option.gain for option in work.options}

    rates = {"samples_per_s": (200.0, 100.0)}
    record = planted(row("data_parallel", metrics=rates))
    assert gains(record) == {"changed": 0.5, "base": None}
    record["cases"] = variants(record)
    assert gains(record) == {"changed": None}


def test_replicas_are_held_against_the_one_of_their_own_probe():
    """Older records have no row of one replica: that of several is the baseline."""
    rates = {"samples_per_s": (200.0, 100.0), "one_replica": (400.0, 50.0)}
    (work,) = works(planted(row("data_parallel", metrics=rates)))
    gains = {option.case["variant"]: option.gain for option in work.options}
    assert gains == {"changed": 2.0, "base": 0.5}
    said = " ".join(map(str, decision_table(work).rows))
    assert "0.500" in said


# A number of steps --------------------------------------------------------------------------------


def in_all(steps, goal="train-speed", **figures):
    option = SimpleNamespace(figures=figures)
    return decisions.deciding(option, GOALS[goal], Limits(steps=steps))


TIMED = Figure(2.0, 1.9, 2.2, "interval")


@pytest.mark.parametrize(
    ("first", "step", "expected"),
    [
        # A first call of 1% at most does not decide how sure the whole is.
        (Figure(1.0, 1.0, 1.0, "once"), TIMED, Figure(201.0, 191.0, 221.0, "interval")),
        (Figure(3.0, 3.0, 3.0, "once"), TIMED, Figure(203.0, 203.0, 203.0, "once")),
        (Figure(3.0, 2.5, 3.5, "range"), TIMED, Figure(203.0, 192.5, 223.5, "range")),
        (Figure(1.0, 0.5, 1.5, "range"), TIMED, Figure(201.0, 190.5, 221.5, "interval")),
        (Figure(3.0, 2.5, 3.5, "range"), Figure(2.0, 2.0, 2.0, "once"),
         Figure(203.0, 203.0, 203.0, "once")),
    ],
)  # fmt: skip
def test_steps_take_their_first_call_and_all_others(first, step, expected):
    found = in_all(101, time=step, first_call=first)
    assert (found.value, found.low, found.high) == pytest.approx(
        (expected.value, expected.low, expected.high)
    )
    assert found.kind == expected.kind


def test_without_a_number_of_steps_or_for_another_goal_the_figure_stands():
    first = Figure(3.0, 2.5, 3.5, "range")
    assert in_all(None, time=TIMED, first_call=first) == TIMED
    assert in_all(101, goal="memory", memory=TIMED, first_call=first) == TIMED
    assert in_all(101, time=TIMED) is None
    assert in_all(101, first_call=first) is None


# What takes least to get --------------------------------------------------------------------------


def cheapest(goal, *rows, **limits):
    record = planted(*rows)
    for comparison in record["comparisons"]:
        ratio, (low, high) = comparison["ratio"], comparison["ci"]
        comparison["verdict"] = "faster" if high < 1 else "slower"
        (case,) = (c for c in record["cases"] if c["id"] == comparison["numerator"])
        case["timing"] |= {"median_s": 0.01 * ratio, "ci_s": [0.01 * low, 0.01 * high]}
    (work,) = works(record)
    found = decisions.answer(record, work, GOALS[goal], Limits(**limits))
    best, cheap = found.best.case["technique"], found.cheapest
    return best, cheap and (cheap.case["technique"], cheap.case["variant"])


DEAR = row("pruning", time=(0.5, 0.48, 0.52), peaks=[0.5, 0.51])
SLOWER = (1.2, 1.1, 1.3)


@pytest.mark.parametrize(
    ("goal", "given", "expected"),
    [
        ("train-speed", {"time": GAIN}, True),
        ("train-speed", {"time": SLOWER, "peaks": [0.6, 0.61]}, False),
        ("memory", {"time": SLOWER, "peaks": [0.6, 0.61]}, True),
        ("memory", {"time": GAIN, "peaks": [1.2, 1.3]}, False),
        ("memory", {"time": GAIN, "peaks": [0.9, 1.0]}, False),  # not shown to be less
        ("memory", {"time": GAIN, "peaks": [0.9, 0.905]}, True),
    ],
)
def test_the_cheapest_gains_in_the_figure_that_is_asked_for(goal, given, expected):
    own = row("memory_format", **given)
    name = ("memory_format", "changed") if expected else None
    assert cheapest(goal, DEAR, own) == ("pruning", name)


def test_nothing_is_cheaper_than_what_takes_nothing():
    free = row("memory_format", time=(0.4, 0.38, 0.42))
    assert cheapest("train-speed", DEAR, free) == ("memory_format", None)


def test_what_loses_some_accuracy_beats_nothing_that_loses_none():
    careless = {"accuracy": (-0.5, -0.8, -0.2), "changes_math": True}  # within the margin
    run = planted(
        row(variant="careless", time=GAIN, **careless), row(variant="exact", time=(0.8, 0.7, 0.9))
    )
    for case, seconds in zip(variants(run), (0.004, 0.006), strict=True):
        case["timing"] |= {"median_s": seconds, "ci_s": [0.99 * seconds, 1.01 * seconds]}
    (work,) = works(run)
    found = {option.case["variant"]: option for option in work.options}
    assert found["careless"].accuracy.kept
    assert work.bounds("time", found["exact"], found["careless"])[0] > 1.03
    assert found["exact"].beaten is None


# Unlike work, and peaks of a GPU ------------------------------------------------------------------


def two_sides(verdict: str, which: str) -> dict:
    """Two frameworks with a row each; what the record says of two rows of them."""
    bf16 = {"technique": "mixed_precision", "variant": "bf16", "time": (0.5, 0.48, 0.52)}
    run = planted(bf16, bf16 | {"framework": "tf"})
    ids = [c["id"] for c in run["cases"] if c["variant"] == which]
    pair = {"kind": "framework", "numerator": ids[0], "denominator": ids[1], "verdict": verdict}
    run["comparisons"].append(run["comparisons"][0] | pair)
    return run


def test_what_the_record_compares_has_the_same_interval_in_every_answer():
    run = load(DOCS)
    ratios = {pair: found for work in works(run) for pair, found in work.ratios.items()}
    programs = {case["id"]: pairing.program(case) for case in run["cases"]}
    kinds = set()
    for each in run["comparisons"]:
        pair = (programs[each["numerator"]], programs[each["denominator"]])
        if pair in ratios and each["ci"] and each["verdict"] != DIFFERENT:
            kinds.add(each["kind"])
            assert ratios[pair].ci == tuple(each["ci"])
    assert {"baseline", "framework"} <= kinds


def test_frameworks_whose_baselines_differ_are_not_put_into_one_order():
    together = works(two_sides("faster", "base"))
    apart = works(two_sides("not comparable", "base"))
    assert [work.apart for work in together] == [""]
    assert sorted(work.apart for work in apart) == ["PyTorch", "TensorFlow"]


def test_what_differs_between_frameworks_has_no_effect_in_either_direction():
    run = two_sides("not comparable", "bf16")
    pair = [case for case in run["cases"] if case["variant"] == "bf16"]
    for one, other in (pair, pair[::-1]):
        assert Effects(run).between(one, other, "time") == (None, NOT_COMPARABLE)


def test_a_ratio_is_read_in_both_directions():
    run = two_sides("faster", "bf16")
    pair = [case for case in run["cases"] if case["variant"] == "bf16"]
    (there, _), (back, _) = (Effects(run).between(*p, "time") for p in (pair, pair[::-1]))
    assert back.value == pytest.approx(1 / there.value)
    assert (back.low, back.high) == pytest.approx((1 / there.high, 1 / there.low))


def test_ratios_of_the_published_record_are_inverse_in_the_other_direction():
    pairs = [(work.ratios, pair) for work in works(load(DOCS)) for pair in work.ratios]
    assert len(pairs) > 100
    for ratios, (one, other) in pairs:
        there, back = ratios[one, other], ratios[other, one]
        assert back.ratio == pytest.approx(1 / there.ratio)
        assert (back.ci is None) is (there.ci is None)
        if there.ci:
            assert back.ci == pytest.approx((1 / there.ci[1], 1 / there.ci[0]))


def test_of_a_gpu_memory_is_what_its_allocator_counts():
    run = planted({"technique": "mixed_precision", "variant": "bf16", "time": (0.5, 0.48, 0.52)})
    for case, size in zip(run["cases"], (4e9, 2e9), strict=True):
        case["memory"]["device_peak"] = {"allocated": size, "reserved": 2 * size}
    (work,) = works(run)
    assert {o.case["variant"]: o.figures["memory"] for o in work.options} == {
        "base": Figure(4e9, 4e9, 4e9, "exact"),
        "bf16": Figure(2e9, 2e9, 2e9, "exact"),
    }
    found = answer(run, work, GOALS["memory"], Limits(memory=3e9))
    assert found.best.case["variant"] == "bf16"
    assert [reason for _, reason in found.refused] == ["takes 4,000 MB"]
    assert found.goal.title == "peak memory of the GPU"


def test_what_runs_on_the_cpu_has_no_peak_beside_those_of_a_gpu():
    runtime = {"technique": "export", "variant": "onnx", "mode": "predict", "memory": 0.1}
    run = planted(runtime)
    base, onnx = run["cases"]
    base["memory"]["device_peak"] = {"allocated": 4e9, "reserved": 4e9}
    (work,) = works(run)
    found = answer(run, work, GOALS["memory"], Limits())
    assert found.best.case["variant"] == "base"
    assert [option.case["variant"] for option in found.lacking] == ["onnx"]
    assert Effects(run).between(onnx, base, "memory") == (None, NOT_COMPARABLE)


def test_what_is_gained_has_the_words_of_its_metric():
    lost = {"technique": "regularization", "variant": "smoothing", "accuracy": (0.03, 0.02, 0.04)}
    run = planted(lost | {"task": "text-gpt"}, lost | {"task": "digits-detection"}, lost)
    names = {"text-gpt": "bits_per_character", "digits-detection": "mAP"}
    for case in variants(run):
        case["accuracy"] |= {"metric": names.get(case["task"], "accuracy"), "mean": 1.0}
    said, heads = {}, {}
    for work in works(run):
        found = answer(run, work, GOALS["accuracy"], Limits())
        said[work.task] = text([found], 200, every=True)
        heads[work.task] = [column.head for column in decision_table(work).columns]
    heading, best, worse = said["text-gpt"]
    assert "bits per character saved against the plain training" in heading
    assert "0 bits saved" in best
    assert "-0.0300 bits saved" in worse
    assert "gained [bits saved]" in heads["text-gpt"]
    assert "points of mAP gained" in said["digits-detection"][0]
    assert "points gained over" in said["digits-cnn"][0]
    assert "gained [points]" in heads["digits-cnn"]
