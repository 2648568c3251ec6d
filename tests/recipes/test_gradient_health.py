"""Norms are those of a backward pass, and gradients are told healthy or not."""

from __future__ import annotations

import pytest

from tests import workers


def test_norms_are_those_of_a_plain_backward_pass_and_nothing_changes(every):
    found = every["gradient_health norms"]
    assert found["wanted"].keys() == found["found"].keys()
    assert len(found["wanted"]) >= 5
    for name, norm in found["wanted"].items():
        assert norm > 0
        assert found["found"][name] == pytest.approx(norm, rel=1e-5)
    assert found["as before"]


def test_the_output_s_norm_is_known_within_a_dataclass(evidence):
    plain, held = evidence["pt"]["gradient_health held"]
    assert plain == held > 0


def test_a_layer_called_output_is_not_the_model_s_output(every):
    other, found = every["gradient_health named_output"]
    assert list(found.values()) == pytest.approx(list(other.values()))
    assert list(found)[-1] == "output"


@pytest.mark.parametrize("residual", ["False", "True"])
def test_twins_have_the_same_norms(evidence, residual):
    ours = evidence["pt"]["gradient_health twins"][residual]
    for flavour in workers.keras():
        assert evidence[flavour]["gradient_health twins"][residual] == pytest.approx(ours, rel=1e-4)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("default", ["vanishing"]),
        ("glorot", ["vanishing"]),
        ("he", []),
        ("orthogonal", []),
        ("he, doubled", ["exploding"]),
        ("he, small", ["vanishing"]),
        # A sum of 30 branches grows, whatever keeps one of them: only small ones are passed by.
        ("default, residual", ["exploding"]),
        ("glorot, residual", ["exploding"]),
        ("he, residual", ["exploding"]),
        ("he, small, residual", []),
    ],
)
def test_thirty_layers_are_told_healthy_or_not(every, case, said):
    found = every["gradient_health health"][case]
    assert found["said"] == said
    assert bool(found["count"]) == bool(said)


def test_each_rule_has_its_word(every):
    said = every["gradient_health rules"]["given"]
    assert said.keys() == {"a", "c", "d", "e"}
    words = {"a": "vanishing", "c": "exploding", "d": "no gradient", "e": "no finite gradient"}
    assert all(said[name].startswith(word) for name, word in words.items())
    saturated = every["gradient_health rules"]["saturated"]
    assert saturated["output"].startswith("no gradient")
    assert saturated["a"].startswith("exploding")


@pytest.mark.parametrize("framework", workers.keras())
def test_norms_leave_a_kernel_that_is_normalized_in_training(evidence, framework):
    assert evidence[framework]["gradient_health normalized_kernel"]


@pytest.mark.parametrize("fault", ["vanishing", "exploding"])
def test_every_fault_that_the_benchmark_plants_is_found(every, fault):
    assert every["gradient_health faults"][fault].startswith(fault)
