"""Images change as SciPy changes them, draws keep their ranges, labels are shared by area."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from scipy import ndimage, special, stats

from tests import workers

FRAMEWORKS = ("pt", *workers.keras())
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf", "tf_keras")
BATCH, HEIGHT, WIDTH = 6, 9, 12
MODES = {"zero": "grid-constant", "nearest": "nearest", "reflect": "reflect"}
FULL = {
    "flip_horizontal": 0.5,
    "flip_vertical": 0.25,
    "rotation": 30.0,
    "zoom": 0.2,
    "shift": 0.1,
    "brightness": 0.3,
    "contrast": 0.4,
    "saturation": 0.5,
}
RANGES = {
    "angle": (-30, 30),
    "zoom": (0.8, 1.2),
    "shift": (-0.1, 0.1),
    "brightness": (-0.3, 0.3),
    "contrast": (0.6, 1.4),
    "saturation": (0.5, 1.5),
}


def images(count=BATCH, channels=3):
    shape = count, HEIGHT, WIDTH, channels
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


X, Y = images(), np.random.default_rng(6).integers(0, 4, BATCH)
DRAWS = np.random.default_rng(7)
FLIPS = {
    "flip_horizontal": np.arange(BATCH) % 2 == 0,
    "flip_vertical": np.arange(BATCH) % 3 == 0,
}
GEOMETRY = {
    "angle": DRAWS.uniform(-180, 180, BATCH).astype(np.float32),
    "zoom": DRAWS.uniform(0.5, 2, BATCH).astype(np.float32),
    "shift": DRAWS.uniform(-0.3, 0.3, (BATCH, 2)).astype(np.float32),
}
COLOUR = {
    "brightness": DRAWS.uniform(-1, 1, BATCH).astype(np.float32),
    "contrast": DRAWS.uniform(0, 2, BATCH).astype(np.float32),
    "saturation": DRAWS.uniform(0, 2, BATCH).astype(np.float32),
}
PARTNER = np.array([3, 2, 5, 0, 4, 1])


@pytest.fixture
def x(models):
    return models.image(X)


@pytest.fixture
def y(models):
    return models.tensor(Y)


@pytest.fixture
def parameters(technique, models):
    """`parameters(given)`: as the framework's tensors."""
    return lambda given: technique.Parameters(**{n: models.tensor(v) for n, v in given.items()})


def same(one, other):
    return all(map(np.array_equal, map(np.array, one), map(np.array, other)))


# Images ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("given", "border"),
    [
        (FLIPS, "zero"),
        *(({name: value}, "zero") for name, value in (GEOMETRY | COLOUR).items()),
        *((FLIPS | GEOMETRY, border) for border in MODES),
        (FLIPS | GEOMETRY | COLOUR, "reflect"),
    ],
)
def test_images_change_as_numpy_and_scipy_change_them(
    technique, models, x, parameters, given, border
):
    made = models.back(technique.transform(x, parameters(given), border=border))
    assert np.abs(made - X).max() > 0.1
    for number, image in enumerate(made):
        of_one = {name: values[number] for name, values in given.items()}
        assert np.abs(image - by_scipy(X[number], of_one, border)).max() < 2e-5


def test_a_positive_angle_turns_counter_clockwise():
    """Of SciPy's matrix in this file: that of `np.rot90`."""
    image = np.arange(49.0).reshape(7, 7, 1)
    turned = by_scipy(image, {"angle": 90.0}, "zero")
    assert np.allclose(turned[1:-1, 1:-1], np.rot90(image)[1:-1, 1:-1])


