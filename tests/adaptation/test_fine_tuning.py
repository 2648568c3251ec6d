"""The backbone stays, stored features are those computed, merged LoRA predicts the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.adaptation import bench_fine_tuning
from bench.adaptation.bench_fine_tuning import TECHNIQUE
from bench.harness.plan import Work
from shared import datasets
from shared.specs import TASKS, CNNSpec, GPTSpec, Recipe
from shared.weights import init_weights
from tests.frameworks import apart

FRAMEWORKS = ("pt", "tf")
STEPS = 10
IMAGES = CNNSpec((8, 8, 2), ((4, 1), (6, 2)), num_classes=10)
TEXT = GPTSpec(vocabulary=98, sequence_length=6, width=16, heads=2, layers=1)
RECIPE = Recipe("sgd", learning_rate=0.1, epochs=1, accuracy_batch_size=8)
RANDOM = np.random.default_rng(4)
X, Y = RANDOM.normal(size=(20, 8, 8, 2)).astype(np.float32) + 1, RANDOM.integers(0, 10, 20)
CODES = RANDOM.integers(0, 98, (2, 8, 6))


@pytest.fixture
def parts(kit):
    """`parts()`: a model, its features, its head, the head's optimizer, images and labels."""

    def make():
        model = kit.models.build(IMAGES, init_weights(IMAGES, seed=1))
        features, head = kit.models.split_head(model)
        optimizer = kit.training.make_optimizer(head, RECIPE)
        return model, features, head, optimizer, *kit.data.to_device(X, Y)

    return make


def numbers(kit, values):
    values = np.asarray(values)
    return kit.data.to_device(values, values)[0]


def array(tensor):
    return np.asarray(tensor.cpu() if hasattr(tensor, "cpu") else tensor)


def test_the_backbone_stays_whatever_its_mode_and_ten_steps_of_twins_agree(
    kit, technique, parts, agrees
):
    """Running statistics, too: images here are brighter than those that it knows."""
    model, features, head, optimizer, x, y = parts()
    before = kit.models.export_weights(model)
    step = technique.make_train_step(features, head, optimizer, kit.training.cross_entropy)
    if hasattr(model, "train"):
        model.train()  # as a loop does after each evaluation
    losses = [kit.runtime.to_float(step(x, y)) for _ in range(STEPS)]
    after = kit.models.export_weights(model)
    moved = {name for name in after if not np.array_equal(after[name], before[name])}
    assert moved == {"head.kernel", "head.bias"}
    agrees("frozen", {"losses": losses, "head": after["head.kernel"]}, 1e-5)


def test_stored_features_train_as_computed_ones(kit, technique, parts):
    """Batches of several sizes, out of order."""
    losses = []
    for stored in (False, True):
        _, features, head, optimizer, x, _ = parts()
        make, given = technique.make_train_step, features
        if stored:
            make, given = (
                technique.make_stored_train_step,
                technique.store_features(features, x, batch_size=8),
            )
        step = make(given, head, optimizer, kit.training.cross_entropy)
        losses.append([])
        for rows in ([3, 1, 2], [19, 0], [7, 8, 9]):
            images, labels = kit.data.to_device(X[rows], Y[rows])
            losses[-1].append(
                kit.runtime.to_float(step(numbers(kit, rows) if stored else images, labels))
            )
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][0] != losses[0][1]


