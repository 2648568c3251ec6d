"""What a row takes: the epochs are those that the benchmark files train."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.analysis.prices import CALIBRATE, COMPILE, FREE, price
from bench.harness.schedule import techniques

BENCH = Path(__file__).parents[2] / "bench" / "compression"


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