def test_what_is_neutral_changes_no_bit(technique, models, x, y, parameters):
    drawn = technique.draw(technique.Policy(), x, models.generator(0))
    assert all(part is None for part in drawn)
    assert technique.transform(x, drawn) is x
    assert technique.augment(technique.Policy(), x, y, models.generator(0))[0] is x
    angles = np.array([0.0, 0.0, 20.0] * 2, np.float32)
    moved = models.back(technique.transform(x, parameters({"angle": angles}), border="zero"))
    assert np.array_equal(moved[0], X[0])
    assert not np.array_equal(moved[2], X[2])
    for kind in ("mixup", "cutmix"):
        mix = getattr(technique, f"draw_{kind}")(x, models.generator(0), alpha=0.0)
        mixed, labels = getattr(technique, kind)(x, y, mix)
        assert np.array_equal(models.back(mixed), X)
        assert np.all(np.array(labels.share) == 1)


def test_other_layouts_and_dtypes_give_the_same_images(technique, models, x, parameters):
    given = parameters(FLIPS | GEOMETRY | COLOUR)
    wanted = models.back(technique.transform(x, given))
    made = models.in_another_layout(x, lambda images: technique.transform(images, given))
    assert np.abs(models.back(made) - wanted).max() < 2e-5
    half = technique.transform(models.cast(x, "bfloat16"), given)
    assert "bfloat16" in str(half.dtype)
    assert 0 < np.abs(models.back(half) - wanted).max() < 0.1  # values up to 8
    # 1024 such values are more than float16 can hold.
    full = models.cast(models.image(np.full((1, 32, 32, 1), 200, np.float32)), "float16")
    contrast = technique.transform(full, parameters({"contrast": np.array([1.5], np.float32)}))
    assert (models.back(contrast) == 200).all()


# Draws -------------------------------------------------------------------------------------------


def test_draws_fill_their_ranges_and_are_repeated_by_their_seed(technique, models):
    x, policy = models.image(images(4000, 1)), technique.Policy(**FULL)
    drawn = technique.draw(policy, x, models.generator(3))
    found = {name: np.array(value) for name, value in drawn._asdict().items()}
    for name, (low, high) in RANGES.items():
        edge = 0.01 * (high - low)
        assert low - 1e-6 <= found[name].min() < low + edge
        assert high - edge < found[name].max() <= high + 1e-6
    assert found["flip_horizontal"].mean() == pytest.approx(0.5, abs=0.04)  # five deviations
    assert found["flip_vertical"].mean() == pytest.approx(0.25, abs=0.035)
    assert abs(np.corrcoef(found["angle"], found["zoom"])[0, 1]) < 0.08
    assert same(drawn, technique.draw(policy, x, models.generator(3)))
    assert not same(drawn, technique.draw(policy, x, models.generator(4)))
    without = technique.Policy(**FULL | {"rotation": 0.0})
    rest = technique.draw(without, x, models.generator(3))
    assert rest.angle is None
    assert same(rest[3:], drawn[3:])


def test_a_saved_state_of_random_numbers_goes_on(technique, models, x, tmp_path):
    one, other, policy = models.generator(3), models.generator(9), technique.Policy(**FULL)
    technique.draw(policy, x, one)
    models.copy_state(one, other, tmp_path)
    assert same(technique.draw(policy, x, one), technique.draw(policy, x, other))


def test_samples_are_mixed_as_numpy_mixes_them(technique, models, x, y):
    share = np.linspace(0, 1, BATCH).astype(np.float32)
    rows = [[0, 4, 0, 6], [2, 9, 3, 12], [0, 0, 0, 0], [0, 9, 0, 12], [8, 9, 11, 12], [1, 2, 0, 12]]
    mix = technique.Mix(*map(models.tensor, (PARTNER, share, np.array(rows))))
    blended, blended_labels = technique.mixup(x, y, mix)
    whole = share[:, None, None, None]
    assert np.allclose(models.back(blended), whole * X + (1 - whole) * X[PARTNER], atol=1e-6)
    pasted, pasted_labels = technique.cutmix(x, y, mix)
    wanted = X.copy()
    for number, (top, bottom, left, right) in enumerate(rows):
        box = slice(top, bottom), slice(left, right)
        wanted[(number, *box)] = X[(PARTNER[number], *box)]
    assert np.array_equal(models.back(pasted), wanted)
    for labels in (blended_labels, pasted_labels):
        assert same(labels, (Y, Y[PARTNER], share))


