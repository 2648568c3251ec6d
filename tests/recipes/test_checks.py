"""Each planted fault is found and named, and a clean dataset, model and loss are clean."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests import workers

CLEAN = "8 batches, 64 samples: nothing found"
LEAST = np.random.default_rng(1).uniform(0, 1, (64, 8, 8, 1)).astype(np.float32)[8:16].min()
FAULTS = {  # planted in a clean dataset -> the one line that is found
    "nan": "nan: x: 3 values in 2 samples, first in batch 2, sample 3",
    "infinity": "infinity: x: 1 value in 1 sample, first in batch 7, sample 7",
    "range": (
        "range: x: 1 value in 1 sample, first in batch 1, sample 1: "
        f"from {LEAST:.4g} to 255, not within 0 to 1"
    ),
    "label": "label: y: 1 value in 1 sample, first in batch 0, sample 5: 4, not 0 to 3",
    "negative label": (
        "label: y: 1 value in 1 sample, first in batch 0, sample 5: -1, not 0 or more"
    ),
    "absent class": "balance: y: no sample of class 3",
    "imbalance": "balance: y: class 0 has 31 samples, class 3 2",
    "one-hot label": (
        "label: y: 64 values in 64 samples, first in batch 0, sample 0: "
        "they are not distributions over the classes"
    ),
    "nan label": "nan: y: 16 values in 16 samples, first in batch 0, sample 1",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_what_is_found(every, fault):
    found = every["checks planted"][fault].splitlines()
    assert found == ["8 batches, 64 samples: 1 found", FAULTS[fault]]


@pytest.mark.parametrize(
    "case",
    [
        *("clean", "ignored label", "ignored label of its own", "imbalance allowed"),
        *("one-hot", "dense labels"),
    ],
)
def test_clean_data_are_clean(every, case):
    assert every["checks planted"][case] == CLEAN


def test_bytes_are_beyond_the_range_of_floats(every):
    assert "not within 0 to 1" in every["checks planted"]["range of bytes"]


def test_the_strict_mode_raises_the_report(every):
    found = every["checks planted"]["strict"]
    assert found.startswith("ValueError: 8 batches, 64 samples: 1 found\nnan: x: 1 value")


def test_data_may_have_any_structure(every):
    found = every["checks structures"]
    line = "1 value in 1 sample, first in batch 0, sample 3"
    assert found["nested"] == f"1 batch, 64 samples: 1 found\nnan: x['image'][1]: {line}"
    for case in ("inputs alone", "arrays", "half"):
        assert found[case] == f"1 batch, 64 samples: 1 found\nnan: x: {line}"
    assert found["no batch"] == "ValueError: there is no batch to check"
    assert "different lengths: {'x': 64, 'y': 3}" in found["parts apart"]
    assert found["no labels"].startswith("ValueError: num_classes is given, but a batch has no")


DATASETS = {
    "pt": {"dataset of samples": 1, "loader": 4, "stream": 8},
    "tf": {"tf.data": 4, "a Sequence with weights": 4},
    "tf_keras": {"tf.data": 4, "a Sequence with weights": 4},
}


@pytest.mark.parametrize("worker", ["pt", *workers.keras()])
def test_data_may_come_as_the_framework_has_them(evidence, worker):
    found = evidence[worker]["checks structures"]
    for name, batches in DATASETS[worker].items():
        head, line = found[name].splitlines()
        assert head == f"{batches} batch{'es' * (batches > 1)}, 64 samples: 1 found"
        assert line == "nan: x: 1 value in 1 sample, first in batch 0, sample 3"


def test_numbers_of_any_kind_are_read_as_they_are(every):
    found = every["checks numbers"]
    for case in ("bytes", "shorts", "list", "beside"):
        assert found[case] == "1 batch, 400 samples: nothing found"
    assert found["tensors"] == "1 batch, 8 samples: nothing found"
    assert "1 found\nnan: x['scale']: 1 value" in found["nan beside"]
    assert "1 found\nbalance: y: no sample of class 200, 201" in found["more classes"]
    assert "range: x: 1 value in 1 sample" in found["bytes in range"]
    assert "400 samples of the second" in found["splits"]


def test_classes_in_the_second_axis_are_found_by_their_labels(evidence):
    found = evidence["pt"]["checks losses"]
    head = "a batch of 2, whose loss takes logits and whose model gives"
    assert found["pixels"] == f"{head} logits: nothing found"
    assert f"{head} probabilities: 1 found\nform: loss" in found["pixels with softmax"]
    assert found["soft pixels"] == found["pixels"]
    assert found["soft pixels with softmax"] == found["pixels with softmax"]


def test_outputs_in_bfloat16_are_judged(every):
    right, twice = every["checks losses"]["bfloat16"]
    assert right.endswith("whose loss takes logits and whose model gives logits: nothing found")
    assert "form: loss: it takes logits, the model gives probabilities" in twice


def test_a_loss_over_probabilities_is_judged_whatever_axes_it_squeezes_away(evidence):
    for worker in ("pt", *workers.keras()):
        found = evidence[worker]["checks losses"]["squeezed"]
        assert "takes probabilities and whose model gives probabilities: 1 found" in found
    for case in ("mask", "several in integers"):
        found = evidence["pt"]["checks losses"][case]
        assert "takes probabilities and whose model gives probabilities: 1 found" in found


def test_samples_in_both_splits_are_found(every):
    found = every["checks splits"]
    clean = "24 samples beside 64 different ones"
    assert found["clean"] == found["near"] == f"{clean}: nothing found"
    line = "duplicate: x: 2 samples of the second also in the first: 3 is its 60, 11 is its 2"
    assert found["two"] == f"{clean}: 1 found\n{line}"
    assert found["strict"] == f"ValueError: {found['two']}"
    assert "64 samples of the second" in found["itself"]
    assert found["no sample"].startswith("64 samples beside 64 different ones: 1 found")
    assert "0 is its 0, 1 is its 1, 2 is its 2, ..." in found["itself"]
    assert "nothing found" in found["one of two inputs"]
    assert "1 sample of the second also in the first: 1 is its 1" in found["texts"]


RIGHT = [  # (what the model gives, what the loss takes)
    ("softmax", "logits", "logits"),
    ("sigmoid", "logits", "logits"),
]


@pytest.mark.parametrize(("kind", "gives", "takes"), RIGHT)
def test_a_right_pair_is_clean(every, kind, gives, takes):
    found = every["checks losses"][f"{kind} {gives} {takes}"]
    wanted = f"a batch of 32, whose loss takes {takes} and whose model gives {gives}: nothing found"
    assert found == wanted


@pytest.mark.parametrize(
    "pair", ["softmax log-probabilities log-probabilities", "softmax log-probabilities logits"]
)
def test_log_probabilities_are_clean_for_both_losses_that_take_them(evidence, pair):
    assert evidence["pt"]["checks losses"][pair].endswith("nothing found")


@pytest.mark.parametrize(("kind", "least"), [("softmax", math.log(math.e + 3) - 1), ("sigmoid", 0)])
def test_probabilities_for_a_loss_over_logits_are_found(every, kind, least):
    found = every["checks losses"][f"{kind} probabilities logits"]
    least = least or math.log1p(math.exp(-1))
    assert "form: loss: it takes logits, the model gives probabilities" in found
    assert f"cannot fall below {least:.3g}" in found


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_logits_for_a_loss_over_probabilities_are_found(every, kind):
    found = every["checks losses"][f"{kind} logits probabilities"]
    line = "form: loss: it takes probabilities, the model gives logits: use a loss over logits"
    assert line in found


@pytest.mark.parametrize("gives", ["logits", "probabilities"])
def test_what_is_no_log_probability_is_found(evidence, gives):
    found = evidence["pt"]["checks losses"][f"softmax {gives} log-probabilities"]
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
    found = evidence[worker]["checks losses"][f"{kind} probabilities probabilities"]
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
    found = evidence[worker]["checks losses"]
    assert found[f"{kind} probabilities by Keras probabilities"].endswith("nothing found")
    assert "form: loss" in found[f"{kind} probabilities by Keras logits"]


def test_a_loss_that_is_no_cross_entropy_is_not_judged(every):
    found = every["checks losses"]
    assert "takes neither logits nor probabilities: nothing found" in found["other loss"]
    assert found["strict"].startswith("ValueError: a batch of 32")
    assert found["left as it was"]


def test_models_of_other_makers_are_checked(evidence):
    for worker in ("pt", *workers.keras()):
        found = evidence[worker]["checks losses"]
        assert "the model gives probabilities" in found["a dict of inputs and outputs"]
        assert "must be one tensor" in found["two outputs"]
    found = evidence["pt"]["checks losses"]
    assert found["losses of outputs"] == 2 * [found["a dict of inputs and outputs"]]
    assert found["resnet18"].endswith("nothing found")
    assert "a softmax twice" in found["resnet18 with softmax"]
    for worker in workers.keras():
        found = evidence[worker]["checks losses"]
        assert "a softmax twice" in found["keras.applications"]
        assert "it takes probabilities, the model gives logits" in found["a function of Keras"]


def test_a_loss_over_logits_keeps_its_gradient_at_every_margin(every):
    found = every["checks margins"]
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
    found = {int(k): v for k, v in evidence[worker]["checks margins"][name].items()}
    assert all(share == pytest.approx(1, rel=0.02) for m, share in found.items() if m <= kept)
    assert all(not share > 0.01 for m, share in found.items() if m >= lost)


@pytest.mark.parametrize("worker", workers.keras())
def test_keras_finds_the_logits_behind_a_softmax_in_the_same_graph(evidence, worker):
    found = evidence[worker]["checks margins"]["softmax"]
    assert all(share == pytest.approx(1, rel=1e-3) for share in found.values())


FIRST = {
    "input": "not finite: batch 7: x: 1 infinite of 512 values",
    "gradient": "not finite: batch 7: gradient of ",
    "loss": "not finite: batch 7: loss: it is inf",
}
NAMED = {
    ("pt", "parameter"): "not finite: batch 7: parameter 1.weight: 1 NaN of 512 values",
    ("tf", "parameter"): "first/kernel",
    ("pt", "layer"): "not finite: batch 7: output of layer 3: 64 infinite of 64 values",
    ("tf", "layer"): "not finite: batch 7: output of layer log: 64 infinite of 64 values",
    ("pt", "gradient"): "gradient of 2.bias",
    ("tf", "gradient"): "batch_normalization",
    ("pt", "resnet18"): "parameter layer2.0.conv1.weight: 1 NaN of",
    ("tf", "keras.applications"): "block_3_expand_BN/gamma",
}


def test_the_first_that_is_not_finite_is_named(every):
    found = every["checks nonfinite"]
    assert found["clean"] == "batch 7: nothing found"
    for name, text in FIRST.items():
        assert text in found[name]
    assert found["left as it was"]
    assert found["no trace"]


@pytest.mark.parametrize(("framework", "case"), NAMED)
def test_parts_of_models_are_named(evidence, framework, case):
    for worker in workers.keras() if framework == "tf" else ("pt",):
        assert NAMED[framework, case] in evidence[worker]["checks nonfinite"][case]


def test_pt_a_checked_step_takes_a_model_of_any_state(evidence):
    said, calls, merged = evidence["pt"]["checks any_state"]
    assert said == "not finite: batch 1: x: 8 infinite of 8 values"
    assert calls == 1
    assert not merged


def test_a_checked_step_names_the_batch_and_gives_the_weights_back(every):
    found = every["checks step"]
    assert found["clean"]["said"] is None
    assert found["clean"]["steps"] == 8
    bad = found["bad batch"]
    assert bad["steps"] == 5
    assert bad["said"] == "not finite: batch 5: x: 1 NaN of 512 values"
    assert bad["weights of before"]
    diverged = found["diverges"]
    assert 1 <= diverged["steps"] < 8
    assert "not finite: batch" in diverged["said"]
    assert diverged["weights of before"]


BENCHMARKED = {  # planted by the benchmark -> what is said of it alone
    "nan": "nan: x: 1 value in 1 sample, first in batch 0, sample 7",
    "value out of range": "range: x: 1 value in 1 sample, first in batch 0, sample 7",
    "label out of range": "label: y: 1 value in 1 sample, first in batch 0, sample 5",
    "rare class": "balance: y: class ",
    "in both splits": "duplicate: x: 1 sample of the second also in the first: 0 is its 299",
    "loss over probabilities": "form: loss: it takes probabilities, the model gives logits",
    "gradient": "nan is left of that of a sample that is wrong by ",
}


def test_every_fault_that_the_benchmark_plants_is_found(every):
    found = every["checks faults"]
    assert set(found) == set(BENCHMARKED)
    for fault, said in BENCHMARKED.items():
        assert found[fault].startswith(said), found[fault]
        assert ";" not in found[fault]
