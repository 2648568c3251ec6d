"""Trains the tests' models in stages or in parts in one framework; prints what it found as JSON.

python -m tests.parallel.model_parallel_worker model|tensor pt|tf FOLDER ARRAYS.npz
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np

from shared import parallel
from shared.datasets import first_batches
from tests.input.folder_worker import children, message, run
from tests.parallel import model_parallel_models

STEPS, SEED, BATCH = 10, 3, 8
CUT = {"pt": "block1", "tf": "block1.ln0"}
RUNS = {
    # Name -> model, variant, settings. A setting may be a dict of what each framework calls it.
    "model": {
        "split": ("cnn", "layer_split", {"cut": "conv1"}),
        # The stage in the middle has no parameters.
        "three stages": ("mixed", "pipeline", {"cut": "act, down", "micro_batches": 4}),
        "1f1b": ("gpt", "pipeline", {"cut": CUT, "micro_batches": 4, "schedule": "1f1b"}),
        "norm": ("norm", "pipeline", {"cut": "conv1", "micro_batches": 2}),
    },
    "tensor": {
        "cnn": ("cnn", "tensor_parallel", {"pairs": "up > down"}),
        "mixed hybrid": ("mixed", "hybrid", {"pairs": "up > down"}),
        "gpt hybrid": ("gpt", "hybrid", {"pairs": "block*.up > block*.down"}),
    },
}
ALONE = {"model": ("cnn", "gpt", "norm"), "tensor": ("cnn", "gpt")}


def dataset(name):
    """More than one epoch of it is taken."""
    random = np.random.default_rng(0)
    if name == "mixed":
        numbers = random.normal(size=(44, 6)).astype(np.float32)
        x = {"numbers": numbers, "codes": random.integers(0, 12, (44, 4))}
        return x, random.integers(0, 10, 44)
    if name == "gpt":
        codes = random.integers(0, 98, (40, 65))
        return codes[:, :-1].copy(), codes[:, 1:].copy()
    images = random.normal(size=(44, 12, 12, 3)).astype(np.float32)
    return images, random.integers(0, 10, 44)


def train(side, kind, model, variant, **settings):
    module = importlib.import_module(f"{side}_impl.parallel.{kind}_parallel")
    given = {"global_batch": BATCH, "steps": STEPS, "seed": SEED} | settings
    build = given.pop("build", f"{model_parallel_models.__name__}:{side}_{model}")
    data = given.pop("dataset", dataset(model))
    return getattr(module, f"train_{variant}")(build, data, **given)


def canonical(side, model, weights):
    """What a run left, by the names that both frameworks share; of a foreign model by its own."""
    if model == "mixed":
        return weights
    models = importlib.import_module(f"{side}_impl.kit.models")
    built, _, _ = getattr(model_parallel_models, f"{side}_{model}")()
    if side == "pt":
        import torch

        built.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    else:
        by_path = {v.path.removeprefix(f"{built.name}/"): v for v in built.variables}
        assert by_path.keys() == weights.keys()
        for path, value in weights.items():
            by_path[path].assign(value)
    return models.export_weights(built)


def alone(side, kind, folder, arrays):
    """One process, one device, the whole batch; and in two parts, as BatchNorm sees a pipeline."""
    data, models, training, accumulation = (
        importlib.import_module(f"{side}_impl.{name}")
        for name in ("kit.data", "kit.models", "kit.training", "train_step.gradient_accumulation")
    )
    ways = [(name, name, training.make_train_step) for name in ALONE[kind]]
    if kind == "model":
        parts = accumulation.make_train_step
        ways += [("norm in parts", "norm", lambda *own: parts(*own, micro_batches=2))]
    os.environ["MARKS"] = folder
    for name, model, make in ways:
        built, optimizer, loss_fn = getattr(model_parallel_models, f"{side}_{model}")()
        if side == "tf":
            optimizer.build(built.trainable_variables)
        step = make(built, optimizer, loss_fn)
        batches = first_batches(*dataset(model), BATCH, STEPS, seed=SEED)
        losses = [float(step(*data.to_device(x, y))) for x, y in batches]
        keep(arrays, f"alone {name}", losses, models.export_weights(built))
    keep(arrays, "alone mixed", *{"pt": _pt_plain, "tf": _tf_plain}[side]())
    return {}


def mixed_batches():
    """Inputs by name and targets of each step."""
    x, y = dataset("mixed")
    order = {"global_batch": BATCH, "steps": STEPS, "seed": SEED}
    for rows in parallel.full_batches(len(y), **order):
        yield parallel.take(x, rows), y[rows]


def _pt_plain():
    """The mixed model in plain PyTorch."""
    import torch

    model, optimizer, _ = model_parallel_models.pt_mixed()
    losses = []
    for x, y in mixed_batches():
        own = {name: torch.from_numpy(part) for name, part in x.items()}
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(**own).logits, torch.from_numpy(y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.numpy() for name, value in model.state_dict().items()}


def _tf_plain():
    """The mixed model in Keras's own `fit`, whose losses are with those of the model."""
    import tensorflow as tf

    model, optimizer, _ = model_parallel_models.tf_mixed()
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, loss)
    losses = []
    for x, y in mixed_batches():
        losses.append(model.fit(x, y, batch_size=BATCH, verbose=0).history["loss"][0])
    return losses, {v.path.removeprefix(f"{model.name}/"): v.numpy() for v in model.weights}


