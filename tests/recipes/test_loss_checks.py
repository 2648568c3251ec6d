"""Losses that do not take what a model gives are named, and right ones are clean."""

from __future__ import annotations

import math

import pytest

from tests import workers


def test_classes_in_the_second_axis_are_found_by_their_labels(evidence):
    found = evidence["pt"]["loss_checks losses"]
    head = "a batch of 2, whose loss takes logits and whose model gives"
    assert found["pixels"] == f"{head} logits: nothing found"
    assert f"{head} probabilities: 1 found\nform: loss" in found["pixels with softmax"]
    assert found["soft pixels"] == found["pixels"]
    assert found["soft pixels with softmax"] == found["pixels with softmax"]


def test_outputs_in_bfloat16_are_judged(every):
    right, twice = every["loss_checks losses"]["bfloat16"]
    assert right.endswith("whose loss takes logits and whose model gives logits: nothing found")
    assert "form: loss: it takes logits, the model gives probabilities" in twice


def test_a_loss_over_probabilities_is_judged_whatever_axes_it_squeezes_away(evidence):
    for worker in ("pt", *workers.keras()):
        found = evidence[worker]["loss_checks losses"]["squeezed"]
        assert "takes probabilities and whose model gives probabilities: 1 found" in found
    for case in ("mask", "several in integers"):
        found = evidence["pt"]["loss_checks losses"][case]
        assert "takes probabilities and whose model gives probabilities: 1 found" in found


RIGHT = [  # (what the model gives, what the loss takes)
    ("softmax", "logits", "logits"),
    ("sigmoid", "logits", "logits"),
]


@pytest.mark.parametrize(("kind", "gives", "takes"), RIGHT)
def test_a_right_pair_is_clean(every, kind, gives, takes):
    found = every["loss_checks losses"][f"{kind} {gives} {takes}"]
    wanted = f"a batch of 32, whose loss takes {takes} and whose model gives {gives}: nothing found"
    assert found == wanted


@pytest.mark.parametrize(
    "pair", ["softmax log-probabilities log-probabilities", "softmax log-probabilities logits"]
)
def test_log_probabilities_are_clean_for_both_losses_that_take_them(evidence, pair):
    assert evidence["pt"]["loss_checks losses"][pair].endswith("nothing found")


@pytest.mark.parametrize(("kind", "least"), [("softmax", math.log(math.e + 3) - 1), ("sigmoid", 0)])
def test_probabilities_for_a_loss_over_logits_are_found(every, kind, least):
    found = every["loss_checks losses"][f"{kind} probabilities logits"]
    least = least or math.log1p(math.exp(-1))
    assert "form: loss: it takes logits, the model gives probabilities" in found
    assert f"cannot fall below {least:.3g}" in found


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_logits_for_a_loss_over_probabilities_are_found(every, kind):
    found = every["loss_checks losses"][f"{kind} logits probabilities"]
    line = "form: loss: it takes probabilities, the model gives logits: use a loss over logits"
    assert line in found


@pytest.mark.parametrize("gives", ["logits", "probabilities"])
def test_what_is_no_log_probability_is_found(evidence, gives):
    found = evidence["pt"]["loss_checks losses"][f"softmax {gives} log-probabilities"]
    assert f"it takes log-probabilities, the model gives {gives}" in found


PRECISION = {  # worker and kind -> the margin at which less than half is left, and how much is
    ("pt", "softmax"): (90, "not finite"),
    ("pt", "sigmoid"): (17, 0.0),
    ("tf", "softmax"): (17, 0.0),
    ("tf", "sigmoid"): (17, 0.0),
    ("tf_keras", "softmax"): (17, 0.0),
    # Adds 1e-7 within the logarithm, too: of 1.19e-7, and with labels smoothed by 0.05.
    ("tf_keras", "sigmoid"): (16, 0.95 * 1.19 / 2.19 - 0.05),
}


