"""Digits over photos: nothing is in both splits, and labels say what is in the picture."""

from dataclasses import replace

import numpy as np
import pytest

from shared import datasets, scenes
from shared.boxes import overlaps
from shared.provenance import class_names
from shared.specs import TASKS, DatasetSpec

SPEC = DatasetSpec("scenes", "scenes", train_size=60, test_size=40, image_size=64, objects=4)


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    """x and y of each split."""
    folder = datasets.materialise(SPEC, tmp_path_factory.mktemp("data"))
    return {split: datasets.load(folder, split) for split in ("train", "test")}


def test_originals_are_the_digits_and_half_of_none_is_lost():
    images, labels = scenes.originals()
    assert images.shape == (1797, 8, 8)
    assert images.dtype == np.float32
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert set(labels.tolist()) == set(range(10))
    split = scenes.split_originals(1797, np.random.default_rng(0))
    assert sorted([*split["train"], *split["test"]]) == list(range(1797))
    assert len(split["test"]) == 599


def test_no_pixel_of_a_photo_is_in_both_splits():
    from sklearn.datasets import load_sample_image

    parts = scenes.photo_parts()
    for name, train, test in zip(scenes.PHOTOS, parts["train"], parts["test"], strict=True):
        whole = np.concatenate([train, test], axis=1)
        assert np.array_equal(whole, load_sample_image(f"{name}.jpg") / np.float32(255))
        assert train.shape[1] == 480


def test_a_background_is_a_square_of_a_part_and_a_copy():
    part = np.random.default_rng(0).random((9, 12, 3)).astype(np.float32)
    before, seen = part.copy(), set()
    random = np.random.default_rng(1)
    for _ in range(60):
        square = scenes.background([part], 8, random)
        places = [
            (top, left, turned)
            for top in range(2)
            for left in range(5)
            for turned in (False, True)
            if np.array_equal(
                square, part[top : top + 8, left : left + 8][:, :: -1 if turned else 1]
            )
        ]
        assert len(places) == 1
        seen.update(places)
        square[:] = 0
    assert np.array_equal(part, before)
    assert {turned for *_, turned in seen} == {False, True}
    assert {left for _, left, _ in seen} == set(range(5))


def test_a_digit_is_blended_as_a_distance():
    canvas = np.full((4, 5, 3), 0.75, np.float32)
    scenes.blend(canvas, np.array([[1.0, 0.0]], np.float32), top=2, left=3)
    assert canvas[2, 3].tolist() == [0.25] * 3
    canvas[2, 3] = 0.75
    assert (canvas == 0.75).all()


def test_images_are_standardised_and_labels_are_boxes_inside(splits):
    for split, size in (("train", 60), ("test", 40)):
        x, y = splits[split]
        assert x.shape == (size, 64, 64, 3)
        assert y.shape == (size, 4, 5)
        assert x.dtype == y.dtype == np.float32
        there = y[..., 4] >= 0
        assert there.any(1).all()
        assert set(there.sum(1).tolist()) == {1, 2, 3, 4}
        assert set(y[..., 4].ravel().tolist()) == set(range(-1, 10))
        boxes = y[there][:, :4]
        assert boxes.min() >= 0
        assert boxes.max() <= 64
        longer = (boxes[:, 2:] - boxes[:, :2]).max(1)
        assert longer.min() >= datasets.SHORTEST
        assert longer.max() <= datasets.LONGEST
        assert (y[~there] == [0, 0, 0, 0, -1]).all()
    x = splits["train"][0]
    assert np.abs(x.mean((0, 1, 2))).max() < 1e-3
    assert np.abs(x.std((0, 1, 2)) - 1).max() < 1e-3


def test_digits_do_not_overlap(splits):
    for _, y in splits.values():
        for rows in y:
            boxes = rows[rows[:, 4] >= 0, :4]
            shared = overlaps(boxes, boxes)
            np.fill_diagonal(shared, 0)
            assert (shared == 0).all()


def test_a_box_holds_its_digit_and_nothing_lies_outside(monkeypatch, tmp_path):
    """Over black photos the digits alone are left, and no original is in both splits."""
    black = [np.zeros((80, 80, 3), np.float32)]
    monkeypatch.setattr(scenes, "photo_parts", lambda: {"train": black, "test": black})
    drawn, scaled = [], scenes.scaled
    monkeypatch.setattr(scenes, "scaled", lambda d, *size: (drawn.append(d), scaled(d, *size))[1])
    folder = datasets.materialise(replace(SPEC, seed=3), tmp_path)
    digits = iter(drawn)
    images, labels = scenes.originals()
    classes = {
        datasets._cropped(i).tobytes(): label for i, label in zip(images, labels, strict=True)
    }
    used = {}
    for split in ("train", "test"):
        x, y = datasets.load(folder, split)
        used[split] = set()
        for canvas, rows in zip(x, y, strict=True):
            ink = canvas[..., 0] > x.min() + 1e-3
            for left, top, right, bottom, label in rows[rows[:, 4] >= 0].astype(int):
                digit = next(digits)
                assert classes[digit.tobytes()] == label
                used[split].add(digit.tobytes())
                inside = ink[top:bottom, left:right]
                for edge in (inside[0], inside[-1], inside[:, 0], inside[:, -1]):
                    assert edge.any()
                ink[top:bottom, left:right] = False
            assert not ink.any()
    assert not used["train"] & used["test"]


def test_the_task_is_made_of_digits_by_name():
    task = TASKS["digits-detection"]
    assert class_names(task.dataset) == list("0123456789")
    assert task.model.num_classes == 10
    assert task.model.input_shape[0] == task.dataset.image_size
