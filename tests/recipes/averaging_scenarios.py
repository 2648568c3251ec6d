"""One framework's share of the tests of averages; `worker.py` runs it."""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from bench.harness.plan import Work
from bench.recipes import bench_averaging
from shared.specs import TASKS, CNNSpec, Recipe, parameter_shapes
from shared.weights import init_weights
from tests import workers

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
impl = workers.implementation(
    FRAMEWORK,
    "recipes.averaging",
    "recipes.early_stopping",
    "recipes.augmentation",
    "recipes.nonfinite",
)
averaging, kit = impl.recipes.averaging, impl.kit
SPEC = CNNSpec((8, 8, 2), ((4, 1), (6, 2)), num_classes=10)
RECIPE = Recipe("sgd", learning_rate=0.05, epochs=1, accuracy_batch_size=8)
DECAY = 0.8


def arrays(count):
    """Batches that are the same in every process."""
    random = np.random.default_rng(3)
    for _ in range(count):
        y = random.integers(0, 10, 16)
        yield random.normal(size=(16, 8, 8, 2)).astype(np.float32) + 0.3, y


def batches(count):
    return kit.data.resident_batches(list(arrays(count)))


def model_and_step():
    model = kit.models.build(SPEC, init_weights(SPEC, seed=1))
    optimizer = kit.training.make_optimizer(model, RECIPE)
    return model, kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)


def weights(model):
    exported = kit.models.export_weights(model)
    return {name: np.array(exported[name]) for name in parameter_shapes(SPEC)}


def state(model):
    return {name: np.array(value) for name, value in kit.models.export_weights(model).items()}


def same(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one)


def averages():
    """Both averages after ten steps, and the weights that they are of."""
    model, step = model_and_step()
    ema = averaging.make_exponential_average(model, decay=DECAY)
    equal = averaging.make_equal_average(model)
    step = averaging.make_averaging_step(step, model, ema)
    seen = []
    for batch in batches(10):
        step(*batch)
        equal.update_parameters(model)
        seen.append(weights(model))
    last, found = state(model), {"seen": seen}
    for name, average in (("exponential", ema), ("equal", equal)):
        with averaging.averaged(model, average) as inside:
            found[name] = weights(inside)
        found[f"{name}: as before"] = same(last, state(model))
        try:
            with averaging.averaged(model, average):
                raise RuntimeError("an evaluation that fails")
        except RuntimeError:
            found[f"{name}: as before a failure"] = same(last, state(model))
    averaging.apply_average(model, equal)
    found["applied"] = same(found["equal"], weights(model))
    return found


def refusals():
    model, _ = model_and_step()
    average = averaging.make_equal_average(model)
    cases = {
        "decay": lambda: averaging.make_exponential_average(model, decay=1.0),
        "no update": lambda: averaging.apply_average(model, average),
        "no batch": lambda: averaging.update_statistics(model, []),
    }
    found = {}
    for name, call in cases.items():
        try:
            call()
            found[name] = None
        except ValueError as error:
            found[name] = str(error)
    return found


def statistics():
    """The statistics of the first BatchNorm's input, made anew, and by NumPy."""
    model, step = model_and_step()
    stream = batches(3)
    for batch in stream:
        step(*batch)
    before = state(model)
    averaging.update_statistics(model, [x for x, _ in stream])
    after = state(model)
    return {
        "moments": own.moments_of_first_convolution(model, stream),
        "mean": after["conv0.bn.mean"],
        "variance": after["conv0.bn.variance"],
        "changed": not np.array_equal(before["conv0.bn.mean"], after["conv0.bn.mean"]),
        "parameters as before": all(
            np.array_equal(before[name], after[name]) for name in parameter_shapes(SPEC)
        ),
        "modes as before": own.modes(model),
    }


def failing():
    """Whether the first batch was taken in before the second was read, and what stays if it fails.

    Without a first one, too.
    """
    model, _ = model_and_step()
    before, found = state(model), {}
    x, _ = batches(1)[0]

    def unreadable(first):
        yield from first
        found[f"{len(first)}: taken in"] = not same(before, state(model))
        raise RuntimeError("a batch that can't be read")

    for first in ([], [x]):
        with suppress(RuntimeError):
            averaging.update_statistics(model, unreadable(first))
        found[f"{len(first)}: stays"] = same(before, state(model))
    return found


