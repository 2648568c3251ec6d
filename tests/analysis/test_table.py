"""The tidy table: figures with their bounds, ratios to the baseline, prices and accuracy."""

from __future__ import annotations

from math import exp, inf, log, sqrt
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from bench.analysis.declared import complete, of_row
from bench.analysis.families import families, family_of
from bench.analysis.reading import load
from bench.analysis.table import (
    BATCH,
    BETWEEN_RUNS,
    CALIBRATE,
    COLUMNS,
    COMPILE,
    FIRST_CALL,
    FREE,
    GAINED,
    MEMORY,
    NO_ACCURACY,
    NOT_COMPARABLE,
    NOT_MEASURED,
    RATE,
    SIZE,
    START,
    TEACHER,
    TIME,
    WITH_IMPORTS,
    Figure,
    Table,
    figures,
    price,
    quotient,
    table,
)
from bench.analysis.verdicts import BETWEEN_FREEDOM
from bench.compression import bench_combinations
from bench.harness.run_plan import techniques
from bench.record import AccuracyDifference, Metric, Price
from bench.train_step import bench_compilation
from tests import records
from tests.records import find_case, planted, with_case

DOCS = Path(__file__).parents[2] / "docs"
GAIN = (0.5, 0.48, 0.52)


def row(technique="mixed_precision", variant="changed", **effects):
    return {"technique": technique, "variant": variant} | effects


def ratio(run, name, of="mixed_precision/digits-cnn-64/pt/changed"):
    return Table(run).against_baseline(find_case(run, of), name)[0]


def metric_of(run, name, **fields):
    return with_case(run, "/changed", metrics={name: Metric(**fields)})


# Figures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "ci", "samples", "expected"),
    [
        ("load", 2.0, (1.0, 3.0), [0.5, 9.0], Figure(2.0, 1.0, 3.0, "interval")),
        ("load", 2.0, None, [1.5, 2.0, 4.0], Figure(2.0, 1.5, 4.0, "range")),
        ("load", 2.0, None, [1.5, 2.0, None], Figure(2.0, 1.5, 2.0, "range")),
        ("load", 2.0, None, [2.0], Figure(2.0, 2.0, 2.0, "once")),
        ("load", 2.0, None, [2.5, 3.0], Figure(2.0, 2.0, 2.0, "once")),  # not of these samples
        ("load", 2.0, None, [1.0, 1.5], Figure(2.0, 2.0, 2.0, "once")),
        ("load", 2.0, (900.0, None), None, Figure(2.0, 2.0, 2.0, "once")),
        ("load", -2.0, None, None, None),
        ("load", None, None, None, None),
        ("checkpoint", 100, None, None, Figure(100, 100, 100, "exact")),
        ("macs", 0, None, None, Figure(0, 0, 0, "exact")),
        (BATCH, 100, None, None, Figure(100, 100, 105, "range")),  # 5% more does not fit
    ],
)
def test_a_figure_has_the_bounds_of_what_was_repeated(name, value, ci, samples, expected):
    run = metric_of(planted(row()), name, value=value, ci=ci, samples=samples)
    case = find_case(run, "/changed")
    reason = None if expected else NOT_MEASURED
    assert Table(run).value(case, name) == (expected, reason)


def test_times_have_intervals_sizes_are_exact_and_memory_is_its_mean():
    run = planted(row(time=GAIN, size=0.3, peaks=[0.5, 0.7]))
    case = find_case(run, "/changed")
    named = figures(case.but(memory=case.memory.but(above_import_bytes=6e7)))
    assert named[TIME] == Figure(0.01, 0.0099, 0.0101, "interval")
    assert named[SIZE] == Figure(3e5, 3e5, 3e5, "exact")
    assert named[MEMORY] == Figure(6e7, 5e7, 7e7, "range", 2)
    assert named[FIRST_CALL] == Figure(0.5, 0.5, 0.5, "once")
    own = case.memory.but(above_import_ci=(5e7, 7e7))
    assert figures(case.but(memory=own))[MEMORY].kind == "interval"
    assert MEMORY not in figures(case.but(memory=None))


