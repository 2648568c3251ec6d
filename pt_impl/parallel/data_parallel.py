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
- DDP goes around a model that is there; tf.distribute mirrors variables where they are made.
- DDP sums buckets of gradients during the backward pass; there the graph's scheduler decides. A
  parameter that no loss reaches ends its second step with an error that names it.
- A process a replica is the rule here; nn.DataParallel, one process that copies the model to its
  GPUs in every step, is a legacy. There one process for all devices of a machine is usual.
- tf.distribute keeps each variable whole on each replica: FSDP has no twin there. FSDP2 shards
  block by block; what several blocks share, such as tied embeddings, stays with the whole model.
- nn.SyncBatchNorm runs on GPUs only; on a CPU a function of `kit/replicas.py` does the same.
- DistributedSampler repeats or drops samples until shards are equal. Here none is repeated.

When it helps and when it hurts: it helps where a step is long beside the exchange of gradients,
2 (n - 1) / n times their size through each replica's link. Replicas on the cores of one CPU share
what one process has alone, and gain nothing. `sharded` is for models that do not fit. Dropout draws
other masks than one process does.

Run it alone: `python -m pt_impl.parallel.data_parallel` trains on one and two replicas. On many
machines: `torchrun … -m pt_impl.parallel.data_parallel BUILD DATA --global-batch N --steps N --out
FILE`.

