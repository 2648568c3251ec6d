"""In-memory pipelines: the same batches from every loader of both frameworks, caches that hold.

Every image is compared with what NumPy makes of it.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from bench.input.bench_in_memory import probe
from shared.epochs import SHIFT, Epochs, open_arrays, shifts
from tests.input.pipelines import assert_ends_with_its_processes, taken

FRAMEWORKS = ("pt", "tf")
BATCH, SEED, ROWS, BATCHES = 8, 3, 30, 4
SNAPSHOT = pytest.param("snapshot", marks=pytest.mark.only("tf"))
LOADERS = ("naive", "vectorised", "parallel", "memory_cached", "disk_cached", SNAPSHOT)


@functools.cache
def arrays(name):
    """Images, one of them without any deviation, and labels."""
    random = np.random.default_rng(sum(name.encode()))
    x = random.normal(3, 2, (ROWS, 32, 32, 1)).astype(np.float32)
    x[4] = 0.5
    return x, random.integers(0, 10, ROWS)


def save(folder, x, y):
    folder.mkdir(exist_ok=True)
    np.save(folder / "train_x.npy", x)
    np.save(folder / "train_y.npy", y)


@pytest.fixture(scope="module")
def load(impl, framework, tmp_path_factory):
    """`load(loader, data, cache=name, **settings)`; `load.folder` holds data and caches."""
    folder = tmp_path_factory.mktemp("in memory")
    for name in ("data", "other"):
        save(folder / name, *arrays(name))
    module = importlib.import_module(f"{framework}_impl.input.in_memory")

    def make(name, data="data", cache="", **settings):
        if name == "parallel":
            settings = {"workers": 2} | settings
        if name in ("disk_cached", "snapshot"):
            settings["cache"] = str(folder / (cache or name))
        settings = {"batch_size": BATCH, "seed": SEED} | settings
        return getattr(module, f"{name}_loader")(str(folder / data), **settings)

    make.folder, make.module = folder, module
    return make


@functools.cache
def expected(epoch, data="data"):
    """The images and labels of an epoch in their order, in float64."""
    x, y = arrays(data)
    padded = [np.pad(standardised(image), ((SHIFT, SHIFT), (SHIFT, SHIFT), (0, 0))) for image in x]
    images, labels = [], []
    for rows, places in Epochs(ROWS, batch_size=1, seed=SEED, draw=shifts).batches(epoch):
        (row,), ((top, left),) = rows, places
        images.append(padded[row][top : top + 32, left : left + 32])
        labels.append(int(y[row]))
    return np.stack(images), labels


def standardised(image):
    image = image.astype(np.float64)
    return (image - image.mean()) / max(image.std(), image.size**-0.5)


def assert_is(epoch, wanted):
    images, labels = wanted
    assert epoch.flat == labels
    assert np.abs(np.concatenate(epoch.images) - images).max() < 1e-4


@pytest.mark.parametrize("name", LOADERS)
def test_every_loader_gives_the_batches_that_numpy_gives(load, name):
    """In one order, with one shift for each image: so all have the same multiset.

    An epoch that is taken up again is exactly what was left of it.
    """
    made = load(name)
    epochs = [taken(made) for _ in range(3)]
    for number, epoch in enumerate(epochs):
        assert_is(epoch, expected(number))
        assert [len(y) for y in epoch.labels] == [BATCH, BATCH, BATCH, ROWS % BATCH]
    for start in (2, 5, 8):
        number, left = divmod(start, BATCHES)
        assert taken(load(name, start_batch=start)) == epochs[number][left:]


def test_shifts_are_drawn_evenly_and_anew_in_each_epoch():
    places = shifts(10_000, seed=1, epoch=0)
    assert places.shape == (10_000, 2)
    counts = np.array([np.bincount(axis, minlength=2 * SHIFT + 1) for axis in places.T])
    assert counts.shape == (2, 2 * SHIFT + 1)
    assert np.abs(counts - 2_000).max() < 200  # five standard deviations
    assert (places != shifts(10_000, seed=1, epoch=1)).mean() > 0.7
    assert np.array_equal(places, shifts(10_000, seed=1, epoch=0))


# Caches -----------------------------------------------------------------------------------------


@pytest.fixture
def counted(framework, load):
    """Of how many images each call of `standardise` was; in a graph, whenever it runs."""
    real, counts = load.module.standardise, []

    def standardise(x):
        if framework == "pt":
            counts.append(len(x))
            return real(x)
        import tensorflow as tf

        note = tf.py_function(lambda n: counts.append(int(n)), [tf.shape(x)[0]], [])
        with tf.control_dependencies([note] if note is not None else []):
            return real(tf.identity(x))

    with mock.patch.object(load.module, "standardise", standardise):
        yield counts


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("vectorised", 3),
        ("memory_cached", 1),
        pytest.param("snapshot", 1, marks=pytest.mark.only("tf")),
    ],
)
def test_a_cache_saves_the_work_of_later_epochs(load, counted, name, times):
    made = load(name, cache="counted")
    for _ in range(3):
        taken(made)
    assert sum(counted) == times * ROWS


@pytest.mark.parametrize("name", ["disk_cached", SNAPSHOT])
def test_a_cache_on_disk_is_used_again_and_never_for_other_data(load, name):
    """It is written whole, also where an epoch was left while it was."""
    cache = f"{name} again"

    def files():
        found = {path: path.stat() for path in (load.folder / cache).rglob("*")}
        # Those that hold images, of 4 KiB each, and no metadata.
        return {path: at.st_mtime_ns for path, at in found.items() if at.st_size > 100_000}

    next(iter(load(name, cache=cache)))
    assert_is(taken(load(name, cache=cache)), expected(0))
    before = files()
    assert_is(taken(load(name, cache=cache)), expected(0))
    assert files() == before  # not written anew
    assert_is(taken(load(name, "other", cache=cache)), expected(0, "other"))
    assert len(files()) == 2 * len(before) > 0
    if name == "disk_cached":
        assert not list((load.folder / cache).glob(".*"))


def test_pt_what_it_has_no_means_for_is_said():
    framework = SimpleNamespace(__name__="pt_impl")
    with pytest.raises(NotImplementedError, match="does not store a pipeline"):
        probe(framework, SimpleNamespace(settings={"loader": "snapshot"}), None)


# Settings, measuring, processes -----------------------------------------------------------------

IMAGES = np.ones((3, 4, 4, 1), np.float32)


@pytest.mark.parametrize("dtype", ["<i8", ">i8", "uint8", "uint16"])
def test_labels_are_int64_whatever_whole_numbers_the_file_has(tmp_path, dtype):
    save(tmp_path, IMAGES, np.array([3, 1, 200], dtype))
    _, found, _ = open_arrays(tmp_path, 1, 0)
    assert found.dtype == np.int64
    assert found.dtype.isnative
    assert found.tolist() == [3, 1, 200]


NEEDS = "needs float32 images (n, height, width, channels) and n labels, not"


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (IMAGES, ["cat", "dog", "cat"], "needs labels that are whole numbers, not"),
        (IMAGES, [0.0, 1.0, 0.5], "needs labels that are whole numbers, not"),
        (IMAGES, [True, False, True], "needs labels that are whole numbers, not"),
        (IMAGES.astype(np.uint8), [1, 2, 3], f"{NEEDS} uint8 (3, 4, 4, 1) and (3,)"),
        (IMAGES, [1, 2], f"{NEEDS} float32 (3, 4, 4, 1) and (2,)"),
    ],
)
def test_other_arrays_are_refused(tmp_path, x, y, message):
    save(tmp_path, x, np.array(y))
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}: {message}")):
        open_arrays(tmp_path, 1, 0)


@pytest.mark.parametrize("settings", [{"batch_size": 0}, {"start_batch": -1}])
def test_bad_settings_get_one_clear_line(load, settings):
    with pytest.raises(ValueError, match="size and batch_size must be 1 at least and"):
        load("naive", **settings)
    with pytest.raises(FileNotFoundError):
        load("naive", "nowhere")


@pytest.mark.parametrize(
    "given",
    [{"cached": False}, {"cached": True}, {"part": 98, "parts": 99}, {"batch_size": 999_999}],
)
def test_the_work_is_measured(impl, load, given):
    """The best of five: a part is so few samples that any other process halves a rate."""
    limit = importlib.import_module(f"{impl.__name__}.kit.input_rates").in_memory_limit
    settings = {"seed": SEED, "part": 1, "parts": 2, "batch_size": BATCH} | given
    rate = limit(str(load.folder / "data"), **settings)
    assert max(rate() for _ in range(5)) > 1_000


@pytest.mark.only("pt")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /dev/shm")
def test_pt_workers_end_with_their_loader_and_leave_no_shared_memory(load):
    assert_ends_with_its_processes(lambda: load("parallel"))
