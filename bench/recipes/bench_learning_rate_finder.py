"""Learning-rate finder: what training reaches with its suggestion, half and twice of it."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

from bench.harness.plan import TRAINED, Prepared, Technique, Variant, Work, Workload, other_math
from bench.harness.stages import Stages, curve

_row = partial(other_math, measured=TRAINED)

TECHNIQUE = Technique(
    family="recipes",
    name="learning_rate_finder",
    effort="ordinary",
    title="Learning-rate finder",
    variants=(
        Variant("task", role="baseline", measured=TRAINED, title="the task's own rate"),
        _row("suggested", "suggested rate", factor=1.0),
        _row("half", "half of the suggested rate", "ordinary", factor=0.5),
        _row("twice", "twice the suggested rate", "ordinary", factor=2.0),
        _row("tenth", "a tenth of the suggested rate", "ordinary", factor=0.1),
    ),
    workloads=(Workload("digits-cnn", "compute", accuracy=True, timed=False),),
    notes=(
        "The suggestion is made once per seed, from the weights and data at the start of "
        "training; all rows use it. The steps of the test are not counted.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """The plain step; training asks the finder for its rate."""
    model = impl.kit.models.build(work.task.model, work.weights)
    predict = impl.kit.training.make_predict(model)
    optimizer, step = _step(impl, work, model, work.task.recipe.learning_rate)

    def train(stages: Stages) -> None:
        if not work.settings:
            stages.watch_plain(model)
            return
        test = stages.once("range_test", lambda: _range_test(impl, work, model, stages))
        rate = work.settings["factor"] * test["suggestion"]
        stages.watch(_step(impl, work, model, rate)[1], predict)
        stages.metrics["learning_rate"] = {"value": rate, "unit": ""}
        if work.settings["factor"] == 1:  # the others' is the same
            stages.evidence["curve"] = _curve(test)

    return Prepared(step, predict, model, optimizer, train=train)


def _step(impl, work: Work, model, rate: float):
    """A new optimizer of that rate, and its step."""
    recipe = replace(work.task.recipe, learning_rate=rate)
    optimizer = impl.kit.training.make_optimizer(model, recipe)
    return optimizer, impl.kit.training.make_train_step(
        model, optimizer, impl.kit.training.cross_entropy
    )


def _range_test(impl, work: Work, model, stages: Stages) -> dict:
    """A `RangeTest` as a dictionary."""
    optimizer, step = _step(impl, work, model, work.task.recipe.learning_rate)
    order = {"batch_size": work.task.recipe.accuracy_batch_size, "seed": stages.seed, "epoch": 0}
    batches = list(impl.kit.data.epoch_batches(*stages.split("train"), **order))
    find = impl.recipes.learning_rate_finder.find_learning_rate
    return asdict(find(model, optimizer, step, batches))


def _curve(test: dict) -> dict:
    """The smoothed losses over the rates, every second one, and the suggestion."""
    losses = list(zip(test["rates"], test["smoothed"], strict=True))
    mark = next(point for point in losses if point[0] == test["suggestion"])
    return curve(losses[::2], x="learning rate", y="loss, smoothed", log=True, mark=mark)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """The suggestion follows from one batch, again and again; the rate is not the task's."""
    if not work.settings:
        return {}, None
    optimizer, step = _step(impl, work, prepared.model, work.task.recipe.learning_rate)
    find = impl.recipes.learning_rate_finder.find_learning_rate
    rate = work.settings["factor"] * find(prepared.model, optimizer, step, [batch]).suggestion
    same = rate == work.task.recipe.learning_rate
    return {"rate_from_one_batch": rate}, "the rate is the task's own" if same else None
