"""What data parallelism refuses, and what it needs on any model: blocks to shard, common norms."""

from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # the common base; torch's own tools use it too

from pt_impl.kit.calling import tensors

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
_OTHERS = (
    "the optimizer has parameters that the model has not, such as a loss's own: make them"
    " the model's"
)


def check_fsdp(model: nn.Module, blocks: str, precision: str) -> list[nn.Module]:
    """Return the modules to shard each by itself, as `apply_fsdp` says it of `blocks`.

    Raises ValueError for blocks that are not there and an unknown precision, and
    NotImplementedError for parameters without an axis to shard.
    """
    found = _find_blocks(model, blocks)
    scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if scalars:
        raise NotImplementedError(f"{scalars[0]} is a scalar: FSDP2 shards the first axis")
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision must be float32 or bfloat16, not {precision!r}")
    return found


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters of each group.

    Raises NotImplementedError for parameters that are not the model's.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names.get(id(own)) for own in group["params"]] for group in optimizer.param_groups]
    if any(None in group for group in groups):
        raise NotImplementedError(_OTHERS)
    return groups


def check_gradients(others: list[nn.Parameter]) -> None:
    """Raise NotImplementedError if one of the optimizer's parameters beside the model's trains."""
    if any(parameter.grad is not None for parameter in others):
        raise NotImplementedError(_OTHERS)


def check_one_process(replicas: int, communication: str) -> None:
    """Raise NotImplementedError for fewer GPUs than replicas, and another communication."""
    if not torch.cuda.is_available():
        raise NotImplementedError("nn.DataParallel copies a model to GPUs, and there is none")
    if (found := torch.cuda.device_count()) < replicas:
        raise NotImplementedError(f"nn.DataParallel needs a GPU a replica: {replicas}, not {found}")
    if communication != "auto":
        raise NotImplementedError("nn.DataParallel has one way to communicate: auto")


def count_samples(batch, micro_batches: int = 1) -> int:
    """Return the samples of a structure of tensors, which have them along their first axis.

    Raises ValueError for fewer samples than micro-batches.
    """
    samples = next(len(tensor) for tensor in tensors(batch) if tensor.ndim)
    if samples < micro_batches:
        raise ValueError(f"{samples} samples of a replica make no {micro_batches} micro-batches")
    return samples


# Blocks for FSDP2 ---------------------------------------------------------------------------------


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


# BatchNorm over all replicas ----------------------------------------------------------------------


def synchronise_norms(model: nn.Module) -> None:
    """Let BatchNorm layers normalise with the statistics of the global batch, in place.

    Raises NotImplementedError, before anything is changed, for kinds of BatchNorm that do more.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            if hasattr(module, "running_mean"):
                raise NotImplementedError(f"{name} is TorchScript, which takes no other forward")
            continue  # its class has no forward that could be asked for
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
    """Do what nn.SyncBatchNorm does, which upstream has only for GPUs.

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
