"""One framework's share of the accumulation tests, in a process of its own.

`python gradient_accumulation_worker.py pt|tf|tf_keras` runs every scenario and prints one line of
JSON: scenario -> what was found, or {"error": traceback}. `test_gradient_accumulation.py` judges.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from bench.harness import memory
from shared.specs import TASKS, CNNSpec, GPTSpec
from shared.weights import init_weights
from tests import workers

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
impl = workers.implementation(FRAMEWORK, "train_step.gradient_accumulation")
kit = impl.kit
technique = impl.train_step.gradient_accumulation
GPT = GPTSpec(vocabulary=11, sequence_length=6, width=8, heads=2, layers=1)
CNN = CNNSpec((8, 8, 2), ((4, 1), (6, 2)), num_classes=10, bn_momentum=0.25)
RECIPE = replace(TASKS["digits-cnn"].recipe, learning_rate=2.0**-5)
SAMPLES = 10
PARTS = ((0, 3), (3, 6), (6, 10))  # of it


def batches(spec, count=1, samples=SAMPLES):
    """The same in every process; images have another mean in every sample."""
    random = np.random.default_rng(11)
    found = []
    for _ in range(count):
        if spec is GPT:
            x = random.integers(0, spec.vocabulary, (samples, spec.sequence_length))
            y = (3 * x + 1) % spec.vocabulary
        else:
            y = random.integers(0, 10, samples)
            x = random.normal(size=(samples, *spec.input_shape)) + y[:, None, None, None] / 3
            x = x.astype(np.float32)
        found.append((x, y))
    return kit.data.resident_batches(found)


def start(spec):
    """Weights where no scale is 1 and no statistic is that of a new layer."""
    random = np.random.default_rng(5)
    weights = init_weights(spec, seed=1)
    for name, value in weights.items():
        if name.endswith(("gamma", "variance")):
            weights[name] = random.uniform(0.5, 1.5, value.shape).astype(np.float32)
        elif name.endswith(("beta", "bias", "mean")):
            weights[name] = random.normal(0.0, 0.3, value.shape).astype(np.float32)
    return weights


def prepare(spec, *, recipe=RECIPE, optimizer=None, by=technique, **settings):
    """A model and its step: the baseline without settings, else the technique."""
    model = kit.models.build(spec, start(spec))
    optimizer = optimizer(model) if optimizer else kit.training.make_optimizer(model, recipe)
    maker = by if settings else kit.training
    step = maker.make_train_step(model, optimizer, kit.training.cross_entropy, **settings)
    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


def run(prepared, stream):
    return [kit.runtime.to_float(prepared.step(*batch)) for batch in stream]


def weights(prepared):
    return kit.models.export_weights(prepared.model)


def plain(arrays):
    return {name: value.tolist() for name, value in arrays.items()}


def applied(spec, *stream, **settings):
    """The loss and the gradients that reach the optimizer, and the statistics after the step.

    Of each batch from the same start.
    """
    prepared, found = prepare(spec, optimizer=own.recorder, **settings), []
    for batch in stream:
        kit.models.import_weights(prepared.model, start(spec))
        loss = kit.runtime.to_float(prepared.step(*batch))
        found.append({"loss": loss} | plain(weights(prepared)))
    return found


# Scenarios for both frameworks ----------------------------------------------------------------


def gradients():
    """Of a whole batch, by parts; and of each part alone, by the baseline."""
    found = {}
    for name, spec in (("gpt", GPT), ("cnn", CNN)):
        ((x, y),) = batches(spec)
        parts = [(x[a:b], y[a:b]) for a, b in PARTS]
        whole, *alone = applied(spec, (x, y), *parts)
        found[name] = {"start": plain(start(spec)), "baseline": whole, "alone": alone}
        (found[name]["3"],) = applied(spec, (x, y), micro_batches=3)
        if spec is GPT:
            (found[name]["1"],) = applied(spec, (x, y), micro_batches=1)
    return found


def losses():
    """Of ten steps in four parts."""
    return run(prepare(CNN, micro_batches=4), batches(CNN, 10, samples=30))


def ragged():
    """Batches of several sizes in turn, each as the baseline has it; how often the step traced."""
    stream = [batches(GPT, 1, samples=size)[0] for size in (10, 4, 10, 4, 10)]
    prepared = prepare(GPT, micro_batches=4)
    return {
        "baseline": run(prepare(GPT), stream),
        "parts": run(prepared, stream),
        "traces": kit.runtime.trace_count(prepared.step),
    }


def order():
    """Forward and backward passes in the order in which they ran."""
    return own.order()


def peaks():
    """Bytes that a step peaks above what was resident before it, in 16 parts and then in one."""
    found = {}
    for parts in (16, 1):
        step, (x, y) = own.activations(parts)
        step(x[:16], y[:16])  # what only a first step needs
        before = memory.resident()
        if not memory.reset_peak():
            return None
        step(x, y)
        found[str(parts)] = memory.peak() - before
    return found


def refusals():
    """What bad input raises, and that model, statistics and optimizer are as before."""
    prepared = prepare(CNN, micro_batches=4)
    arguments = prepared.model, prepared.optimizer, kit.training.cross_entropy
    before, memory_before = weights(prepared), own.state(prepared.optimizer)
    found = {
        str(parts): raised(technique.make_train_step, *arguments, micro_batches=parts)
        for parts in (0, -2, 2.0, "4")
    }
    ((x, y),) = batches(CNN)
    found["few"] = raised(prepared.step, x[:3], y[:3])
    found["disagree"] = raised(prepared.step, x, y[:9])
    found["scalar"] = raised(prepared.step, x, y[0])
    found["frozen"] = raised(
        technique.make_train_step, own.frozen(), prepared.optimizer, kit.training.cross_entropy
    )
    after = weights(prepared)
    found["unchanged"] = (
        all(np.array_equal(before[name], after[name]) for name in before)
        and own.state(prepared.optimizer) == memory_before
    )
    fresh = prepare(CNN, micro_batches=4)
    found["goes on"] = run(prepared, [(x, y)]) == run(fresh, [(x, y)])
    return found


def raised(function, *args, **kwargs):
    """An error in one line: TensorFlow puts where it was before what it is."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {' | '.join(str(error).split(chr(10)))}"
    return None