def test_a_device_s_peak_is_exact_and_a_metric_of_this_name_is_of_all_processes():
    case = find_case(planted(row()), "/changed")
    on_device = case.memory.but(device_peak={"allocated": 4e9, "reserved": 8e9})
    case = case.but(memory=on_device, metrics={"memory": Metric(value=5.0)})
    named = figures(case)
    assert named[MEMORY] == Figure(4e9, 4e9, 4e9, "exact")
    assert named[WITH_IMPORTS] == Figure(5.0, 5.0, 5.0, "once")


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("accuracy", Figure(0.3, 0.1, 0.6, "interval")),
        ("bits_per_character", Figure(-0.3, -0.6, -0.1, "interval")),
    ],
)
def test_more_is_gained_of_a_metric_of_which_less_is_better(metric, expected):
    case = find_case(planted(row(accuracy=(0.3, 0.1, 0.6))), "/changed")
    case = case.but(accuracy=case.accuracy.but(metric=metric))
    assert figures(case)[GAINED] == expected
    once = case.accuracy.but(difference=AccuracyDifference(mean=0.3))
    assert figures(case.but(accuracy=once))[GAINED].kind == "once"
    assert GAINED not in figures(case.but(accuracy=None))


# Ratios -------------------------------------------------------------------------------------------


def test_what_was_measured_once_has_no_bounds_to_be_held_against():
    figure = Figure(2.0, 1.5, 2.5, "interval")
    assert quotient(figure, Figure(1.0, 0.5, 1.25, "range")) == Figure(2.0, 1.2, 5.0, "range")
    assert quotient(figure, Figure(1.0, 1.0, 1.0, "exact")) == Figure(2.0, 1.5, 2.5, "interval")
    once = Figure(9.0, 9.0, 9.0, "once")
    assert quotient(figure, once).bounds is quotient(once, figure).bounds is None


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([6.0, 5.0, 7.0], [3.0, 2.0, 4.0], Figure(2.0, 5 / 4, 7 / 2, "interval")),
        ([6.0, -1.0, 7.0], [3.0, 2.0, 4.0], Figure(2.0, 0.0, 7 / 2, "interval")),
        ([6.0, 5.0, 7.0], [3.0, -1.0, 4.0], Figure(2.0, 5 / 4, inf, "interval")),
        (6.0, [3.0, 2.0, 4.0], Figure(2.0, 2.0, 2.0, "once")),
        ([6.0, 5.0, 7.0], 3.0, Figure(2.0, 2.0, 2.0, "once")),
        (0.0, 3.0, None),
    ],
)
def test_a_ratio_of_metrics_spans_the_bounds_of_both(ours, theirs, expected):
    assert ratio(planted(row(metrics={"load": (ours, theirs)})), "load") == expected


@pytest.mark.parametrize("low", [0.5, 0.0])
def test_the_other_way_round_the_bounds_change_places(low):
    turned = Figure(2.0, low, 4.0, "interval").turned()
    assert turned == Figure(0.5, 0.25, 1 / low if low else inf, "interval")


def scatter(*groups):
    """The deviation of logarithms about the means of their groups, and its freedom."""
    apart = [log(v) - np.mean(np.log(group)) for group in groups for v in group]
    freedom = len(apart) - len(groups)
    return sqrt(sum(each**2 for each in apart) / freedom), freedom


def bounds(value, sd, freedom, ours, theirs, name):
    """By the scatter within the run and that from run to run, by Welch and Satterthwaite."""
    within, between = sd**2 * (1 / ours + 1 / theirs), 2 * BETWEEN_RUNS[name] ** 2
    whole = within + between
    freedom = whole**2 / (within**2 / freedom + between**2 / BETWEEN_FREEDOM)
    wide = exp(stats.t.ppf(0.975, freedom) * sqrt(whole))
    return pytest.approx((value, value / wide, value * wide))


@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (1, 3), (2, 1), (2, 4)])
def test_a_peak_has_the_scatter_of_those_that_the_run_repeated(ours, theirs):
    repeated = [1.0, 1.2, 0.9]
    run = planted(row(memory=0.5), row("compilation", peaks=repeated))
    for name, count in (("changed", ours), ("base", theirs)):
        memory = find_case(run, f"mixed_precision/digits-cnn-64/pt/{name}").memory
        samples = {"above_import_bytes": [memory.above_import_bytes] * count}
        ends = f"mixed_precision/digits-cnn-64/pt/{name}"
        run = with_case(run, ends, memory=memory.but(samples=samples))
    alike = [[1.0] * count for count in (ours, theirs) if count > 1]
    sd, freedom = scatter(repeated, repeated, *alike)
    found = ratio(run, MEMORY)
    assert (found.value, found.low, found.high) == bounds(0.5, sd, freedom, ours, theirs, MEMORY)
    assert found.kind == "interval"


