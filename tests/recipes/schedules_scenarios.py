"""One framework's share of the schedules' tests; `worker.py` runs it."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from msgspec import to_builtins

from bench.harness.plan import Work
from bench.harness.selection import cases_of
from bench.harness.worker import Operations
from bench.recipes import bench_schedules
from shared import datasets
from shared.specs import TASKS, CNNSpec
from shared.weights import init_weights
from tests import workers

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
impl = workers.implementation(FRAMEWORK, "recipes.schedules", "train_step.gradient_accumulation")
schedules = impl.recipes.schedules
NAME = "digits-cnn"
STEPS = 20
RATE = 0.1
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


if FRAMEWORK == "pt":
    import torch

    def make():
        """A weight of zero whose gradient is one in every step."""
        weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        return weight, torch.optim.SGD([weight], lr=RATE)

    def train(weight, optimizer, scheduler, steps, told=None):
        """The rates that were used; `told` gets those that were said before."""
        rates = []
        for _ in range(steps):
            if told is not None:
                told.append(schedules.current_rate(optimizer))
            before = weight.item()
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            rates.append(before - weight.item())
            if scheduler.last_epoch < STEPS - 1:
                scheduler.step()
        return rates

    def rate(optimizer):
        return optimizer.param_groups[0]["lr"]

    def resume(name, settings, split):
        """Rates of a run that is saved after `split` steps and taken up by new objects."""
        apply = getattr(schedules, name)
        weight, optimizer = make()
        scheduler = apply(optimizer, **settings)
        rates = train(weight, optimizer, scheduler, split)
        saved = json.loads(json.dumps(optimizer.state_dict()["param_groups"][0]["lr"]))
        state = optimizer.state_dict(), scheduler.state_dict()
        weight, optimizer = make()
        scheduler = apply(optimizer, **settings)
        optimizer.load_state_dict(state[0])
        scheduler.load_state_dict(state[1])
        assert rate(optimizer) == saved
        return rates + train(weight, optimizer, scheduler, STEPS - split)

    def saved_and_loaded(name, settings):
        return None

else:
    import tensorflow as tf

    def make():
        """A weight of zero whose gradient is one in every step."""
        weight = tf.Variable([0.0], dtype=tf.float64)
        optimizer = tf.keras.optimizers.SGD(RATE)
        return weight, optimizer

    def train(weight, optimizer, scheduler, steps, told=None):
        """The rates that were used; `told` gets those that were said before."""

        @tf.function
        def step():
            optimizer.apply_gradients([(tf.ones([1], tf.float64), weight)])

        rates = []
        for _ in range(steps):
            if told is not None:
                told.append(schedules.current_rate(optimizer))
            before = weight.numpy()[0]
            step()
            rates.append(float(before - weight.numpy()[0]))
        return rates

    def rate(optimizer):
        return float(optimizer.learning_rate)

    def resume(name, settings, split):
        """Rates of a run that is saved after `split` steps and taken up by new objects."""
        apply = getattr(schedules, name)
        weight, optimizer = make()
        scheduler = apply(optimizer, **settings)
        rates = train(weight, optimizer, scheduler, split)
        count = int(optimizer.iterations.numpy())
        weight, optimizer = make()
        scheduler = apply(optimizer, **settings)
        optimizer.iterations.assign(count)
        return rates + train(weight, optimizer, scheduler, STEPS - split)

    def saved_and_loaded(name, settings):
        """The rates of the schedule after its configuration went through JSON."""
        _, optimizer = make()
        made = getattr(schedules, name)(optimizer, **settings)
        config = json.loads(json.dumps(tf.keras.optimizers.serialize(optimizer)))
        again = tf.keras.optimizers.deserialize(config)
        held = again._learning_rate
        assert type(held) is type(made)
        return [float(held(step)) for step in range(STEPS)]


def rates():
    """What the optimizer moved a weight by whose gradient is one, in float64.

    And what `current_rate` said before each step.
    """
    found = {"used": {}, "told": {}}
    for case, (name, settings) in CASES.items():
        weight, optimizer = make()
        scheduler = getattr(schedules, name)(optimizer, **settings)
        told = found["told"][case] = []
        found["used"][case] = train(weight, optimizer, scheduler, STEPS, told)
    return found


def resumed():
    return {case: resume(name, settings, 7) for case, (name, settings) in CASES.items()}


def serialized():
    return {case: saved_and_loaded(name, settings) for case, (name, settings) in CASES.items()}


def plateau():
    """The rate after each loss, at once and resumed in the middle."""
    found = {}
    for split in (len(LOSSES), 6):
        _, optimizer = make()
        scheduler = schedules.apply_reduction_on_plateau(optimizer, **PLATEAU)
        seen = []
        for number, loss in enumerate(LOSSES):
            if number == split:
                state, now = json.loads(json.dumps(scheduler.state_dict())), rate(optimizer)
                _, optimizer = make()
                scheduler = schedules.apply_reduction_on_plateau(optimizer, **PLATEAU)
                scheduler.load_state_dict(state)
                if FRAMEWORK == "pt":
                    optimizer.param_groups[0]["lr"] = now
                else:
                    optimizer.learning_rate = now
            scheduler.step(loss)
            seen.append(rate(optimizer))
        found[str(split)] = seen
    return found


def below_zero():
    """The rate after losses below zero that hardly fall, or rise; and after some that fall."""
    found = {}
    for case, by in (("flat", -1e-4), ("rising", 1e-4), ("falling", -0.1)):
        _, optimizer = make()
        scheduler = schedules.apply_reduction_on_plateau(optimizer, **PLATEAU)
        for number in range(4):
            scheduler.step(-1.0 + by * number)
        found[case] = rate(optimizer)
    return found


def refusals():
    """What bad settings raise."""
    found = {}
    for case, name, settings in (
        ("no steps", "apply_cosine", {"steps": 0}),
        ("long warm-up", "apply_linear_decay", {"steps": 5, "warmup": 5}),
        ("final above one", "apply_cosine", {"steps": 5, "final": 1.5}),
        ("one step", "apply_one_cycle", {"steps": 1}),
        ("never rises", "apply_one_cycle", {"steps": 9, "rising": 0.0}),
        ("rises in one step", "apply_one_cycle", {"steps": 20, "rising": 0.05}),
        ("ends above its start", "apply_one_cycle", {"steps": 9, "initial": 0.1, "final": 0.2}),
        ("factor of one", "apply_reduction_on_plateau", {"factor": 1.0}),
    ):
        _, optimizer = make()
        try:
            getattr(schedules, name)(optimizer, **settings)
            found[case] = None
        except ValueError as error:
            found[case] = str(error)
        found[f"{case}: rate"] = rate(optimizer)
    return found


def wrapped():
    """Of an optimizer around another: its rate, the curve that it is given, and a second one."""
    if FRAMEWORK == "pt":
        return None  # a gradient scaler is no optimizer there
    import tensorflow as tf

    wrapper = getattr(tf.keras.optimizers, "LossScaleOptimizer", None)  # of Keras 3
    wrapper = wrapper or tf.keras.mixed_precision.LossScaleOptimizer
    optimizer = wrapper(tf.keras.optimizers.SGD(RATE))
    found = {"before": schedules.current_rate(optimizer)}
    made = schedules.apply_cosine(optimizer, steps=10, warmup=4)
    found["highest"] = max(float(made(step)) for step in range(10))
    found["first"] = schedules.current_rate(optimizer) / float(made(0))
    try:
        schedules.apply_cosine(optimizer, steps=10)
    except ValueError as error:
        found["again"] = str(error)
    return found


def in_parts():
    """The rates of two updates of two batches each, and what was said before them."""
    import tensorflow as tf

    if not hasattr(tf.keras.optimizers.SGD(), "gradient_accumulation_steps"):
        return None  # of tf_keras
    weight = tf.Variable([0.0])
    optimizer = tf.keras.optimizers.SGD(RATE, gradient_accumulation_steps=2)
    schedules.apply_linear_decay(optimizer, steps=STEPS)
    used, told = [], []
    for _ in range(4):
        told.append(schedules.current_rate(optimizer))
        before = float(weight[0])
        optimizer.apply([tf.ones([1])], [weight])
        used.append(before - float(weight[0]))
    return {"used": used[1::2], "told": told[1::2]}


def second():
    """Rates at which a second schedule begins, the optimizer's own set anew, of each first one."""
    if FRAMEWORK != "pt":
        return None  # Keras refuses a second schedule, as `wrapped` shows
    found = []
    for first, (name, settings) in (*CASES.items(), ("tensor", CASES["linear"])):
        _, optimizer = make()
        if first == "tensor":
            optimizer.param_groups[0]["lr"] = torch.tensor(RATE)
        getattr(schedules, name)(optimizer, **settings)
        optimizer.param_groups[0]["lr"] = rate(optimizer) * 0 + RATE / 100
        for again in ("apply_linear_decay", "apply_cosine"):
            getattr(schedules, again)(optimizer, steps=STEPS)
            found.append(schedules.current_rate(optimizer))
    return found


