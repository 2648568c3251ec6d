"""One framework's share of the compilation tests, in a process of its own.

`python compilation_worker.py pt|tf [no-compiler]` runs every scenario and prints one line
of JSON: scenario -> what was found, or {"error": traceback}. `test_compilation.py` judges it. With
"no-compiler" nothing is compiled for which PyTorch needs one.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from bench.harness.plan import Work
from bench.train_step import bench_compilation as bench
from shared.specs import TASKS, CNNSpec
from shared.weights import init_weights
from tests import workers
from tests.workers import raised

FRAMEWORK = "pt" if sys.argv[1] == "pt" else "tf"
OLD = "kit.torchscript" if FRAMEWORK == "pt" else "kit.fitting"
impl = workers.implementation(FRAMEWORK, "kit.operators", OLD, "train_step.compilation")
kit = impl.kit
technique = impl.train_step.compilation
operators = impl.kit.operators
TINY = CNNSpec((8, 8, 1), ((4, 1), (8, 2)), num_classes=3)
TASK = replace(
    TASKS["digits-cnn"], model=TINY, recipe=replace(TASKS["digits-cnn"].recipe, learning_rate=0.01)
)
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def batches(count=5, size=8):
    random = np.random.default_rng(7)
    found = []
    for _ in range(count):
        y = random.integers(0, 3, size)
        x = random.normal(size=(size, 8, 8, 1)) + y[:, None, None, None] / 2
        found.append((x.astype(np.float32), y))
    return kit.data.resident_batches(found)


def build():
    model = kit.models.build(TINY, init_weights(TINY, seed=1))
    return model, kit.training.make_optimizer(model, TASK.recipe)


def run(step, stream):
    return [kit.runtime.to_float(step(*batch)) for batch in stream]


def trained(model, step, stream):
    """Losses, and every weight and running statistic afterwards."""
    losses = run(step, stream)
    weights = kit.models.export_weights(model)
    return {"losses": losses, "weights": {name: w.tolist() for name, w in weights.items()}}


def make(name):
    """A fresh model and the step of that name."""
    model, optimizer = build()
    maker = getattr(technique, f"{name}_train_step")
    return model, maker(model, optimizer, kit.training.cross_entropy)


# Scenarios for both frameworks ----------------------------------------------------------------


def steps():
    """Losses and weights of five steps, and what a step then ran, for each kind of step.

    Graphs traced so far: after these steps, after more of them, of "graph" after another shape.
    """
    stream = batches()
    model, optimizer = build()
    baseline = kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)
    found = {"baseline": trained(model, baseline, stream)}
    for name in own.STEPS:
        own.reset()
        model, step = make(name)
        found[name] = trained(model, step, stream)
        found[name]["traces"] = [kit.runtime.trace_count(step)]
        found[name]["ran"] = operators.executed_graphs(step, *stream[0])
        found[name]["traces"].append(kit.runtime.trace_count(step))
        if name == "graph":
            run(step, batches(1, size=5))
            found[name]["traces"].append(kit.runtime.trace_count(step))
    return found


def predictions():
    """Largest error of each prediction against the kit's, and whether the weights were kept.

    For two batch sizes, but where the second costs another run of the C++ compiler.
    """
    model, optimizer = build()
    run(kit.training.make_train_step(model, optimizer, kit.training.cross_entropy), batches(3))
    before = kit.models.export_weights(model)
    exact = kit.training.make_predict(model)
    found = {}
    for name in own.PREDICTIONS:
        own.reset()
        predict = getattr(technique, f"{name}_predict")(model)
        errors = []
        for size in (8,) if (FRAMEWORK, name) == ("pt", "compiled") else (8, 5):
            x = batches(1, size)[0][0]
            errors.append(float(np.abs(np.asarray(predict(x)) - np.asarray(exact(x))).max()))
        x = batches(1)[0][0]
        found[name] = {"errors": errors, "ran": operators.executed_graphs(predict, x)}
    after = kit.models.export_weights(model)
    found["kept"] = all(np.array_equal(before[name], after[name]) for name in before)
    return found


def evidence():
    """What the benchmark says of each cheap variant, and of an eager or captured step instead."""
    batch = batches(1)[0]
    found = {}
    for variant in bench.TECHNIQUE.variants:
        if FRAMEWORK not in variant.frameworks or variant.name not in own.VARIANTS:
            continue
        for mode in ("train", "predict"):
            own.reset()
            work = Work(TASK, variant.name, variant.settings, 8, init_weights(TINY, 1), mode)
            try:
                prepared = bench.prepare(impl, work)
            except NotImplementedError as error:
                found[f"{variant.name}/{mode}"] = ["UNSUPPORTED", str(error)]
                continue
            answer, reason = bench.took_effect(impl, work, prepared, batch)
            found[f"{variant.name}/{mode}"] = [answer, reason]
            if variant.name == "baseline":
                for wrong in ("compiled", "model_alone", own.OTHER):
                    other = replace(work, variant=wrong)
                    reason = bench.took_effect(impl, other, prepared, batch)[1]
                    found[f"{wrong} was not/{mode}"] = reason
    return found


# Scenarios of one framework -------------------------------------------------------------------


class PyTorch:
    # The kernels of "fullgraph" are those of "compiled", from the cache.
    STEPS = ("eager", "graph", "compiled", "fullgraph")
    PREDICTIONS = ("eager", "graph", "compiled")
    VARIANTS = ("baseline", "torchscript_trace", "torchscript_script")
    OTHER = "graph_only"

    def __init__(self):
        import torch

        self.torch = torch
        if "no-compiler" in sys.argv:
            self.STEPS, self.PREDICTIONS = self.STEPS[:2], self.PREDICTIONS[:2]

    def reset(self):
        self.torch.compiler.reset()
        self.torch._dynamo.utils.counters.clear()

    def two(self):
        """A module of two inputs, with a branch that depends on data."""
        torch = self.torch
        nn = torch.nn

        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.left, self.right = nn.Linear(4, 8), nn.Linear(6, 8)
                self.head = nn.Linear(8, 3)

            def forward(self, a, b):
                a = torch.tanh(self.left(a) + self.right(b))
                if a.sum() > 1e9:
                    a = a + 1
                return {"logits": self.head(a)}

        torch.manual_seed(0)
        model = Two()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        x = (torch.randn(16, 4), torch.randn(16, 6))

        def loss_fn(output, y):
            return nn.functional.cross_entropy(output["logits"], y)

        return model, optimizer, loss_fn, x, torch.arange(16) % 3

    def broken(self):
        """A graph break in the model: more graphs, the reason, and what fullgraph says."""
        self.reset()
        model, optimizer, loss_fn, x, y = self.two()
        step = technique.graph_train_step(model, optimizer, loss_fn)
        found = {"graph": operators.executed_graphs(step, x, y)}
        self.reset()
        model, optimizer, loss_fn, x, y = self.two()
        step = technique.fullgraph_train_step(model, optimizer, loss_fn)
        found["fullgraph"] = raised(step, x, y)
        found["gradients"] = [p.grad is None for p in model.parameters()]
        return found

    def in_part(self):
        """What the benchmark says of a compiled prediction with an LSTM."""
        if "no-compiler" in sys.argv:
            return None
        torch = self.torch

        class Recurrent(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.lstm, self.head = torch.nn.LSTM(3, 2), torch.nn.Linear(2, 2)

            def forward(self, x):
                return torch.tanh(self.head(self.lstm(x)[0]))

        self.reset()
        predict = technique.compiled_predict(Recurrent())
        work = SimpleNamespace(mode="predict", variant="compiled")
        prepared = SimpleNamespace(predict=predict, loop=None)
        return bench.took_effect(impl, work, prepared, (torch.randn(4, 5, 3),))

    def torchscript(self):
        """Losses of a traced and a scripted model with BatchNorm, and the statistics after it."""
        torch = self.torch
        nn = torch.nn
        stream = [(torch.randn(8, 1, 6, 6), torch.arange(8) % 3) for _ in range(5)]
        found = {}
        for name in ("plain", "traced", "scripted"):
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
            )
            used = model
            if name == "traced":
                used = kit.torchscript.traced_model(model, stream[0][0])
            elif name == "scripted":
                used = kit.torchscript.scripted_model(model)
            marks = model[1].running_mean.tolist(), int(model[1].num_batches_tracked)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            step = technique.eager_train_step(used, optimizer, kit.training.cross_entropy)
            losses = run(step, stream)
            found[name] = {
                "type": type(used).__name__,
                "marks": marks,
                "losses": losses,
                "mean": model[1].running_mean.tolist(),
                "weight": model[0].weight.flatten().tolist(),
            }
        return found

    def replacing(self):
        """A buffer that each call replaces, before and after a model is traced."""
        torch = self.torch

        class Counting(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.head = torch.nn.Linear(3, 2)
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x):
                self.calls = self.calls + 1
                return self.head(x)

        model = Counting()
        kit.torchscript.traced_model(model, torch.zeros(1, 3))
        return float(model.calls)

    def refusals(self):
        """What bad input raises, and that the model trains on as before."""
        model, optimizer = build()
        arguments = model, optimizer, kit.training.cross_entropy
        found = {}
        for name in ("compiled_train_step", "compiled_model_train_step"):
            found[name] = raised(getattr(technique, name), *arguments, mode="fastest")
        found["compiled_predict"] = raised(technique.compiled_predict, model, mode="fastest")
        found["modes"] = [
            raised(technique.compiled_train_step, *arguments, mode=mode) for mode in MODES
        ]
        found["traced"] = raised(kit.torchscript.traced_model, model, batches(1)[0][0])
        found["scripted"] = raised(kit.torchscript.scripted_model, model)
        step = kit.training.make_train_step(*arguments)
        other_model, other_optimizer = build()
        other = kit.training.make_train_step(
            other_model, other_optimizer, kit.training.cross_entropy
        )
        found["unchanged"] = run(step, batches(3)) == run(other, batches(3))
        return found


class TensorFlow:
    STEPS = ("eager", "graph", "compiled", "compiled_model")
    PREDICTIONS = ("eager", "graph", "compiled")
    VARIANTS = ("baseline", "eager", "compiled", "fit", "fit_steps_per_execution")
    OTHER = "eager"

    def __init__(self):
        import tensorflow as tf

        self.tf = tf

    def reset(self):
        """A tf.function keeps its traces to itself."""

    def on_the_host(self):
        """A subclassed model of two inputs with Python in its graph, which XLA cannot compile."""
        tf = self.tf
        layers = tf.keras.layers

        class Two(tf.keras.Model):
            def __init__(self):
                super().__init__()
                self.left, self.right = layers.Dense(8), layers.Dense(8)
                self.head = layers.Dense(3)

            def call(self, a, b, training=False):
                a = tf.tanh(self.left(a) + self.right(b))
                a = tf.reshape(tf.py_function(lambda v: v, [a], tf.float32), (-1, 8))
                return {"logits": self.head(a)}

        model = Two()
        model(*self.inputs())
        return model

    def inputs(self):
        random = np.random.default_rng(0)
        sizes = (4, 6)
        return [
            self.tf.constant(random.normal(size=(16, size)).astype(np.float32)) for size in sizes
        ]

    def not_compilable(self):
        """Python in the model's graph: runs captured, and XLA refuses before it updates."""
        y = self.tf.range(16, dtype=self.tf.int64) % 3
        found = {}
        for name in ("graph", "compiled"):
            model = self.on_the_host()
            before = [v.numpy() for v in model.trainable_variables]
            step = getattr(technique, f"{name}_train_step")(
                model,
                self.tf.keras.optimizers.SGD(0.1),
                lambda output, y: kit.training.cross_entropy(output["logits"], y),
            )
            error = raised(step, tuple(self.inputs()), y)
            after = [v.numpy() for v in model.trainable_variables]
            moved = any((one != other).any() for one, other in zip(before, after, strict=True))
            found[name] = {"error": error and error[:300], "moved": moved}
        return found

    def applied(self):
        """Programs and losses of the kit's step, of a model that was compiled as a whole."""
        found = {}
        for name in ("plain", "compiled"):
            model, optimizer = build()
            if name == "compiled":
                model = technique.apply_compile(model)
            step = kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)
            losses = run(step, batches(3))
            programs = operators.executed_graphs(step, *batches(1)[0])["compiled"]
            found[name] = {"losses": losses, "programs": programs}
        return found

    def unbuilt(self):
        """A model without variables is refused by every step."""

        class Unbuilt(self.tf.keras.Model):
            def call(self, x):
                return x

        arguments = Unbuilt(), self.tf.keras.optimizers.SGD(0.1), kit.training.cross_entropy
        return {
            name: raised(getattr(technique, f"{name}_train_step"), *arguments)
            for name in self.STEPS
        }

    def fit(self):
        """Losses of single batches, and what eleven batches make of different calls."""
        stream, found = batches(), {}
        model, optimizer = build()
        baseline = kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)
        found["baseline"] = run(baseline, stream)
        for size in (1, 4):
            model, optimizer = build()
            loop = kit.fitting.fit_loop(
                model, optimizer, kit.training.cross_entropy, steps_per_execution=size
            )
            losses = [loop([batch])[1] for batch in stream]
            before = int(optimizer.iterations)
            seconds, _ = loop(batches(6))
            found[str(size)] = {
                "losses": losses,
                "single_seconds": loop(stream[:1])[0],
                "seconds": seconds,
                "steps": int(optimizer.iterations) - before - 1,
                "jit_compile": model.jit_compile,
            }
            loop(batches(6))
            found[str(size)]["calls"] = loop.calls()
        model, optimizer = build()
        found["none"] = raised(
            kit.fitting.fit_loop,
            model,
            optimizer,
            kit.training.cross_entropy,
            steps_per_execution=0,
        )
        keras, inputs = self.tf.keras, self.tf.keras.Input((4,))
        two = keras.Model(inputs, [keras.layers.Dense(2)(inputs) for _ in range(2)])
        loop = kit.fitting.fit_loop(two, keras.optimizers.SGD(), lambda output, y: output[0][0, 0])
        found["one of two"] = raised(loop, [(self.tf.ones((3, 4)), self.tf.ones((3, 2)))])
        return found


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    helpers = ("reset", "two", "inputs", "on_the_host")
    scenarios = [steps, predictions]
    scenarios += [
        getattr(own, name)
        for name, value in vars(type(own)).items()
        if callable(value) and not name.startswith("_") and name not in helpers
    ]
    scenarios.append(evidence)
    workers.report(scenarios)


own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
