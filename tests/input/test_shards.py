"""Pipelines over shards: every sample once an epoch, damage found, an epoch taken up again.

Each framework runs in a process of its own (`shards_worker.py`), which also runs the
mapped pipelines.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from shared.conversion import convert
from shared.epochs import draw
from shared.images import list_images
from shared.photos import make_photos
from shared.shards import open_shards
from tests.input import pipelines
from tests.input.pipelines import BATCH, SEED
from tests.input.shards_worker import DAMAGED, DAMAGES, LOADERS, STARTS

IMAGES, SAMPLES = 13, 3  # of all, and of a shard
HIT = 1  # the shard that is damaged
# Pillow rounds after each of two passes; TensorFlow has the places of its taps in float32, 3e-5 of
# a pixel near the end of a row, between neighbours up to 255 apart.
GREY_LEVEL = 1 + 255 * 3e-5
FORMS = {"pt": ("tar", "arrays"), "tf": ("tfrecord", "arrays")}
EACH = [(side, name) for side in ("pt", "tf") for name in LOADERS]


@functools.cache
def evidence() -> SimpleNamespace:
    """What both workers found, and the rows and crops that were to come."""
    keep = tempfile.TemporaryDirectory()
    top = Path(keep.name, "Scherben 图 ß")
    folder = make_photos(top, images=IMAGES, size=300, seed=0)
    paths, _, _ = list_images(folder)
    for path, mode in ((paths[2], "L"), (paths[5], "CMYK")):
        Image.open(path).convert(mode).save(path, quality=90)
    for form in ("tar", "tfrecord", "arrays"):
        convert(folder, top / f"good-{form}", form=form, samples=SAMPLES, workers=1)
        for kind in DAMAGES:
            shutil.copytree(top / f"good-{form}", top / f"{kind}-{form}")
            damage(kind, open_shards(top / f"{kind}-{form}", form).shards[HIT].files[0])
    found = pipelines.run_workers("input.shards_worker", Path(keep.name), top)
    return SimpleNamespace(keep=keep, top=top, folder=folder, found=found)


def damage(kind: str, path: Path) -> None:
    data = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
        return
    data[len(data) // 2] ^= 1
    path.write_bytes(data if kind == "flipped" else data[: len(data) * 2 // 3])


@functools.cache
def wanted(epoch: int) -> list[tuple[np.ndarray, int]]:
    """The crop and the label of every row in an epoch, from Pillow."""
    paths, labels, _ = list_images(evidence().folder)
    numbers = draw(IMAGES, seed=SEED, epoch=epoch).tolist()
    return [
        (pipelines.reference(path, drawn), int(label))
        for path, drawn, label in zip(paths, numbers, labels, strict=True)
    ]


def rows_of(images: np.ndarray, labels: list[list[int]], epoch: int) -> list[int]:
    """Which row each image is; fails where it is none within a grey level, or has its label not."""
    found = []
    for image, label in zip(pipelines.levels(images), chain(*labels), strict=True):
        distances = [np.abs(image - crop).max() for crop, _ in wanted(epoch)]
        row = int(np.argmin(distances))
        assert distances[row] <= GREY_LEVEL
        assert wanted(epoch)[row][1] == label
        found.append(row)
    return found


@functools.cache
def rows_of_epoch(side: str, name: str, epoch: int) -> list[int]:
    """Those of a loader's epoch."""
    found = scenario(side, "epochs")[name][epoch]
    return rows_of(images(side, f"{name} {epoch}"), found["labels"], epoch)


def scenario(side: str, name: str) -> dict:
    return pipelines.scenario(evidence().found, side, name)


def images(side: str, name: str) -> np.ndarray:
    return evidence().found[side]["images"][name]


def hit_rows(side: str, name: str) -> list[int]:
    form = FORMS[side][name == "memory_mapped"]
    return open_shards(evidence().top / f"good-{form}", form).shards[HIT].rows.tolist()


