"""The TensorFlow kit does what it says, in both Keras flavours, each in a process of its own."""

from pathlib import Path

import numpy as np
import pytest

from shared.specs import TASKS, parameter_shapes
from tests import workers

FLAVOURS = ("keras3", "tf_keras")
THREADS = 2


@pytest.fixture(scope="module")
def answers():
    """Flavour -> check -> what it returned; both flavours run at once."""
    return workers.run("kit.tf_kit_worker", FLAVOURS)


@pytest.fixture(params=FLAVOURS)
def answer(request, answers):
    """What the checks of one flavour returned."""
    return answers[request.param]


@pytest.fixture
def keras3(answers):
    """What the checks returned that know no flavour."""
    return answers["keras3"]


def test_the_flavours_are_the_chosen_ones(answers):
    for flavour, package in (("keras3", "keras"), ("tf_keras", "tf_keras")):
        versions = answers[flavour]["device"]["versions"]
        assert {"keras", "tf_keras"} & versions.keys() == {package}
        assert versions["tensorflow"]


def test_configure(answer):
    found = answer["configure"]
    assert found["read_back"] == found["again"] == {"intra_op": THREADS, "inter_op": THREADS}
    assert found["drawn"] == found["drawn_again"]
    assert found["other"].startswith("RuntimeError: ")
    assert "\n" not in found["other"]


def test_weights_round_trip_bitwise(keras3):
    kinds = {type(TASKS[task].model) for task in keras3["round_trip"]}
    assert kinds == {type(task.model) for task in TASKS.values()}
    for task, found in keras3["round_trip"].items():
        assert found["same"], task
        assert found["a copy"], task
        assert found["parameters"] == sorted(parameter_shapes(TASKS[task].model)), task


def test_weights_that_do_not_fit(answer):
    found = answer["refused_weights"]
    start = "ValueError: the weights do not fit the model: "
    assert found["missing"] == f"{start}missing conv0.kernel"
    assert found["unknown"] == f"{start}unknown x"
    assert found["shape"] == f"{start}head.kernel has shape (10, 16), not (16, 10)"
    assert found["unchanged"]


@pytest.mark.parametrize("metric", ["accuracy", "bits_per_character", "masked"])
def test_evaluate_against_numpy(keras3, metric):
    found = keras3["evaluate"][metric]
    assert found["score"] == pytest.approx(found["expected"], rel=1e-6)
    assert found["loss"] == pytest.approx(found["expected_loss"], rel=1e-6)
    # Logits of a narrower dtype are cast up: only their own rounding shows.
    assert found["half"] == pytest.approx(found["expected_loss"], rel=1e-3)
    assert found["half"] != found["loss"]


def test_evaluate_refuses_another_metric(keras3):
    expected = "ValueError: unknown metric 'f1': accuracy or bits_per_character"
    assert keras3["evaluate"]["unknown"] == expected


def test_predict(answer):
    found = answer["predict"]
    assert all(found["unchanged"])
    assert found["same_losses"]
    assert found["follows"]
    assert found["alone"] < 1e-5


def test_step(answer):
    found = answer["step"]
    assert found["loss"] == ["EagerTensor", "float32", 0]
    assert found["traced"] == [0, 1, 2]  # nothing yet, one shape, another shape
    assert found["wrapped"] == 2
    assert found["eager"] is None


@pytest.mark.parametrize(
    "name",
    ["baseline", "compression", "features", "stored", "teacher"],
)
def test_steps_add_the_losses_of_the_model_itself(keras3, name):
    """A quarter of the squares of its kernel, whose gradient is half the kernel."""
    found = keras3["own_losses"]
    kernel = np.array(found["kernel"])
    plain, without = found[name].get("plain", found["baseline"]["plain"])
    loss, after = found[name]["regularised"]
    assert loss - plain == pytest.approx(0.25 * np.square(kernel).sum(), rel=1e-5)
    assert np.allclose(np.array(after) - without, -0.1 * 0.5 * kernel, atol=1e-6)


def test_state_bytes(answer):
    found = answer["step"]
    size = 4 * found["parameters"]
    assert found["state"]["parameters"] == found["state"]["gradients"] == size
    # One momentum a parameter, and the counters that Keras keeps.
    assert size < found["state"]["optimizer"] <= size + 16


def test_fit(keras3):
    found = keras3["fit"]
    assert found["batches"] == 4
    assert found["last"] == found["expected"]
    assert found["short"] == "ValueError: no batch of 21 in 1 epochs of 20 samples"


def test_optimizers_have_their_state_from_the_start(answer):
    found, size = answer["optimizers"], answer["step"]["parameters"]
    assert found["unknown"] == "ValueError: unknown optimizer 'lion': sgd, adamw or rmsprop"
    for name, slots in (("sgd", 1), ("adamw", 2), ("rmsprop", 1)):
        assert slots * size < found[name] <= slots * size + 2


