"""What it takes to get a row, beside its first call: calibration, training, a teacher.

A row that is not listed is got by a setting, or by compiling, which its first call shows.
"""

from __future__ import annotations

import re

# How much work a price is, cheaper ones first: training is its epochs more than calibrating, a
# teacher that has to be trained first as much as ten of them.
FREE, COMPILE, CALIBRATE, TEACHER = 0, 1, 2, 10
COMPILES = 2.0  # seconds: a first call that takes longer compiles something
# technique, its variants (a pattern), epochs of training (0: calibration alone), with a teacher
_PRICES = [
    ("pruning", ".*", 4, False),
    ("semi_structured_pruning", ".*", 4, False),
    ("structured_pruning", ".*", 4, False),
    ("quantization_aware_training", "qat_.*", 2, False),
    ("quantization_aware_training", "ptq_.*", 0, False),
    ("combinations", ".*distilled.*", 6, True),
    ("combinations", ".*pruned.*", 6, False),
    ("distillation|feature_distillation", ".*", 4, True),
    ("post_training_quantization|export|native_export", ".*int8.*", 0, False),
]


def price(technique: str, variant: str, role: str, first_call: float | None) -> tuple[int, str]:
    """How much work it is to get a row, and what it takes in words ("" where nothing does)."""
    for names, variants, epochs, teacher in _PRICES if role != "baseline" else ():
        if re.fullmatch(names, technique) and re.fullmatch(variants, variant):
            trained = "a trained teacher, " if teacher else ""
            words = f"{trained}{epochs} epochs of training" if epochs else "calibration"
            return CALIBRATE + epochs + TEACHER * teacher, words
    if first_call is not None and first_call > COMPILES:
        return COMPILE, "compiling"
    return FREE, ""
