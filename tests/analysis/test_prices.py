"""What a row takes: the epochs are those that the benchmark files train."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.analysis.prices import CALIBRATE, COMPILE, FREE, TEACHER, price
from bench.harness.schedule import techniques
from bench.train_step import bench_compilation

BENCH = Path(__file__).parents[2] / "bench" / "compression"


def test_the_stack_of_what_was_faster_is_compiled_where_its_settings_say_so():
    stack = row("stacking", "winners")
    assert price(stack | {"settings": {"compiled": True}}) == (COMPILE, "compiling")
    assert price(stack | {"settings": {"dtype": "bfloat16"}}) == (FREE, "")


def row(technique, variant, role="variant", first=None):
    timing = {"cold_first_call_s": first}
    return {
        "id": f"{technique}/{variant}",
        "technique": technique,
        "variant": variant,
        "role": role,
        "timing": timing,
    }


@pytest.mark.parametrize(
    ("technique", "variant"),
    [
        ("pruning", "sparsity_80"),
        ("semi_structured_pruning", "two_to_four"),
        ("structured_pruning", "channels_80"),
        ("quantization_aware_training", "qat_8"),
    ],
)
def test_epochs_are_those_of_the_benchmark(technique, variant):
    text = (BENCH / f"bench_{technique}.py").read_text("utf-8")
    epochs = re.search(r"^MORE_EPOCHS = (\d+)", text, re.M)[1]
    assert price(row(technique, variant))[1] == f"{epochs} epochs of training"


def test_a_combination_trains_both_of_its_parts():
    text = (BENCH / "bench_combinations.py").read_text("utf-8")
    parts = re.search(r"^PRUNING_EPOCHS, ROUNDING_EPOCHS = (\d+), (\d+)", text, re.M)
    words = price(row("combinations", "2_pruned_int8"))[1]
    assert words == f"{sum(map(int, parts.groups()))} epochs of training"
    assert "teacher" in price(row("combinations", "2_distilled_int8"))[1]


@pytest.mark.parametrize(
    ("technique", "variant", "work", "words"),
    [
        ("quantization_aware_training", "ptq_static", CALIBRATE, "calibration"),
        ("export", "static_int8", CALIBRATE, "calibration"),
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
