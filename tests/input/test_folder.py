"""Input pipelines: the same samples, in the same order, with the same pixels, in both frameworks.

Every image is compared with Pillow's. The tuned pipelines are tested here, too.
"""

from __future__ import annotations

import functools
import gc
import importlib
import io
import multiprocessing
import re
from dataclasses import replace
from math import ceil
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import ks_2samp

from bench.harness.plan import Work
from bench.probes import pipelines as probes
from shared.datasets import batch_order
from shared.epochs import DRAWS, TRIES, Epochs, crop_box, draw
from shared.images import list_images
from shared.specs import TASKS
from shared.weights import init_weights
from tests import workers
from tests.input.pipelines import (
    BAD,
    BATCH,
    FORM,
    MEAN,
    RESUMED,
    SEED,
    STD,
    expected,
    levels,
    ordinary_user,
    taken,
)

FRAMEWORKS = ("pt", "tf")
PT = pytest.mark.only("pt")
BATCHES = 4  # of an epoch of 13 images
THREADS = pytest.param("threads", marks=PT)
LOADERS = ("naive", "parallel", "uint8", "tuned", THREADS)
FORMS = [
    *((name, "standard") for name in LOADERS[:-1]),
    *((name, "fast") for name in ("naive", "tuned")),
    *(pytest.param("threads", decoder, marks=PT) for decoder in ("standard", "fast")),
]


def assert_pixels(epoch, wanted, framework="pt", decoder="standard", mean=MEAN, std=STD):
    """Each image is Pillow's within one grey level."""
    beyond = np.abs(levels(np.concatenate(epoch.images), mean, std) - wanted.images) > 1.001
    # What TensorFlow decodes of the crop alone can be interpolated from other chroma at its border.
    assert beyond.mean() <= (0.02 if (framework, decoder) == ("tf", "fast") else 0)


@pytest.fixture(scope="module")
def epochs(load, folders):
    """`epochs(loader)`: its first two."""

    @functools.cache
    def two(name):
        made = load(name, folders.good)
        return taken(made), taken(made)

    return two


# The same samples -------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "decoder"), FORMS)
def test_every_image_is_pillow_s_within_one_grey_level(
    framework, load, folders, epochs, name, decoder
):
    """In its place in the order, with its crop, flip and label; hence the same multiset."""
    usual, wanted = decoder == "standard", expected(folders.good, 0)
    epoch = epochs(name)[0] if usual else taken(load(name, folders.good, decoder=decoder))
    assert epoch.flat == wanted.labels
    assert_pixels(epoch, wanted, framework, decoder)


@pytest.mark.parametrize("name", LOADERS)
def test_images_have_the_size_the_mean_and_the_deviation_that_are_asked_for(load, folders, name):
    wanted = expected(folders.good, 0, size=FORM["image_size"])
    epoch = taken(load(name, folders.good, **FORM))
    assert_pixels(epoch, wanted, mean=FORM["mean"], std=FORM["std"])


@pytest.mark.parametrize("name", LOADERS)
def test_the_next_iteration_is_the_next_epoch_which_can_be_taken_up_again(
    load, folders, epochs, name
):
    """By another loader, with another number of workers, to the last bit."""
    first, second = epochs(name)
    assert second.flat == expected(folders.good, 1).labels
    assert [len(y) for y in second.labels] == [BATCH, BATCH, BATCH, 1]
    assert not any(map(np.array_equal, first.images, second.images))
    workers = {} if name == "naive" else {"workers": 1}
    resumed = taken(load(name, folders.good, start_batch=RESUMED, **workers))
    assert resumed == second[RESUMED % BATCHES :]


# Crops ------------------------------------------------------------------------------------------


