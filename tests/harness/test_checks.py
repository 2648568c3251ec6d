"""Checks of what a row keeps: against plain framework code, on planted rows, and who is checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.analysis import checks as analysis
from bench.harness import checks, keeping
from bench.harness.matches import Played
from bench.harness.plan import EFFORT, CaseMessage
from bench.harness.run_plan import techniques
from bench.harness.selection import cases_of
from bench.harness.worker import Operations
from bench.record import KEPT, LOST, UNTOLD, Case, LossCheck, TaskFacts
from shared import datasets
from shared.specs import LOSS_MARGIN, TASKS, parameter_count
from shared.specs import LossCheck as Short
from shared.weights import checksum, init_weights
from tests.harness import planted_checks
from tests.harness.runs import plan_of, state_of

FRAMEWORKS = ("pt", "tf")
TASK = TASKS["digits-cnn"]
CHECK = Short(steps=32, batch_size=32, learning_rate=0.01, held_out=96)
SMALL = replace(
    TASK,
    dataset=replace(TASK.dataset, name="few-digits", train_size=512, test_size=600),
    loss_check=CHECK,
    deployed=replace(TASK.recipe, epochs=6, accuracy_batch_size=32),
)
CHAOS = LOSS_MARGIN / 10  # how far rounding may move a held-out loss at a task's rate


@pytest.fixture
def task(monkeypatch):
    monkeypatch.setitem(TASKS, SMALL.name, SMALL)
    return SMALL


@pytest.fixture
def data(task, tmp_path_factory):
    """Where the small task's data lies."""
    return datasets.materialise(task.dataset, tmp_path_factory.getbasetemp() / "digits")


@pytest.fixture
def worker(impl, tmp_path, monkeypatch):
    """A worker in this process, whose run trains models into an empty folder."""
    monkeypatch.setenv(keeping.TRAINED, str(tmp_path / "trained"))
    made = Operations()
    made._op_configure(impl.__name__, threads=1, seed=0, imports=[])
    return made


def message(variant="equal", mode="train"):
    return CaseMessage(
        module=planted_checks.__name__,
        family="train_step",
        technique="planted",
        composed_of=(),
        variant=variant,
        settings={},
        program=None,
        task=SMALL.name,
        batch_size=16,
        mode=mode,
    )


# The loss of a short training ---------------------------------------------------------------------


def loss_check(worker, data, variant, seeds=3):
    answers = [worker._op_check_loss(message(variant), str(data), seed) for seed in range(seeds)]
    return LossCheck(
        steps=CHECK.steps,
        batch_size=CHECK.batch_size,
        learning_rate=CHECK.learning_rate,
        samples=CHECK.held_out,
        first=[answer.first for answer in answers],
        per_seed=[answer.held_out for answer in answers],
    )


def test_the_loss_is_that_of_plain_code_from_the_same_weights_and_batches(worker, models, data):
    x, y = datasets.load(data, "train")
    batches = datasets.first_batches(x, y, CHECK.batch_size, CHECK.steps, seed=1)
    weights = init_weights(SMALL.model, 1)
    model = models.trained(SMALL.model, weights, batches, CHECK.learning_rate)
    x, y = (np.array(part[: CHECK.held_out]) for part in datasets.load(data, "test"))
    found = worker._op_check_loss(message(), str(data), 1)
    assert found.held_out == pytest.approx(models.held_out_loss(model, x, y), abs=CHAOS)
    assert found.first > found.held_out + analysis.LEARNED


def test_a_row_that_learns_less_loses_and_an_equal_one_keeps_its_loss(worker, data):
    plain = loss_check(worker, data, "equal")
    less = loss_check(worker, data, "every_fourth_update")
    base = Case(**ABOUT, id="a", variant="base", role="baseline", loss_check=plain)
    row = Case(**ABOUT, id="b", variant="row", role="variant", loss_check=less)
    assert analysis.of_loss(row, base).verdict == LOST
    assert analysis.of_loss(row.but(loss_check=plain), base).verdict == KEPT
    again = worker._op_check_loss(message("equal"), str(data), 0)
    assert again.held_out == pytest.approx(plain.per_seed[0], abs=CHAOS)


ABOUT = {
    "technique": "planted",
    "framework": "pt",
    "task": SMALL.name,
    "batch_size": 16,
    "status": "OK",
}


@pytest.mark.parametrize(
    "name",
    [
        "text-gpt",
        *(
            pytest.param(name, marks=pytest.mark.campaign)
            for name, task in TASKS.items()
            if task.loss_check and name != "text-gpt" and parameter_count(task.model) < 12e6
        ),
    ],
)
@pytest.mark.only("pt")
def test_at_a_task_s_rate_rounding_stays_rounding(worker, name, tmp_path, monkeypatch):
    """Weights that differ in their last bit move the held-out loss by less than the bound."""
    data = datasets.materialise(TASKS[name].dataset, tmp_path / "data")
    case = message()
    case = CaseMessage(**{n: getattr(case, n) for n in case.__struct_fields__} | {"task": name})
    loss = worker._op_check_loss(case, str(data), 0).held_out

    def moved(spec, seed):
        signs = np.random.default_rng(9)
        return {
            name: np.nextafter(value, value * signs.choice([0, 2], value.shape)).astype(np.float32)
            for name, value in init_weights(spec, seed).items()
        }

    monkeypatch.setattr(keeping, "init_weights", moved)
    assert abs(worker._op_check_loss(case, str(data), 0).held_out - loss) < CHAOS


# Predictions --------------------------------------------------------------------------------------


