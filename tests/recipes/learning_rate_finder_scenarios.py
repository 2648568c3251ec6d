"""One framework's share of the learning-rate finder's tests; `worker.py` runs it."""

from __future__ import annotations

import math
import sys
import warnings

import numpy as np

from tests import workers

NAME = sys.argv[1]
FRAMEWORK = "pt" if NAME == "pt" else "tf"
impl = workers.implementation(FRAMEWORK, "recipes.learning_rate_finder")
find = impl.recipes.learning_rate_finder.find_learning_rate
STEPS = 60
# Whose masks nobody can set back: see the technique's head.
DROPOUT = 0.0 if NAME == "tf_keras" else 0.5


def batches(count=4, size=64):
    """Labels that a linear map of the inputs gives."""
    random = np.random.default_rng(0)
    teacher = random.normal(size=(8, 4))
    found = []
    for _ in range(count):
        x = random.normal(size=(size, 8)).astype(np.float32)
        found.append((x, (x @ teacher).argmax(1)))
    return impl.kit.data.resident_batches(found)


def kernels():
    random = np.random.default_rng(1)
    return [random.normal(size=(8, 16)) / 3, random.normal(size=(16, 4)) / 4]


def changed(after, before):
    return max(np.abs(a - b).max() for a, b in zip(after, before, strict=True))


if FRAMEWORK == "pt":
    import torch

    def make(rule="sgd", dropout=0.0):
        """A model with the drawn kernels and its optimizer."""
        torch.manual_seed(3)
        nn = torch.nn
        model = nn.Sequential(
            nn.Linear(8, 16),
            nn.BatchNorm1d(16, eps=1e-3),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(16, 4),
        )
        with torch.no_grad():
            for layer, kernel in zip((model[0], model[4]), kernels(), strict=True):
                layer.weight.copy_(torch.tensor(kernel.T))
                layer.bias.zero_()
        rules = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
        return model, rules[rule](model.parameters(), lr=0.01)

    def state(model, optimizer):
        tensors = [*model.state_dict().values(), torch.get_rng_state()]
        for moments in optimizer.state_dict()["state"].values():
            tensors += [moments[name] for name in sorted(moments)]
        rates = [group["lr"] for group in optimizer.param_groups]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        modes = [module.training for module in model.modules()]
        return [np.array(tensor) for tensor in (*tensors, *gradients, rates, modes)]

    def with_own_loss():
        """The greatest change of the parameters of a loss, which the optimizer trains too."""
        model, _ = make()
        scale = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD([*model.parameters(), *scale.parameters()], lr=0.01)

        def loss(output, y):
            return impl.kit.training.cross_entropy(scale(output), y)

        step = impl.kit.training.make_train_step(model, optimizer, loss)
        before = [p.detach().numpy().copy() for p in scale.parameters()]
        find(model, optimizer, step, batches(), lowest=1e-3, highest=10.0, steps=STEPS)
        return changed([p.detach().numpy() for p in scale.parameters()], before)

    def with_schedule():
        model, optimizer = make()
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return model, optimizer

    def with_scheduled_step():
        """A step that moves the rate by itself."""
        model, optimizer = make()
        step = impl.kit.training.make_train_step(model, optimizer, impl.kit.training.cross_entropy)

        def own(x, y):
            loss = step(x, y)
            optimizer.param_groups[0]["lr"] *= 0.9
            return loss

        return find(model, optimizer, own, batches(), steps=STEPS)

