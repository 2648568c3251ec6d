"""One framework's share of the tests of the checks of losses; `worker.py` runs it."""

from __future__ import annotations

import numpy as np

from bench.recipes import bench_loss_checks
from shared.specs import TASKS
from shared.weights import init_weights
from tests import workers
from tests.recipes.checked import CLASSES, FRAMEWORK, arrays, said, tensor

impl = workers.implementation(FRAMEWORK, "recipes.loss_checks")
checks, kit = impl.recipes.loss_checks, impl.kit


def losses():
    """What is said of each pair of a model's output and a loss."""
    x, y = (tensor(part[:32]) for part in arrays())
    one = tensor((arrays()[1][:32] % 2)[:, None].astype(np.float32))
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


def faults():
    """What the benchmark plants and says of it, by fault."""
    spec = TASKS["digits-cnn"].model
    x = np.random.default_rng(2).uniform(0, 1, (64, *spec.input_shape)).astype(np.float32)
    model = kit.models.build(spec, init_weights(spec, seed=0))
    return bench_loss_checks._faults(impl, model, *kit.data.to_device(x, np.arange(64) % 10))


def merging():
    """Whether a layer that merges its weights to predict was left so; a module has a mode."""
    if FRAMEWORK != "pt":
        return None
    import torch
    from torch import nn

    from tests.train_step.pt_foreign_models import Merging

    model = Merging()
    checks.check_loss(model, nn.CrossEntropyLoss(), torch.ones(2, 4), torch.tensor([0, 1]))
    return model.merged


class _PT:
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

    def state(self, model):
        import torch

        return [v.detach().numpy().copy() for v in model.state_dict().values()] + [
            torch.get_rng_state().numpy()
        ]


class _TF:
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

    def state(self, model):
        return [np.array(variable) for variable in model.variables]


own = _PT() if FRAMEWORK == "pt" else _TF()


SCENARIOS = (losses, margins, faults, merging)
