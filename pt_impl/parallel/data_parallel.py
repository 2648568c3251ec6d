"""Data parallelism: replicas of a model, each with a part of the batch, on one machine or many.

    replicated = apply_data_parallel(model)  # in each process, after init_process_group
    step = make_train_step(replicated, optimizer, loss_fn)
    for (x, y), samples in distribute(replicated, batches):
        loss = step(x, y, samples)

What it changes: every replica runs the forward and backward pass on its part of the global batch,
gradients are summed over all, and each applies the same update. Parts are weighted by their
samples, so n replicas give the weights of one process with the whole batch, even if the last batch
is smaller. BatchNorm sees each replica's part, unless `synchronised_norm`. Dropout draws other
masks. The loss has to be a mean over samples. With class weights, or a mean without padding
(`ignore_index`, in Keras `ignore_class`), parts with few labels weigh more. Then let `loss_fn`
divide the sum by the number of samples.

Its twin: `tf_impl/parallel/data_parallel.py`.

Where the frameworks differ and why:
- PyTorch: DDP wraps an existing model. It divides the sum of gradients by the number of replicas,
  and sends buckets of gradients during the backward pass.
- TensorFlow: tf.distribute mirrors variables when they are created, so `apply_data_parallel` calls
  the function that makes the model. It sums gradients, in an order that the graph decides.
- PyTorch has FSDP2 (`sharded`). TensorFlow keeps whole variables on each replica.
- Dropout masks are the same on each replica in Keras 3.
- Keras's `fit` works under MirroredStrategy. In Keras 3 it fails under MultiWorkerMirroredStrategy
  (keras#20585).
- Ports: PyTorch's gloo listens on one interface, TensorFlow on every interface, for each port of
  TF_CONFIG.

When it helps and when it hurts: it helps if a step takes long compared with the exchange of
gradients: 2 (n - 1) / n times their size through each replica's link. Replicas on the cores of one
CPU gain nothing.
- `sharded` is for models that do not fit into one device.

Run it alone: `python -m pt_impl.parallel.data_parallel` trains on one and two replicas.
`pt_impl/kit/replicas.py` starts the processes, and says how torchrun does on many machines.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/data_parallel.py`.
"""

from contextlib import contextmanager, nullcontext
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_convert

from pt_impl.kit.calling import call, rows
from pt_impl.kit.checks.data_parallel import (
    check_fsdp,
    check_gradients,
    check_one_process,
    check_optimizer,
    count_samples,
    synchronise_norms,
)


def apply_data_parallel(
    model,
    *,
    bucket_mb: float = 25.0,
    communication: str = "auto",
    synchronised_norm: bool = False,
):
    """Return DistributedDataParallel around a model that all processes have with equal weights.

    Li et al., 2020, "PyTorch Distributed". A parameter that no loss reaches ends its second step
    with an error that names it.

    Args:
        bucket_mb: of gradients in one exchange; the backward pass sends one bucket after another,
            and leaves the mean over the replicas.
        communication: "auto", or the backend, "gloo" or "nccl".
        synchronised_norm: let BatchNorm see the global batch, for two small exchanges a layer. Else
            the running statistics kept are those of rank 0.
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

    FSDP2 (ZeRO, Rajbhandari et al., 2020). A block's parameters are whole only while it runs; those
    outside of blocks, or shared by several, while the model does.

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
    found = check_fsdp(model, blocks, precision)
    if synchronised_norm:
        synchronise_norms(model)
    half = {}
    if precision == "bfloat16":
        half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for block in found:
        policy = MixedPrecisionPolicy(**half)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # What is left. It is needed again as soon as the backward pass begins; its output is float32.
    policy = MixedPrecisionPolicy(**half, output_dtype=torch.float32 if half else None)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return model


def distribute(model, batches):
    """Yield this process's shard of each global batch, and the samples of the whole.

    A batch is any structure of arrays or tensors with samples along their first axis, which come as
    tensors; what is none, such as None for a mask, goes to all. Shards are contiguous, and have one
    sample more or less than any other. (DistributedSampler repeats or drops samples until all are
    equal.)
    """
    replicas, replica = dist.get_world_size(), dist.get_rank()
    for batch in map(default_convert, batches):
        samples = count_samples(batch)
        start, stop = (place * samples // replicas for place in (replica, replica + 1))
        yield rows(batch, start, stop), samples


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

    The step raises NotImplementedError where a parameter that only the optimizer has, such as that
    of a loss, gets a gradient: each replica would train it apart.
    """
    replicas, own = dist.get_world_size(), set(map(id, model.parameters()))
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    others = [parameter for parameter in held if id(parameter) not in own]
    model.train()

    def step(x, y, samples):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for number, (part_x, part_y) in enumerate(_parts(x, y, micro_batches), 1):
            exchange = synchronise_each or number == micro_batches
            with nullcontext() if exchange else _no_exchange(model):
                share = count_samples(part_y) / samples
                loss = loss_fn(call(model, part_x), part_y) * share
                (loss * replicas).backward()  # DDP and FSDP divide the sum by the replicas
            total = total + loss.detach()
        check_gradients(others)
        optimizer.step()
        return total

    return step


def _parts(x, y, micro_batches: int) -> list[tuple]:
    samples = count_samples(y, micro_batches)
    if micro_batches == 1:
        return [(x, y)]
    ends = [number * samples // micro_batches for number in range(micro_batches + 1)]
    return [rows((x, y), start, stop) for start, stop in pairwise(ends)]


@contextmanager
def _no_exchange(model):
    """Within it the backward pass adds only to this replica's gradients."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        with model.no_sync():
            yield


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
    settings = {"micro_batches": micro_batches, "synchronise_each": synchronise_each}
    return model, optimizer, make_train_step(replicated, optimizer, loss_fn, **settings)


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
    groups = check_optimizer(model, optimizer)
    apply_fsdp(
        model,
        blocks=blocks,
        precision=precision,
        reshard_after_forward=reshard_after_forward,
        synchronised_norm=synchronised_norm,
    )
    shards = dict(model.named_parameters())  # other objects, which the optimizer does not know yet
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [shards[name] for name in names]
    return model, optimizer, make_train_step(model, optimizer, loss_fn)


def one_process(build, *, replicas: int = 2, communication: str = "auto") -> tuple:
    """nn.DataParallel (legacy): one process copies the model to its GPUs in every step.

    Raises NotImplementedError where there are fewer GPUs than replicas, and for a communication
    other than "auto".
    """
    check_one_process(replicas, communication)
    model, optimizer, loss_fn = build()
    replicated = nn.DataParallel(model, device_ids=list(range(replicas)))
    replicated.train()

    def step(x, y, samples):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(call(replicated, x), y)  # of all samples
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, step


def main() -> None:
    """Train the digits CNN on one and two replicas; print rates, losses and their distance."""
    from statistics import median

    from pt_impl.kit import replicas
    from pt_impl.kit.demo import Demo
    from shared import parallel

    make, build = f"{__spec__.name}:processes", "pt_impl.kit.examples:digits_cnn"
    digits, settings, results = Demo("digits-cnn").train, {"synchronised_norm": True}, []
    print("replicas  samples/s  last loss")
    for count in (1, 2):
        run = parallel.Run(replicas=count, global_batch=64, steps=50)
        results.append(replicas.launch(make, build, digits, run, settings))
        rate = 64 / median(results[-1].step_s)
        print(f"{count:8}{rate:11.0f}{results[-1].losses[-1]:11.4f}")
    print(f"largest relative distance of a weight tensor: {parallel.distance(*results):.1e}")


if __name__ == "__main__":
    main()
