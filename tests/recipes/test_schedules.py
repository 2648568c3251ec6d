"""Each step is taken at the rate that the formula says, in both frameworks, resumed or not."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from bench.harness.plan import Work
from bench.harness.selection import cases_of
from bench.harness.worker import Operations
from bench.recipes import bench_schedules
from shared import datasets
from shared.specs import TASKS, CNNSpec
from shared.weights import init_weights
from tests import workers

FRAMEWORKS = ("pt", *workers.keras())
MODELS = "recipes"
STEPS, RATE = 20, 0.1
CASES = {
    "linear": ("apply_linear_decay", {"steps": STEPS}),
    "linear, warm": ("apply_linear_decay", {"steps": STEPS, "warmup": 5, "final": 0.1}),
    "cosine": ("apply_cosine", {"steps": STEPS}),
    "cosine, warm": ("apply_cosine", {"steps": STEPS, "warmup": 5, "final": 0.01}),
    "one cycle": ("apply_one_cycle", {"steps": STEPS}),
    "one cycle, early": (
        "apply_one_cycle",
        {"steps": STEPS, "rising": 0.1, "initial": 0.5, "final": 0.01},
    ),
}
PLATEAU = {"factor": 0.5, "patience": 2, "threshold": 0.01, "cooldown": 1, "lowest": 0.02}
LOSSES = [1.0, 0.8, 0.795, 0.9, 0.9, 0.9, 0.9, 0.9, 0.7, 0.71, 0.72, 0.73, 0.74, 0.75] + [0.76] * 9


def expected(case: str) -> np.ndarray:
    """The rates by the formulas of the papers, in float64."""
    step = np.arange(STEPS)
    if case.startswith("one cycle"):
        share, low, end = (0.1, 0.5, 0.01) if case.endswith("early") else (0.3, 0.04, 4e-6)
        top = share * STEPS - 1
        up = 1 + (low - 1) * (1 + np.cos(np.pi * step / top)) / 2 if top else np.ones(STEPS)
        down = end + (1 - end) * (1 + np.cos(np.pi * (step - top) / (STEPS - 1 - top))) / 2
        return RATE * np.where(step <= top, up, down)
    warmup = 5 if case.endswith("warm") else 0
    final = {"linear, warm": 0.1, "cosine, warm": 0.01}.get(case, 0.0)
    progress = np.clip((step - warmup) / (STEPS - warmup), 0, 1)
    left = 1 - progress if case.startswith("linear") else (1 + np.cos(np.pi * progress)) / 2
    return RATE * np.minimum(1, (step + 1) / (warmup + 1)) * (final + (1 - final) * left)


@pytest.fixture
def start(technique, models):
    """`start(case)`: a weight of zero whose gradient is one, its optimizer and its schedule."""

    def make(case):
        name, settings = CASES[case]
        weight = models.weight()
        optimizer = models.sgd_of([weight], RATE)
        return weight, optimizer, getattr(technique, name)(optimizer, **settings)

    return make


@pytest.mark.parametrize("case", CASES)
def test_each_step_has_the_rate_of_the_formula_which_is_told_before(technique, models, start, case):
    weight, optimizer, schedule = start(case)
    used, told = [], []
    for _ in range(STEPS):
        told.append(technique.current_rate(optimizer))
        used.append(models.moved(weight, optimizer, schedule))
    assert np.abs(np.array(used) - expected(case)).max() < 1e-9
    assert np.abs(np.array(told) - expected(case)).max() < 1e-8


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_goes_on_where_it_was(models, start, case):
    used, state = [], None
    for steps in (7, STEPS - 7):
        weight, optimizer, schedule = start(case)
        if state is not None:
            models.resume_at(optimizer, schedule, state)
        used += [models.moved(weight, optimizer, schedule) for _ in range(steps)]
        state = models.progress(optimizer, schedule)
    assert np.abs(np.array(used) - expected(case)).max() < 1e-9


@pytest.mark.only("tf", "tf_keras")
@pytest.mark.parametrize("case", CASES)
def test_tf_a_schedule_survives_its_optimizer_s_configuration(models, start, case):
    _, optimizer, schedule = start(case)
    config = json.loads(json.dumps(models.keras.optimizers.serialize(optimizer)))
    again = models.keras.optimizers.deserialize(config)._learning_rate
    assert type(again) is type(schedule)
    assert np.abs([float(again(step)) for step in range(STEPS)] - expected(case)).max() < 1e-9


def reduced(losses):
    """The rates that a plateau leaves, written out: patience 2, threshold 1%, cooldown 1."""
    best, bad, cooling, rate, rates = math.inf, 0, 0, RATE, []
    for loss in losses:
        bad = 0 if loss < best * 0.99 else bad + 1
        best = loss if bad == 0 else best
        if cooling:
            cooling, bad = cooling - 1, 0
        if bad > 2:
            rate, cooling, bad = max(rate * 0.5, 0.02), 1, 0
        rates.append(rate)
    return rates


@pytest.mark.parametrize("interrupted", [None, 6])
def test_a_plateau_reduces_the_rate(technique, models, interrupted):
    optimizer, seen = models.sgd_of([models.weight()], RATE), []
    scheduler = technique.apply_reduction_on_plateau(optimizer, **PLATEAU)
    for number, loss in enumerate(LOSSES):
        if number == interrupted:
            state, rate = json.loads(json.dumps(scheduler.state_dict())), models.rate_of(optimizer)
            optimizer = models.sgd_of([models.weight()], RATE)
            scheduler = technique.apply_reduction_on_plateau(optimizer, **PLATEAU)
            scheduler.load_state_dict(state)
            models.set_rate(optimizer, rate)
        scheduler.step(loss)
        seen.append(models.rate_of(optimizer))
    wanted = reduced(LOSSES)
    assert len(set(wanted)) > 3
    assert wanted[-1] == 0.02
    assert np.abs(np.array(seen) - wanted).max() < 1e-8  # Keras keeps the rate in float32


@pytest.mark.parametrize(("by", "rate"), [(-1e-4, RATE / 2), (1e-4, RATE / 2), (-0.1, RATE)])
def test_a_plateau_below_zero_reduces_the_rate(technique, models, by, rate):
    """Flat, rising, and falling."""
    optimizer = models.sgd_of([models.weight()], RATE)
    scheduler = technique.apply_reduction_on_plateau(optimizer, **PLATEAU)
    for number in range(4):
        scheduler.step(-1.0 + by * number)
    assert models.rate_of(optimizer) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("apply_cosine", {"steps": 0}, "steps"),
        ("apply_linear_decay", {"steps": 5, "warmup": 5}, "warmup"),
        ("apply_cosine", {"steps": 5, "final": 1.5}, "final"),
        ("apply_one_cycle", {"steps": 1}, "steps"),
        ("apply_one_cycle", {"steps": 9, "rising": 0.0}, "rising"),
        ("apply_one_cycle", {"steps": 20, "rising": 0.05}, "rising"),
        ("apply_one_cycle", {"steps": 9, "initial": 0.1, "final": 0.2}, "initial"),
        ("apply_reduction_on_plateau", {"factor": 1.0}, "actor"),
    ],
)
def test_bad_settings_are_refused_and_the_rate_stays(technique, models, name, settings, message):
    optimizer = models.sgd_of([models.weight()], RATE)
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(technique, name)(optimizer, **settings)
    assert models.rate_of(optimizer) == pytest.approx(RATE)


@pytest.mark.only("tf", "tf_keras")
def test_tf_an_optimizer_around_another_has_the_rate_of_that_one(technique, models):
    """And its schedule, of which there is one."""
    optimizer = models.around(models.sgd_of([models.weight()], RATE))
    assert technique.current_rate(optimizer) == pytest.approx(RATE)
    made = technique.apply_cosine(optimizer, steps=10, warmup=4)
    assert max(float(made(step)) for step in range(10)) == pytest.approx(RATE)
    assert technique.current_rate(optimizer) == pytest.approx(float(made(0)))
    with pytest.raises(ValueError, match="schedule already"):
        technique.apply_cosine(optimizer, steps=10)


@pytest.mark.only("tf")
def test_tf_the_current_rate_is_that_of_an_update_from_several_batches(technique, models):
    weight = models.weight()
    optimizer = models.keras.optimizers.SGD(RATE, gradient_accumulation_steps=2)
    technique.apply_linear_decay(optimizer, steps=STEPS)
    told, used = [], []
    for _ in range(4):
        told.append(technique.current_rate(optimizer))
        used.append(models.moved(weight, optimizer, None))
    assert used == pytest.approx([0, RATE * (1 - 1 / STEPS), 0, RATE * (1 - 3 / STEPS)])
    assert told[1::2] == pytest.approx(used[1::2])


@pytest.mark.only("pt")
@pytest.mark.parametrize("case", CASES)
def test_pt_a_second_schedule_starts_from_the_rate_that_the_optimizer_has_then(
    technique, models, start, case
):
    """Also where that is a tensor."""
    _, optimizer, _ = start(case)
    for rate in (RATE / 100, models.tensor(RATE / 100)):
        models.set_rate(optimizer, rate)
        for again in (technique.apply_linear_decay, technique.apply_cosine):
            again(optimizer, steps=STEPS)
            assert technique.current_rate(optimizer) == pytest.approx(RATE / 100)


def test_the_linear_rule(technique):
    scaled = technique.scale_rate(rate=0.1, batch_size=1024, reference_batch_size=256)
    assert scaled == pytest.approx(0.4)


# Rows -------------------------------------------------------------------------------------------


def work_of(settings, **model):
    spec = CNNSpec((8, 8, 1), ((4, 1),), num_classes=10, **model)
    task = replace(TASKS["digits-cnn"], model=spec)
    return Work(task, "row", settings, 16, init_weights(spec, seed=0))


@pytest.mark.parametrize(
    ("row", "rate"),
    [
        ({}, 0.02),
        ({"factor": 4.0}, 0.08),
        ({"times": 8}, 0.02),
        ({"times": 8, "scaled": True}, 0.16),
    ],
)
def test_a_row_begins_with_its_factor_or_the_linear_rule(impl, row, rate):
    assert bench_schedules._first_rate(impl, work_of(row)) == pytest.approx(rate)


def test_accumulated_batches_are_seen_in_parts_at_the_scaled_rate_and_update_once(
    impl, framework, models, tmp_path
):
    """The row of eight accumulated batches at eight times the rate: its proof, its training."""
    task = TASKS["digits-cnn"]
    small = replace(
        task,
        dataset=replace(task.dataset, name="few-digits", train_size=128, test_size=20),
        model=replace(task.model, convolutions=((4, 2), (4, 2))),
        recipe=replace(task.recipe, epochs=3, accuracy_batch_size=8),
    )
    row = f"schedules/digits-cnn-{small.compute_batch}/{framework}/accumulated_x8_scaled"
    with mock.patch.dict(TASKS, {"digits-cnn": small}):
        cases = cases_of(bench_schedules.TECHNIQUE, bench_schedules.__name__, "ordinary")
        (case,) = [case for case in cases if case.id == row]
        operations = Operations()
        operations.impl, operations.kit = impl, impl.kit
        data = str(datasets.materialise(small.dataset, tmp_path))
        found = operations._op_train(case.message(), data, 0, str(tmp_path), prove=True)
    evidence = found.evidence
    assert not found.not_applied
    assert evidence["rate"] == pytest.approx(0.16)
    whole = evidence["first_loss_of_the_whole_batch"]
    assert 1e-4 < abs(evidence["first_loss"] / whole - 1) < 0.5
    assert evidence["updates"] == 3 * 128 // 64
    assert found.epochs == 3
    assert 0 <= found.value <= 100


def test_what_did_not_happen_is_said(impl, kit, models):
    """A step of another rate, and one where nothing shows that there were parts."""
    random, row = np.random.default_rng(0), {"times": 8, "accumulated": True}
    images = random.normal(size=(16, 8, 8, 1)).astype(np.float32)
    batch, said = kit.data.to_device(images, np.arange(16) % 10), []
    for work, made in (
        (work_of(row | {"scaled": True}), work_of(row)),
        [work_of(row, batch_norm=False)] * 2,
    ):
        prepared = bench_schedules.prepare(impl, made)
        said.append(bench_schedules.took_effect(impl, work, prepared, batch)[1])
    assert re.fullmatch(r"the rate is 0\.0.* not 0\.16", said[0])
    assert said[1] == "the batch was seen at once"
