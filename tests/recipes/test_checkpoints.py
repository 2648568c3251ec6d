"""Interrupted training ends with the weights of an undisturbed one; no fault costs a file.

The model has dropout and the optimizer is AdamW, so that a step depends on weights, moments, the
step count and random numbers.
"""

from __future__ import annotations

import os
import resource
from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests import workers
from tests.recipes.samples import same

FRAMEWORKS = ("pt", *workers.keras())
MODELS = "recipes"
STEPS = 5
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf")


@pytest.fixture
def start(kit, models):
    """`start(seed)`: a model with dropout, its optimizer and step; all draws begin at `seed`."""

    def make(seed=1, width=16):
        model = models.with_dropout(seed, width)
        optimizer = models.adamw(model, 0.05)
        step = kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)
        return model, optimizer, step

    return make


@pytest.fixture
def trained(models, start):
    """A model and its optimizer after three steps."""
    model, optimizer, step = start()
    train(models, step, range(3))
    return model, optimizer


def train(models, step, numbers):
    for number in numbers:
        random = np.random.default_rng(number)
        x = random.normal(size=(16, 8)).astype(np.float32)
        step(models.tensor(x), models.tensor(random.integers(0, 4, 16)))


@pytest.fixture
def weights(models):
    """`weights(model)`: its arrays."""
    return lambda model: list(models.parameters(model).values())


def test_interrupted_after_any_step_it_ends_with_the_same_weights(
    technique, models, start, weights, tmp_path
):
    model, optimizer, step = start()
    for number in range(STEPS):
        without = weights(model)
        train(models, step, [number])
        keeper = technique.Checkpoints(tmp_path / str(number), model, optimizer)
        keeper.save(number + 1, {"place": number + 1})
    wanted = weights(model)
    assert not same(without, wanted)
    for number in range(STEPS - 1):
        model, optimizer, step = start(99)  # as a new process would: other weights, other draws
        state = technique.Checkpoints(tmp_path / str(number), model, optimizer).resume()
        train(models, step, range(state["place"], STEPS))
        assert same(weights(model), wanted), number


def test_what_each_kind_holds(technique, start, trained, weights, tmp_path):
    model, optimizer = trained
    rounded = [weight.astype(np.float16).astype(np.float32) for weight in weights(model)]
    sizes = []
    for kept, half in ((optimizer, False), (None, False), (None, True)):
        path = tmp_path / "one"
        sizes.append(technique.save_checkpoint(path, model, kept, {"a": 1}, half_precision=half))
        other, *_ = start(5)
        assert technique.load_checkpoint(path, other) == {"a": 1}
        assert same(weights(other), rounded if half else weights(model))
    assert sizes == sorted(set(sizes), reverse=True)


def test_weights_in_bfloat16_come_back(technique, models, tmp_path):
    one, other = models.low_precision(0), models.low_precision(1)
    technique.save_checkpoint(tmp_path / "low", one, None, {})
    technique.load_checkpoint(tmp_path / "low", other)
    before, after = (list(models.parameters(model).values()) for model in (one, other))
    assert same(before, after)
    assert any(weight.any() for weight in before)


def test_a_rate_that_was_reduced_comes_back(technique, models, start, tmp_path):
    model, optimizer, _ = start()
    models.set_rate(optimizer, 0.005)
    technique.save_checkpoint(tmp_path / "one", model, optimizer, {})
    model, optimizer, _ = start()
    technique.load_checkpoint(tmp_path / "one", model, optimizer)
    assert models.rate_of(optimizer) == pytest.approx(0.005)


# Faults ------------------------------------------------------------------------------------------


def test_what_is_no_checkpoint_of_the_model_is_one_line(
    technique, models, start, trained, weights, tmp_path
):
    model, optimizer = trained
    technique.save_checkpoint(tmp_path / "good", model, optimizer, {})
    technique.save_checkpoint(tmp_path / "half", model, None, {})
    models.save_pickle(tmp_path / "foreign")
    other, others_optimizer, _ = start(width=12)
    before = weights(model), weights(other)
    for name, given, words in (
        ("missing", trained, "there is no"),
        ("foreign", trained, "no checkpoint"),
        ("half", trained, "only weights"),
        ("good", (other, others_optimizer), "another model"),
    ):
        with pytest.raises((ValueError, OSError), match=words) as raised:
            technique.load_checkpoint(tmp_path / name, *given)
        assert "\n" not in str(raised.value)
    assert same(before[0], weights(model))
    assert same(before[1], weights(other))


