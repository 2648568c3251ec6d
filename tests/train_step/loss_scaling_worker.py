"""One framework's share of the loss-scaling tests, in a process of its own.

`python -m tests.train_step.loss_scaling_worker pt|tf` runs every scenario and prints one line of
JSON: scenario -> what was found, or {"error": traceback}. `test_loss_scaling.py` judges it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests import workers
from tests.train_step.mixed_precision_worker import (
    CNN,
    FRAMEWORK,
    baseline,
    batches,
    kit,
    own,
    parameters,
    prepare,
    run,
    same,
)
from tests.workers import raised

impl = workers.implementation(FRAMEWORK, "train_step.loss_scaling")
technique = impl.train_step.loss_scaling


def losses():
    """Ten losses: of the plain step, of a scaled loss in float32, and in float16."""
    stream = batches(CNN)
    found = {dtype: run(prepare(CNN, by=technique, dtype=dtype), stream) for dtype in DTYPES}
    return found | {"baseline": baseline()}


DTYPES = ("float32", "float16")


def overflow():
    """Scale, loss and whether the weights moved, from a scale that overflows at first.

    In the end an infinite input: are the weights kept, and what becomes of the scale?
    """
    recipe = replace(CNN.recipe, learning_rate=0.1)
    settings = {"by": technique, "initial_scale": 2.0**26, "growth_interval": 3}
    prepared = prepare(CNN, recipe=recipe, **settings)
    found = {"start": prepared.step.loss_scale(), "scale": [], "loss": [], "moved": []}
    before = parameters(prepared)
    state = optimizer_state(prepared.optimizer)
    for batch in batches(CNN, 1) * 20:
        found["loss"].append(kit.runtime.to_float(prepared.step(*batch)))
        after = parameters(prepared)
        found["moved"].append(not same(before, after))
        found["scale"].append(prepared.step.loss_scale())
        if not any(found["moved"]):
            found["state_kept"] = optimizer_state(prepared.optimizer) == state
        before = after
    x, y = batches(CNN, 1)[0]
    prepared.step(x * float("inf"), y)
    kept = same(before, parameters(prepared))
    return found | {"infinite": {"kept": kept, "scale": prepared.step.loss_scale()}}


def optimizer_state(optimizer):
    """What the optimizer remembers, but for what is made on first use: all zero there."""
    if FRAMEWORK == "pt":
        kept = [v for s in optimizer.state.values() for v in s.values()]
    else:
        kept = list(optimizer.variables)[2:]  # iterations and learning rate come first
    return float(sum(np.abs(np.array(v, dtype=np.float64)).sum() for v in kept))


def underflow():
    """Does a loss of 2^-24 of the usual size move the weights, without and with scaling?"""
    recipe = replace(CNN.recipe, learning_rate=0.05 * 2.0**24, momentum=0.0)
    found = {}
    for scale in (1.0, 65536.0):
        prepared = prepare(
            CNN,
            recipe=recipe,
            loss=lambda logits, y: kit.training.cross_entropy(logits, y) * 2.0**-24,
            by=technique,
            initial_scale=scale,
        )
        before = parameters(prepared)
        prepared.step(*batches(CNN, 1)[0])
        found[str(scale)] = not same(before, parameters(prepared))
    return found


def refusals():
    """What settings that cannot work raise, and that the model is as before."""
    prepared = prepare(CNN, by=technique, dtype="float32")
    arguments = prepared.model, prepared.optimizer, kit.training.cross_entropy
    if FRAMEWORK == "tf":  # the step's own optimizer scales already
        arguments = prepared.model, own.optimizer(), kit.training.cross_entropy
    found = {
        name: raised(technique.make_train_step, *arguments, **settings)
        for name, settings in (
            ("scale", {"initial_scale": 0.0}),
            ("growth", {"growth_interval": 0}),
            ("dtype", {"dtype": "half"}),
            ("layer", {"keep_fp32": "haed"}),
        )
    }
    found["unchanged"] = run(prepared, batches(CNN, 2)) == baseline()[:2]
    return found


class PyTorch:
    def nothing(self):
        """A module without parameters."""
        import torch

        return raised(technique.LossScaler, torch.nn.ReLU())


class TensorFlow:
    def resumed(self):
        """How far a training that was resumed halfway is from one that went on, in float16."""
        import tensorflow as tf

        found = {}
        keras, layers = tf.keras, tf.keras.layers
        x, y = tf.random.normal((4, 6)), tf.constant([0, 1, 2, 0])

        def build(rule):
            model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.Dense(3)])
            given = model, getattr(keras.optimizers, rule)(0.1), kit.training.cross_entropy
            step = technique.make_train_step(*given)
            return step, [*model.variables, *step.optimizer.variables]

        for rule in ("Adam", "Nadam", "Adafactor"):
            (first, ours), (second, theirs) = build(rule), build(rule)
            for _ in range(3):
                first(x, y)
            for variable, saved in zip(theirs, ours, strict=True):
                variable.assign(saved)
            for _ in range(2):
                first(x, y)
                second(x, y)
            apart = zip(ours, theirs, strict=True)
            found[rule] = max(np.abs(np.array(a) - np.array(b)).max().item() for a, b in apart)
        return found

    def refused(self):
        """Optimizers that scale already, and a second one of a scale."""
        import tensorflow as tf

        keras = tf.keras
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        factor = keras.optimizers.SGD(0.1, loss_scale_factor=128.0)
        scaler = technique.LossScaler(model)
        scaler.wrap(keras.optimizers.SGD(0.1))
        make, loss_fn = technique.make_train_step, kit.training.cross_entropy
        return {
            "second": raised(scaler.wrap, keras.optimizers.SGD(0.1)),
            "scaling": raised(make, model, scaling, loss_fn),
            "factor": raised(make, model, factor, loss_fn),
            "unbuilt": raised(technique.LossScaler, keras.Sequential([keras.layers.Dense(2)])),
        }


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    scenarios = [losses, overflow, underflow, refusals]
    mine = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
    scenarios += [getattr(mine, name) for name in vars(type(mine)) if not name.startswith("_")]
    workers.report(scenarios)


if __name__ == "__main__":
    main()
