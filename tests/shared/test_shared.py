"""Specs, canonical weights, data sets and the batch order, which both frameworks rely on."""

import string
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shared import datasets
from shared.specs import (
    NO_LABEL,
    TASKS,
    BottleneckSpec,
    CNNSpec,
    DatasetSpec,
    GPTSpec,
    ResNetSpec,
    parameter_count,
    parameter_shapes,
    state_shapes,
)
from shared.weights import checksum, init_weights

DIGITS = DatasetSpec("small-digits", "digits", train_size=300, test_size=700)
TEXT = DatasetSpec("small-text", "text", train_size=200, test_size=100, sequence_length=16)
SPECS = {name: task.model for name, task in TASKS.items()}
# The smallest of each family, whose code is the same for any size.
SMALLEST = {s.family: s for s in sorted(SPECS.values(), key=parameter_count, reverse=True)}
SMALLEST["bottleneck"] = BottleneckSpec((16, 16, 2), (1, 1), (4, 6), num_classes=3)
MODELS = pytest.mark.parametrize("spec", SMALLEST.values(), ids=SMALLEST)


# Specs and weights ---------------------------------------------------------------------------


def test_parameter_count_is_the_known_one():
    # By hand: 3x3x1x2 + 2x2 for the BatchNorm, then 2x3 + 3.
    assert parameter_count(CNNSpec((8, 8, 1), ((2, 1),), num_classes=3)) == 18 + 4 + 9
    # He et al. (2015), table 6: 0.27M, with 3 input channels.
    resnet20 = ResNetSpec((32, 32, 3), 3, (16, 32, 64), num_classes=10)
    assert parameter_count(resnet20) == pytest.approx(0.27e6, rel=0.02)
    for depth, known in ((18, 11_689_512), (50, 25_557_032)):  # torchvision's
        spec = replace(TASKS[f"photos-resnet{depth}"].model, num_classes=1000)
        assert parameter_count(spec) == known
    for name in ("text-gpt-base", "text-bert-base"):
        # Of 12 layers of width 768: 12 * 768 ** 2 in the matrices of each.
        assert parameter_count(TASKS[name].model) == pytest.approx(12 * 12 * 768**2, rel=0.01)
    gpt = GPTSpec(vocabulary=5, sequence_length=3, width=4, heads=2, layers=1)
    block = 2 * 8 + 4 * 12 + 4 * 4 + (4 * 16 + 16) + (16 * 4 + 4)
    assert parameter_count(gpt) == 5 * 4 + 3 * 4 + block + 8 + 4 * 5


@MODELS
def test_weights_have_the_shapes_of_the_spec(spec):
    weights = init_weights(spec, seed=0)
    assert {name: w.shape for name, w in weights.items()} == (
        parameter_shapes(spec) | state_shapes(spec)
    )
    assert all(w.dtype == np.float32 for w in weights.values())
    trained = sum(w.size for name, w in weights.items() if name not in state_shapes(spec))
    assert trained == parameter_count(spec) == sum(map(prod, parameter_shapes(spec).values()))


@MODELS
def test_weights_come_from_the_seed_alone(spec):
    first, again, other = (init_weights(spec, seed) for seed in (0, 0, 1))
    np.random.seed(3)
    assert checksum(first) == checksum(again) != checksum(other)
    # Biases are set, not drawn: those of a detector's head are not all equal.
    drawn = [name for name, w in first.items() if w.std() > 0 and not name.endswith(".bias")]
    assert "head.kernel" in drawn
    assert all(not np.array_equal(first[name], other[name]) for name in drawn)


def test_a_tensor_keeps_its_values_when_others_come_or_go():
    shallow = init_weights(SPECS["text-gpt"], seed=0)
    deep = init_weights(replace(SPECS["text-gpt"], layers=3), seed=0)
    assert deep.keys() > shallow.keys()
    assert all(np.array_equal(deep[name], shallow[name]) for name in shallow)


def test_tensors_of_one_shape_differ():
    weights = init_weights(SPECS["digits-resnet20"], seed=0)
    a, b = (weights[f"stage0.block{i}.conv0.kernel"] for i in (0, 1))
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.1


def test_kernels_are_he_normal():
    kernel = init_weights(SPECS["digits-resnet20"], seed=0)["stage2.block1.conv0.kernel"]
    assert kernel.std() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.02)


@pytest.mark.parametrize("task", ["digits-resnet20", "photos-resnet18", "photos-resnet50"])
def test_a_model_that_predicts_has_no_convolution_that_is_multiplied_by_zero(task):
    spec = TASKS[task].model
    trained = init_weights(spec, seed=0)
    predicting = init_weights(spec, seed=0, zero_init_residual=False)
    zeros = {name for name, value in trained.items() if name.endswith("gamma") and not value.any()}
    assert zeros == {n for n in trained if not np.array_equal(trained[n], predicting[n])} != set()
    assert all((predicting[name] == 1).all() for name in zeros)


