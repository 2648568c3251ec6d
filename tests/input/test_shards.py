"""Pipelines over shards: every sample once an epoch, damage found, an epoch taken up again.

The mapped pipelines are tested here, too.
"""

from __future__ import annotations

import functools
import importlib
import re
import shutil
import sys
from itertools import chain

import numpy as np
import pytest
from PIL import Image

from shared.conversion import convert
from shared.epochs import draw
from shared.images import list_images
from shared.photos import make_photos
from shared.shards import open_shards
from tests.input.pipelines import (
    BATCH,
    FORM,
    MEAN,
    SEED,
    SIZE,
    STD,
    assert_ends_with_its_processes,
    levels,
    reference,
    taken,
)

FRAMEWORKS = ("pt", "tf")
LOADERS = {"sequential": "shards", "interleaved": "shards", "memory_mapped": "mapped_arrays"}
IMAGES, SAMPLES = 13, 3  # of all, and of a shard
HIT = 1  # the shard that is damaged
# Pillow rounds after each of two passes; TensorFlow has the places of its taps in float32, 3e-5 of
# a pixel near the end of a row, between neighbours up to 255 apart.
GREY_LEVEL = 1 + 255 * 3e-5
SAYS = {
    "truncated": "is truncated: ",
    "flipped": "is damaged: its SHA-256 is not that of the manifest",
    "missing": "No such file or directory",
}


@pytest.fixture(scope="module")
def form(framework):
    """Of this framework's shards of whole files."""
    return "tar" if framework == "pt" else "tfrecord"


@pytest.fixture(scope="module")
def form_of(form):
    """`form_of(loader)`: of the shards that it reads."""
    return lambda name: "arrays" if name == "memory_mapped" else form


