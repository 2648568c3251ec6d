"""Learning-rate schedules, and rates that follow the batch: final accuracy, steps to a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from bench.harness.plan import TRAINED, Prepared, Technique, Variant, Work, Workload, other_math
from bench.harness.stages import Stages, curve

_row = partial(other_math, measured=TRAINED)
# The linear rule is one for SGD: the detector is trained with AdamW.
_larger = partial(other_math, measured=replace(TRAINED, tasks=("digits-cnn",)))
WARMUP = 0.05  # share of the steps
DRAWN = 60  # points of a curve, about

TECHNIQUE = Technique(
    family="recipes",
    name="schedules",
    effort="ordinary",
    title="Learning-rate schedules",
    variants=(
        Variant("constant", role="baseline", measured=TRAINED, title="constant rate"),
        _row("cosine", "cosine with warm-up", schedule="cosine", factor=1.0),
        _row(
            "linear_decay",
            "linear decay with warm-up",
            "ordinary",
            schedule="linear_decay",
            factor=1.0,
        ),
        _row("one_cycle", "one cycle", "ordinary", schedule="one_cycle", factor=1.0),
        _row(
            "plateau",
            "reduced on a plateau",
            "ordinary",
            schedule="reduction_on_plateau",
            factor=1.0,
        ),
        _row("constant_x4", "constant, 4 times the rate", "ordinary", schedule=None, factor=4.0),
        _row("cosine_x4", "cosine, 4 times the rate", "ordinary", schedule="cosine", factor=4.0),
        _row(
            "one_cycle_x4",
            "one cycle, 4 times the rate",
            "ordinary",
            schedule="one_cycle",
            factor=4.0,
        ),
        _larger("batch_x8", "8 times the batch", "ordinary", times=8),
        _larger(
            "batch_x8_scaled", "8 times the batch and the rate", "ordinary", times=8, scaled=True
        ),
        _larger(
            "batch_x8_warm",
            "8 times the batch and the rate, an epoch of warm-up",
            "full",
            times=8,
            scaled=True,
            schedule="warmup",
        ),
        _larger("accumulated_x8", "8 batches accumulated", "full", times=8, accumulated=True),
        _larger(
            "accumulated_x8_scaled",
            "8 batches accumulated, 8 times the rate",
            "ordinary",
            times=8,
            accumulated=True,
            scaled=True,
        ),
        _larger("batch_x2", "twice the batch", "full", times=2),
        _larger("batch_x2_scaled", "twice the batch and the rate", "full", times=2, scaled=True),
    ),
    workloads=(
        Workload("digits-cnn", "compute", accuracy=True, timed=False),
        Workload("digits-detection", "compute", effort="ordinary", accuracy=True, timed=False),
    ),
    differs_by_design=(
        "With momentum, PyTorch's sum of gradients and Keras's sum of updates drift apart when "
        "the rate changes.",
    ),
    notes=(
        f"The warm-up is {WARMUP:.0%} of the steps. A plateau is two epochs in a row without "
        "improvement of the mean training loss; the rate is then divided by ten.",
        "A step costs the same at any rate, so nothing is timed. The rate of constant is the "
        "task's, which was chosen for a constant rate; x4 rows start at four times that.",
        "Rows of larger batches see the same number of samples in fewer steps; each of these "
        "counts as one in steps to the target. Accumulated rows compute the batch in parts, each "
        "with BatchNorm statistics of that part.",
    ),
    composed_of=("train_step.gradient_accumulation",),
)


def batch_size_of(work: Work) -> int:
    """Samples of an update."""
    return work.settings.get("times", 1) * work.task.recipe.accuracy_batch_size


def steps_in_all(work: Work) -> int:
    """The steps of a training by the task's recipe."""
    return work.task.recipe.epochs * steps_an_epoch(work)


def steps_an_epoch(work: Work) -> int:
    """The whole batches of an epoch."""
    return work.task.dataset.train_size // batch_size_of(work)