def test_whatever_the_damage_there_is_one_line_and_the_model_stays(
    technique, trained, weights, tmp_path
):
    """Of 60 checkpoints that were cut, changed in places or replaced."""
    random, lines = np.random.default_rng(0), []
    technique.save_checkpoint(path := tmp_path / "good", *trained, {"epoch": 3})
    content, before = path.read_bytes(), weights(trained[0])
    for number in range(60):
        damaged = bytearray(content[: random.integers(len(content))])
        if number % 3:
            damaged = bytearray(content if number % 3 == 1 else random.bytes(200))
            for _ in range(random.integers(1, 9)):
                damaged[random.integers(len(damaged))] = random.integers(256)
        path.write_bytes(damaged)
        try:
            technique.load_checkpoint(path, *trained)  # some change what nobody reads
        except ValueError as error:
            lines.append(str(error))
        assert same(before, weights(trained[0]))
    assert len(lines) > 40
    assert all(line.startswith(str(path)) and "\n" not in line for line in lines)


@contextmanager
def full_disk(size):
    """Files of this process may not grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_can_not_be_written_leaves_the_good_one(technique, models, trained, tmp_path):
    model, optimizer = trained
    technique.save_checkpoint(path := tmp_path / "good", model, optimizer, {})
    content = path.read_bytes()
    with full_disk(100), pytest.raises((ValueError, OSError), match="can't be written") as raised:
        technique.save_checkpoint(path, model, optimizer, {})
    assert "\n" not in str(raised.value)
    models.fill(model, 1e6)
    with pytest.raises(ValueError, match="65504"):
        technique.save_checkpoint(path, model, None, {}, half_precision=True)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["good"]


# The folder --------------------------------------------------------------------------------------


def names(folder):
    return sorted(path.stem for path in folder.iterdir())


def test_the_folder_keeps_the_last_the_best_and_the_periodic(
    technique, models, start, weights, tmp_path
):
    model, optimizer, _ = start()
    assert technique.Checkpoints(tmp_path, model, optimizer).resume() is None
    settings = {"keep": 2, "every": 3, "higher_is_better": True}
    keeper = technique.Checkpoints(tmp_path, model, optimizer, **settings)
    for number, metric in enumerate([0.1, 0.9, 0.2, 0.3, None], start=1):
        models.fill(model, float(number))
        keeper.save(number, {}, metric)
    assert names(tmp_path) == ["best", "periodic-00000003", "step-00000004", "step-00000005"]
    again = technique.Checkpoints(tmp_path, model, optimizer, every=3, higher_is_better=True)
    assert again.best == 0.9
    (last,) = tmp_path.glob("step-00000005*")
    last.write_bytes(b"cut off")
    assert again.resume()["step"] == 4
    assert weights(model)[0].ravel()[0] == 4.0
    for number in (5, 6, 7):  # after four saves
        again.save(number, {})
    periodic = sorted(path.stem for path in tmp_path.glob("periodic-*"))
    assert periodic == ["periodic-00000003", "periodic-00000006"]
    for last in tmp_path.glob("step-*"):
        last.write_bytes(b"")
    with pytest.raises(ValueError, match="no checkpoint can be read"):
        again.resume()
    with pytest.raises(ValueError, match="keep"):
        technique.Checkpoints(tmp_path, model, optimizer, keep=0)


def test_a_return_to_an_earlier_step(technique, start, tmp_path):
    """What was written last stays, NaN is never the best, and NumPy's numbers are numbers."""
    model, optimizer, _ = start()
    keeper = technique.Checkpoints(tmp_path, model, optimizer, keep=2)
    for step in (100, 200, 300):
        keeper.save(step, {}, float("nan"))
    assert keeper.best is None
    state = {"rate": np.float64(0.5), "counts": [np.int64(3)]}
    other = technique.Checkpoints(tmp_path, model, optimizer, keep=2)
    path = other.save(150, state, np.mean([0.25, 0.75]))
    os.utime(path, (0, 0))  # as a copy of the folder may have it
    again = technique.Checkpoints(tmp_path, model, optimizer)
    assert again.best == 0.5
    wanted = {"rate": 0.5, "counts": [3], "step": 150, "metric": 0.5, "saves": 1}
    assert again.resume() == wanted
    assert names(tmp_path) == ["best", "step-00000150", "step-00000300"]


