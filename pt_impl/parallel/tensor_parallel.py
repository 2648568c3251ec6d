"""Tensor parallel: parts of the same layers on several devices; with replicas, a hybrid.

What it changes: pairs of dense layers lose none of their arithmetic, but each device has a part of
it. The first of a pair is split by its outputs, the second by its inputs, so that a device computes
its part of what lies between them, and one sum over all devices ends the pair; going back there is
another (Megatron-LM, Shoeybi et al., 2019). In the hybrid each of several replicas is split in this
way, and takes its part of the batch. Losses and weights are those of one device with the batch.

Its twin: `tf_impl/parallel/tensor_parallel.py`.

Where the frameworks differ and why:
- PyTorch has a process a part, which talks to the others through gloo or, on GPUs, NCCL. TensorFlow
  has one process with a device for each; on a CPU these share its memory.
- A plan names modules and how to split them here (`parallelize_module`). There variables have a
  layout (DTensor), and the compiler finds out what travels.
- The hybrid shards parameters, gradients and the optimizer's state over the replicas here (FSDP2:
  ZeRO, Rajbhandari et al., 2020). There each replica holds all of its part.
- DTensor's graphs let a read of a variable overtake the assignment before it, so the optimizer runs
  eagerly there, an operation at a time.

When it helps and when it hurts: it helps where layers are wide and devices have the fastest links
there are: two sums of activations a pair and step, in which all devices wait for one another. The
other layers are computed by all. In the hybrid BatchNorm sees the part of a replica here, and the
running statistics are those of one replica; dropout draws other masks.

Run it alone: `python -m pt_impl.parallel.tensor_parallel` prints one process against two and four.
"""

import importlib
import itertools
import os
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pt_impl.kit import data, models, runtime, training
from shared.datasets import batch_order, load
from shared.specs import TASKS
from shared.weights import init_weights

_PATIENCE = timedelta(minutes=5)  # with a message from another process


@dataclass(frozen=True)
class Trained:
    """What a run leaves.

    weights: the state of the whole model by PyTorch's own names, in its layouts. losses: of each
    step, the mean over its batch. ended: when each step was over, on the clock of `time.monotonic`.
    """

    weights: dict[str, np.ndarray]
    losses: list[float]
    ended: list[float]


def train_tensor_parallel(
    build, dataset, *, pairs: str, shards: int = 2, global_batch: int, steps: int, seed: int
) -> Trained:
    """Train with pairs of dense layers split over `shards` processes.

    It is a hybrid of one replica: see `train_hybrid`.
    """
    given = {"global_batch": global_batch, "steps": steps, "seed": seed}
    return train_hybrid(build, dataset, pairs=pairs, shards=shards, replicas=1, **given)