Copy with it: `pt_impl/kit/data.py`, `pt_impl/kit/models.py`, `pt_impl/kit/replicas.py`,
`pt_impl/kit/runtime.py`, `pt_impl/kit/training.py`, `shared/atomic.py`, `shared/datasets.py`,
`shared/parallel.py`, `shared/photos.py`, `shared/specs.py`, `shared/weights.py`.
"""

import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from pt_impl.kit import models, runtime, training
from pt_impl.kit.replicas import Replica, launch, outputs, synchronise_norms, train
from shared import parallel
from shared.specs import TASKS
from shared.weights import init_weights


def apply_data_parallel(
    model,
    *,
    bucket_mb: float = 25.0,
    communication: str = "auto",
    synchronised_norm: bool = False,
):
    """Return DistributedDataParallel around the model, which all processes have with equal weights.

    Its backward pass exchanges gradients, a bucket of `bucket_mb` after another, and leaves their
    mean over the replicas. communication: "auto", or the backend, "gloo" or "nccl".
    """
    if synchronised_norm:
        synchronise_norms(model)
    group = None if communication == "auto" else dist.new_group(backend=communication)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else None
    return DistributedDataParallel(
        model, device_ids=devices, bucket_cap_mb=bucket_mb, process_group=group
    )


def apply_fsdp(
    model,
    *,
    blocks: str = "",
    precision: str = "float32",
    reshard_after_forward: bool = True,
    synchronised_norm: bool = False,
):
    """Shard the model over all processes, in place; make its optimizer afterwards.

    A block's parameters are whole only while it runs, those outside of blocks while the model does.

    blocks: names of modules, or patterns with *, ? and [], separated by commas; "" for the modules
    of one kind that the model repeats, and layers outside of them that are as large. precision:
    "float32", or "bfloat16" for what is computed with, while shards and sums stay float32.
    reshard_after_forward: whether a block is freed until its backward pass, for one more exchange.
    synchronised_norm: see `apply_data_parallel`.

    Raises, before anything is changed, ValueError for blocks that are not there, and
    NotImplementedError for parameters without an axis to shard.
    """
    groups = _find_blocks(model, blocks)
    if scalars := [name for name, own in model.named_parameters() if own.ndim == 0]:
        raise NotImplementedError(f"{scalars[0]} is a scalar: FSDP2 shards the first axis")
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision must be float32 or bfloat16, not {precision!r}")
    if synchronised_norm:
        synchronise_norms(model)
    half = {}
    if precision == "bfloat16":
        half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    mesh = init_device_mesh(runtime.device(), (dist.get_world_size(),))
    for block in groups:
        policy = MixedPrecisionPolicy(**half)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # What is left. It is needed again as soon as the backward pass begins; its output is float32.
    policy = MixedPrecisionPolicy(**half, output_dtype=torch.float32 if half else None)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return model


def make_train_step(
    model, optimizer, loss_fn, *, micro_batches: int = 1, synchronise_each: bool = False
):
    """Make `step(x, y, samples) -> loss` for a model of `apply_data_parallel` or `apply_fsdp`.

    x and y are this replica's shard of a global batch of `samples`, and count by their share of it;
    the losses of all replicas add up to the mean over the global batch. Gradients are exchanged
    with the last of the micro-batches, or with each if `synchronise_each`: the same for more
    traffic.
    """
    replicas = dist.get_world_size()

    def step(x, y, samples):
        optimizer.zero_grad(set_to_none=True)
        size, total = parallel.size(x), 0.0
        for part in range(micro_batches):
            rows = slice(part * size // micro_batches, (part + 1) * size // micro_batches)
            own_x, own_y = (parallel.take(whole, rows) for whole in (x, y))
            exchange = synchronise_each or part == micro_batches - 1
            with nullcontext() if exchange else _no_exchange(model):
                loss = loss_fn(outputs(model, own_x), own_y) * (parallel.size(own_x) / samples)
                (loss * replicas).backward()  # DDP and FSDP divide the sum by the replicas
            total = total + loss.detach()
        optimizer.step()
        return total

    return step


# Variants: each is called in every process, and makes what trains there ---------------------------


def processes(
    build, *, bucket_mb: float = 25.0, communication: str = "auto", synchronised_norm: bool = False
) -> Replica:
    """DistributedDataParallel: gradients are exchanged in buckets during the backward pass."""
    model, optimizer, loss_fn = build()
    replicated = apply_data_parallel(
        model,
        bucket_mb=bucket_mb,
        communication=communication,
        synchronised_norm=synchronised_norm,
    )
    return Replica(model, optimizer, make_train_step(replicated, optimizer, loss_fn))


def accumulated(
    build,
    *,
    micro_batches: int = 4,
    synchronise_each: bool = False,
    bucket_mb: float = 25.0,
    communication: str = "auto",
    synchronised_norm: bool = False,
) -> Replica:
    """DDP that exchanges gradients once a step, after the last of its micro-batches."""
    model, optimizer, loss_fn = build()
    replicated = apply_data_parallel(
        model,
        bucket_mb=bucket_mb,
        communication=communication,
        synchronised_norm=synchronised_norm,
    )
    step = make_train_step(
        replicated,
        optimizer,
        loss_fn,
        micro_batches=micro_batches,
        synchronise_each=synchronise_each,
    )
    return Replica(model, optimizer, step)


def compiled(
    build, *, bucket_mb: float = 25.0, communication: str = "auto", synchronised_norm: bool = False
) -> Replica:
    """`torch.compile` of DDP: the graph is cut where a bucket is full, so that it can be sent."""
    model, optimizer, loss_fn = build()
    replicated = apply_data_parallel(
        model,
        bucket_mb=bucket_mb,
        communication=communication,
        synchronised_norm=synchronised_norm,
    )
    return Replica(model, optimizer, make_train_step(torch.compile(replicated), optimizer, loss_fn))


def sharded(
    build,
    *,
    blocks: str = "",
    precision: str = "float32",
    reshard_after_forward: bool = True,
    synchronised_norm: bool = False,
) -> Replica:
    """FSDP2: each replica keeps a part of parameters, gradients and optimizer state.

    `build` gives all processes equal weights.
    """
    model, optimizer, loss_fn = build()
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [[names[parameter] for parameter in g["params"]] for g in optimizer.param_groups]
    apply_fsdp(
        model,
        blocks=blocks,
        precision=precision,
        reshard_after_forward=reshard_after_forward,
        synchronised_norm=synchronised_norm,
    )
    shards = dict(model.named_parameters())  # other objects, which the optimizer does not know yet
    for group, own in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [shards[name] for name in own]
    return Replica(model, optimizer, make_train_step(model, optimizer, loss_fn))


def one_process(
    build, *, replicas: int = 2, communication: str = "auto", synchronised_norm: bool = False
) -> Replica:
    """nn.DataParallel (legacy): one process copies the model to its GPUs in every step."""
    model, optimizer, loss_fn = build()
    parallel_model = nn.DataParallel(model, device_ids=list(range(replicas)))

    def step(x, y, samples):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(outputs(parallel_model, x), y)  # of all samples
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Replica(model, optimizer, step)


def tpu(build, *, replicas: int = 8, synchronised_norm: bool = False) -> Replica:
    """Nothing here: PyTorch reaches TPUs through another package."""
    raise NotImplementedError("PyTorch needs torch_xla for TPUs, which this project does not use")


_VARIANTS = {f.__name__: f for f in (processes, accumulated, compiled, sharded, one_process, tpu)}
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@contextmanager
def _no_exchange(model):
    """Within it the backward pass adds to this replica's gradients alone."""
    if not isinstance(model, FSDPModule):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def _find_blocks(model: nn.Module, blocks: str) -> list[nn.Module]:
    """The modules to shard each by itself: the outermost of those that are meant.

    One that shares a parameter with another is left to the whole model: both have to be whole at
    once.
    """
    named = {name: module for name, module in model.named_modules() if name}
    patterns = [pattern.strip() for pattern in blocks.split(",")] if blocks else []
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ValueError(f"blocks: no module is named {pattern!r}: {', '.join(named)}")
    if patterns:
        meant = [name for name in named if any(fnmatchcase(name, each) for each in patterns)]
    else:
        meant = _repeated(named)
        least = min((_size(named[name]) for name in meant), default=1)
        around = {name for name in named if any(block.startswith(f"{name}.") for block in meant)}
        meant += [
            name
            for name, module in named.items()
            if name not in {*around, *meant}
            and [*module.parameters(recurse=False)]
            and _size(module) >= least
        ]
    outermost = [n for n in meant if not any(n.startswith(f"{other}.") for other in meant)]
    return [named[name] for name in outermost if not _shares(model, named[name])]


