"""One framework's share of the structured-pruning tests, in a process of its own.

`python structured_pruning_worker.py pt|tf|tf_keras` runs every scenario and prints one line of
JSON: scenario -> what was found, or {"error": traceback}. `test_structured_pruning.py` judges.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import warnings
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.compression import bench_structured_pruning
from bench.harness.plan import Work
from bench.harness.stages import Stages
from shared.specs import TASKS, CNNSpec, ResNetSpec
from shared.weights import init_weights
from tests import workers
from tests.workers import raised_on_one_line as raised

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
impl = workers.implementation(FRAMEWORK, "compression.structured_pruning")
kit = impl.kit
technique = impl.compression.structured_pruning
CNN = CNNSpec((8, 8, 2), ((8, 1), (10, 2)), num_classes=10)
RESNET = ResNetSpec((8, 8, 1), 1, (4, 8), num_classes=10)
SHARES = (0.0, 0.3, 0.5, 0.95)
TRAINED = (0.0, 0.5)


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


def batches(count=1):
    """The same in every process."""
    random, found = np.random.default_rng(11), []
    for _ in range(count):
        y = random.integers(0, 10, 16)
        x = random.normal(size=(16, *CNN.input_shape)) + y[:, None, None, None] / 3
        found.append((x.astype(np.float32), y))
    return kit.data.resident_batches(found)


def predictions(model, x):
    return np.array(kit.training.make_predict(model)(x)).tolist()


def plain(arrays):
    return {name: np.asarray(value).tolist() for name, value in arrays.items()}


def losses(model, count=10):
    optimizer = kit.training.make_optimizer(model, TASKS["digits-cnn"].recipe)
    step = kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)
    return [kit.runtime.to_float(step(*batch)) for batch in batches(count)]


# Scenarios for both frameworks ----------------------------------------------------------------


def smaller():
    """Weights, predictions and ten losses of models with fewer channels, and of the first one."""
    ((x, _),) = batches()
    model = kit.models.build(CNN, start(CNN))
    found = {"weights": plain(start(CNN)), "predictions": predictions(model, x)}
    for share in SHARES:
        less = technique.remove_channels(model, x, share=share)
        found[str(share)] = {"weights": plain(kit.models.export_weights(less))}
        if share in TRAINED:
            found[str(share)] |= {"predictions": predictions(less, x), "losses": losses(less)}
    after = kit.models.export_weights(model)
    found["source kept"] = all(np.array_equal(v, after[n]) for n, v in start(CNN).items())
    found["dense losses"] = losses(model)
    return found


def zeroed():
    """Predictions of the full network whose weak channels give nothing: what is left must equal.

    The channels to leave out come from the test's own NumPy, not from the technique.
    """
    ((x, _),) = batches()
    weights = start(CNN)
    for layer in ("conv0", "conv1"):
        norms = np.abs(weights[f"{layer}.kernel"]).sum((0, 1, 2))
        weak = np.argsort(norms)[: len(norms) // 2]
        for kind in ("gamma", "beta"):
            weights[f"{layer}.bn.{kind}"][weak] = 0.0
    return predictions(kit.models.build(CNN, weights), x)


def refusals():
    """What bad input and models that can't be followed raise."""
    model, ((x, _),) = kit.models.build(CNN, start(CNN)), batches()
    before = kit.models.export_weights(model)
    found = {
        str(share): raised(technique.remove_channels, model, x, share=share)
        for share in (1.0, -0.1, float("nan"))
    }
    found |= {
        name: raised(technique.remove_channels, other, example, share=0.5)
        for name, (other, example) in own.unsupported().items()
    }
    after = kit.models.export_weights(model)
    found["unchanged"] = all(np.array_equal(before[n], after[n]) for n in before)
    return found


def foreign():
    """A model that is not ours: biases, pooling, flattened images, two layers after the chain.

    Its predictions beside those of the full model whose weak channels give nothing.
    """
    return own.foreign()