@pytest.mark.parametrize(
    ("worker", "kind"), [case for case in PRECISION if case[0] in ("pt", *workers.keras())]
)
def test_a_loss_over_probabilities_is_shown_to_lose_its_gradient(evidence, worker, kind):
    margin, left = PRECISION[worker, kind]
    found = evidence[worker]["loss_checks losses"][f"{kind} probabilities probabilities"]
    start, _, rest = found.partition(f"of a sample that is wrong by {margin} in logits is ")
    assert start.endswith("1 found\nprecision: loss: the gradient ")
    if left == "not finite":
        assert rest == "not finite: use a loss over logits"
    else:
        share = float(rest.removesuffix(" of what is right: use a loss over logits"))
        assert share == pytest.approx(left, abs=0.01)


@pytest.mark.parametrize("worker", workers.keras())
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_keras_finds_the_logits_behind_its_own_activation(evidence, worker, kind):
    found = evidence[worker]["loss_checks losses"]
    assert found[f"{kind} probabilities by Keras probabilities"].endswith("nothing found")
    assert "form: loss" in found[f"{kind} probabilities by Keras logits"]


def test_a_loss_that_is_no_cross_entropy_is_not_judged(every):
    found = every["loss_checks losses"]
    assert "takes neither logits nor probabilities: nothing found" in found["other loss"]
    assert found["strict"].startswith("ValueError: a batch of 32")
    assert found["left as it was"]


def test_models_of_other_makers_are_checked(evidence):
    for worker in ("pt", *workers.keras()):
        found = evidence[worker]["loss_checks losses"]
        assert "the model gives probabilities" in found["a dict of inputs and outputs"]
        assert "must be one tensor" in found["two outputs"]
    found = evidence["pt"]["loss_checks losses"]
    assert found["losses of outputs"] == 2 * [found["a dict of inputs and outputs"]]
    assert found["resnet18"].endswith("nothing found")
    assert "a softmax twice" in found["resnet18 with softmax"]
    for worker in workers.keras():
        found = evidence[worker]["loss_checks losses"]
        assert "a softmax twice" in found["keras.applications"]
        assert "it takes probabilities, the model gives logits" in found["a function of Keras"]


def test_a_loss_over_logits_keeps_its_gradient_at_every_margin(every):
    found = every["loss_checks margins"]
    for name in ("logits", "sigmoid, logits"):
        assert all(share == pytest.approx(1, rel=1e-3) for share in found[name].values())


@pytest.mark.parametrize(
    ("worker", "name", "kept", "lost"),
    [
        ("pt", "log of softmax", 80, 90),
        ("pt", "sigmoid", 15, 17),
        ("tf", "clipped softmax", 15, 17),
        ("tf", "sigmoid", 10, 17),
        pytest.param("tf_keras", "clipped softmax", 15, 17, marks=pytest.mark.campaign),
        pytest.param("tf_keras", "sigmoid", 10, 17, marks=pytest.mark.campaign),
    ],
)
def test_a_loss_over_probabilities_loses_it(evidence, worker, name, kept, lost):
    found = {int(k): v for k, v in evidence[worker]["loss_checks margins"][name].items()}
    assert all(share == pytest.approx(1, rel=0.02) for m, share in found.items() if m <= kept)
    assert all(not share > 0.01 for m, share in found.items() if m >= lost)


@pytest.mark.parametrize("worker", workers.keras())
def test_keras_finds_the_logits_behind_a_softmax_in_the_same_graph(evidence, worker):
    found = evidence[worker]["loss_checks margins"]["softmax"]
    assert all(share == pytest.approx(1, rel=1e-3) for share in found.values())


def test_pt_a_layer_that_merges_its_weights_to_predict_is_left_unmerged(evidence):
    assert not evidence["pt"]["loss_checks merging"]


BENCHMARKED = {  # planted by the benchmark -> what is said of it alone
    "loss over probabilities": "form: loss: it takes probabilities, the model gives logits",
    "gradient": "nan is left of that of a sample that is wrong by ",
}


def test_every_fault_that_the_benchmark_plants_is_found(every):
    found = every["loss_checks faults"]
    assert set(found) == set(BENCHMARKED)
    for fault, said in BENCHMARKED.items():
        assert found[fault].startswith(said), found[fault]
        assert ";" not in found[fault]