# Scenarios of one framework, on models that are not ours --------------------------------------

random = np.random.default_rng(3)
LEFT, RIGHT = (random.normal(size=(9, 4)).astype(np.float32) for _ in range(2))
TARGET = random.normal(size=(9, 2)).astype(np.float32)


class PyTorch:
    helpers = ("recorder", "state", "frozen", "order", "activations")

    def __init__(self):
        import torch

        self.torch = torch

    def recorder(self, model):
        """An optimizer that puts the gradient in the parameter's place."""

        class Recorder(self.torch.optim.SGD):
            def step(self):
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.data.copy_(parameter.grad)

        return Recorder(model.parameters(), lr=1.0)

    def state(self, optimizer):
        return sum(v.abs().sum().item() for s in optimizer.state.values() for v in s.values())

    def frozen(self):
        return self.torch.nn.Linear(2, 2).requires_grad_(False)

    def order(self):
        torch, events = self.torch, []

        class Spy(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                events.append(f"forward {len(x)}")
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                events.append(f"backward {len(gradient)}")
                return gradient

        layer = torch.nn.Linear(4, 2)
        model = torch.nn.Sequential(layer)
        layer.register_forward_hook(lambda module, inputs, output: Spy.apply(output))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = technique.make_train_step(model, optimizer, torch.nn.MSELoss(), micro_batches=4)
        step(torch.from_numpy(LEFT), torch.from_numpy(TARGET))
        return events

    def activations(self, parts):
        """A step whose activations outweigh all else: 12 of 16 MiB for the whole batch."""
        torch = self.torch

        class Deep(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = torch.nn.Parameter(torch.ones(4096))

            def forward(self, x):
                for _ in range(12):
                    x = torch.tanh(x * self.scale)
                return x

        model = Deep()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_fn = torch.nn.MSELoss()
        step = technique.make_train_step(model, optimizer, loss_fn, micro_batches=parts)
        return step, (torch.randn(1024, 4096), torch.zeros(1024, 4096))

    def uncut(self):
        """What a step says of tensors without rows to cut, and whether it kept the gradient."""
        torch, found = self.torch, {}
        x = torch.from_numpy(LEFT)
        inputs = {"sparse": x.to_sparse(), "nested": torch.nested.nested_tensor(list(x))}
        for name, given in inputs.items():
            model = torch.nn.Linear(4, 2)
            model.weight.grad = torch.ones(2, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = technique.make_train_step(model, optimizer, torch.nn.MSELoss())
            said = raised(step, given, torch.from_numpy(TARGET))
            found[name] = said, model.weight.grad is not None
        return found


class TensorFlow:
    helpers = ("recorder", "state", "frozen", "order", "activations")

    def __init__(self):
        import tensorflow as tf

        self.tf = tf

    def recorder(self, model):
        """An optimizer that puts the gradient in the variable's place."""

        class Recorder(self.tf.keras.optimizers.SGD):
            def update_step(self, gradient, variable, learning_rate=None):
                variable.assign(gradient)

        optimizer = Recorder(1.0)
        optimizer.build(model.trainable_variables)
        return optimizer

    def state(self, optimizer):
        return float(sum(np.abs(np.array(v, dtype=np.float64)).sum() for v in optimizer.variables))

    def frozen(self):
        keras = self.tf.keras
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        model.trainable = False
        return model

    def order(self):
        tf, events = self.tf, []

        def note(what):
            return lambda rows: events.append(f"{what} {int(rows)}")

        @tf.custom_gradient
        def spy(x):
            tf.py_function(note("forward"), [tf.shape(x)[0]], [])

            def gradient(upstream):
                with tf.control_dependencies([upstream]):
                    tf.py_function(note("backward"), [tf.shape(upstream)[0]], [])
                return upstream

            return tf.identity(x), gradient

        class Spy(tf.keras.layers.Layer):
            def call(self, x):
                return spy(x)

        layers = tf.keras.layers
        model = tf.keras.Sequential([tf.keras.Input((4,)), layers.Dense(2), Spy()])
        step = technique.make_train_step(
            model, tf.keras.optimizers.SGD(0.1), self.squares, micro_batches=4
        )
        events.clear()
        step(tf.constant(LEFT), tf.constant(TARGET))
        return events

    def activations(self, parts):
        """A step whose activations outweigh all else: 12 of 16 MiB for the whole batch."""
        tf = self.tf

        class Deep(tf.keras.layers.Layer):
            def build(self, shape):
                self.scale = self.add_weight(shape=(4096,), initializer="ones", name="scale")

            def call(self, x):
                for _ in range(12):
                    x = tf.tanh(x * self.scale)
                return x

        model = tf.keras.Sequential([tf.keras.Input((4096,)), Deep()])
        step = technique.make_train_step(
            model, tf.keras.optimizers.SGD(0.1), self.squares, micro_batches=parts
        )
        return step, (tf.random.normal((1024, 4096)), tf.zeros((1024, 4096)))

    def squares(self, output, target):
        return self.tf.reduce_mean(self.tf.square(output - target))

    def functional(self):
        """A functional model with a list of inputs, in equal parts, which have a static shape."""
        tf, shapes = self.tf, []
        keras, layers = tf.keras, tf.keras.layers

        class Look(layers.Layer):
            def call(self, x):
                shapes.append(x.shape[0])
                return x

        found = {}
        for parts in (None, 3):
            keras.utils.set_random_seed(0)
            a, b = keras.Input((4,)), keras.Input((4,))
            model = keras.Model([a, b], Look()(layers.Dense(2)(layers.Add()([a, b]))))
            shapes.clear()
            x, y = [tf.constant(LEFT), tf.constant(RIGHT)], tf.constant(TARGET)
            maker = technique if parts else kit.training
            settings = {"micro_batches": parts} if parts else {}
            step = maker.make_train_step(model, keras.optimizers.SGD(0.1), self.squares, **settings)
            found[str(parts)] = [float(step(x, y)) for _ in range(3)]
        found["rows"] = shapes
        unbuilt = keras.Sequential([layers.Dense(2)])
        found["unbuilt"] = raised(technique.make_train_step, unbuilt, None, self.squares)
        dense = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
        step = technique.make_train_step(dense, keras.optimizers.SGD(), self.squares)
        found["sparse"] = raised(step, tf.sparse.from_dense(LEFT), tf.constant(TARGET))
        return found

    def double(self):
        """Weights of a double-precision model after three steps: of the whole batch and of parts.

        By plain code, by the step, and by `fit` without and with the technique.
        """
        tf = self.tf
        keras, found = tf.keras, {}
        x, y = (tf.constant(value.astype(np.float64)) for value in (LEFT, TARGET))

        class Accumulated(technique.AccumulatedTraining, keras.Model):
            pass

        def plain(model, optimizer):
            with tf.GradientTape() as tape:
                loss = self.squares(model(x, training=True), y)
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        try:
            for name in ("plain", "step", "fit", "fit in parts"):
                a = keras.Input((4,))
                kind = Accumulated if name == "fit in parts" else keras.Model
                model = kind(a, keras.layers.Dense(2, kernel_initializer="ones")(a))
                optimizer = keras.optimizers.SGD(0.1)
                step = technique.make_train_step(model, optimizer, self.squares)
                if name.startswith("fit"):
                    model.compile(optimizer, "mse")
                    model.fit(x, y, batch_size=len(LEFT), epochs=3, shuffle=False, verbose=0)
                for _ in range(0 if name.startswith("fit") else 3):
                    step(x, y) if name == "step" else plain(model, optimizer)
                found[name] = np.array(model.weights[0].value).tolist()
        finally:
            keras.config.set_floatx("float32")
            keras.config.set_dtype_policy("float32")
        return found

    def dynamic(self):
        """Called in a graph that does not know how many samples it gets."""
        tf = self.tf
        stream = [batches(GPT, 1, samples=size)[0] for size in (10, 9, 4)]
        prepared = prepare(GPT, micro_batches=4)
        length = GPT.sequence_length
        signature = [tf.TensorSpec((None, length), tf.int64)] * 2
        outer = tf.function(prepared.step, input_signature=signature)
        prepared.step = outer
        found = {"parts": run(prepared, stream), "baseline": run(prepare(GPT), stream)}
        before = weights(prepared)
        found["few"] = raised(outer, *(part[:3] for part in stream[0]))
        after = weights(prepared)
        found["unchanged"] = all(np.array_equal(before[name], after[name]) for name in before)
        found["traces"] = outer.experimental_get_tracing_count()
        return found


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    scenarios = [gradients, losses]
    if sys.argv[1] != "tf_keras":
        scenarios += [ragged, order, peaks, refusals]
        names = [name for name in vars(type(own)) if not name.startswith("_")]
        helpers = (*own.helpers, "helpers", "squares")
        scenarios += [getattr(own, name) for name in names if name not in helpers]
    workers.report(scenarios)


own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