FLAT = ("outputs", "tied", "branch", "no copy")  # models that take rows, not images


def branches():
    """Two inputs, a sum, a product, grouped convolutions, a concatenation, two outputs.

    The channels to leave out come from the test's own NumPy, not from the technique.
    """
    weights = branch_weights()
    model, x = own.branches(weights)
    less = technique.remove_channels(model, x, share=0.5)
    silent, _ = own.branches(branch_weights(silent=True))
    return {
        "smaller": own.results(less, x),
        "silenced": own.results(silent, x),
        "full": own.results(model, x),
        "widths": own.widths(less),
    }


def branch_weights(silent=False):
    """Weights of the model with branches; silent: nothing reads the weaker half."""
    random, weights = np.random.default_rng(9), {}
    shapes = {"stem": (3, 3, 3, 8), "left": (3, 3, 8, 8), "deep": (3, 3, 8, 1)}
    shapes |= {"grouped": (1, 1, 4, 12), "point": (1, 1, 8, 6)}
    shapes |= {"hidden": (18, 10), "head": (10, 4), "more": (10, 2)}
    for layer, shape in shapes.items():
        weights[f"{layer}.kernel"] = random.normal(size=shape)
        if layer != "deep":
            weights[f"{layer}.bias"] = random.normal(size=shape[-1])
    for kind in ("gamma", "beta", "mean", "variance"):
        weights[f"norm.{kind}"] = random.uniform(0.5, 1.5, 18)
    norms = {
        layer: np.abs(weights[f"{layer}.kernel"]).reshape(-1, shape[-1]).sum(0)
        for layer, shape in shapes.items()
    }
    deep = np.abs(weights["deep.kernel"]).sum((0, 1, 3))
    # The grouped convolution reads two runs of four, and makes two of six.
    shared = weaker(norms["stem"] + norms["left"] + deep, 2)
    grouped, point, hidden = (
        weaker(norms[layer], runs) for layer, runs in (("grouped", 2), ("point", 1), ("hidden", 1))
    )
    if silent:
        weights["left.kernel"][:, :, shared] = 0.0
        weights["point.kernel"][:, :, shared] = 0.0
        for channel in np.flatnonzero(shared):
            run, place = divmod(channel, 4)
            weights["grouped.kernel"][:, :, place, 6 * run : 6 * run + 6] = 0.0
        weights["hidden.kernel"][np.concatenate([grouped, point])] = 0.0
        for layer in ("head", "more"):
            weights[f"{layer}.kernel"][hidden] = 0.0
    return {name: value.astype(np.float32) for name, value in weights.items()}


def weaker(norms, runs):
    """Mark the smaller half of a run, in the same places of each."""
    sums = norms.reshape(runs, -1).sum(0)
    return np.tile(sums < np.median(sums), runs)


def others():
    return own.others()


def residual():
    """Losses and parameters of a residual network with half of its channels."""
    random, y = np.random.default_rng(4), np.arange(6) % 10
    batch = random.normal(size=(6, *RESNET.input_shape)).astype(np.float32), y
    ((x, y),) = kit.data.resident_batches([batch])
    model = kit.models.build(RESNET, start(RESNET))
    less = technique.remove_channels(model, x, share=0.5)
    count = kit.models.parameter_count
    return {"predictions": predictions(less, x), "counts": [count(model), count(less)]}


# One framework's models -----------------------------------------------------------------------