def test_checksum_sees_values_shapes_and_names():
    weights = init_weights(SPECS["digits-cnn"], seed=0)
    reference = checksum(weights)
    assert checksum(dict(reversed(weights.items()))) == reference
    last_bit = weights["head.kernel"].copy()
    last_bit[3, 4] = np.nextafter(last_bit[3, 4], np.float32(np.inf))
    for changed in (
        weights | {"head.kernel": last_bit},
        weights | {"head.kernel": weights["head.kernel"].reshape(10, 64)},
        weights | {"head.kernel": weights["head.kernel"][::-1]},
        {name.replace("conv1", "conv7"): w for name, w in weights.items()},
        {f"{name}_": w for name, w in weights.items()},  # in the same order
        {name: w for name, w in weights.items() if name != "head.bias"},
    ):
        assert checksum(changed) != reference


# Batch order ---------------------------------------------------------------------------------


@given(
    size=st.integers(1, 300),
    batch_size=st.integers(1, 320),
    seed=st.integers(0, 2**32),
    epoch=st.integers(0, 1000),
)
def test_batches_visit_each_row_at_most_once(size, batch_size, seed, epoch):
    batches = list(datasets.batch_order(size, batch_size, seed=seed, epoch=epoch))
    assert len(batches) == size // batch_size
    assert all(len(rows) == batch_size for rows in batches)
    visited = np.concatenate(batches) if batches else np.array([], int)
    assert len(set(visited.tolist())) == len(visited)
    assert set(visited.tolist()) <= set(range(size))
    again = datasets.batch_order(size, batch_size, seed=seed, epoch=epoch)
    assert np.array_equal(np.concatenate([*again, []]), visited)


def test_an_epoch_is_a_permutation_of_its_own():
    def order(**settings):
        return np.concatenate(list(datasets.batch_order(100, 10, **settings))).tolist()

    orders = [order(seed=seed, epoch=epoch) for seed in range(3) for epoch in range(3)]
    assert all(sorted(rows) == list(range(100)) for rows in orders)
    assert len({tuple(rows) for rows in orders}) == len(orders)


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 40),
    count=st.integers(0, 20),
    seed=st.integers(0, 99),
)
def test_first_batches_follow_the_stream(size, batch_size, count, seed):
    assume(batch_size <= size)
    x = np.arange(size)
    batches = datasets.first_batches(x, -x, batch_size, count, seed=seed)
    assert len(batches) == count
    per_epoch = size // batch_size
    for number, (rows, labels) in enumerate(batches):
        epoch, place = divmod(number, per_epoch)
        expected = list(datasets.batch_order(size, batch_size, seed=seed, epoch=epoch))[place]
        assert np.array_equal(rows, expected)
        assert np.array_equal(labels, -expected)


def test_first_batches_refuse_a_batch_larger_than_the_data():
    x = np.arange(3)
    with pytest.raises(ValueError, match=r"batch of 4 .* 3 samples"):
        datasets.first_batches(x, x, 4, 1, seed=0)


# Data sets -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder of each small data set."""
    root = tmp_path_factory.mktemp("data")
    return {spec.name: datasets.materialise(spec, root) for spec in (DIGITS, TEXT)}


def test_digits_are_standardised_images(folders):
    x, y = datasets.load(folders[DIGITS.name], "train")
    assert x.shape == (300, 32, 32, 1)
    assert x.dtype == np.float32
    assert y.dtype == np.int64
    assert set(y.tolist()) == set(range(10))
    assert float(x.mean()) == pytest.approx(0, abs=1e-3)
    assert float(x.std()) == pytest.approx(1, abs=1e-3)
    test_x, test_y = datasets.load(folders[DIGITS.name], "test")
    assert test_x.shape == (700, 32, 32, 1)
    assert len(test_y) == 700


def test_the_path_of_data_holds_in_any_folder(monkeypatch, tmp_path, folders):
    monkeypatch.chdir(folders[DIGITS.name].parent)
    for spec in (DIGITS, TEXT):
        folder = datasets.materialise(spec, Path())
        assert folder == folders[spec.name]
        monkeypatch.chdir(tmp_path)
        assert len(datasets.load(folder, "test")[1])
        monkeypatch.chdir(folder.parent)


