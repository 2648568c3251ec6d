"""Runs the input pipelines of one framework and prints what it found as JSON.

    python -m tests.input.folder_worker pt|tf GOOD_FOLDER BAD_FOLDER IMAGES.npz
    python -m tests.input.folder_worker victim GOOD_FOLDER

The second form starts PyTorch's processes, prints their ids and waits to be killed.
"""

import contextlib
import gc
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time

import numpy as np
import psutil

from tests import workers
from tests.input.pipelines import BATCH, FORM, RESUMED, SEED, ordinary_user, shared_memory

LOADERS = {
    "naive": "folder",
    "parallel": "folder",
    "uint8": "folder",
    "tuned": "tuned_folder",
    "threads": "tuned_folder",
}
PROCESSES = ("parallel", "uint8", "tuned")  # PyTorch's loaders that work in processes


def loader(side, name, folder, **settings):
    module = importlib.import_module(f"{side}_impl.input.{LOADERS[name]}")
    if name != "naive":
        settings = {"workers": 2} | settings
    settings = {"batch_size": BATCH, "seed": SEED} | settings
    return getattr(module, f"{name}_loader")(folder, **settings)


def array(x):
    """A batch of images as float32 (n, height, width, 3)."""
    found = np.asarray(x)
    return found.transpose(0, 2, 3, 1) if found.shape[1] in (1, 3) else found


def digest(x):
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16]


def taken(batches):
    """What is compared of batches: digests, labels, dtypes."""
    found = {"digests": [], "labels": [], "dtypes": set()}
    images = []
    for x, y in batches:
        x, y = array(x).copy(), np.asarray(y)
        images.append(x)
        found["digests"].append(digest(x))
        found["labels"].append(y.tolist())
        found["dtypes"] |= {str(x.dtype), str(y.dtype)}
    found["dtypes"] = sorted(found["dtypes"])
    return found, np.concatenate(images)


def message(call):
    """The exception of a call in one line, None if there is none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def children():
    found = psutil.Process().children(recursive=True)
    return [child for child in found if child.status() != psutil.STATUS_ZOMBIE]


def gone(pids, seconds):
    """Whether the processes end within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(map(alive, pids)):
            return True
        time.sleep(0.05)
    return False


def alive(pid):
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


# Scenarios of both frameworks ---------------------------------------------------------------------


def epochs(side, good, bad, images):
    """Two epochs of each loader, and one that is taken up again in the middle of the second."""
    found = {}
    for name, decoder in itertools.product(LOADERS, ("standard", "fast")):
        if (side == "tf" and name == "threads") or (
            decoder == "fast" and name in ("uint8", "parallel")
        ):
            continue
        made = loader(side, name, good, decoder=decoder)
        first, images[f"{name} {decoder}"] = taken(made)
        found[f"{name} {decoder}"] = [first]
        if decoder == "standard":
            found[f"{name} {decoder}"].append(taken(made)[0])
            settings = {} if name == "naive" else {"workers": 1}
            found[f"{name} resumed"] = taken(
                loader(side, name, good, start_batch=RESUMED, **settings)
            )[0]
        if decoder == "standard":
            _, images[f"{name} form"] = taken(loader(side, name, good, **FORM))
        del made
    return found


def errors(side, good, bad, images):
    """Files that can't be read: refused, or left out."""
    found = {}
    with ordinary_user():
        for name, decoder in itertools.product(LOADERS, ("standard", "fast")):
            if (side == "tf" and name == "threads") or (
                decoder == "fast" and name in ("uint8", "parallel")
            ):
                continue
            made = loader(side, name, bad, decoder=decoder, on_error="skip")
            one, images[f"skip {name} {decoder}"] = taken(made)
            found[f"{name} {decoder}"] = one | {"skipped": made.skipped}
            if name in ("naive", "tuned", "threads"):
                made = loader(side, name, bad, decoder=decoder)
                found[f"{name} {decoder}"]["raised"] = message(lambda made=made: list(made))
            del made
    return found


