"""What rows of recipes measure beside their training, with a kit in which time is counted."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.harness.plan import EFFORT, Work
from bench.harness.run_plan import Plan
from bench.harness.selection import cases_of
from bench.harness.stages import Stages
from bench.recipes import bench_augmentation, bench_initialization, bench_learning_rate_finder
from shared.specs import TASKS

FEW, CNN = TASKS["digits-few"], TASKS["digits-cnn"]
BATCHES, SIZE = 10, 8
STEP_S, AUGMENT_S, LOAD_S, START_S = 2e-3, 1e-3, 5e-4, 1.0
PACES = (1, 2, 3)  # of the repetitions


# Augmentation -----------------------------------------------------------------------------------


class Clock:
    """Time that passes by work alone, which takes `pace` times as long as usual."""

    def __init__(self):
        self.now, self.pace = 0.0, 1.0

    def perf_counter(self):
        return self.now

    def work(self, seconds):
        self.now += seconds * self.pace


class Loader:
    """Batches, each of which takes time, and the first of all the start of workers, too."""

    def __init__(self, clock, batches, seconds):
        self.clock, self.batches, self.seconds, self.started = clock, batches, seconds, False

    def __iter__(self):
        self.clock.work(0.0 if self.started else START_S)
        self.started = True
        for batch in self.batches:
            self.clock.work(self.seconds)
            yield batch


def augmenting(clock, ways):
    """A side whose every step takes `STEP_S`, augmentation on the host `AUGMENT_S` more.

    Twice as much on the device. The machine gets slower after each repetition of the `ways`.
    """
    rounds = []

    def synchronize():
        rounds.append(1)
        clock.pace = 1.0 + max(0, len(rounds) // ways - 2)

    def host_loader(x, y, wrap, *, batch_size):
        rows = range(0, len(x), batch_size)
        batches = [(x[row : row + batch_size], y[row : row + batch_size]) for row in rows]
        return wrap(Loader(clock, batches, LOAD_S))

    def make_augmenting_step(step, policy, generator):
        return lambda x, y: (clock.work(2 * AUGMENT_S), step(x, y))

    training = SimpleNamespace(
        make_optimizer=lambda model, recipe: None,
        make_train_step=lambda model, optimizer, loss: lambda x, y: clock.work(STEP_S),
        make_predict=lambda model: None,
        cross_entropy=None,
        sample_cross_entropy=None,
    )
    augmentation = SimpleNamespace(
        Policy=lambda **settings: settings,
        make_mixed_loss=lambda loss: None,
        make_augmenting_step=make_augmenting_step,
        augmented_dataset=lambda loader, policy: Loader(clock, loader.batches, LOAD_S + AUGMENT_S),
    )
    kit = SimpleNamespace(
        training=training,
        data=SimpleNamespace(host_loader=host_loader),
        models=SimpleNamespace(build=lambda spec, weights: None),
        runtime=SimpleNamespace(synchronize=synchronize, make_generator=lambda seed: None),
    )
    return SimpleNamespace(kit=kit, recipes=SimpleNamespace(augmentation=augmentation))


def probe(monkeypatch, settings, ways):
    clock, samples = Clock(), BATCHES * SIZE
    monkeypatch.setattr(bench_augmentation, "time", clock)
    arrays = np.zeros((samples, 4, 4, 1), np.float32), np.zeros(samples, np.int64)
    monkeypatch.setattr(bench_augmentation.datasets, "load", lambda folder, split: arrays)
    work = Work(FEW, "row", settings, SIZE, {}, repetitions=3, data="")
    return bench_augmentation.probe(augmenting(clock, ways), work, [])


def test_rates_are_those_of_a_loop_written_by_hand(monkeypatch):
    """Without what starting takes; that the machine gets slower shows from one to the next."""
    found = probe(monkeypatch, {"mixup": 0.2}, ways=4)
    for name, seconds in (
        ("train_plain", LOAD_S + STEP_S),
        ("train_host", LOAD_S + AUGMENT_S + STEP_S),
        ("train_device", LOAD_S + STEP_S + 2 * AUGMENT_S),
        ("pipeline", LOAD_S + AUGMENT_S),
    ):
        assert found[name]["samples"] == pytest.approx([SIZE / seconds / p for p in PACES])
        assert found[name]["value"] == pytest.approx(SIZE / seconds / 2)
        assert found[name]["unit"] == "samples/s"


def test_what_is_lost_is_that_of_each_repetition(monkeypatch):
    found = probe(monkeypatch, {"mixup": 0.2}, ways=4)
    for place, more in (("host", AUGMENT_S), ("device", 2 * AUGMENT_S)):
        lost = 100 * more / (LOAD_S + STEP_S + more)
        assert found[f"lost_on_{place}"]["samples"] == pytest.approx([lost] * 3)
        assert found[f"lost_on_{place}"]["value"] == pytest.approx(lost)
        assert found[f"lost_on_{place}"]["unit"] == "%"


def test_without_augmentation_nothing_can_be_lost(monkeypatch):
    found = probe(monkeypatch, {}, ways=2)
    assert set(found) == {"train_plain", "pipeline"}
    assert found["pipeline"]["samples"] == pytest.approx([SIZE / LOAD_S / p for p in PACES])


# Learning-rate finder ---------------------------------------------------------------------------


@dataclass
class RangeTest:
    rates: list
    losses: list
    smoothed: list
    suggestion: float


def test_the_rows_of_a_seed_share_one_range_test(tmp_path):
    tests, rates = [], []

    def find(model, optimizer, step, batches):
        tests.append(batches)
        suggestion = 0.1 * len(tests)
        return RangeTest([suggestion, 1.0], [2.0, 3.0], [2.0, 2.5], suggestion)

    training = SimpleNamespace(
        make_optimizer=lambda model, recipe: rates.append(recipe.learning_rate),
        make_train_step=lambda model, optimizer, loss: lambda x, y: 1.0,
        make_predict=lambda model: None,
        cross_entropy=None,
    )
    kit = SimpleNamespace(
        training=training,
        models=SimpleNamespace(build=lambda spec, weights: None),
        data=SimpleNamespace(epoch_batches=lambda x, y, *, batch_size, seed, epoch: [seed]),
    )
    finder = SimpleNamespace(find_learning_rate=find)
    impl = SimpleNamespace(kit=kit, recipes=SimpleNamespace(learning_rate_finder=finder))

    def fit(step, epochs):
        for _ in range(8):
            step(None, None)

    weights, curves = {"kernel": np.zeros(2, np.float32)}, {}
    for seed in range(2):
        for variant in bench_learning_rate_finder.TECHNIQUE.variants[1:]:
            work = Work(CNN, variant.name, variant.settings, 64, weights)
            prepared = bench_learning_rate_finder.prepare(impl, work)
            seen = (fit, lambda predict, split: 0.0, lambda split: (None, None))
            stages = Stages(impl, CNN, weights, seed, Path(tmp_path), *seen)
            prepared.train(stages)
            wanted = variant.settings["factor"] * 0.1 * (seed + 1)
            assert rates[-1] == pytest.approx(wanted)
            assert stages.metrics["learning_rate"]["value"] == pytest.approx(wanted)
            if "curve" in stages.evidence:
                curves[seed, variant.name] = stages.evidence["curve"]
    assert tests == [[0], [1]]
    assert {name for _, name in curves} == {"suggested"}
    assert [curves[seed, "suggested"]["mark"][0] for seed in range(2)] == [0.1, 0.2]


# Initialization ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("effort", "trained"),
    [
        ("quick", set()),
        ("default", set()),
        ("ordinary", {"default", "he_normal", "glorot_uniform", "orthogonal"}),
    ],
)
def test_a_default_run_asks_the_deep_network_alone(effort, trained):
    technique = bench_initialization.TECHNIQUE
    cases = cases_of(technique, "module", effort)
    plan = Plan({technique.name: cases}, {technique.name: technique}, EFFORT[effort])
    assert all(map(plan.probed, cases))
    found = {case.variant.name for case in cases if plan.trained(case)}
    assert found >= trained
    assert bool(found) == bool(trained)
    assert "he_residual" not in found