def scaled():
    return schedules.scale_rate(rate=0.1, batch_size=1024, reference_batch_size=256)


def accumulated():
    """The row of eight accumulated batches at eight times the rate: its proof, its training."""
    task = TASKS[NAME]
    TASKS[NAME] = small = replace(
        task,
        dataset=replace(task.dataset, name="few-digits", train_size=128, test_size=20),
        model=replace(task.model, convolutions=((4, 2), (4, 2))),
        recipe=replace(task.recipe, epochs=3, accuracy_batch_size=8),
    )
    cases = cases_of(bench_schedules.TECHNIQUE, bench_schedules.__name__, "ordinary")
    row = f"schedules/{NAME}-{small.compute_batch}/{FRAMEWORK}/accumulated_x8_scaled"
    (case,) = [case for case in cases if case.id == row]
    operations = Operations()
    operations.impl, operations.kit = impl, impl.kit
    try:
        with tempfile.TemporaryDirectory() as folder:
            data = str(datasets.materialise(small.dataset, Path(folder)))
            return to_builtins(operations._op_train(case.message(), data, 0, folder, prove=True))
    finally:
        TASKS[NAME] = task


def work_of(settings, **model):
    spec = CNNSpec((8, 8, 1), ((4, 1),), num_classes=10, **model)
    return Work(replace(TASKS[NAME], model=spec), "row", settings, 16, init_weights(spec, seed=0))


def first_rates():
    """Where the rate of a row begins."""
    rows = ({}, {"factor": 4.0}, {"times": 8}, {"times": 8, "scaled": True})
    return [bench_schedules._first_rate(impl, work_of(row)) for row in rows]


def unproved():
    """What is said of a step of another rate, and where nothing shows that there were parts."""
    random = np.random.default_rng(0)
    images = random.normal(size=(16, 8, 8, 1)).astype(np.float32)
    batch = impl.kit.data.to_device(images, np.arange(16) % 10)
    row = {"times": 8, "accumulated": True}
    said = {}
    for case, work, made in (
        ("rate", work_of(row | {"scaled": True}), work_of(row)),
        ("parts", *[work_of(row, batch_norm=False)] * 2),
    ):
        prepared = bench_schedules.prepare(impl, made)
        said[case] = bench_schedules.took_effect(impl, work, prepared, batch)[1]
    return said


SCENARIOS = (
    rates,
    resumed,
    serialized,
    plateau,
    below_zero,
    refusals,
    wrapped,
    *[in_parts] * (FRAMEWORK != "pt"),
    second,
    scaled,
    accumulated,
    first_rates,
    unproved,
)
