"""What a row takes: the epochs are those that the benchmark files train."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from bench.analysis.declared import complete, of_row
from bench.analysis.prices import CALIBRATE, COMPILE, FREE, TEACHER, Price, price
from bench.compression import bench_combinations
from bench.harness.schedule import techniques
from bench.train_step import bench_compilation


def test_the_stack_of_what_was_faster_is_compiled_where_its_settings_say_so():
    stack = row("stacking", "winners")
    assert price(stack | {"settings": {"compiled": True}}) == (COMPILE, "compiling")
    assert price(stack | {"settings": {"dtype": "bfloat16"}}) == (FREE, "")


def row(technique, variant, role="variant", first=None):
    """A row as a record has it, with what the benchmark files declare of it."""
    declared = of_row(technique, variant) if role == "variant" else {"price": asdict(Price())}
    return {
        "id": f"{technique}/{variant}",
        "technique": technique,
        "variant": variant,
        "role": role,
        "timing": {"cold_first_call_s": first},
    } | declared


def test_a_combination_trains_both_of_its_parts():
    parts = bench_combinations.PRUNING_EPOCHS, bench_combinations.ROUNDING_EPOCHS
    words = price(row("combinations", "2_pruned_int8"))[1]
    assert words == f"{sum(parts)} epochs of training"
    assert "teacher" in price(row("combinations", "2_distilled_int8"))[1]


@pytest.mark.parametrize(
    ("technique", "variant", "work", "words"),
    [
        ("quantization_aware_training", "ptq_8", CALIBRATE, "calibration"),
        ("export", "onnx_int8", CALIBRATE, "calibration"),
        ("post_training_quantization", "static_int8", CALIBRATE, "calibration"),
        ("post_training_quantization", "onnxruntime_int8", CALIBRATE, "calibration"),
        ("post_training_quantization", "dynamic_int8", FREE, ""),
        ("sparse_inference", "structured_90", CALIBRATE + 4, "4 epochs of training"),
        ("pruning", "sparsity_80", CALIBRATE + 4, "4 epochs of training"),
        ("combinations", "2_pruned_int8", CALIBRATE + 6, "6 epochs of training"),
        ("combinations", "2_distilled_int8", CALIBRATE + TEACHER + 6,
         "a trained teacher, 6 epochs of training"),
        ("memory_format", "channels_last", FREE, ""),
    ],
)  # fmt: skip
def test_a_price_is_calibration_epochs_and_a_teacher(technique, variant, work, words):
    assert price(row(technique, variant)) == (work, words)
    assert price(row(technique, variant, role="baseline")) == (FREE, "")


def test_of_compilation_s_rows_those_take_compiling_that_run_compiled_graphs():
    """Neither eager steps, nor Keras's fit, nor TorchScript."""
    made = {"compiled", "compiled_model", "fullgraph", "graph"}
    compiled = {name for name, (maker, _) in bench_compilation.MADE_BY.items() if maker in made}
    for variant in bench_compilation.TECHNIQUE.variants:
        words = price(row("compilation", variant.name, variant.role))[1]
        assert words == ("compiling" if variant.name in compiled else ""), variant.name


@pytest.mark.parametrize(("first", "work"), [(None, FREE), (2.0, FREE), (2.1, COMPILE)])
def test_a_prediction_that_is_compiled_shows_in_its_first_call(first, work):
    for role in ("variant", "baseline"):
        assert price(row("memory_format", "x", role, first) | {"mode": "predict"})[0] == work


def test_a_teacher_is_as_much_work_as_ten_epochs():
    alone, taught = (price(row(name, "x")) for name in ("pruning", "distillation"))
    assert taught == (alone[0] + 10, f"a trained teacher, {alone[1]}")


@pytest.mark.parametrize(
    ("variant", "role", "first_call", "work"),
    [
        ("fused", "variant", 0.02, FREE),
        ("compiled", "variant", 16.0, COMPILE),
        ("static_int8", "variant", 16.0, CALIBRATE),
        ("static_int8", "baseline", None, FREE),
    ],
)
def test_cheaper_work_comes_first(variant, role, first_call, work):
    found = row("post_training_quantization", variant, role, first_call) | {"mode": "predict"}
    assert price(found)[0] == work


def test_what_needs_a_compiler_compiles():
    for technique in techniques().values():
        for variant in technique.variants:
            if variant.requires == "compiler" and variant.role == "variant":
                assert price(row(technique.name, variant.name))[1] == "compiling", variant.name
    assert price(row("activation_checkpointing", "checkpointed", first=2.6))[0] == FREE


def test_an_old_record_gets_what_is_declared_today_and_a_new_one_keeps_its_own():
    told = row("pruning", "sparsity_80") | {"price": asdict(Price(epochs=9))}
    old = {name: told[name] for name in ("technique", "variant", "role", "timing")}
    gone = old | {"variant": "gone"}
    found = complete({"cases": [told, old, gone]})["cases"]
    assert [price(case)[1] for case in found] == [
        "9 epochs of training",
        "4 epochs of training",
        "4 epochs of training",
    ]