else:
    import tensorflow as tf

    layers = tf.keras.layers

    def make(rule="sgd", dropout=0.0):
        """A model with the drawn kernels and its optimizer."""
        tf.keras.utils.set_random_seed(3)
        model = tf.keras.Sequential(
            [
                layers.Dense(16),
                layers.BatchNormalization(epsilon=1e-3, momentum=0.9),
                layers.ReLU(),
                layers.Dropout(dropout),
                layers.Dense(4),
            ]
        )
        model(np.zeros((1, 8), np.float32))
        for layer, kernel in zip((model.layers[0], model.layers[4]), kernels(), strict=True):
            layer.kernel.assign(kernel)
        rules = {"sgd": tf.keras.optimizers.SGD, "adamw": tf.keras.optimizers.AdamW}
        return model, rules[rule](0.01)

    def state(model, optimizer):
        found = [*model.variables, tf.random.get_global_generator().state]
        optimizer.build(model.trainable_variables)
        own = optimizer.variables
        found += [*(own() if callable(own) else own), optimizer.learning_rate]
        return [np.array(tf.convert_to_tensor(variable)) for variable in found]

    def with_own_loss():
        """The greatest change of the variables of a loss, which the optimizer trains too."""
        model, optimizer = make()
        scale = layers.Dense(4)
        scale.build((None, 4))
        variables = [*model.trainable_variables, *scale.trainable_variables]
        optimizer.build(variables)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = impl.kit.training.cross_entropy(scale(model(x, training=True)), y)
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        before = [np.array(v) for v in scale.trainable_variables]
        find(model, optimizer, step, batches(), lowest=1e-3, highest=10.0, steps=STEPS)
        return changed([np.array(v) for v in scale.trainable_variables], before)

    def with_schedule():
        model, _ = make()
        schedule = tf.keras.optimizers.schedules.CosineDecay(0.1, 10)
        return model, tf.keras.optimizers.SGD(schedule)

    def with_scheduled_step():
        """Keras optimizers hold their schedules: there is no such step."""
        raise ValueError("the step sets the rate itself")


def train_step(model, optimizer):
    return impl.kit.training.make_train_step(model, optimizer, impl.kit.training.cross_entropy)


def same(one, other):
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def curve():
    """The curve, that of plain training at the same rates, and another run's."""
    model, optimizer = make()
    step = train_step(model, optimizer)
    found = find(model, optimizer, step, batches(), lowest=1e-3, highest=30.0, steps=STEPS)
    again = find(model, optimizer, step, batches(), lowest=1e-3, highest=30.0, steps=STEPS)
    losses, stream = [], batches()
    for number, rate in enumerate(found.rates):
        if FRAMEWORK == "pt":
            optimizer.param_groups[0]["lr"] = rate
        else:
            optimizer.learning_rate = rate
        losses.append(float(step(*stream[number % len(stream)])))
    return {
        "rates": found.rates,
        "losses": found.losses,
        "smoothed": found.smoothed,
        "suggestion": found.suggestion,
        "again": found == again,
        "plain": losses,
    }


def put_back():
    """Whether model, optimizer and random state are as before, and go on as if nothing happened."""
    found = {}
    for case, rule, steps_before in (("new", "adamw", 0), ("trained", "adamw", 3)):
        results = []
        for test in (False, True):
            model, optimizer = make(rule, DROPOUT)
            step = train_step(model, optimizer)
            for batch in batches(steps_before):
                step(*batch)
            before = state(model, optimizer)
            if test:
                find(model, optimizer, step, batches(), lowest=1e-4, steps=STEPS)
                found[f"{case}: same"] = same(before, state(model, optimizer))
            losses = [float(step(*batch)) for batch in batches(3)]
            results.append((losses, state(model, optimizer)))
        found[f"{case}: goes on"] = results[0][0] == results[1][0] and same(
            results[0][1], results[1][1]
        )
    return found


def scaled():
    """The variables and the scale of a LossScaleOptimizer of Keras 3, before and after."""
    if sys.argv[1] != "tf":
        return {"not of it": True}
    model, inner = make()
    optimizer = tf.keras.mixed_precision.LossScaleOptimizer(inner)
    optimizer.build(model.trainable_variables)
    optimizer.dynamic_scale.assign(128.0)
    before = [len(optimizer.variables), float(optimizer.dynamic_scale)]
    step = train_step(model, optimizer)
    find(model, optimizer, step, batches(), lowest=1e-4, steps=STEPS)
    return [before, [len(optimizer.variables), float(optimizer.dynamic_scale)]]