def frozen():
    """The statistics of a frozen normalization and of another, before and after."""
    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32) + 5
    if FRAMEWORK == "pt":
        import torch

        norms = [torch.nn.BatchNorm1d(3) for _ in range(2)]
        norms[0].requires_grad_(False)
        model, means = torch.nn.Sequential(*norms), [norm.running_mean for norm in norms]
        averaging.update_statistics(model, [torch.tensor(x)])
        return [mean.tolist() for mean in means]
    import tensorflow as tf

    norms = [tf.keras.layers.BatchNormalization() for _ in range(2)]
    norms[0].trainable = False
    model = tf.keras.Sequential(norms)
    model(x)
    averaging.update_statistics(model, [tf.constant(x)])
    return [np.array(norm.moving_mean).tolist() for norm in norms]


def two_domains():
    """Statistics of the normalization of two that no batch goes through, before and after."""
    if FRAMEWORK != "pt":  # Keras's are as they were until a batch changes them
        return [1, 1]
    import torch

    from tests.train_step.pt_foreign_models import Merging

    class TwoDomains(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.other = Merging()
            self.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(3) for _ in range(2))

        def forward(self, x, domain=0):
            return self.norms[domain](x)

    model, x = TwoDomains(), torch.randn(64, 3, generator=torch.Generator().manual_seed(0)) + 5
    model(x, 1)
    kept = {name: value.clone() for name, value in model.norms[1].state_dict().items()}
    averaging.update_statistics(model, [x])
    assert torch.allclose(model.norms[0].running_mean, x.mean(0), atol=1e-5)
    assert not model.other.merged
    after = model.norms[1].state_dict()
    return [value.tolist() for found in (kept, after) for value in found.values()]


def named_inputs():
    """The mean that a normalization takes from two inputs that are given by name."""
    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    if FRAMEWORK == "pt":
        import torch

        class Two(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = torch.nn.BatchNorm1d(3)

            def forward(self, left, right):
                return self.norm(left + right)

        model, given = Two(), torch.tensor(x)
    else:
        import tensorflow as tf

        class Two(tf.keras.Model):
            def __init__(self):
                super().__init__()
                self.norm = tf.keras.layers.BatchNormalization()

            def call(self, left, right, training=False):
                return self.norm(left + right, training=training)

        model, given = Two(), tf.constant(x)
        model(given, given)
    averaging.update_statistics(model, [{"left": given, "right": given}])
    mean = model.norm.running_mean if FRAMEWORK == "pt" else model.norm.moving_mean
    return {"mean": mean.numpy(), "expected": 2 * x.mean(0)}


def thawed():
    """The first of two layers trains, then the second: what their averages are, ones and zeros."""
    if FRAMEWORK == "pt":
        import torch

        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(2)))
        kernels, switch = [layer.weight for layer in model], torch.nn.Module.requires_grad_
        with torch.no_grad():
            kernels[0].fill_(1.0)
            kernels[1].fill_(0.0)
    else:
        import tensorflow as tf

        model = tf.keras.Sequential(
            [
                tf.keras.layers.Dense(4, use_bias=False, kernel_initializer=value)
                for value in ("ones", "zeros")
            ]
        )
        model(np.zeros((1, 4), np.float32))
        kernels = [layer.kernel for layer in model.layers]

        def switch(layer, trains):
            layer.trainable = trains

    layers = list(model) if FRAMEWORK == "pt" else model.layers
    switch(layers[1], False)
    average = averaging.make_equal_average(model)
    average.update_parameters(model)
    switch(layers[0], False)
    switch(layers[1], True)
    average.update_parameters(model)
    with averaging.averaged(model, average):
        return [
            float(kernel.detach().mean() if FRAMEWORK == "pt" else np.mean(kernel.numpy()))
            for kernel in kernels
        ]


def one_weight(dtype):
    """A model of one weight in this precision, and how that is written and read."""
    if FRAMEWORK == "pt":
        import torch

        model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
        model.to(getattr(torch, dtype))
        weight = model[0].weight

        def fill(value):
            torch.nn.init.constant_(weight, value)
    else:
        import tensorflow as tf

        layers = tf.keras.layers
        model = tf.keras.Sequential([layers.Dense(1, dtype=dtype)])
        model(np.zeros((1, 1), np.float32))
        weight = model.layers[0].kernel

        def fill(value):
            weight.assign([[value]])

    def now():
        return weight.item() if FRAMEWORK == "pt" else float(tf.cast(weight, tf.float64)[0, 0])

    return model, fill, now


