"""One framework's pieces in loops that a user writes, in a process of its own.

`python -m tests.train_step.composition_worker pt|tf` prints one line of JSON: scenario -> what was
found, or {"error": traceback}. `test_composition.py` judges it.
"""

from __future__ import annotations

import difflib
import inspect
import sys

import numpy as np

from tests import workers

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
TECHNIQUES = (
    "activation_checkpointing",
    "compilation",
    "gradient_accumulation",
    "gradient_clipping",
    "memory_format",
    "mixed_precision",
    "stacking",
)
impl = workers.implementation(
    FRAMEWORK, "kit.operators", *(f"train_step.{name}" for name in TECHNIQUES)
)
kit, train = impl.kit, impl.train_step
GradientAccumulator = train.gradient_accumulation.GradientAccumulator
GradientClipper = train.gradient_clipping.GradientClipper
MixedPrecision = train.mixed_precision.MixedPrecision
to_float32 = train.mixed_precision.to_float32
NEUTRAL = {
    "gradient_accumulation": {"micro_batches": 1},
    "gradient_clipping": {"max_norm": float("inf")},
    "mixed_precision": {"dtype": "float32"},
    "stacking": {},
}
random = np.random.default_rng(0)
X = random.normal(size=(3, 8, 6, 6, 2)).astype(np.float32)
Y = random.integers(0, 3, (3, 8))


