"""One framework's share of the guard's tests, in a process of its own.

`python finite_guard_worker.py pt|tf|tf_keras` runs every scenario and prints one line of JSON:
scenario -> what was found, or {"error": traceback}. `test_finite_guard.py` judges it.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from shared.specs import TASKS, CNNSpec, parameter_shapes
from shared.weights import init_weights
from tests import workers
from tests.workers import raised

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
impl = workers.implementation(FRAMEWORK, "train_step.finite_guard", "train_step.gradient_clipping")
kit = impl.kit
technique = impl.train_step.finite_guard
CNN = CNNSpec((8, 8, 2), ((4, 1), (6, 2)), num_classes=10)
RECIPE = replace(TASKS["digits-cnn"].recipe, learning_rate=2.0**-5)


def batches(count=1, samples=8):
    """The same in every process."""
    random = np.random.default_rng(11)
    found = []
    for _ in range(count):
        y = random.integers(0, 10, samples)
        found.append((random.normal(size=(samples, *CNN.input_shape)).astype(np.float32), y))
    return kit.data.resident_batches(found)


def prepare(maker, loss_fn=None):
    """A model and its step, by `maker`."""
    model = kit.models.build(CNN, init_weights(CNN, seed=1))
    optimizer = kit.training.make_optimizer(model, RECIPE)
    step = maker(model, optimizer, loss_fn or kit.training.cross_entropy)
    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


def run(prepared, stream):
    return [kit.runtime.to_float(prepared.step(*batch)) for batch in stream]


def parameters(prepared):
    weights = kit.models.export_weights(prepared.model)
    return {name: weights[name] for name in parameter_shapes(CNN)}


def same(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one)


# Scenarios for both frameworks ----------------------------------------------------------------


def losses():
    """Of ten steps, plain and guarded."""
    stream = batches(10)
    makers = {"plain": kit.training.make_train_step, "guarded": technique.make_train_step}
    return {name: run(prepare(maker), stream) for name, maker in makers.items()}


def guard():
    """A poisoned third step: what is said, what has changed, and whether the fourth goes on."""
    found = {}
    poison = SimpleNamespace(loss=1.0)

    def loss_fn(logits, labels):
        # A factor that a graph cannot take for a constant: 1, or what poisons the loss.
        return kit.training.cross_entropy(logits, labels) * own.value(poison)

    for name in ("input", "loss", "gradient", "overflow", "gradient clipped"):
        maker = own.clipping_step if "clipped" in name else technique.make_train_step
        function = own.root if "gradient" in name else loss_fn
        own.set(poison, 1.0)
        stream = batches(4)
        prepared = prepare(maker, loss_fn=function)
        run(prepared, stream[:2])
        before, state = parameters(prepared), own.state(prepared.optimizer)
        x, y = stream[2]
        if name == "input":
            x = own.with_nan(x, 3)
        elif "gradient" in name:
            y = own.bad_labels(y)
        else:
            own.set(poison, math.inf if name == "loss" else 1e30)
        case = {"said": raised(prepared.step, x, y)}
        case["kept"] = same(before, parameters(prepared))
        case["state"] = state == own.state(prepared.optimizer)
        own.set(poison, 1.0)
        case["goes on"] = raised(prepared.step, *stream[3])
        case["moved"] = not same(before, parameters(prepared))
        found[name] = case
    return found


def refusals():
    """What a model says that trains nothing, and that it is as before."""
    prepared = prepare(kit.training.make_train_step)
    arguments = prepared.optimizer, kit.training.cross_entropy
    return {"frozen": raised(technique.make_train_step, own.frozen(), *arguments)}


# Scenarios of one framework, on models that are not ours --------------------------------------

random = np.random.default_rng(3)
LEFT, RIGHT = (random.normal(size=(6, 4)).astype(np.float32) for _ in range(2))
KERNEL = random.normal(size=(4, 2)).astype(np.float32)


class PyTorch:
    def __init__(self):
        import torch

        self.torch = torch

    def state(self, optimizer):
        return sum(v.abs().sum().item() for s in optimizer.state.values() for v in s.values())

    def set(self, holder, value):
        holder.loss = value

    def value(self, holder):
        return holder.loss

    def with_nan(self, x, count):
        x = x.clone()
        x.view(-1)[5 : 5 + count] = math.nan
        return x

    def bad_labels(self, y):
        return -1 - y

    def root(self, logits, labels):
        """The loss and a root, which for labels below zero is that of zero: finite, but steep."""
        factor = (labels >= 0).all().float()
        labels = self.torch.where(labels < 0, -1 - labels, labels)
        size = (logits * factor).square().sum()
        return kit.training.cross_entropy(logits, labels) + 1e-3 * size.sqrt()

    def foreign(self):
        """Two inputs; a root of zero behind one of the two layers; a target that is not finite."""
        torch = self.torch

        class Two(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.left = torch.nn.Linear(4, 2, bias=False)
                self.right = torch.nn.Linear(4, 2, bias=False)

            def forward(self, a, b):
                length = self.left(a).square().sum(-1).sqrt()
                return self.right(b).sum(-1) + length

        found = {}
        a, b, y = torch.from_numpy(LEFT), torch.from_numpy(RIGHT), torch.zeros(6)

        def squares(output, target):
            return torch.nn.functional.mse_loss(output, target[0])

        for name in ("good", "gradient", "input", "target", "ignored"):
            model = Two()
            for layer in (model.left, model.right):
                layer.weight.data.copy_(torch.from_numpy(KERNEL.T))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            step = technique.make_train_step(model, optimizer, squares)
            x = (a * 0 if name == "gradient" else a, self.with_nan(b, 2) if name == "input" else b)
            spare = torch.zeros(1000)
            target = y / 0 if name == "target" else y
            if name == "ignored":
                spare = self.with_nan(spare, 1)
            found[name] = raised(step, x, (target, spare))
        return found

    def kinds_of_inputs(self):
        """What the guard says of sparse and complex inputs, sound and with a NaN."""
        torch = self.torch

        class Mixed(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(3, 2)

            def forward(self, graph, x):
                return graph @ self.layer(x.abs())

        found = {}
        for name in ("sound", "sparse", "compressed", "complex"):
            model = Mixed()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = technique.make_train_step(model, optimizer, torch.nn.MSELoss())
            graph, x = torch.eye(4), torch.ones(4, 3, dtype=torch.complex64)
            if name in ("sparse", "compressed"):
                graph[0, 0] = math.nan
            if name == "complex":
                x[0, 0] = math.nan
            graph = graph.to_sparse_csr() if name == "compressed" else graph.to_sparse()
            found[name] = raised(step, (graph, x), torch.zeros(4, 2))
        return found

    def frozen(self):
        return self.torch.nn.Linear(2, 2).requires_grad_(False)

    def clipping_step(self, model, optimizer, loss_fn):
        """A loop with the guard and the clipper, which share a norm."""
        guard = technique.FiniteGuard(model)
        clipper = impl.train_step.gradient_clipping.GradientClipper(model, max_norm=0.5)

        def step(x, y):
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            norm = clipper.norm()
            guard.check(x, y, loss, norm)
            clipper.clip(norm)
            optimizer.step()
            return loss.detach()

        return step

    def reads(self):
        """How often a step reads a value from the device on the host, which waits for it."""
        torch = self.torch
        from torch.utils._python_dispatch import TorchDispatchMode

        class Reads(TorchDispatchMode):
            count = 0

            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                if function is torch.ops.aten._local_scalar_dense.default:
                    self.count += 1
                return function(*args, **(kwargs or {}))

        prepared = prepare(technique.make_train_step)
        first, second = batches(2)
        prepared.step(*first)
        with Reads() as reads:
            prepared.step(*second)
        return reads.count


class TensorFlow:
    def __init__(self):
        import tensorflow as tf

        self.tf = tf
        self.poison = None  # a variable, once threads are set

    def state(self, optimizer):
        return float(sum(np.abs(np.array(v, dtype=np.float64)).sum() for v in optimizer.variables))

    def set(self, holder, value):
        self.poison = self.poison or self.tf.Variable(1.0, trainable=False)
        self.poison.assign(value)

    def value(self, holder):
        return self.tf.identity(self.poison)

    def with_nan(self, x, count):
        values = np.array(x)
        values.reshape(-1)[5 : 5 + count] = math.nan
        return self.tf.constant(values)

    def bad_labels(self, y):
        return -1 - y

    def root(self, logits, labels):
        """The loss and a root, which for labels below zero is that of zero: finite, but steep."""
        tf = self.tf
        factor = tf.cast(tf.reduce_all(labels >= 0), logits.dtype)
        labels = tf.where(labels < 0, -1 - labels, labels)
        size = tf.reduce_sum(tf.square(logits * factor))
        return kit.training.cross_entropy(logits, labels) + 1e-3 * tf.sqrt(size)

    def two(self):
        """A subclassed model of two inputs, with a root behind one of its two layers."""
        tf = self.tf

        class Two(tf.keras.Model):
            def __init__(self):
                super().__init__()
                kernel = tf.keras.initializers.Constant(KERNEL)
                for name in ("left", "right"):
                    layer = tf.keras.layers.Dense(
                        2, use_bias=False, kernel_initializer=kernel, name=name
                    )
                    setattr(self, name, layer)

            def call(self, a, b, training=False):
                length = tf.sqrt(tf.reduce_sum(tf.square(self.left(a)), -1))
                return tf.reduce_sum(self.right(b), -1) + length

        return Two()

    def foreign(self):
        """Two inputs; a root of zero behind one of the two layers; a target that is not finite."""
        tf = self.tf
        found = {}
        a, b, y = tf.constant(LEFT), tf.constant(RIGHT), tf.zeros(6)

        def squares(output, target):
            return tf.reduce_mean(tf.square(output - target[0]))

        optimizer = tf.keras.optimizers.SGD(0.01)
        found["unbuilt"] = raised(technique.make_train_step, self.two(), optimizer, squares)
        for name in ("good", "gradient", "input", "target", "ignored"):
            model = self.two()
            model(a, b)
            optimizer = tf.keras.optimizers.SGD(0.01)
            step = technique.make_train_step(model, optimizer, squares)
            x = (a * 0 if name == "gradient" else a, self.with_nan(b, 2) if name == "input" else b)
            spare = tf.zeros(1000)
            target = y / 0 if name == "target" else y
            if name == "ignored":
                spare = self.with_nan(spare, 1)
            found[name] = raised(step, x, (target, spare))
        scaling = tf.keras.optimizers.LossScaleOptimizer(tf.keras.optimizers.SGD())
        found["scaling"] = raised(technique.make_train_step, model, scaling, squares)
        factor = tf.keras.optimizers.SGD(loss_scale_factor=2.0)
        found["factor"] = raised(technique.make_train_step, model, factor, squares)
        return found

    def functional(self):
        """A functional model with a dictionary of inputs, one of which is poisoned."""
        tf = self.tf
        keras, layers = tf.keras, tf.keras.layers
        a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
        model = keras.Model({"a": a, "b": b}, layers.Dense(2)(layers.Add()([a, b])))
        step = technique.make_train_step(
            model,
            keras.optimizers.SGD(0.01),
            lambda output, y: tf.reduce_mean(tf.square(output)),
        )
        good = {"a": tf.constant(LEFT), "b": tf.constant(RIGHT)}
        return {
            "good": raised(step, good, None),
            "bad": raised(step, good | {"b": self.with_nan(good["b"], 4)}, None),
        }

    def kinds_of_inputs(self):
        """What the guard says of sparse and complex inputs, sound and with a NaN."""
        tf = self.tf

        class Mixed(tf.keras.Model):
            def __init__(self):
                super().__init__()
                self.layer = tf.keras.layers.Dense(2)

            def call(self, graph, x):
                return tf.sparse.sparse_dense_matmul(graph, self.layer(tf.abs(x)))

        found = {}
        for name in ("sound", "sparse", "complex"):
            bad = {name: math.nan}
            graph = tf.linalg.diag([bad.get("sparse", 1.0), 1.0, 1.0, 1.0])
            x = tf.constant([[bad.get("complex", 1.0)], [1.0], [1.0], [1.0]], tf.complex64)
            graph, model = tf.sparse.from_dense(graph), Mixed()
            model(graph, x)
            step = technique.make_train_step(
                model,
                tf.keras.optimizers.SGD(0.1),
                lambda output, y: tf.reduce_mean(tf.square(output - y)),
            )
            found[name] = raised(step, (graph, x), tf.zeros((4, 2)))
        return found

    def frozen(self):
        keras = self.tf.keras
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        model.trainable = False
        return model

    def clipping_step(self, model, optimizer, loss_fn):
        """A loop with the guard and the clipper."""
        tf, guard = self.tf, technique.FiniteGuard(model)
        clipper = impl.train_step.gradient_clipping.GradientClipper(model, max_norm=0.5)
        optimizer.build(model.trainable_variables)

        @tf.function
        def train(x, y):
            with tf.GradientTape() as tape:
                loss = loss_fn(model(x, training=True), y)
            gradients = tape.gradient(loss, model.trainable_variables)
            clipped = clipper.clip(gradients)
            return loss, *guard.apply(optimizer, gradients, x, y, loss, clipped)

        def step(x, y):
            loss, finite, counts = train(x, y)
            guard.check(x, y, finite, counts)
            return loss

        return step


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    scenarios = [losses, guard]
    if sys.argv[1] != "tf_keras":
        names = ("reads", "foreign", "functional", "kinds_of_inputs")
        scenarios += [refusals, *(getattr(own, name) for name in names if hasattr(own, name))]
    workers.report(scenarios)


own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
