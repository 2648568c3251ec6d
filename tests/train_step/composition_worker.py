"""The operators of one framework's steps at neutral settings, in a process of its own.

`python -m tests.train_step.composition_worker pt|tf` prints one line of JSON: scenario -> what was
found, or {"error": traceback}. `test_composition.py` judges it.
"""

from __future__ import annotations

import sys

import numpy as np

from tests import workers

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
TECHNIQUES = (
    "activation_checkpointing",
    "compilation",
    "gradient_accumulation",
    "gradient_clipping",
    "memory_format",
    "mixed_precision",
    "stacking",
)
impl = workers.implementation(
    FRAMEWORK, "kit.operators", *(f"train_step.{name}" for name in TECHNIQUES)
)
kit, train = impl.kit, impl.train_step
NEUTRAL = {
    "gradient_accumulation": {"micro_batches": 1},
    "gradient_clipping": {"max_norm": float("inf")},
    "mixed_precision": {"dtype": "float32"},
    "stacking": {},
}
random = np.random.default_rng(0)
X = random.normal(size=(8, 6, 6, 2)).astype(np.float32)
Y = random.integers(0, 3, 8)


class PyTorch:
    """The step of PyTorch's tutorials."""

    def __init__(self):
        import torch

        self.torch = torch

    def batch(self):
        return map(self.torch.from_numpy, (X.transpose(0, 3, 1, 2), Y))

    def model(self):
        nn = self.torch.nn
        self.torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
        return model, self.torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss_fn(self):
        return self.torch.nn.CrossEntropyLoss()

    def plain_step(self, model, optimizer, loss_fn):
        model.train()

        def step(x, y):
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def operators(self, step, x, y):
        """What Python and autograd called in one step, by name."""
        return kit.operators.update_operators(lambda: step(x, y))


class TensorFlow:
    """The step of TensorFlow's guide."""

    def __init__(self):
        import tensorflow as tf

        self.tf = tf

    def batch(self):
        return map(self.tf.constant, (X, Y))

    def model(self):
        keras, layers = self.tf.keras, self.tf.keras.layers
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6, 6, 2)), layers.Conv2D(4, 3, activation="relu")])
        model.add(layers.Flatten())
        model.add(layers.Dense(3))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)
        return model, optimizer

    def loss_fn(self):
        sparse = self.tf.nn.sparse_softmax_cross_entropy_with_logits
        return lambda output, y: self.tf.reduce_mean(sparse(y, output))

    def plain_step(self, model, optimizer, loss_fn):
        tf, variables = self.tf, model.trainable_variables

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_fn(model(x, training=True), y)
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        return step

    def operators(self, step, x, y):
        """What stands in the graph of a step, by name."""
        return kit.operators.executed_graphs(step, x, y)["outside"]


def tax():
    """The operators of each technique's step at its neutral setting, and of a plain step."""
    x, y = own.batch()
    steps = {"plain": own.plain_step}
    for name, settings in NEUTRAL.items():
        make = getattr(train, name).make_train_step
        steps[name] = lambda *given, m=make, s=settings: m(*given, **s)
    usual = "eager" if FRAMEWORK == "pt" else "graph"
    steps["compilation"] = getattr(train.compilation, f"{usual}_train_step")
    steps["memory_format"] = on(lambda model: train.memory_format.apply_memory_format(
        model, memory_format="channels_first" if FRAMEWORK == "pt" else "channels_last"
    ))  # fmt: skip
    steps["activation_checkpointing"] = on(
        lambda model: train.activation_checkpointing.apply_checkpointing(model, blocks="")
    )
    found = {}
    for name, make in steps.items():
        model, optimizer = own.model()
        found[name] = own.operators(make(model, optimizer, own.loss_fn()), x, y)
    model, optimizer = own.model()
    clipping = train.gradient_clipping.make_train_step
    found["clipped"] = own.operators(clipping(model, optimizer, own.loss_fn()), x, y)
    return found


def on(change):
    """A plain step of a changed model."""
    return lambda model, *others: own.plain_step(change(model), *others)


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    workers.report([tax])


own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
