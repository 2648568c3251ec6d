"""Mapped pipelines: what the loaders over shards are tested for, `test_shards.py` holds.

Here is what mapping alone promises: the pixels stay on disk, and only what is used is read.
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from shared.conversion import convert
from shared.images import decode_rgb, list_images
from shared.photos import make_photos
from shared.shards import MappedImages, open_shards


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    top = tmp_path_factory.mktemp("mapped")
    folder = make_photos(top, images=9, size=64, seed=1)
    return folder, convert(folder, top / "arrays", form="arrays", samples=4, workers=1)


def test_pixels_and_labels_are_those_of_the_folder(made):
    folder, shards = made
    images = MappedImages(shards)
    paths, labels, _ = list_images(folder)
    for row, (path, label) in enumerate(zip(paths, labels, strict=True)):
        pixels, found = images.image(row)
        assert np.array_equal(pixels, decode_rgb(path))
        assert found == label
    assert images.has(np.arange(9)).all()


def test_images_are_views_of_files_that_nobody_can_write_to(made):
    pixels, _ = MappedImages(made[1]).image(3)
    assert isinstance(pixels, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        pixels[0, 0, 0] = 1


def test_another_process_is_sent_no_pixels(made):
    images = MappedImages(made[1])
    before, _ = images.image(2)
    data = pickle.dumps(images)
    assert len(data) < 5_000 < sum(sum(shard.sizes) for shard in made[1].shards)
    assert np.array_equal(pickle.loads(data).image(2)[0], before)


def test_what_is_damaged_is_known_by_its_rows(made, tmp_path):
    folder, _ = made
    convert(folder, tmp_path / "arrays", form="arrays", samples=4, workers=1)
    opened = open_shards(tmp_path / "arrays", "arrays")
    index = opened.shards[0].files[1]
    index.write_bytes(index.read_bytes()[:-8])
    images = MappedImages(opened)
    assert sorted(images.damaged) == sorted(opened.shards[0].rows.tolist())
    assert all(f"{index}: is truncated" in reason for reason in images.damaged.values())
    assert images.has(np.arange(9)).sum() == 5
