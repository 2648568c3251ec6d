"""One framework's share of the stacking tests, in a process of its own.

`python stacking_worker.py pt|tf|tf_keras` runs every scenario and prints one line of JSON: scenario
-> what was found, or {"error": traceback}. `test_stacking.py` judges it.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
import traceback
from types import SimpleNamespace

import numpy as np

from bench.harness.plan import Work
from bench.train_step import bench_stacking
from shared.specs import TASKS, CNNSpec, parameter_shapes
from shared.weights import init_weights
from tests import workers

FRAMEWORK = "pt" if sys.argv[1:2] == ["pt"] else "tf"
impl = workers.implementation(FRAMEWORK, "train_step.stacking")
kit = impl.kit
technique = impl.train_step.stacking
SPEC = CNNSpec((16, 16, 1), ((8, 2), (16, 2)), num_classes=4)
RATE = 0.02
RUNGS = {
    "neutral": {},
    "channels_last": {"channels_last": True},
    "compiled": {"channels_last": True, "compiled": True},
    "bfloat16": {"channels_last": True, "dtype": "bfloat16"},
    "micro_batches": {"micro_batches": 2},
}
ALL = {"channels_last": True, "compiled": True, "dtype": "bfloat16", "micro_batches": 2}


def batches(count=6, size=16):
    """Images whose brightness tells the class, the same in every process."""
    random = np.random.default_rng(3)
    found = []
    for _ in range(count):
        y = random.integers(0, 4, size)
        x = random.normal(size=(size, 16, 16, 1)) + y[:, None, None, None]
        found.append((x.astype(np.float32), y))
    return kit.data.resident_batches(found)


def prepare(*, rate=RATE, fused=False, **settings):
    model = kit.models.build(SPEC, init_weights(SPEC, seed=1))
    optimizer = technique.make_optimizer(model, learning_rate=rate, fused=fused)
    step = technique.make_train_step(model, optimizer, kit.training.cross_entropy, **settings)
    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


def run(prepared, stream):
    losses = [kit.runtime.to_float(prepared.step(*batch)) for batch in stream]
    weights = kit.models.export_weights(prepared.model)
    return {
        "losses": losses,
        "weights": {name: weights[name].tolist() for name in parameter_shapes(SPEC)},
    }


def raised(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# Scenarios for both frameworks ----------------------------------------------------------------


def rungs():
    """Losses and weights of each rung alone, of the baseline, and of another learning rate."""
    model = kit.models.build(SPEC, init_weights(SPEC, seed=1))
    optimizer = technique.make_optimizer(model, learning_rate=RATE)
    step = kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)
    found = {"baseline": run(SimpleNamespace(model=model, step=step), batches())}
    for name, settings in RUNGS.items():
        if FRAMEWORK == "pt" and settings.get("compiled"):
            with own.without_inductor():
                found[name] = run(prepare(**settings), batches())
        else:
            found[name] = run(prepare(**settings), batches())
    found["planted"] = run(prepare(rate=1.1 * RATE), batches())
    return found


def dtypes():
    batch = batches(1)[0]
    return {
        name: kit.runtime.operator_dtypes(prepare(**RUNGS[name]).step, *batch)
        for name in ("neutral", "bfloat16")
    }


def everything():
    """All settings at once: losses of 40 steps, dtypes that ran, dtypes of what is kept."""
    if "no-compiler" in sys.argv:
        return None
    prepared = prepare(fused=FRAMEWORK == "pt", rate=0.05, **ALL)
    stream = batches()
    losses = [kit.runtime.to_float(prepared.step(*batch)) for batch in stream * 6]
    traces = kit.runtime.trace_count(prepared.step)
    prepared.step(*stream[0])
    return {
        "losses": losses,
        "retraced": kit.runtime.trace_count(prepared.step) - traces,
        "dtypes": kit.runtime.operator_dtypes(prepared.step, *stream[0]),
        "kept": own.kept_dtypes(prepared),
        "compiled": own.is_compiled(prepared.step, stream[0]),
        "device": kit.runtime.device(),
        "traced": own.traced_dtypes(prepared.step, stream[0]),
    }


def parts_of_one_size():
    """A model without BatchNorm: its micro-batches add up to the whole, in losses and weights."""
    found = {}
    for parts in (1, 2, 4):
        model, weights = own.plain_model()
        optimizer = technique.make_optimizer(model, learning_rate=0.1)
        step = technique.make_train_step(
            model, optimizer, kit.training.cross_entropy, micro_batches=parts
        )
        x, y = own.plain_batch()
        losses = [kit.runtime.to_float(step(x, y)) for _ in range(4)]
        found[str(parts)] = {"losses": losses, "weights": weights()}
    x, y = own.plain_batch()
    found["ragged"] = raised(step, tuple(v[:7] for v in x), y[:7])
    return found


def refusals():
    prepared = prepare()
    arguments = prepared.model, prepared.optimizer, kit.training.cross_entropy
    make = technique.make_train_step
    found = {
        "dtype": raised(make, *arguments, channels_last=True, dtype="float16"),
        "parts": raised(make, *arguments, channels_last=True, micro_batches=0),
        "rate": raised(technique.make_optimizer, prepared.model, learning_rate=-1.0),
        "momentum": raised(
            technique.make_optimizer, prepared.model, learning_rate=0.1, momentum=1.0
        ),
    }
    stream = batches(2)
    found["unchanged"] = run(prepared, stream) == run(prepare(), stream)
    return found


# Scenarios of one framework -------------------------------------------------------------------


class PyTorch:
    def __init__(self):
        import torch

        self.torch = torch

    def without_inductor(self):
        """`torch.compile` traces and differentiates as ever, and runs PyTorch's own kernels."""
        from unittest import mock

        traced = functools.partial(self.torch.compile, backend="aot_eager")
        return mock.patch.object(self.torch, "compile", traced)

    def kept_dtypes(self, prepared):
        kept = list(prepared.model.parameters())
        kept += [v for state in prepared.optimizer.state.values() for v in state.values()]
        return sorted({str(v.dtype).removeprefix("torch.") for v in kept})

    def is_compiled(self, step, batch):
        return kit.runtime.trace_count(step) is not None

    def traced_dtypes(self, step, batch):
        return None  # the profiler tells what ran

    def _two(self):
        nn = self.torch.nn

        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.image, self.code = nn.Conv2d(3, 4, 3), nn.Linear(5, 4)
                self.head = nn.Linear(4, 3)

            def forward(self, image, code):
                mixed = self.image(image).relu().mean((2, 3)) + self.code(code)
                return self.head(mixed)

        self.torch.manual_seed(0)
        return Two()

    def plain_model(self):
        model = self._two()
        return model, lambda: {k: v.tolist() for k, v in model.state_dict().items()}

    def plain_batch(self):
        self.torch.manual_seed(1)
        x = self.torch.randn(8, 3, 6, 6), self.torch.randn(8, 5)
        return x, self.torch.arange(8) % 3

    def formats(self):
        """Strides of kernels, of activations, and of the optimizer's state under channels_last."""
        model = self._two()
        seen = []
        model.image.register_forward_hook(lambda m, x, y: seen.extend([x[0], y]))
        optimizer = technique.make_optimizer(model, learning_rate=0.1, fused=True)
        step = technique.make_train_step(
            model, optimizer, kit.training.cross_entropy, channels_last=True, micro_batches=2
        )
        step(*self.plain_batch())
        kernel = model.image.weight
        tensors = [kernel, optimizer.state[kernel]["momentum_buffer"], *seen]
        last = self.torch.channels_last
        return [v.is_contiguous(memory_format=last) and not v.is_contiguous() for v in tensors]

    def fused(self):
        """A fused optimizer gives the weights of the loop, and ran as one kernel."""
        found = {}
        for fused in (False, True):
            prepared = prepare(fused=fused)
            found[str(fused)] = run(prepared, batches(3))
            activities = [self.torch.profiler.ProfilerActivity.CPU]
            with self.torch.profiler.profile(activities=activities) as profile:
                prepared.step(*batches(1)[0])
            names = [event.key for event in profile.key_averages()]
            found[f"{fused} kernel"] = "aten::_fused_sgd_" in names
        return found

    def what_is_compiled(self):
        """A fused update is left alone, a loop is compiled."""
        with self.without_inductor():
            found = {}
            for fused in (False, True):
                prepared = prepare(fused=fused, compiled=True)
                update = inspect.getclosurevars(prepared.step).nonlocals["update"]
                found[str(fused)] = hasattr(update, "_torchdynamo_orig_callable")
        return found

    def own_refusals(self):
        torch = self.torch
        flat = torch.nn.Linear(2, 2)
        deep = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.Conv3d(1, 1, 1))
        half = torch.nn.Linear(2, 2).bfloat16()
        found = {}
        for name, model, settings in (
            ("flat", flat, {"channels_last": True}),
            ("deep", deep, {"channels_last": True}),
            ("half", half, {"dtype": "bfloat16"}),
        ):
            optimizer = technique.make_optimizer(model, learning_rate=0.1)
            arguments = model, optimizer, kit.training.cross_entropy
            found[name] = raised(technique.make_train_step, *arguments, **settings)
        return found


