"""Stages of training: batches of a row's own, and what several rows share and nobody does twice."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from bench.harness import accuracy, stages, worker
from bench.harness.plan import Prepared
from bench.harness.stages import Stages, curve
from bench.harness.watching import EVERY
from shared.specs import TASKS

TASK = TASKS["digits-cnn"]
WEIGHTS = {"kernel": np.zeros(3, np.float32)}
STEPS = 40


class Kit:
    """A model is its weights, to which each step adds one; `updates` counts the steps of all."""

    def __init__(self):
        self.updates = 0
        self.training = SimpleNamespace(
            make_optimizer=lambda model, recipe: None,
            make_train_step=self.make_train_step,
            make_predict=lambda model: model,
            loss_of=lambda task: None,
        )
        self.models = SimpleNamespace(export_weights=dict, import_weights=dict.update)

    def make_train_step(self, model, optimizer, loss):
        def step(x, y):
            self.updates += 1
            model["kernel"] = model["kernel"] + 1
            return 1.0

        return step


@pytest.fixture
def kit():
    return Kit()


@pytest.fixture
def row(kit, tmp_path):
    """What a row is given: `row(seed=..., weights=...)`."""

    def make(seed=0, weights=WEIGHTS, fit=None):
        def train(step, epochs):
            for _ in range(STEPS):
                step(None, None)

        impl = SimpleNamespace(kit=kit)
        return Stages(impl, TASK, weights, seed, tmp_path, fit or train, lambda *_: 91.0)

    return make


def test_a_row_trains_with_the_recipe_s_batch_or_its_own(row):
    asked = []
    given = row(fit=lambda step, epochs, batch_size=None: asked.append((epochs, batch_size)))
    given.fit(None)
    given.fit(None, 2, batch_size=512)
    assert asked == [(TASK.recipe.epochs, None), (2, 512)]
    assert given.epochs == TASK.recipe.epochs + 2


def test_a_watched_training_has_the_batch_that_was_asked_for(row):
    asked = []

    def train(watch, epochs, batch_size=None):
        asked.append(batch_size)
        for _ in range(STEPS):
            watch(None, None)

    given = row(fit=train)
    given.watch(lambda x, y: 1.0, None, batch_size=512)
    assert asked == [512]
    assert given.metrics["steps_to_target"]["value"] == EVERY


def test_a_watched_training_is_evaluated_in_the_context_that_was_asked_for(row):
    entered = []

    @contextmanager
    def other_weights():
        entered.append(1)
        yield

    def train(watch, epochs):
        for _ in range(STEPS):
            watch(None, None)

    given = row(fit=train)
    given.watch(lambda x, y: 1.0, None, evaluating=other_weights)
    assert len(entered) == 2  # the target is reached at the first look; then the training split


@pytest.mark.parametrize(("asked", "taken"), [({}, 64), ({"batch_size": 24}, 24)])
def test_a_worker_cuts_the_training_split_into_batches_of_that_size(monkeypatch, asked, taken):
    seen = []
    monkeypatch.setattr(accuracy.datasets, "load", lambda folder, split: (None, None))
    operations = worker.Operations()
    operations.kit = SimpleNamespace(
        data=SimpleNamespace(to_device=lambda x, y: (x, y)),
        training=SimpleNamespace(fit=lambda *_, batch_size, **__: seen.append(batch_size)),
    )
    operations.impl, operations.work = None, SimpleNamespace(task=TASK)
    operations.prepared = Prepared(None, None, None, None)
    operations._fit(None, 0, None, 1, **asked)
    assert seen == [taken]


def test_what_is_worked_out_once_is_found_by_every_other_row(row):
    worked = []

    def work_out():
        worked.append(1)
        return {"suggestion": 0.1 + 0.2, "losses": [1.5, None]}

    first = row().once("range_test", work_out)
    assert first == row().once("range_test", work_out) == {**work_out(), "losses": [1.5, None]}
    assert len(worked) == 2  # the second for the comparison
    for other, name in (
        (row(), "another"),
        (row(seed=1), "range_test"),
        (row(weights={"kernel": np.ones(3, np.float32)}), "range_test"),
    ):
        before = len(worked)
        other.once(name, work_out)
        assert len(worked) == before + 1


def test_a_plain_training_is_watched_once_and_given_to_all(row, kit):
    models = [dict(WEIGHTS), dict(WEIGHTS)]
    given = [row(), row()]
    for each, model in zip(given, models, strict=True):
        each.watch_plain(model)
    assert kit.updates == STEPS
    assert [each.epochs for each in given] == [TASK.recipe.epochs, 0]
    assert given[0].metrics == given[1].metrics
    assert given[0].metrics["steps_to_target"]["value"] == EVERY
    for model in models:
        assert (model["kernel"] == STEPS).all()


def test_a_row_that_is_ended_while_it_writes_leaves_nothing_to_be_found(row, kit, monkeypatch):
    def ended(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stages.np, "savez", ended)
        with pytest.raises(KeyboardInterrupt):
            row().watch_plain(dict(WEIGHTS))
    model = dict(WEIGHTS)
    row().watch_plain(model)
    assert kit.updates == 2 * STEPS
    assert (model["kernel"] == STEPS).all()


def test_a_value_is_written_whole_or_not_at_all(row, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(stages.Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            row().once("range_test", lambda: 1)
    assert not list(tmp_path.glob("*.json"))
    assert row().once("range_test", lambda: 2) == 2


def test_a_curve_has_points_of_five_digits_and_one_to_mark():
    points = ((step, 1 / 3**step) for step in range(3))
    assert curve(points, x="step", y="rate") == {
        "x": "step",
        "y": "rate",
        "log": False,
        "points": [[0, 1], [1, 0.33333], [2, 0.11111]],
    }
    marked = curve([(123456.7, 2)], x="rate", y="loss", log=True, mark=(2 / 3, 1.0000001))
    assert marked["points"] == [[123460, 2]]
    assert (marked["mark"], marked["log"]) == ([0.66667, 1], True)