def test_shares_are_of_the_beta_distribution(technique, models):
    x = models.image(images(3000, 1))
    for alpha in (0.5, 1.0):
        mix = technique.draw_mixup(x, models.generator(1), alpha=alpha)
        law = stats.beta(alpha, alpha)
        assert stats.kstest(np.array(mix.share), law.cdf).pvalue > 1e-4
    partners = np.array(mix.partner).tolist()
    assert sorted(partners) == list(range(3000)) != partners
    mix = technique.draw_mixup(x, models.generator(1), alpha=0.01)
    shares = np.array(mix.share)  # nearly all are 0 or 1 in float32
    assert ((shares >= 0) & (shares <= 1)).all()
    assert shares.mean() == pytest.approx(0.5, abs=0.05)


def test_shares_of_labels_are_shares_of_areas(technique, models):
    x = models.image(images(3000, 1))
    cut, again, other = (
        technique.draw_cutmix(x, models.generator(seed), alpha=1.0) for seed in (1, 1, 2)
    )
    assert same(cut, again)
    assert not same(cut, other)
    top, bottom, left, right = np.array(cut.box).T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert ((top <= bottom) & (bottom <= HEIGHT) & (left <= right) & (right <= WIDTH)).all()
    area = (bottom - top) * (right - left) / (HEIGHT * WIDTH)
    assert np.allclose(np.array(cut.share), 1 - area, atol=1e-6)
    assert area.max() > 0.6
    # Of uniform areas about any pixel, a quarter on average is within the image: 0.255 by NumPy.
    assert area.mean() == pytest.approx(0.255, abs=0.02)


def test_the_loss_is_exactly_that_of_mixed_distributions(technique, models, x, y):
    logits = np.random.default_rng(8).normal(size=(BATCH, 4)).astype(np.float32) * 5
    share = np.linspace(0.1, 0.9, BATCH).astype(np.float32)
    mix = technique.Mix(models.tensor(PARTNER), models.tensor(share), None)
    _, mixed = technique.mixup(x, y, mix)
    soft = share[:, None] * np.eye(4)[Y] + (1 - share[:, None]) * np.eye(4)[Y[PARTNER]]
    assert np.allclose(technique.soft_labels(mixed, num_classes=4), soft, atol=1e-6)
    # As many labels of each sample as there are samples.
    _, many = technique.mixup(x, models.tensor(np.tile(Y[:, None], BATCH)), mix)
    wanted = np.tile(soft[:, None], (1, BATCH, 1))
    assert np.allclose(technique.soft_labels(many, num_classes=4), wanted, atol=1e-6)
    loss = technique.make_mixed_loss(models.sample_cross_entropy)
    value, gradient = models.gradient_at(lambda z: loss(z, mixed), logits)
    log = special.log_softmax(logits.astype(float), 1)
    assert value == pytest.approx(-(soft * log).sum(1).mean(), rel=1e-6)
    assert np.allclose(gradient, (np.exp(log) - soft) / BATCH, atol=1e-6)
    plain = float(loss(models.tensor(logits), y))
    assert plain == pytest.approx(-log[np.arange(BATCH), Y].mean(), rel=1e-6)


# Pipelines and steps -----------------------------------------------------------------------------

MANY, LABELS = images(32), np.random.default_rng(6).integers(0, 4, 32)


def epochs(models, technique, policy, seed=1):
    """The batches of two epochs, in NumPy."""
    return in_numpy(
        models, models.epochs_of(technique, (np.ones_like(MANY), LABELS), policy, seed, 2)
    )


def in_numpy(models, pipeline):
    return np.array([[models.back(x) for x, _ in epoch] for epoch in pipeline])