class TensorFlow:
    def __init__(self):
        import tensorflow as tf

        self.tf = tf

    def kept_dtypes(self, prepared):
        kept = [*prepared.model.variables, *prepared.optimizer.variables]
        names = {self.tf.as_dtype(v.dtype).name for v in kept}
        return sorted(name for name in names if "int" not in name)  # the step counter

    def is_compiled(self, step, batch):
        return step.get_concrete_function(*batch).function_def.attr["_XlaMustCompile"].b

    def traced_dtypes(self, step, batch):
        """Dtypes of the convolutions in XLA's program before its passes for the device."""
        program = step.experimental_get_compiler_ir(*batch)(stage="hlo")
        return sorted(set(re.findall(r"= (\w+)\[.* convolution\(", program)))

    def plain_model(self):
        tf = self.tf

        class Two(tf.keras.Model):
            def __init__(self):
                super().__init__()
                self.image = tf.keras.layers.Conv2D(4, 3, activation="relu")
                self.code, self.head = tf.keras.layers.Dense(4), tf.keras.layers.Dense(3)
                self.unused = tf.keras.layers.Dense(2)

            def call(self, image, code, training=False):
                mixed = tf.reduce_mean(self.image(image), (1, 2)) + self.code(code)
                self.unused(code)
                return self.head(mixed)

        tf.keras.utils.set_random_seed(0)
        model = Two()
        model(*self.plain_batch()[0])
        return model, lambda: {
            str(i): np.asarray(tf.convert_to_tensor(v)).tolist()
            for i, v in enumerate(model.weights)
        }

    def plain_batch(self):
        random = np.random.default_rng(1)
        images = self.tf.constant(random.normal(size=(8, 6, 6, 3)), self.tf.float32)
        codes = self.tf.constant(random.normal(size=(8, 5)), self.tf.float32)
        return (images, codes), self.tf.constant(np.arange(8) % 3)

    def proof(self):
        """What the benchmark says of bfloat16 layers, traced alone and compiled by XLA."""
        task = TASKS["digits-cnn"]
        found = {}
        for name, settings in (
            ("traced", {"channels_last": True, "dtype": "bfloat16"}),
            ("compiled", bench_stacking.BF16),
        ):
            work = Work(task, name, settings, 8, init_weights(task.model, 0))
            prepared = bench_stacking.prepare(impl, work)
            x, y = np.zeros((8, *task.model.input_shape), np.float32), np.arange(8)
            batch = kit.data.to_device(x, y)
            try:
                found[name] = bench_stacking.took_effect(impl, work, prepared, batch)[1]
            except NotImplementedError as error:
                found[name] = f"NotImplementedError: {error}"
        return found

    def parts_in_order(self):
        """Whether the first and the last convolution wait for a gradient of a convolution."""
        step = prepare(micro_batches=2).step
        graph = step.get_concrete_function(*batches(1)[0]).graph
        forward = [operation for operation in graph.get_operations() if operation.type == "Conv2D"]
        return {"convolutions": len(forward), "waits": [_waits(forward[0]), _waits(forward[-1])]}

    def embedding(self):
        """Sparse gradients of a functional model add up as dense ones do."""
        tf = self.tf
        found = []
        for parts in (1, 2):
            tf.keras.utils.set_random_seed(0)
            codes = tf.keras.Input((3,), dtype="int64")
            x = tf.keras.layers.Embedding(6, 4)(codes)
            x = tf.keras.layers.Dense(2)(tf.keras.layers.Flatten()(x))
            model = tf.keras.Model(codes, x)
            optimizer = technique.make_optimizer(model, learning_rate=0.1, momentum=0.0)
            step = technique.make_train_step(
                model, optimizer, kit.training.cross_entropy, micro_batches=parts
            )
            batch = tf.constant(np.arange(24).reshape(8, 3) % 6), tf.constant(np.arange(8) % 2)
            found.append([float(step(*batch)) for _ in range(4)])
        return found

    def own_refusals(self):
        tf = self.tf
        layers = tf.keras.layers
        first = tf.keras.Sequential(
            [tf.keras.Input((2, 8, 8)), layers.Conv2D(2, 3, data_format="channels_first")]
        )
        optimizer = technique.make_optimizer(first, learning_rate=0.1)
        make, loss_fn = technique.make_train_step, kit.training.cross_entropy
        found = {
            "format": raised(make, first, optimizer, loss_fn, channels_last=True),
            "fused": raised(technique.make_optimizer, first, learning_rate=0.1, fused=True),
            "unbuilt": raised(make, tf.keras.Sequential([layers.Dense(2)]), optimizer, loss_fn),
            "bfloat16": raised(make, first, optimizer, loss_fn, dtype="bfloat16"),
        }
        if tf.keras.Model.__module__.startswith("keras"):
            half = tf.keras.Sequential([tf.keras.Input((2,)), layers.Dense(2, dtype="bfloat16")])
            found["half"] = raised(make, half, optimizer, loss_fn, dtype="bfloat16")
        return found


def _waits(operation) -> bool:
    """Whether `operation` of a graph comes after a gradient of a convolution."""
    waiting, seen = [operation], set()
    while waiting:
        one = waiting.pop()
        if one.type == "Conv2DBackpropFilter":
            return True
        if one.name not in seen:
            seen.add(one.name)
            waiting += [tensor.op for tensor in one.inputs] + list(one.control_inputs)
    return False


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    if sys.argv[1] == "tf_keras":
        RUNGS.pop("bfloat16")
        scenarios = [rungs, parts_of_one_size, own.own_refusals]
    else:
        scenarios = [rungs, dtypes, everything, parts_of_one_size, refusals, own.own_refusals]
        mine = ("formats", "fused", "what_is_compiled", "embedding", "parts_in_order", "proof")
        scenarios += [getattr(own, name) for name in mine if hasattr(own, name)]
    found = {}
    for scenario in scenarios:
        try:
            found[scenario.__name__] = scenario()
        except Exception:
            found[scenario.__name__] = {"error": traceback.format_exc()}
    print(json.dumps(found))


own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
