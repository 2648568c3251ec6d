"""One framework's share of the tests of memory growth; `worker.py` runs it."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from tests.diagnosis import steps
from tests.diagnosis.steps import impl

watch = impl.diagnosis.memory_growth.watch_memory


def planted():
    """A step that keeps 1 MB a round, one that fills a cache of 30 MB, one that keeps nothing."""
    batch, plain = steps.data(8, 16), steps.plain_step(steps.dense(8, 8, 2))
    kept, cache = [], {}

    class Chunk:
        def __init__(self):
            self.bytes = np.ones(2**20, np.uint8)

    def leak(x, y):
        kept.append(Chunk())
        return plain(x, y)

    def fill(named):  # a batch that is a dict comes whole
        cache.setdefault(len(cache) if len(cache) < 15 else 0, np.ones(2 * 2**20, np.uint8))
        return plain(named["x"], named["y"])

    named = dict(zip("xy", batch, strict=True))
    steps_ = {"steady": (plain, batch), "cache": (fill, named), "leak": (leak, batch)}
    found = {name: watch(step, [one], rounds=50) for name, (step, one) in steps_.items()}
    return {name: asdict(one) | {"said": str(one)} for name, one in found.items()}


def of_the_framework():
    """The framework's own leak: kept graphs."""
    model, batch = steps.dense(64, 512, 2), steps.data(64, 256)
    if steps.NAME == "pt":
        kept = []
        loss_fn = impl.kit.training.cross_entropy
        return asdict(watch(lambda x, y: kept.append(loss_fn(model(x), y)), [batch], rounds=30))
    import tensorflow as tf

    numbers = iter(range(10_000))

    @tf.function
    def traced(x, number):
        for _ in range(20):
            x = tf.nn.relu(x) * number
        return x

    return asdict(watch(lambda x, y: traced(x, next(numbers)), [batch], rounds=30, steps=3))


def refused():
    """What is said."""
    reasons = []
    for settings in ({"rounds": 5}, {"warmup": 0}, {"least": 0.0}, {"steps": 0}):
        try:
            watch(lambda x: None, [(1,)], **settings)
        except ValueError as error:
            reasons.append(str(error))
    return reasons


SCENARIOS = (planted, of_the_framework, refused)
