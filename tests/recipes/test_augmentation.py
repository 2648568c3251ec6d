"""Images change as SciPy changes them, draws keep their ranges, labels are shared by area."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import ndimage, special, stats

from tests import workers

MODES = {"zero": "grid-constant", "nearest": "nearest", "reflect": "reflect"}
CASES = (
    "flips",
    "rotation",
    "zoom",
    "shift",
    "geometry",
    "geometry nearest",
    "geometry reflect",
    "brightness",
    "contrast",
    "saturation",
    "everything",
)
RANGES = {  # of `FULL` in the scenarios
    "angle": (-30, 30),
    "zoom": (0.8, 1.2),
    "shift": (-0.1, 0.1),
    "brightness": (-0.3, 0.3),
    "contrast": (0.6, 1.4),
    "saturation": (0.5, 1.5),
}


def by_scipy(image, given, border):
    """One image, HWC, changed step by step in NumPy and SciPy, in float64."""
    image = image.astype(float)
    if given.get("flip_horizontal"):
        image = image[:, ::-1]
    if given.get("flip_vertical"):
        image = image[::-1]
    if given.keys() & {"angle", "zoom", "shift"}:
        angle, zoom = math.radians(given.get("angle", 0.0)), given.get("zoom", 1.0)
        shift = np.array(given.get("shift", (0.0, 0.0))) * image.shape[:2]
        cos, sin = math.cos(angle) / zoom, math.sin(angle) / zoom
        matrix = np.array([[cos, sin], [-sin, cos]])
        middle = (np.array(image.shape[:2]) - 1) / 2
        offset = middle - matrix @ (middle + shift)
        channels = [
            ndimage.affine_transform(channel, matrix, offset, order=1, mode=MODES[border])
            for channel in np.moveaxis(image, -1, 0)
        ]
        image = np.stack(channels, -1)
    if "saturation" in given:
        grey = image @ np.array([0.299, 0.587, 0.114])
        image = grey[..., None] + (image - grey[..., None]) * given["saturation"]
    if "contrast" in given:
        image = image.mean() + (image - image.mean()) * given["contrast"]
    return image + given.get("brightness", 0.0)


@pytest.mark.parametrize("case", CASES)
def test_images_change_as_numpy_and_scipy_change_them(every, case):
    found = every["augmentation transforms"]
    x, case = np.array(found["x"], np.float32), found["cases"][case]
    assert np.abs(np.array(case["out"]) - x).max() > 0.1
    for number, out in enumerate(case["out"]):
        given = {name: values[number] for name, values in case["given"].items()}
        assert np.abs(np.array(out) - by_scipy(x[number], given, case["border"])).max() < 2e-5


def test_a_positive_angle_turns_counter_clockwise():
    """Of SciPy's matrix in this file: that of `np.rot90`."""
    image = np.arange(49.0).reshape(7, 7, 1)
    turned = by_scipy(image, {"angle": 90.0}, "zero")
    assert np.allclose(turned[1:-1, 1:-1], np.rot90(image)[1:-1, 1:-1])


def test_what_is_neutral_changes_no_bit(every):
    found = every["augmentation neutral"]
    assert all(found.values()), found


def test_other_layouts_and_dtypes_give_the_same_images(every):
    found = every["augmentation layouts"]
    assert found["apart"] < 2e-5
    assert found["layout kept"]
    assert found["half kept"]
    assert 0 < found["half apart"] < 0.1  # values up to 8 in bfloat16
    assert found["of a large sum"] == 200  # 1024 such values are more than float16 can hold


def test_draws_fill_their_ranges(every):
    found = every["augmentation draws"]
    for name, (low, high) in RANGES.items():
        edge = 0.01 * (high - low)
        assert low - 1e-6 <= found["low"][name] < low + edge
        assert high - edge < found["high"][name] <= high + 1e-6
    assert found["mean"]["flip_horizontal"] == pytest.approx(0.5, abs=0.04)  # five deviations
    assert found["mean"]["flip_vertical"] == pytest.approx(0.25, abs=0.035)
    assert abs(found["correlation"]) < 0.08


def test_seeds_repeat_and_a_saved_state_goes_on(every):
    found = every["augmentation draws"]
    assert found["repeats"]
    assert found["resumed"]
    assert not found["other seed"]
    assert found["without rotation"]


def test_samples_are_mixed_as_numpy_mixes_them(every):
    found = every["augmentation mixes"]
    x, partner, share = (np.array(found[name]) for name in ("x", "partner", "share"))
    whole = share[:, None, None, None]
    assert np.allclose(found["blended"], whole * x + (1 - whole) * x[partner], atol=1e-6)
    pasted = x.copy()
    for number, (top, bottom, left, right) in enumerate(found["box"]):
        box = number, slice(top, bottom), slice(left, right)
        pasted[box] = x[(partner[number], *box[1:])]
    assert np.array_equal(found["pasted"], pasted)
    y = np.array(found["y"])
    for labels in (found["labels"], found["pasted labels"]):
        assert np.array_equal(labels[0], y)
        assert np.array_equal(labels[1], y[partner])
        assert np.allclose(labels[2], share)