def keep(arrays, name, losses, weights):
    arrays[f"{name}/losses"] = np.array(losses)
    for key, value in weights.items():
        arrays[f"{name}/{key}"] = value


def together(side, kind, folder, arrays):
    """Every variant, and what its optimizers were given."""
    found = {}
    for name, (model, variant, settings) in RUNS[kind].items():
        settings = {k: v[side] if isinstance(v, dict) else v for k, v in settings.items()}
        marks = Path(folder, f"{side} {kind} {name}")
        marks.mkdir()
        os.environ["MARKS"] = str(marks)
        model_parallel_models.BUILT.clear()
        start = time.monotonic()
        result = train(side, kind, model, variant, **settings)
        keep(arrays, name, result.losses, canonical(side, model, result.weights))
        found[name] = {
            "marks": [json.loads(path.read_text()) for path in sorted(marks.iterdir())],
            "built": list(model_parallel_models.BUILT),
            "ended": result.ended,
            "around": [start, time.monotonic()],
            "left": [
                child.pid for child in children() if "spawn_main" in " ".join(child.cmdline())
            ],
        }
    return found


def refused(side, kind, folder, arrays):
    """Settings and models that do not fit: what is said, and whether anything was started."""
    variant, good = {
        "model": ("pipeline", {"cut": "conv1", "micro_batches": 4}),
        "tensor": ("hybrid", {"pairs": "up > down"}),
    }[kind]
    x, y = dataset("cnn")
    here = model_parallel_models.__name__
    changes = {
        "steps": {"steps": 0},
        "batch": {"global_batch": 45},
        "labels": {"dataset": (x, y[:-1])},
        "no function": {"build": f"{here}:nothing"},
        "no module": {"build": "nowhere:cnn"},
        "no colon": {"build": here},
    }
    if kind == "model":
        changes |= {
            "micro_batches": {"micro_batches": 3},
            "no micro_batches": {"micro_batches": 0},
            "schedule": {"schedule": "zigzag"},
            "too few": {"schedule": "1f1b", "micro_batches": 2, "cut": "conv1, up"},
            "cut": {"cut": "conv9"},
            "no cut": {"cut": ""},
            "first": {"cut": "conv0"},
            "twice": {"cut": "conv1, conv1"},
        }
        models = {
            "pt": {"tied": "block1", "untraceable": "conv0"},
            "tf": {"subclassed": "conv1", "clipping": "conv1", "skipping": "up", "tied": "up"},
        }[side]
        changes |= {
            name: {"build": f"{here}:{side}_{name}", "cut": cut} for name, cut in models.items()
        }
        if side == "pt":
            changes["tied"]["dataset"] = dataset("gpt")
    else:
        changes |= {
            "replicas": {"replicas": 3},
            "shards": {"shards": 3, "replicas": 1},
            "one shard": {"shards": 1},
            "pairs": {"pairs": "nothing > down"},
            "no pair": {"pairs": "up"},
            "uneven": {"pairs": "up, down > down"},
            "order": {"pairs": "down > up"},
            "convolution": {"pairs": "conv0 > conv1"},
        }
        if side == "pt":
            changes["tied"] = {"build": f"{here}:pt_tied", "pairs": "block*.up > block*.down"}
    started = []
    target = "torch.multiprocessing.spawn" if side == "pt" else "tensorflow.function"
    with mock.patch(target, side_effect=lambda *given, **more: started.append(given)):
        found = {
            name: message(lambda change=change: train(side, kind, "cnn", variant, **good | change))
            for name, change in changes.items()
        }
        found["devices"] = message(lambda: _without_devices(side, kind, variant, good))
    return {"said": found, "started": len(started)}