def failures():
    """What is raised, and whether everything is as before."""
    found = {}

    def attempt(case, call, model, optimizer):
        before = state(model, optimizer)
        try:
            call()
            said = None
        except (ValueError, KeyError) as error:
            said = f"{type(error).__name__}: {error}"
        found[case] = said, same(before, state(model, optimizer))

    model, optimizer = make("adamw", DROPOUT)
    step = train_step(model, optimizer)
    stream = batches()

    def fails_at_the_third():
        seen = []

        def failing(x, y):
            seen.append(step(x, y))
            if len(seen) == 3:
                raise KeyError("the third")
            return seen[-1]

        find(model, optimizer, failing, stream, steps=STEPS)

    def no_fall():
        """Rates too low to learn anything: the loss is noise."""
        random = np.random.default_rng(5)
        given = [(np.array(batches(1)[0][0]), random.integers(0, 4, 64)) for _ in range(STEPS)]
        find(model, optimizer, step, impl.kit.data.resident_batches(given), highest=1e-5)

    nan = impl.kit.data.resident_batches([(np.full((4, 8), np.nan, np.float32), np.zeros(4, int))])
    for case, call in {
        "no batches": lambda: find(model, optimizer, step, []),
        "an iterator that ends": lambda: find(model, optimizer, step, iter(stream)),
        "nan at once": lambda: find(model, optimizer, step, nan),
        "never falls": no_fall,
        "rising at once": lambda: find(model, optimizer, step, stream, lowest=50.0, highest=1e4),
        "range": lambda: find(model, optimizer, step, stream, lowest=1.0),
        "window": lambda: find(model, optimizer, step, stream, window=8),
        "few steps": lambda: find(model, optimizer, step, stream, steps=9),
        "the step fails": fails_at_the_third,
        "the step sets the rate": with_scheduled_step,
    }.items():
        attempt(case, call, model, optimizer)
    model, optimizer = with_schedule()
    attempt("schedule", lambda: find(model, optimizer, step, stream), model, optimizer)
    return found


def divergence():
    """Where it stops, with losses that are given."""
    model, optimizer = make()
    found = {}
    falling = [2.0 - 0.04 * at for at in range(40)]
    for case, losses in {
        "rises": [*falling, *(0.4 + 0.5 * at**2 for at in range(60))],
        "nan": [*falling, math.nan, *[0.0] * 59],
        "below zero": [value - 3 for value in falling] + [-2.0] * 60,
    }.items():
        given = iter(losses)
        result = find(model, optimizer, lambda x, y, given=given: next(given), batches())
        found[case] = {"taken": len(result.losses), "losses": losses}
    return found


def suggestions():
    """The suggestion for a curve whose steepest point is known: a logistic fall over log rate."""
    model, optimizer = make()
    found = {}
    for case, noise in (("smooth", 0.0), ("noisy", 0.05)):
        random = np.random.default_rng(2)
        exponents = np.linspace(-6, 0, 100)
        losses = 2 - 1.5 / (1 + np.exp(-(exponents + 2.5) / 0.3)) + random.normal(0, noise, 100)
        given = iter(losses.tolist())
        result = find(model, optimizer, lambda x, y, given=given: next(given), batches())
        found[case] = result.suggestion
    return found


def own_loss():
    """How far the variables of a loss are from what they were, where the optimizer has them."""
    return with_own_loss()


def groups():
    """PyTorch's groups keep their ratio, and a rate that is a tensor stays the same tensor.

    A layer that merges its weights to predict has them merged again.
    """
    if FRAMEWORK != "pt":
        return None
    from tests.train_step.pt_foreign_models import Merging

    model, merging = make()[0], Merging()
    model.append(merging)
    first = torch.tensor(0.1)
    optimizer = torch.optim.SGD(
        [
            {"params": model[0].parameters(), "lr": first},
            {"params": model[4].parameters(), "lr": 0.01},
        ],
        lr=0.1,
    )
    seen, plain = [], train_step(model, optimizer)

    def step(x, y):
        seen.append([float(group["lr"]) for group in optimizer.param_groups])
        model.train()
        return plain(x, y).clone().requires_grad_()  # as that of a step that detaches nothing

    model.eval()
    weight = merging.weight.clone()
    torch.set_warn_always(True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        rates = find(model, optimizer, step, batches(), highest=10.0, steps=STEPS).rates
    torch.set_warn_always(False)
    after = [float(group["lr"]) for group in optimizer.param_groups]
    same = optimizer.param_groups[0]["lr"] is first
    return {
        "seen": seen[: len(rates)],
        "rates": rates,
        "after": after,
        "same tensor": same,
        "merged": merging.merged and torch.equal(weight, merging.weight),
        "warnings": [str(warning.message) for warning in said],
    }


SCENARIOS = (curve, put_back, scaled, own_loss, failures, divergence, suggestions, groups)
