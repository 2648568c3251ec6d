"""Every implementation of AdamW applies the same update, by other operators.

Each framework runs in a process of its own (`optimizer_implementations_worker.py`), tf_keras in a
third. Weights are compared by relative L2 per tensor, as optimizer rules are, at 1e-6.
"""

from __future__ import annotations

import numpy as np
import pytest

from bench.harness.machine import compiler
from bench.train_step.bench_optimizer_implementations import MARKS
from shared.specs import parameter_shapes
from shared.weights import init_weights
from tests import workers
from tests.kit.parity import check
from tests.train_step.optimizer_implementations_worker import (
    LARGE_EPS,
    SETTINGS,
    SPEC,
    given_gradients,
)

SIDES = ("pt", *workers.keras())
BAR = 1e-6
HAVE = [("pt", name) for name in ("for_loop", "foreach", "fused", "compiled")] + [
    (side, name) for side in workers.keras() for name in ("for_loop", "fused", "compiled")
]
needs_compiler = pytest.mark.skipif(not compiler(), reason="torch.compile needs a C++ compiler")
HAVE_MARKED = [
    pytest.param(*one, marks=needs_compiler if one == ("pt", "compiled") else ()) for one in HAVE
]


@pytest.fixture(scope="module")
def evidence():
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    lacking = [] if compiler() else ["no-compiler"]
    return workers.run("train_step.optimizer_implementations_worker", SIDES, lambda name: lacking)


def arrays(weights):
    return {name: np.array(values) for name, values in weights.items()}


def rule(steps, *, learning_rate, weight_decay=0.01, beta1=0.9, beta2=0.999, eps=1e-8):
    """AdamW as published, in float64."""
    initial = init_weights(SPEC, seed=1)
    found = {}
    for name in parameter_shapes(SPEC):
        w = initial[name].astype(np.float64)
        first, second = np.zeros_like(w), np.zeros_like(w)
        for step, gradients in enumerate(given_gradients()[:steps], 1):
            g = gradients[name].astype(np.float64)
            first = beta1 * first + (1 - beta1) * g
            second = beta2 * second + (1 - beta2) * g**2
            root = np.sqrt(second / (1 - beta2**step)) + eps
            w = w * (1 - learning_rate * weight_decay)
            w = w - learning_rate * first / (1 - beta1**step) / root
        found[name] = w
    return found


@pytest.mark.parametrize(("side", "name"), HAVE_MARKED)
def test_the_update_is_the_published_one(evidence, side, name):
    after = arrays(evidence[side]["updates"][name]["weights"])
    check(after, rule(len(given_gradients()), **SETTINGS), BAR)


@pytest.mark.parametrize("side", SIDES)
def test_another_decay_is_noticed(evidence, side):
    planted = arrays(evidence[side]["updates"]["planted"]["weights"])
    with pytest.raises(AssertionError, match="differ by more than"):
        check(planted, rule(len(given_gradients()), **SETTINGS), BAR)


@pytest.mark.parametrize("side", SIDES)
def test_epsilon_is_the_same_in_the_first_update(evidence, side):
    """Where it decides: an epsilon as large as the gradients."""
    after = arrays(evidence[side]["large_eps"])
    check(after, rule(1, **LARGE_EPS), BAR)
    with pytest.raises(AssertionError, match="differ by more than"):
        check(after, rule(1, **LARGE_EPS | {"eps": 0.9}), BAR)


@pytest.mark.parametrize(("side", "name"), HAVE_MARKED)
def test_it_ran_as_that_implementation(evidence, side, name):
    ran = evidence[side]["updates"][name]["operators"]
    wanted, others = MARKS[f"{side[:2]}_impl", name]
    assert ran[wanted] > 0
    assert not set(others) & set(ran)


