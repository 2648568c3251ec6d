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

A loss has to be a mean over samples. One with class weights, or over the labels that are no padding
(`ignore_index`), is not: shards with few of them weigh more, and the weights end elsewhere. Let
`loss_fn` divide the sum by the samples instead.

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
- nn.SyncBatchNorm runs on GPUs only; on a CPU a function of `kit/collectives.py` does the same.
- DistributedSampler repeats or drops samples until shards are equal. `distribute` repeats none.

When it helps and when it hurts: it helps where a step is long beside the exchange of gradients,
2 (n - 1) / n times their size through each replica's link. Replicas on the cores of one CPU share
what one process has alone, and gain nothing. `sharded` is for models that do not fit. Dropout draws
other masks than one process does.

Run it alone: `python -m pt_impl.parallel.data_parallel` trains on one and two replicas. Its
functions are called in each of several processes, after `torch.distributed.init_process_group`:
`pt_impl/kit/replicas.py` starts them here, and says how torchrun does on many machines.

Copy with it: `pt_impl/kit/collectives.py`.
"""

from collections import Counter
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten  # there is no public one

from pt_impl.kit.collectives import synchronise_norms


def apply_data_parallel(
    model,
    *,
    bucket_mb: float = 25.0,
    communication: str = "auto",
    synchronised_norm: bool = False,
):
    """Return DistributedDataParallel around a model that all processes have with equal weights.

    Args:
        bucket_mb: of gradients in one exchange; the backward pass sends one bucket after another,
            and leaves the mean over the replicas.
        communication: "auto", or the backend, "gloo" or "nccl".
        synchronised_norm: let BatchNorm see the global batch.
    """
    if synchronised_norm:
        synchronise_norms(model)
    group = None if communication == "auto" else dist.new_group(backend=communication)
    return DistributedDataParallel(model, bucket_cap_mb=bucket_mb, process_group=group)


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

    Args:
        blocks: names of modules, or patterns with *, ? and [], separated by commas; "" for the
            modules of one kind that the model repeats, and layers outside of them as large.
        precision: "float32", or "bfloat16" for what is computed with, while shards and sums stay
            float32.
        reshard_after_forward: free a block until its backward pass, for one more exchange.
        synchronised_norm: as in `apply_data_parallel`.

    Raises, before anything is changed, ValueError for blocks that are not there, and
    NotImplementedError for parameters without an axis to shard.
    """
    groups = _find_blocks(model, blocks)
    scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if scalars:
        raise NotImplementedError(f"{scalars[0]} is a scalar: FSDP2 shards the first axis")
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision must be float32 or bfloat16, not {precision!r}")
    if synchronised_norm:
        synchronise_norms(model)
    half = {}
    if precision == "bfloat16":
        half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in groups:
        policy = MixedPrecisionPolicy(**half)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # What is left. It is needed again as soon as the backward pass begins; its output is float32.
    policy = MixedPrecisionPolicy(**half, output_dtype=torch.float32 if half else None)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return model