def test_a_program_of_two_techniques_scatters_once_and_peaks_of_nothing_do_not():
    run = planted(row(memory=0.5), row("compilation", peaks=[1.0, 1.2, 0.9]))
    whole = ratio(run, MEMORY)
    compiled = find_case(run, "compilation/digits-cnn-64/pt/changed")
    more = {"above_import_bytes": [*compiled.memory.samples["above_import_bytes"], 0, -5.0, None]}
    changed = with_case(run, compiled.id, memory=compiled.memory.but(samples=more))
    assert ratio(changed, MEMORY) == whole
    again = compiled.but(id="again", variant="again", program=compiled.id)
    assert ratio(run.but(cases=[*run.cases, again]), MEMORY) == whole


def test_without_any_repeated_row_first_calls_were_measured_once():
    run = planted(row(), row("compilation"))
    assert ratio(run, FIRST_CALL).kind == "once"
    calls = {"cold_first_calls_s": Metric(value=0.5, samples=[0.4, 0.5, 0.7])}
    run = with_case(run, "compilation/digits-cnn-64/pt/changed", metrics=calls)
    found, scattered = ratio(run, FIRST_CALL), scatter([0.4, 0.5, 0.7])
    assert (found.value, found.low, found.high) == bounds(1.0, *scattered, 1, 1, FIRST_CALL)


@pytest.mark.parametrize("name", [START, RATE])
def test_what_ran_at_one_time_of_a_run_has_the_scatter_from_run_to_run(name):
    run = planted(row(metrics={name: (2.0, 1.0)}))
    for end, factor in (("/changed", 2.0), ("/base", 1.0)):
        repeated = Metric(value=factor, samples=[0.98 * factor, factor, 1.02 * factor])
        run = with_case(run, end, metrics={name: repeated})
    found, alike = ratio(run, name), [0.98, 1.0, 1.02]
    wide = bounds(2.0, *scatter(alike, alike), 3, 3, name)
    assert (found.value, found.low, found.high) == wide
    assert found.kind == "interval"


def test_a_rate_of_steps_has_the_interval_of_their_times():
    run = planted(row(metrics={RATE: ([200.0, 190.0, 210.0], [100.0, 95.0, 105.0])}))
    assert (ratio(run, RATE).low, ratio(run, RATE).high) == pytest.approx((190 / 105, 210 / 95))


def test_peaks_of_a_gpu_and_of_the_host_are_not_compared():
    run = planted(row(memory=0.5))
    for name in ("/changed", "/base"):
        memory = find_case(run, name).memory.but(device_peak={"allocated": 4e9})
        run = with_case(run, name, memory=memory)
    assert ratio(run, MEMORY) == Figure(1.0, 1.0, 1.0, "exact")
    memory = find_case(run, "/changed").memory.but(device_peak=None)
    run = with_case(run, "/changed", memory=memory)
    pair = find_case(run, "/changed"), find_case(run, "/base")
    assert Table(run).between(*pair, MEMORY) == (None, NOT_COMPARABLE)


# Times --------------------------------------------------------------------------------------------


def two_sides(verdict):
    """Two frameworks with a row each, and how the record compares these rows."""
    bf16 = row(variant="bf16", time=GAIN)
    run = planted(bf16, bf16 | {"framework": "tf"})
    pair = [find_case(run, f"{side}/bf16") for side in ("pt", "tf")]
    between = records.comparison(*pair, 0.8, 0.7, 0.9, kind="framework", verdict=verdict)
    return run.but(comparisons=[*run.comparisons, between]), pair


def test_a_ratio_is_read_in_both_directions_and_of_unlike_work_in_none():
    run, pair = two_sides("faster")
    there, back = (Table(run).between(*order, TIME)[0] for order in (pair, pair[::-1]))
    assert back.value == pytest.approx(1 / there.value)
    assert (back.low, back.high) == pytest.approx((1 / there.high, 1 / there.low))
    run, pair = two_sides("not comparable")
    for order in (pair, pair[::-1]):
        assert Table(run).between(*order, TIME) == (None, NOT_COMPARABLE)


def test_two_rows_of_one_program_take_the_same_time():
    run = planted(row(time=GAIN), row("compilation", time=GAIN))
    first, second = (find_case(run, f"{name}/digits-cnn-64/pt/changed") for name in
                     ("mixed_precision", "compilation"))  # fmt: skip
    run = with_case(run, second.id, program=first.id)
    second = find_case(run, second.id)
    assert Table(run).between(first, second, TIME)[0] == Figure(1.0, 1.0, 1.0, "exact")


