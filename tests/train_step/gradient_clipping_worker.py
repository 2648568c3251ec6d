"""One framework's share of the clipping tests, in a process of its own.

`python gradient_clipping_worker.py pt|tf|tf_keras` runs every scenario and prints one line of JSON:
scenario -> what was found, or {"error": traceback}. `test_gradient_clipping.py` judges it.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np

from shared.specs import TASKS, CNNSpec, GPTSpec, parameter_shapes
from shared.weights import init_weights
from tests import workers
from tests.workers import raised

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
impl = workers.implementation(FRAMEWORK, "train_step.gradient_clipping")
kit = impl.kit
technique = impl.train_step.gradient_clipping
GPT = GPTSpec(vocabulary=11, sequence_length=6, width=8, heads=2, layers=1)
CNN = CNNSpec((8, 8, 2), ((4, 1), (6, 2)), num_classes=10)
RECIPE = replace(TASKS["digits-cnn"].recipe, learning_rate=2.0**-5)
LARGE = 64.0  # times the loss: gradients beside which PyTorch's 1e-6 is nothing
SCALE = 2.0**12


def batches(spec, count=1, samples=8):
    """The same in every process."""
    random = np.random.default_rng(11)
    found = []
    for _ in range(count):
        if spec is GPT:
            x = random.integers(0, spec.vocabulary, (samples, spec.sequence_length))
            y = (3 * x + 1) % spec.vocabulary
        else:
            y = random.integers(0, 10, samples)
            x = random.normal(size=(samples, *spec.input_shape)).astype(np.float32)
        found.append((x, y))
    return kit.data.resident_batches(found)


def large(logits, labels):
    return kit.training.cross_entropy(logits, labels) * LARGE


def prepare(spec, maker=None, *, optimizer=None, loss_fn=None, **settings):
    """A model and its step, by `maker`: a function of the technique, or the baseline."""
    model = kit.models.build(spec, init_weights(spec, seed=1))
    optimizer = optimizer(model) if optimizer else kit.training.make_optimizer(model, RECIPE)
    maker = getattr(technique, maker) if maker else kit.training.make_train_step
    step = maker(model, optimizer, loss_fn or kit.training.cross_entropy, **settings)
    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


def run(prepared, stream):
    return [kit.runtime.to_float(prepared.step(*batch)) for batch in stream]


def parameters(prepared, spec):
    weights = kit.models.export_weights(prepared.model)
    return {name: weights[name] for name in parameter_shapes(spec)}


# Scenarios for both frameworks ----------------------------------------------------------------


def applied():
    """The gradients that reach the optimizer, which puts them in the weights' place."""
    found = {}
    cases = {
        "plain": (None, {}),
        "clip": ("make_train_step", {"max_norm": 2.0}),
        "loose": ("make_train_step", {"max_norm": 1e4}),
        "off": ("make_train_step", {"max_norm": math.inf}),
        "measured": ("make_train_step", {"max_norm": math.inf, "measure_norm": True}),
        "per variable": ("make_per_variable_step", {"max_norm": 2.0}),
    }
    if sys.argv[1] == "tf":
        for setting in ("global_clipnorm", "clipnorm"):
            cases[setting] = None, {}
    for name, (maker, settings) in cases.items():
        optimizer = partial(own.recorder, **({name: 2.0} if "clipnorm" in name else {}))
        prepared = prepare(GPT, maker, optimizer=optimizer, loss_fn=large, **settings)
        loss = kit.runtime.to_float(prepared.step(*batches(GPT)[0]))
        arrays = parameters(prepared, GPT)
        found[name] = {"loss": loss, "gradients": {n: v.tolist() for n, v in arrays.items()}}
        if name == "off":
            found[name]["norm"] = raised(prepared.step.gradient_norm)
        elif maker == "make_train_step":
            found[name]["norm"] = prepared.step.gradient_norm()
    return found


def scaled():
    """The gradients that reach the optimizer of a loop under loss scaling."""
    cases = {"clip": (2.0, True), "off": (math.inf, True), "wrong order": (2.0, False)}
    found = {}
    for name, (most, in_order) in cases.items():
        model = own.scaled(most, in_order)
        weights = kit.models.export_weights(model)
        found[name] = {n: weights[n].tolist() for n in parameter_shapes(GPT)}
    return found


def losses():
    """Of ten steps, plain and clipped; how often the clipped one was traced."""
    stream, clipped = batches(CNN, 10), prepare(CNN, "make_train_step", max_norm=0.5)
    return {
        "baseline": run(prepare(CNN), stream),
        "clip": run(clipped, stream),
        "traces": kit.runtime.trace_count(clipped.step),
    }


