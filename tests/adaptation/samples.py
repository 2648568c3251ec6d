"""What the tests of both techniques share: a small model and two domains."""

from __future__ import annotations

import numpy as np

from shared.specs import CNNSpec, Recipe, parameter_shapes
from shared.weights import init_weights

SPEC = CNNSpec((8, 8, 2), ((4, 1), (6, 2)), num_classes=10)
STEPS = 10
RECIPE = Recipe("sgd", learning_rate=0.05, epochs=1, accuracy_batch_size=8)


def batches(kit, count, size=16):
    """((source, target), labels), the same in every process; the target is brighter, and fewer."""
    random = np.random.default_rng(3)
    found = []
    for _ in range(count):
        source = random.normal(size=(size, 8, 8, 2)).astype(np.float32)
        target = random.normal(size=(size - 4, 8, 8, 2)).astype(np.float32) * 2 + 1
        y = random.integers(0, 10, size)
        (x, labels), (other, _) = (kit.data.to_device(part, y) for part in (source, target))
        found.append(((x, other), labels))
    return found


def model_of(kit):
    """A new model, and its features and head."""
    model = kit.models.build(SPEC, init_weights(SPEC, seed=1))
    return model, kit.models.split_head(model)


def step_of(kit, model, loss_fn, recipe=RECIPE):
    optimizer = kit.training.make_optimizer(model, recipe)
    return kit.training.make_train_step(model, optimizer, loss_fn)


def weights_of(kit, model):
    exported = kit.models.export_weights(model)
    return {name: np.array(exported[name]) for name in parameter_shapes(SPEC)}