def _without_devices(side, kind, variant, good):
    """More parts than there are devices: one GPU, or the four logical ones of this process."""
    many = {"cut": "conv0, conv1, pool, up, down", "micro_batches": 4}
    settings = good | (many if kind == "model" else {"shards": 8, "replicas": 1})
    if side == "tf":
        return train(side, kind, "cnn", variant, **settings)
    with (
        mock.patch("pt_impl.kit.runtime.device", return_value="cuda"),
        mock.patch("torch.cuda.device_count", return_value=1),
    ):
        return train(side, kind, "cnn", variant, **settings)


# PyTorch ------------------------------------------------------------------------------------------


def failing(side, kind, folder, arrays):
    """A process that is killed in its third step: what is said, how soon, and what is left."""
    settings = {"cut": "conv1", "micro_batches": 1} if kind == "model" else {"pairs": "up > down"}
    variant = {"model": "pipeline", "tensor": "tensor_parallel"}[kind]
    start = time.monotonic()
    build = f"{model_parallel_models.__name__}:pt_dying"
    os.environ["MARKS"] = folder
    said = message(lambda: train(side, kind, "cnn", variant, build=build, **settings))
    return {"said": said, "seconds": time.monotonic() - start, "left": trainers()}


def trainers():
    """Processes that train and are still there."""
    return [child.pid for child in children() if "spawn_main" in " ".join(child.cmdline())]


def drawn(side, kind, folder, arrays):
    """A model whose weights are drawn in each process: they are those of the seed."""
    import torch

    torch.manual_seed(SEED)
    built, optimizer, loss_fn = model_parallel_models.pt_random()
    (x, y), *_ = first_batches(*dataset("cnn"), BATCH, 1, seed=SEED)
    data = importlib.import_module("pt_impl.kit.data")
    loss = importlib.import_module("pt_impl.kit.training").make_train_step(
        built, optimizer, loss_fn
    )
    wanted = float(loss(*data.to_device(x, y)))
    os.environ["MARKS"] = folder
    before = torch.get_rng_state()
    result = train(side, kind, "random", "layer_split", cut="up", steps=1)
    return {
        "losses": [wanted, *result.losses],
        "names": [sorted(result.weights), sorted(built.state_dict())],
        "undisturbed": torch.equal(before, torch.get_rng_state()),
    }


def groups(side, kind, folder, arrays):
    """The modules that are sharded over replicas each by itself."""
    from pt_impl.parallel import tensor_parallel

    gpt = model_parallel_models.pt_gpt()[0]
    found = {"gpt": (gpt, "block*.up > block*.down"), "one pair": (gpt, "block1.up > block1.down")}
    names = {}
    for name, (model, pairs) in found.items():
        plan = tensor_parallel.plan_pairs(model, pairs=pairs)
        blocks = tensor_parallel._blocks(model, plan)
        names[name] = [own for own, module in model.named_modules() if module in blocks]
    return names


# TensorFlow ---------------------------------------------------------------------------------------


def schedules(side, kind, folder, arrays):
    """The order in which micro-batches went by the mark in each stage, in one step."""
    found = {}
    for schedule in ("gpipe", "1f1b"):
        model_parallel_models.PASSED.clear()
        settings = {"cut": "conv1", "micro_batches": 8, "schedule": schedule, "steps": 1}
        train(side, kind, "marked", "pipeline", **settings)
        found[schedule] = list(model_parallel_models.PASSED)
    return found


SCENARIOS = {
    ("model", "pt"): (alone, together, refused, failing, drawn),
    ("tensor", "pt"): (alone, together, refused, failing, groups),
    ("model", "tf"): (alone, together, refused, schedules),
    ("tensor", "tf"): (alone, together, refused),
}


if __name__ == "__main__":
    side, kind, folder, path = sys.argv[1:]
    if side == "tf":
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        four = [tf.config.LogicalDeviceConfiguration()] * 4
        tf.config.set_logical_device_configuration(cpu, four)
    run(side, SCENARIOS[kind, side], path, kind, folder)