def test_no_original_digit_is_in_both_splits(monkeypatch, tmp_path):
    drawn = []

    def spy(originals, clutter, row, spec, random):
        drawn.append((int(row), {int(other) for other in clutter}))
        return np.full((32, 32), row, np.float32)

    monkeypatch.setattr(datasets, "_render", spy)
    folder = datasets.materialise(DIGITS, tmp_path)
    rows = [row for row, _ in drawn]
    train, test = set(rows[:300]), set(rows[300:])
    assert len(train) == 300
    assert len(test) == 599
    assert not train & test
    assert not set.union(*(clutter for _, clutter in drawn)) & test
    # What was asked for is what was written: a render that shows its original.
    from sklearn.datasets import load_digits

    assert np.array_equal(datasets.load(folder, "test")[1], load_digits().target[rows[300:]])


def test_renders_of_one_original_differ(folders):
    x, _ = datasets.load(folders[DIGITS.name], "test")
    assert not np.array_equal(x[0], x[599])


def test_text_labels_are_the_next_characters(folders):
    for split, size in (("train", 200), ("test", 100)):
        x, y = datasets.load(folders[TEXT.name], split)
        assert x.shape == y.shape == (size, 16)
        assert x.dtype == y.dtype == np.int64
        assert np.array_equal(x[:, 1:], y[:, :-1])
        assert x.min() >= 0
        assert x.max() < SPECS["text-gpt"].vocabulary


def test_text_splits_share_no_source_file(folders):
    sources = datasets._split_sources()
    assert not set(sources["train"]) & set(sources["test"])
    assert len(sources["train"]) > 3 * len(sources["test"]) > 50
    # And each window is indeed cut from files of its own split.
    for split in ("train", "test"):
        text = "\n".join(path.read_text("utf-8") for path in sources[split])
        whole = datasets.encode(text).astype(np.uint8).tobytes()
        x, _ = datasets.load(folders[TEXT.name], split)
        assert all(row.astype(np.uint8).tobytes() in whole for row in x)


def test_crops_are_standardised_photos(tmp_path):
    spec = DatasetSpec("crops", "crops", train_size=12, test_size=7, image_size=40, num_classes=6)
    folder = datasets.materialise(spec, tmp_path)
    (x, y), (test_x, test_y) = (datasets.load(folder, split) for split in ("train", "test"))
    assert x.shape == (12, 40, 40, 3)
    assert test_x.shape == (7, 40, 40, 3)
    assert x.dtype == test_x.dtype == np.float32
    assert y.dtype == np.int64
    assert y.tolist() == 2 * [0, 1, 2, 3, 4, 5]
    assert test_y.tolist() == [0, 1, 2, 3, 4, 5, 0]
    assert np.abs(x.mean((0, 1, 2))).max() < 1e-3
    assert np.abs(x.std((0, 1, 2)) - 1).max() < 1e-3
    assert not np.array_equal(x[0], test_x[0])
    assert not np.array_equal(x[0], x[6])  # of one class
    # A crop is a part of its photo, scaled: neighbours are alike as in a photo, not as in noise.
    assert np.abs(np.diff(x, axis=1)).mean() < 0.5 * np.abs(x[:, ::-1] - x).mean()
    again = datasets.materialise(spec, tmp_path / "again")
    for file in sorted(again.iterdir()):
        assert file.read_bytes() == (folder / file.name).read_bytes()


def test_hidden_characters_are_those_of_the_text_as_many_in_each_row():
    codes = np.random.default_rng(0).integers(0, datasets.HIDDEN, (400, 64))
    x, y = datasets.hide(codes, np.random.default_rng(1))
    asked = y != NO_LABEL
    assert set(asked.sum(1)) == {round(0.15 * 64)}
    assert np.array_equal(y[asked], codes[asked])
    assert np.array_equal(x[~asked], codes[~asked])
    assert asked.any(0).all()  # no place is spared
    hidden, stayed = x == datasets.HIDDEN, x == codes
    assert asked[hidden].all()
    assert hidden[asked].mean() == pytest.approx(0.8, abs=0.02)
    assert stayed[asked].mean() == pytest.approx(0.1, abs=0.015)
    drawn = x[asked & ~hidden & ~stayed]
    assert len(drawn) / asked.sum() == pytest.approx(0.1, abs=0.015)
    assert len(np.unique(drawn)) > 90  # any character


def test_what_is_hidden_does_not_show_in_what_is_seen():
    """Another text, that differs where characters are hidden or drawn, looks the same."""
    codes = np.random.default_rng(0).integers(0, datasets.HIDDEN, (50, 64))
    x, y = datasets.hide(codes, np.random.default_rng(1))
    other = np.where(x == codes, codes, (codes + 1) % datasets.HIDDEN)
    assert not np.array_equal(other, codes)
    again, labels = datasets.hide(other, np.random.default_rng(1))
    assert np.array_equal(again, x)
    assert np.array_equal(labels != NO_LABEL, y != NO_LABEL)
    assert not np.array_equal(labels, y)


