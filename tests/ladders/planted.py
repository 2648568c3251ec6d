"""A ladder whose rungs have planted effects, measured in the NumPy kit."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from msgspec import convert

from bench.ladders.ladder import Ladder, Published, Rung
from bench.record import Metric
from shared import datasets
from shared.specs import TASKS

# rung -> what it multiplies the time of an iteration and the memory with, and adds to the accuracy
EFFECTS = {
    "quick": (0.5, 1.0, 0.0),
    "slow": (1.3, 1.0, 0.0),
    "lean": (1.2, 0.6, 0.0),
    "careless": (0.8, 1.0, -8.0),
    "wise": (1.0, 1.0, 3.0),
    "broken": (0.5, 1.0, 0.0),
    "last": (0.9, 1.0, 0.0),
    "late": (0.9, 1.0, 0.0),
    "diverging": (0.9, 1.0, float("nan")),
}
TASK, TURNS = "digits-cnn", 3


def materialise(folder: Path, task: str) -> tuple[Path, dict]:
    return datasets.materialise(TASKS[task].dataset, folder), {"planted": True}


LADDER = Ladder(
    name="planted",
    title="Planted",
    module=__name__,
    task=TASK,
    materialise=materialise,
    about="Nothing is trained.",
    rungs=(
        Rung("quick", "quick", judged="iteration"),
        Rung("slow", "slow", judged="iteration"),
        Rung("lean", "lean", judged="memory", changes=True),
        Rung("careless", "careless", judged="iteration", nothing={"tf": "it takes care"}),
        Rung("wise", "wise", judged="quality"),
        Rung("broken", "broken", judged="iteration"),
        Rung("last", "last", judged="iteration"),
    ),
    published=(
        Published("before → after", 0.5, "iteration", "a machine, a source"),
        Published("points", 2.0, "quality", "another"),
    ),
)
SHORT = replace(LADDER, rungs=LADDER.rungs[:2])


def figures(rungs, seed: int) -> dict[str, dict]:
    """The planted figures with some noise, the same for the same rungs and seed."""
    noise = random.Random(f"{seed} {list(rungs)}")
    drift = random.Random(f"{seed}").uniform(0.5, 2.0)  # of the machine, between pairs
    each, memory, quality = 0.1 * drift, 1e9, 90.0 + random.Random(seed).gauss(0, 2)
    for rung in rungs:
        times, share, more = EFFECTS[rung]
        each, memory, quality = each * times, memory * share, quality + more
    each *= 1 + noise.gauss(0, 0.01)
    found = {"iteration": each, "memory": memory, "quality": quality + noise.gauss(0, 0.1)}
    found |= {"first_step": 1.0 / (1 + seed), "whole": 10 * each, "latency": each, "size": 1e6}
    return {name: {"value": value, "unit": ""} for name, value in found.items()}


def metrics(rungs, seed: int) -> dict[str, Metric]:
    """The same as they stand in a record."""
    return convert(figures(rungs, seed), dict[str, Metric])


def _note(settings: dict, rungs: list) -> None:
    """Write down whose turn it was, where that is asked for."""
    if place := settings.get("turns"):
        with open(place, "a") as file:
            file.write(f"{'+'.join(rungs) or 'plain'}\n")


def probe(impl, work, batches):
    """A run that takes no time, in `TURNS` turns."""
    rungs = work.settings["rungs"]
    if "broken" in rungs:
        raise RuntimeError("it broke")
    for _ in range(TURNS - 1):
        _note(work.settings, rungs)
        yield
    _note(work.settings, rungs)
    if "late" in rungs:
        raise RuntimeError("too late")
    evidence = {"losses": [2.0, 1.0], "weights_sha256": "same"}
    return figures(rungs, work.settings["seed"]) | {"evidence": evidence}