def half_precision():
    """Of a bfloat16 weight that goes from 1 to 2: the average after 200 steps, and the weight."""
    model, fill, now = one_weight("bfloat16")
    fill(1.0)
    average = averaging.make_exponential_average(model, decay=0.999)
    average.update_parameters(model)
    fill(2.0)
    for _ in range(200):
        average.update_parameters(model)
    with averaging.averaged(model, average):
        inside = now()
    return [inside, now()]


def small_halves():
    """The average of a small float16 weight that stays, and the weight."""
    model, fill, now = one_weight("float16")
    fill(1e-6)
    average = averaging.make_exponential_average(model, decay=0.9)
    for _ in range(40):
        average.update_parameters(model)
    with averaging.averaged(model, average):
        inside = now()
    return [inside, now()]


def double_precision():
    """Both averages of a float64 weight that is 1, 2, and 4."""
    model, fill, now = one_weight("float64")
    found = []
    for average in (
        averaging.make_equal_average(model),
        averaging.make_exponential_average(model, decay=DECAY),
    ):
        for value in (1.0, 2.0, 4.0):
            fill(value)
            average.update_parameters(model)
        with averaging.averaged(model, average):
            found.append(now())
    return found


def shared():
    """The mean of a normalization that each pass goes through twice, and of both its inputs."""
    random = np.random.default_rng(0)
    stream = [random.normal(at, 1, (2, 16, 3)).astype(np.float32) for at in range(3)]
    if FRAMEWORK == "pt":
        import torch

        class Siamese(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = torch.nn.BatchNorm1d(3)

            def forward(self, left, right):
                return self.norm(left) - self.norm(right + 5)

        model, given = Siamese(), [tuple(map(torch.tensor, pair)) for pair in stream]
    else:
        import tensorflow as tf

        class Siamese(tf.keras.Model):
            def __init__(self):
                super().__init__()
                self.norm = tf.keras.layers.BatchNormalization()

            def call(self, left, right, training=False):
                self.norm(left, training=False)  # which changes no statistics
                return self.norm(left, training=training) - self.norm(right + 5, training=training)

        model, given = Siamese(), [tuple(map(tf.constant, pair)) for pair in stream]
        model(*given[0])
    averaging.update_statistics(model, given)
    mean = model.norm.running_mean if FRAMEWORK == "pt" else model.norm.moving_mean
    return {
        "mean": mean.numpy(),
        "expected": np.mean(stream, (0, 1, 2)) + 2.5,
        "call": "call" in vars(model.norm),
    }


def dropout():
    """Statistics of a layer behind dropout: those without it."""
    return own.statistics_behind_dropout()


def noise():
    """Statistics of a layer behind noise."""
    return own.statistics_behind_noise()


def normalized_kernel():
    """Whether statistics leave a kernel as it was that its layer writes to, in training."""
    if FRAMEWORK == "pt":
        return None  # there a buffer is written to
    import tensorflow as tf

    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(0)
    spectral = layers.SpectralNormalization(layers.Dense(9))  # another one in each pass
    model = tf.keras.Sequential([tf.keras.Input((8,)), layers.BatchNormalization(), spectral])
    before = [np.array(variable) for variable in model.trainable_variables]
    averaging.update_statistics(model, [tf.random.stateless_normal((8, 8), (0, 1))])
    return all(map(np.array_equal, before, model.trainable_variables))


def resumed():
    """An average and an early stopping, in one go and from a file after three steps."""
    checkpoints = workers.implementation(FRAMEWORK, "recipes.checkpoints").recipes.checkpoints
    values, outcomes = [2.0, 1.0, 3.0, 4.0], []

    def make():
        model, step = model_and_step()
        stopping = impl.recipes.early_stopping.EarlyStopping(model, patience=1)
        return model, step, averaging.make_equal_average(model), stopping

    for interrupted in (False, True):
        (model, step, average, stopping), stopped = make(), []
        for value, batch in zip(values, batches(4), strict=True):
            last = value == values[-1]
            if interrupted and last:
                kept = {"average": own.kept(average), "stopping": stopping.state_dict()}
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "kept"
                    checkpoints.save_checkpoint(path, model, None, kept)
                    model, step, average, stopping = make()
                    kept = checkpoints.load_checkpoint(path, model)
                own.take(average, kept["average"])
                stopping.load_state_dict(kept["stopping"])
            if not last:  # the optimizer's momentum is not in the file
                step(*batch)
            average.update_parameters(model)
            stopped.append(stopping.step(value))
        with averaging.averaged(model, average):
            mean = weights(model)
        best = stopping.restore()
        outcomes.append({"mean": mean, "best": best, "stopped": stopped, "weights": state(model)})
    return outcomes


def step_of_others():
    """A step's own attributes behind each function that wraps a step, and of one that has none."""

    def step(x, y):
        return 0.0

    model, _ = model_and_step()
    average = averaging.make_equal_average(model)
    policy, recipes = impl.recipes.augmentation.Policy(), impl.recipes
    ways = {
        "averaging": lambda: averaging.make_averaging_step(step, model, average),
        "augmenting": lambda: recipes.augmentation.make_augmenting_step(step, policy, None),
        "checked": lambda: recipes.nonfinite.make_checked_step(step, model, None),
    }
    names = {"loss_scale", "state_dict", "load_state_dict", "optimizer"}
    found = {way: sorted(names & set(dir(make()))) for way, make in ways.items()}
    for name in own_names():
        setattr(step, name, name.upper())
    whole = {way: make() for way, make in ways.items()}
    passed = {
        way: {name: getattr(made, name) for name in own_names()} for way, made in whole.items()
    }
    return {"plain": found, "passed on": passed}


def own_names():
    return {"loss_scale"} | (
        {"state_dict", "load_state_dict"} if FRAMEWORK == "pt" else {"optimizer"}
    )


def computed_weight():
    """What is said of a model of PyTorch that Python cannot copy."""
    if FRAMEWORK != "pt":
        return None
    import torch

    model = torch.nn.utils.weight_norm(torch.nn.Linear(2, 2))
    found = []
    for make in (averaging.make_equal_average, averaging.make_exponential_average):
        try:
            make(model)
        except NotImplementedError as error:
            found.append(str(error))
    return found


class _PT:
    def kept(self, average):
        return average.state_dict()

    def take(self, average, kept):
        average.load_state_dict(kept)

    def moments_of_first_convolution(self, model, stream):
        import torch

        module = next(m for m in model.modules() if isinstance(m, torch.nn.Conv2d))
        with torch.no_grad():
            values = [module(x).transpose(0, 1).flatten(1).double() for x, _ in stream]
        # PyTorch keeps the unbiased variance.
        return [
            np.mean([v.mean(1).numpy() for v in values], axis=0),
            np.mean([v.var(1, unbiased=True).numpy() for v in values], axis=0),
        ]

    def modes(self, model):
        momenta = [m.momentum for m in model.modules() if hasattr(m, "momentum")]
        return all(m.training for m in model.modules()) and None not in momenta

    def statistics_behind_dropout(self):
        import torch

        model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(3))
        x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)) + 2
        before = torch.get_rng_state()
        averaging.update_statistics(model, [x])
        assert torch.equal(before, torch.get_rng_state())
        return {"mean": model[1].running_mean.numpy(), "expected": x.mean(0).numpy()}

    def statistics_behind_noise(self):
        """PyTorch has a mode for each module: there is nothing to refuse."""
        return {}