class PyTorch:
    """The loop of PyTorch's tutorials, and what each technique makes of it."""

    def __init__(self):
        import torch

        self.torch = torch

    def batches(self):
        return [tuple(map(self.torch.from_numpy, (x.transpose(0, 3, 1, 2), y))) for x, y in DATA]

    def model(self):
        nn = self.torch.nn
        self.torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
        return model, self.torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss_fn(self):
        return self.torch.nn.CrossEntropyLoss()

    def weights(self, model):
        return [parameter.detach().numpy() for parameter in model.parameters()]

    def plain(self, model, optimizer, loss_fn, batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()

    def clipped(self, model, optimizer, loss_fn, batches):
        clipper = GradientClipper(model, max_norm=0.1)
        for x, y in batches:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            clipper.clip()
            optimizer.step()

    def half_width(self, model, optimizer, loss_fn, batches):
        precision = MixedPrecision(model, dtype="bfloat16")
        for x, y in batches:
            optimizer.zero_grad()
            with precision.autocast():
                output = model(x)
            loss = loss_fn(to_float32(output), y)
            precision.backward(loss)
            precision.step(optimizer)

    def in_parts(self, model, optimizer, loss_fn, batches):
        accumulator = GradientAccumulator(model, micro_batches=2)

        def backward(x, y, share):
            loss = loss_fn(model(x), y) * share
            loss.backward()
            return loss.detach()

        for x, y in batches:
            optimizer.zero_grad()
            accumulator.run(backward, x, y)
            optimizer.step()

    def plain_step(self, model, optimizer, loss_fn):
        model.train()

        def step(x, y):
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def operators(self, step, x, y):
        """What Python and autograd called in one step, by name."""
        return kit.operators.update_operators(lambda: step(x, y))


class TensorFlow:
    """The custom loop of TensorFlow's guide, and what each technique makes of it."""

    def __init__(self):
        import tensorflow as tf

        self.tf = tf

    def batches(self):
        return [tuple(map(self.tf.constant, pair)) for pair in DATA]

    def model(self):
        keras, layers = self.tf.keras, self.tf.keras.layers
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6, 6, 2)), layers.Conv2D(4, 3, activation="relu")])
        model.add(layers.Flatten())
        model.add(layers.Dense(3))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)
        return model, optimizer

    def loss_fn(self):
        sparse = self.tf.nn.sparse_softmax_cross_entropy_with_logits
        return lambda output, y: self.tf.reduce_mean(sparse(y, output))

    def weights(self, model):
        return model.get_weights()

    def plain(self, model, optimizer, loss_fn, batches):
        tf, variables = self.tf, model.trainable_variables

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_fn(model(x, training=True), y)
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        for x, y in batches:
            step(x, y)

    def clipped(self, model, optimizer, loss_fn, batches):
        tf, variables = self.tf, model.trainable_variables
        clipper = GradientClipper(model, max_norm=0.1)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_fn(model(x, training=True), y)
            gradients = clipper.clip(tape.gradient(loss, variables))
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        for x, y in batches:
            step(x, y)

    def half_width(self, model, optimizer, loss_fn, batches):
        tf, variables = self.tf, model.trainable_variables
        precision = MixedPrecision(model, dtype="bfloat16")
        optimizer = precision.wrap(optimizer)

        @tf.function
        def step(x, y):
            with precision.policies(), tf.GradientTape() as tape:
                loss = loss_fn(to_float32(model(x, training=True)), y)
                scaled = precision.scale(loss)
            gradients = tape.gradient(scaled, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        for x, y in batches:
            step(x, y)

    def in_parts(self, model, optimizer, loss_fn, batches):
        tf, variables = self.tf, model.trainable_variables
        accumulator = GradientAccumulator(model, micro_batches=2)

        def gradients_of(x, y, share):
            with tf.GradientTape() as tape:
                loss = loss_fn(model(x, training=True), y) * share
            return loss, tape.gradient(loss, variables)

        @tf.function
        def step(x, y):
            loss, gradients = accumulator.run(gradients_of, x, y)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        for x, y in batches:
            step(x, y)

    def plain_step(self, model, optimizer, loss_fn):
        tf, variables = self.tf, model.trainable_variables

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_fn(model(x, training=True), y)
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        return step

    def operators(self, step, x, y):
        """What stands in the graph of a step, by name."""
        return kit.operators.executed_graphs(step, x, y)["outside"]


def loops():
    """Lines that a technique adds to the plain loop, and how far its weights are from its step's.

    The first is the plain loop itself, which the closed step of the kit has to equal.
    """
    closed = {
        "plain": (kit.training, {}),
        "clipped": (train.gradient_clipping, {"max_norm": 0.1}),
        "half_width": (train.mixed_precision, {"dtype": "bfloat16"}),
        "in_parts": (train.gradient_accumulation, {"micro_batches": 2}),
    }
    plain, found, weights = inspect.getsource(type(own).plain).splitlines(), {}, {}
    for name, (technique, settings) in closed.items():
        loop = getattr(own, name)
        model, optimizer = own.model()
        start = [value.copy() for value in own.weights(model)]
        loop(model, optimizer, own.loss_fn(), own.batches())
        ours, other_optimizer = own.model()
        step = technique.make_train_step(ours, other_optimizer, own.loss_fn(), **settings)
        for batch in own.batches():
            step(*batch)
        weights[name] = own.weights(model)
        lines = difflib.ndiff(plain[1:], inspect.getsource(loop).splitlines()[1:])
        found[name] = {
            "added": sum(line.startswith("+ ") and line.strip("+ ") != "" for line in lines),
            "moved": apart(weights[name], start),
            "from closed": apart(own.weights(ours), weights[name]),
            "from plain": apart(weights["plain"], weights[name]),
        }
    return found


def apart(ours, theirs):
    """The relative L2 distance of two lists of arrays, each taken as one vector."""
    ours, theirs = (np.concatenate([np.ravel(part) for part in one]) for one in (ours, theirs))
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def tax():
    """The operators of each technique's step at its neutral setting, and of a plain step."""
    x, y = own.batches()[0]
    steps = {"plain": own.plain_step}
    for name, settings in NEUTRAL.items():
        make = getattr(train, name).make_train_step
        steps[name] = lambda *given, m=make, s=settings: m(*given, **s)
    usual = "eager" if FRAMEWORK == "pt" else "graph"
    steps["compilation"] = getattr(train.compilation, f"{usual}_train_step")
    steps["memory_format"] = on(lambda model: train.memory_format.apply_memory_format(
        model, memory_format="channels_first" if FRAMEWORK == "pt" else "channels_last"
    ))  # fmt: skip
    steps["activation_checkpointing"] = on(
        lambda model: train.activation_checkpointing.apply_checkpointing(model, blocks="")
    )
    found = {}
    for name, make in steps.items():
        model, optimizer = own.model()
        found[name] = own.operators(make(model, optimizer, own.loss_fn()), x, y)
    model, optimizer = own.model()
    clipping = train.gradient_clipping.make_train_step
    found["clipped"] = own.operators(clipping(model, optimizer, own.loss_fn()), x, y)
    return found


def on(change):
    """A plain step of a changed model."""
    return lambda model, *others: own.plain_step(change(model), *others)


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    workers.report((loops, tax))


DATA = list(zip(X, Y, strict=True))
own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