def refusals():
    """What bad input raises, and that the model and its optimizer work as before."""
    prepared = prepare(CNN)
    arguments = prepared.model, prepared.optimizer, kit.training.cross_entropy
    found = {}
    for maker in ("make_train_step", "make_per_variable_step"):
        make = getattr(technique, maker)
        for bad in (0, -1.0, math.nan, "1", None):
            found[f"{maker} {bad}"] = raised(make, *arguments, max_norm=bad)
        found[f"{maker} frozen"] = raised(make, own.frozen(), *arguments[1:])
    stream = batches(CNN, 2)
    found["unchanged"] = run(prepared, stream) == run(prepare(CNN), stream)
    return found


# Scenarios of one framework, on models that are not ours --------------------------------------

CODES = np.array([1, 1, 2, 1])
PULLS = np.array([[3.0, 0.0], [1.0, 2.0], [0.0, 5.0], [2.0, 2.0]], dtype=np.float32)


class PyTorch:
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

    def frozen(self):
        return self.torch.nn.Linear(2, 2).requires_grad_(False)

    def scaled(self, max_norm, in_order):
        """A loop of GradScaler's with the clipper; out of order it clips before `unscale_`."""
        torch = self.torch
        model = kit.models.build(GPT, init_weights(GPT, seed=1))
        optimizer = self.recorder(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        x, y = batches(GPT)[0]
        scaler.scale(large(model(x), y)).backward()
        if in_order:
            scaler.unscale_(optimizer)
        technique.GradientClipper(model, max_norm=max_norm).clip()
        scaler.step(optimizer)
        return model

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

        found = {}
        for name, maker, settings in (
            ("clip", "make_train_step", {}),
            ("per variable", "make_per_variable_step", {}),
        ):
            prepared = prepare(GPT, maker, **settings)
            batch = batches(GPT)[0]
            prepared.step(*batch)
            with Reads() as reads:
                prepared.step(*batch)
            found[name] = reads.count
        return found

    def embedding(self):
        """The norm of an embedding's gradient, and what clipping leaves of it."""
        torch = self.torch
        model = torch.nn.Embedding(4, 2)
        pulls = torch.from_numpy(PULLS)
        found = {}
        for maker in ("make_train_step", "make_per_variable_step"):
            optimizer = self.recorder(model)
            step = getattr(technique, maker)(
                model, optimizer, lambda output, pulls: (output * pulls).sum(), max_norm=1.0
            )
            step(torch.from_numpy(CODES), pulls)
            found[maker] = model.weight.detach().tolist()
            if maker == "make_train_step":
                found["norm"] = step.gradient_norm()
        return found

    def several_dtypes(self):
        """Gradients of two dtypes, one of them missing: their norm, and what clipping leaves."""
        torch = self.torch
        model = torch.nn.ParameterList([torch.zeros(2), torch.zeros(1).half(), torch.zeros(1)])
        model[0].grad, model[1].grad = torch.tensor([0.0, 3.0]), torch.tensor([4.0]).half()
        clipper = technique.GradientClipper(model, max_norm=1.0)
        norm = float(clipper.norm())
        clipper.clip()
        return {
            "norm": norm,
            "clipped": [p.grad.tolist() for p in model if p.grad is not None],
        }

    def thawed(self):
        """The norm that reaches the optimizer from a layer that trains since the second step."""
        torch = self.torch
        found = {}
        for maker in ("make_train_step", "make_per_variable_step"):
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
            model[0].requires_grad_(False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            loss_fn = torch.nn.MSELoss()
            step = getattr(technique, maker)(model, optimizer, loss_fn, max_norm=1e-3)
            x, y = torch.ones(3, 4), torch.full((3, 2), 100.0)
            step(x, y)
            model[0].requires_grad_(True)
            step(x, y)
            found[maker] = [torch.linalg.vector_norm(p.grad).item() for p in model.parameters()]
        return found

    def partly(self):
        """Norms of steps alike whose optimizer holds the last layer alone, and that layer's own."""
        torch = self.torch
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.0)
        step = technique.make_train_step(
            model, optimizer, torch.nn.MSELoss(), max_norm=math.inf, measure_norm=True
        )
        norms = []
        for _ in range(3):
            step(torch.ones(3, 4), torch.full((3, 2), 100.0))
            norms.append(step.gradient_norm())
        own = torch.nn.utils.get_total_norm([p.grad for p in model[1].parameters()])
        return {"norms": norms, "own": own.item()}

    def complex_gradients(self):
        """The norm of (3 + 4i, 0) and 12, and what either clipper leaves of them at 1."""
        torch, found = self.torch, {}
        model = torch.nn.ParameterList([torch.zeros(2, dtype=torch.complex64), torch.zeros(1)])
        for name in ("GradientClipper", "VariableClipper"):
            model[0].grad = torch.tensor([3.0 + 4.0j, 0.0])
            model[1].grad = torch.tensor([12.0])
            clipper = getattr(technique, name)(model, max_norm=1.0)
            if name == "GradientClipper":
                found["norm"] = clipper.norm().item()
            clipper.clip()
            found[name] = [torch.view_as_real(model[0].grad).tolist(), model[1].grad.tolist()]
        return found


class TensorFlow:
    def __init__(self):
        import tensorflow as tf

        self.tf = tf

    def recorder(self, model, **settings):
        """An optimizer that puts the gradient in the variable's place."""

        class Recorder(self.tf.keras.optimizers.SGD):
            def update_step(self, gradient, variable, learning_rate=None):
                variable.assign(gradient)

        return Recorder(1.0, **settings)

    def frozen(self):
        keras = self.tf.keras
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        model.trainable = False
        return model

    def scaled(self, max_norm, in_order):
        """A loop of LossScaleOptimizer's with the clipper; out of order that knows no scale."""
        tf = self.tf
        model = kit.models.build(GPT, init_weights(GPT, seed=1))
        variables = model.trainable_variables
        optimizer = tf.keras.optimizers.LossScaleOptimizer(self.recorder(model), SCALE)
        optimizer.build(variables)
        x, y = batches(GPT)[0]
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(large(model(x, training=True), y))
        clipper = technique.GradientClipper(model, max_norm=max_norm)
        scale = {"scale": SCALE} if in_order else {}
        gradients = clipper.clip(tape.gradient(loss, variables), **scale)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return model

    def refused(self):
        """A model without variables, and optimizers that expect a scaled loss."""
        keras = self.tf.keras
        found, sgd = {}, keras.optimizers.SGD
        model = keras.Sequential([keras.layers.Dense(2)])
        for maker in ("make_train_step", "make_per_variable_step"):
            make = getattr(technique, maker)
            found[f"unbuilt {maker}"] = raised(make, model, sgd(), large)
        model.build((None, 4))
        for maker in ("make_train_step", "make_per_variable_step"):
            make = getattr(technique, maker)
            scaling = keras.optimizers.LossScaleOptimizer(sgd())
            found[f"scaling {maker}"] = raised(make, model, scaling, large)
            found[f"factor {maker}"] = raised(make, model, sgd(loss_scale_factor=2.0), large)
        return found

    def embedding(self):
        """The norm of an embedding's gradient, and what clipping leaves of it."""
        tf = self.tf
        pulls, codes = tf.constant(PULLS), tf.constant(CODES)
        found = {}
        for maker in ("make_train_step", "make_per_variable_step"):
            model = tf.keras.Sequential(
                [tf.keras.Input((), dtype="int64"), tf.keras.layers.Embedding(4, 2)]
            )
            step = getattr(technique, maker)(
                model,
                self.recorder(model),
                lambda output, pulls: tf.reduce_sum(output * pulls),
                max_norm=1.0,
            )
            step(codes, pulls)
            found[maker] = np.array(model.trainable_variables[0]).tolist()
            if maker == "make_train_step":
                found["norm"] = step.gradient_norm()
        return found

    def several_dtypes(self):
        """Gradients of two dtypes, one of them missing: their norm, and what clipping leaves."""
        tf = self.tf
        gradients = [tf.constant([0.0, 3.0]), tf.constant([4.0], tf.float16), None]
        model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
        clipper = technique.GradientClipper(model, max_norm=1.0)
        clipped = [one.numpy().tolist() for one in clipper.clip(gradients) if one is not None]
        return {"norm": float(clipper.norm(gradients)), "clipped": clipped}

    def complex_gradients(self):
        """The norm of (3 + 4i, 0) and 12, and what either clipper leaves of them at 1."""
        tf, found = self.tf, {}
        gradients = [tf.constant([3.0 + 4.0j, 0.0], tf.complex64), tf.constant([12.0])]
        model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
        for name in ("GradientClipper", "VariableClipper"):
            clipper = getattr(technique, name)(model, max_norm=1.0)
            if name == "GradientClipper":
                found["norm"] = float(clipper.norm(gradients))
            one, other = (gradient.numpy() for gradient in clipper.clip(gradients))
            found[name] = [np.stack([one.real, one.imag], -1).tolist(), other.tolist()]
        return found


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    scenarios = [applied, losses]
    if sys.argv[1] != "tf_keras":
        scenarios += [scaled, refusals]
        names = ("reads", "refused", "embedding", "several_dtypes", "thawed", "partly")
        names += ("complex_gradients",)
        scenarios += [getattr(own, name) for name in names if hasattr(own, name)]
    workers.report(scenarios)


own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
