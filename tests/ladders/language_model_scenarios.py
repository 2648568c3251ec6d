"""One framework's share of the tests of the language model; `worker.py` runs it."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from shared.specs import GPTSpec
from shared.weights import init_weights
from tests import workers

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
impl = workers.implementation(FRAMEWORK, "ladders.language_model")
program, kit = impl.ladders.language_model, impl.kit
SPEC = GPTSpec(vocabulary=20, sequence_length=12, width=32, heads=2, layers=2)
BATCH = 4
FOLDER = Path(tempfile.mkdtemp(prefix="ladder-"))
build = partial(kit.models.build, SPEC, init_weights(SPEC, seed=1))


def codes(rows, seed):
    found = np.random.default_rng(seed).integers(0, 20, (rows, 13))
    return found[:, :-1].copy(), found[:, 1:].copy()


for part, array in zip("xy", codes(18, seed=0), strict=True):
    np.save(FOLDER / f"train_{part}.npy", array)


def training(*rungs, **settings):
    return program.Training(build, FOLDER, rungs=rungs, batch_size=BATCH, seed=2, **settings)


def shared(count):
    """Batches that are the same in every process."""
    return kit.data.resident_batches([codes(BATCH, seed=10 + n) for n in range(count)])


def losses(run, count=4):
    """Of steps on shared batches; the run ends."""
    found = [float(run.step(*batch)) for batch in shared(count)]
    run.close()
    return found


def plain():
    """Losses on its own data, those of plain framework code on the same, and on shared batches."""
    found = {"epoch": [float(loss) for loss in training().epoch()]}
    x, y = (np.load(FOLDER / f"train_{part}.npy") for part in "xy")
    order = np.random.default_rng([2, 0]).permutation(18)
    rows = [np.sort(order[first : first + BATCH]) for first in range(0, 16, BATCH)]
    found["by hand"] = by_hand(kit.data.resident_batches([(x[r], y[r]) for r in rows]))
    found["few"] = len(list(training(sequences=9).epoch()))
    found["shared"] = losses(training())
    return found


def by_hand(batches):
    """Losses of AdamW, written with the framework alone."""
    model, found = build(), []
    if FRAMEWORK == "pt":
        import torch

        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01
        )
        for x, y in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found
    import tensorflow as tf

    optimizer = tf.keras.optimizers.AdamW(1e-3, beta_2=0.99, epsilon=1e-9, weight_decay=0.01)
    cost = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for x, y in batches:
        with tf.GradientTape() as tape:
            loss = cost(y, model(x, training=True))
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


def fused_optimizer():
    """The kernel of the update, and its losses."""
    run, (batch,) = training("fused_optimizer"), shared(1)
    found = {"shared": losses(training("fused_optimizer"))}
    if FRAMEWORK == "pt":
        import torch

        run.step(*batch)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run.step(*batch)
        names = {event.name for event in profile.events()}
        return found | {"fused": "aten::_fused_adamw_" in names}
    graph = run.step.get_concrete_function(*batch).graph
    kinds = {operation.type for operation in graph.get_operations()}
    return found | {"fused": "ResourceApplyAdam" in kinds}


def checkpointing():
    """Products of a step, plain and with blocks that are computed again, and losses."""
    found = {"plain": products(training()), "again": products(training("checkpointing"))}
    return found | {"shared": losses(training("checkpointing"))}


def accumulation():
    """Losses, and how many samples the model sees at once."""
    run, sizes = training("accumulation"), []
    watch(run.model, sizes)
    run.step(*shared(1)[0])
    return {"shared": losses(training("accumulation")), "sizes": sizes}


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


SCENARIOS = (
    plain,
    mixed_precision,
    fused_optimizer,
    checkpointing,
    accumulation,
    data_parallel,
    dead_replicas,
    everything,
)
