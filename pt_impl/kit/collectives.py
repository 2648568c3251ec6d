"""Collectives: BatchNorm over all replicas, and how long an all-reduce takes, alone.

What it holds: normalisation with the statistics of the global batch, and one all-reduce after
another over the default process group, each timed on its own.
Twin: `tf_impl/kit/collectives.py`.
Where the frameworks differ: little. In both rings a part is sent once its receiver has asked for
it, so a step waits twice for the network's latency; gloo asks for the next part while one is on its
way. PyTorch finds its peers through MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, TensorFlow
through TF_CONFIG.
Run it alone, a process for each rank: `python -m pt_impl.kit.collectives --floats 1000 --repeats 5`
"""

import argparse
import json
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # the common base; torch's own tools use it too

WARM_UP = 2  # untimed all-reduces of each size: connections, buffers, TCP's window
_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def all_reduce_seconds(
    floats: Iterable[int], *, repeats: int = 9, patience: float = 60.0
) -> dict[int, list[float]]:
    """Sum arrays of so many float32 over all processes; the seconds of each repetition, by size.

    Every process calls it with the same arguments. They start together only once: what follows is
    kept in step by the all-reduces themselves. With CPU tensors and gloo, which sums in a ring.

    patience: seconds to wait for a process that does not come, or stops answering

    Raises RuntimeError where a process is missing or a sum is wrong.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=patience))
    try:
        return {count: _repeat(count, repeats) for count in floats}
    finally:
        dist.destroy_process_group()


def _repeat(count: int, repeats: int) -> list[float]:
    values, seconds = torch.empty(count), []
    for _ in range(WARM_UP + repeats):
        values.fill_(1.0)
        start = perf_counter()
        dist.all_reduce(values)
        seconds.append(perf_counter() - start)
    if not bool((values == dist.get_world_size()).all()):
        raise RuntimeError(f"the sum of {count} float32 is wrong")
    return seconds[WARM_UP:]


def synchronise_norms(model: nn.Module) -> None:
    """Let BatchNorm layers normalise with the statistics of the global batch, in place.

    Raises NotImplementedError, before anything is changed, for kinds of BatchNorm that do more.
    """
    for name, module in model.named_modules():
        forward = type(module).forward
        if isinstance(module, _BatchNorm) and forward not in _FORWARDS:
            raise NotImplementedError(
                f"{name} is a {type(module).__name__}: what it does beside BatchNorm, such as an"
                " activation, would be lost"
            )
    if torch.cuda.is_available():
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.forward = partial(_normalise, module, module.forward)  # the type stays


class _Sum(torch.autograd.Function):
    """The sum over all replicas; a gradient is the sum of what all of them hand back."""

    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return _Sum.apply(gradient)


def _normalise(norm: _BatchNorm, local: Callable, x: Tensor) -> Tensor:
    """Do what nn.SyncBatchNorm does, which upstream has for GPUs alone.

    The mean first and then the variance around it: two exchanges, but no difference of two large
    numbers. Half-width inputs are normalised in float32, as nn.BatchNorm does it.
    """
    if not norm.training:
        return local(x)
    given, x = x.dtype, x if x.dtype == torch.float64 else x.float()
    axes, shape = [0, *range(2, x.ndim)], [1, -1] + [1] * (x.ndim - 2)
    sums = _Sum.apply(torch.cat([x.sum(axes), x.new_tensor([x.numel() / x.shape[1]])]))
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = x - mean.view(shape)
    variance = _Sum.apply(centred.square().sum(axes)) / count
    if norm.track_running_stats:
        _track(norm, mean, variance * (count / (count - 1)))
    y = centred * (variance + norm.eps).rsqrt().view(shape)
    y = y * norm.weight.view(shape) + norm.bias.view(shape) if norm.affine else y
    return y.to(given)


@torch.no_grad()
def _track(norm: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    norm.num_batches_tracked.add_(1)
    # None is PyTorch's cumulative average.
    share = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), share)


def main(arguments: list[str] | None = None) -> None:
    """Print the seconds by number of floats as JSON, in every process."""
    parser = argparse.ArgumentParser(prog="python -m pt_impl.kit.collectives")
    parser.add_argument("--floats", required=True, help="numbers of float32, comma-separated")
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(json.dumps(all_reduce_seconds(map(int, given.floats.split(",")), repeats=given.repeats)))


if __name__ == "__main__":
    main()
