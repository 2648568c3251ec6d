"""One framework's share of the tests of the language model; `worker.py` runs it."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from shared import datasets
from shared.specs import NO_LABEL, GPTSpec
from shared.weights import init_weights
from tests import workers

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
impl = workers.implementation(FRAMEWORK, "ladders.language_model")
program, kit = impl.ladders.language_model, impl.kit
# Equally large: in one process TensorFlow's replicas of a second strategy fail on other shapes.
SPECS = {"gpt": GPTSpec(datasets.HIDDEN + 1, sequence_length=12, width=32, heads=2, layers=2)}
SPECS["bert"] = replace(SPECS["gpt"], causal=False)
BATCH = 4
FOLDER = Path(tempfile.mkdtemp(prefix="ladder-"))
BUILD = {
    name: partial(kit.models.build, spec, init_weights(spec, seed=1))
    for name, spec in SPECS.items()
}


def codes(rows, seed, model="gpt"):
    """What a model sees, and its labels."""
    random = np.random.default_rng(seed)
    if model == "bert":
        return datasets.hide(random.integers(0, datasets.HIDDEN, (rows, 12)), random)
    found = random.integers(0, 20, (rows, 13))
    return found[:, :-1].copy(), found[:, 1:].copy()


for name in SPECS:
    (FOLDER / name).mkdir()
    for part, array in zip("xy", codes(18, seed=0, model=name), strict=True):
        np.save(FOLDER / name / f"train_{part}.npy", array)


def training(*rungs, model="gpt", **settings):
    settings |= {"rungs": rungs, "batch_size": BATCH, "seed": 2}
    return program.Training(BUILD[model], FOLDER / model, **settings)


def shared(count, model="gpt"):
    """Batches that are the same in every process."""
    batches = [codes(BATCH, seed=10 + n, model=model) for n in range(count)]
    return kit.data.resident_batches(batches)


def losses(run, model="gpt"):
    """Of steps on shared batches; the run ends."""
    found = [float(run.step(*batch)) for batch in shared(4, model)]
    run.close()
    return found


def plain(name="gpt"):
    """Losses on shared batches, then of nine rows of its own; of plain framework code on both."""
    run = training(model=name, sequences=9)
    found = {"shared": [float(run.step(*batch)) for batch in shared(4, name)]}
    found["epoch"] = [float(loss) for loss in run.epoch()]
    run.close()
    x, y = (np.load(FOLDER / name / f"train_{part}.npy") for part in "xy")
    order = np.random.default_rng([2, 0]).permutation(9)
    rows = [np.sort(order[first : first + BATCH]) for first in (0, BATCH)]
    own = kit.data.resident_batches([(x[r], y[r]) for r in rows])
    found["by hand"] = by_hand(name, [*shared(4, name), *own])
    return found


def by_hand(name, batches):
    """Losses of AdamW at the places that have a label, written with the framework alone."""
    model, found = BUILD[name](), []
    if FRAMEWORK == "pt":
        import torch

        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01
        )
        for x, y in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x)[y >= 0], y[y >= 0])
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found
    import tensorflow as tf

    optimizer = tf.keras.optimizers.AdamW(1e-3, beta_2=0.99, epsilon=1e-9, weight_decay=0.01)
    cost = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for x, y in batches:
        with tf.GradientTape() as tape:
            loss = cost(y[y >= 0], model(x, training=True)[y >= 0])
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        found.append(float(loss))
    return found


def products(run):
    """How many matrix products a step has, by dtype."""
    return kit.runtime.operator_dtypes(run.step, *shared(1)[0])["matmul"]


def mixed_precision():
    run = training("mixed_precision")
    return {"step": products(run), "shared": losses(run)}


def is_fused(run, batch):
    """Whether the update has a kernel of its own."""
    if FRAMEWORK == "pt":
        import torch

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run.step(*batch)
        return "aten::_fused_adamw_" in {event.name for event in profile.events()}
    graph = run.step.get_concrete_function(*batch).graph
    return "ResourceApplyAdam" in {operation.type for operation in graph.get_operations()}


def checkpointing():
    """Products of a step whose blocks are computed again, and losses."""
    run = training("checkpointing")
    return {"shared": losses(run), "again": products(run)}


def watch(model, sizes):
    """Note the batch size of each call of the model, or of each trace of one."""
    if FRAMEWORK == "pt":
        model.register_forward_pre_hook(lambda module, x: sizes.append(len(x[0])))
        return
    layer = model.get_layer("ln")
    call = layer.call

    def noted(x, *rest, **named):
        sizes.append(x.shape[0])
        return call(x, *rest, **named)

    layer.call = noted


def data_parallel():
    """Losses of two replicas, how many there are, and what is left of them."""
    run = training("data_parallel")
    found = {"replicas": replicas(run)}
    found["shared"] = [float(run.step(*batch)) for batch in shared(4)]
    found["epoch"] = len(list(run.epoch()))
    found["refused"] = refused(lambda: run.step(*(part[:3] for part in shared(1)[0])))
    run.close()
    found["left"] = len(multiprocessing.active_children())
    found["odd"] = refused(lambda: training("data_parallel", replicas=3))
    return found


def replicas(run):
    if FRAMEWORK == "pt":
        import torch.distributed as dist

        return [dist.get_world_size(), len(multiprocessing.active_children()) == 1]
    return [run.model.distribute_strategy.num_replicas_in_sync, True]


def refused(what):
    try:
        what()
    except ValueError as error:
        return str(error)


def dead_replicas():
    """What is said where replicas end at once, as they do in a script that they can't import."""
    if FRAMEWORK == "tf":
        return None  # one process has them all
    begin, program._replica = program._replica, len
    try:
        training("data_parallel")
    except RuntimeError as error:
        return str(error)
    finally:
        program._replica = begin