def settings(side, good, bad, images):
    found = {
        name: message(lambda change=change: loader(side, "tuned", good, **change))
        for name, change in {
            "decoder": {"decoder": "best"},
            "on_error": {"on_error": "ignore"},
            "batch_size": {"batch_size": 0},
            "start_batch": {"start_batch": -1},
            "image_size": {"image_size": 0},
            "mean": {"mean": (0.5,)},
            "std": {"std": (1.0, 0.0, 1.0)},
        }.items()
    }
    found["no folder"] = message(lambda: loader(side, "naive", f"{good}/nowhere"))
    top = os.path.dirname(good)
    found["empty"] = message(lambda: loader(side, "tuned", f"{top}/empty"))
    found["one class"] = taken(loader(side, "tuned", f"{top}/one class"))[0]["labels"]
    return found


def measured(side, good, bad, images):
    """The harness's figures of a small pipeline, with one process for the limit."""
    from dataclasses import replace
    from unittest import mock

    from bench.harness.plan import Work
    from bench.probes import pipelines
    from shared.specs import TASKS
    from shared.weights import init_weights

    impl = workers.implementation(side, "input.tuned_folder")
    task = TASKS["photos"]
    task = replace(task, dataset=replace(task.dataset, train_size=13))
    weights = init_weights(task.model, 0)
    work = Work(task, "tuned", {}, 1, weights, data=good, repetitions=2)
    make = lambda: loader(side, "tuned", good, batch_size=1, workers=1)  # noqa: E731
    with mock.patch.object(pipelines, "usable_threads", return_value=1):
        figures = pipelines.measure(
            *(impl, work, make), technique="folder", source=good, decoder="standard"
        )
        # The same in both frameworks, and TensorFlow takes long to import.
        ended = message(lambda: killed_limit(pipelines, impl, good)) if side == "pt" else None
    lost = message(lambda: pipelines.Pipeline(make(), images=14).epochs())
    return {"figures": figures, "lost": lost, "ended": ended, "left": len(limits())}


def killed_limit(pipelines, impl, good):
    with pipelines.work_limit(*(impl.__name__, "folder", good), decoder="standard") as limit:
        limit()
        for process in limits():
            process.kill()
        limit()


def limits():
    """The processes of a work limit, forks or fresh ones: no loader is left that has any."""
    gc.collect()
    return multiprocessing.active_children()


# PyTorch ------------------------------------------------------------------------------------------


def ends(side, good, bad, images):
    """Interrupted runs: what is left of their processes."""
    before, found, torn = shared_memory(), {}, []
    for name in PROCESSES:
        made = loader(side, name, good)
        next(iter(made))
        pids = [child.pid for child in children()]
        del made
        gc.collect()
        found[f"{name} left"] = [len(pids), gone(pids, 10)]

        made = loader(side, name, good)
        failed = message(lambda made=made: [1 / 0 for _ in made])
        pids = [child.pid for child in children()]
        del made
        gc.collect()
        found[f"{name} failed"] = [failed, gone(pids, 10)]

        made, pids, start = loader(side, name, good), [], time.monotonic()
        killed = message(lambda made=made, pids=pids: kill_one(made, pids))
        del made  # torch raises the error at every signal of a child until then
        gc.collect()
        found[f"{name} killed"] = [killed, time.monotonic() - start, gone(pids, 10)]
        # torch makes a file and unlinks it in the next line: one kill of twenty comes in between,
        # and nobody else knows of that one.
        torn += [f"torch_{pid}_" for pid in pids[:1]]
    found["broken"] = [message(lambda error=error: list(broken(error))) for error in BROKEN]
    left = sorted(shared_memory() - before)
    found["shared memory"] = [file for file in left if not file.startswith(tuple(torn))]
    return found


BROKEN = (EOFError, ConnectionResetError, ConnectionRefusedError)  # each seen after a kill


def broken(error):
    """A loader whose worker ends as it hands over its second batch."""
    import torch

    from pt_impl.kit.photos import PhotoLoader

    def batches():
        yield torch.zeros(1), [0], []
        raise error

    return PhotoLoader(batches(), "raise")


def kill_one(made, pids):
    """Kill a worker in the middle of an epoch, and go on, epoch after epoch."""
    for _ in range(20):
        for number, _ in enumerate(made):
            if number == 1 and not pids:
                pids += [child.pid for child in children()]
                os.kill(pids[0], signal.SIGKILL)