def test_the_published_record_s_comparisons_have_the_same_interval_in_the_table():
    run = load(DOCS)
    made, cases, kinds = Table(run), {case.id: case for case in run.cases}, set()
    for each in run.comparisons:
        one, other = cases[each.numerator], cases[each.denominator]
        if each.ci and each.verdict != "not comparable":
            kinds.add(each.kind)
            assert made.between(one, other, TIME)[0].bounds == each.ci
            assert made.between(other, one, TIME)[0].value == pytest.approx(1 / each.ratio)
    assert {"baseline", "framework"} <= kinds


# Accuracy -----------------------------------------------------------------------------------------


def test_accuracy_is_compared_by_the_seeds_that_both_trained_with():
    rows = [row(variant=name, accuracy=(1.0,), seeds=[90.0 + up, 91.0 + up, 92.0 + up])
            for name, up in (("one", 2.0), ("other", 0.5))]  # fmt: skip
    run = planted(*rows)
    one, other = (find_case(run, f"/{name}") for name in ("one", "other"))
    assert Table(run).between(one, other, "accuracy")[0].value == pytest.approx(1.5)
    assert Table(run).between(one, other, GAINED)[0].value == pytest.approx(1.5)
    text = [case.but(task="text-gpt") for case in (one, other)]
    assert Table(run).between(*text, "accuracy") == (None, NO_ACCURACY)


# Rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "name", "gains"),
    [
        ({"time": GAIN}, TIME, True),
        ({"time": (1.0, 0.98, 1.02)}, TIME, False),
        ({"time": (2.0, 1.9, 2.1)}, TIME, False),
        ({"time": (0.98, 0.975, 0.985)}, TIME, False),  # less than 3%
        ({"time": (0.9, 0.8, 0.98)}, TIME, False),
        ({"time": (0.5,)}, TIME, False),  # one block
        ({"time": GAIN, "accuracy": (-3.0, -4.0, -2.0)}, TIME, False),
        ({"time": GAIN, "accuracy": (0.1, -0.3, 0.5)}, TIME, True),
        ({"time": GAIN, "changes_math": True}, TIME, False),
        ({"size": 0.3}, SIZE, True),
        ({"accuracy": (1.0, 0.5, 1.5)}, GAINED, True),
        ({"accuracy": (0.2, -0.1, 0.5)}, GAINED, False),
        ({"metrics": {RATE: ([20, 19, 21], [10, 9, 11])}}, RATE, True),
        ({"metrics": {RATE: ([10, 9, 11], [20, 19, 21])}}, RATE, False),
    ],
)
def test_a_row_gains_where_its_whole_interval_says_so_and_accuracy_is_kept(given, name, gains):
    run = planted(row(**({"technique": "data_parallel"} if RATE in str(given) else {}), **given))
    (found,) = [each for each in Table(run).rows if not each.is_baseline]
    assert found.gains(name) is gains
    assert found.pays is gains


def test_the_table_is_plain_data_with_a_line_for_each_figure():
    run = planted(row(time=GAIN, size=0.3))
    lines = {line["figure"]: line for line in table(run) if line["variant"] == "changed"}
    time = {name: value for name, value in lines[TIME].items() if value is not None}
    assert (
        time.items()
        >= {
            "id": "mixed_precision/digits-cnn-64/pt/changed",
            "task": "digits-cnn",
            "batch_size": 64,
            "framework": "pt",
            **{"value": 0.01, "low": 0.0099, "high": 0.0101, "kind": "interval", "unit": "s"},
            **{"to_baseline_ratio": 0.5, "to_baseline_low": 0.48, "to_baseline_high": 0.52},
            "to_baseline_kind": "interval",
            "price": "",
            "accuracy": "yes",
        }.items()
    )
    size = lines[SIZE]
    assert (size["to_baseline_ratio"], size["to_baseline_kind"]) == (pytest.approx(0.3), "exact")
    assert {tuple(line) for line in lines.values()} == {COLUMNS}


def test_every_row_of_the_published_record_is_in_the_table():
    run = load(DOCS)
    lines = table(run)
    assert {line["id"] for line in lines} == {case.id for case in run.cases}
    timed = {case.id for case in run.cases if case.status == "OK" and case.timing.median_s}
    assert timed == {line["id"] for line in lines if line["figure"] == TIME}
    assert all(line["low"] <= line["value"] <= line["high"] for line in lines if line["figure"])
    kept = {line["accuracy"] for line in lines if line["status"] == "OK"}
    assert kept == {"yes", "no", "not asked", "not measured"}
    zeros = {
        (case.id, name)
        for case in run.cases
        for name, metric in case.metrics.items()
        if metric.value == 0 and case.status == "OK"
    }
    assert zeros <= {(line["id"], line["figure"]) for line in lines}


