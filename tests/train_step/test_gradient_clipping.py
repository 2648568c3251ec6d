"""Clipping does what NumPy does, the guard stops in time and says why, and both sides alike.

Each framework runs in a process of its own (`gradient_clipping_worker.py`), tf_keras in a third.
The optimizer of most tests puts the gradient in the weight's place, so that gradients are compared.
"""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from tests import workers

WORKERS = ("pt", *workers.keras())
PARITY = {"gpt": 1e-4, "cnn": 1e-5}
MAX_NORM = 2.0
SCALE = 2.0**12
CULPRITS = {
    "input": "3 of 1024 values of input x are not finite: look at the data",
    "loss": "1 of 1 values of the loss are not finite: look at the learning rate",
    "gradient": "10 of 10 values of the gradient of head.bias are not finite: look for sqrt",
    "overflow": "each gradient is finite but their norm overflows: look at the scale",
}


@pytest.fixture(scope="module")
def evidence():
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    return workers.run("train_step.gradient_clipping_worker", WORKERS)


@pytest.fixture(params=["pt", "tf"])
def found(request, evidence):
    return evidence[request.param]


@pytest.fixture(params=WORKERS)
def every(request, evidence):
    return evidence[request.param]


def arrays(gradients):
    return {name: np.array(value, dtype=np.float64) for name, value in gradients.items()}


def gradients(side, case):
    return arrays(side["applied"][case]["gradients"])


def norm(tensors):
    return math.sqrt(sum(float((value**2).sum()) for value in tensors.values()))


def apart(ours, theirs):
    """The largest relative L2 difference of a tensor."""
    assert ours.keys() == theirs.keys()
    return max(
        np.linalg.norm(ours[name] - theirs[name]) / np.linalg.norm(theirs[name]) for name in theirs
    )


def relative(ours, theirs):
    return max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))


# Clipping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["clip", "guard"])
def test_the_global_norm_is_clipped_as_numpy_does(every, case):
    plain, ours = gradients(every, "plain"), gradients(every, case)
    assert norm(plain) > 2 * MAX_NORM  # or there is nothing to see
    expected = {name: value * MAX_NORM / norm(plain) for name, value in plain.items()}
    assert apart(ours, expected) < 1e-5
    assert norm(ours) == pytest.approx(MAX_NORM, rel=1e-5)
    assert every["applied"][case]["norm"] == pytest.approx(norm(plain), rel=1e-5)


def test_each_variable_is_clipped_as_numpy_does(every):
    plain, ours = gradients(every, "plain"), gradients(every, "per variable")
    sizes = {name: float(np.linalg.norm(value)) for name, value in plain.items()}
    assert min(sizes.values()) < 0.9 * MAX_NORM < 1.1 * MAX_NORM < max(sizes.values())
    expected = {name: value * min(1.0, MAX_NORM / sizes[name]) for name, value in plain.items()}
    assert apart(ours, expected) < 1e-5
    assert norm(ours) > 1.1 * MAX_NORM  # not what the global norm gives


@pytest.mark.parametrize("case", ["loose", "off", "measured"])
def test_a_bound_that_does_not_bind_changes_nothing(every, case):
    assert apart(gradients(every, case), gradients(every, "plain")) < 1e-6


def test_a_norm_is_taken_where_it_is_needed_or_asked_for(every):
    found = every["applied"]
    assert found["measured"]["norm"] == pytest.approx(norm(gradients(every, "plain")), rel=1e-5)
    assert found["off"]["norm"].startswith("ValueError: no norm is taken: ask for it with measure")


@pytest.mark.parametrize("other", workers.keras())
@pytest.mark.parametrize("case", ["clip", "per variable"])
def test_twins_agree(evidence, case, other):
    pt, tf = evidence["pt"], evidence[other]
    assert apart(gradients(pt, case), gradients(tf, case)) < PARITY["gpt"]
    assert pt["applied"]["clip"]["norm"] == pytest.approx(tf["applied"]["clip"]["norm"], rel=1e-5)
    ours, theirs = pt["losses"], tf["losses"]
    assert relative(ours["clip"], theirs["clip"]) < PARITY["cnn"]
    assert relative(ours["clip"], ours["baseline"]) > PARITY["cnn"]
    assert (ours["traces"], theirs["traces"]) == (None, 1)


def test_an_embedding_is_clipped_by_the_norm_of_its_gradient(found):
    """A row that is looked up three times gets the sum of three pulls, and that has the norm."""
    embedding = found["embedding"]
    gradient = np.array([[0.0, 0.0], [6.0, 4.0], [0.0, 5.0], [0.0, 0.0]])
    size = np.linalg.norm(gradient)
    assert embedding["norm"] == pytest.approx(size, rel=1e-6)
    for maker in ("make_train_step", "make_per_variable_step"):
        assert np.allclose(embedding[maker], gradient / size, rtol=1e-5)


def test_gradients_of_several_dtypes_are_one_vector(found):
    several = found["several_dtypes"]
    assert several["norm"] == pytest.approx(5.0, rel=1e-3)
    (first, second) = several["clipped"]
    assert np.allclose(first, [0.0, 0.6], rtol=1e-3)
    assert np.allclose(second, [0.8], rtol=1e-3)