class _TF:
    def kept(self, average):
        return average.get_weights()

    def take(self, average, kept):
        average.set_weights(kept)

    def moments_of_first_convolution(self, model, stream):
        import tensorflow as tf

        layer = next(
            each
            for each in model._flatten_layers(include_self=False)
            if isinstance(each, tf.keras.layers.Conv2D)
        )
        values = [np.asarray(layer(x)).reshape(-1, layer.filters).astype(float) for x, _ in stream]
        ddof = 1 if sys.argv[1] == "tf_keras" else 0  # its fused kernel divides by n - 1
        return [
            np.mean([v.mean(0) for v in values], axis=0),
            np.mean([v.var(0, ddof=ddof) for v in values], axis=0),
        ]

    def modes(self, model):
        import tensorflow as tf

        norms = [
            each
            for each in model._flatten_layers(include_self=False)
            if isinstance(each, tf.keras.layers.BatchNormalization)
        ]
        return len({layer.momentum for layer in norms}) == 1 and norms[0].momentum == 0.9

    def statistics_behind_dropout(self):
        import tensorflow as tf

        class Stretch(tf.keras.layers.Layer):
            rate = 2.0  # not one of dropout

            def call(self, x):
                return x * self.rate

        layers = tf.keras.layers
        kinds = layers.Dropout, layers.SpatialDropout1D, layers.GaussianDropout, layers.AlphaDropout
        dropouts = [kind(0.5) for kind in kinds]
        model = tf.keras.Sequential([*dropouts, Stretch(), layers.BatchNormalization()])
        x = tf.constant(np.random.default_rng(0).normal(2, 1, (8, 8, 3)).astype(np.float32))
        model(x)
        averaging.update_statistics(model, [x])
        assert [layer.rate for layer in model.layers[:-1]] == [0.5] * 4 + [2.0]
        mean = model.layers[-1].moving_mean
        return {"mean": np.asarray(mean), "expected": 2 * np.asarray(x).mean((0, 1))}

    def statistics_behind_noise(self):
        """What is said of noise, which can't be switched off, and whether the statistics stayed."""
        import tensorflow as tf

        layers = tf.keras.layers
        model = tf.keras.Sequential([layers.GaussianNoise(0.5), layers.BatchNormalization()])
        x = tf.ones((8, 3))
        model(x)
        before = np.array(model.layers[1].moving_mean)
        draws_nothing = tf.keras.Sequential(
            [layers.BatchNormalization(), layers.Rescaling(float("nan"))]
        )
        draws_nothing(x)
        averaging.update_statistics(draws_nothing, [x])  # NaN is no other than NaN
        try:
            averaging.update_statistics(model, [x])
        except NotImplementedError as error:
            same = np.array_equal(before, model.layers[1].moving_mean)
            return {"said": str(error), "stayed": bool(same)}
        return {"said": None}


