"""One framework's share of the structured-pruning tests, in a process of its own.

`python structured_pruning_worker.py pt|tf|tf_keras` runs every scenario and prints one line of
JSON: scenario -> what was found, or {"error": traceback}. `test_structured_pruning.py` judges.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import OrderedDict
from dataclasses import replace

import numpy as np

from bench.compression import bench_structured_pruning
from bench.harness.plan import Work
from shared.specs import TASKS, CNNSpec, ResNetSpec
from shared.weights import init_weights
from tests import workers

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
impl = workers.implementation(FRAMEWORK, "compression.structured_pruning")
kit = impl.kit
technique = impl.compression.structured_pruning
CNN = CNNSpec((8, 8, 2), ((8, 1), (10, 2)), num_classes=10)
RESNET = ResNetSpec((8, 8, 1), 1, (4, 8), num_classes=10)
SHARES = (0.0, 0.3, 0.5, 0.95)


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


def raised(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


# Scenarios for both frameworks ----------------------------------------------------------------


def smaller():
    """Weights, predictions and ten losses of models with fewer channels, and of the first one."""
    ((x, _),) = batches()
    model = kit.models.build(CNN, start(CNN))
    found = {"weights": plain(start(CNN)), "predictions": predictions(model, x)}
    for share in SHARES:
        less = technique.remove_channels(model, share=share)
        found[str(share)] = {
            "weights": plain(kit.models.export_weights(less)),
            "predictions": predictions(less, x),
            "losses": losses(less),
        }
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
    model = kit.models.build(CNN, start(CNN))
    before = kit.models.export_weights(model)
    found = {
        str(share): raised(technique.remove_channels, model, share=share)
        for share in (1.0, -0.1, float("nan"))
    }
    found["residual"] = raised(technique.remove_channels, kit.models.build(RESNET), share=0.5)
    found |= {
        name: raised(technique.remove_channels, other, share=0.5)
        for name, other in own.unsupported().items()
    }
    after = kit.models.export_weights(model)
    found["unchanged"] = all(np.array_equal(before[n], after[n]) for n in before)
    return found


def foreign():
    """A model that is not ours: biases, pooling, flattened images, two layers after the chain.

    Its predictions beside those of the full model whose weak channels give nothing.
    """
    return own.foreign()


# One framework's models -----------------------------------------------------------------------

random = np.random.default_rng(3)
IMAGES = random.normal(size=(5, 8, 8, 3)).astype(np.float32)
SHAPES = {
    "first.kernel": (3, 3, 3, 6),
    "first.bias": (6,),
    "second.kernel": (3, 3, 6, 4),
    "second.bias": (4,),
    "hidden.kernel": (2 * 2 * 4, 7),  # flattened pixel by pixel
    "hidden.bias": (7,),
    "last.kernel": (7, 2),
    "last.bias": (2,),
}
WEIGHTS = {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def silenced():
    """The weights, with nothing read of the weaker half of each convolution's channels."""
    weights = {name: value.copy() for name, value in WEIGHTS.items()}
    for layer, reader in (("first", "second"), ("second", "hidden")):
        norms = np.abs(WEIGHTS[f"{layer}.kernel"]).sum((0, 1, 2))
        weak = np.argsort(norms)[: len(norms) // 2]
        kernel = weights[f"{reader}.kernel"]
        if reader == "second":
            kernel[:, :, weak] = 0.0
        else:
            kernel.reshape(4, 4, 7)[:, weak] = 0.0
    return weights


def stages():
    """What the benchmark predicts where its second stage takes no step."""
    task, stream, epochs = replace(TASKS["digits-cnn"], model=CNN), batches(4), []

    def fit(step, more=None):
        epochs.append(more)
        for batch in stream if more is None else []:
            step(*batch)

    work = Work(task, "channels_50", {"share": 0.5}, batch_size=16, weights=start(CNN))
    predict = bench_structured_pruning.prepare(impl, work).train(fit)
    trained, x = kit.models.build(CNN, start(CNN)), stream[0][0]
    losses(trained, 4)
    return {
        "epochs": epochs,
        "found": np.array(predict(x)).tolist(),
        "wanted": predictions(technique.remove_channels(trained, share=0.5), x),
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
                self.hidden = nn.Linear(16, 7)
                self.last = nn.Linear(7, 2)

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
                value = value.reshape(4, 4, 7).transpose(2, 1, 0).reshape(7, 16)
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
        less = technique.remove_channels(model, share=0.5)
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
        }
        found = {}
        for name, (features, forward) in cases.items():
            less = technique.remove_channels(Branch(features, forward), share=0.5)
            found[name] = [features, less.head.in_features]
            less(torch.ones(2, 3, 3, 3))
        return found

    def unsupported(self):
        torch, nn = self.torch, self.torch.nn
        conv = nn.Conv2d(3, 3, 1)

        class Branch(nn.Module):
            def __init__(self, forward):
                super().__init__()
                self.conv, self.head = nn.Conv2d(3, 3, 1), nn.Linear(3, 2)
                self.run = forward

            def forward(self, x):
                return self.run(self, x)

        def sized(model, x):
            if x.sum() > 0:
                x = model.conv(x)
            return model.head(x.mean((2, 3)))

        # Samples and channels become one axis, and the linear layer reads the pixels of a row.
        wide = Branch(lambda m, x: m.head(m.conv(x).flatten(end_dim=1)))
        wide.head = nn.Linear(1, 2)
        misnamed = {"conv": conv, "relu": nn.Softmax(1), "rest": nn.Flatten()}
        misnamed = OrderedDict(misnamed | {"head": nn.Linear(192, 2)})
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)]
        return {
            "no convolution": nn.Linear(2, 2),
            "grouped": nn.Sequential(nn.Conv2d(4, 4, 1, groups=2), *head),
            "unknown": nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), *head),
            "twice": nn.Sequential(conv, nn.ReLU(), conv, *head),
            "no head": nn.Sequential(conv, nn.ReLU()),
            "mixes": Branch(lambda m, x: m.head(torch.softmax(m.conv(x), 1).mean((2, 3)))),
            "over channels": Branch(lambda m, x: m.head(m.conv(x).mean(1))),
            "control flow": Branch(sized),
            "flattens samples": wide,
            "keeps axes": Branch(lambda m, x: m.head(m.conv(x).mean((2, 3), True).flatten(1))),
            "misnamed": nn.Sequential(misnamed),
            "masked": self.masked(predictions=0),
            "masked, after a prediction": self.masked(predictions=1),
        }


