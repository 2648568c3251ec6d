"""The model families of the suite as plain `nn.Module`s, and their weights in and out.

What it holds: a model from a `shared.specs` spec, and the map between PyTorch's names and layouts
and the canonical ones of `shared.weights`.
Twin: `tf_impl/kit/models.py`.
Where the frameworks differ: images are NCHW here and NHWC there, convolution kernels are
(out, in, height, width) here and (height, width, in, out) there, dense kernels (out, in) here and
(in, out) there. Keras calls the complement of `bn_momentum` "momentum".
"""

import copy
import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pt_impl.kit import runtime
from shared.specs import (
    EXPANSION,
    BottleneckSpec,
    CNNSpec,
    GPTSpec,
    ModelSpec,
    ResNetSpec,
    bottlenecks,
)


class ConvBN(nn.Module):
    """A convolution without bias, followed by BatchNorm. (n, c, h, w) -> (n, out, h', w')."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
        spec: CNNSpec | ResNetSpec | BottleneckSpec,
        kernel: int = 3,
    ):
        super().__init__()
        padding = kernel // 2  # one on both sides of a 3x3 kernel, none for a 1x1
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=spec.bn_eps, momentum=spec.bn_momentum)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve and normalise."""
        return self.bn(self.conv(x))


class CNN(nn.Module):
    """3x3 convolutions with BatchNorm and ReLU, global average pool, linear head.

    (n, c, h, w) float -> logits (n, classes).
    """

    def __init__(self, spec: CNNSpec):
        super().__init__()
        channels = spec.input_shape[2]
        self.convolutions = []
        for index, (filters, stride) in enumerate(spec.convolutions):
            self.add_module(f"conv{index}", ConvBN(channels, filters, stride, spec))
            self.convolutions.append(f"conv{index}")
            channels = filters
        self.head = nn.Linear(channels, spec.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images."""
        for name in self.convolutions:
            x = F.relu(getattr(self, name)(x))
        return self.head(x.mean((2, 3)))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut, which is a 1x1 projection where the width changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, spec: ResNetSpec):
        super().__init__()
        self.conv0 = ConvBN(inputs, outputs, stride, spec)
        self.conv1 = ConvBN(outputs, outputs, 1, spec)
        self.shortcut = None
        if inputs != outputs:
            self.shortcut = ConvBN(inputs, outputs, stride, spec, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, outputs, h / stride, w / stride)."""
        y = self.conv1(F.relu(self.conv0(x)))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Module):
    """The CIFAR ResNet of He et al. (2015), section 4.2. (n, c, h, w) float -> (n, classes)."""

    def __init__(self, spec: ResNetSpec):
        super().__init__()
        self.stem = ConvBN(spec.input_shape[2], spec.widths[0], 1, spec)
        self.stages = [f"stage{index}" for index in range(len(spec.widths))]
        channels = spec.widths[0]
        for index, width in enumerate(spec.widths):
            stage = nn.Sequential()
            for block in range(spec.blocks_per_stage):
                stride = 2 if index > 0 and block == 0 else 1
                stage.add_module(f"block{block}", ResidualBlock(channels, width, stride, spec))
                channels = width
            self.add_module(f"stage{index}", stage)
        self.head = nn.Linear(channels, spec.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images."""
        x = F.relu(self.stem(x))
        for name in self.stages:
            x = getattr(self, name)(x)
        return self.head(x.mean((2, 3)))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut; the 3x3 has the stride."""

    def __init__(self, inputs: int, width: int, stride: int, spec: BottleneckSpec):
        super().__init__()
        outputs = EXPANSION * width
        self.conv0 = ConvBN(inputs, width, 1, spec, kernel=1)
        self.conv1 = ConvBN(width, width, stride, spec)
        self.conv2 = ConvBN(width, outputs, 1, spec, kernel=1)
        self.shortcut = None
        if inputs != outputs:
            self.shortcut = ConvBN(inputs, outputs, stride, spec, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, 4 * width, h / stride, w / stride)."""
        y = self.conv2(F.relu(self.conv1(F.relu(self.conv0(x)))))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class BottleneckResNet(nn.Module):
    """The ImageNet ResNet of He et al. (2015), table 1. (n, c, h, w) float -> (n, classes)."""

    def __init__(self, spec: BottleneckSpec):
        super().__init__()
        self.stem = ConvBN(spec.input_shape[2], spec.widths[0], 2, spec, kernel=7)
        for name, inputs, width, stride in bottlenecks(spec):
            stage, _, block = name.partition(".")
            if not hasattr(self, stage):
                self.add_module(stage, nn.Sequential())
            self.get_submodule(stage).add_module(block, Bottleneck(inputs, width, stride, spec))
        self.stages = [f"stage{index}" for index in range(len(spec.blocks))]
        self.head = nn.Linear(EXPANSION * spec.widths[-1], spec.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images."""
        x = F.max_pool2d(F.relu(self.stem(x)), 3, stride=2, padding=1)
        for name in self.stages:
            x = getattr(self, name)(x)
        return self.head(x.mean((2, 3)))


class TransformerBlock(nn.Module):
    """Pre-norm causal self-attention and feed-forward, each around a shortcut."""

    def __init__(self, spec: GPTSpec):
        super().__init__()
        self.heads, self.dropout = spec.heads, spec.dropout
        self.ln0 = nn.LayerNorm(spec.width, eps=spec.ln_eps)
        self.qkv = nn.Linear(spec.width, 3 * spec.width, bias=False)
        self.projection = nn.Linear(spec.width, spec.width, bias=False)
        self.ln1 = nn.LayerNorm(spec.width, eps=spec.ln_eps)
        self.up = nn.Linear(spec.width, 4 * spec.width)
        self.down = nn.Linear(4 * spec.width, spec.width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, width) -> (n, t, width)."""
        x = x + F.dropout(self.attend(self.ln0(x)), self.dropout, self.training)
        y = self.down(F.gelu(self.up(self.ln1(x)), approximate="tanh"))
        return x + F.dropout(y, self.dropout, self.training)

    def attend(self, x: Tensor) -> Tensor:
        """Causal multi-head attention; the columns of `qkv` are q, k and v, each head by head."""
        n, t, width = x.shape
        q, k, v = (
            part.view(n, t, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.projection(y.transpose(1, 2).reshape(n, t, width))


class GPT(nn.Module):
    """A decoder-only transformer. (n, t) int64 codes -> logits (n, t, vocabulary)."""

    def __init__(self, spec: GPTSpec):
        super().__init__()
        self.dropout = spec.dropout
        self.tokens = nn.Embedding(spec.vocabulary, spec.width)
        self.positions = nn.Embedding(spec.sequence_length, spec.width)
        self.blocks = [f"block{index}" for index in range(spec.layers)]
        for name in self.blocks:
            self.add_module(name, TransformerBlock(spec))
        self.ln = nn.LayerNorm(spec.width, eps=spec.ln_eps)
        self.head = nn.Linear(spec.width, spec.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next character at every position."""
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        x = F.dropout(x, self.dropout, self.training)
        for name in self.blocks:
            x = getattr(self, name)(x)
        return self.head(self.ln(x))


def build(spec: ModelSpec, weights: dict[str, np.ndarray] | None = None) -> nn.Module:
    """Build the model of `spec` on `runtime.device()`, with canonical `weights` if given.

    Without `weights` it keeps PyTorch's own initial values. Raises ValueError where the weights do
    not fit.
    """
    families = {"cnn": CNN, "resnet": ResNet, "bottleneck": BottleneckResNet, "gpt": GPT}
    model = families[spec.family](spec)
    if weights is not None:
        import_weights(model, weights)
    return model.to(runtime.device())


# Weights: PyTorch's names and layouts against the canonical ones ------------------------------

_CANONICAL = {
    nn.Conv2d: {"weight": "kernel"},
    nn.Linear: {"weight": "kernel", "bias": "bias"},
    nn.Embedding: {"weight": "embedding"},
    nn.LayerNorm: {"weight": "gamma", "bias": "beta"},
    nn.BatchNorm2d: {
        "weight": "gamma",
        "bias": "beta",
        "running_mean": "mean",
        "running_var": "variance",
    },
}


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Canonical name -> parameter, or running statistic of a BatchNorm."""
    found = {}
    for path, module in model.named_modules():
        # "stem.conv" holds the kernel of the canonical layer "stem".
        prefix = path.removesuffix(".conv")
        for own, canonical in _CANONICAL.get(type(module), {}).items():
            tensor = getattr(module, own)
            if tensor is not None:
                found[f"{prefix}.{canonical}"] = tensor
    return found


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Canonical name -> trainable parameter."""
    return {name: p for name, p in _named_tensors(model).items() if isinstance(p, nn.Parameter)}


def to_canonical(name: str, array: np.ndarray) -> np.ndarray:
    """Bring one tensor, or its gradient, from PyTorch's layout to the canonical one."""
    if name.endswith(".kernel"):
        # (out, in, height, width) -> (height, width, in, out), and (out, in) -> (in, out)
        array = array.transpose((2, 3, 1, 0) if array.ndim == 4 else (1, 0))
    return np.ascontiguousarray(array)


def _from_canonical(name: str, array: np.ndarray) -> np.ndarray:
    if name.endswith(".kernel"):
        array = array.transpose((3, 2, 0, 1) if array.ndim == 4 else (1, 0))
    return np.ascontiguousarray(array)


def import_weights(model: nn.Module, weights: dict[str, np.ndarray]) -> None:
    """Copy canonical float32 `weights` into `model`: parameters and running statistics.

    Raises ValueError, before anything is changed, where a name is missing or unknown or a shape
    differs.
    """
    tensors = _named_tensors(model)
    if problem := _mismatch(tensors, weights):
        raise ValueError(f"the weights do not fit the model: {problem}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(torch.from_numpy(_from_canonical(name, weights[name]).copy()))


def _mismatch(tensors: dict[str, Tensor], weights: dict[str, np.ndarray]) -> str | None:
    """Say what keeps `weights` from fitting, or None."""
    if missing := sorted(tensors.keys() - weights.keys()):
        return f"missing {', '.join(missing)}"
    if unknown := sorted(weights.keys() - tensors.keys()):
        return f"unknown {', '.join(unknown)}"
    for name, tensor in tensors.items():
        wanted = to_canonical(name, np.empty(tensor.shape, np.int8)).shape
        if weights[name].shape != wanted:
            return f"{name} has shape {weights[name].shape}, not {wanted}"
    return None


def export_weights(model: nn.Module) -> dict[str, np.ndarray]:
    """Canonical float32 copies of all parameters and running statistics."""
    return {
        name: to_canonical(name, tensor.detach().float().cpu().numpy()).copy()
        for name, tensor in _named_tensors(model).items()
    }


def parameter_count(model: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def copy_model(model: nn.Module, x=None) -> nn.Module:
    """Return a copy of any module that shares nothing with it, in the same mode.

    Parameters and buffers of both are compared and, on the example input `x` (a tuple of positional
    arguments, a dict of named ones, or one tensor), their outputs in evaluation mode. Without `x`
    there is none to compare: a module does not say what it takes.

    Raises ValueError where `x` does not fit the model, and NotImplementedError where Python cannot
    copy the model or the copy computes something else. `model` stays as it is.
    """
    wanted = None
    if x is not None:
        try:
            wanted = _infer(model, x)
        except Exception as error:
            raise ValueError(f"the model does not take the example input: {error}") from error
    try:
        other = copy.deepcopy(model)
    except Exception as error:  # such as a tensor that is not a leaf of the graph
        raise NotImplementedError(f"Python cannot copy the model: {error}") from error
    if apart := _apart(model.state_dict(), other.state_dict()):
        raise NotImplementedError(f"the copy has another state: {apart}")
    if x is not None and (apart := _apart(wanted, _infer(other, x))):
        raise NotImplementedError(f"the copy computes something else: {apart}")
    return other


def _infer(model: nn.Module, x):
    """Call the model in evaluation mode, then put the mode of each module back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            if isinstance(x, dict):
                return model(**x)
            return model(*x) if isinstance(x, tuple) else model(x)
    finally:
        for module, training in modes.items():
            module.training = training


def _apart(wanted, found) -> str | None:
    """Say where the tensors of two trees differ, or None; floats may by their last digits."""
    wanted, found = (dict(_tensors(tree, "")) for tree in (wanted, found))
    if wanted.keys() != found.keys():
        return f"{', '.join(sorted(wanted.keys() ^ found.keys()))} is in one of them alone"
    for name, ours in wanted.items():
        theirs = found[name]
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"{name} is {tuple(theirs.shape)}, not {tuple(ours.shape)}"
        if ours.is_floating_point() and ours.numel():
            ours, theirs = ours.double(), theirs.double()
            bound = 1e-5 * float(ours.abs().max())
            if not torch.allclose(ours, theirs, rtol=0.0, atol=bound, equal_nan=True):
                return f"{name} differs by {float((ours - theirs).abs().max()):.1e}"
        elif not torch.equal(ours, theirs):
            return f"{name} differs"
    return None


def _tensors(tree, name: str):
    """(name, tensor) of each tensor in a tensor, tuple, list, dict or dataclass."""
    if isinstance(tree, Tensor):
        yield name or "the output", tree
    elif isinstance(tree, (dict, list, tuple)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _tensors(value, f"{name}.{key}".lstrip("."))
    elif dataclasses.is_dataclass(tree):
        yield from _tensors(vars(tree), name)