def test_predictions_are_compared_with_those_of_the_run_s_trained_model(worker, models, data):
    metric = worker._op_deploy(message(), str(data), 0).value
    assert metric > 30  # of ten classes
    weights = keeping.load_weights(keeping.trained_weights(SMALL.name))
    built = worker._op_build(message(mode="predict"), str(data), weights_seed=0)
    assert built.weights_sha256 == checksum(weights)
    x, labels = (np.array(part) for part in datasets.load(data, "test"))
    right = models.logits(SMALL.model, weights, x).argmax(-1) == labels
    verdicts = {}
    for variant in ("equal", "coarse", "not_finite"):
        case = message(variant, mode="predict")
        found = worker._op_check_predictions(case, str(data), weights_seed=0)
        assert (found.samples, found.right) == (600, right.sum())
        row = Case(**ABOUT | {"mode": "predict"}, id="b", variant=variant, role="variant").but(
            fidelity=found
        )
        tasks = {SMALL.name: TaskFacts(metric="accuracy", margin=1.0)}
        verdicts[variant] = analysis.of_predictions(row, tasks).verdict
        if variant == "coarse":
            rounded = np.round(models.logits(SMALL.model, weights, x) / 4) * 4
            assert found.lost == (right & (rounded.argmax(-1) != labels)).sum()
    assert verdicts == {"equal": KEPT, "coarse": LOST, "not_finite": LOST}


def test_few_samples_tell_nothing_of_predictions():
    random = np.random.default_rng(0)
    expected = random.normal(0, 3, (40, 10))
    labels = expected.argmax(-1)
    outputs = expected + random.normal(0, 0.3, expected.shape)
    tasks = {SMALL.name: TaskFacts(metric="accuracy", margin=1.0)}
    row = Case(**ABOUT | {"mode": "predict"}, id="b", variant="noisy", role="variant")
    row = row.but(fidelity=keeping.compared(outputs, expected, labels))
    assert analysis.of_predictions(row, tasks).verdict == UNTOLD


# Who is checked -----------------------------------------------------------------------------------


def planned(*names):
    suite = techniques()
    cases = [
        case
        for name in names
        for case in cases_of(suite[name], f"bench.{suite[name].family}.bench_{name}", "default")
        if case.variant.role != "control"
    ]
    plan = plan_of(cases, EFFORT["default"], *(suite[name] for name in names))
    return plan, state_of(plan)


def variants(cases):
    return {(case.workload.task, case.framework, case.variant.name) for case in cases}


def test_rows_that_change_training_are_checked_with_their_baseline_unless_trained():
    plan, state = planned("mixed_precision", "gradient_clipping")
    found = variants(checks.expected(plan, state))
    assert found == variants(checks.wanted(plan, state))
    assert {
        ("photos-resnet18", side, name) for side in FRAMEWORKS for name in ("fp32", "bf16")
    } <= (found)
    assert ("text-gpt-10m", "pt", "clip") in found
    assert not any(task == "digits-cnn" for task, _, name in found if name == "bf16")
    programs = [case.id for case in checks.expected(plan, state)]
    assert len(set(programs)) == len(programs)  # a baseline of both techniques is checked once
    plain = [each for each in found if each[2] in ("fp32", "plain") and each[0] == "text-gpt-10m"]
    assert len(plain) == 2  # one a framework


def test_a_row_that_says_it_changes_nothing_is_checked_where_its_losses_differ():
    plan, state = planned("memory_format")
    assert not checks.expected(plan, state)
    work = [case for case in plan.every if case.framework == "pt" and case.task.blocks]
    base, row = sorted(work, key=lambda case: not case.is_baseline)[:2]
    for case, loss in ((base, 2.0), (row, 2.0)):
        state.cases[case.id].blocks = [Played(losses=[loss, 1.9], weights_sha256="a")]
    assert not checks.wanted(plan, state)
    state.cases[row.id].blocks = [Played(losses=[2.0, 1.8], weights_sha256="a")]
    assert {case.id for case in checks.wanted(plan, state)} == {base.id, row.id}
    state.cases[base.id].loss_check = state.cases[row.id].loss_check = LossCheck(
        steps=1, batch_size=1, learning_rate=1.0, samples=1
    )
    assert not checks.wanted(plan, state)


@pytest.mark.parametrize(("times", "checked"), [(3.9, True), (4.1, False)])
def test_a_row_that_takes_many_times_as_long_is_not_checked(times, checked):
    plan, state = planned("gradient_clipping")
    work = [case for case in plan.every if case.framework == "pt"]
    base, row = sorted(work, key=lambda case: not case.is_baseline)[:2]
    for case, step_s in ((base, 1.0), (row, times)):
        state.cases[case.id].blocks = [Played(samples=[step_s] * 3, steps=1, losses=[2.0, 1.9])]
    assert (row.id in {case.id for case in checks.wanted(plan, state)}) is checked


def test_a_model_is_trained_once_for_each_task_whose_predictions_are_measured():
    plan, _ = planned("post_training_quantization", "export", "mixed_precision")
    deployed = checks.deployed(plan)
    assert sorted(case.workload.task for case in deployed) == ["digits-cnn", "photos-resnet18"]
    assert {case.framework for case in deployed} == {"pt"}
    assert not checks.deployed(planned("mixed_precision")[0])
    quick = replace(plan, amount=EFFORT["quick"])
    assert not checks.deployed(quick)
    assert not checks.expected(quick, state_of(quick))


def test_a_check_s_folder_is_nobody_s_without_a_run(monkeypatch):
    monkeypatch.delenv(keeping.TRAINED, raising=False)
    assert not keeping.trained_weights(SMALL.name).exists()
    assert isinstance(keeping.trained_weights(SMALL.name), Path)
