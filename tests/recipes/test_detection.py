"""Rows of recipes on the detection task: trained, and judged by mAP."""

from __future__ import annotations

ROWS = {"schedules cosine", "averaging swa_early_stopping"}


def test_each_row_is_trained_proven_and_judged_by_map(evidence):
    for worker, found in evidence.items():
        trained = found["detection trained"]
        assert set(trained) == ({"schedules cosine"} if worker == "tf_keras" else ROWS)
        for answer in trained.values():
            assert not answer.get("not_applied")
            assert answer["evidence"] is not None
            assert 0 <= answer["value"] <= answer["metrics"]["mAP50"]["value"] <= 100
            assert answer["metrics"]["mAP50"]["unit"] == "%"


def test_a_watched_training_says_when_it_reached_its_target(every):
    metrics = every["detection trained"]["schedules cosine"]["metrics"]
    assert metrics["steps_to_target"]["value"] is None  # 16 steps: it looks at the 20th first
    assert metrics["loss_fluctuation"]["value"] > 0
    assert metrics["loss_fluctuation"]["unit"] == ""
    assert 0 <= metrics["train_mAP"]["value"] <= 100


def test_an_early_stop_keeps_to_the_epochs_of_the_task(evidence):
    for side in ("pt", "tf"):
        metrics = evidence[side]["detection trained"]["averaging swa_early_stopping"]["metrics"]
        assert metrics["epochs"]["value"] <= 2
