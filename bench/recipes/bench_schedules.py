"""Learning-rate schedules: final accuracy, steps until a target, and how restless the loss is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bench.harness.plan import Measure, Prepared, Technique, Variant, Work, Workload
from bench.harness.stages import Stages
from shared.specs import Task

TRAINED = Measure(time=False, cold=False)
WARMUP = 0.05  # share of the steps

TECHNIQUE = Technique(
    family="recipes",
    name="schedules",
    title="Learning-rate schedules",
    variants=(
        Variant("constant", role="baseline", measured=TRAINED, title="constant rate"),
        *(
            Variant(
                name,
                {"schedule": schedule, "factor": factor},
                measured=TRAINED,
                effort=effort,
                changes="math",
                title=title,
            )
            for name, schedule, factor, effort, title in (
                ("cosine", "cosine", 1.0, "default", "cosine with warm-up"),
                ("linear_decay", "linear_decay", 1.0, "ordinary", "linear decay with warm-up"),
                ("one_cycle", "one_cycle", 1.0, "default", "one cycle"),
                ("plateau", "reduction_on_plateau", 1.0, "default", "reduced on a plateau"),
                ("constant_x4", None, 4.0, "ordinary", "constant, 4 times the rate"),
                ("cosine_x4", "cosine", 4.0, "ordinary", "cosine, 4 times the rate"),
                ("one_cycle_x4", "one_cycle", 4.0, "ordinary", "one cycle, 4 times the rate"),
            )
        ),
    ),
    workloads=(
        Workload("digits-cnn", "compute", accuracy=True, timed=False),
        Workload("digits-detection", "compute", effort="ordinary", accuracy=True, timed=False),
    ),
    differs_by_design=(
        "With momentum, PyTorch's sum of gradients and Keras's sum of updates drift apart where "
        "the rate changes.",
    ),
    notes=(
        f"The warm-up is {WARMUP:.0%} of the steps. A plateau is two epochs in a row whose mean "
        "training loss is no better; the rate is then divided by ten.",
        "A step costs what it costs with a constant rate: nothing is timed. The rate of constant "
        "is the task's, which was chosen for a constant one; x4 rows begin from four times that.",
    ),
)


def steps_in_all(task: Task) -> int:
    """The steps of a training by the task's recipe."""
    return task.recipe.epochs * steps_an_epoch(task)


def steps_an_epoch(task: Task) -> int:
    """The whole batches of an epoch."""
    return task.dataset.train_size // task.recipe.accuracy_batch_size


def prepare(impl, work: Work) -> Prepared:
    """The plain step with an optimizer whose rate has a schedule."""
    model = impl.kit.models.build(work.task.model, work.weights)
    predict = impl.kit.training.make_predict(model)
    optimizer, schedule = make_scheduled(impl, work, model)
    loss = impl.kit.training.loss_of(work.task)
    plain = impl.kit.training.make_train_step(model, optimizer, loss)
    step = _advancing(plain, schedule, work)

    def train(stages: Stages) -> None:
        if work.settings:
            stages.watch(step, predict)
        else:
            stages.watch_plain(model)

    return Prepared(step, predict, model, optimizer, train=train)


def make_scheduled(impl, work: Work, model):
    """An optimizer and its schedule, which is None where the rate is constant."""
    recipe = work.task.recipe
    rate = work.settings.get("factor", 1.0) * recipe.learning_rate
    optimizer = impl.kit.training.make_optimizer(model, replace(recipe, learning_rate=rate))
    schedules, name = impl.recipes.schedules, work.settings.get("schedule")
    if name is None:
        return optimizer, None
    apply = getattr(schedules, f"apply_{name}")
    if name == "reduction_on_plateau":
        return optimizer, apply(optimizer, factor=0.1, patience=1)
    steps = steps_in_all(work.task)
    settings = {} if name == "one_cycle" else {"warmup": round(WARMUP * steps)}
    return optimizer, apply(optimizer, steps=steps, **settings)


def _advancing(step: Callable, schedule, work: Work) -> Callable:
    """The step, which tells the schedule what it waits for; Keras's asks the optimizer."""
    if not hasattr(schedule, "step"):
        return step
    taken, losses = 0, []

    def advancing(x, y):
        nonlocal taken
        loss = step(x, y)
        taken += 1
        if work.settings["schedule"] != "reduction_on_plateau":
            if taken < steps_in_all(work.task):  # the last step has the last rate
                schedule.step()
        else:
            losses.append(loss)
            if len(losses) == steps_an_epoch(work.task):
                schedule.step(sum(map(float, losses)) / len(losses))
                losses.clear()
        return loss

    return advancing


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """The rate changes, from step to step or after epochs that are no better."""
    schedules = impl.recipes.schedules
    if not work.settings.get("schedule"):
        return {"rate": schedules.current_rate(prepared.optimizer)}, None
    model = impl.kit.models.build(work.task.model, work.weights)
    optimizer, schedule = make_scheduled(impl, work, model)
    rates = [schedules.current_rate(optimizer)]
    if work.settings["schedule"] == "reduction_on_plateau":
        for _ in range(3):
            schedule.step(1.0)
            rates.append(schedules.current_rate(optimizer))
    else:
        for _ in range(3):
            prepared.step(*batch)
            rates.append(schedules.current_rate(prepared.optimizer))
    return {"rates": rates}, None if len(set(rates)) > 1 else "the rate did not change"


def bench_schedules(case, replay):
    """Replay one measured case."""
    replay(case)
