"""Plain is what plain framework code does, and each rung has its effect on top of it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ladders.test_image_classification import apart


def of(found, scenario):
    return found[f"language_model {scenario}"]


MODELS = pytest.mark.parametrize("model", ["plain", "masked"])  # a GPT, a BERT


@MODELS
def test_the_plain_program_is_plain_framework_code(every, model):
    found = of(every, model)
    ours = found["shared"] + found["epoch"]
    assert apart(ours, found["by hand"]) < 1e-4  # the bar of transformers
    assert len(found["epoch"]) == 2  # nine sequences in batches of four


@MODELS
def test_twins_agree_in_their_first_losses(evidence, model):
    ours, theirs = (of(evidence[side], model)["shared"] for side in ("pt", "tf"))
    assert apart(ours, theirs) < 1e-4


def test_mixed_precision_computes_in_bfloat16(every):
    found = of(every, "mixed_precision")
    assert set(found["step"]) == {"bfloat16"}


@pytest.mark.parametrize("rung", ["checkpointing", "data_parallel"])
def test_other_rungs_change_no_loss(every, rung):
    assert apart(of(every, rung)["shared"], of(every, "plain")["shared"]) < 1e-4


def test_rungs_change_no_loss_of_hidden_characters(every):
    """Each row has as many, so that halves of a batch weigh alike."""
    found = of(every, "masked")
    assert apart(found["rungs"], found["shared"]) < 1e-4


def test_a_bert_sees_both_ways_and_learns_hidden_places_alone(every):
    found = of(every, "masked")
    assert min(found["changed"]) > 0  # the logits at each place, where the last code is another
    assert np.array_equal(found["learned"], found["asked"])
    assert 0 < np.mean(found["asked"]) < 0.5


def test_the_fused_kernel_runs(every):
    assert of(every, "masked")["fused"]


def test_blocks_are_computed_again(every):
    again, once = of(every, "checkpointing")["again"], of(every, "mixed_precision")["step"]
    assert sum(again.values()) > sum(once.values())


def test_accumulation_takes_the_batch_in_halves(every):
    assert set(of(every, "masked")["sizes"]) == {2}


def test_replicas_share_each_batch_and_end(every):
    found = of(every, "data_parallel")
    assert found["replicas"] == [2, True]
    assert found["epoch"] == 4
    assert "equal shares" in found["refused"]
    assert "no multiple of 3" in found["odd"]
    assert found["left"] == 0


def test_replicas_that_end_at_once_are_not_waited_for(evidence):
    assert "ended before it began" in of(evidence["pt"], "dead_replicas")


def test_replicas_without_a_model_leave_nothing(evidence):
    found = of(evidence["pt"], "failing_model")
    assert found == {"said": "no model", "group": False}


def test_all_rungs_at_once_train_and_predict(every):
    found = of(every, "everything")
    assert apart(found["shared"], of(every, "plain")["shared"]) < 0.02  # bfloat16
    assert found["predicts"] == [4, 12, 99]
    assert found["bytes"] > 4 * 20 * 32
    assert np.isfinite(found["shared"]).all()
