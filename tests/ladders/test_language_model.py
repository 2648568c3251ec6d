"""Plain is what plain framework code does, and each rung has its effect on top of it."""

from __future__ import annotations

import functools
import multiprocessing
from dataclasses import replace

import numpy as np
import pytest

from shared import datasets
from shared.specs import NO_LABEL, GPTSpec
from shared.weights import init_weights
from tests.frameworks import apart

FRAMEWORKS = ("pt", "tf")
# Equally large: in one process TensorFlow's replicas of a second strategy fail on other shapes.
SPECS = {"gpt": GPTSpec(datasets.HIDDEN + 1, sequence_length=12, width=32, heads=2, layers=2)}
SPECS["bert"] = replace(SPECS["gpt"], causal=False)
BATCH = 4
EACH = pytest.mark.parametrize("name", SPECS)


def codes(rows, seed, name="gpt"):
    """What a model sees, and its labels."""
    random = np.random.default_rng(seed)
    if name == "bert":
        return datasets.hide(random.integers(0, datasets.HIDDEN, (rows, 12)), random)
    drawn = random.integers(0, 20, (rows, 13))
    return drawn[:, :-1].copy(), drawn[:, 1:].copy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, models):
    models.before_anything_runs()
    folder = tmp_path_factory.mktemp("text")
    for name in SPECS:
        (folder / name).mkdir()
        for part, array in zip("xy", codes(18, seed=0, name=name), strict=True):
            np.save(folder / name / f"train_{part}.npy", array)
    return folder


class Build:
    """A model, which replicas make in processes of their own."""

    def __init__(self, kit, name):
        self.build, self.spec = kit.models.build, SPECS[name]

    def __call__(self):
        return self.build(self.spec, init_weights(self.spec, seed=1))


@pytest.fixture(scope="module")
def training(technique, kit, folder):
    def begin(*rungs, name="gpt", **settings):
        settings |= {"rungs": rungs, "batch_size": BATCH, "seed": 2}
        return technique.Training(Build(kit, name), folder / name, **settings)

    return begin


@pytest.fixture(scope="module")
def batches(kit, folder):
    """Four batches of each model that are the same in every process."""
    drawn = {name: [codes(BATCH, seed=10 + n, name=name) for n in range(4)] for name in SPECS}
    return {name: kit.data.resident_batches(each) for name, each in drawn.items()}


@pytest.fixture(scope="module")
def plain(training, batches):
    """`plain(name)`: losses of the plain program's steps, and of an epoch of nine sequences."""

    @functools.cache
    def losses_of(name):
        run = training(name=name, sequences=9)
        steps = [float(run.step(*batch)) for batch in batches[name]]
        epoch = [float(loss) for loss in run.epoch()]
        run.close()
        return steps, epoch

    return losses_of


def products(kit, run, batch):
    """How many matrix products a step has, by dtype."""
    return kit.runtime.operator_dtypes(run.step, *batch)["matmul"]


@EACH
def test_the_plain_program_is_plain_framework_code(plain, kit, models, folder, batches, name):
    steps, epoch = plain(name)
    x, y = (np.load(folder / name / f"train_{part}.npy") for part in "xy")
    order = np.random.default_rng([2, 0]).permutation(9)
    rows = [np.sort(order[first : first + BATCH]) for first in (0, BATCH)]
    of_epoch = kit.data.resident_batches([(x[row], y[row]) for row in rows])
    by_hand = models.by_hand(Build(kit, name)(), [*batches[name], *of_epoch])
    assert apart(steps + epoch, by_hand) < 1e-4  # the bar of transformers
    assert len(epoch) == 2  # nine sequences in batches of four


@EACH
def test_twins_agree_in_their_first_losses(plain, agrees, name):
    agrees(name, {"losses": plain(name)[0]}, 1e-4)


def test_mixed_precision_computes_in_bfloat16_and_checkpointing_blocks_again(
    training, kit, batches, plain
):
    """Of which only the first changes losses."""
    again, mixed = training("checkpointing"), training("mixed_precision")
    steps = [float(again.step(*batch)) for batch in batches["gpt"]]
    assert apart(steps, plain("gpt")[0]) < 1e-4
    twice, once = (products(kit, run, batches["gpt"][0]) for run in (again, mixed))
    assert set(once) == {"bfloat16"}
    assert sum(twice.values()) > sum(once.values())
    for run in (again, mixed):
        run.close()


def test_rungs_change_no_loss_of_hidden_characters(training, technique, models, batches, plain):
    """Each row has as many, so that halves of a batch weigh alike; they are what is accumulated."""
    rungs = [rung for rung in technique.RUNGS[1:] if rung != "data_parallel"]
    run, sizes = training(*rungs, name="bert"), []
    models.watch(run.model, sizes)
    steps = [float(run.step(*batch)) for batch in batches["bert"]]
    assert apart(steps, plain("bert")[0]) < 1e-4
    assert set(sizes) == {2}
    assert models.is_fused(run, batches["bert"][0])
    run.close()


def test_a_bert_sees_both_ways_and_learns_hidden_places_alone(technique, kit, models):
    (x, y), model = codes(BATCH, seed=3, name="bert"), Build(kit, "bert")()
    predict = kit.training.make_predict(model)
    other = x.copy()
    other[:, -1] = (other[:, -1] + 1) % datasets.HIDDEN
    logits, changed = (np.array(predict(kit.data.to_device(z, y)[0])) for z in (x, other))
    assert np.abs(logits - changed).max((0, 2)).min() > 0  # at each place the last code counts
    learned = np.abs(models.gradient(technique._cross_entropy, logits, y)).sum(-1) > 0
    assert np.array_equal(learned, y != NO_LABEL)
    assert 0 < np.mean(y != NO_LABEL) < 0.5


def test_replicas_share_each_batch_change_no_loss_and_end(training, models, batches, plain):
    run = training("data_parallel")
    assert models.replicas(run) == 2
    steps = [float(run.step(*batch)) for batch in batches["gpt"]]
    assert apart(steps, plain("gpt")[0]) < 1e-4
    assert len(list(run.epoch())) == 4
    with pytest.raises(ValueError, match="equal shares"):
        run.step(*(part[:3] for part in batches["gpt"][0]))
    run.close()
    assert not multiprocessing.active_children()
    with pytest.raises(ValueError, match=r"no multiple of 3"):
        training("data_parallel", replicas=3)


@pytest.mark.only("pt")  # one process has all of TensorFlow's
def test_replicas_that_end_at_once_are_not_waited_for(training, technique, monkeypatch):
    """As they do in a script that they can't import."""
    monkeypatch.setattr(technique, "_replica", len)
    with pytest.raises(RuntimeError, match="ended before it began"):
        training("data_parallel")


@pytest.mark.only("pt")
def test_replicas_without_a_model_leave_nothing(technique, models, folder):
    def build():
        raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        technique.Training(
            build, folder / "gpt", rungs=("data_parallel",), batch_size=BATCH, replicas=1
        )
    assert not models.dist.is_initialized()


def test_all_rungs_at_once_train_and_predict(training, technique, batches, plain, tmp_path):
    run, (x, _) = training(*technique.RUNGS), batches["gpt"][0]
    steps = [float(run.step(*batch)) for batch in batches["gpt"]]
    assert list(run.finish(x)) == []
    predict = run.deploy(tmp_path / "deployed", x)
    assert np.asarray(predict(x)).shape == (4, 12, 99)
    assert (tmp_path / "deployed").stat().st_size > 4 * 20 * 32
    run.close()
    assert np.isfinite(steps).all()
    assert apart(steps, plain("gpt")[0]) < 0.02  # bfloat16