def test_gradient_of_the_embedding(keras3):
    assert keras3["gradients"]["dense"]
    assert keras3["gradients"]["off"] < 1e-6


def test_dropout_in_training_alone(keras3):
    found = keras3["dropout"]
    assert found["evaluation"] == 0.0
    assert found["training"] > 0.0
    assert 0.3 < found["share_of_first_positions_dropped"] < 0.7
    assert found["config"] == 0.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_operator_dtypes(keras3, dtype):
    found = keras3["operator_dtypes"]
    policy = "float32" if dtype == "float32" else "mixed_bfloat16"
    # Forward and both gradients of each, but for the gradient of the images.
    assert found[f"cnn {policy}"] == {"convolution": {dtype: 5}, "matmul": {dtype: 3}}
    # qkv, projection, up, down and head, and two products in the attention.
    assert found[f"gpt {policy}"] == {"matmul": {dtype: 21}}
    assert found[f"predict {policy}"] == {"matmul": {dtype: 7}}


def test_operator_dtypes_of_xla(keras3):
    ran = {"convolution": {"float32": 5}, "matmul": {"float32": 3}}
    assert keras3["operator_dtypes"]["xla float32"] == ran
    # What XLA makes of bfloat16 depends on the CPU; the number of operators does not.
    found = keras3["operator_dtypes"]["xla mixed_bfloat16"]
    assert {kind: sum(dtypes.values()) for kind, dtypes in found.items()} == {
        "convolution": 5,
        "matmul": 3,
    }


@pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists() or "avx512_bf16" not in Path("/proc/cpuinfo").read_text(),
    reason="grappler rewrites into bfloat16 only for CPUs that have it",
)
def test_operator_dtypes_sees_what_grappler_rewrote(keras3):
    ran = {"convolution": {"bfloat16": 5}, "matmul": {"bfloat16": 3}}
    assert keras3["operator_dtypes"]["rewritten"] == ran


COPIED = {"same": True, "constant": False, "shared": 0, "kept": True, "trainable": True}


def test_keras_3_a_model_of_sound_is_copied(answers):
    assert answers["keras3"]["copies"]["sound"] == COPIED


def test_a_copy_has_all_state_and_shares_none(answer):
    found = answer["copies"]
    for name in (
        "normalization",
        "vocabulary",
        "buckets",
        "dicts",
        "nested",
        "recurrent",
        "silenced",
        "late",
        "task",
        "tied",
        "attending",
        "subclassed",
    ):
        assert found[name] == COPIED, name


def test_a_file_s_optimizer_leaves_out_of_its_decay_what_it_was_told(answer):
    """Keras does not keep that in an optimizer's configuration."""
    found = answer["undecayed"]
    for way in ("by name", "by variable"):
        assert found[way] == pytest.approx([0.95, 1.0]), way
    assert found["of another"].startswith("NotImplementedError: exclude_from_weight_decay: ")


def test_a_file_s_optimizer_keeps_a_schedule_without_a_configuration(answer):
    assert answer["scheduled"] == {"weight": 0.25, "kept": True}


def test_a_copy_has_what_clone_model_loses(answers):
    """Keras 3: what `Normalization` adapted, and the seeds of dropout."""
    assert answers["keras3"]["copies"]["bare"] > 0.1
    assert answers["keras3"]["copies"]["masks"]


def test_a_copy_of_what_draws_in_evaluation_draws_the_same(answers):
    assert answers["keras3"]["copies"]["draws"] == {"seed kept": True, "same": True}


def test_inputs_by_name_have_the_dtypes_of_the_inputs_of_these_names(answer):
    right, wrong = answer["copies"]["by name"]
    assert right is None
    assert "it takes int32, float32" in wrong


def test_what_cannot_be_copied_is_refused(answer):
    found = answer["copies"]["refused"]
    assert found["unbuilt"].startswith("ValueError: the model has no variables yet")
    assert found["no example"].endswith("pass an example input x")
    assert found["wrong example"].startswith("ValueError: the model does not take the example")
    assert found["forgets"].startswith("NotImplementedError: Keras cannot rebuild the model: ")
    assert found["moves"].startswith("NotImplementedError: Keras rebuilds another model than this")
    assert not any("\n" in said for said in found.values())


def test_device(answer):
    found = answer["device"]
    assert found["info"]["name"]
    assert found["flops"] > 1e8
    assert found["half_flops"] > 1e8
    if found["device"] == "CPU:0":
        assert found["peak"] is None
        # A call returns when its work is done, so there is nothing to synchronise.
        assert found["waited_s"] < 0.5 * found["called_s"]
    else:
        assert found["peak"]["allocated"] > 0
