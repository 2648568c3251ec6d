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

Copy with it: `pt_impl/kit/data.py`, `pt_impl/kit/models.py`, `pt_impl/kit/replicas.py`,
`pt_impl/kit/runtime.py`, `pt_impl/kit/training.py`, `shared/atomic.py`, `shared/datasets.py`,
`shared/parallel.py`, `shared/photos.py`, `shared/specs.py`, `shared/weights.py`.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pt_impl.kit import data, models, runtime, training
from pt_impl.kit.replicas import Part, outputs, train_parts
from shared import parallel
from shared.datasets import batch_order
from shared.specs import TASKS
from shared.weights import init_weights


def apply_tensor_parallel(model, mesh, plan):
    """Split layers over the dimension "model" of a mesh of devices, in place, and return the model.

    plan: name of a layer -> "outputs" or "inputs", by which it is split, as `plan_pairs` makes it.
    Where "data", the mesh's other dimension, is larger than 1, replicas share what is left: FSDP2,
    a group for each block that holds one pair. Make the optimizer afterwards, with `foreach=False`:
    such kernels refuse whole tensors beside parts.
    """
    styles = {"outputs": ColwiseParallel, "inputs": RowwiseParallel}
    layers = {name: styles[split]() for name, split in plan.items()}
    parallelize_module(model, mesh["model"], layers)
    if mesh["data"].size() > 1:
        for block in [*_blocks(model, plan), model]:
            fully_shard(block, mesh=mesh["data"])
    return model


def plan_pairs(model, *, pairs: str, shards: int = 2):
    """The plan that splits pairs of dense layers: the first by outputs, the second by inputs.

    pairs: "first > second", separated by commas: names of dense layers, or patterns with *, ? and
    [] whose matches are paired in order. What lies between a pair works element by element.

    Raises ValueError for names that are not there and sizes that do not divide, NotImplementedError
    for layers that can't be split.
    """
    known, plan = dict(model.named_modules()), {}
    every, own = (len(list(model.named_parameters(remove_duplicate=one))) for one in (False, True))
    if every != own:
        raise NotImplementedError("a parameter is used twice: parts would train copies of it")
    for first, second in parallel.match_pairs(pairs, [name for name in known if name]):
        for name in (first, second):
            if not isinstance(known[name], nn.Linear):
                kind = type(known[name]).__name__
                raise NotImplementedError(f"pairs: {name} is a {kind}, only Linear is split")
        sizes = known[first].out_features, known[second].in_features
        parallel.check_pair(first, second, sizes, shards)
        plan |= {first: "outputs", second: "inputs"}
    return plan


def make_train_step(model, optimizer, loss_fn, mesh):
    """Make `step(x, y) -> loss`, which takes the batch of all replicas, each its part of it."""
    replicas, replica = mesh["data"].size(), mesh["data"].get_local_rank()

    def step(x, y):
        rows = parallel.shard(range(parallel.size(x)), replicas=replicas, replica=replica)
        own_x, own_y = (parallel.take(whole, slice(rows.start, rows.stop)) for whole in (x, y))
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(outputs(model, own_x), own_y)
        loss.backward()  # FSDP2 takes the mean over the replicas
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss, group=mesh["data"].get_group())
        return loss / replicas

    return step


def train_tensor_parallel(
    build, dataset, *, pairs: str, shards: int = 2, global_batch: int, steps: int, seed: int
) -> parallel.Trained:
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
) -> parallel.Trained:
    """Train replicas of the model on their parts of each batch, each split over `shards` processes.

    build, dataset and what they must be: see `train_parts` of `pt_impl/kit/replicas.py`. pairs: as
    in `plan_pairs`.

    Raises, before a process is started, ValueError for names that are not there and numbers that do
    not fit, NotImplementedError for layers that can't be split. Where a process fails the others
    are ended, and torch.multiprocessing's ProcessException says why.
    """
    parallel.check_replicas(replicas, global_batch)
    return train_parts(
        build,
        dataset,
        _Parts(pairs, shards, replicas),
        parts=replicas * shards,
        global_batch=global_batch,
        steps=steps,
        seed=seed,
    )


@dataclass(frozen=True)
class _Parts:
    """What makes the part that a process trains."""

    pairs: str
    shards: int
    replicas: int

    def check(self, model: nn.Module, x) -> None:
        """Raise what keeps the model from being split."""
        plan_pairs(model, pairs=self.pairs, shards=self.shards)

    def __call__(self, model: nn.Module, optimizer, loss_fn, x) -> Part:
        """The part of this process."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = [[names[id(own)] for own in g["params"]] for g in optimizer.param_groups]
        shape = (self.replicas, self.shards)
        mesh = init_device_mesh(runtime.device(), shape, mesh_dim_names=("data", "model"))
        plan = plan_pairs(model, pairs=self.pairs, shards=self.shards)
        apply_tensor_parallel(model, mesh, plan)
        parts = dict(model.named_parameters())  # other objects, unknown to the optimizer yet
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [parts[name] for name in own]
            group["foreach"] = False
        # Replicas draw other dropout masks; the shards of one compute the same, and draw the same.
        torch.manual_seed(torch.initial_seed() + mesh["data"].get_local_rank())

        def weights():
            state = model.state_dict()
            return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()}

        return Part(make_train_step(model, optimizer, loss_fn, mesh), weights)


def _blocks(model: nn.Module, plan: dict[str, str]) -> list[nn.Module]:
    """For each pair the largest module that holds it and no layer of another pair."""
    named, layers = dict(model.named_modules()), list(plan)
    blocks = []
    for pair in zip(layers[::2], layers[1::2], strict=True):
        holding = [
            name
            for name in named
            if name and {layer for layer in layers if layer.startswith(f"{name}.")} == set(pair)
        ]
        blocks += holding[:1]  # outer modules come first
    return [named[name] for name in blocks if not isinstance(named[name], nn.ModuleList)]


def text_gpt_wide() -> tuple:
    """A transformer of ten million parameters, its optimizer and its loss: something to build."""
    task = TASKS["text-gpt-wide"]
    model = models.build(task.model, init_weights(task.model, seed=0))
    return model, training.make_optimizer(model, task.recipe), training.cross_entropy


def main() -> None:
    """Print steps of one process, of two with parts of each block, and of four."""
    x, build = np.random.default_rng(0).integers(0, 98, (80, 64)), f"{__spec__.name}:text_gpt_wide"
    step, alone = training.make_train_step(*text_gpt_wide()), parallel.Trained({}, [], [])
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
