"""Trains the tests' models in stages and in parts in one framework; prints what it found as JSON.

python -m tests.parallel.model_parallel_worker pt|tf FOLDER ARRAYS.npz
"""

import importlib
import itertools
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from shared import parallel
from shared.datasets import first_batches
from tests.input.folder_worker import message, run
from tests.parallel import model_parallel_models
from tests.parallel.data_parallel_worker import forked, server

STEPS, SEED, BATCH = 10, 3, 8
CUT = {"pt": "block1", "tf": "block1.ln0"}
RUNS = {
    # Name -> model, devices, variant, settings. A setting may be a dict of each framework's own.
    "model": {
        "split": ("cnn", (1, 2), "layer_split", {"cut": "conv1"}),
        # The stage in the middle has no parameters.
        "three stages": ("mixed", (1, 3), "pipeline", {"cut": "act, down", "micro_batches": 4}),
        "1f1b": ("gpt", (1, 2), "pipeline", {"cut": CUT, "micro_batches": 4, "schedule": "1f1b"}),
        "norm": ("norm", (1, 2), "pipeline", {"cut": "conv1", "micro_batches": 2}),
    },
    "tensor": {
        "cnn": ("cnn", (1, 2), "tensor_parallel", {"pairs": "up > down"}),
        "mixed hybrid": ("mixed", (2, 2), "hybrid", {"pairs": "up > down"}),
        "gpt hybrid": ("gpt", (2, 2), "hybrid", {"pairs": "block*.up > block*.down"}),
    },
}


def dataset(name):
    """More than one epoch of it is taken. Images are NHWC."""
    random = np.random.default_rng(0)
    if name == "mixed":
        numbers = random.normal(size=(44, 6)).astype(np.float32)
        x = {"numbers": numbers, "codes": random.integers(0, 12, (44, 4))}
        return x, random.integers(0, 10, 44)
    if name == "gpt":
        codes = random.integers(0, 98, (40, 65))
        return codes[:, :-1].copy(), codes[:, 1:].copy()
    images = random.normal(size=(44, 12, 12, 3)).astype(np.float32)
    labels = random.integers(0, 10, 44)
    return images, {"digit": labels} if name == "random" else labels


def own_layout(side, name):
    """The dataset as the side's model takes it."""
    x, y = dataset(name)
    channels_first = side == "pt" and not isinstance(x, dict) and x.ndim == 4
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if channels_first else x, y


def train(side, folder, kind, model, devices, variant, settings, steps=STEPS):
    """Forks are the processes of PyTorch; TensorFlow's devices are those of this one."""
    replicas, parts = devices
    make = f"{side}_impl.parallel.{kind}_parallel:{variant}"
    build = f"{model_parallel_models.__name__}:{side}_{model}"
    run = parallel.Run(replicas, BATCH, steps, parts=parts, seed=SEED, threads=replicas * parts)
    data = own_layout(side, model)
    if side == "pt":
        return forked(side, Path(folder), make, build, data, run, settings)
    replicas_kit = importlib.import_module("tf_impl.kit.replicas")
    with parallel.training_folder(data) as samples:
        given = parallel.arguments(make, build, samples, run, settings)
        given += ["--threads=1", f"--out={folder}/result.npz"]
        replicas_kit.train(parallel.options(make).parse_args(given))
    return parallel.Result.load(Path(folder, "result.npz"))


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


def alone(side, folder, arrays):
    """One process, one device, the whole batch; and in two parts, as BatchNorm sees a pipeline."""
    data, models, training, accumulation = (
        importlib.import_module(f"{side}_impl.{name}")
        for name in ("kit.data", "kit.models", "kit.training", "train_step.gradient_accumulation")
    )

    def make_in_parts(*own):
        return accumulation.make_train_step(*own, micro_batches=2)

    ways = [(name, name, training.make_train_step) for name in ("cnn", "gpt", "norm")]
    ways += [("norm in parts", "norm", make_in_parts)]
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
    stream = parallel.batches(len(y), global_batch=BATCH, seed=SEED, whole=True)
    for rows in itertools.islice(stream, STEPS):
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


def together(side, folder, arrays):
    """Every variant, and what its optimizers were given."""
    found = {}
    for kind, name in [(kind, name) for kind, runs in RUNS.items() for name in runs]:
        model, devices, variant, settings = RUNS[kind][name]
        settings = {k: v[side] if isinstance(v, dict) else v for k, v in settings.items()}
        marks = Path(folder, f"{kind} {name}")
        marks.mkdir()
        os.environ["MARKS"] = str(marks)
        model_parallel_models.BUILT.clear()
        start = time.monotonic()
        result = train(side, folder, kind, model, devices, variant, settings)
        keep(arrays, f"{kind} {name}", result.losses, canonical(side, model, result.weights))
        found[f"{kind} {name}"] = {
            "marks": [json.loads(path.read_text()) for path in sorted(marks.iterdir())],
            "built": list(model_parallel_models.BUILT),
            "ended": list(result.ended),
            "around": [start, time.monotonic()],
        }
    return found


