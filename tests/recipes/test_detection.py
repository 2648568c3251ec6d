"""Rows of recipes on the detection task: trained, proven, and judged by mAP."""

from __future__ import annotations

import importlib
from dataclasses import replace
from unittest import mock

import msgspec
import pytest

from bench.harness.selection import cases_of
from bench.harness.worker import Operations
from bench.record import Metric
from shared import datasets
from shared.specs import TASKS
from tests import workers

FRAMEWORKS = ("pt", *workers.keras())
TASK = TASKS["digits-detection"]
SMALL = replace(
    TASK,
    dataset=replace(TASK.dataset, name="few-scenes", train_size=8 * 16, test_size=20),
    model=replace(TASK.model, convolutions=((8, 2), (16, 2), (16, 2)), levels=(1, 2)),
    recipe=replace(TASK.recipe, epochs=2),
    target=0.0,  # which the first look finds reached
)


@pytest.fixture
def train(impl, framework, tmp_path):
    """`train(technique, variant)`: the metrics of what a worker answers that trains a row."""

    def run(technique, variant):
        module = importlib.import_module(f"bench.recipes.bench_{technique}")
        importlib.import_module(f"{impl.__name__}.recipes.{technique}")
        operations = Operations()
        operations.impl, operations.kit = impl, impl.kit
        with mock.patch.dict(TASKS, {"digits-detection": SMALL}):
            data = str(datasets.materialise(SMALL.dataset, tmp_path))
            cases = cases_of(module.TECHNIQUE, module.__name__, "ordinary")
            name = f"{technique}/digits-detection-{SMALL.compute_batch}/{framework}/{variant}"
            (case,) = [case for case in cases if case.id == name]
            answer = operations._op_train(case.message(), data, 0, str(tmp_path), prove=True)
        assert not answer.not_applied
        assert answer.evidence is not None
        metrics = msgspec.convert(msgspec.to_builtins(answer.metrics), dict[str, Metric])  # as sent
        assert 0 <= answer.value <= metrics["mAP50"].value <= 100
        assert metrics["mAP50"].unit == "%"
        return metrics

    return run


def test_a_watched_training_says_when_it_reached_its_target(train):
    metrics = train("schedules", "cosine")
    assert metrics["steps_to_target"].value is None  # 16 steps: it looks at the 20th first
    assert metrics["loss_fluctuation"].value > 0
    assert metrics["loss_fluctuation"].unit == ""
    assert 0 <= metrics["train_mAP"].value <= 100


@pytest.mark.only("pt", "tf")  # for legacy Keras, what trains and judges is the same
def test_an_early_stop_keeps_to_the_epochs_of_the_task(train):
    assert train("averaging", "swa_early_stopping")["epochs"].value <= 2
