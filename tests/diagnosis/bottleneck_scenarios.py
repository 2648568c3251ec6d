"""One framework's share of the tests of the bottleneck; `worker.py` runs it."""

from __future__ import annotations

import importlib

from tests.diagnosis import steps
from tests.diagnosis.steps import impl

find = impl.diagnosis.bottleneck.find_bottleneck


def planted():
    """Each bottleneck, planted in a step; and a healthy step."""
    large = steps.data(512, 256)
    healthy = steps.plain_step(steps.dense(512, 512, 512, 512, 2))
    tiny = steps.plain_step(steps.dense(4, 4, 4, 4, 4, 2))
    words = steps.codes(200_000, 32, 4), steps.data(4, 32)[1]
    small = steps.dense(8, 8, 2)
    metric = steps.with_metric(steps.plain_step(small), small)
    found = {
        "healthy": find(healthy, [large]),
        "slow loader": find(healthy, steps.late_batches(large, 0.05), steps=8),
        "tiny model": find(tiny, [steps.data(4, 2)]),
        "huge embedding": find(
            steps.plain_step(steps.table(200_000, 64), "adam"), [words], steps=8
        ),
        "synchronising metric": find(metric, [steps.data(8, 64)], steps=8),
        "blocked exchange": find(steps.exchanging(healthy, 0.06), [large], steps=8),
    }
    return {name: one.as_json() | {"said": str(one)} for name, one in found.items()}


def tasks():
    """A task's step and its batches; a task whose data is files is refused."""
    examples = importlib.import_module(f"{impl.__name__}.kit.examples")
    step, batches = examples.train_step("digits-cnn", 4)
    losses = [float(step(*batch)) for batch in batches]
    try:
        examples.train_step("photos")
    except ValueError as error:
        said = str(error)
    return {"sizes": [len(y) for _, y in batches], "losses": losses, "said": said}


SCENARIOS = (planted, tasks)
