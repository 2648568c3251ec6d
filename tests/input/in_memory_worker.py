"""Runs the in-memory pipelines of one framework and prints what it found as JSON.

    python -m tests.input.in_memory_worker pt|tf FOLDER IMAGES.npz

FOLDER holds `data` (train_x.npy, train_y.npy) and `other`, data of the same form.
"""

import gc
import importlib
import sys
from pathlib import Path

from tests.input.folder_worker import children, gone, message, run, taken
from tests.input.pipelines import shared_memory

BATCH, SEED = 8, 3
LOADERS = ("naive", "vectorised", "parallel", "memory_cached", "disk_cached")
ONE_SIDED = {"pt": (), "tf": ("snapshot",)}
STARTS = (2, 5, 8)  # batches, within the first three epochs of four


def loader(side, name, folder, data="data", **settings):
    if name == "parallel":
        settings = {"workers": 2} | settings
    if name in ("disk_cached", "snapshot"):
        kind = "cache" if name == "disk_cached" else name
        settings = {"cache": f"{folder}/{kind}-{side}"} | settings
    settings = {"batch_size": BATCH, "seed": SEED} | settings
    module = importlib.import_module(f"{side}_impl.input.in_memory")
    return getattr(module, f"{name}_loader")(f"{folder}/{data}", **settings)


def epochs(side, folder, images):
    """Two epochs of each loader, and those that are taken up again."""
    found = {}
    for name in (*LOADERS, *ONE_SIDED[side]):
        made = loader(side, name, folder)
        found[name] = []
        for number in range(2):
            epoch, images[f"{name} {number}"] = taken(made)
            found[name].append(epoch)
        found[name].append(taken(made)[0])
        found[f"{name} resumed"] = [
            taken(loader(side, name, folder, start_batch=start))[0] for start in STARTS
        ]
    return found


def caches(side, folder, images):
    """What is on disk, that it is used, and that other data has a cache of its own."""
    before = files(folder, side)
    epoch = taken(loader(side, "disk_cached", folder))[0]
    again = files(folder, side)
    _, images["other"] = taken(loader(side, "disk_cached", folder, "other"))
    return {
        "before": before,
        "again": again,
        "digests": epoch["digests"],
        "after": sorted(files(folder, side)),
    }


def files(folder, side):
    found = Path(folder, f"cache-{side}").iterdir()
    return {path.name: path.stat().st_mtime_ns for path in found}


def snapshots(side, folder, images):
    """As `caches`, of what TensorFlow names itself; and one that was left while it was written."""

    def found():
        files = {path: path.stat() for path in Path(folder, f"snapshot-{side}").rglob("*")}
        # Those that hold images, of 4 KiB each, and no metadata.
        return {str(path): at.st_mtime_ns for path, at in files.items() if at.st_size > 100_000}

    before = found()
    epoch = taken(loader(side, "snapshot", folder))[0]
    again = found()
    _, images["other snapshot"] = taken(loader(side, "snapshot", folder, "other"))
    cut = {"cache": f"{folder}/cut"}
    next(iter(loader(side, "snapshot", folder, **cut)))
    return {
        "before": before,
        "again": again,
        "after": sorted(found()),
        "digests": epoch["digests"],
        "after a cut": taken(loader(side, "snapshot", folder, **cut))[0]["digests"],
    }


def work(side, folder, images):
    """How many times images are standardised in three epochs, by each loader."""
    module = importlib.import_module(f"{side}_impl.input.in_memory")
    real, counts = module.standardise, {}
    for name in ("vectorised", "memory_cached", *ONE_SIDED[side]):
        counted = []
        module.standardise = counting(side, real, counted)
        try:
            settings = {"cache": f"{folder}/counted"} if name == "snapshot" else {}
            made = loader(side, name, folder, **settings)
            for _ in range(3):
                for _ in made:
                    pass
        finally:
            module.standardise = real
        counts[name] = sum(counted)
    return counts


def counting(side, real, counted):
    """`real`, which also says of how many images; in a graph, whenever it runs."""
    if side == "pt":
        return lambda x: (counted.append(len(x)), real(x))[1]
    import tensorflow as tf

    def standardise(x):
        note = tf.py_function(lambda n: counted.append(int(n)), [tf.shape(x)[0]], [])
        with tf.control_dependencies([note] if note is not None else []):
            return real(tf.identity(x))

    return standardise


def settings(side, folder, images):
    changes = {"batch_size": {"batch_size": 0}, "start_batch": {"start_batch": -1}}
    found = {
        name: message(lambda change=change: loader(side, "naive", folder, **change))
        for name, change in changes.items()
    }
    found["no folder"] = message(lambda: loader(side, "naive", folder, "nowhere"))
    found["bytes"] = message(lambda: loader(side, "naive", folder, "bytes"))
    found["short"] = message(lambda: loader(side, "naive", folder, "short"))
    return found


def rates(side, folder, images):
    """The best of five: a part is so few samples that any other process halves a rate."""
    limit = importlib.import_module(f"{side}_impl.kit.input_rates").in_memory_limit
    given = {"seed": SEED, "part": 1, "parts": 2, "batch_size": BATCH}
    found = {}
    for cached in (False, True):
        rate = limit(f"{folder}/data", **given, cached=cached)
        found[str(cached)] = max(rate() for _ in range(5))
    rate = limit(f"{folder}/data", **given | {"part": 98, "parts": 99})
    found["more cores than batches"] = max(rate() for _ in range(5))
    rate = limit(f"{folder}/data", **given | {"batch_size": 999_999})
    return found | {"fewer samples than a batch": max(rate() for _ in range(5))}


def ends(side, folder, images):
    """What is left of the processes of a loader that was left."""
    before = shared_memory()
    made = loader(side, "parallel", folder)
    next(iter(made))
    pids = [child.pid for child in children()]
    del made
    gc.collect()
    left = gone(pids, 10)
    return {"ended": [len(pids), left], "memory": sorted(shared_memory() - before)}


SCENARIOS = {
    "pt": (epochs, caches, work, settings, rates, ends),
    "tf": (epochs, caches, snapshots, work, settings, rates),
}


if __name__ == "__main__":
    side, folder, path = sys.argv[1:]
    run(side, SCENARIOS[side], path, folder)
