"""Input pipelines: the same samples, in the same order, with the same pixels, in both frameworks.

Each framework runs in a process of its own (`folder_worker.py`), which also runs the tuned
pipelines; every image is compared with Pillow's.
"""

from __future__ import annotations

import io
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import ks_2samp

from shared.datasets import batch_order
from shared.epochs import DRAWS, TRIES, Epochs, crop_box, draw
from tests.input import pipelines
from tests.input.pipelines import BAD, BATCH, RESUMED, SEED

BATCHES = 4  # of an epoch of 13 images
FORMS = [  # side, loader and decoder
    (side, name)
    for side in ("pt", "tf")
    for name in (
        *("naive standard", "parallel standard", "uint8 standard", "tuned standard"),
        *("naive fast", "tuned fast", "threads standard", "threads fast"),
    )
    if not (side == "tf" and name.startswith("threads"))
]
LOADERS = [(side, name.split()[0]) for side, name in FORMS if name.endswith("standard")]


@pytest.fixture(scope="module")
def evidence():
    return pipelines.evidence()


def scenario(evidence, side, name):
    return pipelines.scenario(evidence.found, side, name)


def flat(found):
    """All labels of an epoch."""
    return [label for labels in found["labels"] for label in labels]


# The same samples -------------------------------------------------------------------------------


@pytest.mark.parametrize(("side", "name"), FORMS)
def test_every_image_is_pillow_s_within_one_grey_level(evidence, side, name):
    """In its place in the order, with its crop, flip and label; hence the same multiset."""
    first = scenario(evidence, side, "epochs")[name][0]
    wanted = pipelines.expected(evidence.good, epoch=0)
    assert flat(first) == wanted.labels
    difference = np.abs(pipelines.levels(evidence.found[side]["images"][name]) - wanted.images)
    # What the crop alone decodes can be interpolated from other chroma at its border.
    beyond = difference > 1.001
    allowed = 0.02 if (side, name.split()[1]) == ("tf", "fast") else 0
    assert beyond.mean() <= allowed, (difference.max(), beyond.mean())
    assert first["dtypes"] == ["float32", "int64"]


@pytest.mark.parametrize(("side", "name"), LOADERS)
def test_images_have_the_size_the_mean_and_the_deviation_that_are_asked_for(evidence, side, name):
    form = pipelines.FORM
    wanted = pipelines.expected(evidence.good, epoch=0, size=form["image_size"])
    found = evidence.found[side]["images"][f"{name} form"]
    assert np.abs(pipelines.levels(found, form["mean"], form["std"]) - wanted.images).max() < 1.001


@pytest.mark.parametrize(("side", "name"), LOADERS)
def test_the_next_iteration_is_the_next_epoch(evidence, side, name):
    first, second = scenario(evidence, side, "epochs")[f"{name} standard"]
    wanted = pipelines.expected(evidence.good, epoch=1)
    assert flat(second) == wanted.labels
    assert [len(y) for y in second["labels"]] == [BATCH, BATCH, BATCH, 1]
    assert not set(first["digests"]) & set(second["digests"])


@pytest.mark.parametrize(("side", "name"), LOADERS)
def test_an_epoch_taken_up_again_is_exactly_what_was_left_of_it(evidence, side, name):
    """By another loader, with another number of workers, to the last bit."""
    found = scenario(evidence, side, "epochs")
    second, resumed = found[f"{name} standard"][1], found[f"{name} resumed"]
    left = RESUMED % BATCHES
    assert resumed["digests"] == second["digests"][left:]
    assert resumed["labels"] == second["labels"][left:]


# Crops ------------------------------------------------------------------------------------------


def test_the_graph_cuts_the_boxes_of_numpy(evidence):
    found = scenario(evidence, "tf", "boxes")
    assert found["differing"] == []
    assert found["centred"] > 100  # where no try fits


@pytest.mark.parametrize("size", [(200, 300), (60, 400)])
def test_crops_have_the_distribution_of_torchvision(evidence, size):
    theirs = np.array(scenario(evidence, "pt", "torchvision")["{} {}".format(*size)])
    numbers = draw(3000, seed=1, epoch=2).tolist()
    ours = np.array([crop_box(*size, each) for each in numbers])
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


def test_the_order_is_that_of_all_data():
    epochs = Epochs(50, batch_size=8, seed=9)
    rows = [rows.tolist() for rows, _ in epochs.batches(3)]
    assert rows[:-1] == [rows.tolist() for rows in batch_order(50, 8, seed=9, epoch=3)]


def test_numbers_belong_to_the_row():
    for batch_size in (3, 5):
        for rows, numbers in Epochs(20, batch_size=batch_size, seed=9):
            assert np.array_equal(numbers, draw(20, seed=9, epoch=0)[rows])


# Files that can't be read -----------------------------------------------------------------------


def name_of(line):
    """The name of the file that a line of `skipped` is about."""
    return line.split(": ")[0].rpartition("/")[2]