# Every sample -----------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", range(2))
@pytest.mark.parametrize(("side", "name"), EACH)
def test_an_epoch_has_every_image_once_with_its_label_and_its_crop(side, name, epoch):
    """So both frameworks have the same multiset, and it is that of the folder's loaders."""
    assert sorted(rows_of_epoch(side, name, epoch)) == list(range(IMAGES))
    assert scenario(side, "epochs")[name][epoch]["dtypes"] == ["float32", "int64"]


@pytest.mark.parametrize(("side", "name"), EACH)
def test_images_have_the_size_the_mean_and_the_deviation_that_are_asked_for(side, name):
    form = pipelines.FORM
    paths, _, _ = list_images(evidence().folder)
    numbers = draw(IMAGES, seed=SEED, epoch=0).tolist()
    crops = np.stack(
        [
            pipelines.reference(path, drawn, form["image_size"])
            for path, drawn in zip(paths, numbers, strict=True)
        ]
    )
    found = pipelines.levels(images(side, f"{name} form"), form["mean"], form["std"])
    assert len(found) == IMAGES
    assert all(np.abs(crops - image).max(axis=(1, 2, 3)).min() <= GREY_LEVEL for image in found)


@pytest.mark.parametrize(("side", "name"), EACH)
def test_epochs_differ_and_another_run_is_the_same(side, name):
    found = scenario(side, "epochs")
    first, second = (epoch["digests"] for epoch in found[name])
    assert found[f"{name} again"]["digests"] == first
    assert not set(first) & set(second)
    assert rows_of_epoch(side, name, 0) != rows_of_epoch(side, name, 1)


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_mapped_images_come_in_the_order_of_the_folder_s_loaders(side):
    order = np.random.default_rng([SEED, 1]).permutation(IMAGES).tolist()
    assert rows_of_epoch(side, "memory_mapped", 1) == order


@pytest.mark.parametrize(("side", "name"), EACH)
def test_batches_are_full_but_for_the_last(side, name):
    sizes = [len(labels) for labels in scenario(side, "epochs")[name][0]["labels"]]
    if (side, name) == ("pt", "interleaved"):  # of each of two workers
        assert all(size <= BATCH for size in sizes)
        assert sum(size < BATCH for size in sizes) <= 2
    else:
        assert sizes == [BATCH, BATCH, BATCH, 1]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("side", "name"), EACH)
def test_an_epoch_taken_up_again_is_exactly_what_was_left_of_it(side, name, start):
    """To the last bit, in its order."""
    found = scenario(side, "epochs")
    resumed = found[f"{name} resumed"][STARTS.index(start)]
    left = start
    for epoch in found[name]:
        if left < len(epoch["digests"]):
            break
        left -= len(epoch["digests"])
    assert resumed["digests"] == epoch["digests"][left:]
    assert resumed["labels"] == epoch["labels"][left:]


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_in_any_order_there_is_still_every_image_once(side):
    found = scenario(side, "orders")["any"]
    assert sorted(rows_of(images(side, "any"), found["labels"], 0)) == list(range(IMAGES))


# The buffer -------------------------------------------------------------------------------------


@functools.cache
def order(side: str, size: int) -> list[int]:
    """The rows of an epoch with a buffer of so many."""
    found = scenario(side, "orders")[f"buffer {size}"]
    return rows_of(images(side, f"buffer {size}"), found["labels"], 0)


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_without_a_buffer_the_order_is_that_of_the_shards(side):
    form = FORMS[side][0]
    shards = open_shards(evidence().top / f"good-{form}", form).order(seed=SEED, epoch=0)
    assert order(side, 1) == [row for shard in shards for row in shard.rows.tolist()]


@pytest.mark.parametrize("size", [3, 100])
@pytest.mark.parametrize("side", ["pt", "tf"])
def test_the_next_sample_is_one_of_those_in_the_buffer(side, size):
    places = [order(side, 1).index(row) for row in order(side, size)]
    assert sorted(places) == list(range(IMAGES))
    assert places != sorted(places)
    assert all(place - when < size for when, place in enumerate(places))  # else not read yet


# Damage -----------------------------------------------------------------------------------------

