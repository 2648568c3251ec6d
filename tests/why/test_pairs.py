"""A row is explained beside the row that a record compares it with."""

from __future__ import annotations

from argparse import Namespace

import pytest

from bench.why import pairs


@pytest.mark.parametrize(
    ("technique", "variant", "other"),
    [
        ("post_training_quantization", "onnxruntime_int8", "onnxruntime_fp32"),
        ("post_training_quantization", "static_int8", "fp32"),
        ("accuracy_aware_quantization", "onnxruntime_accuracy_aware", "onnxruntime_all_int8"),
        ("export", "onnx_int8", "baseline"),
    ],
)
@pytest.mark.parametrize("framework", ["pt", "tf"])
def test_the_other_side_is_what_the_ratio_of_a_row_is_over(
    technique, variant, other, framework, tmp_path
):
    asked = {"technique": technique, "variant": variant, "framework": framework}
    given = Namespace(what="digits-cnn", predict=True, batch=8, framework_pair=False, **asked)
    row, beside = pairs.asked(given, tmp_path)
    assert [row.case.variant, beside.case.variant] == [variant, other]
    assert row.framework == beside.framework == framework
    is_baseline = other in ("fp32", "baseline")
    assert (beside.name == pairs.BASELINE) is is_baseline
