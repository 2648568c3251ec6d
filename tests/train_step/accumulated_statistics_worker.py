"""One framework's share of the tests of accumulated statistics, in a process of its own.

`python -m tests.train_step.accumulated_statistics_worker pt|tf|tf_keras` runs every scenario and
prints one line of JSON: scenario -> what was found, or {"error": traceback}.
`test_accumulated_statistics.py` judges.
"""

from __future__ import annotations

import sys

import numpy as np

from tests import workers
from tests.train_step import gradient_accumulation_worker as accumulation
from tests.train_step.gradient_accumulation_worker import (
    CNN,
    FRAMEWORK,
    LEFT,
    PARTS,
    TARGET,
    applied,
    batches,
    kit,
    plain,
    prepare,
    raised,
    run,
    start,
    weights,
)

impl = workers.implementation(FRAMEWORK, "train_step.accumulated_statistics")
technique = impl.train_step.accumulated_statistics


# Scenarios for both frameworks ----------------------------------------------------------------


def gradients():
    """Gradients and statistics of a whole batch, of its parts alone, accumulated and once."""
    ((x, y),) = batches(CNN)
    parts = [(x[a:b], y[a:b]) for a, b in PARTS]
    whole, *alone = applied(CNN, (x, y), *parts)
    found = {"start": plain(start(CNN)), "baseline": whole, "alone": alone}
    (found["3"],) = applied(CNN, (x, y), micro_batches=3)
    for count in (1, 3):
        (found[f"once {count}"],) = applied(CNN, (x, y), by=technique, micro_batches=count)
    return found


def losses():
    """Of ten steps in four parts."""
    stream = batches(CNN, 10, samples=30)
    makers = {"each": accumulation.technique, "once": technique}
    return {name: run(prepare(CNN, by=by, micro_batches=4), stream) for name, by in makers.items()}


def refusals():
    """What a batch that cannot be cut raises, and that model and statistics are as before."""
    prepared = prepare(CNN, by=technique, micro_batches=4)
    before = weights(prepared)
    ((x, y),) = batches(CNN)
    found = {
        "few": raised(prepared.step, x[:3], y[:3]),
        "disagree": raised(prepared.step, x, y[:9]),
    }
    after = weights(prepared)
    found["unchanged"] = all(np.array_equal(before[name], after[name]) for name in before)
    fresh = prepare(CNN, by=technique, micro_batches=4)
    found["goes on"] = run(prepared, [(x, y)]) == run(fresh, [(x, y)])
    return found


# Scenarios of one framework, on models that are not ours --------------------------------------


class PyTorch:
    def __init__(self):
        import torch

        self.torch = torch

    def norms(self):
        """BatchNorm over few values, with a cumulative average, and a frozen one."""
        torch = self.torch
        nn = torch.nn
        model = nn.Sequential(
            nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None), nn.BatchNorm1d(4), nn.Linear(4, 2)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step = technique.make_train_step(model, optimizer, nn.MSELoss(), micro_batches=4)
        model[2].eval()
        kept = {name: value.clone() for name, value in model[2].state_dict().items()}
        for _ in range(2):
            step(torch.from_numpy(LEFT), torch.from_numpy(TARGET))
        first, second, third = (layer.state_dict() for layer in list(model)[:3])
        found = {
            "data": LEFT.tolist(),
            "mean": first["running_mean"].tolist(),
            "variance": first["running_var"].tolist(),
            "updates": [int(s["num_batches_tracked"]) for s in (first, second, third)],
            "cumulative": second["running_var"].tolist(),
            "frozen": all(torch.equal(kept[name], third[name]) for name in kept),
            "momenta": [layer.momentum for layer in list(model)[:3]],
            "hooks": sum(len(module._forward_hooks) for module in model.modules()),
        }
        mean = model[0].running_mean.clone()
        found["fails"] = raised(step, torch.from_numpy(LEFT[:, :3].copy()), torch.zeros(9, 2))
        found["momenta afterwards"] = [layer.momentum for layer in list(model)[:3]]
        found["kept"] = torch.equal(mean, model[0].running_mean)
        return found

    def recomputed(self):
        """A first BatchNorm's variance: as it is, and in a block that runs again going back."""
        from pt_impl.train_step.activation_checkpointing import apply_checkpointing

        nn, found = self.torch.nn, []
        for blocks in ("", "0"):
            model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)), nn.ReLU())
            apply_checkpointing(model, blocks=blocks)
            optimizer = self.torch.optim.SGD(model.parameters(), lr=0.0)
            step = technique.make_train_step(model, optimizer, nn.MSELoss(), micro_batches=4)
            step(self.torch.from_numpy(LEFT), self.torch.zeros(len(LEFT), 4))
            found.append(model[0][0].running_var.tolist())
        return found

    def untracked(self):
        """The mean of a BatchNorm, without and with other inputs that go through it untracked."""
        torch, found = self.torch, []

        class Perturbed(torch.nn.Module):
            def __init__(self, often):
                super().__init__()
                self.norm, self.often = torch.nn.BatchNorm1d(4), often

            def forward(self, x):
                output = self.norm(x)
                self.norm.track_running_stats = False  # as virtual adversarial training does
                for _ in range(self.often):
                    self.norm(x[:2] + 100.0)
                self.norm.track_running_stats = True
                return output

        for often in (0, 1):
            model = Perturbed(often)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            step = technique.make_train_step(model, optimizer, torch.nn.MSELoss(), micro_batches=2)
            step(torch.from_numpy(LEFT), torch.zeros(len(LEFT), 4))
            found.append(model.norm.running_mean.tolist())
        return found

    def synchronised(self):
        """What SyncBatchNorm gets."""
        arguments = self.torch.nn.SyncBatchNorm(2), None, None
        return {
            "once": raised(technique.make_train_step, *arguments),
            "plain": raised(accumulation.technique.make_train_step, *arguments),
        }


