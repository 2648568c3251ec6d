"""Plain is the game of two heads by hand, and each rung has its effect on top of it."""

from __future__ import annotations

import numpy as np
import pytest

from shared.specs import CNNSpec, parameter_shapes
from shared.weights import init_weights
from tests import workers
from tests.frameworks import apart

FRAMEWORKS = ("pt", "tf")
SPEC = CNNSpec((16, 16, 3), ((8, 2), (16, 2)), num_classes=6)
BATCH, SEED, STEPS, RATE = 8, 3, 10, 0.02


@pytest.fixture(scope="module")
def domains(tmp_path_factory):
    """The folders of source and target, 24 images each."""
    folder = tmp_path_factory.mktemp("domains")
    for number, name in enumerate(("source", "target")):
        random = np.random.default_rng(number)
        (folder / name).mkdir()
        images = random.normal(size=(24, 16, 16, 3)).astype(np.float32) * (1 + number)
        np.save(folder / name / "train_x.npy", images)
        np.save(folder / name / "train_y.npy", random.integers(0, 6, 24) * (1 - number))
    return folder / "source", folder / "target"


@pytest.fixture(scope="module")
def parts(kit):
    return lambda: kit.models.split_head(kit.models.build(SPEC, init_weights(SPEC, seed=1)))


@pytest.fixture(scope="module")
def training(technique, parts, domains):
    def begin(*rungs, **settings):
        settings |= {"steps": STEPS, "rungs": rungs, "batch_size": BATCH, "seed": SEED}
        return technique.Training(parts, *domains, **settings)

    return begin


@pytest.fixture(scope="module")
def batches(kit):
    """Four batches of both domains that are the same in every process."""
    random = np.random.default_rng(5)
    shape = (2 * BATCH, 16, 16, 3)
    return kit.data.resident_batches(
        [(random.normal(size=shape).astype(np.float32), random.integers(0, 6, BATCH))
         for _ in range(4)]
    )  # fmt: skip


def steps(run, batches):
    return [float(run.step(*batch)) for batch in batches]


def epochs(run):
    return [float(loss) for _ in range(2) for loss in run.epoch()]


@pytest.fixture(scope="module")
def plain(training, batches):
    """Losses of the plain program: of steps, and of two epochs after them."""
    run = training()
    return steps(run, batches), epochs(run)


def test_the_plain_program_is_two_gradients_by_hand(plain, impl, models, parts, domains, batches):
    """Features climb the loss of the domains, which the domain head goes down."""
    loaders = [
        impl.input.in_memory.naive_loader(folder, seed=SEED + number, batch_size=BATCH)
        for number, folder in enumerate(domains)
    ]
    width = SPEC.convolutions[-1][0]
    domain_head = impl.adaptation.adversarial.make_domain_head(width=width)
    step, by_hand = models.make_step(*parts(), domain_head, rate=RATE), []
    drawn = [(x[:BATCH], y, x[BATCH:]) for x, y in batches]
    for _ in range(2):
        drawn += [(x, y, target) for (x, y), (target, _) in zip(*loaders, strict=True)]
    for given in drawn:
        strength = 2 / (1 + np.exp(-10 * len(by_hand) / STEPS)) - 1
        by_hand.append(step(*given, float(strength)))
    of_steps, of_epochs = plain
    assert apart(of_steps + of_epochs, by_hand) < 1e-4
    assert len(of_epochs) == 6  # two epochs of 24 images in batches of 8


def test_twins_agree_in_their_first_losses(plain, agrees):
    agrees("plain", {"losses": plain[0]}, 1e-5)


def test_the_pipeline_gives_the_same_batches_another_way(training, batches, plain):
    run = training("input_pipeline")
    assert apart(steps(run, batches) + epochs(run), [*plain[0], *plain[1]]) < 1e-4


def test_mixed_precision_computes_in_bfloat16_over_float32_weights(
    training, kit, models, batches, tmp_path
):
    run, (x, y) = training("mixed_precision"), batches[0]
    predict = run.deploy(tmp_path / "bf16", x)
    for called in (run.step, lambda x, y: predict(x)):
        assert set(kit.runtime.operator_dtypes(called, x, y)["convolution"]) == {"bfloat16"}
    assert {str(weight.dtype) for weight in models.weights(run.model)} == {"float32"}


def test_clipping_goes_the_same_way_less_far(training, models, batches):
    """The first step, at a hundredth of its gradient."""
    moved = []
    for rungs in ((), ("clipping",)):
        run = training(*rungs, max_norm=0.01)
        before = models.weights(run.model)
        run.step(*batches[0])
        pairs = zip(models.weights(run.model), before, strict=True)
        moved.append(np.concatenate([(after - was).ravel() for after, was in pairs]))
    plain, clipped = moved
    # The rate times the norm, of which the domain head has a part.
    assert np.linalg.norm(clipped) <= RATE * 0.01 * 1.001 < np.linalg.norm(plain)
    cosine = plain @ clipped / np.linalg.norm(plain) / np.linalg.norm(clipped)
    assert cosine > 0.9999


def test_compiled_steps_are_compiled_and_the_same(training, kit, batches, plain):
    with workers.without_inductor():  # which compiles those of photos
        run = training("compiled")
        assert apart(steps(run, batches), plain[0]) < 1e-4
    assert kit.runtime.trace_count(run.adapt)


def test_all_rungs_at_once_train_and_predict(training, technique, batches, tmp_path):
    x, _ = batches[0]
    with workers.without_inductor():
        run = training(*technique.RUNGS)
        losses = [float(loss) for loss in run.epoch()]
    assert np.isfinite(losses).all()
    assert list(run.finish(x)) == []
    predict = run.deploy(tmp_path / "deployed", x)
    assert np.asarray(predict(x)).shape == (16, 6)
    count = sum(int(np.prod(shape)) for shape in parameter_shapes(SPEC).values())
    assert (tmp_path / "deployed").stat().st_size >= 4 * count
    run.close()