own = _PT() if FRAMEWORK == "pt" else _TF()


def stopped_average(kept=("swa", "stop"), figures=(1.0, 3.0, 2.0)):
    """Of the benchmark's row: the weights after each epoch, and what is kept by these figures."""
    recipe = replace(RECIPE, epochs=6)
    task = replace(TASKS["digits-few"], model=SPEC, recipe=recipe)
    work = Work(task, "row", {"kept": list(kept)}, 16, init_weights(SPEC, seed=1))
    data = map(np.concatenate, zip(*arrays(9), strict=True))
    data = kit.data.to_device(*data)
    model, _, step, average = bench_averaging._build(impl, work)
    seen, looks, fit, evaluate = [], iter(figures), kit.training.fit, kit.training.evaluate_task

    def fit_and_look(*arguments, **settings):
        fit(*arguments, **settings)
        seen.append(weights(model))

    stages = SimpleNamespace(split=lambda name: data, seed=0, epochs=0, metrics={})
    kit.training.fit, kit.training.evaluate_task = fit_and_look, lambda *_, **__: next(looks)
    try:
        bench_averaging._train(impl, work, stages, model, step, None, average)
    finally:
        kit.training.fit, kit.training.evaluate_task = fit, evaluate
    before = state(model)
    x = data[0][bench_averaging.HELD_OUT :]
    averaging.update_statistics(model, [x[start : start + 8] for start in range(0, len(x), 8)])
    return {
        "seen": seen,
        "kept": weights(model),
        "looks": len(figures) - len(list(looks)),
        "epochs": stages.metrics["epochs"]["value"],
        "its own statistics": same(before, state(model)),
    }


def statistics_of_graphs():
    """Those of a model whose `call` is a `tf.function`, beside the mean of its batches."""
    import tensorflow as tf

    class Decorated(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.norm = tf.keras.layers.BatchNormalization()

        @tf.function
        def call(self, x, training=False):
            return self.norm(x, training=training)

    model, stream = Decorated(), [x[:, 0, 0] for x, _ in arrays(3)]
    model(stream[0])
    averaging.update_statistics(model, [tf.constant(x) for x in stream])
    return [np.array(model.norm.moving_mean), np.mean(stream, axis=(0, 1))]


SCENARIOS = (
    averages,
    refusals,
    statistics,
    failing,
    frozen,
    two_domains,
    named_inputs,
    thawed,
    half_precision,
    small_halves,
    double_precision,
    shared,
    dropout,
    noise,
    normalized_kernel,
    resumed,
    step_of_others,
    computed_weight,
    stopped_average,
)
SCENARIOS += () if FRAMEWORK == "pt" else (statistics_of_graphs,)