class TensorFlow:
    def __init__(self):
        import tensorflow as tf

        self.tf = tf

    def squares(self, output, target):
        return self.tf.reduce_mean(self.tf.square(output - target))

    def decorated(self):
        """Means of a layer in models whose call is a `tf.function`, by the step and by plain calls.

        Of one that was traced before with its own momentum; of one that was traced in the step.
        """
        tf = self.tf
        keras, layers = tf.keras, tf.keras.layers
        x, y, found = tf.constant(LEFT), tf.constant(TARGET), {"mean": LEFT.mean(0).tolist()}

        class Decorated(keras.Model):
            def __init__(self):
                super().__init__()
                self.norm, self.head = layers.BatchNormalization(momentum=0.9), layers.Dense(2)

            @tf.function
            def call(self, x, training=False):
                return self.head(self.norm(x, training=training))

        for name in ("traced before", "traced in the step"):
            model = Decorated()
            model(x)  # Keras's first call of a model, which builds it, changes no variable
            if name == "traced before":
                model(x, training=True)
            model.norm.moving_mean.assign(tf.zeros(4))
            optimizer = keras.optimizers.SGD(0.0)
            step = technique.make_train_step(model, optimizer, self.squares, micro_batches=3)
            step(x, y)
            found[name] = [np.array(model.norm.moving_mean).tolist()]
            model.norm.moving_mean.assign(tf.zeros(4))
            tf.function(lambda model=model: model(x, training=True))()
            found[name].append(np.array(model.norm.moving_mean).tolist())
        return found

    def norms(self):
        """BatchNorm over few values, one that is frozen, and one that renormalises."""
        tf = self.tf
        keras, layers = tf.keras, tf.keras.layers

        class Inside(layers.Layer):
            def __init__(self):
                super().__init__()
                self.norm = layers.BatchNormalization(momentum=0.9)

            def call(self, x, training=False):
                return self.norm(x, training=training)

        inside, frozen = Inside(), layers.BatchNormalization()
        frozen.trainable = False
        model = keras.Sequential([keras.Input((4,)), inside, frozen, layers.Dense(2)])
        kept = [np.array(value) for value in frozen.weights]
        optimizer = keras.optimizers.SGD(0.0)
        arguments = optimizer, self.squares
        step = technique.make_train_step(model, *arguments, micro_batches=4)
        for _ in range(2):
            step(tf.constant(LEFT), tf.constant(TARGET))
        found = {
            "data": LEFT.tolist(),
            "mean": np.array(inside.norm.moving_mean).tolist(),
            "variance": np.array(inside.norm.moving_variance).tolist(),
            "frozen": all(
                np.array_equal(old, np.array(new))
                for old, new in zip(kept, frozen.weights, strict=True)
            ),
            "momenta": [inside.norm.momentum, frozen.momentum],
        }
        renorm = layers.BatchNormalization(renorm=True)
        model = keras.Sequential([keras.Input((4,)), renorm, layers.Dense(2)])
        found["renorm"] = raised(technique.make_train_step, model, *arguments)
        found["renorm plain"] = raised(accumulation.technique.make_train_step, model, *arguments)
        return found


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    scenarios = [gradients, losses]
    if sys.argv[1] != "tf_keras":
        scenarios += [refusals]
        names = [name for name in vars(type(own)) if not name.startswith("_")]
        scenarios += [getattr(own, name) for name in names if name != "squares"]
    workers.report(scenarios)


own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
