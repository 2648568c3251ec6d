"""Each fault that is planted in data is found and named, and clean data are clean."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from bench.recipes import bench_data_checks
from shared.specs import TASKS
from tests import workers
from tests.recipes.samples import BATCH, CLASSES, arrays

FRAMEWORKS = ("pt", *workers.keras())
MODELS = "recipes"
X, Y = arrays()
NUMBERS = np.arange(64)
HEAD = "8 batches, 64 samples"
FIRST = "first in batch"


@pytest.fixture
def batches(models):
    """`batches(x, y)`: batches of the framework's tensors."""

    def make(*parts):
        starts = range(0, len(parts[-1]), BATCH)
        return [tuple(models.tensor(p[at : at + BATCH]) for p in parts) for at in starts]

    return make


def put(value, *places):
    x = X.copy()
    for place in places:
        x[place] = value
    return x, Y


def relabel(where, label):
    return X, np.where(np.isin(NUMBERS, where), label, Y)


ONE_HOT = np.eye(CLASSES, dtype=np.float32)
NOTHING = "nothing found"
ONE = f"1 value in 1 sample, {FIRST}"
BEYOND = f"from {X[8:16].min():.4g} to 255, not within 0 to 1"
PLANTED = [  # ((x, y, settings), the one line that is found)
    (
        put(np.nan, (19, 2, 3, 0), (19, 2, 4, 0), (40, 0, 0, 0)),
        f"nan: x: 3 values in 2 samples, {FIRST} 2, sample 3",
    ),
    (put(-np.inf, (63, 7, 7, 0)), f"infinity: x: {ONE} 7, sample 7"),
    (put(255, (9, 1, 1, 0)), f"range: x: {ONE} 1, sample 1: {BEYOND}"),
    (relabel([5], 4), f"label: y: {ONE} 0, sample 5: 4, not 0 to 3"),
    ((*relabel([5], -1), {"num_classes": 0}), f"label: y: {ONE} 0, sample 5: -1, not 0 or more"),
    ((X, Y % 3), "balance: y: no sample of class 3"),
    ((X, np.where(NUMBERS < 2, 3, Y % 3)), "balance: y: class 0 has 31 samples, class 3 2"),
    (
        (X, 0.5 * ONE_HOT[Y]),
        f"label: y: 64 values in 64 samples, {FIRST} 0, sample 0: "
        "they are not distributions over the classes",
    ),
    (
        (X, np.where(Y == 1, np.nan, Y).astype(np.float32)),
        f"nan: y: 16 values in 16 samples, {FIRST} 0, sample 1",
    ),
    ((X, Y), NOTHING),
    (relabel([5], -100), NOTHING),
    ((*relabel([5], 255), {"ignore_label": 255}), NOTHING),
    ((X, np.where(Y == 3, 2, Y), {"num_classes": 3}), NOTHING),
    ((X, ONE_HOT[Y]), NOTHING),
    ((X, np.zeros((64, 5), int)), NOTHING),
]


@pytest.mark.parametrize(("data", "line"), PLANTED)
def test_a_planted_fault_is_what_is_found(technique, batches, data, line):
    x, y, *others = data
    settings = {"num_classes": CLASSES, "low": 0.0, "high": 1.0} | dict(*others)
    found = str(technique.check_data(batches(x, y), **settings))
    assert found == (f"{HEAD}: {line}" if line is NOTHING else f"{HEAD}: 1 found\n{line}")


def test_the_strict_mode_raises_the_report(technique, batches):
    data = batches(*put(np.nan, (19, 2, 3, 0)))
    with pytest.raises(ValueError, match=f"^{HEAD}: 1 found\nnan: x: 1 value"):
        technique.check_data(data, strict=True)


# Structures --------------------------------------------------------------------------------------

BAD = put(np.nan, (3, 0, 0, 0))[0]
NAN = f"{ONE} 0, sample 3"


def test_data_may_have_any_structure(technique, models):
    nested = {"image": (models.tensor(X), models.tensor(BAD)), "name": ["a"] * 64}, {"y": [0] * 64}
    for data, name in (
        (nested, "x['image'][1]"),
        (models.tensor(BAD), "x"),
        ((BAD, Y), "x"),
        (models.half(BAD), "x"),
    ):
        found = str(technique.check_data([data]))
        assert found == f"1 batch, 64 samples: 1 found\nnan: {name}: {NAN}"


