"""Averages on any model: half precision widened, BatchNorm's statistics made anew.

Twin: `tf_impl/kit/averages.py`.
Where the frameworks differ: a module has a mode, and statistics are updated in training mode; Keras
has it per call, so there dropout and random layers have to be looked after.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # the common base; torch's own tools use it too
from torch.optim.swa_utils import AveragedModel

_HALVES = (torch.float16, torch.bfloat16)


def averaged_model(
    model: nn.Module, average_one: Callable, average_many: Callable | None = None
) -> AveragedModel:
    """Return an average of the model: in float32 of a model with weights in half precision.

    average_one: `AveragedModel`'s avg_fn, for such a model; average_many: its multi_avg_fn, for all
    others. Raises NotImplementedError for a model that Python cannot copy.
    """
    in_half = any(parameter.dtype in _HALVES for parameter in model.parameters())
    try:
        if not in_half:
            return AveragedModel(model, multi_avg_fn=average_many)

        def widening(average, weight, updates):  # a share of it would be rounded, too
            return average_one(average, weight.to(average.dtype), updates)

        average = AveragedModel(model, avg_fn=widening)
    except Exception as error:  # of the old `weight_norm`, or masked: a weight that is computed
        line = " ".join(str(error).split())
        raise NotImplementedError(f"Python cannot copy the model: {line}") from error
    # In half precision a small share of a weight rounds to nothing.
    for tensor in [*average.module.parameters(), *average.module.buffers()]:
        if tensor.dtype in _HALVES:
            tensor.data = tensor.data.float()
    return average


@contextmanager
def fresh_statistics(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Let BatchNorm's running statistics be the mean over the batches that run inside.

    Yields the layers that have such statistics and parameters that train; dropout and the like stay
    off. Nothing else changes, nor do the statistics of a layer that no batch goes through, nor any
    where the context raises. Raises NotImplementedError for such a layer within TorchScript.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and hasattr(module, "running_mean"):
            raise NotImplementedError(f"{name} is TorchScript, whose momentum is a constant of it")
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    norms = [norm for norm in norms if not norm.affine or norm.weight.requires_grad]
    modes = {module: module.training for module in model.modules()} if norms else {}
    momenta = {norm: norm.momentum for norm in norms}
    before = {norm: [buffer.clone() for buffer in norm.buffers()] for norm in norms}
    done = False
    try:
        if norms:
            model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a mean over all batches, each with the same weight
            norm.train()
        with torch.no_grad():
            yield norms
        done = True
    finally:
        for norm, buffers in before.items():
            if not done or not norm.num_batches_tracked:  # no batch went through it
                write(norm.buffers(), buffers)
        for module, mode in modes.items():
            if module.training != mode:
                module.train(mode)  # some do more in it, as LoRA does
        for norm, momentum in momenta.items():
            norm.momentum = momentum


@torch.no_grad()
def write(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Copy values into tensors, one by one."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