def prepare(impl, work: Work) -> Prepared:
    """The plain step with an optimizer whose rate has a schedule."""
    model = impl.kit.models.build(work.task.model, work.weights)
    predict = impl.kit.training.make_predict(model)
    optimizer, schedule = make_scheduled(impl, work, model)
    loss = impl.kit.training.loss_of(work.task)
    if work.settings.get("accumulated"):
        make = impl.train_step.gradient_accumulation.make_train_step
        plain = make(model, optimizer, loss, micro_batches=work.settings["times"])
    else:
        plain = impl.kit.training.make_train_step(model, optimizer, loss)
    step = _advancing(plain, schedule, work)

    def train(stages: Stages) -> None:
        if not work.settings:
            stages.watch_plain(model)
            return
        size = batch_size_of(work) if "times" in work.settings else None
        if stages.seed > 0:
            stages.watch(step, predict, batch_size=size)
            return
        # The first seed's evidence is kept. To look at the rate takes time: the others don't.
        rate = partial(impl.recipes.schedules.current_rate, optimizer)
        noted = _Noted(step, rate, steps_in_all(work))
        stages.watch(noted, predict, batch_size=size)
        stages.evidence["updates"] = noted.taken
        if schedule is not None:
            stages.evidence["curve"] = curve(noted.rates, x="step", y="learning rate")

    return Prepared(step, predict, model, optimizer, train=train)


def make_scheduled(impl, work: Work, model):
    """An optimizer and its schedule, which is None where the rate is constant."""
    schedules, name = impl.recipes.schedules, work.settings.get("schedule")
    recipe = replace(work.task.recipe, learning_rate=_first_rate(impl, work))
    optimizer = impl.kit.training.make_optimizer(model, recipe)
    if name is None:
        return optimizer, None
    steps = steps_in_all(work)
    if name == "warmup":  # after which the rate stays
        settings = {"steps": steps, "warmup": steps_an_epoch(work), "final": 1.0}
        return optimizer, schedules.apply_linear_decay(optimizer, **settings)
    apply = getattr(schedules, f"apply_{name}")
    if name == "reduction_on_plateau":
        return optimizer, apply(optimizer, factor=0.1, patience=1)
    settings = {} if name == "one_cycle" else {"warmup": round(WARMUP * steps)}
    return optimizer, apply(optimizer, steps=steps, **settings)


def _first_rate(impl, work: Work) -> float:
    """The rate that a schedule starts from, or that stays."""
    recipe = work.task.recipe
    rate = work.settings.get("factor", 1.0) * recipe.learning_rate
    if not work.settings.get("scaled"):
        return rate
    sizes = {"batch_size": batch_size_of(work), "reference_batch_size": recipe.accuracy_batch_size}
    return impl.recipes.schedules.scale_rate(rate=rate, **sizes)


class _Noted:
    """Stands for a step, counts, and keeps the rates of about `DRAWN` of `steps`."""

    def __init__(self, step: Callable, rate: Callable[[], float], steps: int) -> None:
        self.step, self.rate, self.steps = step, rate, steps
        self.taken = 0
        self.rates: list[tuple[int, float]] = []

    def __call__(self, x, y):
        if self.taken % max(1, self.steps // DRAWN) == 0 or self.taken == self.steps - 1:
            self.rates.append((self.taken, self.rate()))
        self.taken += 1
        return self.step(x, y)


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
            if taken < steps_in_all(work):  # the last step has the last rate
                schedule.step()
        else:
            losses.append(loss)
            if len(losses) == steps_an_epoch(work):
                schedule.step(sum(map(float, losses)) / len(losses))
                losses.clear()
        return loss

    return advancing


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """The rate changes, from step to step or after epochs that are no better, or is as scaled."""
    schedules = impl.recipes.schedules
    if not work.settings.get("schedule"):
        return _rate_and_parts(impl, work, prepared, batch)
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


def _rate_and_parts(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """The rate, and that an accumulated batch is seen in parts: to BatchNorm it is another."""
    evidence = {"rate": impl.recipes.schedules.current_rate(prepared.optimizer)}
    times = work.settings.get("times", 1) if work.settings.get("scaled") else 1
    wanted = times * work.settings.get("factor", 1.0) * work.task.recipe.learning_rate
    if abs(evidence["rate"] - wanted) > 1e-6 * wanted:  # Keras keeps it in float32
        return evidence, f"the rate is {evidence['rate']}, not {wanted}"
    if not work.settings.get("accumulated"):
        return evidence, None
    parts, whole = (
        impl.kit.runtime.to_float(prepare(impl, replace(work, settings=settings)).step(*batch))
        for settings in (work.settings, {})
    )
    evidence |= {"first_loss": parts, "first_loss_of_the_whole_batch": whole}
    apart = abs(parts - whole) > 1e-4 * whole
    return evidence, None if apart else "the batch was seen at once"