random = np.random.default_rng(3)
IMAGES = random.normal(size=(5, 8, 8, 3)).astype(np.float32)
SHAPES = {
    "first.kernel": (3, 3, 3, 6),
    "first.bias": (6,),
    "second.kernel": (3, 3, 6, 4),
    "second.bias": (4,),
    "hidden.kernel": (2 * 2 * 4, 6),  # flattened pixel by pixel
    "hidden.bias": (6,),
    "last.kernel": (6, 2),
    "last.bias": (2,),
}
WEIGHTS = {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def silenced():
    """The weights, with nothing read of the weaker half of each convolution's channels."""
    weights = {name: value.copy() for name, value in WEIGHTS.items()}
    for layer, reader in (("first", "second"), ("second", "hidden"), ("hidden", "last")):
        kernel = WEIGHTS[f"{layer}.kernel"]
        norms = np.abs(kernel).reshape(-1, kernel.shape[-1]).sum(0)
        weak = np.argsort(norms)[: len(norms) // 2]
        kernel = weights[f"{reader}.kernel"]
        if reader == "hidden":
            kernel.reshape(4, 4, 6)[:, weak] = 0.0
        else:
            np.moveaxis(kernel, -2, 0)[weak] = 0.0
    return weights


def stages():
    """What the benchmark predicts where its second stage takes no step."""
    task, stream, epochs = replace(TASKS["digits-cnn"], model=CNN), batches(4), []

    def fit(step, count):
        if not epochs:
            for batch in stream:
                step(*batch)
        epochs.append(count)

    work = Work(task, "channels_50", {"share": 0.5}, batch_size=16, weights=start(CNN))
    with tempfile.TemporaryDirectory() as folder:
        stages = Stages(impl, task, start(CNN), 0, Path(folder), fit)
        predict = bench_structured_pruning.prepare(impl, work).train(stages)
    trained, x = kit.models.build(CNN, start(CNN)), stream[0][0]
    losses(trained, 4)
    return {
        "epochs": epochs,
        "found": np.array(predict(x)).tolist(),
        "wanted": predictions(technique.remove_channels(trained, x, share=0.5), x),
        "whole": predictions(trained, x),
    }


class PyTorch:
    def __init__(self):
        import torch

        self.torch = torch
        nn = torch.nn

        class Foreign(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.Conv2d(3, 6, 3, padding=1)
                self.second = nn.Conv2d(6, 4, 3, padding=1)
                self.pool = nn.MaxPool2d(2)
                self.hidden = nn.Linear(16, 6)
                self.last = nn.Linear(6, 2)

            def forward(self, images, offset):
                x = self.pool(torch.relu(self.first(images)))
                x = self.pool(self.second(x).relu())
                x = self.hidden(torch.flatten(x, 1))
                return {"y": self.last(x + x.tanh()) + offset}

        self.kind = Foreign

    def load(self, model, weights):
        torch, state = self.torch, {}
        for name, value in weights.items():
            layer, kind = name.split(".")
            if kind == "kernel" and value.ndim == 4:
                value = value.transpose(3, 2, 0, 1)
            elif layer == "hidden" and kind == "kernel":  # channel by channel here
                value = value.reshape(4, 4, 6).transpose(2, 1, 0).reshape(6, 16)
            elif kind == "kernel":
                value = value.T
            state[f"{layer}.{'weight' if kind == 'kernel' else 'bias'}"] = torch.from_numpy(
                value.copy()
            )
        model.load_state_dict(state)
        return model

    def foreign(self):
        torch = self.torch
        images = torch.from_numpy(IMAGES.transpose(0, 3, 1, 2).copy())
        model = self.load(self.kind(), WEIGHTS)
        less = technique.remove_channels(model, (images, torch.ones(())), share=0.5)
        silent = self.load(self.kind(), silenced())
        with torch.no_grad():
            outputs = [m(images, 1.0)["y"].tolist() for m in (less, silent, model)]
        less(images, 1.0)["y"].sum().backward()
        return {
            "smaller": outputs[0],
            "silenced": outputs[1],
            "full": outputs[2],
            "shapes": {name: list(p.shape) for name, p in less.named_parameters()},
            "channels": [less.second.in_channels, less.second.out_channels],
            "features": less.hidden.in_features,
            "gradients": all(p.grad is not None for p in less.parameters()),
        }

    def masked(self, predictions):
        from torch.nn.utils import prune

        torch, nn = self.torch, self.torch.nn
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(16, 2))
        prune.l1_unstructured(model[0], "weight", 0.5)
        for _ in range(predictions):
            with torch.no_grad():
                model(torch.ones(1, 3, 2, 2))  # leaves a masked weight that is a tensor like others
        return model

    def spellings(self):
        """The features that the linear layer still reads of 4 channels of 3 by 3, by spelling."""
        torch, nn = self.torch, self.torch.nn

        class Branch(nn.Module):
            def __init__(self, features, forward):
                super().__init__()
                self.conv, self.head = nn.Conv2d(3, 4, 1), nn.Linear(features, 2)
                self.run = forward

            def forward(self, x):
                return self.head(self.run(self.conv(x)))

        cases = {
            "flatten(1)": (36, lambda x: x.flatten(1)),
            "flatten(1, -1)": (36, lambda x: x.flatten(1, -1)),
            "flatten(start_dim=1)": (36, lambda x: torch.flatten(x, start_dim=1)),
            "mean((2, 3))": (4, lambda x: x.mean((2, 3))),
            "mean(axis=[-2, -1])": (4, lambda x: torch.mean(x, axis=[-2, -1])),
            "amax(dim=(2, 3))": (4, lambda x: x.amax(dim=(2, 3))),
            "mean((2, 3), True)": (4, lambda x: x.mean((2, 3), True).flatten(1)),
        }
        found = {}
        for name, (features, forward) in cases.items():
            model, x = Branch(features, forward), torch.ones(2, 3, 3, 3)
            less = technique.remove_channels(model, x, share=0.5)
            found[name] = [features, less.head.in_features]
        return found

    def unsupported(self):
        import torchvision

        torch, nn = self.torch, self.torch.nn
        conv = nn.Conv2d(4, 4, 1)

        class Branch(nn.Module):
            def __init__(self, forward):
                super().__init__()
                self.conv, self.head = nn.Conv2d(4, 4, 1), nn.Linear(4, 2)
                self.run = forward

            def forward(self, x):
                return self.run(self, x)

        def split(model, x):
            left, right = model.conv(x).split((2, 2), 1)
            return model.head(torch.cat([right, left], 1).mean((2, 3)))

        class Tasks(nn.Module):
            """Of two heads the example takes one."""

            def __init__(self):
                super().__init__()
                self.trunk, self.a, self.b = nn.Linear(4, 32), nn.Linear(32, 4), nn.Linear(32, 3)

            def forward(self, x, task="a"):
                return (self.a if task == "a" else self.b)(torch.relu(self.trunk(x)))

        # Samples and channels become one axis, and the linear layer reads the pixels of a row.
        wide = Branch(lambda m, x: m.head(m.conv(x).flatten(end_dim=1)))
        wide.head = nn.Linear(8, 2)
        misnamed = {"conv": conv, "relu": nn.Softmax(1), "rest": nn.Flatten()}
        misnamed = OrderedDict(misnamed | {"head": nn.Linear(256, 2)})
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)]
        tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
        tied[2].weight = tied[0].weight
        images, rows = torch.randn(2, 4, 8, 8), torch.randn(2, 4)
        shuffling = torchvision.models.shufflenet_v2_x0_5(weights=None)
        models = {
            "outputs": nn.Linear(4, 2),
            "shuffles": nn.Sequential(nn.Conv2d(4, 3, 1), shuffling),
            "no layer": nn.Sequential(nn.ReLU()),
            "unknown": nn.Sequential(nn.Conv2d(4, 4, 1), nn.LocalResponseNorm(2), *head),
            "transposed groups": nn.Sequential(nn.ConvTranspose2d(4, 4, 2, groups=2), *head),
            "no head": nn.Sequential(conv, nn.ReLU()),
            "mixes": Branch(lambda m, x: m.head(torch.softmax(m.conv(x), 1).mean((2, 3)))),
            "over channels": Branch(lambda m, x: m.head(m.conv(x).cumsum(1).mean((2, 3)))),
            "flattens samples": wide,
            "misnamed": nn.Sequential(misnamed),
            "splits": Branch(split),
            "masked": self.masked(predictions=0),
            "masked, after a prediction": self.masked(predictions=1),
            "tied": tied,
            "branch": Tasks(),
            "no copy": nn.utils.weight_norm(nn.Linear(4, 2)),
        }
        return {name: (m, rows if name in FLAT else images) for name, m in models.items()}

    def branches(self, weights):
        torch, nn = self.torch, self.torch.nn

        class Branches(nn.Module):
            def __init__(self):
                super().__init__()
                self.stem = nn.Conv2d(3, 8, 3, padding=1)
                self.left = nn.Conv2d(8, 8, 3, padding=1)
                self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
                self.grouped = nn.Conv2d(8, 12, 1, groups=2)
                self.point = nn.Conv2d(8, 6, 1)
                self.norm = nn.BatchNorm2d(18, eps=1e-3)
                self.hidden, self.head = nn.Linear(18, 10), nn.Linear(10, 4)
                self.more = nn.Linear(10, 2)

            def forward(self, images, scale):
                x = self.stem(images)
                x = x + self.left(torch.relu(x)) * scale
                deep = self.deep(x)
                x = self.norm(torch.cat([self.grouped(deep), self.point(x)], 1))
                x = torch.relu(self.hidden(x.mean((2, 3))))
                return {"y": self.head(x), "more": (self.more(x),)}

        model = Branches().eval()
        kinds = {"kernel": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}
        kinds |= {"mean": "running_mean", "variance": "running_var"}
        state = {}
        for name, value in weights.items():
            layer, kind = name.split(".")
            if value.ndim == 4:
                value = value.transpose((2, 3, 0, 1) if layer == "deep" else (3, 2, 0, 1))
            value = value.T if value.ndim == 2 else value
            state[f"{layer}.{kinds[kind]}"] = torch.from_numpy(value.copy())
        model.load_state_dict(state, strict=False)
        images = torch.from_numpy(IMAGES.transpose(0, 3, 1, 2).copy())
        return model, {"images": images, "scale": torch.tensor(1.0)}

    def results(self, model, x):
        with self.torch.no_grad():
            found = model(**x)
        return [found["y"].tolist(), found["more"][0].tolist()]

    def widths(self, model):
        return {n: list(m.weight.shape) for n, m in model.named_children() if n != "norm"}

    def others(self):
        """Models of other construction: what they were, what is left, whether it trains."""
        torch, nn = self.torch, self.torch.nn

        class Attends(nn.Module):
            def __init__(self):
                super().__init__()
                self.tokens, self.place = nn.Linear(5, 8), nn.Parameter(torch.randn(1, 6, 8))
                self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
                self.norm, self.back = nn.LayerNorm(8), nn.Linear(8, 8)
                self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
                self.head = nn.Linear(8, 3)

            def forward(self, x):
                x = self.tokens(x) + self.place
                y = self.norm(x)
                near = torch.softmax(self.query(y) @ self.key(y).transpose(1, 2), -1)
                x = x + self.back(near @ self.value(y))
                x = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
                return self.head(x.mean(1))

        class Recurs(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.lstm = nn.Linear(5, 8), nn.LSTM(8, 6, batch_first=True)
                self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

            def forward(self, x):
                return self.head(torch.relu(self.hidden(self.lstm(self.up(x))[0][:, -1])))

        class Encodes(nn.Module):
            def __init__(self):
                super().__init__()
                self.up = nn.Linear(5, 8)
                self.encoder = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
                self.head = nn.Linear(8, 3)

            def forward(self, x):
                return self.head(self.encoder(self.up(x))[:, 0])

        class Turns(nn.Module):
            """Rotary positions: halves of channels are swapped, and added to themselves."""

            def __init__(self):
                super().__init__()
                self.turned, self.up, self.head = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 3)

            def forward(self, x):
                x = self.turned(x)
                x = 0.6 * x + 0.8 * torch.cat([-x[..., 4:], x[..., :4]], -1)
                return self.head(torch.relu(self.up(x)))

        class Helped(nn.Module):
            """A head that runs in training alone reads what the body makes."""

            def __init__(self):
                super().__init__()
                self.up, self.middle = nn.Linear(5, 8), nn.Linear(8, 6)
                self.aside, self.head = nn.Linear(8, 3), nn.Linear(6, 3)

            def forward(self, x):
                x = torch.relu(self.up(x))
                y = self.head(torch.relu(self.middle(x)))
                return y + self.aside(x) if self.training else y

        class Rounds(nn.Module):
            """As large sums do in half precision: half a percent off with half of its channels."""

            def __init__(self):
                super().__init__()
                self.up, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

            def forward(self, x):
                x = torch.relu(self.up(x))
                return self.head(x) * (1 + x.shape[-1] / 800)

        frozen = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).requires_grad_(False)
        norms = nn.Sequential(
            *(nn.Conv1d(6, 8, 3), nn.GroupNorm(2, 8), nn.GELU(), nn.ConvTranspose1d(8, 4, 2)),
            *(nn.PReLU(4), nn.Flatten(), nn.Linear(16, 3)),
        )
        squares = nn.Sequential(nn.Linear(5, 8), nn.RMSNorm(8), nn.Linear(8, 6), nn.Linear(6, 3))
        alone = nn.Sequential(nn.Conv1d(6, 8, 3), nn.GroupNorm(8, 8), nn.Conv1d(8, 4, 3))
        x, found = torch.randn(4, 6, 5), {}
        models = {"attention": Attends(), "lstm": Recurs(), "encoder": Encodes(), "rotary": Turns()}
        models |= {"auxiliary": Helped(), "squares": squares, "alone": alone}
        models["half"] = Rounds().to(torch.bfloat16)
        for name, model in (models | {"frozen": frozen, "norms": norms}).items():
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                given = x.to(next(model.parameters()).dtype)
                less = technique.remove_channels(model, given, share=0.5)
            found[name] = {
                "shapes": {n: list(p.shape) for n, p in less.named_parameters()},
                "warning": [str(one.message) for one in said],
                "grad": [p.requires_grad for p in less.parameters()],
                "finite": bool(less(given).isfinite().all()),
                "modes": [m.training for m in less.modules()],
            }
        found["single"] = raised(technique.remove_channels, Rounds(), x, share=0.5)
        return found


