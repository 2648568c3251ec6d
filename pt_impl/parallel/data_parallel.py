"""Data parallelism: replicas of a model, each on its part of the batch, on one machine or many.

What it changes: every replica runs forward and backward on its shard of the global batch, gradients
are summed over all of them, and each applies the same update. Shards are disjoint and complete, and
a shard counts by its samples, so n replicas train to the weights of one process with the whole
batch, also where the last batch of an epoch is smaller. `processes` is DistributedDataParallel
(DDP; Li et al., 2020, "PyTorch Distributed"), `accumulated` exchanges gradients once in several
micro-batches, `compiled` compiles the replica, `sharded` is FSDP2 (`fully_shard`; ZeRO, Rajbhandari
et al., 2020), `one_process` is nn.DataParallel.

BatchNorm sees each replica's shard, and the running statistics kept are those of rank 0; with
`synchronised_norm` it sees the global batch, for two small exchanges a layer.

Its twin: `tf_impl/parallel/data_parallel.py`.

Where the frameworks differ and why:
- DDP divides the sum of gradients by the replicas, so a loss is multiplied by them here.
  tf.distribute sums. Both weigh a shard's mean loss by its share of the samples.
- DDP sums buckets of gradients during the backward pass; there the graph's scheduler decides.
- A process a replica is the rule here; nn.DataParallel, one process that copies the model to its
  GPUs in every step, is a legacy. There one process for all devices of a machine is usual.
- tf.distribute keeps each variable whole on each replica: FSDP has no twin there.
- nn.SyncBatchNorm runs on GPUs only; on a CPU a function of `kit/replicas.py` does the same.
- DistributedSampler repeats or drops samples until shards are equal. Here none is repeated.

When it helps and when it hurts: it helps where a step is long beside the exchange of gradients,
2 (n - 1) / n times their size through each replica's link. Replicas on the cores of one CPU share
what one process has alone, and gain nothing. `sharded` is for models that do not fit.

Run it alone: `python -m pt_impl.parallel.data_parallel` trains on one and two replicas. On many
machines: `torchrun … -m pt_impl.parallel.data_parallel BUILD DATA --global-batch N --steps N --out
FILE`.
"""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pt_impl.kit import models, runtime, training
from pt_impl.kit.replicas import Replica, launch, synchronise_norms, train
from shared import parallel
from shared.specs import TASKS
from shared.weights import init_weights


def train_data_parallel(
    build,
    dataset,
    *,
    replicas: int,
    global_batch: int,
    steps: int,
    seed: int,
    variant: str = "processes",
    micro_batches: int = 1,
    synchronise_each: bool = False,
    synchronised_norm: bool = False,
    bucket_mb: float = 25.0,
    communication: str = "auto",
    threads: int = 0,
    checkpoint: str = "",
    save_every: int = 0,
    timeout_s: float = 300.0,
) -> parallel.Result:
    """Train on `replicas` replicas of this machine, each on its shard of every global batch.

    build: "module:function", importable from here; each process calls it, and gets model, optimizer
    and `loss_fn(output, y)`, the mean over samples. dataset: a folder with train_x.npy and
    train_y.npy. variant: the name of a function of this file, whose settings are among the others.
    threads: of all replicas together, 0 for all cores; each has an equal part, at least one.
    checkpoint: a folder to save to every `save_every` steps and at the end (0: at the end alone); a
    run goes on from the last one there. timeout_s: how long a replica waits for others.

    Nothing listens but on the loopback. Raises, before anything is started, ValueError for settings
    that don't fit, and NotImplementedError for a variant that this framework or machine lacks;
    RuntimeError with what a replica said where the run fails: no process is left then.
    """
    settings = {k: v for k, v in locals().items() if k not in ("build", "dataset", "replicas")}
    parallel.find(build, variant=variant, variants=_VARIANTS)
    parallel.check(dataset, replicas, settings)
    _check_machine(replicas, settings)
    processes = 1 if variant == "one_process" else replicas
    settings |= {"threads": parallel.threads_each(threads, replicas), "replicas": replicas}
    return launch(__spec__.name, build, dataset, settings, processes=processes)


# Variants: each is called in every process, and makes what trains there ---------------------------


def processes(
    build, *, bucket_mb: float = 25.0, communication: str = "auto", synchronised_norm: bool = False
) -> Replica:
    """DistributedDataParallel: gradients are exchanged in buckets during the backward pass.

    communication: "auto", or the backend that exchanges gradients, "gloo" or "nccl".
    """
    model, optimizer, loss_fn = build()
    replicated, replicas = _ddp(model, bucket_mb, communication, synchronised_norm)

    def step(x, y, samples):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(replicated(x), y) * (len(x) / samples)
        (loss * replicas).backward()  # DDP divides the sum by the replicas
        optimizer.step()
        return loss.detach()

    return Replica(model, optimizer, step)


