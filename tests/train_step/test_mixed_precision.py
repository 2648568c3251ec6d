"""Mixed precision happens, keeps its master weights, and does so alike in both frameworks.

Each framework runs in a process of its own (`mixed_precision_worker.py`), tf_keras in a third.

Bounds come from bfloat16's unit roundoff u = 2^-8, the largest relative error of one rounding.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from shared.specs import TASKS, layers
from tests import workers

WORKERS = ("pt", "tf", "tf_keras")
CNN, GPT = TASKS["digits-cnn"].model, TASKS["text-gpt"].model
# As the worker has them: two convolutions.
MODELS = {"digits-cnn": replace(CNN, convolutions=CNN.convolutions[:2]), "text-gpt": GPT}
U = 2.0**-8


@pytest.fixture(scope="module")
def evidence():
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    return workers.run("train_step.mixed_precision_worker", WORKERS)


@pytest.fixture(params=["pt", "tf"])
def found(request, evidence):
    return evidence[request.param]


def roundings(task):
    """Roundings between input and loss: each layer's input, weight and output."""
    return 3 * len(layers(MODELS[task]))


# It happens -----------------------------------------------------------------------------------


def test_convolutions_and_products_run_in_the_dtype(found):
    ran = found["operators"]
    assert set(ran["float32"]["convolution"]) == set(ran["float32"]["matmul"]) == {"float32"}
    assert set(ran["bfloat16"]["convolution"]) == set(ran["bfloat16"]["matmul"]) == {"bfloat16"}
    assert ran["bfloat16"]["convolution"]["bfloat16"] == ran["float32"]["convolution"]["float32"]
    assert set(ran["gpt"]["matmul"]) == {"bfloat16"}


def test_keep_fp32_keeps_the_named_layers_alone(found):
    ran = found["operators"]
    assert set(ran["two"]["matmul"]) == {"float32"}
    assert set(ran["two"]["convolution"]) == {"float32", "bfloat16"}
    # The first convolution: forward, and once backward, since its input is data.
    assert ran["two"]["convolution"]["float32"] == 2
    assert ran["two"]["convolution"]["bfloat16"] == ran["bfloat16"]["convolution"]["bfloat16"] - 2


def test_master_weights_and_optimizer_state_stay_float32(found):
    assert found["master_weights"] == {"bfloat16": ["float32"], "float16": ["float32"]}


def test_gradients_are_rounded_but_right(found):
    """Forward and backward, each layer rounds its input, weight and output: so many u at worst.

    Below the head, ReLU's derivative jumps: BatchNorm gives it unit normal values, of which
    rounding moves a share of at most u to the other side of zero, and a share of wrong gates is
    the square of the gradient's relative error. Shares of the convolutions add up.
    """
    errors = found["gradients"]
    arithmetic = 2 * roundings("digits-cnn") * U
    gates = ((len(layers(MODELS["digits-cnn"])) - 1) * U) ** 0.5
    for name, error in errors["bfloat16"].items():
        bound = arithmetic if name.startswith("head") else arithmetic + gates
        assert U / 16 < error < bound, name
    # float16 has three bits more.
    assert errors["float16"]["head.kernel"] < errors["bfloat16"]["head.kernel"] / 4


def test_statistics_of_batchnorm_stay_float32(found):
    """bfloat16 holds numbers around 4 to 1/32, a third of this data's deviation."""
    assert found["statistics"] == pytest.approx({"mean": 0.0, "variance": 0.0}, abs=1e-4)


# Nothing else does ----------------------------------------------------------------------------


def test_float32_is_the_baseline_to_the_last_bit(found):
    losses = found["losses"]
    assert losses["digits-cnn"]["float32"] == losses["baseline"]
    assert losses["digits-cnn"]["bfloat16"] != losses["baseline"]


def test_making_steps_twice_stacks_nothing(found):
    reuse = found["reuse"]
    assert reuse["twice"] == reuse["once"] != reuse["baseline"]


def test_the_model_is_left_as_it_was(found):
    reuse = found["reuse"]
    assert reuse["afterwards"] == reuse["baseline"]


# Models that are not ours ---------------------------------------------------------------------


def test_a_custom_model_with_two_inputs_and_a_dict_as_output(found):
    foreign, half, full = found["foreign"], "bfloat16", "float32"
    prefix = "torch." if found.framework == "pt" else ""
    inside = "blocks" if found.framework == "pt" else "block"
    for keep in ("", "left", inside):
        case = foreign[keep]
        assert case["output"] == [prefix + full]
        assert case["predict"] == prefix + full
        assert case["last"] < case["first"]
    assert foreign[""]["left"] == foreign[""]["right"] == prefix + half
    assert foreign["left"]["left"] == prefix + full
    assert foreign["left"]["right"] == prefix + half


def test_pt_containers_and_foreign_wrappers(evidence):
    foreign = evidence["pt"]["foreign"]
    assert foreign[""]["block"] == "torch.bfloat16"
    assert foreign["blocks"]["block"] == "torch.float32"  # a ModuleList, which never runs itself
    # "left" has a wrapper of somebody else's, which is called by ours.
    assert {keep: case["wrapped"] for keep, case in foreign.items()} == {
        "": ["left"],
        "left": ["left"],
        "blocks": ["left", "blocks"],
    }
    assert all(case["own_forward"] for case in foreign.values())