def test_shares_are_of_the_beta_distribution(every):
    found = every["augmentation mixes"]
    for alpha in ("0.5", "1"):
        law = stats.beta(float(alpha), float(alpha))
        assert stats.kstest(found["shares"][alpha], law.cdf).pvalue > 1e-4
    shares = np.array(found["shares"]["0.01"])  # nearly all are 0 or 1 in float32
    assert ((shares >= 0) & (shares <= 1)).all()
    assert shares.mean() == pytest.approx(0.5, abs=0.05)
    assert sorted(found["partners"]) == list(range(3000))
    assert found["partners"] != list(range(3000))
    assert found["repeats"]
    assert not found["other seed"]


def test_shares_of_labels_are_shares_of_areas(every):
    cut = every["augmentation mixes"]["cut"]
    top, bottom, left, right = np.array(cut["box"]).T
    for edges in ([top * 0, top, bottom, top * 0 + 9], [left * 0, left, right, left * 0 + 12]):
        assert (np.diff(edges, axis=0) >= 0).all()
    area = (bottom - top) * (right - left) / (9 * 12)
    assert np.allclose(cut["share"], 1 - area, atol=1e-6)
    assert area.max() > 0.6
    # Of uniform areas about any pixel, a quarter on average is within the image: 0.255 by NumPy.
    assert area.mean() == pytest.approx(0.255, abs=0.02)


def test_the_loss_is_exactly_that_of_mixed_distributions(every):
    found = every["augmentation loss"]
    logits = np.array(found["logits"], float)
    own, other, share = (np.array(part) for part in found["labels"])
    soft = share[:, None] * np.eye(4)[own] + (1 - share[:, None]) * np.eye(4)[other]
    assert np.allclose(found["soft"], soft, atol=1e-6)
    many = np.array(found["soft of many"])  # as many labels of each sample as there are samples
    assert np.allclose(many, np.tile(soft[:, None], (1, len(soft), 1)), atol=1e-6)
    wanted = -(soft * special.log_softmax(logits, 1)).sum(1).mean()
    assert found["value"] == pytest.approx(wanted, rel=1e-6)
    gradient = (special.softmax(logits, 1) - soft) / len(logits)
    assert np.allclose(found["gradient"], gradient, atol=1e-6)
    rows = np.arange(len(logits))
    plain = -special.log_softmax(logits, 1)[rows, found["plain labels"]].mean()
    assert found["plain"] == pytest.approx(plain, rel=1e-6)


def test_the_pipeline_draws_anew_for_each_batch_and_epoch_and_repeats_by_seed(every):
    found = every["augmentation host"]
    assert found["batches"] == 8
    assert found["distinct"] == 16
    assert found["repeats"]
    assert not found["other seed"]
    assert found["resumed"]
    assert found["mixed"]


@pytest.mark.parametrize("case", ["with workers", "with workers that persist", "one sample"])
def test_workers_of_a_loader_change_nothing(evidence, case):
    """Every batch is distinct, above, and the same without workers and with two."""
    assert evidence["pt"]["augmentation host"][case]


def test_the_hosts_loader_has_the_batches_of_the_device(every):
    assert every["augmentation host_loader"] == {
        "equal": True,
        "batches": [2, 2],
        "another order": True,
        "wrapped": 1,
    }


def test_the_step_is_given_augmented_batches(every):
    found = every["augmentation device"]
    assert found["as augmented"] < 1e-5
    assert found["differ"]
    assert 2 <= sum(found["cut"]) <= 18  # of twenty, mixup and cutmix in turn by chance


@pytest.mark.parametrize("framework", workers.keras())
def test_the_step_stays_one_graph(evidence, framework):
    assert evidence[framework]["augmentation device"]["calls of the step"] == 1


def test_tf_a_dataset_has_elements_as_fit_takes_them(evidence):
    found = evidence["tf"]["augmentation structures"]
    assert found["weights"] == list(range(8))
    assert found["same images"]
    assert found["named"]
    assert found["partners"] == found["unnamed"]
    said = found["said"]
    assert len(said) == 5
    assert not any("\n" in line for line in said.values())
    assert said["weights of mixed"].startswith("a sample that is mixed of two has no weight")
    assert said["x alone"].startswith("elements must be (x, y) or (x, y, sample_weight), not ")
    assert said["dict"].startswith("x must be one tensor of images, not {'image'")
    assert said["integers"].startswith("x must be float and NHWC, not uint8")


def test_bad_settings_and_input_are_refused(every):
    found = every["augmentation refusals"]
    assert all(found.values()), found
