"""Rows of recipes and of mixed precision on the detection task: trained, and judged by mAP."""

from __future__ import annotations

ROWS = {
    "schedules constant",
    "schedules cosine",
    "averaging last",
    "averaging ema",
    "averaging early_stopping",
}
PRECISIONS = {f"mixed_precision {variant}" for variant in ("fp32", "bf16", "bf16_fp32_head")}


def test_each_row_is_trained_proven_and_judged_by_map(evidence):
    for worker, found in evidence.items():
        trained = found["detection trained"]
        assert set(trained) == (ROWS if worker == "tf_keras" else ROWS | PRECISIONS)
        for answer in trained.values():
            assert not answer.get("not_applied")
            assert answer["evidence"] is not None
            assert 0 <= answer["value"] <= answer["metrics"]["mAP50"]["value"] <= 100
            assert answer["metrics"]["mAP50"]["unit"] == "%"


def test_a_watched_training_says_when_it_reached_its_target(every):
    for row in ("schedules cosine", "averaging last"):
        metrics = every["detection trained"][row]["metrics"]
        assert metrics["steps_to_target"]["value"] is None  # 16 steps: it looks at the 20th first
        assert metrics["loss_fluctuation"]["value"] > 0
        assert metrics["loss_fluctuation"]["unit"] == ""
        assert 0 <= metrics["train_mAP"]["value"] <= 100
    assert every["detection trained"]["averaging early_stopping"]["metrics"]["epochs"]["value"] <= 2
