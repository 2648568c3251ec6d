"""In-memory pipelines: the same batches from every loader of both frameworks, caches that hold.

Each framework runs in a process of its own (`in_memory_worker.py`); every image is
compared with what NumPy makes of it.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.input.bench_in_memory import probe
from shared.epochs import SHIFT, Epochs, open_arrays, shifts
from tests.input import pipelines
from tests.input.in_memory_worker import BATCH, LOADERS, ONE_SIDED, SEED, STARTS

ROWS = 30
BATCHES = 4
EACH = [(side, name) for side in ("pt", "tf") for name in (*LOADERS, *ONE_SIDED[side])]


@functools.cache
def evidence() -> SimpleNamespace:
    keep = tempfile.TemporaryDirectory()
    top = Path(keep.name)
    random = np.random.default_rng(0)
    arrays = {}
    for name in ("data", "other", "bytes", "short"):
        x = random.normal(3, 2, (ROWS, 32, 32, 1)).astype(np.float32)
        x[4] = 0.5  # no deviation at all
        y = random.integers(0, 10, ROWS)
        arrays[name] = x, y
        x = (x * 9).astype(np.uint8) if name == "bytes" else x
        (top / name).mkdir()
        np.save(top / name / "train_x.npy", x)
        np.save(top / name / "train_y.npy", y[:-1] if name == "short" else y)
    found = pipelines.run_workers("input.in_memory_worker", top, top)
    return SimpleNamespace(keep=keep, arrays=arrays, found=found, top=top)


def scenario(side: str, name: str) -> dict:
    return pipelines.scenario(evidence().found, side, name)


def expected(epoch: int, data: str = "data") -> tuple[np.ndarray, list[int]]:
    """The images and labels of an epoch in their order, in float64."""
    x, y = evidence().arrays[data]
    padded = [np.pad(standardised(image), ((SHIFT, SHIFT), (SHIFT, SHIFT), (0, 0))) for image in x]
    images, labels = [], []
    for rows, places in Epochs(ROWS, batch_size=1, seed=SEED, draw=shifts).batches(epoch):
        (row,), ((top, left),) = rows, places
        images.append(padded[row][top : top + 32, left : left + 32])
        labels.append(int(y[row]))
    return np.stack(images), labels


def standardised(image: np.ndarray) -> np.ndarray:
    image = image.astype(np.float64)
    return (image - image.mean()) / max(image.std(), image.size**-0.5)


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize(("side", "name"), EACH)
def test_every_loader_gives_the_batches_that_numpy_gives(side, name, epoch):
    """In one order, with one shift for each image: so all have the same multiset."""
    found = scenario(side, "epochs")[name][epoch]
    images, labels = expected(epoch)
    assert [label for batch in found["labels"] for label in batch] == labels
    assert [len(y) for y in found["labels"]] == [BATCH, BATCH, BATCH, ROWS % BATCH]
    assert np.abs(evidence().found[side]["images"][f"{name} {epoch}"] - images).max() < 1e-4
    assert found["dtypes"] == ["float32", "int64"]


@pytest.mark.parametrize(("side", "name"), EACH)
def test_an_epoch_taken_up_again_is_exactly_what_was_left_of_it(side, name):
    found = scenario(side, "epochs")
    for start, resumed in zip(STARTS, found[f"{name} resumed"], strict=True):
        epoch, left = divmod(start, BATCHES)
        assert resumed["digests"] == found[name][epoch]["digests"][left:]
        assert resumed["labels"] == found[name][epoch]["labels"][left:]


def test_shifts_are_drawn_evenly_and_anew_in_each_epoch():
    places = shifts(10_000, seed=1, epoch=0)
    assert places.shape == (10_000, 2)
    counts = np.array([np.bincount(axis, minlength=2 * SHIFT + 1) for axis in places.T])
    assert counts.shape == (2, 2 * SHIFT + 1)
    assert np.abs(counts - 2_000).max() < 200  # five standard deviations
    assert (places != shifts(10_000, seed=1, epoch=1)).mean() > 0.7
    assert np.array_equal(places, shifts(10_000, seed=1, epoch=0))


# Caches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_a_cache_saves_the_work_of_later_epochs(side):
    once = dict.fromkeys(("memory_cached", *ONE_SIDED[side]), ROWS)
    assert scenario(side, "work") == {"vectorised": 3 * ROWS} | once


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_a_cache_on_disk_is_used_again_and_never_for_other_data(side):
    found = scenario(side, "caches")
    assert found["again"] == found["before"]  # not written anew
    assert found["digests"] == scenario(side, "epochs")["disk_cached"][0]["digests"]
    assert len(found["after"]) == 2 * len(found["before"]) > 0
    images, _ = expected(0, "other")
    assert np.abs(evidence().found[side]["images"]["other"] - images).max() < 1e-4


def test_tf_a_snapshot_is_used_again_and_never_for_other_data():
    found = scenario("tf", "snapshots")
    whole = scenario("tf", "epochs")["snapshot"][0]["digests"]
    assert found["again"] == found["before"]  # not written anew
    assert found["digests"] == found["after a cut"] == whole
    assert len(found["after"]) == 2 * len(found["before"]) > 0
    images, _ = expected(0, "other")
    assert np.abs(evidence().found["tf"]["images"]["other snapshot"] - images).max() < 1e-4


def test_pt_what_it_has_no_means_for_is_said():
    framework = SimpleNamespace(__name__="pt_impl")
    with pytest.raises(NotImplementedError, match="stores nothing that a pipeline makes"):
        probe(framework, SimpleNamespace(settings={"loader": "snapshot"}), None)


def test_a_cache_on_disk_is_written_whole():
    assert not [name for name in scenario("pt", "caches")["after"] if name.startswith(".")]


# Settings, measuring, processes -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["<i8", ">i8", "uint8", "uint16"])
def test_labels_are_int64_whatever_whole_numbers_the_file_has(tmp_path, dtype):
    labels(tmp_path, np.array([3, 1, 200], dtype))
    _, found, _ = open_arrays(tmp_path, 1, 0)
    assert found.dtype == np.int64
    assert found.dtype.isnative
    assert found.tolist() == [3, 1, 200]


@pytest.mark.parametrize("y", [["cat", "dog", "cat"], [0.0, 1.0, 0.5], [True, False, True]])
def test_labels_that_are_no_whole_numbers_are_refused(tmp_path, y):
    labels(tmp_path, np.array(y))
    with pytest.raises(ValueError, match="needs labels that are whole numbers, not"):
        open_arrays(tmp_path, 1, 0)


def labels(folder: Path, y: np.ndarray) -> None:
    np.save(folder / "train_x.npy", np.ones((len(y), 4, 4, 1), np.float32))
    np.save(folder / "train_y.npy", y)


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_bad_settings_get_one_clear_line(side):
    found = scenario(side, "settings")
    for name in ("batch_size", "start_batch"):
        assert found[name].startswith("ValueError: size and batch_size must be 1 at least and")
    assert found["no folder"].startswith("FileNotFoundError: ")
    needs = "needs float32 images (n, height, width, channels) and n labels, not"
    top = evidence().top
    assert found["bytes"] == f"ValueError: {top}/bytes: {needs} uint8 (30, 32, 32, 1) and (30,)"
    assert found["short"] == f"ValueError: {top}/short: {needs} float32 (30, 32, 32, 1) and (29,)"


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_the_work_is_measured(side):
    assert all(rate > 1_000 for rate in scenario(side, "rates").values())


def test_workers_end_with_their_loader_and_leave_no_shared_memory():
    assert scenario("pt", "ends") == {"ended": [2, True], "memory": []}
