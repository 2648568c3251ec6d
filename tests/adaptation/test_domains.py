"""The task: two domains of the same digits, apart by original, and what is measured of its rows."""

from __future__ import annotations

import numpy as np
import pytest

from bench.adaptation import domains
from shared import datasets, scenes
from shared.specs import TASKS, CNNSpec, DatasetSpec, train_step_flops

SPEC = DatasetSpec("small-domains", "domains", train_size=120, test_size=90)
SPLITS = ("train", "target", "test", "source_test")


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    folder = datasets.materialise(SPEC, tmp_path_factory.mktemp("data"))
    return {split: datasets.load(folder, split) for split in SPLITS}


def test_images_are_standardised_by_the_source(splits):
    for split, size in zip(SPLITS, (120, 120, 90, 90), strict=True):
        x, y = splits[split]
        assert x.shape == (size, 32, 32, 3)
        assert x.dtype == np.float32
        assert y.dtype == np.int64
        assert set(y) == set(range(10))
    source = splits["train"][0]
    assert float(source.mean()) == pytest.approx(0, abs=1e-4)
    assert float(source.std()) == pytest.approx(1, abs=1e-4)


def test_the_source_lies_on_black_and_the_target_on_photos(splits):
    for split in ("train", "source_test"):
        x = splits[split][0]
        assert (x == x.min()).mean() > 0.4
        assert np.array_equal(x[..., 0], x[..., 2])
    for split in ("target", "test"):
        x = splits[split][0]
        assert not np.array_equal(x[..., 0], x[..., 2])
        assert len(np.unique(x)) > 250


def test_no_original_is_in_training_and_in_test(monkeypatch, tmp_path):
    drawn = []
    originals, _ = scenes.originals()
    digits = [scenes.scaled(image, datasets.SIDE, datasets.SIDE) for image in originals]
    places = {digit.tobytes(): place for place, digit in enumerate(digits)}
    blend = scenes.blend

    def spy(canvas, digit, top, left):
        drawn.append(places[digit.tobytes()])
        blend(canvas, digit, top, left)

    monkeypatch.setattr(scenes, "blend", spy)
    folder = datasets.materialise(SPEC, tmp_path)
    assert len(drawn) == 420
    trained, tested = set(drawn[:240]), set(drawn[240:])
    assert not trained & tested
    _, labels = scenes.originals()
    kept = np.concatenate([datasets.load(folder, split)[1] for split in SPLITS])
    assert np.array_equal(kept, labels[drawn])
    assert drawn[:120] != drawn[120:240]  # no row of the target tells the label of a source's


def test_folders_to_train_on_hold_no_label_of_the_target(splits, tmp_path):
    source, target, (x, y) = datasets.domain_folders(SPEC, tmp_path)
    for folder, split in ((source, "train"), (target, "target")):
        assert np.array_equal(np.load(folder / "train_x.npy"), splits[split][0])
    assert np.array_equal(np.load(source / "train_y.npy"), splits["train"][1])
    assert not np.load(target / "train_y.npy").any()
    assert np.array_equal(y, splits["test"][1])
    assert x.mean((1, 2, 3)) == pytest.approx(0, abs=1e-5)  # each by itself
    assert x.std((1, 2, 3)) == pytest.approx(1, abs=1e-4)
    before = source.stat().st_mtime_ns
    assert datasets.domain_folders(SPEC, tmp_path)[0].stat().st_mtime_ns == before  # made once


def test_flops_are_those_of_two_passes_and_one_head():
    spec = CNNSpec((4, 4, 1), ((2, 2), (3, 2)), num_classes=5)
    convolutions = [2 * 2 * 9 * 1 * 2, 9 * 2 * 3]  # multiply-adds a sample
    head = 3 * 5
    plain = 2 * 8 * (2 * convolutions[0] + 3 * (convolutions[1] + head))
    assert plain == train_step_flops(spec, 8)
    both = 2 * 16 * (2 * convolutions[0] + 3 * convolutions[1]) + 2 * 8 * 3 * head + 3 * 2 * 77
    assert domains.step_flops(spec, 8, extra_macs=77) == pytest.approx(both / plain)


def test_the_task_fills_its_splits():
    task = TASKS["digits-to-photos"]
    size = task.recipe.accuracy_batch_size
    assert task.dataset.train_size % size == 0
    assert 10 * max(task.compute_batch, task.small_batch) <= task.dataset.train_size
