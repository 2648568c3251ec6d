"""The kernels of layers, each as groups of matrices of what meets in one output, with their fans.

Twin: `tf_impl/kit/kernels.py`.
Where the frameworks differ: in the layouts of their kernels. `nn.MultiheadAttention` holds query,
key and value as one matrix; Keras's gates and projections are axes of a kernel.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Kernel:
    """A parameter as `shape` (groups, ...) whose axes `order` makes it (groups, inputs, outputs).

    fan_in, fan_out: how many inputs meet in one output, and how many outputs one input goes into.
    rectified: whether a rectifier may follow. recurrent: of the hidden state.
    """

    parameter: nn.Parameter
    shape: tuple[int, ...]
    order: tuple[int, ...]
    inputs: int
    fan_in: float
    fan_out: float
    rectified: bool = True
    recurrent: bool = False

    @property
    def matrices(self) -> tuple[int, int, int]:
        """(groups, inputs, outputs)."""
        groups = self.shape[0]
        return groups, self.inputs, math.prod(self.shape) // groups // self.inputs

    @torch.no_grad()
    def write(self, value: Tensor) -> None:
        """Write values of the shape of `matrices` into the parameter."""
        value = value.reshape([self.shape[axis] for axis in self.order])
        value = value.permute([self.order.index(axis) for axis in range(len(self.order))])
        self.parameter.copy_(value.reshape(self.parameter.shape))


def layer_kernels(model: nn.Module) -> Iterator[tuple[nn.Module, list[Kernel]]]:
    """Yield each layer that holds kernels, and these; an attention stands for its projection."""
    attentions = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    within = {m.out_proj for m in attentions}
    kinds = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
    for module in model.modules():
        if isinstance(module, kinds) and module not in within:
            yield module, _kernels(module)


def _kernels(module: nn.Module) -> list[Kernel]:
    if isinstance(module, nn.Linear):
        return [_dense(module.weight, 1)]
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return [_convolution(module, transposed=True)]
    if isinstance(module, nn.modules.conv._ConvNd):
        return [_convolution(module, transposed=False)]
    if isinstance(module, nn.MultiheadAttention):
        joint, output = module.in_proj_weight, module.out_proj.weight
        apart = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        found = [_dense(weight, 1, rectified=False) for weight in apart if weight is not None]
        found += [] if joint is None else [_dense(joint, 3, rectified=False)]
        return [*found, _dense(output, 1, rectified=False)]
    return [
        _dense(
            parameter,
            1 if "_hr" in name else _gates(module),
            rectified=False,
            recurrent="weight_hh" in name,
        )
        for name, parameter in module.named_parameters(recurse=False)
        if name.startswith("weight")
    ]


def _dense(weight: nn.Parameter, groups: int, *, rectified=True, recurrent=False) -> Kernel:
    """(groups x outputs, inputs)."""
    outputs, inputs = weight.shape[0] // groups, weight.shape[1]
    shape = (groups, outputs, inputs)
    return Kernel(weight, shape, (0, 2, 1), inputs, inputs, outputs, rectified, recurrent)


def _convolution(module: nn.Module, *, transposed: bool) -> Kernel:
    """(groups x outputs, inputs, *window), or (groups x inputs, outputs, *window) if transposed."""
    weight, groups, window = module.weight, module.groups, math.prod(module.kernel_size)
    shape = (groups, weight.shape[0] // groups, *weight.shape[1:])
    spatial = tuple(range(3, len(shape)))
    first, second = shape[1], shape[2]
    if transposed:  # an output of stride s gets a part of the window: 1 / s of it each way
        fan_in = first * window / math.prod(module.stride)
        order = (0, 1, *spatial, 2)
        return Kernel(weight, shape, order, first * window, fan_in, second * window)
    order = (0, 2, *spatial, 1)
    return Kernel(weight, shape, order, second * window, second * window, first * window)


def _gates(module: nn.Module) -> int:
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return 4
    return 3 if isinstance(module, nn.GRU | nn.GRUCell) else 1