def test_the_pipeline_draws_anew_for_each_batch_and_epoch_and_repeats_by_seed(
    technique, models, tmp_path
):
    policy = technique.Policy(rotation=30, brightness=0.5)
    alone = epochs(models, technique, policy)
    assert alone.shape[:2] == (2, 8)
    assert len({batch.tobytes() for epoch in alone for batch in epoch}) == 16
    assert np.array_equal(alone, epochs(models, technique, policy))
    assert not np.array_equal(alone, epochs(models, technique, policy, seed=2))
    rest = models.resumed(technique, (np.ones_like(MANY), LABELS), policy, tmp_path)
    assert np.array_equal(alone[1, 3:], [models.back(x) for x in rest])


@PT
@pytest.mark.parametrize("persistent", [False, True])
def test_pt_workers_of_a_loader_change_nothing(technique, models, persistent):
    """Every batch is distinct, above, and the same without workers and with two."""
    policy = technique.Policy(rotation=30, brightness=0.5)
    settings = {"num_workers": 2, "persistent_workers": persistent}
    data = np.ones_like(MANY), LABELS
    with_workers = models.loaded(technique, data, policy, 1, 2, **settings)
    assert np.array_equal(epochs(models, technique, policy), in_numpy(models, with_workers))
    dataset = technique.augmented_dataset(models.pairs(MANY, LABELS), policy)
    assert dataset[0][0].shape == (3, HEIGHT, WIDTH)
    assert len(dataset) == 32


def test_the_pipeline_mixes_a_batch_s_own_images_as_its_labels_say(technique, models):
    policy = technique.Policy(mixup=1.0)
    (epoch,) = models.epochs_of(technique, (MANY, LABELS), policy, 1, 1)
    for number, (made, labels) in enumerate(epoch):
        assert isinstance(labels, technique.MixedLabels)
        originals, share = MANY[4 * number :][:4], np.array(labels.share)
        for image, original, part in zip(models.back(made), originals, share, strict=True):
            if part < 0.9:
                partner = (image - part * original) / (1 - part)
                assert min(np.abs(partner - other).max() for other in originals) < 1e-4


def test_the_hosts_loader_has_the_batches_of_the_device(kit, models):
    x, y, wrapped = images(20), np.arange(20), []
    settings = {"batch_size": 8, "seed": 3}
    loader = kit.data.host_loader(x, y, lambda data: wrapped.append(data) or data, **settings)
    whole, orders = kit.data.to_device(x, y), []
    for epoch in (0, 1):
        on_host = [(models.back(a), np.array(b)) for a, b in loader]
        on_device = kit.data.epoch_batches(*whole, epoch=epoch, **settings)
        for (a, b), (c, d) in zip(on_host, on_device, strict=True):
            assert np.array_equal(a, models.back(c))
            assert np.array_equal(b, np.array(d))
        orders.append([b.tolist() for _, b in on_host])
    assert [len(order) for order in orders] == [2, 2]
    assert orders[0] != orders[1]
    assert len(wrapped) == 1


def test_the_step_is_given_augmented_batches(technique, models, framework, x, y):
    """It stays one graph."""
    seen = []

    def step(x, y):
        seen.append(1)
        return x

    policy, random = technique.Policy(rotation=30, mixup=1.0), models.generator(1)
    augmenting = technique.make_augmenting_step(step, policy, models.generator(1))
    made = [models.back(augmenting(x, y)) for _ in range(3)]
    for one in made:
        wanted = models.back(technique.augment(policy, x, y, random)[0])
        assert np.abs(one - wanted).max() < 1e-5
    assert not np.array_equal(made[0], made[1])
    assert len(seen) == (3 if framework == "pt" else 1)
    both = technique.Policy(mixup=1.0, cutmix=1.0)
    augmenting = technique.make_augmenting_step(step, both, models.generator(1))
    # A cut batch has pixels of the originals alone: of twenty, both in turn by chance.
    cut = sum(bool(np.isin(models.back(augmenting(x, y)), X).all()) for _ in range(20))
    assert 2 <= cut <= 18


