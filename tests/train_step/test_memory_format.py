"""Images really are read in the format asked for, with the same results, and bad input is refused.

Each framework runs in a process of its own (`memory_format_worker.py`), tf_keras in a third.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.specs import TASKS, layers
from tests import workers

SIDES = ("pt", *workers.keras())
KERAS = workers.keras()
CNN, RESNET = "digits-cnn", "digits-resnet20"
# As the worker has them: a ResNet of one block a stage.
MODELS = {CNN: TASKS[CNN].model, RESNET: replace(TASKS[RESNET].model, blocks_per_stage=1)}
DEFAULT = {"pt": "channels_first", "tf": "channels_last", "tf_keras": "channels_last"}


@pytest.fixture(scope="module")
def evidence():
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    return workers.run("train_step.memory_format_worker", SIDES)


def difference(one, other):
    return max(abs(a / b - 1) for a, b in zip(one, other, strict=True))


# Both frameworks ------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
def test_the_default_format_is_the_baseline_to_the_last_bit(evidence, side):
    losses = evidence[side]["losses"]
    assert losses["default"] == losses["baseline"]
    assert losses["baseline"][-1] != losses["baseline"][0]


@pytest.mark.parametrize("side", SIDES)
def test_channels_last_trains_alike_in_all(evidence, side):
    losses = evidence[side]["losses"]["channels_last"]
    for other in SIDES:
        for name in ("baseline", "channels_last"):
            assert difference(losses, evidence[other]["losses"][name]) < TASKS[CNN].parity


@pytest.mark.parametrize("side", SIDES)
def test_convolutions_run_in_the_format(evidence, side):
    found = evidence[side]["formats"]
    for given, wanted in (
        (f"{CNN} None", DEFAULT[side]),
        (f"{CNN} {DEFAULT[side]}", DEFAULT[side]),
        (f"{CNN} channels_last", "channels_last"),
        (f"{RESNET} channels_last", "channels_last"),
    ):
        training, predicting = found[given]
        assert set(training) == set(predicting) == {wanted}, given
        assert training[wanted] >= predicting[wanted]


def test_every_convolution_is_seen(evidence):
    """PyTorch: what each reads and writes, but for the one channel of the first one's input."""
    for task in (CNN, RESNET):
        number = len(layers(MODELS[task])) - 1
        training, predicting = evidence["pt"]["formats"][f"{task} channels_last"]
        assert training == predicting == {"channels_last": 2 * number - 1}
        # TensorFlow: forward, and backward twice, but for the first one's input.
        for side in KERAS:
            training, predicting = evidence[side]["formats"][f"{task} channels_last"]
            assert predicting == {"channels_last": number}
            assert training == {"channels_last": 3 * number - 1}


@pytest.mark.parametrize("side", SIDES)
def test_bad_settings_get_one_clear_line_and_change_nothing(evidence, side):
    found = evidence[side]["unknown"]
    for name in ("apply", "convert"):
        assert found[name].startswith("ValueError: unknown memory format ")
        assert found[name].endswith(("channels_last, channels_first", "channels_first"))
    assert found["flat"].startswith("ValueError: the model has no ")
    assert found["kept"]


# PyTorch --------------------------------------------------------------------------------------


def test_pt_an_optimizer_from_before_goes_on(evidence):
    found = evidence["pt"]["optimizer_from_before"]
    assert found["same"]
    assert found["state"]
    expected = evidence["pt"]["losses"]["channels_last"][:3]
    assert difference(found["losses"], expected) < TASKS[CNN].parity


def test_pt_a_batch_of_one_channel_gets_the_strides(evidence):
    found = evidence["pt"]["batch"]
    assert found["last"] == [30, 1, 5, 1]
    assert found["equal"]
    assert not found["copied"]
    assert found["back"] == [[30, 30, 5, 1], [30, 30, 5, 1]]
    assert found["codes"]