def test_lora_begins_at_the_model_and_merges_to_what_it_learned(kit, technique, agrees):
    model = kit.models.build(TEXT, init_weights(TEXT, seed=1))
    x, y = kit.data.to_device(*CODES)
    whole, plain = kit.models.parameter_count(model), array(kit.training.make_predict(model)(x))
    technique.apply_lora(model, rank=2, alpha=8.0)
    kernels = [16 * 48, 16 * 16, 16 * 64, 64 * 16, 16 * 98]
    sides = [16 + 48, 16 + 16, 16 + 64, 64 + 16, 16 + 98]
    assert kit.models.parameter_count(model) == 2 * sum(sides) < sum(kernels) < whole
    assert np.array_equal(array(kit.training.make_predict(model)(x)), plain)
    optimizer = kit.training.make_optimizer(model, RECIPE)
    step = kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)
    losses = [kit.runtime.to_float(step(x, y)) for _ in range(STEPS)]
    adapted = array(kit.training.make_predict(model)(x))
    technique.merge_lora(model)
    merged = array(kit.training.make_predict(model)(x))
    assert apart(merged, adapted) < 1e-6
    assert apart(merged, plain) > 0.01
    after, before = kit.models.export_weights(model), init_weights(TEXT, seed=1)
    moved = {name for name in before if not np.array_equal(after[name], before[name])}
    assert moved == {n for n in before if n.endswith(".kernel")}
    agrees("lora", {"losses": losses, "head": after["head.kernel"]}, 1e-4)
    technique.apply_lora(model, rank=2)  # of a merged one
    assert apart(array(kit.training.make_predict(model)(x)), merged) < 1e-6


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"rank": 0}, "rank"), ({"alpha": 0.0}, "alpha"), ({"alpha": np.inf}, "alpha")],
)
def test_a_refusal_says_why_and_changes_nothing(kit, technique, settings, message):
    model = kit.models.build(TEXT, init_weights(TEXT, seed=1))
    whole = kit.models.parameter_count(model)
    with pytest.raises(ValueError, match=message):
        technique.apply_lora(model, **settings)
    assert kit.models.parameter_count(model) == whole


def test_a_model_is_adapted_once(kit, technique):
    model = technique.apply_lora(kit.models.build(TEXT, init_weights(TEXT, seed=1)))
    with pytest.raises(ValueError, match="merge"):
        technique.apply_lora(model)


# The benchmark -----------------------------------------------------------------------------------


@pytest.fixture
def work(tmp_path):
    """`work(variant)`: with a small model and small data."""

    def make(name):
        (variant,) = [one for one in TECHNIQUE.variants if one.name == name]
        task, spec = TASKS[variant.measured.tasks[0]], TEXT
        if name != "lora":
            small = datasets.DatasetSpec("small-domains", "domains", train_size=40, test_size=10)
            spec = replace(task.model, convolutions=((4, 2), (6, 2)))
            task = replace(task, dataset=small)
            data = datasets.materialise(small, tmp_path)
        else:
            data = tmp_path
        task = replace(task, model=spec)
        return Work(task, name, variant.settings, 8, init_weights(spec, 1), data=str(data))

    return make


def judged(impl, work):
    if work.task.dataset.kind == "domains":
        x, y = datasets.load(Path(work.data), "train")
        given = impl.kit.data.to_device(np.array(x[:8]), np.array(y[:8]))
    else:
        given = impl.kit.data.to_device(*CODES)
    prepared = bench_fine_tuning.prepare(impl, work)
    batch = given[0], prepared.targets(*given)
    return bench_fine_tuning.took_effect(impl, work, prepared, batch)


@pytest.mark.parametrize("name", ["frozen", "stored", "lora"])
def test_the_benchmark_proves_each_row(impl, technique, work, name):
    evidence, reason = judged(impl, work(name))
    assert reason is None, evidence


def test_the_benchmark_sees_a_backbone_that_moves(impl, kit, technique, work, monkeypatch):
    def as_before(features, head, optimizer, loss_fn):
        """Frozen weights in training mode: BatchNorm's statistics move."""
        learn = technique._make_head_step(head, optimizer, loss_fn)
        call = impl.kit.calling.call
        if kit.__name__.startswith("pt"):
            features.train()
            return lambda x, y: learn(call(features, x).detach(), y)
        return lambda x, y: learn(call(features, x, training=True), y)

    monkeypatch.setattr(technique, "make_train_step", as_before)
    assert "the backbone moved" in judged(impl, work("frozen"))[1]


def test_letters_swap_their_case_and_nothing_else_changes():
    codes = datasets.encode("def Class(x_1):\n\treturn 'é'")
    assert np.array_equal(datasets.SWAPPED[codes], datasets.encode("DEF cLASS(X_1):\n\tRETURN 'é'"))
    assert np.array_equal(datasets.SWAPPED[datasets.SWAPPED], np.arange(98))
