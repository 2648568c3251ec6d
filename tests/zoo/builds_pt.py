"""What parallel techniques build in each process: a function for each model, by its name.

`first_losses` is a step of two processes with a technique's functions alone, without the kit, and
`plain` a step of one process without any technique.
"""

import importlib
import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from tests.zoo.cells_pt import BATCH, plain_step, sgd, without_dropout
from tests.zoo.pt import ZOO, loss_of

MODEL = "encoder"


def __getattr__(name: str) -> Callable:
    if name not in ZOO:
        raise AttributeError(name)

    def build() -> tuple:
        model = without_dropout(ZOO[name].build())
        return model, sgd(model), loss_of(ZOO[name])

    return build


def plain() -> tuple[Callable, tuple]:
    """A plain train step of the model, and its batch."""
    step = partial(plain_step, *__getattr__(MODEL)(), None)
    return step, (ZOO[MODEL].inputs(BATCH), ZOO[MODEL].labels(BATCH))


def first_losses(technique: str, module: str) -> tuple[float, float]:
    """The loss of a first step of two processes with a technique, and of a plain one.

    The processes are forked: of several threads that ran before they would wait for all but one.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, context) as pool:
        meeting = Path(folder, "meeting").as_uri()
        ranks = [pool.submit(_rank, technique, module, meeting, rank) for rank in (0, 1)]
        together = sum(rank.result() for rank in ranks)
    model, _, loss_fn = __getattr__(MODEL)()
    x, y = ZOO[MODEL].inputs(BATCH), ZOO[MODEL].labels(BATCH)
    return together, float(loss_fn(model(x), y).detach())


def _rank(technique: str, module: str, meeting: str, rank: int) -> float:
    """Be one of two processes; return its part of the loss."""
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    technique_file, build = importlib.import_module(module), __getattr__(MODEL)
    x, y, samples = ZOO[MODEL].inputs(BATCH), ZOO[MODEL].labels(BATCH), BATCH
    if technique == "data_parallel":
        _, _, step = technique_file.processes(build)
        (((x, y), samples),) = technique_file.distribute(None, [(x, y)])
    elif technique == "model_parallel":
        _, _, step = technique_file.layer_split(build, x, cut=ZOO[MODEL].cut)
    else:
        _, _, step = technique_file.tensor_parallel(build, pairs=ZOO[MODEL].pairs)
    loss = float(step(x, y, samples))
    dist.barrier()
    return loss


def served(name: str) -> Callable:
    """What an instance of a server predicts with: arrays in and out."""
    model = ZOO[name].build().to("cpu").eval()

    @torch.no_grad()
    def run(x):
        return model(torch.from_numpy(x)).numpy()

    return run