@pytest.mark.parametrize(("side", "form"), FORMS)
def test_what_cannot_be_read_is_counted_and_moves_nothing(evidence, side, form):
    """Its place stays empty: every other image has its own label and its own pixels."""
    found = scenario(evidence, side, "errors")[form]
    wanted = pipelines.expected(evidence.bad, epoch=0)
    assert flat(found) == wanted.labels
    assert sorted(map(name_of, found["skipped"])) == list(BAD)
    assert all(line.startswith(str(evidence.bad)) for line in found["skipped"])
    assert all(line.split(": ", 1)[1].strip() for line in found["skipped"])
    assert ["denied" in line for line in sorted(found["skipped"], key=name_of)] == [
        name == "unreadable.jpg" for name in BAD
    ]
    images = pipelines.levels(evidence.found[side]["images"][f"skip {form}"])
    beyond = np.abs(images - wanted.images) > 1.001
    # As above, for what the crop alone decodes.
    assert beyond.mean() <= (0.02 if (side, form.split()[1]) == ("tf", "fast") else 0)


@pytest.mark.parametrize(("side", "name"), LOADERS)
def test_a_batch_is_smaller_by_what_is_left_out(evidence, side, name):
    found = scenario(evidence, side, "errors")[f"{name} standard"]
    paths, _, _ = pipelines.list_images(evidence.bad)
    sizes = [
        sum(paths[row].name not in BAD for row in rows)
        for rows, _ in Epochs(len(paths), batch_size=BATCH, seed=SEED)
    ]
    assert [len(y) for y in found["labels"]] == [size for size in sizes if size]


@pytest.mark.parametrize(
    ("side", "name"), [each for each in LOADERS if each[1] in ("naive", "tuned", "threads")]
)
def test_the_first_file_that_cannot_be_read_is_named(evidence, side, name):
    raised = scenario(evidence, side, "errors")[f"{name} standard"]["raised"]
    paths, _, _ = pipelines.list_images(evidence.bad)
    order = [rows[0] for rows, _ in Epochs(len(paths), batch_size=1, seed=SEED)]
    first = next(paths[row] for row in order if paths[row].name in BAD)
    assert raised.startswith(f"ValueError: {first}: ")
    assert "\n" not in raised


@pytest.mark.parametrize("between", [b"", b"\xff\xff", b"\xff\xd0", b"\xff\x00", b"dust"])
@pytest.mark.parametrize("settings", [{}, {"progressive": True}, {"exif": b"\xff" * 9000}])
def test_the_header_of_a_jpeg_tells_its_size_whatever_stands_before_it(
    monkeypatch, between, settings
):
    from pt_impl.kit import photos  # no other test here needs a framework in this process

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


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_bad_settings_get_one_clear_line(evidence, side):
    found = scenario(evidence, side, "settings")
    assert found["decoder"] == "ValueError: decoder must be standard or fast, not 'best'"
    assert found["on_error"] == "ValueError: on_error must be raise or skip, not 'ignore'"
    for name in ("batch_size", "start_batch"):
        assert found[name].startswith("ValueError: size and batch_size must be 1 at least and")
    for name in ("image_size", "mean", "std"):
        assert found[name].startswith("ValueError: image_size must be 1 at least, mean and std")
    assert found["no folder"].startswith("FileNotFoundError: ")
    empty = f"ValueError: {evidence.good.parent}/empty: is empty, it needs a sub-folder"
    assert found["empty"].startswith(empty)
    assert found["one class"] == [[0]]


# Measuring --------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_a_pipeline_is_measured_beside_its_limit(evidence, side):
    found = scenario(evidence, side, "measured")
    measured = {name: one for name, one in found["figures"].items() if name != "evidence"}
    figures = {name: figure["value"] for name, figure in measured.items()}
    samples = {name: figure["samples"] for name, figure in measured.items()}
    assert [len(samples[name]) for name in ("samples_per_s", "work_limit")] == [2, 3]
    for rate, share, *limits in zip(
        samples["samples_per_s"],
        samples["share_of_limit"],
        samples["work_limit"],
        samples["work_limit"][1:],
        strict=False,
    ):
        assert share == pytest.approx(100 * rate / np.mean(limits))
    assert 0 < figures["later_first_batch"] < figures["first_batch"]
    assert 0 < figures["data_stall"] < 100
    assert figures["cpu_per_1000"] > 0
    assert figures["memory"] > 50_000_000  # a framework at least
    read = found["figures"]["evidence"]["read"]
    assert len(read) == 4  # epochs, and those before the repetitions
    assert {sum(one["samples_a_label"]) for one in read} == {13}
    assert len({tuple(one["samples_a_label"]) for one in read}) == 1
    assert len({one["order_sha256"] for one in read}) > 1  # shuffled anew


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_an_epoch_that_is_not_whole_is_no_measurement(evidence, side):
    found = scenario(evidence, side, "measured")
    assert found["lost"] == "RuntimeError: an epoch had 13 of 14 images"
    assert found["left"] == 0


def test_a_limit_that_loses_a_process_is_none(evidence):
    found = scenario(evidence, "pt", "measured")
    assert found["ended"].startswith("RuntimeError: a process of the work limit ended early")
