"""The process in which copies of technique files run: `python -m tests.zoo.copied pt FILE`.

A line of FILE is JSON: the folder that holds a copy, its technique, and what it is tried on. The
project's own packages are found in that folder and nowhere else.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from importlib.machinery import PathFinder
from itertools import islice
from pathlib import Path

OURS = ("pt_impl", "tf_impl", "shared")
LOADERS = {
    "folder": "naive_loader",
    "tuned_folder": "tuned_loader",
    "shards": "sequential_loader",
    "mapped_arrays": "memory_mapped_loader",
    "in_memory": "naive_loader",
}
# Recipe or way to adapt -> a use of its file, with the file, and an ordinary model, its optimizer
# and its loss.
RECIPES = {
    "adversarial": lambda file, *_: file.make_domain_head(width=8),
    "discrepancy": lambda file, *rest: file.discrepancy_loss(rest[-1]),
    "varying_lengths": lambda file, *_: file.pad([([1, 2], [2, 3]), ([1], [2])]),
    "serving_threads": lambda file, model, *_: file.load(lambda: model, file.Setting()),
    "keras_backend": lambda file, *_: file.compile_keras(
        file.keras.Sequential([file.keras.layers.Dense(1)]), "sgd", file.keras.losses.Poisson()
    ),
    "augmentation": lambda file, *_: file.Policy(flip_horizontal=0.5, rotation=10.0),
    "averaging": lambda file, model, *_: file.make_equal_average(model),
    "checkpoints": lambda file, model, *_: file.save_checkpoint("saved", model, None, {"epoch": 1}),
    "data_checks": lambda file, *_: file.check_splits([[[1.0]]], [[[2.0]]]),
    "loss_checks": lambda file, *_: file.gradient_by_margin(lambda z, y: z * z),
    "nonfinite": lambda file, model, *_: file.make_checked_step(print, model, None),
    "gradient_health": lambda file, *_: file.find_unhealthy({"output": 1.0}),
    "initialization": lambda file, model, *_: file.apply_initialization(model, seed=1),
    "learning_rate_finder": lambda file, model, optimizer, _: file.find_learning_rate(
        model, optimizer, lambda loss: loss, [(2.0 - number / 60,) for number in range(100)]
    ),
    "regularization": lambda file, model, *_: file.l2_penalty(model, weight_decay=0.1),
    "schedules": lambda file, _, optimizer, __: file.apply_cosine(optimizer, steps=10),
}
LATE = 0.05  # seconds that a loader lets a step wait, far more than the step takes
KEPT = 2**20  # bytes that a leaking step keeps
# File of the diagnosis -> what it says of a train step with its batch and a fault that it has to
# find; a profile also of a plain one.
DIAGNOSES = {
    "profiling": lambda file, step, batch: {
        "plain": asdict(file.profile_steps(step, [batch], steps=8)),
        "waiting": asdict(file.profile_steps(step, late(batch), steps=8)),
    },
    "memory_growth": lambda file, step, batch: asdict(
        file.watch_memory(leaking(step), [batch], rounds=30)
    ),
    "bottleneck": lambda file, step, batch: file.find_bottleneck(
        step, late(batch), steps=8
    ).as_json(),
}


def late(batch):
    """A loader that takes `LATE` for each batch."""
    while True:
        time.sleep(LATE)
        yield batch


def leaking(step):
    """The step, and `KEPT` bytes with each, in an object that nobody gives back."""
    kept = []

    def leak(*batch):
        kept.append(bytearray(b"\1" * KEPT))
        return step(*batch)

    return leak


class Only:
    """Finds the project's packages in one folder alone."""

    folder = ""

    def find_spec(self, name: str, path=None, target=None):
        """The module in the folder; what is not there is nowhere."""
        if name.partition(".")[0] not in OURS:
            return None
        found = PathFinder.find_spec(name, [self.folder] if path is None else path)
        if found is None:
            raise ModuleNotFoundError(f"{name} was not copied", name=name)
        return found


def load(finder: Only, folder: str, name: str):
    """The copy, imported anew."""
    finder.folder = folder
    for module in [m for m in sys.modules if m.partition(".")[0] in OURS]:
        del sys.modules[module]
    return importlib.import_module(name)


def main() -> None:
    """Answer each line with what came of it, as JSON."""
    framework, given = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the frameworks print is no answer
    cells = importlib.import_module(f"tests.zoo.cells_{framework}")
    builds = importlib.import_module(f"tests.zoo.builds_{framework}")
    shared_by_cells = importlib.import_module("tests.zoo.cells")  # whose refusals count
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # its processes are forked, and threads of a pool are not
    finder = Only()
    sys.meta_path.insert(0, finder)
    for line in Path(given).read_text().splitlines():
        asked = json.loads(line)
        try:
            module = load(finder, asked["folder"], asked["module"])
            shared_by_cells._OURS = tuple(f"{asked['folder']}/{name}/" for name in OURS)
            if "parallel" in asked:
                losses = builds.first_losses(asked["technique"], asked["module"])
                found = {"status": "works", "losses": losses, "file": module.__file__}
            elif asked["technique"] in RECIPES:
                with contextlib.chdir(asked["folder"]):
                    RECIPES[asked["technique"]](module, *getattr(builds, builds.MODEL)())
                found = {"status": "works"}
            elif asked["technique"] in DIAGNOSES:
                said = DIAGNOSES[asked["technique"]](module, *builds.plain())
                found = {"status": "works", "said": said}
            elif "source" in asked:
                loader = getattr(module, LOADERS[asked["technique"]])
                batches = islice(loader(asked["source"], batch_size=2, seed=0), 2)
                found = {"status": "works", "labels": [len(y) for _, y in batches]}
            else:
                found = cells.run(asked["technique"], asked["model"])
        except Exception:
            found = {"status": "TRACEBACK", "reason": traceback.format_exc()}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