@TF
def test_tf_a_dataset_has_elements_as_fit_takes_them(technique, models):
    """With weights, and with labels in a dict."""
    flips, mixes = technique.Policy(flip_horizontal=0.5), technique.Policy(mixup=0.5)
    x, y, weights = MANY[:8], LABELS[:8], np.arange(8.0)
    weighted = models.augmented(technique, flips, x, y, weights)
    assert np.concatenate([batch[2] for batch in weighted]).tolist() == list(range(8))
    for one, other in zip(weighted, models.augmented(technique, flips, x, y), strict=True):
        assert np.array_equal(one[0], other[0])
    named = models.augmented(technique, mixes, x, {"a": y, "b": -y})
    unnamed = models.augmented(technique, mixes, x, y)
    for (_, mixed), (_, plain) in zip(named, unnamed, strict=True):
        assert np.array_equal(mixed.partners["a"], plain.partners)
        for part in (mixed.labels, mixed.partners):
            assert np.array_equal(part["a"], -part["b"])


# Bad input ---------------------------------------------------------------------------------------

INTEGERS = X.astype(np.int64)


def mix(t, m, x=X, alpha=1.0):
    return t.draw_mixup(m.image(x), m.generator(0), alpha=alpha)


def averaged_loss(t, m):
    _, mixed = t.mixup(m.image(X), m.tensor(Y), mix(t, m))
    t.make_mixed_loss(lambda outputs, labels: m.tensor(np.float32(1)))(m.image(X), mixed)


def saturate_grey(t, m):
    grey, saturation = m.image(images(2, 1)), m.tensor(np.ones(2, np.float32))
    t.transform(grey, t.Parameters(saturation=saturation))


REFUSALS = [
    (lambda t, m: t.transform(m.image(INTEGERS), t.Parameters()), "int64"),
    (lambda t, m: t.mixup(m.image(INTEGERS), m.tensor(Y), mix(t, m)), "int64"),
    (lambda t, m: t.transform(m.image(X)[0], t.Parameters()), "must be"),
    (saturate_grey, "channel"),
    (lambda t, m: t.transform(m.image(X), t.Parameters(), border="mirror"), "mirror"),
    (lambda t, m: t.Policy(border="mirror"), "mirror"),
    (lambda t, m: t.Policy(flip_horizontal=1.5), "1.5"),
    (lambda t, m: t.Policy(rotation=-1.0), "-1.0"),
    (lambda t, m: t.Policy(shift=float("nan")), "nan"),
    (lambda t, m: t.Policy(zoom=1.0), "zoom"),
    (lambda t, m: mix(t, m, alpha=-1.0), "alpha"),
    (lambda t, m: t.draw_cutmix(m.image(X)[0], m.generator(0), alpha=1.0), "must be"),
    (averaged_loss, "sample"),
]
STRUCTURES = [
    ("mixup", (X, Y, Y * 1.0), "a sample that is mixed of two has no weight"),
    ("flip_horizontal", (X,), "elements must be (x, y) or (x, y, sample_weight), not "),
    ("flip_horizontal", ({"image": X}, Y), "x must be one tensor of images, not {'image'"),
    ("flip_horizontal", (X.astype(np.uint8), Y), "x must be float and NHWC, not uint8"),
    ("flip_horizontal", (X[0], Y[:HEIGHT].repeat(2)[:HEIGHT]), "x must be float and NHWC"),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_a_refusal_says_why(technique, models, call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(technique, models)


@TF
@pytest.mark.parametrize(("setting", "parts", "message"), STRUCTURES)
def test_tf_a_dataset_of_another_structure_is_refused(technique, models, setting, parts, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        models.augmented(technique, technique.Policy(**{setting: 0.5}), *parts)
    assert "\n" not in str(raised.value)
