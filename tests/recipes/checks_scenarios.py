"""One framework's share of the tests of the checks; `worker.py` runs it."""

from __future__ import annotations

import math
import sys

import numpy as np

from bench.harness.plan import Work
from bench.recipes import bench_checks
from shared.specs import TASKS, CNNSpec, Recipe
from shared.weights import init_weights
from tests import workers

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
impl = workers.implementation(FRAMEWORK, "recipes.checks")
checks, kit = impl.recipes.checks, impl.kit
SPEC = CNNSpec((8, 8, 1), ((4, 1), (6, 2)), num_classes=4)
CLASSES, BATCH = 4, 8


def arrays(count=64):
    """A clean dataset, the same in every process: x from 0 to 1, classes in balance."""
    random = np.random.default_rng(1)
    x = random.uniform(0, 1, (count, 8, 8, 1)).astype(np.float32)
    return x, np.arange(count) % CLASSES


def batches(x, y):
    """Framework batches of (x, y)."""
    return [
        tuple(own.tensor(part[at : at + BATCH]) for part in (x, y))
        for at in range(0, len(y), BATCH)
    ]


def said(call):
    """The report's text, or what was raised."""
    try:
        return str(call())
    except (ValueError, NotImplementedError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"


def planted():
    """Reports on data with one fault each."""
    found = {}

    def look(name, plant, **settings):
        x, y = arrays()
        x, y = plant(x, y)
        given = {"num_classes": CLASSES, "low": 0.0, "high": 1.0} | settings
        found[name] = said(lambda: checks.check_data(batches(x, y), **given))

    def put(value, *places):
        def plant(x, y):
            for place in places:
                x[place] = value
            return x, y

        return plant

    def relabel(where, label):
        return lambda x, y: (x, np.where(np.isin(np.arange(len(y)), where), label, y))

    look("clean", lambda x, y: (x, y))
    look("nan", put(np.nan, (19, 2, 3, 0), (19, 2, 4, 0), (40, 0, 0, 0)))
    look("infinity", put(-np.inf, (63, 7, 7, 0)))
    look("range", put(255, (9, 1, 1, 0)))
    look("range of bytes", lambda x, y: ((x * 255).astype(np.uint8), y))
    look("label", relabel([5], 4))
    look("negative label", relabel([5], -1), num_classes=0)
    look("ignored label", relabel([5], -100))
    look("ignored label of its own", relabel([5], 255), ignore_label=255)
    look("absent class", lambda x, y: (x, y % 3))
    look("imbalance", lambda x, y: (x, np.where(np.arange(64) < 2, 3, y % 3)))
    look("imbalance allowed", lambda x, y: (x, np.where(y == 3, 2, y)), num_classes=3)
    look("one-hot", lambda x, y: (x, np.eye(CLASSES, dtype=np.float32)[y]))
    look("one-hot label", lambda x, y: (x, 0.5 * np.eye(CLASSES, dtype=np.float32)[y]))
    look("nan label", lambda x, y: (x, np.where(y == 1, np.nan, y).astype(np.float32)))
    look("dense labels", lambda x, y: (x, np.zeros((64, 5), int)))
    look("strict", put(np.nan, (19, 2, 3, 0)), strict=True)
    return found


def structures():
    """Data in other forms than a list of pairs of tensors."""
    x, y = arrays()
    bad = x.copy()
    bad[3, 0, 0, 0] = np.nan
    nested = [({"image": (own.tensor(x), own.tensor(bad)), "name": ["a"] * 64}, {"y": [0, 1] * 32})]
    found = {
        "nested": said(lambda: checks.check_data(nested)),
        "inputs alone": said(lambda: checks.check_data([own.tensor(bad)])),
        "arrays": said(lambda: checks.check_data([(bad, y)])),
        "half": said(lambda: checks.check_data([own.half(bad)])),
        "no batch": said(lambda: checks.check_data([])),
        "no labels": said(lambda: checks.check_data([{"x": x, "y": y}], num_classes=CLASSES)),
        "parts apart": said(lambda: checks.check_data([(x, y[:3])])),
    }
    for name, dataset in own.datasets(bad, y).items():
        found[name] = said(lambda dataset=dataset: checks.check_data(dataset, num_classes=CLASSES))
    return found


def numbers():
    """Labels in other integers and in lists of numbers, and a number beside the inputs."""
    x, y = np.zeros((400, 2), np.float32), np.arange(200).repeat(2)
    one = [({"a": x, "scale": 1.0, "unit": np.float32(2)}, y)]
    few = list(own.tensor(y[:8]))
    found = {
        "bytes": said(lambda: checks.check_data([(x, y.astype(np.uint8))], num_classes=200)),
        "shorts": said(lambda: checks.check_data([(x, y.astype(np.uint16))], num_classes=200)),
        "list": said(lambda: checks.check_data([(x, list(y))], num_classes=200)),
        "tensors": said(lambda: checks.check_data([(x[:8], few)], num_classes=4)),
        "beside": said(lambda: checks.check_data(one, num_classes=200)),
        "nan beside": said(lambda: checks.check_data([({"a": x, "scale": math.nan}, y)])),
        "bytes in range": said(
            lambda: checks.check_data([np.array([[1, 2, 250]], np.uint8)], low=-1, high=200)
        ),
        "more classes": said(lambda: checks.check_data([(x, y.astype(np.uint8))], num_classes=300)),
    }
    return found | {"splits": said(lambda: checks.check_splits(one, one))}


def splits():
    """Samples in both splits."""
    x, y = arrays()
    other = np.random.default_rng(2).uniform(0, 1, (24, 8, 8, 1)).astype(np.float32)
    leaking = other.copy()
    leaking[[3, 11]] = x[[60, 2]]
    near = other.copy()
    near[5] = np.nextafter(x[7], 2)
    first = batches(x, y)

    def look(second, **settings):
        return said(lambda: checks.check_splits(first, batches(second, y[:24]), **settings))

    named = [({"a": own.tensor(x), "b": own.tensor(x[::-1].copy())}, own.tensor(y))]
    half = [({"a": own.tensor(x), "b": own.tensor(x)}, own.tensor(y))]
    texts = ([(["one", "two"], [0, 1])], [(["three", "two"], [0, 1])])
    return {
        "clean": look(other),
        "two": look(leaking),
        "no sample": said(lambda: checks.check_splits(first, [*batches(x, y), (x[:0], y[:0])])),
        "strict": look(leaking, strict=True),
        "near": look(near),
        "itself": said(lambda: checks.check_splits(named, named)),
        "one of two inputs": said(lambda: checks.check_splits(named, half)),
        "texts": said(lambda: checks.check_splits(*texts)),
    }


def losses():
    """What is said of each pair of a model's output and a loss."""
    x, y = (own.tensor(part[:32]) for part in arrays())
    one = own.tensor((arrays()[1][:32] % 2)[:, None].astype(np.float32))
    found = {}
    for form, takes in own.pairs("softmax"):
        model = own.classifier(CLASSES, form)
        found[f"softmax {form} {takes}"] = said(
            lambda m=model, t=takes: checks.check_loss(m, own.loss("softmax", t), x, y)
        )
    for form, takes in own.pairs("sigmoid"):
        model = own.classifier(1, form, "sigmoid")
        found[f"sigmoid {form} {takes}"] = said(
            lambda m=model, t=takes: checks.check_loss(m, own.loss("sigmoid", t), x, one)
        )
    model, logits = own.classifier(CLASSES, "logits"), own.loss("softmax", "logits")
    found["other loss"] = said(lambda: checks.check_loss(model, own.squared, x, y))
    found["strict"] = said(
        lambda: checks.check_loss(
            own.classifier(CLASSES, "probabilities"), logits, x, y, strict=True
        )
    )
    found["left as it was"] = own.left_as_it_was(model, logits, x, y)
    return found | own.further_losses(x, y) | own.other_forms(x, y)


def margins():
    """What is left of gradients, by margin; beside NumPy's float64."""
    return {
        name: {str(k): v for k, v in checks.gradient_by_margin(loss, num_classes=n).items()}
        for name, (loss, n) in own.functions_of_logits().items()
    }


def nonfinite():
    """The first that is not finite."""
    found, cases = {}, own.broken()
    for name, case in cases.items():
        model, loss, x, y = case()
        found[name] = said(
            lambda m=model, e=loss, x=x, y=y: checks.find_nonfinite(m, e, x, y, batch=7)
        )
    model, loss, x, y = cases["clean"]()
    before = own.state(model)
    for _ in range(2):
        checks.find_nonfinite(model, loss, x, y)
    after = own.state(model)
    found["left as it was"] = all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    found["no trace"] = own.no_trace(model)
    return found


def any_state():
    """PyTorch's models hold more than tensors, and buffers that are not saved."""
    return own.of_any_state() if FRAMEWORK == "pt" else None


def step():
    """A training with a bad batch, and one that diverges: the batch, and the weights after it."""
    found = {}
    for name, rate, bad in (
        ("clean", 0.05, None),
        ("bad batch", 0.05, 5),
        ("diverges", 1e20, None),
    ):
        model = kit.models.build(SPEC, init_weights(SPEC, seed=1))
        recipe = Recipe("sgd", learning_rate=rate, epochs=1, accuracy_batch_size=8)
        optimizer = kit.training.make_optimizer(model, recipe)
        loss = kit.training.cross_entropy
        train = kit.training.make_train_step(model, optimizer, loss)
        plain = train if bad is None else lambda x, y, step=train: float(step(x, y))
        checked = checks.make_checked_step(plain, model, loss)
        x, y = arrays()
        if bad is not None:
            x[bad * BATCH + 1, 0, 0, 0] = np.nan
        steps = 0
        text = None
        states = []
        try:
            for batch in kit.data.resident_batches(
                [(x[at : at + BATCH], y[at : at + BATCH]) for at in range(0, 64, BATCH)]
            ):
                states.append(own.state(model))
                assert math.isfinite(checked(*batch))
                steps += 1
        except FloatingPointError as error:
            text = str(error)
        back = all(np.array_equal(a, b) for a, b in zip(states[-1], own.state(model), strict=True))
        found[name] = {"steps": steps, "said": text, "weights of before": back}
    return found


class _PT:
    def tensor(self, x):
        import torch

        x = torch.as_tensor(np.ascontiguousarray(x))
        return x.permute(0, 3, 1, 2).contiguous() if x.ndim == 4 else x

    def half(self, x):
        return self.tensor(x).bfloat16()

    def datasets(self, x, y):
        import torch
        from torch.utils.data import DataLoader, IterableDataset, TensorDataset

        class Stream(IterableDataset):
            def __iter__(self):
                parts = (torch.as_tensor(part).split(8) for part in (x, y))
                return zip(*parts, strict=True)

        samples = TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
        return {
            "dataset of samples": samples,
            "loader": DataLoader(samples, batch_size=16),
            "stream": Stream(),
        }

    def classifier(self, outputs, form, kind="softmax"):
        import torch
        from torch import nn

        torch.manual_seed(0)
        ends = {
            ("probabilities", "softmax"): nn.Softmax(-1),
            ("log-probabilities", "softmax"): nn.LogSoftmax(-1),
            ("probabilities", "sigmoid"): nn.Sigmoid(),
        }
        end = ends.get((form, kind), nn.Identity())
        return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, outputs), end)

    def pairs(self, kind):
        if kind == "sigmoid":
            return [
                (a, b) for a in ("logits", "probabilities") for b in ("logits", "probabilities")
            ]
        forms = ("logits", "probabilities", "log-probabilities")
        return [(a, b) for a in forms for b in forms]

    def loss(self, kind, takes):
        import torch
        from torch import nn

        if kind == "sigmoid":
            # Its own check of the range would raise before anything can be said.
            def clipped(p, y):
                return nn.functional.binary_cross_entropy(p.clamp(0, 1), y)

            return {"logits": nn.BCEWithLogitsLoss(), "probabilities": clipped}[takes]
        nll = nn.functional.nll_loss
        return {
            "logits": nn.CrossEntropyLoss(label_smoothing=0.1),
            "probabilities": lambda p, y: nll(torch.log(p), y),
            "log-probabilities": nn.NLLLoss(),
        }[takes]

    def squared(self, outputs, y):
        return ((outputs - y[:, None]) ** 2).mean()

    def left_as_it_was(self, model, loss, x, y):
        before = self.state(model)
        checks.check_loss(model, loss, x, y)
        after = self.state(model)
        same = all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
        return same and all(m.training for m in model.modules())

    def further_losses(self, x, y):
        """Models of other makers, and outputs that wrap their logits."""
        import torch
        import torchvision
        from torch import nn

        class Wrapped(nn.Module):
            def __init__(self, model):
                super().__init__()
                self.model = model

            def forward(self, image):
                return {"logits": self.model(image).softmax(-1)}

        wrapped = Wrapped(self.classifier(CLASSES, "logits"))
        resnet = torchvision.models.resnet18(num_classes=CLASSES)
        images = torch.rand(4, 3, 32, 32)
        loss = nn.CrossEntropyLoss()
        pair = nn.Sequential(nn.Flatten(), nn.LSTM(64, 4))
        return {
            "a dict of inputs and outputs": said(
                lambda: checks.check_loss(wrapped, loss, {"image": x}, y)
            ),
            "losses of outputs": [
                said(lambda read=read: checks.check_loss(wrapped, read, {"image": x}, y))
                for read in (lambda o, y: loss(o.logits, y), lambda o, y: loss(o["logits"], y))
            ],
            "resnet18": said(lambda: checks.check_loss(resnet, loss, images, y[:4])),
            "resnet18 with softmax": said(
                lambda: checks.check_loss(nn.Sequential(resnet, nn.Softmax(1)), loss, images, y[:4])
            ),
            "two outputs": said(lambda: checks.check_loss(pair, loss, x, y)),
        } | self.of_pixels(loss)

    def other_forms(self, x, y):
        """Outputs in bfloat16, without their last axis, and of several labels in integers."""
        from torch import nn

        cross_entropy = nn.CrossEntropyLoss()
        one, several = (self.classifier(n, "probabilities", "sigmoid") for n in (1, 5))
        clipped, many = self.loss("sigmoid", "probabilities"), (y[:, None] % 2).expand(-1, 5)
        strict = nn.functional.binary_cross_entropy

        def low(form):
            model = self.classifier(CLASSES, form).bfloat16()
            return said(lambda: checks.check_loss(model, cross_entropy, x.bfloat16(), y))

        return {
            "bfloat16": [low("logits"), low("probabilities")],
            "squeezed": said(
                lambda: checks.check_loss(one, lambda p, y: clipped(p.squeeze(), y), x, y % 2.0)
            ),
            "several in integers": said(
                lambda: checks.check_loss(several, lambda p, y: strict(p, y.float()), x, many)
            ),
        }

    def of_pixels(self, loss):
        """Classes in the second axis, as many as the last one is wide."""
        import torch
        from torch import nn

        images, y = torch.rand(2, 3, 4, 7), torch.randint(7, (2, 4, 7))
        model = nn.Conv2d(3, 7, 1)
        twice = nn.Sequential(model, nn.Softmax(1))
        mask = nn.Sequential(nn.Conv2d(3, 1, 1), nn.Sigmoid())
        soft, squeezed = nn.functional.one_hot(y, 7).movedim(-1, 1).float(), nn.BCELoss()
        return {
            "soft pixels": said(lambda: checks.check_loss(model, loss, images, soft)),
            "soft pixels with softmax": said(lambda: checks.check_loss(twice, loss, images, soft)),
            "mask": said(
                lambda: checks.check_loss(
                    mask, lambda p, y: squeezed(p.squeeze(1), y), images, y % 2.0
                )
            ),
            "pixels": said(lambda: checks.check_loss(model, loss, images, y)),
            "pixels with softmax": said(lambda: checks.check_loss(twice, loss, images, y)),
        }

    def functions_of_logits(self):
        from torch.nn import functional as F

        return {
            "logits": (F.cross_entropy, 10),
            "log of softmax": (lambda z, y: F.nll_loss(z.softmax(-1).log(), y), 10),
            "sigmoid, logits": (F.binary_cross_entropy_with_logits, 1),
            "sigmoid": (lambda z, y: F.binary_cross_entropy(z.sigmoid(), y), 1),
        }

    def broken(self):
        import torch
        import torchvision
        from torch import nn

        x, y = (self.tensor(part[:8]) for part in arrays())
        loss = nn.CrossEntropyLoss()

        def model(*middle):
            torch.manual_seed(0)
            norm = nn.BatchNorm1d(8)
            return nn.Sequential(
                nn.Flatten(), nn.Linear(64, 8), norm, *middle, nn.Dropout(), nn.Linear(8, CLASSES)
            )

        class Root(nn.Module):
            def forward(self, x):
                return torch.sqrt(x - x)  # its gradient at 0 is not finite; 0 * inf is NaN

        class Log(nn.Module):
            def forward(self, x):
                return torch.log(x - x)

        def with_bad(which):
            made = model()
            with torch.no_grad():
                dict(made.state_dict())[which].view(-1)[0] = math.nan
            return made

        def bad_input():
            bad = x.clone()
            bad[2, 0, 0, 0] = math.inf
            return bad

        resnet = torchvision.models.resnet18(num_classes=CLASSES)
        with torch.no_grad():
            resnet.layer2[0].conv1.weight[0, 0, 0, 0] = math.nan
        return {
            "clean": lambda: (model(), loss, x, y),
            "input": lambda: (model(), loss, bad_input(), y),
            "parameter": lambda: (with_bad("1.weight"), loss, x, y),
            "layer": lambda: (model(Log()), loss, x, y),
            "gradient": lambda: (model(Root()), loss, x, y),
            "loss": lambda: (model(), lambda z, y: loss(z, y) / 0, x, y),
            "resnet18": lambda: (resnet, loss, torch.rand(2, 3, 32, 32), y[:2]),
        }

    def state(self, model):
        import torch

        return [v.detach().numpy().copy() for v in model.state_dict().values()] + [
            torch.get_rng_state().numpy()
        ]

    def of_any_state(self):
        """What a step says of a model with an extra state, and whether its buffer is back.

        And whether a layer that merges its weights to predict was left so.
        """
        import torch
        from torch import nn

        from tests.train_step.pt_foreign_models import Merging

        class Counting(nn.Linear):
            def __init__(self):
                super().__init__(4, 2)
                self.register_buffer("calls", torch.zeros(()), persistent=False)

            def forward(self, x):
                self.calls += 1
                return super().forward(x)

            def get_extra_state(self):
                return {"scale": 2}

            def set_extra_state(self, state):
                pass

        model, loss = Counting(), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain = kit.training.make_train_step(model, optimizer, loss)
        step = checks.make_checked_step(plain, model, loss)
        x, y = torch.ones(2, 4), torch.tensor([0, 1])
        step(x, y)
        merging = Merging()
        checks.check_loss(merging, loss, torch.ones(2, 4), y)
        try:
            step(x / 0, y)
        except FloatingPointError as error:
            return str(error), model.calls.item(), merging.merged

    def no_trace(self, model):
        grads = all(p.grad is None for p in model.parameters())
        return grads and not any(m._forward_hooks for m in model.modules())


