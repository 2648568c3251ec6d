"""The kernels of layers, each as groups of matrices of what meets in one output, with their fans.

Twin: `pt_impl/kit/kernels.py`.
Where the frameworks differ: in the layouts of their kernels. Keras's gates and projections are axes
of a kernel; `nn.MultiheadAttention` holds query, key and value as one matrix.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import tensorflow as tf


@dataclass(frozen=True)
class Kernel:
    """A variable as `shape` whose axes `order` makes it (groups, inputs, outputs).

    groups, inputs: their sizes. fan_in, fan_out: how many inputs meet in one output, and how many
    outputs one input goes into. rectified: whether a rectifier may follow. recurrent: of the hidden
    state.
    """

    variable: tf.Variable
    shape: tuple[int, ...]
    order: tuple[int, ...]
    groups: int
    inputs: int
    fan_in: float
    fan_out: float
    rectified: bool = True
    recurrent: bool = False

    @property
    def matrices(self) -> tuple[int, int, int]:
        """(groups, inputs, outputs)."""
        return self.groups, self.inputs, math.prod(self.shape) // self.groups // self.inputs

    def write(self, value: tf.Tensor) -> None:
        """Write values of the shape of `matrices` into the variable."""
        value = tf.reshape(value, [self.shape[axis] for axis in self.order])
        value = tf.transpose(value, [self.order.index(axis) for axis in range(len(self.order))])
        value = tf.reshape(value, self.variable.shape)
        self.variable.assign(tf.cast(value, self.variable.dtype))


def layer_kernels(model: tf.keras.Model) -> Iterator[tuple[tf.keras.layers.Layer, list[Kernel]]]:
    """Yield each layer that holds kernels, and these."""
    layers = list(model._flatten_layers(include_self=True))
    attentions = _within_attention(layers)
    for layer in layers:
        kernels = _kernels(layer, id(layer) not in attentions)
        if kernels:
            yield layer, kernels


def _within_attention(layers: list) -> set[int]:
    """Layers of an attention: its projections, behind which there is no rectifier."""
    kinds = (tf.keras.layers.MultiHeadAttention,)
    kinds += tuple(filter(None, [getattr(tf.keras.layers, "GroupQueryAttention", None)]))
    found = [layer for layer in layers if isinstance(layer, kinds)]
    return {id(inner) for layer in found for inner in layer._flatten_layers(include_self=False)}


def _kernels(layer, rectified: bool) -> list[Kernel]:
    kinds = tf.keras.layers
    if isinstance(layer, kinds.Dense):
        inputs, outputs = layer.kernel.shape
        return [Kernel(layer.kernel, (1, inputs, outputs), (0, 1, 2), 1, inputs, inputs, outputs)]
    if isinstance(layer, kinds.EinsumDense):
        return [_einsum(layer, rectified)]
    if isinstance(layer, kinds.SeparableConv1D | kinds.SeparableConv2D):
        return [_depthwise(layer.depthwise_kernel), _convolution(layer.pointwise_kernel, 1)]
    if isinstance(layer, kinds.DepthwiseConv1D | kinds.DepthwiseConv2D):
        old = getattr(layer, "depthwise_kernel", None)  # tf_keras
        return [_depthwise(layer.kernel if old is None else old)]
    if isinstance(layer, kinds.Conv1DTranspose | kinds.Conv2DTranspose | kinds.Conv3DTranspose):
        return [_transposed(layer)]
    if isinstance(layer, kinds.Conv1D | kinds.Conv2D | kinds.Conv3D):
        return [_convolution(layer.kernel, layer.groups)]
    gates = {kinds.LSTMCell: 4, kinds.GRUCell: 3, kinds.SimpleRNNCell: 1}
    count = next((n for kind, n in gates.items() if isinstance(layer, kind)), 0)
    return _recurrent(layer, count) if count else []


def _einsum(layer, rectified: bool) -> Kernel:
    """What the kernel shares only with the input is summed over: its inputs."""
    given, _, output = layer.equation.replace(" ", "").partition("->")
    given, _, kernel = given.partition(",")
    groups = [at for at, axis in enumerate(kernel) if axis in given and axis in output]
    inputs = [at for at, axis in enumerate(kernel) if axis not in output]
    outputs = [at for at, axis in enumerate(kernel) if axis not in given]
    shape = tuple(layer.kernel.shape)
    sizes = [math.prod(shape[at] for at in axes) for axes in (groups, inputs, outputs)]
    order = (*groups, *inputs, *outputs)
    return Kernel(layer.kernel, shape, order, sizes[0], sizes[1], sizes[1], sizes[2], rectified)


def _convolution(kernel, groups: int) -> Kernel:
    """(*window, inputs, groups x outputs)."""
    *window, inputs, outputs = kernel.shape
    shape = (*window, inputs, groups, outputs // groups)
    axes, size = len(shape), math.prod(window)
    order = (axes - 2, *range(axes - 2), axes - 1)
    fans = size * inputs, size * outputs // groups
    return Kernel(kernel, shape, order, groups, fans[0], *fans)


def _depthwise(kernel) -> Kernel:
    """(*window, channels, outputs of each): every channel is a group."""
    *window, channels, outputs = kernel.shape
    axes, size = len(kernel.shape), math.prod(window)
    order = (axes - 2, *range(axes - 2), axes - 1)
    return Kernel(kernel, tuple(kernel.shape), order, channels, size, size, size * outputs)


def _transposed(layer) -> Kernel:
    """(*window, outputs, inputs); an output of stride s gets 1 / s of the window each way."""
    *window, outputs, inputs = layer.kernel.shape
    axes, size = len(layer.kernel.shape), math.prod(window)
    order = (*range(axes - 2), axes - 1, axes - 2)
    fan_in = size * inputs / math.prod(layer.strides)
    shape = tuple(layer.kernel.shape)
    return Kernel(layer.kernel, shape, order, 1, size * inputs, fan_in, size * outputs)


def _recurrent(cell, gates: int) -> list[Kernel]:
    """(inputs, gates x units): every gate is a group."""
    found = []
    for kernel, recurrent in ((cell.kernel, False), (cell.recurrent_kernel, True)):
        inputs, units = kernel.shape[0], cell.units
        shape, order = (inputs, gates, units), (1, 0, 2)
        found.append(Kernel(kernel, shape, order, gates, inputs, inputs, units, False, recurrent))
    return found