@pytest.fixture(scope="module")
def folder(form, tmp_path_factory):
    """Photos, and beside them shards of them: `good-FORM`, and the same with one damaged."""
    top = tmp_path_factory.mktemp("Scherben 图 ß")
    folder = make_photos(top, images=IMAGES, size=300, seed=0)
    paths, _, _ = list_images(folder)
    for path, mode in ((paths[2], "L"), (paths[5], "CMYK")):
        Image.open(path).convert(mode).save(path, quality=90)
    for kind in (form, "arrays"):
        convert(folder, top / f"good-{kind}", form=kind, samples=SAMPLES, workers=1)
        for damage in SAYS:
            shutil.copytree(top / f"good-{kind}", top / f"{damage}-{kind}")
            path = open_shards(top / f"{damage}-{kind}", kind).shards[HIT].files[0]
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data if damage == "flipped" else data[: len(data) * 2 // 3])
            if damage == "missing":
                path.unlink()
    return folder


@pytest.fixture(scope="module")
def load(impl, framework, folder, form_of):
    """`load(loader, kind, **settings)`: over good shards, or over damaged ones."""

    def make(name, kind="good", **settings):
        module = importlib.import_module(f"{framework}_impl.input.{LOADERS[name]}")
        workers = {} if name == "sequential" else {"workers": 2}
        given = {"batch_size": BATCH, "seed": SEED} | workers | settings
        return getattr(module, f"{name}_loader")(folder.parent / f"{kind}-{form_of(name)}", **given)

    return make


@pytest.fixture(scope="module")
def epochs(load):
    """`epochs(loader)`: its first two."""

    @functools.cache
    def two(name):
        made = load(name)
        return taken(made), taken(made)

    return two


@pytest.fixture(scope="module")
def wanted(folder):
    """`wanted(epoch, size)`: the crop and the label of every row, from Pillow."""
    paths, labels, _ = list_images(folder)

    @functools.cache
    def crops(epoch, size=SIZE):
        numbers = draw(IMAGES, seed=SEED, epoch=epoch).tolist()
        images = [reference(path, drawn, size) for path, drawn in zip(paths, numbers, strict=True)]
        return np.stack(images), labels.tolist()

    return crops


@pytest.fixture(scope="module")
def rows_of(wanted):
    """`rows_of(epoch, number)`: which row each image is, within a grey level and of its label."""

    def rows(epoch, number=0, size=SIZE, mean=MEAN, std=STD):
        (crops, labels), found = wanted(number, size), []
        for image, label in zip(chain(*epoch.images), chain(*epoch.labels), strict=True):
            distances = np.abs(crops - levels(image, mean, std)).max((1, 2, 3))
            found.append(int(np.argmin(distances)))
            assert distances[found[-1]] <= GREY_LEVEL
            assert labels[found[-1]] == label
        return found

    return rows


@pytest.fixture(scope="module")
def lost_rows(folder, form_of):
    """`lost_rows(loader)`: those of the shard that is damaged."""

    def rows(name):
        form = form_of(name)
        return open_shards(folder.parent / f"good-{form}", form).shards[HIT].rows.tolist()

    return rows


# Every sample -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOADERS)
def test_an_epoch_has_every_image_once_with_its_label_and_its_crop(
    framework, epochs, rows_of, name
):
    """So both frameworks have the same multiset, and it is that of the folder's loaders."""
    first, second = (rows_of(epoch, number) for number, epoch in enumerate(epochs(name)))
    assert sorted(first) == sorted(second) == list(range(IMAGES))
    assert first != second
    sizes = [len(labels) for labels in epochs(name)[0].labels]
    if (framework, name) == ("pt", "interleaved"):  # of each of two workers
        assert all(size <= BATCH for size in sizes)
        assert sum(size < BATCH for size in sizes) <= 2
    else:
        assert sizes == [BATCH, BATCH, BATCH, 1]
    if name == "memory_mapped":  # in the order of the folder's loaders
        assert second == np.random.default_rng([SEED, 1]).permutation(IMAGES).tolist()


@pytest.mark.parametrize("name", LOADERS)
def test_images_have_the_size_the_mean_and_the_deviation_that_are_asked_for(load, rows_of, name):
    rows = rows_of(taken(load(name, **FORM)), 0, FORM["image_size"], FORM["mean"], FORM["std"])
    assert sorted(rows) == list(range(IMAGES))


@pytest.mark.parametrize("start", [0, 1, 4, 6])
@pytest.mark.parametrize("name", LOADERS)
def test_an_epoch_taken_up_again_is_exactly_what_was_left_of_it(load, epochs, name, start):
    """In another run, within an epoch, where one ends, and in the second; to the last bit."""
    epoch, left = divmod(start, len(epochs(name)[0].labels))
    assert taken(load(name, start_batch=start)) == epochs(name)[epoch][left:]


def test_in_any_order_there_is_still_every_image_once(load, rows_of):
    rows = rows_of(taken(load("interleaved", deterministic=False)))
    assert sorted(rows) == list(range(IMAGES))


def test_the_next_sample_is_one_of_those_in_the_buffer(folder, form, load, rows_of):
    """Without a buffer the order is that of the shards."""
    settings = {"batch_size": 1}
    plain, *shuffled = (
        rows_of(taken(load("sequential", shuffle_buffer=size, **settings))) for size in (1, 3, 100)
    )
    shards = open_shards(folder.parent / f"good-{form}", form).order(seed=SEED, epoch=0)
    assert plain == [row for shard in shards for row in shard.rows.tolist()]
    for size, order in zip((3, 100), shuffled, strict=True):
        places = [plain.index(row) for row in order]
        assert sorted(places) == list(range(IMAGES)) != places
        assert all(place - when < size for when, place in enumerate(places))  # else not read yet


# Damage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("kind", SAYS)
def test_a_damaged_shard_is_named_or_skipped_and_counted_and_moves_nothing(
    folder, form_of, load, rows_of, lost_rows, kind, name
):
    if name == "interleaved" and kind != "flipped":
        pytest.skip("it opens its shards as the sequential one does")
    good = open_shards(folder.parent / f"good-{form_of(name)}", form_of(name))
    path = folder.parent / f"{kind}-{form_of(name)}" / good.shards[HIT].files[0].name
    message = re.escape(f"{path}: {SAYS[kind]}")
    with pytest.raises(ValueError, match=f"^{message}") as raised:
        list(load(name, kind))
    assert "\n" not in str(raised.value)
    made, lost = load(name, kind, on_error="skip"), lost_rows(name)
    rows = rows_of(taken(made))
    assert sorted(rows + lost) == list(range(IMAGES))
    assert sorted(int(line.rpartition(" ")[2]) for line in made.skipped) == sorted(lost)
    assert all(SAYS[kind] in line for line in made.skipped)


@pytest.mark.parametrize("name", LOADERS)
def test_what_is_skipped_leaves_its_place_empty(load, epochs, lost_rows, name):
    """So that an epoch can be taken up again: the same batches, but smaller."""
    epoch = taken(load(name, "flipped", on_error="skip"))
    sizes = [len(labels) for labels in epoch.labels]
    assert len(sizes) <= len(epochs(name)[0].labels)
    assert sum(sizes) == IMAGES - len(lost_rows(name))
    resumed = taken(load(name, "flipped", on_error="skip", start_batch=2))
    assert 0 < len(resumed.labels) < len(sizes)
    assert resumed == epoch[-len(resumed.labels) :]


# Settings ---------------------------------------------------------------------------------------

AT_LEAST = "batch_size and shuffle_buffer must be 1 at"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_error": "ignore"}, "on_error must be raise or skip, not 'ignore'"),
        ({"batch_size": 0}, AT_LEAST),
        ({"shuffle_buffer": 0}, AT_LEAST),
        ({"start_batch": -1}, AT_LEAST),
        ({"deterministic": False, "start_batch": 1}, "start_batch needs deterministic"),
    ],
)
def test_bad_settings_get_one_clear_line(load, settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        load("interleaved", **settings)


def test_other_folders_get_one_clear_line(impl, folder, form):
    of = {
        name: importlib.import_module(f"{impl.__name__}.input.{name}") for name in LOADERS.values()
    }
    files, mapped = of["shards"].sequential_loader, of["mapped_arrays"].memory_mapped_loader
    top = folder.parent
    for make, place, error, said in (
        (files, top, FileNotFoundError, "holds no manifest.json: make shards with twinbench sha"),
        (files, top / "good-arrays", ValueError, f"holds shards of the form arrays, not {form}"),
        (mapped, top / f"good-{form}", ValueError, f"holds shards of the form {form}, not arrays"),
    ):
        with pytest.raises(error, match=f"^{re.escape(f'{place}: {said}')}"):
            make(place, batch_size=1, seed=0)


def test_the_work_is_measured(impl, folder, form):
    """On half of the shards, and by more cores than there are shards."""
    rates = importlib.import_module(f"{impl.__name__}.kit.input_rates")
    for limit, kind, part, parts in (
        (rates.shards_limit, form, 1, 2),
        (rates.mapped_arrays_limit, "arrays", 1, 2),
        (rates.shards_limit, form, 98, 99),
    ):
        rate = limit(str(folder.parent / f"good-{kind}"), seed=SEED, part=part, parts=parts)
        assert all(1 < rate() < 1e6 for _ in range(2))


# Each framework ---------------------------------------------------------------------------------


@pytest.mark.only("pt")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /dev/shm")
@pytest.mark.parametrize("name", ["interleaved", "memory_mapped"])
def test_pt_workers_end_with_their_loader_and_leave_no_shared_memory(load, name):
    assert_ends_with_its_processes(lambda: load(name))


@pytest.mark.only("tf")
def test_tf_reads_the_records_and_would_write_the_same_bytes(impl, folder, tmp_path):
    import tensorflow as tf

    found = []
    for path in sorted((folder.parent / "good-tfrecord").glob("*.tfrecord")):
        with tf.io.TFRecordWriter(str(tmp_path / "theirs")) as writer:
            for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
                features = tf.train.Example.FromString(record).features.feature
                (data,) = features["image/encoded"].bytes_list.value
                numbers = [
                    features[name].int64_list.value[0]
                    for name in ("image/row", "image/class/label")
                ]
                found.append((*numbers, len(data)))
                assert len(features) == 3
                writer.write(record)
        assert path.read_bytes() == (tmp_path / "theirs").read_bytes()
    paths, labels, _ = list_images(folder)
    sizes = [path.stat().st_size for path in paths]
    assert sorted(found) == list(zip(range(IMAGES), labels.tolist(), sizes, strict=True))