Place = namedtuple("Place", "epoch batch")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Path("x"), "PosixPath"),
        pytest.param(Place(1, 2), "a checkpoint holds", marks=PT),  # JSON makes a list of it
        pytest.param(np.array(["train"]), "arrays of numbers", marks=TF),
    ],
)
def test_what_could_not_be_read_again_is_not_written(technique, start, tmp_path, value, words):
    model, optimizer, _ = start()
    keeper = technique.Checkpoints(tmp_path, model, optimizer)
    with pytest.raises((ValueError, TypeError), match=words) as raised:
        keeper.save(1, {"place": value})
    assert "\n" not in str(raised.value)
    assert names(tmp_path) == []


# What frameworks keep beside weights -------------------------------------------------------------


@PT
@pytest.mark.parametrize("then", [False, True])
@pytest.mark.parametrize("now", [False, True])
def test_pt_a_checkpoint_is_read_whether_or_not_there_is_a_schedule(
    technique, models, start, tmp_path, then, now
):
    """The rates of the next two steps, of a checkpoint with and without one."""
    for scheduled in (then, now):
        model, optimizer, _ = start()
        schedule = models.one_cycle(optimizer) if scheduled else None
        if (tmp_path / "one").exists():
            technique.load_checkpoint(tmp_path / "one", model, optimizer)
        technique.save_checkpoint(tmp_path / "one", model, optimizer, {})
    first = models.rate_of(optimizer)
    optimizer.step()
    if schedule:
        schedule.step()
        assert models.rate_of(optimizer) > 0.004
    else:
        assert first == models.rate_of(optimizer) == pytest.approx(0.004 if then else 0.05)


@PT
def test_pt_other_optimizers_are_refused_and_lazy_layers_take_their_sizes(
    technique, models, tmp_path
):
    model = models.wide()
    technique.save_checkpoint(tmp_path / "one", model, models.adam(model), {})
    other = models.torch.optim.RAdam(model.parameters())
    with pytest.raises(ValueError, match="of another optimizer"):
        technique.load_checkpoint(tmp_path / "one", model, other)
    lazy = models.nn.LazyLinear(1)
    technique.load_checkpoint(tmp_path / "one", lazy)
    assert lazy.weight.shape == (1, 2)


@TF
def test_tf_a_loss_scale_is_saved_as_it_is_and_comes_back(technique, models, start, tmp_path):
    model, *_ = start()
    optimizer, other = models.loss_scaled(model), models.loss_scaled(model)
    optimizer.dynamic_scale.assign(128.0)
    before = len(optimizer.variables)
    for _ in range(2):
        technique.save_checkpoint(tmp_path / "one", model, optimizer, {})
    technique.load_checkpoint(tmp_path / "one", model, other)
    assert len(optimizer.variables) == before
    assert float(optimizer.dynamic_scale) == float(other.dynamic_scale) == 128.0


@TF
@pytest.mark.parametrize("kind", ["normalised", "masked", "halved"])
def test_tf_what_keras_computes_from_variables_comes_back_with_them(
    technique, models, start, tmp_path, kind
):
    """And masks of a pruning."""
    x = np.random.default_rng(0).normal(5, 3, (64, 8)).astype(np.float32)
    one, other = getattr(models, kind)(x)
    technique.save_checkpoint(tmp_path / "kept", one, None, {})
    assert not np.allclose(models.output(one, x), models.output(other, x), atol=1e-2)
    technique.load_checkpoint(tmp_path / "kept", other)
    assert np.allclose(models.output(one, x), models.output(other, x), atol=1e-5)
    if kind == "masked":
        dense, *_ = start()
        with pytest.raises(ValueError, match="another model"):
            technique.load_checkpoint(tmp_path / "kept", dense)
