"""One framework's share of the stacking tests, in a process of its own.

`python stacking_worker.py pt|tf|tf_keras` runs every scenario and prints one line of JSON: scenario
-> what was found, or {"error": traceback}. `test_stacking.py` judges it.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from bench.harness.plan import Work
from bench.train_step import bench_stacking
from shared.specs import TASKS, CNNSpec, parameter_shapes
from shared.weights import init_weights
from tests import workers
from tests.workers import raised

FRAMEWORK = "pt" if sys.argv[1:2] == ["pt"] else "tf"
impl = workers.implementation(
    FRAMEWORK, "train_step.stacking", "train_step.optimizer_implementations"
)
kit = impl.kit
KERAS_3 = sys.argv[1:2] != ["tf_keras"]  # or PyTorch
technique = impl.train_step.stacking
SPEC = CNNSpec((16, 16, 1), ((8, 2), (16, 2)), num_classes=4)
SHALLOW = CNNSpec((16, 16, 1), ((8, 2),), num_classes=4)
RATE = 0.02
CHANNELS_LAST = {"memory_format": "channels_last"}
RUNGS = {
    "neutral": {},
    "channels_last": CHANNELS_LAST,
    "compiled": CHANNELS_LAST | {"compiled": True},
    "bfloat16": CHANNELS_LAST | {"dtype": "bfloat16"},
    "micro_batches": {"micro_batches": 2},
}
ALL = CHANNELS_LAST | {"compiled": True, "dtype": "bfloat16", "micro_batches": 2, "max_norm": 1.0}
# Of techniques, drawn at random; each part is traced anew.
SETS, MOST_PARTS = (14, 4) if workers.campaign() else (7, 3)
# A loss so small that no gradient overflows in float16 at the scale that the scaler starts with.
SMALL = 2.0**-6


def batches(count=6, size=16):
    """Images whose brightness tells the class, the same in every process."""
    random = np.random.default_rng(3)
    found = []
    for _ in range(count):
        y = random.integers(0, 4, size)
        x = random.normal(size=(size, 16, 16, 1)) + y[:, None, None, None]
        found.append((x.astype(np.float32), y))
    return kit.data.resident_batches(found)


def prepare(*, rate=RATE, fused=False, spec=SPEC, **settings):
    model = kit.models.build(spec, init_weights(spec, seed=1))
    model = technique.prepare_model(model, memory_format=settings.get("memory_format", ""))
    optimizer = own.sgd(model, rate, fused=fused)
    step = technique.make_train_step(model, optimizer, kit.training.cross_entropy, **settings)
    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


def run(prepared, stream):
    losses = [kit.runtime.to_float(prepared.step(*batch)) for batch in stream]
    weights = kit.models.export_weights(prepared.model)
    return {
        "losses": losses,
        "weights": {name: weights[name].tolist() for name in parameter_shapes(SPEC)},
    }


# Scenarios for both frameworks ----------------------------------------------------------------


def rungs():
    """Losses and weights of each rung alone, of the baseline, and of another learning rate."""
    model = kit.models.build(SPEC, init_weights(SPEC, seed=1))
    optimizer = own.sgd(model, RATE)
    step = kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)
    found = {"baseline": run(SimpleNamespace(model=model, step=step), batches())}
    for name, settings in RUNGS.items():
        with workers.without_inductor():
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
    stream = batches()
    with workers.without_inductor():
        prepared = prepare(fused=FRAMEWORK == "pt", rate=0.1, spec=SHALLOW, **ALL)
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


def random_sets():
    """How far random sets of techniques are from plain code, and that another rate is seen."""
    drawn = []

    # The same sets in each run, all of them new: none is shrunk, as the set itself says enough.
    @hypothesis_settings(
        max_examples=SETS,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        memory_format=st.sampled_from(["", "channels_last"]),
        recomputed=st.sampled_from(["", "body"] if KERAS_3 else [""]),
        dtype=st.sampled_from(["float32", "bfloat16", "float16"] if KERAS_3 else ["float32"]),
        micro_batches=st.integers(1, MOST_PARTS),
        max_norm=st.sampled_from([math.inf, 0.2 * SMALL]),
        compiled=st.booleans(),
        fused=st.booleans() if FRAMEWORK == "pt" else st.just(False),
    )
    def compare(**chosen):
        if chosen not in [one["set"] for one in drawn]:
            drawn.append({"set": chosen, "apart": apart_from_plain(**chosen)})

    compare()
    for one in drawn:
        one["set"] = {name: str(value) for name, value in one["set"].items()}
    planted = apart_from_plain(recomputed="body" if KERAS_3 else "", micro_batches=3, rate=1.01)
    return {"sets": drawn, "planted": planted}


def apart_from_plain(*, fused=False, rate=1.0, memory_format="", recomputed="", **settings):
    """The larger relative difference, of losses and of updates, of three steps."""
    wanted = by_plain_code(settings.get("dtype", "float32"), settings.get("max_norm", math.inf))
    model = own.plain_model("float32")
    used = technique.prepare_model(model, memory_format=memory_format, recomputed=recomputed)
    optimizer = own.sgd(used, 4.0 * rate, fused=fused)
    with workers.without_inductor():
        settings["memory_format"] = memory_format
        step = technique.make_train_step(used, optimizer, own.small_loss, **settings)
        found = own.trained(model, step)
    norm = np.linalg.norm
    return [float(norm(f - w) / norm(w)) for f, w in zip(found, wanted, strict=True)]


@functools.cache
def by_plain_code(dtype, max_norm):
    """Losses of three steps, and updates."""
    model = own.plain_model(dtype)
    return own.trained(model, own.plain_step(model, 4.0, dtype=dtype, max_norm=max_norm))


def ragged():
    """Seven samples in four parts, and three, which are too few."""
    found = {}
    for parts in (1, 4):
        model = own.plain_model("float32")
        step = technique.make_train_step(
            model, own.sgd(model, 4.0), own.small_loss, micro_batches=parts
        )
        found[str(parts)] = [array.tolist() for array in own.trained(model, step)]
    x, y = own.plain_batch(3)
    found["few"] = raised(step, x, y)
    return found


def refusals():
    prepared = prepare()
    arguments = prepared.model, prepared.optimizer, kit.training.cross_entropy
    make, change = technique.make_train_step, technique.prepare_model
    found = {
        "dtype": raised(make, *arguments, dtype="half"),
        "parts": raised(make, *arguments, keep_fp32="head", micro_batches=0),
        "norm": raised(make, *arguments, keep_fp32="head", max_norm=0.0),
        "format": raised(change, prepared.model, memory_format="NHWC"),
        "blocks": raised(change, prepared.model, recomputed="blok"),
    }
    stream = batches(2)
    found["unchanged"] = run(prepared, stream) == run(prepare(), stream)
    return found


# Scenarios of one framework -------------------------------------------------------------------


class PyTorch:
    def __init__(self):
        import torch

        self.torch = torch

    def kept_dtypes(self, prepared):
        kept = list(prepared.model.parameters())
        kept += [v for state in prepared.optimizer.state.values() for v in state.values()]
        return sorted({str(v.dtype).removeprefix("torch.") for v in kept})

    def is_compiled(self, step, batch):
        return kit.runtime.trace_count(step) is not None

    def traced_dtypes(self, step, batch):
        return None  # the profiler tells what ran

    def sgd(self, model, rate, *, fused=False):
        if fused:
            return impl.train_step.optimizer_implementations.fused_sgd(model, learning_rate=rate)
        return self.torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)

    def small_loss(self, output, y):
        return SMALL * self.torch.nn.functional.cross_entropy(output, y)

    def plain_model(self, dtype):
        """No layer of it mixes samples, so that parts add up to the batch."""
        nn = self.torch.nn
        self.torch.manual_seed(0)
        body = nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Tanh())
        layers = {"stem": nn.Conv2d(3, 4, 3), "body": body, "flat": nn.Flatten()}
        model = nn.Sequential()
        for name, layer in (layers | {"head": nn.Linear(16, 3)}).items():
            model.add_module(name, layer)
        return model

    def plain_batch(self, samples=7):
        random = np.random.default_rng(1)
        x = self.torch.from_numpy(random.normal(size=(samples, 3, 6, 6)).astype(np.float32))
        return x, self.torch.arange(samples) % 3

    def plain_step(self, model, rate, *, dtype, max_norm):
        """As a user of PyTorch writes it."""
        torch, optimizer = self.torch, self.sgd(model, rate)
        scaler = torch.amp.GradScaler("cpu", enabled=dtype == "float16")

        def step(x, y):
            optimizer.zero_grad()
            with torch.autocast("cpu", getattr(torch, dtype), enabled=dtype != "float32"):
                output = model(x)
            loss = self.small_loss(output.float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if max_norm < math.inf:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            return loss

        return step

    def trained(self, model, step):
        """Losses of three steps, and what they added to the weights."""
        before = [parameter.detach().clone() for parameter in model.parameters()]
        losses = [step(*self.plain_batch()).item() for _ in range(3)]
        moved = [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]
        return np.array(losses), np.concatenate([part.numpy().ravel() for part in moved])

    def formats(self):
        """Strides of kernels, of activations, and of the optimizer's state under channels_last."""
        model = self.plain_model("float32")
        seen = []
        model.stem.register_forward_hook(lambda m, x, y: seen.extend([x[0], y]))
        model = technique.prepare_model(model, **CHANNELS_LAST)
        optimizer = self.sgd(model, 0.1, fused=True)
        step = technique.make_train_step(
            model, optimizer, kit.training.cross_entropy, micro_batches=2, **CHANNELS_LAST
        )
        step(*self.plain_batch())
        kernel = model.stem.weight
        tensors = [kernel, optimizer.state[kernel]["momentum_buffer"], *seen]
        last = self.torch.channels_last
        return [v.is_contiguous(memory_format=last) and not v.is_contiguous() for v in tensors]

    def partly(self):
        """The norm of what an optimizer holds, the head, after two clipped steps in float16."""
        model = self.plain_model("float16")
        optimizer = self.sgd(model.head, 0.0)
        step = technique.make_train_step(
            model, optimizer, kit.training.cross_entropy, dtype="float16", max_norm=1e-3
        )
        for _ in range(2):
            step(*self.plain_batch())
        return self.torch.nn.utils.get_total_norm([p.grad for p in model.head.parameters()]).item()

    def what_is_compiled(self):
        """A fused update is left alone, a loop is compiled."""
        with workers.without_inductor():
            found = {}
            for fused in (False, True):
                optimizer = prepare(fused=fused, compiled=True).optimizer
                update = getattr(optimizer.step, "__func__", optimizer.step)
                found[str(fused)] = hasattr(update, "_torchdynamo_orig_callable")
        return found

    def own_refusals(self):
        nn = self.torch.nn
        deep = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Conv3d(1, 1, 1))
        return {"deep": raised(technique.prepare_model, deep, **CHANNELS_LAST)}


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

    def sgd(self, model, rate, *, fused=False):
        optimizer = self.tf.keras.optimizers.SGD(rate, momentum=0.9)
        optimizer.build(model.trainable_variables)
        return optimizer

    def small_loss(self, output, y):
        losses = self.tf.nn.sparse_softmax_cross_entropy_with_logits(y, output)
        return SMALL * self.tf.reduce_mean(losses)

    def plain_model(self, dtype):
        """No layer of it mixes samples, so that parts add up to the batch."""
        keras, layers = self.tf.keras, self.tf.keras.layers
        keras.utils.set_random_seed(0)
        policy = dtype if dtype == "float32" else f"mixed_{dtype}"
        inputs = keras.Input((6, 6, 3))
        x = layers.Conv2D(4, 3, name="stem", dtype=policy)(inputs)
        x = layers.ReLU(name="body.first", dtype=policy)(x)
        x = layers.Conv2D(4, 3, activation="tanh", name="body.second", dtype=policy)(x)
        x = layers.Flatten(dtype=policy)(x)
        return keras.Model(inputs, layers.Dense(3, name="head", dtype=policy)(x))

    def plain_batch(self, samples=7):
        random = np.random.default_rng(1)
        x = self.tf.constant(random.normal(size=(samples, 6, 6, 3)), self.tf.float32)
        return x, self.tf.constant(np.arange(samples) % 3)

    def plain_step(self, model, rate, *, dtype, max_norm):
        """As a user of TensorFlow writes it."""
        tf, optimizer, variables = self.tf, self.sgd(model, rate), model.trainable_variables
        scale = 2.0**16 if dtype == "float16" else 1.0

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = self.small_loss(tf.cast(model(x, training=True), tf.float32), y)
                scaled = loss * scale
            gradients = [gradient / scale for gradient in tape.gradient(scaled, variables)]
            if max_norm < math.inf:
                gradients, _ = tf.clip_by_global_norm(gradients, max_norm)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        return step

    def trained(self, model, step):
        """Losses of three steps, and what they added to the weights."""
        before = model.get_weights()
        losses = [float(step(*self.plain_batch())) for _ in range(3)]
        moved = [after - b for after, b in zip(model.get_weights(), before, strict=True)]
        return np.array(losses), np.concatenate([part.ravel() for part in moved])

    def double(self):
        """Losses of a model in float64, as a whole and in four parts."""
        tf, found = self.tf, []
        x, y = self.plain_batch()
        for parts in (1, 4):
            tf.keras.utils.set_random_seed(0)
            layers = [tf.keras.layers.Flatten(dtype="float64")]
            layers += [tf.keras.layers.Dense(3, dtype="float64")]
            model = tf.keras.Sequential(layers)
            model(x)
            step = technique.make_train_step(
                model, self.sgd(model, 4.0), self.small_loss, micro_batches=parts
            )
            found.append([float(step(tf.cast(x, tf.float64), y)) for _ in range(3)])
        return found

    def proof(self):
        """What the benchmark says of bfloat16 layers, traced alone and compiled by XLA."""
        task = replace(TASKS["digits-cnn"], model=SHALLOW)
        found = {}
        for name, settings in (
            ("traced", CHANNELS_LAST | {"dtype": "bfloat16"}),
            ("compiled", bench_stacking.BF16),
        ):
            work = Work(task, name, settings, 8, init_weights(task.model, 0))
            prepared = bench_stacking.prepare(impl, work)
            x, y = np.zeros((8, *task.model.input_shape), np.float32), np.arange(8) % 4
            batch = kit.data.to_device(x, y)
            try:
                found[name] = bench_stacking.took_effect(impl, work, prepared, batch)[1]
            except NotImplementedError as error:
                found[name] = f"NotImplementedError: {error}"
        return found

    def own_refusals(self):
        keras = self.tf.keras
        sgd, loss_fn = keras.optimizers.SGD(0.1), kit.training.cross_entropy
        make = technique.make_train_step
        unbuilt = keras.Sequential([keras.layers.Dense(2)])
        small = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        found = {
            "unbuilt": raised(make, unbuilt, sgd, loss_fn),
            "bfloat16": raised(make, small, sgd, loss_fn, dtype="bfloat16"),
            "recomputed": raised(technique.prepare_model, small, recomputed="dense*"),
        }
        if KERAS_3:
            half = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, dtype="bfloat16")])
            found["half"] = raised(make, half, sgd, loss_fn, dtype="bfloat16")
            factor = keras.optimizers.SGD(0.1, loss_scale_factor=128.0)
            found["factor"] = raised(make, small, factor, loss_fn)
        return found


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    if sys.argv[1] == "tf_keras":
        RUNGS.pop("bfloat16")
        scenarios = [rungs, random_sets, ragged, own.own_refusals]
    else:
        scenarios = [rungs, dtypes, everything, random_sets, ragged, refusals, own.own_refusals]
        mine = ("formats", "partly", "what_is_compiled", "proof", "double")
        scenarios += [getattr(own, name) for name in mine if hasattr(own, name)]
    workers.report(scenarios)


own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