def test_a_loop_takes_operators_per_tensor_and_fused_one_for_all(evidence):
    found = evidence["pt"]["updates"]
    tensors = len(parameter_shapes(SPEC))
    assert found["for_loop"]["operators"]["addcdiv_"] == tensors
    assert found["foreach"]["operators"]["_foreach_addcdiv_"] == 1
    assert found["fused"]["operators"]["_fused_adamw_"] == 1
    assert (
        evidence["tf"]["updates"]["fused"]["operators"]["AssignSubVariableOp"] == tensors
    )  # decay
    # TensorFlow assigns each weight twice: its decay, then its update.
    loop = evidence["tf"]["updates"]["for_loop"]["operators"]
    assert loop["AssignSubVariableOp"] == 2 * tensors


@pytest.mark.parametrize(
    ("side", "name"), [case for case in HAVE_MARKED if case.values[1] == "compiled"]
)
def test_the_compiled_update_is_traced_once_and_for_all(evidence, side, name):
    found = evidence[side]["updates"][name]
    assert found["traces"] >= 1
    assert found["retraced"] == 0


@pytest.mark.parametrize("side", workers.keras())
def test_tf_fused_is_one_kernel_a_tensor_and_trains_in_fit(evidence, side):
    """An optimizer that `fit` takes, with slices, clipping and a schedule: as Keras's own."""
    ran = evidence[side]["updates"]["fused"]["operators"]
    assert ran["ResourceApplyAdam"] == len(parameter_shapes(SPEC))
    found = evidence[side]["fit"]
    assert found["moved"] > 0.05
    assert found["apart"] < BAR
    assert found["refused"].startswith("NotImplementedError: ResourceApplyAdam has no amsgrad")


@pytest.mark.parametrize("side", SIDES)
def test_of_ids_that_repeat_only_keras_3_squares_the_slices_apart(evidence, side):
    """Slices of 1 and 2: (1 + 2) / sqrt(1 + 4) there, and 3 / 3 by the rule."""
    for name, moved in evidence[side]["repeated_ids"].items():
        apart = side == "tf" and name != "fused"
        row = -3 / 5**0.5 if apart else -1.0
        assert moved == pytest.approx([row, -1.0, 0.0], rel=1e-4), name


def test_fused_refuses_what_its_kernel_refuses(evidence):
    found = evidence["pt"]["fused_limits"]
    assert found["for_loop_optimizer"] is None
    for name in ("fused_optimizer", "fused_sgd"):
        assert found[name].startswith("NotImplementedError: torch's fused kernels update no")


def test_pt_fused_sgd_is_sgd_in_one_kernel(evidence):
    found = evidence["pt"]["fused_sgd"]
    plain, fused = map(arrays, found["weights"])
    check(fused, plain, BAR)
    assert found["operators"]["_fused_sgd_"] == 1


@pytest.mark.parametrize("side", workers.keras())
def test_tf_the_compiled_optimizer_trains_in_fit(evidence, side):
    own, compiled = evidence[side]["fit_compiled"]
    assert compiled == pytest.approx(own, rel=1e-5)
    assert compiled[-1] < 0.9 * compiled[0]


@pytest.mark.parametrize("side", workers.keras())
def test_tf_the_compiled_optimizer_updates_the_variables_that_it_is_given(evidence, side):
    found = evidence[side]["some_variables"]
    own, compiled = map(arrays, found["weights"])
    check(compiled, own, BAR)
    assert found["other"].startswith("ValueError: the optimizer was made for other variables")


@pytest.mark.parametrize("side", SIDES)
def test_bad_input_gets_one_clear_line_and_changes_nothing(evidence, side):
    found = evidence[side]["refusals"]
    said = {
        "rate": "must be at least 0",
        "beta": "in [0, 1)",
        "momentum": "momentum in [0, 1)",
    }
    for case, message in found["errors"].items():
        assert message.startswith("ValueError: "), (case, message)
        assert said[case.split()[1]] in message
        assert "\n" not in message
    assert found["untouched"]
