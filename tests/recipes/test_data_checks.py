"""Each fault that is planted in data is found and named, and clean data are clean."""

from __future__ import annotations

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
    found = every["data_checks planted"][fault].splitlines()
    assert found == ["8 batches, 64 samples: 1 found", FAULTS[fault]]


@pytest.mark.parametrize(
    "case",
    [
        *("clean", "ignored label", "ignored label of its own", "imbalance allowed"),
        *("one-hot", "dense labels"),
    ],
)
def test_clean_data_are_clean(every, case):
    assert every["data_checks planted"][case] == CLEAN


def test_bytes_are_beyond_the_range_of_floats(every):
    assert "not within 0 to 1" in every["data_checks planted"]["range of bytes"]


def test_the_strict_mode_raises_the_report(every):
    found = every["data_checks planted"]["strict"]
    assert found.startswith("ValueError: 8 batches, 64 samples: 1 found\nnan: x: 1 value")


def test_data_may_have_any_structure(every):
    found = every["data_checks structures"]
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
    found = evidence[worker]["data_checks structures"]
    for name, batches in DATASETS[worker].items():
        head, line = found[name].splitlines()
        assert head == f"{batches} batch{'es' * (batches > 1)}, 64 samples: 1 found"
        assert line == "nan: x: 1 value in 1 sample, first in batch 0, sample 3"


def test_numbers_of_any_kind_are_read_as_they_are(every):
    found = every["data_checks numbers"]
    for case in ("bytes", "shorts", "list", "beside"):
        assert found[case] == "1 batch, 400 samples: nothing found"
    assert found["tensors"] == "1 batch, 8 samples: nothing found"
    assert "1 found\nnan: x['scale']: 1 value" in found["nan beside"]
    assert "1 found\nbalance: y: no sample of class 200, 201" in found["more classes"]
    assert "range: x: 1 value in 1 sample" in found["bytes in range"]
    assert "400 samples of the second" in found["splits"]


def test_samples_in_both_splits_are_found(every):
    found = every["data_checks splits"]
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


BENCHMARKED = {  # planted by the benchmark -> what is said of it alone
    "nan": "nan: x: 1 value in 1 sample, first in batch 0, sample 7",
    "value out of range": "range: x: 1 value in 1 sample, first in batch 0, sample 7",
    "label out of range": "label: y: 1 value in 1 sample, first in batch 0, sample 5",
    "rare class": "balance: y: class ",
    "in both splits": "duplicate: x: 1 sample of the second also in the first: 0 is its 299",
}


def test_every_fault_that_the_benchmark_plants_is_found(every):
    found = every["data_checks faults"]
    assert set(found) == set(BENCHMARKED)
    for fault, said in BENCHMARKED.items():
        assert found[fault].startswith(said), found[fault]
        assert ";" not in found[fault]