def test_pt_what_trains_later_is_clipped_too(evidence):
    thawed = evidence["pt"]["thawed"]
    assert np.linalg.norm(thawed["make_train_step"]) == pytest.approx(1e-3, rel=1e-4)
    assert np.allclose(thawed["make_per_variable_step"], 1e-3, rtol=1e-4)


def test_pt_the_norm_is_of_what_the_optimizer_holds(evidence):
    """The other layer's gradients are never put to zero, and would add up from step to step."""
    partly = evidence["pt"]["partly"]
    assert partly["norms"] == pytest.approx([partly["own"]] * 3, rel=1e-6)


def test_tf_keras_own_settings_mean_what_is_said(evidence):
    tf = evidence["tf"]
    for setting, case in (("global_clipnorm", "clip"), ("clipnorm", "per variable")):
        assert apart(gradients(tf, setting), gradients(tf, case)) < 1e-6


# Loss scaling ---------------------------------------------------------------------------------


def test_scaled_gradients_are_clipped_as_if_they_were_not_scaled(found):
    for case in ("clip", "off"):
        assert apart(arrays(found["scaled"][case]), gradients(found, case)) < 1e-6


def test_the_wrong_order_would_be_seen(found):
    """Clipped before they are unscaled, gradients are too small by the scale."""
    wrong = norm(arrays(found["scaled"]["wrong order"]))
    assert wrong == pytest.approx(MAX_NORM / SCALE, rel=1e-4)
    assert norm(arrays(found["scaled"]["clip"])) == pytest.approx(MAX_NORM, rel=1e-5)


# The guard ------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [*CULPRITS, "gradient clipped"])
def test_the_guard_stops_in_time_and_names_the_culprit(every, culprit):
    case = every["guard"][culprit]
    said = case["said"].replace("head/bias:0", "head.bias").replace("head/bias", "head.bias")
    assert said.startswith(f"FloatingPointError: step 3: {CULPRITS[culprit.split()[0]]}")
    assert "\n" not in said
    assert case["kept"]
    assert case["state"]
    assert case["goes on"] is None
    assert case["moved"]


def test_pt_the_guard_waits_for_the_device_once_a_step(evidence):
    assert evidence["pt"]["reads"] == {"clip": 0, "guard": 1, "per variable": 0}


def test_the_guard_names_what_it_is_in_a_model_of_two_inputs(found):
    foreign = found["foreign"]
    assert foreign["good"] is None
    assert foreign["good norm"] > 0
    # Only one of the two layers is behind the root.
    left = r"8 of 8 values of the gradient of (two(_\d+)?/)?left[./](weight|kernel) are not finite"
    assert re.search(left, foreign["gradient"])
    assert "step 1: 2 of 24 values of input x[1] are not finite" in foreign["input"]
    assert "step 1: 6 of 6 values of input y[0] are not finite" in foreign["target"]
    # It does not reach the loss: the input itself has been looked at.
    assert "step 1: 1 of 1000 values of input y[1] are not finite" in foreign["ignored"]
    assert foreign["ignored norm"] == pytest.approx(foreign["good norm"])


@pytest.mark.parametrize("framework", ["pt", "tf"])
def test_the_guard_looks_at_sparse_and_complex_inputs(evidence, framework):
    said = evidence[framework]["kinds_of_inputs"]
    assert said.pop("sound") is None
    for name, line in said.items():
        place = "x[1]" if name == "complex" else "x[0]"
        assert line.startswith("FloatingPointError: step 1: 1 of "), name
        assert f"values of input {place} are not finite" in line, name


def test_complex_gradients_have_a_norm_and_are_clipped(found):
    clipped = found["complex_gradients"]
    assert clipped["norm"] == pytest.approx(13.0)
    for name, norms in {"GradientClipper": (13.0, 13.0), "VariableClipper": (5.0, 12.0)}.items():
        of_complex, of_real = (np.array(gradient) for gradient in clipped[name])
        np.testing.assert_allclose(of_complex * norms[0], [[3.0, 4.0], [0.0, 0.0]], rtol=1e-5)
        np.testing.assert_allclose(of_real * norms[1], [12.0], rtol=1e-5)


def test_tf_a_dictionary_of_inputs(evidence):
    functional = evidence["tf"]["functional"]
    assert functional["good"] is None
    assert "step 2: 4 of 24 values of input x['b'] are not finite" in functional["bad"]


# Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("maker", ["make_train_step", "make_per_variable_step"])
def test_bad_input_gets_one_clear_line(found, maker):
    refusals = found["refusals"]
    for bad in ("0", "-1.0", "nan", "1", "None"):
        said = refusals[f"{maker} {bad}"]
        assert said.startswith("ValueError: max_norm must be above 0 (inf does not clip), not ")
        assert "\n" not in said
    assert refusals[f"{maker} frozen"].startswith("ValueError: the model has no trainable")
    assert refusals["unchanged"]


def test_tf_models_and_optimizers_that_are_refused(evidence):
    foreign = evidence["tf"]["foreign"]
    assert foreign["unbuilt"].startswith("ValueError: the model has no trainable variables")
    assert foreign["scaling"].startswith("ValueError: pass the optimizer itself")
    for maker in ("make_train_step", "make_per_variable_step"):
        assert foreign[f"factor {maker}"] == foreign["scaling"]
