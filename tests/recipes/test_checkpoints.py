"""Interrupted training ends with the weights of an undisturbed one; no fault costs a file."""

from __future__ import annotations

import numpy as np
import pytest


def test_interrupted_after_any_step_it_ends_with_the_same_weights(every):
    found = every["checkpoints resumed"]
    assert found["a step is seen"]
    assert len(found["same"]) == 4
    assert all(found["same"].values())


def test_what_each_kind_holds(every):
    whole, weights, half = (every["checkpoints kinds"][k] for k in ("whole", "weights", "half"))
    assert whole["exact"]
    assert weights["exact"]
    assert half["rounded"]
    assert not half["exact"]
    assert whole["bytes"] > weights["bytes"] > half["bytes"]
    assert whole["state"] == weights["state"] == half["state"] == {"a": 1}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("missing", "there is no"),
        ("cut", "cut off"),
        ("empty", "cut off"),
        ("flipped", "damaged"),
        ("foreign", "no checkpoint"),
        ("half", "weights alone"),
        ("other model", "another model"),
        ("overflow", "65504"),
        ("full disk", "can't be written"),
    ],
)
def test_a_fault_is_one_line(every, fault, words):
    reason = every["checkpoints faults"][fault]
    assert words in reason
    assert "\n" not in reason


def test_a_fault_changes_nothing(every):
    found = every["checkpoints faults"]
    assert found["model stays"]
    assert found["other model stays"]
    assert found["good one stays"]
    assert found["left over"] == []


def test_whatever_the_damage_there_is_one_line_and_the_model_stays(every):
    found = every["checkpoints drawn_damage"]
    assert found["stays"]  # as it was, or as the whole checkpoint has it, which is the same
    lines = [line for line in found["said"] if line is not None]
    assert len(lines) > 40  # some change what nobody reads
    assert all(line.startswith(found["folder"]) and "\n" not in line for line in lines)


def test_the_folder_keeps_the_last_the_best_and_the_periodic(every):
    found = every["checkpoints folder"]
    assert found["names"] == ["best", "periodic-00000003", "step-00000004", "step-00000005"]
    assert found["best"] == 0.9
    assert found["resumed"] == 4
    assert found["weight"] == 4.0
    assert found["periodic"] == ["periodic-00000003", "periodic-00000006"]
    assert "no checkpoint can be read" in found["none is whole"]
    assert found["nothing there"] is None
    assert found["bad keep"]


def test_what_was_written_last_stays_though_its_step_is_an_earlier_one(every):
    found = every["checkpoints returned"]
    assert found["written"]
    assert found["names"] == ["best", "step-00000150", "step-00000300"]
    state = {"rate": 0.5, "counts": [3]}
    assert found["resumed"] == state | {"step": 150, "metric": 0.5, "saves": 1}


def test_nan_is_never_the_best(every):
    found = every["checkpoints returned"]
    assert found["best of nan"] is None
    assert found["best"] == 0.5


def test_what_could_not_be_read_again_is_not_written(every):
    found = every["checkpoints returned"]
    assert "a checkpoint holds" in found["object"] or "JSON" in found["object"]
    assert "\n" not in found["object"]
    assert "PosixPath" in found["object"]
    assert found["left"] == found["names"]


def test_a_named_tuple_is_refused_where_it_could_not_be_read_again(evidence):
    assert "a checkpoint holds" in evidence["pt"]["checkpoints returned"]["named"]


def test_an_array_of_words_is_refused_where_it_could_not_be_read_again(evidence):
    for side in evidence:
        if side != "pt":
            assert "arrays of numbers" in evidence[side]["checkpoints returned"]["words"]


def test_a_checkpoint_is_read_whether_or_not_there_is_a_schedule_then_and_now(evidence):
    found = evidence["pt"]["checkpoints scheduled"]
    assert found["False False"] == [0.05, 0.05]
    assert found["True False"] == pytest.approx([0.004, 0.004])
    assert found["False True"][1] == found["True True"][1] > 0.004
    assert "of another optimizer" in found["another"]
    assert found["lazy"] == [2, 3]


def test_a_rate_that_was_reduced_comes_back(every):
    assert every["checkpoints reduced"] == pytest.approx(0.005)


def test_weights_in_bfloat16_come_back(every):
    before, after = every["checkpoints low_precision"]
    assert before == after
    assert any(value for weight in before for value in np.ravel(weight))


def test_a_loss_scale_is_saved_as_it_is_and_comes_back(evidence):
    found = evidence["tf"]["checkpoints of_keras"]
    assert len(set(found["variables"])) == 1
    assert found["scales"] == [128.0, 128.0]


def test_what_keras_computes_from_variables_comes_back_with_them(evidence):
    one, other = evidence["tf"]["checkpoints of_keras"]["normalised"]
    assert np.allclose(one, other, atol=1e-5)


def test_masks_of_a_pruning_come_back(evidence):
    found = evidence["tf"]["checkpoints of_keras"]
    one, other = found["masked"]
    assert np.allclose(one, other, atol=1e-6)
    assert not np.allclose(one, found["dense"], atol=1e-2)
    assert "another model" in found["into a model without"]
    one, other = found["halved"]
    assert np.allclose(one, other, atol=1e-6)