def refused(side, folder, arrays):
    """What settings and models that do not fit give."""
    found = {}
    for kind, (variant, good, changes) in refusals(side).items():
        technique = importlib.import_module(f"{side}_impl.parallel.{kind}_parallel")
        for name, change in changes.items():
            settings = good | change
            model = settings.pop("model", "cnn")
            x, _ = own_layout(side, "gpt" if model == "tied" and side == "pt" else "cnn")
            if kind == "model":
                settings["x"] = as_tensor(side, x[: settings.pop("batch", BATCH)])
            build = getattr(model_parallel_models, f"{side}_{model}")
            found[f"{kind} {name}"] = message(
                lambda build=build, settings=settings, technique=technique, variant=variant: (
                    getattr(technique, variant)(build, **settings)
                )
            )
    return found


def as_tensor(side, array):
    data = importlib.import_module("torch" if side == "pt" else "tensorflow")
    return data.as_tensor(array) if side == "pt" else data.constant(array)


def refusals(side):
    """Technique -> variant, settings that fit, and changes that don't."""
    stages = {
        "batch": {"batch": 6},
        "no micro_batches": {"micro_batches": 0},
        "schedule": {"schedule": "zigzag"},
        "too few": {"schedule": "1f1b", "micro_batches": 2, "cut": "conv1, up"},
        "cut": {"cut": "conv9"},
        "no cut": {"cut": ""},
        "first": {"cut": "conv0"},
        "twice": {"cut": "conv1, conv1"},
    }
    shards = {
        "shards": {"shards": 3},
        "one shard": {"shards": 1},
        "pairs": {"pairs": "nothing > down"},
        "no pair": {"pairs": "up"},
        "uneven": {"pairs": "up, down > down"},
        "order": {"pairs": "down > up"},
        "convolution": {"pairs": "conv0 > conv1"},
    }
    if side == "pt":
        stages |= {"tied": {"model": "tied", "cut": "block1"}}
        stages |= {"untraceable": {"model": "untraceable", "cut": "conv0"}}
        shards["tied"] = {"model": "tied", "pairs": "block*.up > block*.down"}
    else:
        models = {"subclassed": "conv1", "skipping": "up", "tied": "up"}
        models |= dict.fromkeys(("clipping", "scaling", "undecayed_by_variable"), "conv1")
        stages |= {name: {"model": name, "cut": cut} for name, cut in models.items()}
        stages["devices"] = {"cut": "conv0, conv1, pool, up, down"}
        shards |= {"sparse": {"model": "adam"}, "scaling": {"model": "scaling"}}
        shards |= {name: {"model": name} for name in ("bound", "muon")}
    return {
        "model": ("pipeline", {"cut": "conv1", "micro_batches": 4}, stages),
        "tensor": ("tensor_parallel", {"pairs": "up > down"}, shards),
    }


# PyTorch ------------------------------------------------------------------------------------------


def drawn(side, folder, arrays):
    """A model whose weights are drawn in each process: they are those of the seed.

    Its labels have a name, and are cut into micro-batches.
    """
    import torch

    torch.manual_seed(SEED)
    built, optimizer, loss_fn = model_parallel_models.pt_random()
    (x, y), *_ = first_batches(*dataset("cnn"), BATCH, 1, seed=SEED)
    data = importlib.import_module("pt_impl.kit.data")
    step = importlib.import_module("pt_impl.kit.training").make_train_step(
        built, optimizer, loss_fn
    )
    os.environ["MARKS"] = folder
    x, y = data.to_device(x, y)
    wanted = float(step(x, {"digit": y}))
    settings = {"cut": "up", "micro_batches": 4}
    result = train(side, folder, "model", "random", (1, 2), "pipeline", settings, steps=1)
    return {
        "losses": [wanted, *result.losses],
        "names": [sorted(result.weights), sorted(built.state_dict())],
    }


def groups(side, folder, arrays):
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


