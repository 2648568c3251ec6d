"""Two replicas: what a step exchanges, and its gradients, under DDP and in shards.

`python -m tests.train_step.pt_replicas pt STORE` forks the second one, meets it at the file STORE,
on the loopback interface, and prints one line of JSON: scenario -> what was found.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from pt_impl.train_step import finite_guard, gradient_accumulation, gradient_clipping

WORLD, ROWS = 2, 5  # of each replica; three parts of 1, 2 and 2 rows
squares = nn.MSELoss()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def batch(replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(replica + 1)
    return tuple(torch.randn(ROWS, width, generator=generator) for width in (4, 2))


def whole() -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.cat(parts) for parts in zip(*map(batch, range(WORLD)), strict=True))


def plain_gradients() -> list:
    """Of the whole batch in one process."""
    alone = model()
    x, y = whole()
    squares(alone(x), y).backward()
    return [parameter.grad.flatten().tolist() for parameter in alone.parameters()]


def gradients(replicated: nn.Module) -> list:
    found = []
    for parameter in replicated.parameters():
        gradient = parameter.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        found.append(gradient.flatten().tolist())
    return found


def ddp(micro_batches: int | None) -> dict:
    """Buckets sent in a step, and the gradients; None runs PyTorch's own step."""
    replicated, sent = DistributedDataParallel(model()), []

    def hook(state, bucket):
        sent.append(bucket.buffer().numel())
        return allreduce_hook(state, bucket)

    replicated.register_comm_hook(None, hook)
    run(replicated, micro_batches)
    found, first = gradients(replicated), len(sent)
    run(replicated, None)  # a plain pass afterwards exchanges as before
    return {"sent": [first, len(sent) - first], "gradients": found}


def shards(micro_batches: int | None) -> dict:
    """Collectives of a step that reduce, of a root and a block in shards, and the gradients."""
    replicated = model()
    fully_shard(replicated[0])
    fully_shard(replicated)
    reduced, found = [], []
    for parts in (micro_batches, None):
        with CommDebugMode() as counted:
            run(replicated, parts)
        found.append(gradients(replicated))
        names = {str(name): n for name, n in counted.get_comm_counts().items()}
        reduced.append(sum(n for name, n in names.items() if "reduce" in name))
    return {"sent": reduced, "gradients": found[0]}


def run(replicated: nn.Module, micro_batches: int | None) -> None:
    x, y = batch(dist.get_rank())
    optimizer = torch.optim.SGD(replicated.parameters(), lr=0.0)
    if micro_batches is None:
        optimizer.zero_grad()
        squares(replicated(x), y).backward()
        return
    step = gradient_accumulation.make_train_step(
        replicated, optimizer, squares, micro_batches=micro_batches
    )
    step(x, y)


def clipped() -> dict:
    """The norm that clipping measures and the weights after it, in shards and in one process.

    Afterwards the guard takes a step, too, and finds nothing.
    """
    found = {}
    for name in ("shards", "plain"):
        net, bound = model(), 0.1
        if name == "shards":
            fully_shard(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        step = gradient_clipping.make_train_step(net, optimizer, squares, max_norm=bound)
        own = batch(dist.get_rank()) if name == "shards" else whole()
        step(*own)
        weights = [p.full_tensor() if name == "shards" else p for p in net.parameters()]
        found[name] = {
            "norm": step.gradient_norm(),
            "weights": [weight.flatten().tolist() for weight in weights],
        }
        finite_guard.make_train_step(net, optimizer, squares)(*own)
    return found


def main() -> None:
    torch.set_num_threads(1)  # no thread that a fork would lack
    second = os.fork()
    store = dist.FileStore(sys.argv[2], WORLD)
    dist.init_process_group("gloo", store=store, rank=0 if second else 1, world_size=WORLD)
    found = {"plain": plain_gradients(), "clipped": clipped()}
    for name, scenario in (("ddp", ddp), ("shards", shards)):
        found[name] = {str(parts): scenario(parts) for parts in (None, 1, 3)}
    dist.barrier()
    dist.destroy_process_group()
    if second:
        assert os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]) == 0
        print(json.dumps(found))


if __name__ == "__main__":
    main()
