"""One framework's share of the mixed-precision tests, in a process of its own.

`python mixed_precision_worker.py pt|tf|tf_keras` runs every scenario and prints one line of JSON:
scenario -> what was found, or {"error": traceback}. `test_mixed_precision.py` judges it.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np

from shared.specs import TASKS, parameter_shapes
from shared.weights import init_weights
from tests import workers
from tests.workers import raised

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
impl = workers.implementation(
    FRAMEWORK, "train_step.mixed_precision", "deployment.reduced_precision"
)
kit = impl.kit
technique = impl.train_step.mixed_precision
make_predict = impl.deployment.reduced_precision.make_predict
CNN, GPT = TASKS["digits-cnn"], TASKS["text-gpt"]
# Two convolutions, of which one may be kept and the other not.
CNN = replace(CNN, model=replace(CNN.model, convolutions=CNN.model.convolutions[:2]))
BATCH = {CNN.name: 32, GPT.name: 8}
# Rounding puts the odd ReLU on the other side of zero, which moves later losses by far more than
# it. Steps this small keep that out of the weights.
SMALL_STEPS = replace(CNN.recipe, learning_rate=2.0**-13)


def batches(task, count=10):
    """Random inputs with labels that can be learned, the same in every process."""
    random = np.random.default_rng(7)
    found = []
    for _ in range(count):
        if task is GPT:
            x = random.integers(0, 98, (BATCH[task.name], 64))
            found.append((x, (5 * x + 3) % 98))
        else:
            y = random.integers(0, 10, BATCH[task.name])
            x = random.normal(size=(len(y), 32, 32, 1)) + y[:, None, None, None] / 5
            found.append((x.astype(np.float32), y))
    return kit.data.resident_batches(found)


def prepare(task, *, recipe=None, loss=None, seed=1, by=technique, **settings):
    """A model and its step: the baseline without settings, else the technique."""
    model = kit.models.build(task.model, init_weights(task.model, seed=seed))
    optimizer = kit.training.make_optimizer(model, recipe or task.recipe)
    maker = by if settings else kit.training
    step = maker.make_train_step(model, optimizer, loss or kit.training.cross_entropy, **settings)
    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


def run(prepared, stream):
    return [kit.runtime.to_float(prepared.step(*batch)) for batch in stream]


def parameters(prepared, task=CNN):
    weights = kit.models.export_weights(prepared.model)
    return {name: weights[name] for name in parameter_shapes(task.model)}


def name_of(dtype):
    return getattr(dtype, "name", str(dtype)).removeprefix("torch.")


def same(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one)


@functools.cache
def baseline():
    """Ten losses of the plain step; its first ones are those of fewer batches."""
    return run(prepare(CNN), batches(CNN))


@functools.cache
def prepared_as(name, dtype):
    """A model and its step in a dtype: one for all scenarios."""
    task = {CNN.name: CNN, GPT.name: GPT}[name]
    return prepare(task, dtype=dtype, keep_fp32="head" if dtype == "float32" else "")


# Scenarios for both frameworks ----------------------------------------------------------------


def losses():
    """Ten losses of each dtype, and (in PyTorch) of a learning rate that is a tenth off."""
    found = {"baseline": baseline()}
    for task in (CNN, GPT):
        stream = batches(task)
        found[task.name] = {
            dtype: run(prepared_as(task.name, dtype), stream) for dtype in ("float32", "bfloat16")
        }
        if FRAMEWORK == "pt":
            off = replace(task.recipe, learning_rate=task.recipe.learning_rate * 1.1)
            found[task.name]["planted"] = run(prepare(task, recipe=off, dtype="bfloat16"), stream)
    small = prepare(CNN, recipe=SMALL_STEPS, dtype="float32")
    found["parity"] = {CNN.name: run(small, batches(CNN)), GPT.name: found[GPT.name]["float32"]}
    return found


def operators():
    """The dtypes that convolutions and matrix products ran in."""
    cases = {
        "float32": (CNN, prepared_as(CNN.name, "float32")),
        "bfloat16": (CNN, prepared_as(CNN.name, "bfloat16")),
        "two": (CNN, prepare(CNN, dtype="bfloat16", keep_fp32="conv0, head")),
        "gpt": (GPT, prepared_as(GPT.name, "bfloat16")),
    }
    return {
        name: kit.runtime.operator_dtypes(prepared.step, *batches(task, 1)[0])
        for name, (task, prepared) in cases.items()
    }


def master_weights():
    """Dtypes of parameters, gradients (where they are kept) and optimizer state after a step."""
    found = {}
    for dtype in ("bfloat16", "float16"):
        # AdamW keeps two tensors a parameter.
        prepared = prepare(CNN, recipe=GPT.recipe, dtype=dtype)
        prepared.step(*batches(CNN, 1)[0])
        if FRAMEWORK == "pt":
            kept = list(prepared.model.parameters())
            kept += [parameter.grad for parameter in kept]
            kept += [v for s in prepared.optimizer.state.values() for v in s.values()]
        else:
            kept = list(prepared.model.variables) + list(prepared.optimizer.variables)
        names = {name_of(tensor.dtype) for tensor in kept}
        found[dtype] = sorted(name for name in names if "int" not in name)  # step counters
    return found


def gradients():
    """Relative L2 error of the gradient of each tensor against float32.

    One step of plain descent with learning rate 1 moves each weight by its gradient.
    """
    recipe = replace(CNN.recipe, learning_rate=1.0, momentum=0.0)
    moved = {}
    for dtype in ("float32", "bfloat16", "float16"):
        prepared = prepare(CNN, recipe=recipe, dtype=dtype)
        before = parameters(prepared)
        prepared.step(*batches(CNN, 1)[0])
        after = parameters(prepared)
        moved[dtype] = {name: before[name] - after[name] for name in before}
    exact = moved.pop("float32")
    norm = np.linalg.norm
    return {
        dtype: {name: float(norm(g[name] - exact[name]) / norm(exact[name])) for name in exact}
        for dtype, g in moved.items()
    }


def reuse():
    """Steps made twice on one model; and the baseline on a model that the technique used."""
    stream = batches(CNN, 3)
    used = prepare(CNN, dtype="bfloat16", keep_fp32="head")
    once = run(used, stream)
    again = prepare(CNN, dtype="bfloat16", keep_fp32="head")
    # PyTorch wraps a kept layer for good, and once; Keras gives it a policy for each trace.
    for keep in ("head", "head") if FRAMEWORK == "pt" else ("conv0", "head"):
        step = technique.make_train_step(
            again.model, again.optimizer, kit.training.cross_entropy, keep_fp32=keep
        )
        make_predict(again.model, keep_fp32=keep)
    again.step = step
    found = {"once": once, "twice": run(again, stream), "baseline": baseline()[:3]}
    make_predict(used.model, keep_fp32="conv0")(stream[0][0])
    kit.models.import_weights(used.model, init_weights(CNN.model, seed=1))
    optimizer = kit.training.make_optimizer(used.model, CNN.recipe)
    used.step = kit.training.make_train_step(used.model, optimizer, kit.training.cross_entropy)
    found["afterwards"] = run(used, stream)
    return found


def refusals():
    """What bad input raises, and that the model is as before."""
    prepared = prepare(CNN, dtype="float32")
    arguments = prepared.model, prepared.optimizer, kit.training.cross_entropy
    found = {}
    for name, settings in (
        ("dtype", {"dtype": "bf16"}),
        ("layer", {"keep_fp32": "head, haed"}),
        ("layer_float32", {"dtype": "float32", "keep_fp32": "haed"}),
    ):
        found[name] = raised(technique.make_train_step, *arguments, **settings)
    stream = batches(CNN, 2)
    found["unchanged"] = run(prepared, stream) == baseline()[:2]
    return found


def statistics():
    """BatchNorm's running statistics behind a convolution in bfloat16, against float64.

    The data has a mean of 40 times its deviation, which bfloat16 cannot resolve.
    """
    random = np.random.default_rng(3)
    data = 4 + 0.1 * random.normal(size=(64, 8, 8, 1))
    # What bfloat16 holds exactly, so that the identity convolution adds no rounding.
    data = (data.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    mean, variance = own.statistics(data)
    truth = data.astype(np.float64)
    return {"mean": abs(mean / truth.mean() - 1), "variance": abs(variance / truth.var() - 1)}


# Scenarios of one framework, on models that are not ours --------------------------------------


class PyTorch:
    def __init__(self):
        import torch

        self.torch = torch

    def statistics(self, data):
        torch = self.torch
        nn = torch.nn
        model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1, momentum=1.0))
        nn.init.ones_(model[0].weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step = technique.make_train_step(model, optimizer, lambda output, y: output.mean())
        step(torch.from_numpy(data.transpose(0, 3, 1, 2).copy()), None)
        size = data.size
        return model[1].running_mean.item(), model[1].running_var.item() * (size - 1) / size

    def foreign(self):
        """A custom forward with two inputs, a dict as output, and layers that are kept."""
        torch, seen = self.torch, {}
        nn = torch.nn

        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
                self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
                self.scale = nn.Parameter(torch.full((8, 3), 0.1))

            def forward(self, a, b):
                a, b = self.left(a), self.right(b)
                seen.update(left=str(a.dtype), right=str(b.dtype))
                for block in self.blocks:
                    a = torch.relu(block(a + b))
                    seen["block"] = str(a.dtype)
                return {"logits": a @ self.scale, "pair": (a, b)}

        def loss_fn(output, y):
            tensors = (output["logits"], *output["pair"])
            seen["output"] = sorted({str(t.dtype) for t in tensors})
            return nn.functional.cross_entropy(output["logits"], y)

        torch.manual_seed(0)
        x, y = (torch.randn(16, 8), torch.randn(16, 8)), torch.arange(16) % 3
        found = {}
        for keep in ("", "left", "blocks"):
            model = Two()
            own_forward = model.left.forward
            model.left.forward = own_forward  # somebody else's wrapper, which must survive
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = technique.make_train_step(model, optimizer, loss_fn, keep_fp32=keep)
            values = [step(x, y).item() for _ in range(20)]
            found[keep] = dict(seen, first=values[0], last=values[-1])
            predict = make_predict(model, keep_fp32=keep)
            found[keep]["predict"] = str(predict(x)["logits"].dtype)
            layers = {"left": model.left, "right": model.right, "blocks": model.blocks[0]}
            wrapped = [name for name, layer in layers.items() if "forward" in vars(layer)]
            found[keep]["wrapped"] = wrapped
            inner = getattr(model.left.forward, "args", [model.left.forward])[0]
            found[keep]["own_forward"] = inner is own_forward
        return found

    def checkpointed(self):
        """A kept layer that runs forward again in the backward pass does so in float32 too."""
        torch = self.torch
        from torch.utils.checkpoint import checkpoint

        class Net(torch.nn.Module):
            def __init__(self, again):
                super().__init__()
                self.first, self.kept = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
                self.again = again

            def forward(self, x):
                x = torch.relu(self.first(x))
                if self.again:
                    return checkpoint(self.kept, x, use_reentrant=False)
                return self.kept(x)

        found = []
        for again in (False, True):
            torch.manual_seed(0)
            model = Net(again)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = technique.make_train_step(
                model, optimizer, lambda output, y: output.square().mean(), keep_fp32="kept"
            )
            x = torch.randn(16, 8)
            found.append([step(x, None).item() for _ in range(5)])
        return found

    def refused(self):
        """A model in bfloat16 has no master weights; a device without autocast is refused."""
        torch = self.torch

        class Pair(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.pair = torch.nn.Linear(4, 4), torch.nn.Bilinear(4, 4, 2)

            def forward(self, x):
                return self.pair(self.first(x), x)

        model, x = Pair(), torch.ones(3, 4)
        with torch.autocast("cpu", torch.bfloat16):
            upstream = raised(model, x)
        kept = make_predict(model, keep_fp32="pair")(x)
        recurrent, words = torch.nn.Sequential(torch.nn.LSTM(2, 2)), torch.ones(3, 2)
        with mock.patch("torch.backends.cpu.get_cpu_capability", return_value="AVX2"):
            lacking = raised(make_predict, recurrent)
            kept_lstm = make_predict(recurrent, keep_fp32="0")(words)[0]
        half = torch.nn.Linear(2, 2).bfloat16()
        meta = torch.nn.Linear(2, 2, device="meta")
        return {
            "bilinear": raised(make_predict, model),
            "bilinear upstream": upstream,
            "bilinear kept": [str(kept.dtype), list(kept.shape)],
            "lstm": lacking,
            "lstm kept": str(kept_lstm.dtype),
            "half": raised(make_predict, half),
            "device": raised(make_predict, meta, dtype="float16"),
            "float32": raised(make_predict, meta, dtype="float32"),
        }


class TensorFlow:
    def __init__(self):
        import tensorflow as tf

        self.tf = tf

    def optimizer(self, rate=0.1):
        return self.tf.keras.optimizers.SGD(rate)

    def statistics(self, data):
        keras = self.tf.keras
        norm = keras.layers.BatchNormalization(momentum=0.0)
        model = keras.Sequential(
            [
                keras.Input(data.shape[1:]),
                keras.layers.Conv2D(1, 1, use_bias=False, kernel_initializer="ones"),
                norm,
            ]
        )
        step = technique.make_train_step(
            model, self.optimizer(0.0), lambda output, y: self.tf.reduce_mean(output)
        )
        step(self.tf.constant(data), 0)
        return float(norm.moving_mean[0]), float(norm.moving_variance[0])

    def functional(self):
        """A two-input functional model with attention and a nested model, as a list of inputs.

        Under the technique, and built under Keras's own global policy: the same losses.
        """
        tf = self.tf
        keras, layers = tf.keras, tf.keras.layers

        def build():
            keras.utils.set_random_seed(0)
            a, b = keras.Input((6, 8), name="a"), keras.Input((6, 8), name="b")
            inside = keras.Input((6, 8))
            block = keras.Model(
                inside,
                layers.Dense(8, name="inner")(layers.LayerNormalization()(inside)),
                name="block",
            )
            x = layers.MultiHeadAttention(2, 4, name="attention")(block(a), block(b))
            x = layers.Softmax(name="shares")(layers.Add()([x, a]))
            x = layers.GRU(8, name="memory")(x)
            return keras.Model([a, b], layers.Dense(3, name="head")(x))

        random = np.random.default_rng(0)
        x = [tf.constant(random.normal(size=(16, 6, 8)).astype(np.float32)) for _ in range(2)]
        y = tf.constant(np.arange(16) % 3)
        found = {}
        for name in ("float32", "technique", "policy"):
            if name == "policy":
                keras.config.set_dtype_policy("mixed_bfloat16")
            try:
                model = build()
            finally:
                keras.config.set_dtype_policy("float32")
            dtype = "bfloat16" if name == "technique" else "float32"
            loss_fn = kit.training.cross_entropy
            step = technique.make_train_step(model, self.optimizer(), loss_fn, dtype=dtype)
            found[name] = [float(step(x, y)) for _ in range(5)]
            if name != "float32":
                logits = make_predict(model, dtype=dtype)(x)
                found[f"{name}_predict"] = tf.cast(logits, tf.float32).numpy().tolist()
            found[f"{name}_traces"] = step.experimental_get_tracing_count()
            found[f"{name}_policies"] = sorted(
                {layer.dtype_policy.name for layer in model._flatten_layers()}
            )
        return found

    def foreign(self):
        """A subclassed model whose custom layer has sublayers, with two inputs as a tuple."""
        tf, seen = self.tf, {}
        keras, layers = tf.keras, tf.keras.layers

        class Block(layers.Layer):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.left = layers.Dense(8, name="left")
                self.right = layers.Dense(8, name="right")

            def build(self, shape):
                self.scale = self.add_weight(shape=(8, 3), initializer="ones", name="scale")

            def call(self, a, b):
                a, b = self.left(a), self.right(b)
                scale = tf.convert_to_tensor(self.scale)
                seen.update(left=a.dtype.name, right=b.dtype.name, scale=scale.dtype.name)
                return tf.matmul(tf.cast(a, b.dtype) + b, tf.cast(scale, b.dtype))

        class Two(keras.Model):
            def __init__(self):
                super().__init__()
                self.block = Block(name="block")

            def call(self, a, b, training=False):
                logits = self.block(a, b)
                return {"logits": logits, "pair": (a, b), "scores": None}

        def loss_fn(output, y):
            tensors = (output["logits"], *output["pair"])
            seen["output"] = sorted({t.dtype.name for t in tensors})
            return kit.training.cross_entropy(output["logits"], y)

        random = np.random.default_rng(0)
        x = tuple(tf.constant(random.normal(size=(16, 8)).astype(np.float32)) for _ in range(2))
        y = tf.constant(np.arange(16) % 3)
        found = {"unbuilt": raised(technique.make_train_step, Two(), self.optimizer(), loss_fn)}
        for keep in ("", "left", "block"):
            model = Two()
            model(*x)
            step = technique.make_train_step(model, self.optimizer(), loss_fn, keep_fp32=keep)
            values = [float(step(x, y)) for _ in range(20)]
            found[keep] = dict(seen, first=values[0], last=values[-1])
            predict = make_predict(model, keep_fp32=keep)
            found[keep]["predict"] = predict(x)["logits"].dtype.name
            found[keep]["policies"] = sorted(
                {layer.dtype_policy.name for layer in model._flatten_layers()}
            )
        return found

    def mixed_already(self):
        """A layer's own policies are put back, float64 and integer ones are not touched."""
        keras, layers = self.tf.keras, self.tf.keras.layers
        names = ("float32", "mixed_float16", "float64")
        model = keras.Sequential(
            [keras.Input((4,)), *(layers.Dense(4, dtype=name, name=name) for name in names)]
        )
        logits = make_predict(model, keep_fp32="mixed_float16")(self.tf.zeros((2, 4)))
        return {
            "output": logits.dtype.name,
            "policies": [layer.dtype_policy.name for layer in model.layers],
        }

    def decorated(self):
        """How far bfloat16 moves models whose `call` is a `tf.function`, and what it leaves."""
        tf, found = self.tf, {}
        keras, layers = tf.keras, tf.keras.layers
        x = tf.constant(np.arange(20).reshape(4, 5))  # integers look the same in any policy

        class Reader(keras.Model):
            def __init__(self):
                super().__init__()
                self.words, self.head = layers.Embedding(20, 8), layers.Dense(3)

            def call(self, x, training=False):
                return self.head(self.words(x))

        class Decorated(Reader):
            call = tf.function(Reader.call)

        class Helped(Reader):
            read = tf.function(Reader.call)

            def call(self, x, training=False):
                return self.read(x)

        for kind in (Reader, Decorated, Helped):
            keras.utils.set_random_seed(0)
            model = kind()
            plain = model(x)
            moved = make_predict(model)(x) - plain
            own = {name for name in vars(model) if name in ("call", "read")}
            found[kind.__name__] = float(tf.norm(moved)), sorted(own)
            again = kind()
            again(x[:1])
            make_predict(again)(x)  # traced in bfloat16 before it is in float32
            found[kind.__name__] += (again(x).dtype.name,)
        return found

    def raw_data(self):
        """How far predictions from years in bfloat16 are off float32's, by the layer that reads."""
        keras, layers = self.tf.keras, self.tf.keras.layers
        bins = [float(year) for year in range(1991, 2030)]
        years = self.tf.constant([[float(year)] for year in range(1990, 2030)])
        found = {}
        for reader in (
            layers.Normalization(mean=2010.0, variance=130.0),
            layers.Rescaling(1 / 20, offset=-2010 / 20),
            layers.Discretization(bin_boundaries=bins, output_mode="one_hot"),
            layers.CategoryEncoding(2100, output_mode="one_hot"),
        ):
            keras.utils.set_random_seed(0)
            inputs = keras.Input((1,))
            dense = layers.Dense(4)
            model = keras.Model(inputs, dense(reader(inputs)))
            plain = model(years)
            predictions = {"functional": make_predict(model)(years)}
            model = keras.Sequential([keras.Input((1,)), reader, dense])
            predictions["Sequential"] = make_predict(model)(years)
            for kind, output in predictions.items():
                apart = self.tf.norm(output - plain) / self.tf.norm(plain)
                found[f"{type(reader).__name__}, {kind}"] = float(apart)
        outputs = []
        for dtype in ("float32", "mixed_bfloat16"):
            keras.utils.set_random_seed(0)
            norm = layers.Normalization(mean=2010.0, variance=130.0, dtype=dtype)
            model = keras.Sequential([keras.Input((1,)), norm, layers.Dense(4, dtype=dtype)])
            outputs.append(self.tf.cast(model(years), "float32"))
        apart = self.tf.norm(outputs[1] - outputs[0]) / self.tf.norm(outputs[0])
        return found | {"Keras's own": float(apart)}

    def masking(self):
        """In bfloat16: a time of -1.001 beside the -1 of padding, and the same of 3."""
        keras, layers = self.tf.keras, self.tf.keras.layers
        recurrent = layers.SimpleRNN(1, "linear", kernel_initializer="ones", use_bias=False)
        model = keras.Sequential([keras.Input((2, 1)), layers.Masking(-1.0), recurrent])
        predict = make_predict(model)
        recurrent.set_weights([np.ones((1, 1))] * 2)
        x = [[[[3.0], [last]]] for last in (-1.001, -1.0)]
        return [float(predict(self.tf.constant(each))[0, 0]) for each in x]

    def spectral(self):
        """How far a step of no rate in bfloat16 leaves a kernel from that of float32."""
        keras, layers = self.tf.keras, self.tf.keras.layers
        found = []
        for dtype in ("float32", "bfloat16"):
            keras.utils.set_random_seed(0)
            normed = layers.SpectralNormalization(layers.Dense(8))
            model = keras.Sequential([keras.Input((6,)), normed, layers.Dense(3)])
            given = model, self.optimizer(0.0), kit.training.cross_entropy
            step = technique.make_train_step(*given, dtype=dtype)
            step(self.tf.ones((4, 6)), self.tf.zeros(4, "int64"))
            found.append(normed.layer.kernel.numpy())
        return float(np.abs(found[1] - found[0]).max() / np.abs(found[0]).max())

    def refused(self):
        """A model in bfloat16."""
        keras = self.tf.keras
        half = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, dtype="bfloat16")])
        return {"half": raised(make_predict, half)}