def wait_until_idle(pause=0.005, limit=10):
    """Return when no worker has anything left to write: all of them sleep, look after look."""
    deadline, looks = time.monotonic() + limit, 0
    while looks < 5:
        if time.monotonic() > deadline:
            raise TimeoutError(f"workers were still busy after {limit} s")
        time.sleep(pause)
        idle = all(child.status() == psutil.STATUS_SLEEPING for child in children())
        looks = looks + 1 if idle else 0


def lent(side, good, bad, images):
    """Batches of the ring: how long they are valid, and what guards them."""
    found, made = {}, loader(side, "tuned", good, batch_size=1)
    previous, same = None, []
    for x, _ in made:
        wait_until_idle()  # so that a worker that would write to it has done so
        if previous is not None:
            same.append(digest(previous[0]) == previous[1])
        previous = (x, digest(x))
    found["valid"] = same
    del x, previous

    def keep_all(part):
        kept = []
        for x, _ in made:
            kept.append(part(x))

    found["kept"] = message(lambda: keep_all(lambda x: x))
    found["kept a part"] = message(lambda: keep_all(lambda x: x[0, 1, 5]))
    found["kept a copy"] = message(lambda: keep_all(lambda x: x.clone()))

    # Left in the middle, with its last batch held until the next epoch has begun.
    for number, (x, _) in enumerate(made):
        held = digest(x)
        if number == 5:
            break
    epoch = 5  # four that went before, and the one that was left
    batches = iter(made)
    first, _ = next(batches)
    wait_until_idle()
    found["held"] = held == digest(x)
    found["after a break"] = [digest(array(first))]
    del x, first
    found["after a break"] += taken(batches)[0]["digests"]
    fresh = loader(side, "threads", good, batch_size=1, start_batch=epoch * 13)
    found["expected"] = taken(fresh)[0]["digests"]
    return found


def torchvision(side, good, bad, images):
    """Crops as torchvision draws them itself, of images of two sizes."""
    import torch
    from torchvision.transforms import RandomResizedCrop

    torch.manual_seed(0)
    found = {}
    for height, width in ((200, 300), (60, 400)):
        image = torch.zeros(3, height, width)
        draw = RandomResizedCrop.get_params
        found[f"{height} {width}"] = [draw(image, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(3000)]
    return found


# TensorFlow ---------------------------------------------------------------------------------------


def boxes(side, good, bad, images):
    """The crops that the graph computes, beside those of NumPy."""
    import tensorflow as tf

    from shared.epochs import crop_box, draw
    from tf_impl.kit.photos import graph_crop_box

    random = np.random.default_rng(0)
    sizes = random.integers(1, 500, (400, 2))
    sizes[:50, 0] = random.integers(1, 12, 50)  # so flat that no try fits
    sizes[50:100, 1] = random.integers(1, 12, 50)
    numbers, differing, centred = draw(400, seed=3, epoch=1), [], 0
    graph = tf.function(graph_crop_box)
    for (height, width), drawn in zip(sizes, numbers, strict=True):
        arguments = (tf.constant(height, tf.int32), tf.constant(width, tf.int32))
        ours = graph(*arguments, tf.cast(drawn, tf.float64)).numpy().tolist()
        theirs = list(crop_box(int(height), int(width), drawn.tolist()))
        centred += ours[:2] == [(int(height) - ours[2]) // 2, (int(width) - ours[3]) // 2]
        if ours != theirs:
            differing.append([height.item(), width.item(), ours, theirs])
    return {"differing": differing, "centred": centred}


SCENARIOS = {
    "pt": (epochs, errors, settings, ends, lent, torchvision, measured),
    "tf": (epochs, errors, settings, boxes, measured),
}


def run(side, scenarios, path, *arguments):
    """Print what each scenario found, and write the images that they kept to `path`."""
    kit = importlib.import_module(f"{side}_impl.kit.runtime")
    kit.configure(threads=1, seed=0)
    images = {}
    workers.report(scenarios, side, *arguments, images)
    np.savez(path, **images)


def victim(good):
    loaders = [loader("pt", name, good) for name in PROCESSES]
    held = [next(iter(made)) for made in loaders]
    print(json.dumps([child.pid for child in children()]), flush=True)
    sys.stdin.read()  # until the test ends or kills this process
    return held


if __name__ == "__main__":
    if sys.argv[1] == "victim":
        victim(sys.argv[2])
    else:
        side, good, bad, path = sys.argv[1:]
        run(side, SCENARIOS[side], path, good, bad)