def _repeated(named: dict[str, nn.Module]) -> list[str]:
    """Names of modules that have layers, and of whose kind there are several."""
    composed = {
        name: type(module)
        for name, module in named.items()
        if not isinstance(module, _CONTAINERS) and [*module.children()] and [*module.parameters()]
    }
    count = Counter(composed.values())
    return [name for name, kind in composed.items() if count[kind] > 1]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shares(model: nn.Module, block: nn.Module) -> bool:
    """Whether a parameter of the block stands elsewhere in the model, too."""
    inside = set(block.modules())
    others = (module for module in model.modules() if module not in inside)
    elsewhere = {id(own) for module in others for own in module.parameters(recurse=False)}
    return any(id(own) in elsewhere for own in block.parameters())


# Programs -----------------------------------------------------------------------------------------


def train_data_parallel(
    build,
    dataset,
    run,
    *,
    variant: str = "processes",
    micro_batches: int = 1,
    synchronise_each: bool = False,
    synchronised_norm: bool = False,
    bucket_mb: float = 25.0,
    communication: str = "auto",
    blocks: str = "",
    precision: str = "float32",
    reshard_after_forward: bool = True,
) -> parallel.Result:
    """Train on replicas of this machine, each on its shard of every global batch.

    build: "module:function", importable from here; each process calls it, and gets model, optimizer
    and `loss_fn(output, y)`, the mean over samples. dataset: a folder with train_x and train_y, as
    `shared.parallel.save_samples` writes arrays, tuples and dicts. run: a `shared.parallel.Run`.
    variant: the name of a function of this file, whose settings are among the others.

    Nothing listens but on the loopback.
    Raises, before anything is started, ValueError for settings that don't fit, and
    NotImplementedError for a variant that this framework or machine lacks; RuntimeError with what a
    replica said where the run fails (NotImplementedError where it refused): no process is left
    then.
    """
    chosen = {
        "variant": variant,
        "micro_batches": micro_batches,
        "synchronise_each": synchronise_each,
        "synchronised_norm": synchronised_norm,
        "bucket_mb": bucket_mb,
        "communication": communication,
        "blocks": blocks,
        "precision": precision,
        "reshard_after_forward": reshard_after_forward,
    }
    parallel.find(build)
    parallel.check_chosen(chosen, _VARIANTS)
    parallel.check(dataset, run.replicas, vars(run) | chosen)
    _check_machine(run.replicas, chosen)
    processes = 1 if variant == "one_process" else run.replicas
    return launch(__spec__.name, build, dataset, vars(run) | chosen, processes=processes)


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
        parallel.check_chosen({"variant": options.variant}, _VARIANTS)
        _check_machine(1, vars(options))
        train(_VARIANTS, options)


if __name__ == "__main__":
    main()