def tf_keras_refusal():
    """tf_keras: refused with the model as before, and the neutral setting works."""
    import tensorflow as tf

    prepared = prepare(CNN, dtype="float32")
    arguments = prepared.model, prepared.optimizer, kit.training.cross_entropy
    layers = list(prepared.model._flatten_layers())
    before = [layer.dtype_policy.name for layer in layers], parameters(prepared)
    found = {
        "flavour": tf.keras.Model.__module__.split(".")[0],
        "step": raised(technique.make_train_step, *arguments, keep_fp32="head"),
        "float16": raised(technique.make_train_step, *arguments, dtype="float16"),
        "predict": raised(make_predict, prepared.model),
        "layer": raised(make_predict, prepared.model, keep_fp32="haed"),
    }
    after = [layer.dtype_policy.name for layer in layers], parameters(prepared)
    found["unchanged"] = before[0] == after[0] and same(before[1], after[1])
    stream = batches(CNN, 3)
    found["neutral"], found["baseline"] = run(prepared, stream), run(prepare(CNN), stream)
    return found


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    if sys.argv[1] == "tf_keras":
        scenarios = [tf_keras_refusal]
    else:
        scenarios = [
            losses, operators, master_weights, gradients, reuse, refusals, statistics,
        ]  # fmt: skip
        names = [name for name in vars(type(own)) if not name.startswith("_")]
        helpers = ("statistics", "optimizer")
        scenarios += [getattr(own, name) for name in names if name not in helpers]
    workers.report(scenarios)


own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