def train_hybrid(
    build,
    dataset,
    *,
    pairs: str,
    shards: int = 2,
    replicas: int = 2,
    global_batch: int,
    steps: int,
    seed: int,
) -> Trained:
    """Train replicas of the model on their parts of each batch, each split over `shards` processes.

    build: "module:function", importable from here, which each process calls with the same random
    seeds; it gives a model, its optimizer (without state yet), and a loss that is a mean over
    samples. dataset: arrays x and y, images NHWC; `steps` batches of `global_batch` samples are
    taken in the shared order of `seed`. pairs: "first > second", separated by commas: names of
    dense layers, or patterns with *, ? and [] whose matches are paired in order. What lies between
    a pair works element by element. The processes share the caller's threads, use the loopback
    interface, and import the main module: call this below `if __name__ == "__main__":`.

    Raises, before a process is started, ValueError for names that are not there and numbers that do
    not fit, NotImplementedError for layers that can't be split. Where a process fails the others
    are ended, and torch.multiprocessing's ProcessException says why.
    """
    x, y = dataset
    if steps < 1 or not 1 <= global_batch <= len(x) == len(y):
        raise ValueError(f"{steps} steps of {global_batch} from {len(x)} samples, {len(y)} labels")
    if replicas < 1 or global_batch % replicas:
        raise ValueError(f"{replicas} replicas do not divide a batch of {global_batch}")
    processes = replicas * shards
    if runtime.device() == "cuda" and processes > torch.cuda.device_count():
        raise ValueError(f"{processes} parts need as many GPUs, not {torch.cuda.device_count()}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, _, _ = _build(build)
    plan = _plan(model, pairs, shards)
    with tempfile.TemporaryDirectory(prefix="shards-") as folder:
        for part, array in zip("xy", dataset, strict=True):
            np.save(f"{folder}/train_{part}.npy", array)
        threads = max(1, torch.get_num_threads() // processes)
        mesh = (replicas, shards)
        _start((folder, mesh, threads, build, plan, global_batch, steps, seed), processes)
        found = [torch.load(f"{folder}/{n}.pt", weights_only=True) for n in range(processes)]
    weights = {name: value.cpu().numpy() for name, value in found[0]["weights"].items()}
    ended = [max(times) for times in zip(*(each["ended"] for each in found), strict=True)]
    return Trained(weights, found[0]["losses"], ended)


def _build(build: str) -> tuple:
    module, _, name = str(build).partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f'build must be "module:function", not {build!r}: {error}') from None
    return function()


def _plan(model: nn.Module, pairs: str, shards: int) -> dict[str, str]:
    """Which layer is split by what: "outputs" or "inputs"."""
    known, plan = dict(model.named_modules()), {}
    every, own = (len(list(model.named_parameters(remove_duplicate=one))) for one in (False, True))
    if every != own:
        raise NotImplementedError("a parameter is used twice: parts would train copies of it")
    for pair in pairs.split(","):
        sides = [part.strip() for part in pair.split(">")]
        found = [[name for name in known if name and fnmatchcase(name, side)] for side in sides]
        if len(found) != 2 or not found[0] or len(found[0]) != len(found[1]):
            raise ValueError(f"pairs: {pair.strip()!r} matches {found}: two lists of equal length")
        for first, second in zip(*found, strict=True):
            for name in (first, second):
                if not isinstance(known[name], nn.Linear):
                    kind = type(known[name]).__name__
                    raise NotImplementedError(f"pairs: {name} is a {kind}, only Linear is split")
            sizes = known[first].out_features, known[second].in_features
            if sizes[0] != sizes[1] or shards < 2 or sizes[0] % shards:
                raise ValueError(
                    f"pairs: {first} > {second}: {sizes} do not go into {shards} shards"
                )
            plan |= {first: "outputs", second: "inputs"}
    return plan


def _start(given: tuple, processes: int) -> None:
    """Run the processes until all are done; one that fails, or an interruption, ends them all."""
    context = mp.spawn(_run_part, given, nprocs=processes, join=False, daemon=True)
    try:
        while not context.join():
            pass
    finally:
        for process in context.processes:
            process.kill()
            process.join()


# In each process ----------------------------------------------------------------------------------


def _run_part(rank, folder, mesh, threads, build, plan, global_batch, steps, seed) -> None:
    """Train one part and write what is left of it."""
    runtime.configure(threads=threads, seed=seed)
    _join(rank, mesh[0] * mesh[1], folder)
    x, y = load(Path(folder), "train")
    mesh = init_device_mesh(runtime.device(), mesh, mesh_dim_names=("data", "model"))
    model, step = _make_step(*_build(build), plan, mesh)
    epochs = (batch_order(len(x), global_batch, seed=seed, epoch=n) for n in itertools.count())
    losses, ended = [], []
    for rows in itertools.islice(itertools.chain.from_iterable(epochs), steps):
        own = np.split(rows, mesh["data"].size())[mesh["data"].get_local_rank()]
        losses.append(float(step(*data.to_device(x[own], y[own]))))
        ended.append(time.monotonic())
    state = model.state_dict()
    state = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()}
    torch.save({"weights": state, "losses": losses, "ended": ended}, f"{folder}/{rank}.pt")
    dist.barrier()  # none leaves while another still sends
    dist.destroy_process_group()


def _make_step(model: nn.Module, optimizer, loss_fn, plan: dict[str, str], mesh) -> tuple:
    """The model with its parts, and `step(x, y) -> loss` over the batches of all replicas."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    styles = {"outputs": ColwiseParallel, "inputs": RowwiseParallel}
    layers = {name: styles[split]() for name, split in plan.items()}
    parallelize_module(model, mesh["model"], layers)
    if (replicas := mesh["data"].size()) > 1:
        fully_shard(model, mesh=mesh["data"])
    own = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [own[names[id(parameter)]] for parameter in group["params"]]
        group["foreach"] = False  # such kernels refuse whole tensors beside parts

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss := loss.detach(), group=mesh["data"].get_group())
        return loss / replicas

    return model, step


def _join(rank: int, processes: int, folder: str) -> None:
    """Meet the others through a file, and talk over the loopback interface alone."""
    interfaces = psutil.net_if_addrs().items()
    local = [name for name, own in interfaces if any(each.address == "127.0.0.1" for each in own)]
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = local[0]
    backend = "gloo"
    if runtime.device() == "cuda":
        backend = "nccl"
        torch.cuda.set_device(rank)
    method = f"file://{folder}/meeting"
    dist.init_process_group(backend, method, _PATIENCE, world_size=processes, rank=rank)


def text_gpt_wide() -> tuple:
    """A transformer of ten million parameters, its optimizer and its loss: something to build."""
    task = TASKS["text-gpt-wide"]
    model = models.build(task.model, init_weights(task.model, seed=0))
    return model, training.make_optimizer(model, task.recipe), training.cross_entropy


def main() -> None:
    """Print steps of one process, of two with parts of each block, and of four."""
    x, build = np.random.default_rng(0).integers(0, 98, (80, 64)), f"{__spec__.name}:text_gpt_wide"
    step, alone = training.make_train_step(*text_gpt_wide()), Trained({}, [], [])
    for rows in batch_order(len(x), 8, seed=0, epoch=0):
        alone.losses.append(float(step(*data.to_device(x[rows], x[rows]))))
        alone.ended.append(time.monotonic())
    given = {"pairs": "block*.up > block*.down", "global_batch": 8, "steps": 10, "seed": 0}
    split = train_tensor_parallel(build, (x, x), **given)
    both = train_hybrid(build, (x, x), **given)
    print("text-gpt-wide, batch 8: ms a step, last loss")
    for name, found in (("one process", alone), ("tensor parallel", split), ("hybrid", both)):
        print(f"{name:16}{1e3 * np.median(np.diff(found.ended)):8.1f}{found.losses[-1]:9.4f}")


if __name__ == "__main__":
    main()