def test_pt_checkpointed_layers_stay_in_float32(evidence):
    plain, checkpointed = evidence["pt"]["checkpointed"]
    assert plain == checkpointed


def test_tf_custom_layers_are_reached_and_put_back(evidence):
    found = evidence["tf"]
    foreign = found["foreign"]
    assert foreign["block"]["left"] == foreign["block"]["scale"] == "float32"
    assert foreign["left"]["scale"] == "bfloat16"
    assert all(foreign[keep]["policies"] == ["float32"] for keep in ("", "left", "block"))
    assert foreign["unbuilt"].startswith("ValueError: the model has no variables yet")
    assert found["mixed_already"] == {
        "output": "float64",
        "policies": ["float32", "mixed_float16", "float64"],
    }


def test_tf_switching_a_built_model_equals_the_global_policy(evidence):
    functional = evidence["tf"]["functional"]
    assert functional["technique"] == functional["policy"] != functional["float32"]
    assert functional["technique_predict"] == functional["policy_predict"]
    assert functional["technique_policies"] == ["float32"]
    assert functional["technique_traces"] == 1


@pytest.mark.parametrize("kind", ["Decorated", "Helped"])
def test_tf_a_call_that_is_a_graph_of_its_own_is_traced_anew(evidence, kind):
    moved, own, dtype = evidence["tf"]["decorated"][kind]
    assert moved == evidence["tf"]["decorated"]["Reader"][0] > 0
    assert (own, dtype) == ([], "float32")


def test_tf_layers_that_read_raw_data_read_all_of_it(evidence):
    """Of which Keras's own policy keeps 8 bits."""
    found = dict(evidence["tf"]["raw_data"])
    assert found.pop("Keras's own") > 0.2
    assert len(found) == 8
    for case, apart in found.items():
        assert 0 < apart < 0.02, case  # Dense itself is rounded
    assert evidence["tf"]["masking"] == [2.0, 3.0]


def test_tf_a_layer_that_writes_its_kernel_writes_all_of_it(evidence):
    assert evidence["tf"]["spectral"] < 1e-6


# Bad input ------------------------------------------------------------------------------------


def test_bad_settings_get_one_clear_line_and_change_nothing(found):
    refusals = dict(found["refusals"])
    assert refusals.pop("unchanged")
    assert re.search("unknown dtype .*: choose one of bfloat16, float16", refusals["dtype"])
    for name in ("layer", "layer_float32"):
        assert re.search("no layer 'haed'; it has .*conv0.*head", refusals[name])
    for message in refusals.values():
        assert message.startswith("ValueError: ")
        assert "\n" not in message


def test_a_model_without_master_weights_is_refused(found):
    refused = found["refused"]
    assert refused["half"].startswith("ValueError: master weights are float32, but ")
    if found.framework == "pt":
        assert refused["bilinear upstream"].startswith("RuntimeError")
        assert refused["bilinear"].startswith("NotImplementedError: a CPU's autocast does not cast")
        assert refused["bilinear"].endswith("keep_fp32='pair'")
        assert refused["bilinear kept"] == ["torch.float32", [3, 2]]
        assert "without AVX-512 has no nn.LSTM in half precision: keep_fp32='0'" in refused["lstm"]
        assert refused["lstm kept"] == "torch.float32"
        assert refused["device"].startswith("NotImplementedError: torch has no autocast")
        assert refused["float32"] is None


def test_tf_keras_refuses_and_keeps_the_model(evidence):
    refusal = evidence["tf_keras"]["tf_keras_refusal"]
    assert refusal["flavour"] == "tf_keras"
    for name in ("step", "float16", "predict"):
        assert refusal[name].startswith("NotImplementedError: tf_keras cannot switch a built model")
    assert "set_global_policy('mixed_float16')" in refusal["float16"]
    assert refusal["layer"].startswith("ValueError: keep_fp32: the model has no layer 'haed'")
    assert refusal["unchanged"]
    assert refusal["neutral"] == refusal["baseline"]


# The twins ------------------------------------------------------------------------------------


def difference(one, other):
    return max(abs(a / b - 1) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("task", ["digits-cnn", "text-gpt"])
def test_twins_agree_in_float32(evidence, task):
    pt, tf = (evidence[name]["losses"]["parity"][task] for name in ("pt", "tf"))
    assert difference(pt, tf) < TASKS[task].parity


@pytest.mark.parametrize(("task", "positions"), [("digits-cnn", 32), ("text-gpt", 8 * 64)])
def test_twins_agree_in_bfloat16(evidence, task, positions):
    """Ten losses, each a mean over `positions`, behind as many roundings on either side.

    One rounding is uniform in ±u: a standard deviation of u / sqrt(3). Both sides' roundings are
    independent at worst: sqrt(2 roundings) of them, and the mean divides by sqrt(positions). A
    learning rate that is a tenth off is outside.
    """
    pt, tf = (evidence[name]["losses"][task] for name in ("pt", "tf"))
    bound = U * (2 * roundings(task) / 3 / positions) ** 0.5
    assert difference(pt["bfloat16"], tf["bfloat16"]) < bound
    assert difference(pt["planted"], tf["bfloat16"]) > bound
    assert difference(tf["bfloat16"], tf["float32"]) > 0