@pytest.mark.only("tf")
def test_tf_the_graph_cuts_the_boxes_of_numpy(impl):
    import tensorflow as tf

    from tf_impl.kit.photos import graph_crop_box

    random, graph, centred = np.random.default_rng(0), tf.function(graph_crop_box), 0
    sizes = random.integers(1, 500, (400, 2))
    sizes[:50, 0] = random.integers(1, 12, 50)  # so flat that no try fits
    sizes[50:100, 1] = random.integers(1, 12, 50)
    for size, drawn in zip(sizes, draw(400, seed=3, epoch=1), strict=True):
        box = graph(*tf.constant(size, tf.int32), tf.cast(drawn, tf.float64)).numpy().tolist()
        assert box == list(crop_box(*size.tolist(), drawn.tolist()))
        centred += box[:2] == [(size[0] - box[2]) // 2, (size[1] - box[3]) // 2]
    assert centred > 100  # where no try fits


@PT
@pytest.mark.parametrize("size", [(200, 300), (60, 400)])
def test_pt_crops_have_the_distribution_of_torchvision(impl, size):
    import torch
    from torchvision.transforms import RandomResizedCrop

    torch.manual_seed(0)
    image, ranges = torch.zeros(3, *size), ((0.08, 1.0), (3 / 4, 4 / 3))
    theirs = np.array([RandomResizedCrop.get_params(image, *ranges) for _ in range(3000)])
    ours = np.array([crop_box(*size, each) for each in draw(3000, seed=1, epoch=2).tolist()])
    for side in range(4):
        assert ks_2samp(ours[:, side], theirs[:, side]).pvalue > 0.001, side
    shares = [boxes[:, 2] * boxes[:, 3] / (size[0] * size[1]) for boxes in (ours, theirs)]
    assert ks_2samp(*shares).pvalue > 0.001


def test_half_of_the_images_are_flipped_and_epochs_differ():
    numbers = draw(4000, seed=1, epoch=0)
    assert numbers.shape == (4000, DRAWS)
    assert 0.46 < (numbers[:, -1] < 0.5).mean() < 0.54
    assert 0.08 <= numbers[:, :TRIES].min() < 0.09
    assert 0.99 < numbers[:, :TRIES].max() <= 1
    ratios = np.log(numbers[:, TRIES : 2 * TRIES])
    assert abs(ratios.mean()) < 0.005
    assert np.allclose([ratios.min(), ratios.max()], np.log([3 / 4, 4 / 3]), atol=1e-3)
    assert not np.any(numbers[:, -1] == draw(4000, seed=1, epoch=1)[:, -1])
    assert np.array_equal(numbers, draw(4000, seed=1, epoch=0))


@given(
    height=st.integers(1, 600),
    width=st.integers(1, 600),
    row=st.integers(0, 199),
    epoch=st.integers(0, 3),
)
def test_a_crop_lies_within_its_image(height, width, row, epoch):
    numbers = draw(200, seed=0, epoch=epoch)[row].tolist()
    top, left, high, wide = crop_box(height, width, numbers)
    assert 0 <= top <= top + high <= height
    assert 0 <= left <= left + wide <= width
    assert min(high, wide) > 0


# The order --------------------------------------------------------------------------------------


@given(
    size=st.integers(1, 100),
    batch_size=st.integers(1, 120),
    seed=st.integers(0, 2**32),
    seen=st.integers(0, 300),
)
def test_an_epoch_has_every_row_once_and_goes_on_anywhere(size, batch_size, seed, seen):
    whole, batches = Epochs(size, batch_size=batch_size, seed=seed), ceil(size / batch_size)
    resumed = Epochs(size, batch_size=batch_size, seed=seed, start_batch=seen)
    assert (resumed.epoch, resumed.start) == divmod(seen, batches)
    for _ in range(resumed.epoch):
        next(iter(whole))
    epoch, rest = list(whole), list(resumed)
    assert sorted(np.concatenate([rows for rows, _ in epoch])) == list(range(size))
    for ours, theirs in zip(rest, epoch[seen % batches :], strict=True):
        assert all(map(np.array_equal, ours, theirs))
    assert resumed.epoch == whole.epoch


def test_the_order_is_that_of_all_data_and_numbers_belong_to_the_row():
    rows = [rows.tolist() for rows, _ in Epochs(50, batch_size=8, seed=9).batches(3)]
    assert rows[:-1] == [rows.tolist() for rows in batch_order(50, 8, seed=9, epoch=3)]
    for batch_size in (3, 5):
        for rows, numbers in Epochs(20, batch_size=batch_size, seed=9):
            assert np.array_equal(numbers, draw(20, seed=9, epoch=0)[rows])


# Files that can't be read -----------------------------------------------------------------------


def name_of(line):
    """The name of the file that a line of `skipped` is about."""
    return line.split(": ")[0].rpartition("/")[2]


@pytest.mark.parametrize(("name", "decoder"), FORMS)
def test_what_cannot_be_read_is_counted_and_moves_nothing(framework, load, folders, name, decoder):
    """Its place stays empty: every other image has its own label and its own pixels."""
    with ordinary_user():
        made = load(name, folders.bad, decoder=decoder, on_error="skip")
        epoch = taken(made)
    wanted, skipped = expected(folders.bad, 0), sorted(made.skipped, key=name_of)
    assert epoch.flat == wanted.labels
    assert_pixels(epoch, wanted, framework, decoder)
    assert [name_of(line) for line in skipped] == list(BAD)
    assert all(re.match(f"{re.escape(str(folders.bad))}.*: \\S", line) for line in skipped)
    assert [name_of(line) for line in skipped if "denied" in line] == ["unreadable.jpg"]
    paths, _, _ = list_images(folders.bad)
    batches = [rows for rows, _ in Epochs(len(paths), batch_size=BATCH, seed=SEED)]
    sizes = [sum(paths[row].name not in BAD for row in rows) for rows in batches]
    assert [len(y) for y in epoch.labels] == [size for size in sizes if size]


@pytest.mark.parametrize("name", ["naive", "tuned", THREADS])
def test_the_first_file_that_cannot_be_read_is_named(load, folders, name):
    paths, _, _ = list_images(folders.bad)
    order = [rows[0] for rows, _ in Epochs(len(paths), batch_size=1, seed=SEED)]
    first = next(paths[row] for row in order if paths[row].name in BAD)
    with ordinary_user(), pytest.raises(ValueError, match=re.escape(f"{first}: ")) as raised:
        list(load(name, folders.bad))
    assert "\n" not in str(raised.value)


@PT
@pytest.mark.parametrize("between", [b"", b"\xff\xff", b"\xff\xd0", b"\xff\x00", b"dust"])
@pytest.mark.parametrize("settings", [{}, {"progressive": True}, {"exif": b"\xff" * 9000}])
def test_the_header_of_a_jpeg_tells_its_size_whatever_stands_before_it(
    impl, monkeypatch, between, settings
):
    from pt_impl.kit import photos

    file = io.BytesIO()
    Image.new("RGB", (32, 24), "green").save(file, "JPEG", **settings)
    data = file.getvalue()
    frame = max(data.rfind(b"\xff\xc0"), data.rfind(b"\xff\xc2"))
    data = np.frombuffer(data[:frame] + between + data[frame:], np.uint8)
    monkeypatch.setattr(photos, "MAX_PIXELS", 24 * 32)
    photos.refuse_huge_jpeg(data)
    monkeypatch.setattr(photos, "MAX_PIXELS", 24 * 32 - 1)
    with pytest.raises(ValueError, match="32 x 24 pixels, 767 at most"):
        photos.refuse_huge_jpeg(data)
    photos.refuse_huge_jpeg(data[: len(data) // 20])  # no header: for the decoder to refuse


SIZES = "size and batch_size must be 1 at least and"
IMAGES = "image_size must be 1 at least, mean and std"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decoder": "best"}, "decoder must be standard or fast, not 'best'"),
        ({"on_error": "ignore"}, "on_error must be raise or skip, not 'ignore'"),
        ({"batch_size": 0}, SIZES),
        ({"start_batch": -1}, SIZES),
        ({"image_size": 0}, IMAGES),
        ({"mean": (0.5,)}, IMAGES),
        ({"std": (1.0, 0.0, 1.0)}, IMAGES),
    ],
)
def test_bad_settings_get_one_clear_line(load, folders, settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        load("tuned", folders.good, **settings)


def test_other_folders(load, folders):
    """None, an empty one, and one of one image of one class."""
    with pytest.raises(FileNotFoundError):
        load("naive", folders.good / "nowhere")
    empty = folders.good.parent / "empty"
    with pytest.raises(ValueError, match=f"^{re.escape(str(empty))}: is empty, it needs a sub-"):
        load("tuned", empty)
    assert taken(load("tuned", folders.good.parent / "one class")).labels == [[0]]


# Measuring --------------------------------------------------------------------------------------


def limits(others=()):
    """The processes of a work limit, forks or fresh ones, but for those of loaders before it."""
    gc.collect()
    return [one for one in multiprocessing.active_children() if one not in others]


@pytest.mark.parametrize("decoder", ["standard", "fast"])
def test_the_work_is_measured(impl, folders, decoder):
    rates = importlib.import_module(f"{impl.__name__}.kit.input_rates")
    rate = rates.folder_limit(str(folders.good), seed=SEED, part=1, parts=2, decoder=decoder)
    assert all(1 < rate() < 1e6 for _ in range(2))


@pytest.mark.only("pt", *(["tf"] if workers.campaign() else []))  # whose limit imports it anew
def test_a_pipeline_is_measured_beside_its_limit(impl, load, folders):
    task = TASKS["photos"]
    task = replace(task, dataset=replace(task.dataset, train_size=13))
    weights, good, others = init_weights(task.model, 0), str(folders.good), limits()
    work = Work(task, "tuned", {}, 1, weights, data=good, repetitions=2)
    with mock.patch.object(probes, "usable_threads", return_value=1):
        found = probes.measure(
            *(impl, work, lambda: load("tuned", good, batch_size=1, workers=1)),
            technique="folder",
            source=good,
            decoder="standard",
        )
    assert not limits(others)
    read = found.pop("evidence")["read"]
    figures = {name: figure["value"] for name, figure in found.items()}
    rates, shares, limit = (
        found[name]["samples"] for name in ("samples_per_s", "share_of_limit", "work_limit")
    )
    assert (len(rates), len(limit)) == (2, 3)
    for number, (rate, share) in enumerate(zip(rates, shares, strict=True)):
        assert share == pytest.approx(100 * rate / np.mean(limit[number : number + 2]))
    assert 0 < figures["later_first_batch"] < figures["first_batch"]
    assert 0 < figures["data_stall"] < 100
    assert figures["cpu_per_1000"] > 0
    assert figures["memory"] > 50_000_000  # a framework at least
    assert len(read) == 4  # epochs, and those before the repetitions
    assert {sum(one["samples_a_label"]) for one in read} == {13}
    assert len({tuple(one["samples_a_label"]) for one in read}) == 1
    assert len({one["order_sha256"] for one in read}) > 1  # shuffled anew


def test_an_epoch_that_is_not_whole_is_no_measurement(load, folders):
    made = load("tuned", folders.good, batch_size=1, workers=1)
    with pytest.raises(RuntimeError, match="an epoch had 13 of 14 images"):
        probes.Pipeline(made, images=14).epochs()


@PT  # the same in both frameworks, and TensorFlow takes long to import
def test_a_limit_that_loses_a_process_is_none(impl, folders):
    given, others = (impl.__name__, "folder", str(folders.good)), limits()
    with (
        mock.patch.object(probes, "usable_threads", return_value=1),
        probes.work_limit(*given, decoder="standard") as limit,
    ):
        limit()
        for process in limits(others):
            process.kill()
        with pytest.raises(RuntimeError, match="a process of the work limit ended early"):
            limit()