def test_a_technique_is_of_the_folder_of_its_file():
    assert {name: one.family for name, one in techniques().items()}.items() <= families().items()
    assert (family_of("checks"), family_of("gone")) == ("recipes", "train_step")


# Prices -------------------------------------------------------------------------------------------


def priced(technique, variant, role="variant", **fields):
    """A row as a record has it, with what its benchmark file declares."""
    declared = of_row(technique, variant) if role == "variant" else {"price": Price()}
    return records.case(variant, technique=technique, role=role, **(declared | fields))


@pytest.mark.parametrize(
    ("technique", "variant", "effort", "words"),
    [
        ("quantization_aware_training", "ptq_8", CALIBRATE, "calibration"),
        ("export", "onnx_int8", CALIBRATE, "calibration"),
        ("post_training_quantization", "static_int8", CALIBRATE, "calibration"),
        ("post_training_quantization", "dynamic_int8", FREE, ""),
        ("sparse_inference", "structured_90", CALIBRATE + 4, "4 epochs of training"),
        ("pruning", "sparsity_80", CALIBRATE + 4, "4 epochs of training"),
        ("distillation", "x", CALIBRATE + TEACHER + 4, "a trained teacher, 4 epochs of training"),
        ("combinations", "2_pruned_int8", CALIBRATE + 6, "6 epochs of training"),
        ("memory_format", "channels_last", FREE, ""),
    ],
)
def test_a_price_is_calibration_epochs_and_a_teacher(technique, variant, effort, words):
    assert price(priced(technique, variant)) == (effort, words)
    assert price(priced(technique, variant, role="baseline")) == (FREE, "")


def test_a_combination_trains_both_of_its_parts():
    parts = bench_combinations.PRUNING_EPOCHS, bench_combinations.ROUNDING_EPOCHS
    assert price(priced("combinations", "2_pruned_int8"))[1] == f"{sum(parts)} epochs of training"


def test_what_runs_compiled_graphs_takes_compiling():
    """Neither eager steps, nor Keras's fit, nor TorchScript."""
    made = {"compiled", "compiled_model", "fullgraph", "graph"}
    compiled = {name for name, (maker, _) in bench_compilation.MADE_BY.items() if maker in made}
    for variant in bench_compilation.TECHNIQUE.variants:
        words = price(priced("compilation", variant.name, variant.role))[1]
        assert words == ("compiling" if variant.name in compiled else ""), variant.name
    for technique in techniques().values():
        for variant in technique.variants:
            if variant.requires == "compiler" and variant.role == "variant":
                assert price(priced(technique.name, variant.name))[1] == "compiling", variant.name
    stack = priced("stacking", "winners")
    assert price(stack.but(settings={"compiled": True})) == (COMPILE, "compiling")
    assert price(stack.but(settings={"dtype": "bfloat16"})) == (FREE, "")


@pytest.mark.parametrize(("first", "effort"), [(None, FREE), (2.0, FREE), (2.1, COMPILE)])
def test_a_prediction_that_is_compiled_shows_in_its_first_call(first, effort):
    for role in ("variant", "baseline"):
        case = priced("memory_format", "x", role, mode="predict")
        timing = case.timing.but(cold_first_call_s=first)
        assert price(case.but(timing=timing))[0] == effort


def test_an_old_record_gets_what_is_declared_today_and_a_new_one_keeps_its_own():
    told = priced("pruning", "sparsity_80", price=Price(epochs=9))
    old = told.but(price=None, remedies=None)
    cases = [told, old, old.but(variant="gone")]
    assert [price(complete(case))[1] for case in cases] == [
        *("9 epochs of training", "4 epochs of training", "4 epochs of training")
    ]


def test_an_old_title_gets_the_runtime_of_its_framework_where_predictions_run_in_it():
    words = "int8, trained with rounding"
    old = priced("quantization_aware_training", "qat_8", mode="predict", title=words)
    titles = [complete(old.but(framework=side)).title for side in ("pt", "tf")]
    assert titles == [f"{words}, TorchInductor", f"{words}, LiteRT"]
    assert complete(old.but(mode="train")).title == words
