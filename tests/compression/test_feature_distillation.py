"""Features are regressed and compared as NumPy does it, they teach, and both sides agree.

Each framework runs in a process of its own (`distillation_worker.py`), tf_keras in a third. The
optimizer of the gradient tests puts the gradient in the weight's place.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests import workers
from tests.compression.distillation_evidence import WORKERS, apart, side

BAR = 1e-5
WEIGHT = 0.5  # of the worker
REACHED = ("conv0.", "conv1.")  # the layers that lead to the regressor


@pytest.fixture(params=["pt", "tf"])
def found(request):
    return side(request.param)


@pytest.fixture(params=WORKERS)
def every(request):
    return side(request.param)


def relative(ours, theirs):
    return max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))


def test_the_regressor_starts_alike_everywhere(every):
    ours = np.array(every["feature_steps"]["kernel"])
    assert np.allclose(ours, np.random.default_rng(0).normal(0.0, 6**-0.5, (6, 12)), atol=1e-7)


def test_the_loss_is_that_of_labels_and_features(every):
    found = every["feature_steps"]
    labels = found["baseline"]["losses"][0]
    wanted = labels + WEIGHT * found["before"]
    assert found["applied"]["loss"] == pytest.approx(wanted, rel=1e-5)
    assert WEIGHT * found["before"] > 0.1 * labels  # or there is nothing to see


@pytest.mark.parametrize("other", workers.keras())
def test_twins_agree_in_loss_and_gradient(other):
    """Those of the regressor too."""
    ours, theirs = (side(name)["feature_steps"] for name in (other, "pt"))
    assert apart(ours["applied"], theirs["applied"]) < BAR
    assert relative(ours["losses"]["losses"], theirs["losses"]["losses"]) < BAR


def test_the_features_reach_the_layers_before_the_regressor_and_no_others(every):
    found = every["feature_steps"]
    for name, labels in found["labels"].items():
        difference = apart({name: found["applied"][name]}, {name: labels})
        assert (difference > 1e-2) == name.startswith(REACHED), name
        assert difference > 1e-2 or difference < 1e-6


def test_weight_zero_is_the_plain_step(every):
    found = every["feature_steps"]
    if every.framework == "pt":
        assert found["neutral"] == found["baseline"]  # to the last bit
    assert apart(found["neutral"], found["baseline"]) < 1e-6
    assert apart(found["losses"], found["baseline"]) > 1e-3


def test_the_features_alone_are_learned(found):
    found = found["features_alone"]
    assert found["losses"][-1] < found["losses"][0] / 2
    assert found["moved"]
    assert all(name.startswith(REACHED) for name in found["moved"])


# Bad input ------------------------------------------------------------------------------------


def test_layers_that_are_not_there_or_do_not_fit_are_refused(found):
    found = found["feature_refusals"]
    for name in ("unknown", "unknown to the teacher"):
        assert found[name].startswith("ValueError: ")
        assert "has no layer 'conv7'; it has " in found[name]
    for name in ("other pixels", "other axes"):
        assert found[name].startswith("ValueError: the student's ")
        assert "name layers that differ in channels alone" in found[name]
    assert found["unchanged"]


def test_bad_settings_are_refused(found):
    found = found["feature_refusals"]
    for weight in ("-1.0", "nan", "inf"):
        said = found[f"weight {weight}"]
        assert said == f"ValueError: weight must be at least 0 and finite, not {weight}"
    assert found["frozen"].startswith("ValueError: the student has no trainable ")


def test_an_optimizer_without_the_regressor_is_refused(found):
    said = found["feature_refusals"]["lacking"]
    if found.framework == "pt":
        start = "ValueError: the optimizer lacks the regressor: make it from taught.parameters()"
        assert said.startswith(start)
    assert said is not None


# Models that are not ours ---------------------------------------------------------------------


def test_models_of_two_inputs(every):
    losses = every["foreign"]["features"]
    assert losses[-1] < 0.7 * losses[0]


def test_a_layer_that_runs_twice_is_refused(every):
    said = every["foreign"]["twice"]
    assert said == "ValueError: '0' runs 2 times: it must give one tensor, once"


def test_pt_a_layer_that_gives_no_tensor_is_refused():
    said = side("pt")["foreign"]["a tuple"]
    assert said == "ValueError: '' gives a tuple: it must give one tensor, once"


def test_the_loss_gets_all_that_the_student_gives(every):
    losses = every["two_outputs"]
    assert losses[-1] < 0.7 * losses[0]


def test_students_that_pruning_made(every):
    """Layers that a copy took over have been called before, in another graph."""
    for name, student in every["composed"].items():
        pt = side("pt")["composed"][name]
        assert student["inputs"] == {"smaller": 3, "masked": 6}[name]
        assert student["source kept"]
        assert student["behind"] is None
        assert relative(student["losses"], pt["losses"]) < BAR


def test_pt_channels_of_a_series_are_second_behind_a_convolution():
    assert side("pt")["foreign"]["series"] == [2, 6, 9]


def test_pt_channels_of_images_are_last_behind_a_linear_layer_and_else_second():
    found = side("pt")["foreign"]["images"]
    assert found == {"rows": [5, 5], "sum": [5, 5], "maps": [4, 4, 1, 1]}


def test_pt_a_teacher_changes_no_input():
    assert side("pt")["foreign"]["changed"] == 0


def test_pt_hooks_are_removed():
    assert side("pt")["foreign"]["hooks"] == 0


@pytest.mark.parametrize("flavour", workers.keras())
def test_tf_subclassed_models_are_refused_with_the_reason(flavour):
    found = side(flavour)["foreign"]
    for who in ("student", "teacher"):
        start = "NotImplementedError: Two is subclassed and has no graph in which to find 'norm'"
        assert found[f"subclassed {who}"].startswith(start)
    assert found["unchanged"]
    assert found["unbuilt features"].startswith("ValueError: the model has no variables yet")


def test_pt_nothing_behind_the_teachers_layer_runs_after_the_first_step():
    found = side("pt")["structures"]
    assert found["ran"] == [1, 1, 1]
    # What the layer returned, not what an operation in place has made of it since.
    at_first, first, *_, last = found["feature losses"]
    assert first == pytest.approx(at_first, rel=1e-5)
    assert last < first


# The benchmark --------------------------------------------------------------------------------


def test_the_benchmark_proves_what_the_features_reached(found):
    judged = {n: v for n, v in found["benchmarks"].items() if n.startswith("features ")}
    assert "features features" in judged
    for name, (evidence, reason) in judged.items():
        assert reason is None, (name, evidence)
        assert (evidence["norm_of_features"] > 1e-3) == (name == "features features")