class TensorFlow:
    def __init__(self):
        import tensorflow as tf

        self.tf = tf

    def load(self, weights):
        tf = self.tf
        keras, layers = tf.keras, tf.keras.layers

        def softsign(x):  # which Keras knows as something else
            return tf.tanh(x)

        images = keras.Input((8, 8, 3))
        offset = keras.Input((1,))
        relu = {"padding": "same", "activation": layers.ReLU()}
        x = layers.Conv2D(6, 3, **relu, name="first")(images)
        x = layers.Conv2D(4, 3, padding="same", name="second")(layers.MaxPooling2D()(x))
        x = layers.Flatten()(layers.MaxPooling2D()(layers.Activation(tf.nn.relu)(x)))
        x = layers.Dense(7, name="hidden")(x)
        x = layers.Add()([x, layers.Activation(softsign)(x)])
        moved = layers.Lambda(lambda v: tf.identity(v), name="by_hand")(offset)
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
        less = technique.remove_channels(model, share=0.5)
        inputs = [IMAGES, np.ones((5, 1), np.float32)]
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

        conv = layers.Conv2D(4, 1, name="shared")
        subclassed = Own()
        subclassed(IMAGES)
        features = layers.Conv2D(4, 1, name="features")
        images = keras.Input((8, 8, 4))
        mid = features(images)
        return {
            "no convolution": keras.Sequential([keras.Input((2,)), layers.Dense(2)]),
            "grouped": network(lambda x: head(layers.Conv2D(4, 1, groups=2, name="grouped")(x))),
            "unknown": network(
                lambda x: head(layers.LayerNormalization(name="ln")(layers.Conv2D(4, 1)(x)))
            ),
            "twice": network(lambda x: head(conv(conv(x)))),
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
        }


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    found, scenarios = {}, [smaller, zeroed, stages, foreign, refusals]
    for scenario in scenarios + ([own.spellings] if FRAMEWORK == "pt" else []):
        try:
            found[scenario.__name__] = scenario()
        except Exception:
            found[scenario.__name__] = {"error": traceback.format_exc()}
    print(json.dumps(found))


own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