SAYS = {
    "truncated": "is truncated: ",
    "flipped": "is damaged: its SHA-256 is not that of the manifest",
    "missing": "No such file or directory",
}


@pytest.mark.parametrize(("kind", "name"), DAMAGED)
@pytest.mark.parametrize("side", ["pt", "tf"])
def test_a_damaged_shard_is_named_with_the_reason(side, name, kind):
    found = scenario(side, "damaged")[f"{kind} {name}"]
    form = FORMS[side][name == "memory_mapped"]
    path = (
        evidence().top
        / f"{kind}-{form}"
        / open_shards(evidence().top / f"good-{form}", form).shards[HIT].files[0].name
    )
    assert found["raised"].startswith(f"ValueError: {path}: {SAYS[kind]}")
    assert "\n" not in found["raised"]
    assert found["seconds"] < 60


@pytest.mark.parametrize(("kind", "name"), DAMAGED)
@pytest.mark.parametrize("side", ["pt", "tf"])
def test_a_damaged_shard_is_skipped_and_counted_and_moves_nothing(side, name, kind):
    found = scenario(side, "damaged")[f"{kind} {name}"]
    lost = hit_rows(side, name)
    rows = rows_of(images(side, f"{kind} {name}"), found["epoch"]["labels"], 0)
    assert sorted(rows + lost) == list(range(IMAGES))
    assert sorted(int(line.rpartition(" ")[2]) for line in found["skipped"]) == sorted(lost)
    assert all(SAYS[kind] in line for line in found["skipped"])


@pytest.mark.parametrize(("side", "name"), EACH)
def test_what_is_skipped_leaves_its_place_empty(side, name):
    """So that an epoch can be taken up again: the same batches, but smaller."""
    found = scenario(side, "damaged")[f"flipped {name}"]
    whole = scenario(side, "epochs")[name][0]["labels"]
    sizes = [len(labels) for labels in found["epoch"]["labels"]]
    assert len(sizes) <= len(whole)
    assert sum(sizes) == IMAGES - len(hit_rows(side, name))
    digests = found["epoch"]["digests"]
    assert found["resumed"]["digests"] == digests[len(digests) - len(found["resumed"]["digests"]) :]
    assert 0 < len(found["resumed"]["digests"]) < len(digests)


# Settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_bad_settings_get_one_clear_line(side):
    found = scenario(side, "settings")
    form, top = FORMS[side][0], evidence().top
    assert found["on_error"] == "ValueError: on_error must be raise or skip, not 'ignore'"
    for name in ("batch_size", "shuffle_buffer", "start_batch"):
        assert found[name].startswith("ValueError: batch_size and shuffle_buffer must be 1 at")
    assert found["any order"].startswith("ValueError: start_batch needs deterministic")
    assert found["no shards"] == (
        f"FileNotFoundError: {top}: holds no manifest.json: make shards with twinbench shards"
    )
    wrong = "holds shards of the form"
    assert found["form"] == f"ValueError: {top}/good-arrays: {wrong} arrays, not {form}"
    assert found["mapped form"] == f"ValueError: {top}/good-{form}: {wrong} {form}, not arrays"


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_the_work_is_measured(side):
    rates = scenario(side, "rates")
    assert all(1 < rate < 1e6 for found in rates.values() for rate in found)


# Each framework ---------------------------------------------------------------------------------


def test_workers_end_with_their_loader_and_leave_no_shared_memory():
    found = scenario("pt", "ends")
    assert found == {"interleaved": [2, True], "memory_mapped": [2, True], "shared memory": []}


def test_tensorflow_reads_the_records_and_would_write_the_same_bytes():
    found = scenario("tf", "records")
    paths, labels, _ = list_images(evidence().folder)
    features = ["image/class/label", "image/encoded", "image/row"]
    expected = [
        [row, int(label), path.stat().st_size, features]
        for row, (path, label) in enumerate(zip(paths, labels, strict=True))
    ]
    assert sorted(found["found"]) == expected
    assert all(found["same"])