def test_data_may_come_as_the_framework_has_them(technique, models):
    for dataset, batches in models.datasets(BAD, Y):
        head, line = str(technique.check_data(dataset, num_classes=CLASSES)).splitlines()
        assert head == f"{batches} batch{'es' * (batches > 1)}, 64 samples: 1 found"
        assert line == f"nan: x: {NAN}"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "there is no batch to check"),
        ([{"x": X, "y": Y}], "num_classes is given, but a batch has no"),
        ([(X, Y[:3])], "different lengths: {'x': 64, 'y': 3}"),
    ],
)
def test_a_refusal_says_why(technique, data, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        technique.check_data(data, num_classes=CLASSES)


MANY, CODES = np.zeros((400, 2), np.float32), np.arange(200).repeat(2)
BESIDE = [({"a": MANY, "scale": 1.0, "unit": np.float32(2)}, CODES)]


@pytest.mark.parametrize(
    ("data", "settings", "words"),
    [
        ((MANY, CODES.astype(np.uint8)), {"num_classes": 200}, "400 samples: nothing found"),
        ((MANY, CODES.astype(np.uint16)), {"num_classes": 200}, "400 samples: nothing found"),
        ((MANY, list(CODES)), {"num_classes": 200}, "400 samples: nothing found"),
        (BESIDE[0], {"num_classes": 200}, "400 samples: nothing found"),
        (({"a": MANY, "scale": math.nan}, CODES), {}, "1 found\nnan: x['scale']: 1 value"),
        (
            (MANY, CODES.astype(np.uint8)),
            {"num_classes": 300},
            "1 found\nbalance: y: no sample of class 200, 201",
        ),
        (
            np.array([[1, 2, 250]], np.uint8),
            {"low": -1, "high": 200},
            "range: x: 1 value in 1 sample",
        ),
        (
            ((X * 255).astype(np.uint8), Y),
            {"low": 0.0, "high": 1.0},
            "not within 0 to 1",
        ),
    ],
)
def test_numbers_of_any_kind_are_read_as_they_are(technique, data, settings, words):
    assert words in str(technique.check_data([data], **settings))


def test_labels_may_be_a_list_of_tensors(technique, models):
    labels = list(models.tensor(CODES[:8]))
    found = technique.check_data([(MANY[:8], labels)], num_classes=4)
    assert str(found) == "1 batch, 8 samples: nothing found"


# Splits ------------------------------------------------------------------------------------------

OTHER = np.random.default_rng(2).uniform(0, 1, (24, 8, 8, 1)).astype(np.float32)
BOTH = "24 samples beside 64 different ones"


def test_samples_in_both_splits_are_found(technique, batches):
    first = batches(X, Y)
    leaking, near = OTHER.copy(), OTHER.copy()
    leaking[[3, 11]], near[5] = X[[60, 2]], np.nextafter(X[7], 2)
    for second in (OTHER, near):
        found = str(technique.check_splits(first, batches(second, Y[:24])))
        assert found == f"{BOTH}: nothing found"
    found = str(technique.check_splits(first, batches(leaking, Y[:24])))
    line = "duplicate: x: 2 samples of the second also in the first: 3 is its 60, 11 is its 2"
    assert found == f"{BOTH}: 1 found\n{line}"
    with pytest.raises(ValueError, match=f"^{BOTH}: 1 found\nduplicate"):
        technique.check_splits(first, batches(leaking, Y[:24]), strict=True)
    without = str(technique.check_splits(first, [*first, (X[:0], Y[:0])]))
    assert without.startswith("64 samples beside 64 different ones: 1 found")


def test_samples_are_alike_where_all_their_inputs_are(technique, models):
    one, other = models.tensor(X), models.tensor(X[::-1].copy())
    named, half = [({"a": one, "b": other}, Y)], [({"a": one, "b": one}, Y)]
    found = str(technique.check_splits(named, named))
    assert "64 samples of the second" in found
    assert "0 is its 0, 1 is its 1, 2 is its 2, ..." in found
    assert "nothing found" in str(technique.check_splits(named, half))
    texts = ([([text, "two"], [0, 1])] for text in ("one", "three"))
    found = str(technique.check_splits(*texts))
    assert "1 sample of the second also in the first: 1 is its 1" in found
    assert "400 samples of the second" in str(technique.check_splits(BESIDE, BESIDE))


BENCHMARKED = {  # planted by the benchmark -> what is said of it alone
    "nan": f"nan: x: 1 value in 1 sample, {FIRST} 0, sample 7",
    "value out of range": f"range: x: 1 value in 1 sample, {FIRST} 0, sample 7",
    "label out of range": f"label: y: 1 value in 1 sample, {FIRST} 0, sample 5",
    "rare class": "balance: y: class ",
    "in both splits": "duplicate: x: 1 sample of the second also in the first: 0 is its 299",
}


def test_every_fault_that_the_benchmark_plants_is_found(impl, technique):
    shape = (600, *TASKS["digits-cnn"].model.input_shape)
    x = np.random.default_rng(2).uniform(0, 1, shape).astype(np.float32)
    found = bench_data_checks._faults(impl, x, np.arange(600) % 10)
    assert found.keys() == BENCHMARKED.keys()
    for fault, said in BENCHMARKED.items():
        assert found[fault].startswith(said)
        assert ";" not in found[fault]
