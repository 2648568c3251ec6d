"""What it takes to get a row, beside its first call: calibration, training, a teacher.

A row that is not listed is got by a setting.
"""

from __future__ import annotations

import re

from bench.analysis.values import at, is_number

# How much work a price is, cheaper ones first: training is its epochs more than calibrating, a
# teacher that has to be trained first as much as ten of them.
FREE, COMPILE, CALIBRATE, TEACHER = 0, 1, 2, 10
# Variants (a pattern) of a technique that are compiled. Where predictions are, the baselines too:
# that shows in a first call that takes so many seconds.
_COMPILED = {
    "compilation": "compiled|model_alone|fullgraph|graph_only|reduce_overhead|max_autotune",
    "native_export": "compiled|aotinductor.*",
    "data_parallel|optimizer_implementations": "compiled",
    "stacking": "[2-5]_.*",
}
COMPILES = 2.0
# technique, its variants (a pattern), epochs of training (0: calibration alone), with a teacher
_PRICES = [
    ("pruning", ".*", 4, False),
    ("semi_structured_pruning", ".*", 4, False),
    ("structured_pruning", ".*", 4, False),
    # Its rows time weights that nobody trained: what keeps accuracy is trained as pruning's rows.
    ("sparse_inference", ".*", 4, False),
    ("quantization_aware_training", "qat_.*", 2, False),
    ("quantization_aware_training", "ptq_.*", 0, False),
    ("combinations", ".*distilled.*", 6, True),
    ("combinations", ".*pruned.*", 6, False),
    ("distillation|feature_distillation", ".*", 4, True),
    # Ranges that are found as it runs need no calibration.
    ("post_training_quantization|export|native_export", "(?!dynamic).*int8.*", 0, False),
]


def price(case: dict) -> tuple[int, str]:
    """How much work it is to get a row, and what it takes in words ("" where nothing does)."""
    technique, variant, role = (case[name] for name in ("technique", "variant", "role"))
    for names, variants, epochs, teacher in _PRICES if role != "baseline" else ():
        if re.fullmatch(names, technique) and re.fullmatch(variants, variant):
            trained = "a trained teacher, " if teacher else ""
            words = f"{trained}{epochs} epochs of training" if epochs else "calibration"
            return CALIBRATE + epochs + TEACHER * teacher, words
    return (COMPILE, "compiling") if _compiles(case) else (FREE, "")


def _compiles(case: dict) -> bool:
    if case.get("mode") == "predict":
        first = at(case, "timing", "cold_first_call_s")
        return is_number(first) and first > COMPILES
    if case["role"] != "variant":
        return False
    return at(case, "settings", "compiled") is True or any(
        re.fullmatch(names, case["technique"]) and re.fullmatch(variants, case["variant"])
        for names, variants in _COMPILED.items()
    )
