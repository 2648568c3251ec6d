"""The process in which copies of technique files run: `python -m tests.zoo.copied pt` reads them.

A line of standard input is JSON: the folder that holds a copy, its technique, and what it is tried
on. The project's own packages are found in that folder and nowhere else.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from importlib.machinery import PathFinder
from itertools import islice

OURS = ("pt_impl", "tf_impl", "shared")
LOADERS = {
    "folder": "naive_loader",
    "tuned_folder": "tuned_loader",
    "shards": "sequential_loader",
    "mapped_arrays": "memory_mapped_loader",
    "in_memory": "naive_loader",
}


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
    framework = sys.argv[1]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the frameworks print is no answer
    cells = importlib.import_module(f"tests.zoo.cells_{framework}")
    finder = Only()
    sys.meta_path.insert(0, finder)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            module = load(finder, asked["folder"], asked["module"])
            found = {"status": "imported", "file": module.__file__}
            if "source" in asked:
                loader = getattr(module, LOADERS[asked["technique"]])
                batches = islice(loader(asked["source"], batch_size=2, seed=0), 2)
                found = {"status": "works", "labels": [len(y) for _, y in batches]}
            elif "model" in asked:
                found = cells.run(asked["technique"], asked["model"])
        except Exception:
            found = {"status": "TRACEBACK", "reason": traceback.format_exc()}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