def accumulated(
    build,
    *,
    micro_batches: int = 4,
    synchronise_each: bool = False,
    bucket_mb: float = 25.0,
    communication: str = "auto",
    synchronised_norm: bool = False,
) -> Replica:
    """DDP that exchanges gradients once a step, after the last of its micro-batches.

    synchronise_each: after each, as without `no_sync`: the same gradient for more traffic.
    """
    model, optimizer, loss_fn = build()
    replicated, replicas = _ddp(model, bucket_mb, communication, synchronised_norm)

    def step(x, y, samples):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part in range(micro_batches):
            rows = slice(part * len(x) // micro_batches, (part + 1) * len(x) // micro_batches)
            last = part == micro_batches - 1
            with nullcontext() if last or synchronise_each else replicated.no_sync():
                loss = loss_fn(replicated(x[rows]), y[rows]) * (len(y[rows]) / samples)
                (loss * replicas).backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    return Replica(model, optimizer, step)


def compiled(
    build, *, bucket_mb: float = 25.0, communication: str = "auto", synchronised_norm: bool = False
) -> Replica:
    """`torch.compile` of DDP: the graph is cut where a bucket is full, so that it can be sent."""
    model, optimizer, loss_fn = build()
    replicated, replicas = _ddp(model, bucket_mb, communication, synchronised_norm)
    forward = torch.compile(replicated)

    def step(x, y, samples):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(forward(x), y) * (len(x) / samples)
        (loss * replicas).backward()
        optimizer.step()
        return loss.detach()

    return Replica(model, optimizer, step)


def sharded(build, *, synchronised_norm: bool = False) -> Replica:
    """FSDP2: each replica keeps a part of parameters, gradients and optimizer state.

    A layer's parameters are whole only while it runs. `build` gives all processes equal weights.
    """
    model, optimizer, loss_fn = build()
    replicas = dist.get_world_size()
    if synchronised_norm:
        synchronise_norms(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [[names[parameter] for parameter in g["params"]] for g in optimizer.param_groups]
    mesh = init_device_mesh(runtime.device(), (replicas,))
    for layer in [*model.children(), model]:
        fully_shard(layer, mesh=mesh)
    parts = dict(model.named_parameters())  # other objects, which the optimizer does not know yet
    for group, own in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parts[name] for name in own]

    def step(x, y, samples):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model(x), y) * (len(x) / samples)
        (loss * replicas).backward()  # FSDP divides, as DDP does
        optimizer.step()
        return loss.detach()

    return Replica(model, optimizer, step)


def one_process(
    build, *, replicas: int = 2, communication: str = "auto", synchronised_norm: bool = False
) -> Replica:
    """nn.DataParallel (legacy): one process copies the model to its GPUs in every step."""
    model, optimizer, loss_fn = build()
    parallel_model = nn.DataParallel(model, device_ids=list(range(replicas)))

    def step(x, y, samples):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(parallel_model(x), y)  # of all outputs, which it brings to the first GPU
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Replica(model, optimizer, step)


def tpu(build, *, replicas: int = 8, synchronised_norm: bool = False) -> Replica:
    """Nothing here: PyTorch reaches TPUs through another package."""
    raise NotImplementedError("PyTorch needs torch_xla for TPUs, which this project does not use")


_VARIANTS = {f.__name__: f for f in (processes, accumulated, compiled, sharded, one_process, tpu)}


def _ddp(model: nn.Module, bucket_mb: float, communication: str, synchronised_norm: bool) -> tuple:
    """The model with DDP around it, and how many replicas there are."""
    if synchronised_norm:
        synchronise_norms(model)
    group = None if communication == "auto" else dist.new_group(backend=communication)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else None
    settings = {"device_ids": devices, "bucket_cap_mb": bucket_mb, "process_group": group}
    return DistributedDataParallel(model, **settings), dist.get_world_size()


def _check_machine(replicas: int, settings: dict) -> None:
    """Raise what no replica has to be started for."""
    variant, gpus = settings["variant"], torch.cuda.device_count()
    if variant == "tpu":
        tpu(None)
    if variant == "one_process" and not gpus:
        raise NotImplementedError("nn.DataParallel copies a model to GPUs, and there is none")
    if variant in ("one_process", "compiled") and settings["synchronised_norm"]:
        raise NotImplementedError(f"{variant}: BatchNorm can't be synchronised there")
    given, known = settings["communication"], ("auto", "gloo", "nccl")
    known = known[:1] if variant == "one_process" else known
    parallel.check_devices(replicas, given, known=known, gpus=gpus, variant=variant)


def digits_cnn() -> tuple:
    """Return model, optimizer and loss of the digits CNN, from the weights of seed 0."""
    task = TASKS["digits-cnn"]
    model = models.build(task.model, init_weights(task.model, seed=0))
    return model, training.make_optimizer(model, task.recipe), training.cross_entropy


def main() -> None:
    """Be one process of a run, or without options train the digits CNN on one and two replicas."""
    if not sys.argv[1:]:
        return parallel.demonstrate(train_data_parallel, f"{__spec__.name}:digits_cnn")
    options = parallel.options(__spec__.name).parse_args()
    with parallel.one_line_errors():
        _check_machine(1, vars(options))
        train(_VARIANTS, options)


if __name__ == "__main__":
    main()
