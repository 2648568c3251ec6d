"""Clipping does what NumPy does, and both sides do it alike.

Each framework runs in a process of its own (`gradient_clipping_worker.py`), tf_keras in a third.
The optimizer of most tests puts the gradient in the weight's place, so that gradients are compared.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests import workers

WORKERS = ("pt", *workers.keras())
PARITY = {"gpt": 1e-4, "cnn": 1e-5}
MAX_NORM = 2.0
SCALE = 2.0**12


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


def test_the_global_norm_is_clipped_as_numpy_does(every):
    plain, ours = gradients(every, "plain"), gradients(every, "clip")
    assert norm(plain) > 2 * MAX_NORM  # or there is nothing to see
    expected = {name: value * MAX_NORM / norm(plain) for name, value in plain.items()}
    assert apart(ours, expected) < 1e-5
    assert norm(ours) == pytest.approx(MAX_NORM, rel=1e-5)
    assert every["applied"]["clip"]["norm"] == pytest.approx(norm(plain), rel=1e-5)


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


def test_complex_gradients_have_a_norm_and_are_clipped(found):
    clipped = found["complex_gradients"]
    assert clipped["norm"] == pytest.approx(13.0)
    for name, norms in {"GradientClipper": (13.0, 13.0), "VariableClipper": (5.0, 12.0)}.items():
        of_complex, of_real = (np.array(gradient) for gradient in clipped[name])
        np.testing.assert_allclose(of_complex * norms[0], [[3.0, 4.0], [0.0, 0.0]], rtol=1e-5)
        np.testing.assert_allclose(of_real * norms[1], [12.0], rtol=1e-5)


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
    refused = evidence["tf"]["refused"]
    for maker in ("make_train_step", "make_per_variable_step"):
        said = refused[f"unbuilt {maker}"]
        assert said.startswith("ValueError: the model has no trainable variables")
        for kind in ("scaling", "factor"):
            assert refused[f"{kind} {maker}"].startswith("ValueError: pass the optimizer itself")


def test_pt_a_step_does_not_wait_for_the_device(evidence):
    assert evidence["pt"]["reads"] == {"clip": 0, "per variable": 0}