def ordered(side, folder, arrays):
    """How far two stages are from the model that they are cut of, by how it is given its inputs."""
    from unittest import mock

    import torch
    from torch import nn
    from torch.distributed.pipelining import Pipe

    from pt_impl.kit.calling import call_arguments
    from pt_impl.parallel.model_parallel import apply_model_parallel

    class Two(nn.Module):
        def __init__(self, first):
            super().__init__()
            self.first, self.head = first, nn.Linear(4, 2)

        def forward(self, query, input):
            if self.first == "query":
                return self.head(query.relu() - input.exp())
            scaled = input.exp()
            return self.head(query.relu() - scaled)

    torch.manual_seed(0)
    query, other, found = torch.randn(3, 4), torch.randn(3, 4), {}
    ways = {
        "positional": (query, other),
        "named": {"query": query, "input": other},
        "turned": {"input": other, "query": query},
    }
    for first, (way, x) in itertools.product(("query", "input"), ways.items()):
        model = Two(first)
        with (  # both stages, in this process
            mock.patch.object(Pipe, "build_stage", lambda pipe, *_: pipe),
            mock.patch.object(torch.distributed, "get_rank", return_value=0),
        ):
            pipe = apply_model_parallel(model, x, cut="head")
        arguments, named = call_arguments(model, x)
        output = pipe.get_stage_module(1)(pipe.get_stage_module(0)(*arguments, **named))
        found[f"{first} {way}"] = (output - model(query, other)).abs().max().item()
    return found


def failing(side, folder, arrays):
    """What a process that fails says, and whether it has left the others before it could."""
    import torch.distributed as dist

    kit = importlib.import_module("pt_impl.kit.replicas")
    run = parallel.Run(1, BATCH, 1)
    make, build = "pt_impl.parallel.data_parallel:compiled", f"{__spec__.name}:out_of_luck"
    with parallel.training_folder(own_layout(side, "cnn")) as data:
        given = parallel.options(make).parse_args(parallel.arguments(make, build, data, run, {}))
        said = message(lambda: kit.train(given))
    left = not dist.is_initialized()
    if not left:
        dist.destroy_process_group()
    return [said, left]


def out_of_luck():
    raise ValueError("out of luck")


def unequal(side, folder, arrays):
    """Gradients of two replicas whose rows are 2 and 3, averaged as FSDP2 does, and of all five."""
    import torch

    from pt_impl.parallel import tensor_parallel

    torch.manual_seed(SEED)
    x, y = torch.randn(5, 3), torch.randn(5, 2)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    loss_fn = torch.nn.functional.mse_loss
    losses, gradients = [], []
    for rank in range(2):
        axis = SimpleNamespace(size=lambda: 2, get_local_rank=lambda rank=rank: rank)
        mesh = FakeMesh(data=axis)
        step = tensor_parallel.make_train_step(model, optimizer, loss_fn, mesh)
        losses.append(step(x, y, len(x)).item())
        gradients.append(model.weight.grad.clone())
    whole = loss_fn(model(x), y)
    (gradient,) = torch.autograd.grad(whole, [model.weight])
    return {
        "losses": [sum(losses), whole.item()],
        "apart": float((sum(gradients) / 2 - gradient).abs().max()),
    }


class FakeMesh(dict):
    """What a step asks of a mesh of two replicas."""

    def size(self):
        return 2


# TensorFlow ---------------------------------------------------------------------------------------


def schedules(side, folder, arrays):
    """The order in which micro-batches went by the mark in each stage, in one step."""
    found = {}
    for schedule in ("gpipe", "1f1b"):
        model_parallel_models.PASSED.clear()
        settings = {"cut": "conv1", "micro_batches": 8, "schedule": schedule}
        train(side, folder, "model", "marked", (1, 2), "pipeline", settings, steps=1)
        found[schedule] = list(model_parallel_models.PASSED)
    return found


def undecayed(side, folder, arrays):
    """Means of the weights after a step whose decay leaves biases out."""
    from tf_impl.parallel import model_parallel, tensor_parallel

    build, x = model_parallel_models.tf_undecayed, as_tensor(side, np.ones((4, 6), np.float32))
    stages, _, staged = model_parallel.layer_split(build, x, cut="down")
    split, _, shared = tensor_parallel.tensor_parallel(build, pairs="up > down")
    for step in (staged, shared):
        step(x, x, 4)
    found = {"model": stages[0].arrays() | stages[1].arrays(), "tensor": split.arrays()}
    kept = {kind: {n: float(v.mean()) for n, v in own.items()} for kind, own in found.items()}
    return kept


SCENARIOS = {
    "pt": (alone, together, refused, drawn, groups, ordered, failing, unequal),
    "tf": (alone, together, refused, schedules, undecayed),
}


if __name__ == "__main__":
    side, folder, path = sys.argv[1:]
    if side == "tf":
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        four = [tf.config.LogicalDeviceConfiguration()] * 4
        tf.config.set_logical_device_configuration(cpu, four)
    else:
        for kind in RUNS:  # so that no stage has to import it
            importlib.import_module(f"pt_impl.parallel.{kind}_parallel")
        server(side)
    own = Path(folder, side)  # both sides write results of the same name at the same time
    own.mkdir()
    run(side, SCENARIOS[side], path, str(own))