def test_hidden_text_is_that_of_the_text(tmp_path):
    folders = [
        datasets.materialise(replace(TEXT, kind=kind), tmp_path) for kind in ("text", "masked")
    ]
    for split in ("train", "test"):
        (text, _), (x, y) = (datasets.load(folder, split) for folder in folders)
        assert x.dtype == y.dtype == np.int64
        assert np.array_equal(np.where(y == NO_LABEL, x, y), text)
    assert SPECS["text-bert"].vocabulary == datasets.HIDDEN + 1


@given(st.text())
def test_encode_gives_a_code_for_every_character(text):
    codes = datasets.encode(text)
    assert len(codes) == len(text)
    assert codes.dtype == np.int64
    unknown = len(datasets.ALPHABET)
    for character, code in zip(text, codes.tolist(), strict=True):
        expected = datasets.ALPHABET.find(character)
        assert code == (expected if expected >= 0 else unknown)


@given(st.text("\n\t" + string.printable[:95]))
def test_encode_can_be_undone_for_plain_text(text):
    assert "".join(datasets.ALPHABET[code] for code in datasets.encode(text)) == text


def test_the_alphabet_fits_the_model():
    assert len(set(datasets.ALPHABET)) == len(datasets.ALPHABET)
    assert len(datasets.ALPHABET) + 1 == SPECS["text-gpt"].vocabulary


def test_same_spec_same_files(tmp_path, folders):
    again = datasets.materialise(DIGITS, tmp_path)
    for file in sorted(again.iterdir()):
        assert file.read_bytes() == (folders[DIGITS.name] / file.name).read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        {"train_size": 301},
        {"test_size": 9},
        {"seed": 1},
        {"image_size": 40},
        {"num_classes": 3},
        {"sequence_length": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_spec_has_another_folder(tmp_path, monkeypatch, change):
    monkeypatch.setattr(datasets, "_make_digits", lambda spec: {})
    first = datasets.materialise(DIGITS, tmp_path)
    assert datasets.materialise(DIGITS, tmp_path) == first
    assert datasets.materialise(replace(DIGITS, **change), tmp_path) != first


def test_a_crash_midway_leaves_nothing_that_looks_complete(tmp_path, monkeypatch):
    save, calls = np.save, []

    def full_disk(path, array):
        calls.append(path)
        if len(calls) == 3:
            Path(path).write_bytes(b"half")
            raise OSError("No space left on device")
        save(path, array)

    monkeypatch.setattr(np, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        datasets.materialise(TEXT, tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    folder = datasets.materialise(TEXT, tmp_path)
    assert datasets.load(folder, "test")[0].shape == (100, 16)


def test_what_a_killed_process_left_is_not_taken_for_complete(tmp_path):
    """A process that dies without a chance to tidy up leaves a partial folder."""
    program = """
import os, sys
import numpy as np
from pathlib import Path
from shared import datasets
from shared.specs import DatasetSpec

np.save = lambda path, array: os._exit(9)
datasets.materialise(eval(sys.argv[1]), Path(sys.argv[2]))
"""
    root = Path(datasets.__file__).parent.parent
    killed = subprocess.run([sys.executable, "-c", program, repr(TEXT), tmp_path], cwd=root)
    assert killed.returncode == 9
    (left,) = tmp_path.iterdir()
    folder = datasets.materialise(TEXT, tmp_path)
    assert folder != left
    assert len(list(folder.iterdir())) == 4


def test_two_processes_may_make_the_same_data(tmp_path, monkeypatch):
    make = datasets._make_text

    def slower_than_another(spec):
        monkeypatch.setattr(datasets, "_make_text", make)
        datasets.materialise(spec, tmp_path)
        return make(spec)

    monkeypatch.setattr(datasets, "_make_text", slower_than_another)
    folder = datasets.materialise(TEXT, tmp_path)
    assert list(tmp_path.iterdir()) == [folder]
    assert len(list(folder.iterdir())) == 4


def test_files_are_read_without_pickle(tmp_path, folders):
    target = tmp_path / "ran"

    class Payload:
        def __reduce__(self):
            return (target.touch, ())

    for part in ("x", "y"):
        np.save(tmp_path / f"train_{part}.npy", np.array([Payload()], object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"allow_pickle|Python objects"):
        datasets.load(tmp_path, "train")
    assert not target.exists()


def test_files_are_mapped_read_only(folders):
    x, _ = datasets.load(folders[TEXT.name], "train")
    with pytest.raises(ValueError, match="read-only"):
        x[0, 0] = 1