def distribute(model, batches):
    """Yield this process's shard of each global batch, and the samples of the whole.

    A batch is any structure of arrays or tensors with samples along their first axis; what is none,
    such as None for a mask, goes to all. Shards are contiguous, and have one sample more or less
    than any other.
    """
    replicas, replica = dist.get_world_size(), dist.get_rank()
    for batch in batches:
        samples = _samples(batch)
        rows = slice(replica * samples // replicas, (replica + 1) * samples // replicas)
        shard = tree_map(lambda v, rows=rows: v[rows] if _has_samples(v) else v, batch)
        yield shard, samples


def make_train_step(
    model, optimizer, loss_fn, *, micro_batches: int = 1, synchronise_each: bool = False
):
    """Make `step(x, y, samples) -> loss` for a model of `apply_data_parallel` or `apply_fsdp`.

    x and y are this replica's shard of a global batch of `samples`, as `distribute` gives it, and
    count by their share of it; the losses of all replicas add up to the mean over the global batch.

    Args:
        loss_fn: `loss_fn(output, y)`, the mean over samples.
        micro_batches: parts of the shard, one after another; gradients are exchanged with the last.
        synchronise_each: exchange them with each part: the same for more traffic.

    The step raises NotImplementedError where a parameter of the optimizer's alone, such as a loss's
    own, gets a gradient: each replica would train it apart.
    """
    replicas = dist.get_world_size()
    own = set(map(id, model.parameters()))
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    others = [parameter for parameter in held if id(parameter) not in own]
    model.train()

    def step(x, y, samples):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        parts = zip(_split(x, micro_batches), _split(y, micro_batches), strict=True)
        for number, (own_x, own_y) in enumerate(parts, 1):
            exchange = synchronise_each or number == micro_batches
            with nullcontext() if exchange else _no_exchange(model):
                loss = loss_fn(_call(model, own_x), own_y) * (_samples(own_y) / samples)
                (loss * replicas).backward()  # DDP and FSDP divide the sum by the replicas
            total = total + loss.detach()
        if any(parameter.grad is not None for parameter in others):
            raise NotImplementedError(_OTHERS)
        optimizer.step()
        return total

    return step


# Variants: each is called in every process, and returns model, optimizer and step ----------------


def processes(
    build, *, bucket_mb: float = 25.0, communication: str = "auto", synchronised_norm: bool = False
) -> tuple:
    """DistributedDataParallel: gradients are exchanged in buckets during the backward pass."""
    model, optimizer, loss_fn = build()
    replicated = apply_data_parallel(
        model,
        bucket_mb=bucket_mb,
        communication=communication,
        synchronised_norm=synchronised_norm,
    )
    return model, optimizer, make_train_step(replicated, optimizer, loss_fn)


def accumulated(
    build,
    *,
    micro_batches: int = 4,
    synchronise_each: bool = False,
    synchronised_norm: bool = False,
) -> tuple:
    """DDP that exchanges gradients once a step, after the last of its micro-batches."""
    model, optimizer, loss_fn = build()
    replicated = apply_data_parallel(model, synchronised_norm=synchronised_norm)
    step = make_train_step(
        replicated,
        optimizer,
        loss_fn,
        micro_batches=micro_batches,
        synchronise_each=synchronise_each,
    )
    return model, optimizer, step


def compiled(build) -> tuple:
    """`torch.compile` of DDP: the graph is cut where a bucket is full, so that it can be sent."""
    model, optimizer, loss_fn = build()
    replicated = torch.compile(apply_data_parallel(model))
    return model, optimizer, make_train_step(replicated, optimizer, loss_fn)


def sharded(
    build,
    *,
    blocks: str = "",
    precision: str = "float32",
    reshard_after_forward: bool = True,
    synchronised_norm: bool = False,
) -> tuple:
    """FSDP2: each replica keeps a part of parameters, gradients and optimizer state.

    `build` gives all processes equal weights.
    """
    model, optimizer, loss_fn = build()
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [[names.get(parameter) for parameter in g["params"]] for g in optimizer.param_groups]
    if any(None in group for group in groups):
        raise NotImplementedError(_OTHERS)
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
    return model, optimizer, make_train_step(model, optimizer, loss_fn)


def one_process(build, *, replicas: int = 2, communication: str = "auto") -> tuple:
    """nn.DataParallel (legacy): one process copies the model to its GPUs in every step.

    Raises NotImplementedError where there are fewer GPUs than replicas, and for a communication of
    one's own.
    """
    if not torch.cuda.is_available():
        raise NotImplementedError("nn.DataParallel copies a model to GPUs, and there is none")
    if (found := torch.cuda.device_count()) < replicas:
        raise NotImplementedError(f"nn.DataParallel needs a GPU a replica: {replicas}, not {found}")
    if communication != "auto":
        raise NotImplementedError("nn.DataParallel has one way to communicate: auto")
    model, optimizer, loss_fn = build()
    replicated = nn.DataParallel(model, device_ids=list(range(replicas)))
    replicated.train()

    def step(x, y, samples):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(_call(replicated, x), y)  # of all samples
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, step


# Parts ------------------------------------------------------------------------------------------

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_OTHERS = (
    "the optimizer has parameters that the model has not, such as a loss's own: make them"
    " the model's"
)


def _call(model: nn.Module, x):
    """A tuple as positional arguments, a dict as named ones."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def _samples(batch) -> int:
    return len(next(filter(_has_samples, tree_flatten(batch)[0])))


def _has_samples(value) -> bool:
    return len(getattr(value, "shape", ())) > 0


def _split(batch, parts: int) -> list:
    """The parts of a structure of tensors; ValueError where it has too few samples."""
    if _samples(batch) < parts:
        raise ValueError(f"{_samples(batch)} samples of a replica make no {parts} micro-batches")
    tensors, structure = tree_flatten(batch)
    split = [v.tensor_split(parts) if _has_samples(v) else [v] * parts for v in tensors]
    return [tree_unflatten(list(part), structure) for part in zip(*split, strict=True)]


@contextmanager
def _no_exchange(model):
    """Within it the backward pass adds to this replica's gradients alone."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        with model.no_sync():
            yield


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


def main() -> None:
    """Train the digits CNN on one and two replicas; print rates, losses and their distance."""
    import tempfile
    from pathlib import Path
    from statistics import median

    from pt_impl.kit import data, replicas
    from shared import datasets, parallel
    from shared.specs import TASKS

    with tempfile.TemporaryDirectory() as folder:
        folder = datasets.materialise(TASKS["digits-cnn"].dataset, Path(folder))
        digits = data.to_device(*datasets.load(folder, "train"))
    make, build = f"{__spec__.name}:processes", "pt_impl.kit.examples:digits_cnn"
    results = []
    print("replicas  samples/s  last loss")
    for count in (1, 2):
        run = parallel.Run(replicas=count, global_batch=64, steps=50)
        results.append(replicas.launch(make, build, digits, run, {"synchronised_norm": True}))
        rate = 64 / median(results[-1].step_s)
        print(f"{count:8}{rate:11.0f}{results[-1].losses[-1]:11.4f}")
    print(f"largest relative distance of a weight tensor: {parallel.distance(*results):.1e}")


if __name__ == "__main__":
    main()
