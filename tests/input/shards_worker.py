"""Runs the pipelines over shards of one framework and prints what it found as JSON.

    python -m tests.input.shards_worker pt|tf FOLDER IMAGES.npz

FOLDER holds sets of shards: good-tar, good-tfrecord, good-arrays and the same of truncated,
flipped and missing, in each of which one shard is damaged.
"""

import gc
import importlib
import os
import sys
import time
from pathlib import Path

from tests.input.folder_worker import children, gone, message, run, taken
from tests.input.pipelines import BATCH, FORM, SEED, shared_memory

LOADERS = {"sequential": "shards", "interleaved": "shards", "memory_mapped": "mapped_arrays"}
DAMAGES = ("truncated", "flipped", "missing")
# (damage, loader): "interleaved" opens its shards as "sequential" does.
DAMAGED = [(kind, name) for kind in DAMAGES for name in ("sequential", "memory_mapped")]
DAMAGED += [("flipped", "interleaved")]
STARTS = (1, 4, 6)  # batches: within an epoch, where one ends, and in the second


def loader(side, name, folder, kind, **settings):
    module = importlib.import_module(f"{side}_impl.input.{LOADERS[name]}")
    form = "arrays" if name == "memory_mapped" else module.FORM
    if name != "sequential":
        settings = {"workers": 2} | settings
    settings = {"batch_size": BATCH, "seed": SEED} | settings
    return getattr(module, f"{name}_loader")(f"{folder}/{kind}-{form}", **settings)


def epochs(side, folder, images):
    """Two epochs of each loader, and those that are taken up again."""
    found = {}
    for name in LOADERS:
        made = loader(side, name, folder, "good")
        found[name] = []
        for number in range(2):
            epoch, images[f"{name} {number}"] = taken(made)
            found[name].append(epoch)
        del made
        found[f"{name} again"] = taken(loader(side, name, folder, "good"))[0]
        found[f"{name} resumed"] = [
            taken(loader(side, name, folder, "good", start_batch=start))[0] for start in STARTS
        ]
        _, images[f"{name} form"] = taken(loader(side, name, folder, "good", **FORM))
    return found


def orders(side, folder, images):
    """An epoch, image by image, with buffers of several sizes; and one in any order."""
    found = {}
    for size in (1, 3, 100):
        made = loader(side, "sequential", folder, "good", shuffle_buffer=size, batch_size=1)
        found[f"buffer {size}"], images[f"buffer {size}"] = taken(made)
    made = loader(side, "interleaved", folder, "good", deterministic=False)
    found["any"], images["any"] = taken(made)
    return found


def damaged(side, folder, images):
    """Shards that are not what was written: refused, or left out, and what is said of it."""
    found = {}
    for kind, name in DAMAGED:
        start = time.monotonic()
        raised = message(lambda: list(loader(side, name, folder, kind)))  # noqa: B023
        made = loader(side, name, folder, kind, on_error="skip")
        epoch, images[f"{kind} {name}"] = taken(made)
        found[f"{kind} {name}"] = {
            "raised": raised,
            "skipped": made.skipped,
            "epoch": epoch,
            "seconds": time.monotonic() - start,
        }
        del made
    for name in LOADERS:
        made = loader(side, name, folder, "flipped", on_error="skip", start_batch=2)
        found[f"flipped {name}"]["resumed"] = taken(made)[0]
        del made
    return found


def settings(side, folder, images):
    form = "tar" if side == "pt" else "tfrecord"
    module = importlib.import_module(f"{side}_impl.input.shards")
    wrong = lambda name: module.sequential_loader(name, batch_size=1, seed=0)  # noqa: E731
    changes = {
        "on_error": {"on_error": "ignore"},
        "batch_size": {"batch_size": 0},
        "shuffle_buffer": {"shuffle_buffer": 0},
        "start_batch": {"start_batch": -1},
        "any order": {"deterministic": False, "start_batch": 1},
    }
    found = {
        name: message(lambda change=change: loader(side, "interleaved", folder, "good", **change))
        for name, change in changes.items()
    }
    found["no shards"] = message(lambda: wrong(folder))
    found["form"] = message(lambda: wrong(f"{folder}/good-arrays"))
    found["mapped form"] = message(
        lambda: importlib.import_module(f"{side}_impl.input.mapped_arrays").memory_mapped_loader(
            f"{folder}/good-{form}", batch_size=1, seed=0
        )
    )
    return found


def rates(side, folder, images):
    """What the work limit is made of, on half of the shards, and of more cores than shards."""
    form = "tar" if side == "pt" else "tfrecord"
    found, rates = {}, importlib.import_module(f"{side}_impl.kit.input_rates")
    for name, kind in (("shards", form), ("mapped_arrays", "arrays")):
        limit = getattr(rates, f"{name}_limit")
        rate = limit(f"{folder}/good-{kind}", seed=SEED, part=1, parts=2)
        found[name] = [rate() for _ in range(2)]
    many = rates.shards_limit(f"{folder}/good-{form}", seed=SEED, part=98, parts=99)
    return found | {"more cores": [many()]}


# PyTorch ------------------------------------------------------------------------------------------


def ends(side, folder, images):
    """Interrupted runs: what is left of their processes."""
    before, found = shared_memory(), {}
    for name in ("interleaved", "memory_mapped"):
        made = loader(side, name, folder, "good")
        next(iter(made))
        pids = [child.pid for child in children()]
        del made
        gc.collect()
        found[name] = [len(pids), gone(pids, 10)]
    found["shared memory"] = sorted(shared_memory() - before)
    return found


# TensorFlow ---------------------------------------------------------------------------------------


def records(side, folder, images):
    """The files as TensorFlow reads them, and as it writes the same samples."""
    import tensorflow as tf

    found, same = [], []
    for path in sorted(Path(folder, "good-tfrecord").glob("*.tfrecord")):
        theirs = f"{folder}/theirs"
        with tf.io.TFRecordWriter(theirs) as writer:
            for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
                example = tf.train.Example.FromString(record)
                values = {
                    name: list(value.bytes_list.value or value.int64_list.value)
                    for name, value in example.features.feature.items()
                }
                found.append(
                    [
                        *values["image/row"],
                        *values["image/class/label"],
                        *(len(data) for data in values["image/encoded"]),
                        sorted(values),
                    ]
                )
                writer.write(record)
        same.append(path.read_bytes() == Path(theirs).read_bytes())
        os.unlink(theirs)
    return {"found": found, "same": same}


SCENARIOS = {
    "pt": (epochs, orders, damaged, settings, rates, ends),
    "tf": (epochs, orders, damaged, settings, rates, records),
}


if __name__ == "__main__":
    side, folder, path = sys.argv[1:]
    run(side, SCENARIOS[side], path, folder)
