"""One framework's share of the tests of where NaN begins; `worker.py` runs it."""

from __future__ import annotations

import math

import numpy as np

from shared.specs import CNNSpec, Recipe
from shared.weights import init_weights
from tests import workers
from tests.recipes.checked import BATCH, CLASSES, FRAMEWORK, arrays, said, tensor

impl = workers.implementation(FRAMEWORK, "recipes.nonfinite")
checks, kit = impl.recipes.nonfinite, impl.kit
SPEC = CNNSpec((8, 8, 1), ((4, 1), (6, 2)), num_classes=4)


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
    def broken(self):
        import torch
        import torchvision
        from torch import nn

        x, y = (tensor(part[:8]) for part in arrays())
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

        def scripted():
            """A block that takes no hook."""
            example = torch.zeros(1, 8)
            return model(torch.jit.trace(nn.Sequential(nn.Linear(8, 8), Log()), example))

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
            "scripted": lambda: (scripted(), loss, x, y),
            "resnet18": lambda: (resnet, loss, torch.rand(2, 3, 32, 32), y[:2]),
        }

    def state(self, model):
        import torch

        return [v.detach().numpy().copy() for v in model.state_dict().values()] + [
            torch.get_rng_state().numpy()
        ]

    def of_any_state(self):
        """What a step says of a model with an extra state, and whether its buffer is back."""
        import torch
        from torch import nn

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
        try:
            step(x / 0, y)
        except FloatingPointError as error:
            return str(error), model.calls.item()

    def no_trace(self, model):
        from torch.nn.modules.module import _global_forward_hooks

        grads = all(p.grad is None for p in model.parameters())
        hooks = _global_forward_hooks or any(m._forward_hooks for m in model.modules())
        return grads and not hooks


class _TF:
    def broken(self):
        import tensorflow as tf

        from tests.recipes.keras_foreign import mobilenet

        layers = tf.keras.layers
        x, y = (tensor(part[:8]) for part in arrays())
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


SCENARIOS = (nonfinite, any_state, step)