def test_pt_a_custom_model_computes_the_same(evidence):
    found = evidence["pt"]["foreign"]
    assert found["difference"] < 1e-5
    assert found["formats"] == {"channels_last": 6}
    assert found["names"]
    assert found["hooks"] == 0


def test_pt_the_evidence_sees_an_operator_that_breaks_the_format(evidence):
    found = evidence["pt"]["weights_alone"]
    assert found["channels_first"] == 1
    assert found["channels_last"] == 3


def test_pt_three_dimensions_are_refused(evidence):
    found = evidence["pt"]["three_dimensional"]
    assert found["said"].startswith("NotImplementedError: torch has no channels_last for 5-D")
    assert found["kept"]


# TensorFlow -----------------------------------------------------------------------------------


@pytest.mark.parametrize("side", KERAS)
def test_tf_an_ordinary_model_is_returned_as_it_is(evidence, side):
    assert evidence[side]["same_model"] is True


@pytest.mark.parametrize("side", KERAS)
def test_tf_channels_first_works_or_is_refused_in_the_words_of_tensorflow(evidence, side):
    found = evidence[side]["channels_first"]
    if found["said"] is None:  # a GPU, or a CPU on which TensorFlow uses oneDNN
        assert found["apart"] < 1e-5
    else:
        assert not found["gpu"]
        assert found["said"].startswith(
            "NotImplementedError: no training in channels_first here: The Conv2D op"
        )
        assert "NHWC" in found["said"]
        assert "\n" not in found["said"]


@pytest.mark.parametrize("start", ["channels_last", "channels_first"])
@pytest.mark.parametrize("side", KERAS)
def test_tf_a_rebuilt_model_computes_the_same(evidence, side, start):
    """Losses, gradients and running statistics, of images and codes, in both directions."""
    found = evidence[side]["rebuilt"][start]
    one, other = found["loss"]
    assert one == pytest.approx(other, rel=1e-6)
    assert found["difference"] < 1e-5
    assert found["arrays"] == 12
    assert found["names"]
    assert found["kept"] == [start]
    assert found["formats"] == [({"channels_last", "channels_first"} - {start}).pop()]
    assert found["own"]


@pytest.mark.parametrize("side", KERAS)
def test_tf_foreign_models_compute_the_same(evidence, side):
    found = dict(evidence[side]["foreign"])
    if side == "tf_keras":
        assert "TFOpLambda" in found.pop("by operators")
    for name in found.keys() - {"lost", "no images", "no images, other"}:
        assert found[name] < 1e-5, name
    for name in ("no images", "no images, other"):
        assert found[name].startswith("ValueError: the model has no 2-D layer")


@pytest.mark.parametrize("side", KERAS)
def test_tf_a_copy_that_computes_something_else_is_refused(evidence, side):
    said = evidence[side]["foreign"]["lost"]
    assert said.startswith("NotImplementedError: the copy's output differs by a relative ")


@pytest.mark.parametrize("side", KERAS)
def test_tf_a_sequential_model_is_rebuilt(evidence, side):
    assert evidence[side]["sequential"] == {
        "input": [None, 2, 6, 8],
        "output": [None, 2],
    }


@pytest.mark.parametrize("side", KERAS)
def test_tf_what_cannot_be_rebuilt_is_refused(evidence, side):
    found = dict(evidence[side]["refusals"])
    assert found.pop("both").startswith("ValueError: the model has layers of both formats")
    assert "functional and Sequential models only" in found["subclassed"]
    assert "'strange' works on axis 2, not on channels" in found.pop("axis")
    assert "'strange' works on axis " in found["axes"]
    for name in ("norm", "rescaling", "softmax", "reshape", "dense"):
        assert "'strange' may depend on the order of the axes" in found[name], name
    assert "may depend on the order of the axes" in found["nested"]
    assert all(message.startswith("NotImplementedError: ") for message in found.values())
