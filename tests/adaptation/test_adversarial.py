"""Reversal is exact, its strength follows the formula, gradients are those of plain code."""

from __future__ import annotations

import numpy as np
import pytest

from tests import workers


def apart(ours, theirs):
    """The largest relative L2 difference of a tensor."""
    pairs = [(np.array(ours[key], float), np.array(theirs[key], float)) for key in theirs]
    return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs if np.linalg.norm(b))


def numbered(tensors):
    return dict(enumerate(tensors))


def strength(progress):
    return 2 / (1 + np.exp(-10 * np.asarray(progress))) - 1


def test_the_gradient_is_reversed_exactly_and_the_value_stays(every):
    found = every["adversarial reversal"]
    for factor in (0.0, 0.375, 2.0):  # powers of two and their sums: no rounding
        assert np.array_equal(found[f"{factor}: value"], found["x"])
        wanted = np.float32(-factor) * np.float32(found["plain"])
        assert np.array_equal(np.float32(found[str(factor)]), wanted)


def test_the_strength_follows_the_paper_and_counts_training_passes_alone(every):
    found = every["adversarial schedule"]
    wanted = strength(np.array(found["progress"], float))
    assert np.allclose(found["of progress"], wanted, rtol=1e-5, atol=1e-7)
    passes = [0, 0.25, 0.5, 0.75, 1, 1]
    assert np.allclose(found["seen"], 0.5 * strength(passes), rtol=1e-5)
    assert found["restored"] == pytest.approx(0.5 * strength(1), rel=1e-5)


def test_gradients_are_those_of_two_losses_of_which_the_features_get_one_reversed(every):
    found = every["adversarial descent"]
    assert found["strength"] == pytest.approx(strength(0.1), rel=1e-5)
    assert found["loss"] == pytest.approx(found["plain loss"], rel=1e-5)
    labels, domains = found["labels"], found["domains"]
    for most in (0.0, 1.0):
        factor = most * strength(0.1)
        wanted = {
            key: np.array(labels[key]) - factor * np.array(domains.get(key, 0.0)) for key in labels
        }
        assert apart(found[f"moved {most}"], wanted) < 1e-4  # a weight less its update loses digits
        ours, theirs = found[f"domain {most}"], found["of the domain head"]
        assert apart(numbered(ours), numbered(theirs)) < 1e-4
    assert not {"head.kernel", "head.bias"} & domains.keys()
    # Without the reversal the first convolution would go elsewhere.
    assert apart(found["moved 0.0"], found["moved 1.0"]) > 1e-2


def test_ten_steps_of_twins_agree(evidence):
    ours = evidence["pt"]["adversarial ten_steps"]
    for other in workers.keras():
        theirs = evidence[other]["adversarial ten_steps"]
        assert np.allclose(ours["losses"], theirs["losses"], rtol=1e-5)
        assert apart(ours["weights"], theirs["weights"]) < 1e-5
        assert apart(numbered(ours["domain"]), numbered(theirs["domain"])) < 1e-5


def test_other_inputs_graphs_and_low_precision(every):
    found = every["adversarial other_inputs"]
    assert found.pop("bfloat16") < 0.1
    assert all(found.values()), found


def test_a_model_of_the_kit_is_its_features_and_its_head(every):
    found = every["adversarial split"]
    assert len(found) == 4
    assert all(found.values()), found


def test_domains_that_do_not_go_together_are_refused(evidence):
    found = evidence["pt"]["adversarial forms"]
    assert found.pop("without a mask") is True
    assert len(found) == 4
    assert all(found.values()), found


def test_features_need_a_row_a_sample(every):
    assert "features need a row a sample" in every["adversarial forms"]["rows"]


def test_bad_settings_are_refused(every):
    assert all(every["adversarial refusals"])


def test_what_puts_a_model_back_puts_its_count_of_passes_back(every):
    before, found = every["adversarial put_back"]
    assert before[0] == 1
    assert before[1] > 0
    assert all(values == before for values in found.values()), found