class TensorFlow:
    def __init__(self):
        import tensorflow as tf

        self.tf = tf

    def load(self, weights):
        tf = self.tf
        keras, layers = tf.keras, tf.keras.layers

        def softsign(x):  # which Keras knows as something else
            return tf.identity(x)

        images = keras.Input((8, 8, 3))
        offset = keras.Input((1,))
        relu = {"padding": "same", "activation": layers.ReLU()}
        x = layers.Conv2D(6, 3, **relu, name="first")(images)
        x = layers.Conv2D(4, 3, padding="same", name="second")(layers.MaxPooling2D()(x))
        x = layers.Flatten()(layers.MaxPooling2D()(layers.Activation(tf.nn.relu)(x)))
        x = layers.Dense(6, name="hidden")(x)
        x = layers.Add()([x, layers.Activation("tanh")(x)])
        moved = layers.Lambda(lambda v: tf.identity(v), name="by_hand")(
            layers.Activation(softsign)(offset)
        )
        y = layers.Add()([layers.Dense(2, name="last")(x), moved])
        model = keras.Model([images, offset], {"y": y})
        for name in ("first", "second", "hidden", "last"):
            values = [weights[f"{name}.{kind}"] for kind in ("kernel", "bias")]
            model.get_layer(name).set_weights(values)
        return model

    def summary(self, model):
        lines = []
        model.summary(print_fn=lambda line, **_: lines.append(line))
        return "\n".join(lines)

    def foreign(self):
        model = self.load(WEIGHTS)
        before = self.summary(model)
        inputs = [IMAGES, np.ones((5, 1), np.float32)]
        less = technique.remove_channels(model, inputs, share=0.5)
        outputs = [
            np.array(m(inputs, training=False)["y"]).tolist()
            for m in (less, self.load(silenced()), model)
        ]
        return {
            "smaller": outputs[0],
            "silenced": outputs[1],
            "full": outputs[2],
            "summary kept": before == self.summary(model),
            "shared": [layer.name for layer in less.layers if layer in model.layers],
            "shapes": {
                f"{layer.name}.{kind}": list(value.shape)
                for layer in less.layers
                for kind, value in zip(("kernel", "bias"), layer.get_weights(), strict=False)
            },
        }

    def unsupported(self):
        keras, layers = self.tf.keras, self.tf.keras.layers

        class Own(keras.Model):
            def __init__(self):
                super().__init__()
                self.conv = layers.Conv2D(4, 1)

            def call(self, x):
                return self.conv(x)

        def network(make):
            x = images = keras.Input((8, 8, 4))
            return keras.Model(images, make(x))

        by_layer = layers.Activation("softmax")

        def relu(x):
            return self.tf.nn.softmax(x)

        def head(x):
            return layers.Dense(2)(layers.GlobalAveragePooling2D()(x))

        subclassed = Own()
        subclassed(IMAGES)
        pruning = importlib.import_module("tf_impl.compression.pruning")
        masked, update = pruning.apply_pruning(
            network(lambda x: head(layers.Conv2D(4, 1)(x))),
            final_sparsity=0.5,
            begin_step=0,
            end_step=1,
            frequency=1,
        )
        update(1)
        features = layers.Conv2D(4, 1, name="features")
        images = keras.Input((8, 8, 4))
        mid = features(images)
        models = {
            "outputs": keras.Sequential([keras.Input((4,)), layers.Dense(2)]),
            "no layer": keras.Sequential([keras.Input((8, 8, 4)), layers.ReLU()]),
            "unknown": network(
                lambda x: head(layers.UnitNormalization(name="unit")(layers.Conv2D(4, 1)(x)))
            ),
            "mixes": network(
                lambda x: head(layers.Activation("softmax", name="over")(layers.Conv2D(4, 1)(x)))
            ),
            "mixes inside": network(
                lambda x: head(layers.Conv2D(4, 1, activation="softmax", name="inside")(x))
            ),
            "by a layer": network(
                lambda x: head(layers.Conv2D(4, 1, activation=by_layer, name="layer")(x))
            ),
            "misnamed": network(
                lambda x: head(layers.Conv2D(4, 1, activation=relu, name="misnamed")(x))
            ),
            "no head": network(lambda x: layers.Conv2D(4, 1, name="end")(x)),
            "two outputs": keras.Model(images, [mid, head(mid)]),
            "subclassed": subclassed,
            "masked": masked,
        }
        images, rows = np.ones((2, 8, 8, 4), np.float32), np.ones((2, 4), np.float32)
        return {name: (m, rows if name in FLAT else images) for name, m in models.items()}

    def branches(self, weights):
        keras, layers = self.tf.keras, self.tf.keras.layers
        images, scale = keras.Input((8, 8, 3), name="images"), keras.Input((1, 1, 1), name="scale")
        same = {"padding": "same"}
        x = layers.Conv2D(8, 3, **same, name="stem")(images)
        left = layers.Conv2D(8, 3, **same, name="left")(layers.ReLU()(x))
        x = x + layers.Multiply()([left, scale])
        deep = layers.DepthwiseConv2D(3, **same, use_bias=False, name="deep")(x)
        parts = (
            layers.Conv2D(12, 1, groups=2, name="grouped")(deep),
            layers.Conv2D(6, 1, name="point")(x),
        )
        x = layers.BatchNormalization(epsilon=1e-3, name="norm")(layers.Concatenate()(parts))
        x = layers.Dense(10, "relu", name="hidden")(layers.GlobalAveragePooling2D()(x))
        outputs = {"y": layers.Dense(4, name="head")(x), "more": (layers.Dense(2, name="more")(x),)}
        model = keras.Model({"images": images, "scale": scale}, outputs)
        for layer in model.layers:
            kinds = ("kernel", "bias", "gamma", "beta", "mean", "variance")
            values = [weights.get(f"{layer.name}.{kind}") for kind in kinds]
            if layer.get_weights():
                layer.set_weights([value for value in values if value is not None])
        return model, {"images": IMAGES, "scale": np.ones((5, 1, 1, 1), np.float32)}

    def results(self, model, x):
        found = model(x, training=False)
        return [np.array(found["y"]).tolist(), np.array(found["more"][0]).tolist()]

    def widths(self, model):
        found = {}
        for layer in model.layers:
            if layer.get_weights() and layer.name != "norm":
                *window, reads, makes = layer.get_weights()[0].shape
                order = (reads, makes) if layer.name == "deep" else (makes, reads)
                found[layer.name] = [*order, *window]
        return found

    def others(self):
        """Models of other construction: what they were, what is left."""
        keras, layers = self.tf.keras, self.tf.keras.layers
        rows = np.random.default_rng(2).normal(2.0, 3.0, (4, 6, 5)).astype(np.float32)

        def attends():
            inputs = keras.Input((6, 5))
            x = layers.Dense(8, name="tokens")(inputs)
            y = layers.LayerNormalization(name="norm")(x)
            x = layers.Add()([x, layers.MultiHeadAttention(2, 3, name="attention")(y, y)])
            y = layers.Dense(12, "gelu", name="up")(layers.LayerNormalization(name="norm2")(x))
            x = layers.Add()([x, layers.Dense(8, name="down")(y)])
            return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))

        def recurs():
            inputs = keras.Input((6, 5))
            x = layers.LSTM(6)(layers.Dense(8, name="up")(inputs))
            return keras.Model(inputs, layers.Dense(3)(layers.Dense(8, "relu", name="hidden")(x)))

        def norms():
            inputs = keras.Input((6, 5))
            normalization = layers.Normalization(name="normalization")
            normalization.adapt(rows)
            x = layers.Conv1D(8, 3, name="conv")(normalization(inputs))
            x = layers.GroupNormalization(2, name="groups")(x)
            x = layers.Conv1DTranspose(4, 2, name="transposed")(layers.Activation("gelu")(x))
            return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))

        def shared():
            inputs = keras.Input((6, 5))
            twice = layers.Dense(8, "relu", name="twice")
            x = twice(twice(layers.Dense(8, name="first")(inputs)))
            return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))

        found, models = {}, {"attention": attends, "lstm": recurs, "norms": norms, "twice": shared}
        for name, make in models.items():
            model = make()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                less = technique.remove_channels(model, rows, share=0.5)
                none = technique.remove_channels(model, rows, share=0.0)
            found[name] = {
                "shapes": {
                    f"{layer.name}.{n}": list(w.shape)
                    for layer in less.layers
                    for n, w in enumerate(layer.get_weights())
                },
                "warning": [str(one.message) for one in said],
                "same": [np.array(m(rows)).tolist() for m in (model, none)],
                "finite": bool(np.isfinite(np.array(less(rows))).all()),
            }
        return found


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    scenarios = [smaller, zeroed, stages, foreign, refusals, branches, others, residual]
    scenarios += [own.spellings] if FRAMEWORK == "pt" else []
    workers.report(scenarios)


own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