class _TF:
    def tensor(self, x):
        import tensorflow as tf

        return tf.constant(x)

    def half(self, x):
        import tensorflow as tf

        return tf.cast(x, tf.bfloat16)

    def datasets(self, x, y):
        import tensorflow as tf

        class Batches(tf.keras.utils.Sequence):
            def __len__(self):
                return 4

            def __getitem__(self, number):
                rows = slice(16 * number, 16 * number + 16)
                return x[rows], y[rows], np.ones(16, np.float32)

        pairs = tf.data.Dataset.from_tensor_slices((x, y))
        return {"tf.data": pairs.batch(16), "a Sequence with weights": Batches()}

    def classifier(self, outputs, form, kind="softmax"):
        import tensorflow as tf

        layers = tf.keras.layers
        tf.keras.utils.set_random_seed(0)
        ends = {
            ("probabilities", "softmax"): layers.Lambda(lambda z: tf.identity(tf.nn.softmax(z))),
            ("probabilities by Keras", "softmax"): layers.Activation("softmax"),
            ("probabilities", "sigmoid"): layers.Lambda(lambda z: tf.identity(tf.nn.sigmoid(z))),
            ("probabilities by Keras", "sigmoid"): layers.Activation("sigmoid"),
        }
        end = ends.get((form, kind))
        model = tf.keras.Sequential(
            [layers.Flatten(), layers.Dropout(0.5), layers.Dense(outputs), *[end] * bool(end)]
        )
        model(tf.zeros((1, 8, 8, 1)))
        return model

    def pairs(self, kind):
        forms = ("logits", "probabilities", "probabilities by Keras")
        return [(a, b) for a in forms for b in ("logits", "probabilities")]

    def loss(self, kind, takes):
        import tensorflow as tf

        logits = takes == "logits"
        if kind == "sigmoid":
            return tf.keras.losses.BinaryCrossentropy(from_logits=logits, label_smoothing=0.1)
        return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=logits)

    def squared(self, outputs, y):
        import tensorflow as tf

        return tf.reduce_mean((outputs - tf.cast(y, tf.float32)[:, None]) ** 2)

    def left_as_it_was(self, model, loss, x, y):
        before = self.state(model)
        checks.check_loss(model, loss, x, y)
        after = self.state(model)
        return all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))

    def further_losses(self, x, y):
        import tensorflow as tf

        from tests.recipes.keras_foreign import mobilenet

        keras = tf.keras

        class Wrapped(keras.Model):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def call(self, inputs, training=False):
                return {"logits": tf.nn.softmax(self.inner(inputs["image"]))}

        wrapped = Wrapped(self.classifier(CLASSES, "logits"))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        images = tf.random.stateless_uniform((4, 32, 32, 3), (1, 2))
        foreign = mobilenet()
        one_hot = tf.one_hot(y, CLASSES)
        inputs = keras.Input((8, 8, 1))
        two = keras.Model(inputs, [inputs, inputs])
        function = keras.losses.categorical_crossentropy
        return {
            "a dict of inputs and outputs": said(
                lambda: checks.check_loss(wrapped, loss, {"image": x}, y)
            ),
            "keras.applications": said(lambda: checks.check_loss(foreign, loss, images, y[:4])),
            "a function of Keras": said(
                lambda: checks.check_loss(self.classifier(CLASSES, "logits"), function, x, one_hot)
            ),
            "two outputs": said(lambda: checks.check_loss(two, loss, x, y)),
        }

    def other_forms(self, x, y):
        """Outputs in bfloat16, and without their last axis."""
        import tensorflow as tf

        layers = tf.keras.layers
        bce = tf.keras.losses.binary_crossentropy
        one, odd = self.classifier(1, "probabilities", "sigmoid"), tf.cast(y % 2, tf.float32)

        def cross_entropy(z, y):
            return tf.nn.sparse_softmax_cross_entropy_with_logits(y, z)

        def low(end):
            dense = layers.Dense(CLASSES, dtype="bfloat16", activation=end)
            model = tf.keras.Sequential([layers.Flatten(), dense])
            return said(lambda: checks.check_loss(model, cross_entropy, x, y))

        return {
            "bfloat16": [low(None), low("softmax")],
            "squeezed": said(
                lambda: checks.check_loss(one, lambda p, y: bce(y, tf.squeeze(p)), x, odd)
            ),
        }

    def functions_of_logits(self):
        import tensorflow as tf

        cce = tf.keras.losses.sparse_categorical_crossentropy
        bce = tf.keras.losses.binary_crossentropy
        return {
            "logits": (lambda z, y: cce(y, z, from_logits=True), 10),
            "clipped softmax": (lambda z, y: cce(y, tf.identity(tf.nn.softmax(z))), 10),
            "softmax": (lambda z, y: cce(y, tf.nn.softmax(z)), 10),
            "sigmoid, logits": (lambda z, y: bce(y, z, from_logits=True), 1),
            "sigmoid": (lambda z, y: bce(y, tf.identity(tf.nn.sigmoid(z))), 1),
        }

    def broken(self):
        import tensorflow as tf

        from tests.recipes.keras_foreign import mobilenet

        layers = tf.keras.layers
        x, y = (self.tensor(part[:8]) for part in arrays())
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def model(*middle):
            tf.keras.utils.set_random_seed(0)
            made = tf.keras.Sequential(
                [
                    layers.Flatten(),
                    layers.Dense(8, name="first"),
                    layers.BatchNormalization(),
                    *middle,
                    layers.Dropout(0.5),
                    layers.Dense(CLASSES, name="last"),
                ]
            )
            made(x)
            return made

        def with_bad():
            made = model()
            kernel = np.array(made.layers[1].kernel)
            kernel[0, 0] = math.nan
            made.layers[1].kernel.assign(kernel)
            return made

        def bad_input():
            bad = x.numpy()
            bad[2, 0, 0, 0] = math.inf
            return tf.constant(bad)

        def root():
            return layers.Lambda(lambda x: tf.sqrt(x - x), name="root")

        def log():
            return layers.Lambda(lambda x: tf.math.log(x - x), name="log")

        foreign = mobilenet()
        norm = foreign.get_layer("block_3_expand_BN")
        norm.gamma.assign(np.full(norm.gamma.shape, math.nan))
        images = tf.random.stateless_uniform((2, 32, 32, 3), (1, 2))
        return {
            # It writes to its kernel.
            "clean": lambda: (model(layers.SpectralNormalization(layers.Dense(8))), loss, x, y),
            "input": lambda: (model(), loss, bad_input(), y),
            "parameter": lambda: (with_bad(), loss, x, y),
            "layer": lambda: (model(log()), loss, x, y),
            "gradient": lambda: (model(root()), loss, x, y),
            "loss": lambda: (model(), lambda z, y: loss(y, z) / 0.0, x, y),
            "keras.applications": lambda: (foreign, loss, images, y[:2]),
        }

    def state(self, model):
        return [np.array(variable) for variable in model.variables]

    def no_trace(self, model):
        return not any("call" in vars(each) for each in model._flatten_layers(include_self=False))


own = _PT() if FRAMEWORK == "pt" else _TF()


def faults():
    """What the benchmark plants and says of it, by fault."""
    task = TASKS["digits-cnn"]
    random = np.random.default_rng(2)
    x = random.uniform(0, 1, (600, *task.model.input_shape)).astype(np.float32)
    work = Work(task, "checked", {"checked": True}, 64, init_weights(task.model, seed=0))
    return bench_checks._faults(impl, work, x, np.arange(600) % 10)


SCENARIOS = (
    planted,
    structures,
    numbers,
    splits,
    losses,
    margins,
    nonfinite,
    step,
    any_state,
    faults,
)
