"""One framework's share of the tests of early stopping; `worker.py` runs it."""

from __future__ import annotations

import math
import sys

from tests import workers
from tests.recipes.averaging_scenarios import batches, model_and_step, same, state

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
impl = workers.implementation(FRAMEWORK, "recipes.early_stopping")
EarlyStopping = impl.recipes.early_stopping.EarlyStopping


def stopping():
    """When it stops, and which weights come back."""
    found = {}
    cases = {
        "loss": ([3.0, 2.0, 2.5, 1.9, 2.0, 2.1, 2.2, 1.0], {"patience": 2}),
        "accuracy": ([1.0, 2.0, 1.5, 1.4, 9.0], {"patience": 1, "higher_is_better": True}),
        "min_delta": ([3.0, 2.95, 2.9, 2.85, 2.8], {"patience": 1, "min_delta": 0.2}),
        "nan": ([math.nan, 2.0, math.nan, math.nan, 1.0], {"patience": 1}),
        "never": ([3.0, 2.0, 1.0], {"patience": 0}),
    }
    model, step = model_and_step()
    for name, (values, settings) in cases.items():
        early = EarlyStopping(model, **settings)
        states, stopped = [], None
        for number, (value, batch) in enumerate(zip(values, batches(len(values)), strict=True)):
            step(*batch)
            states.append(state(model))
            if early.step(value):
                stopped = number
                break
        best = early.restore()
        back = [number for number, each in enumerate(states) if same(each, state(model))]
        found[name] = {"stopped": stopped, "best": best, "weights of": back}
    return found


def other_buffers():
    """A buffer that no state holds, of PyTorch, after its best value came back twice."""
    if FRAMEWORK != "pt":
        return None
    import torch

    model = torch.nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(2), persistent=False)
    stopping = EarlyStopping(model)
    model.mask.fill_(1.0)
    stopping.step(1.0)
    model.mask = torch.full((3,), 9.0)
    stopping.step(2.0)
    found = []
    for _ in range(2):
        stopping.restore()
        found.append(model.mask.tolist())
        model.mask.fill_(7.0)
    return found


def refusals():
    model, _ = model_and_step()
    return [
        workers.raised(EarlyStopping, model, patience=-1),
        workers.raised(EarlyStopping, model, min_delta=-0.1),
        workers.raised(EarlyStopping(model).restore),
    ]


SCENARIOS = (stopping, other_buffers, refusals)