def failing_model():
    """What is left of a replica, the only one, where no model can be made."""
    if FRAMEWORK == "tf":
        return None  # one process has them all
    import torch.distributed as dist

    def build():
        raise ValueError("no model")

    settings = {"rungs": ("data_parallel",), "batch_size": BATCH, "replicas": 1}
    said = refused(lambda: program.Training(build, FOLDER / "gpt", **settings))
    return {"said": said, "group": dist.is_initialized()}


def everything():
    """All rungs at once, to the model in use."""
    run, (batch,) = training(*program.RUNGS), shared(1)
    found = {"shared": [float(run.step(*each)) for each in shared(4)]}
    assert list(run.finish(batch[0])) == []
    predict = run.deploy(FOLDER / "deployed", batch[0])
    found["predicts"] = list(np.asarray(predict(batch[0])).shape)
    found["bytes"] = (FOLDER / "deployed").stat().st_size
    run.close()
    return found


def masked():
    """As plain, of a BERT; what it sees and learns of; and of rungs that change no loss.

    That is how many samples the model sees at once, and whether its update is fused.
    """
    found = plain("bert")
    rungs = [rung for rung in program.RUNGS[1:] if rung != "data_parallel"]
    run, sizes = training(*rungs, model="bert"), []
    watch(run.model, sizes)
    found |= {"rungs": losses(run, "bert"), "sizes": sizes}
    found["fused"] = is_fused(run, shared(1, "bert")[0])
    (x, y), model = codes(BATCH, seed=3, model="bert"), BUILD["bert"]()
    predict = kit.training.make_predict(model)
    other = x.copy()
    other[:, -1] = (other[:, -1] + 1) % datasets.HIDDEN
    logits, changed = (np.array(predict(kit.data.to_device(z, y)[0])) for z in (x, other))
    found["changed"] = np.abs(logits - changed).max((0, 2))
    found["learned"] = np.abs(own_gradient(logits, y)).sum(-1) > 0
    found["asked"] = y != NO_LABEL
    return found


def own_gradient(logits, y):
    """Of the program's loss to its logits."""
    if FRAMEWORK == "pt":
        import torch

        given = torch.tensor(logits, requires_grad=True)
        program._cross_entropy(given, torch.tensor(y)).backward()
        return given.grad.numpy()
    import tensorflow as tf

    given = tf.constant(logits)
    with tf.GradientTape() as tape:
        tape.watch(given)
        loss = program._cross_entropy(given, tf.constant(y))
    return tape.gradient(loss, given).numpy()


SCENARIOS = (
    plain,
    masked,
    mixed_precision,
    checkpointing,
    data_parallel,
    dead_replicas,
    failing_model,
    everything,
)
