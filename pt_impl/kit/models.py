"""The model families of the suite as plain `nn.Module`s, and their weights in and out.

What it holds: a model from a `shared.specs` spec, and the map between PyTorch's names and layouts
and the canonical ones of `shared.weights`.
Twin: `tf_impl/kit/models.py`.
Where the frameworks differ: images are NCHW here and NHWC there, convolution kernels are
(out, in, height, width) here and (height, width, in, out) there, dense kernels (out, in) here and
(in, out) there. Keras calls the complement of `bn_momentum` "momentum".
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pt_impl.kit import runtime
from shared import keras_models
from shared.specs import (
    EXPANSION,
    BottleneckSpec,
    CNNSpec,
    DetectorSpec,
    GPTSpec,
    ModelSpec,
    ResNetSpec,
    residual_blocks,
)


class ConvBN(nn.Module):
    """A convolution without bias, followed by BatchNorm. (n, c, h, w) -> (n, out, h', w')."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
        spec: CNNSpec | ResNetSpec | BottleneckSpec | DetectorSpec,
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
    """3x3 convolutions with BatchNorm (or a bias) and ReLU, global average pool, linear head.

    (n, c, h, w) float -> logits (n, classes).
    """

    def __init__(self, spec: CNNSpec):
        super().__init__()
        channels = spec.input_shape[2]
        self.convolutions = []
        for index, (filters, stride) in enumerate(spec.convolutions):
            if spec.batch_norm:
                convolution = ConvBN(channels, filters, stride, spec)
            else:
                convolution = nn.Conv2d(channels, filters, 3, stride, padding=1)
            self.add_module(f"conv{index}", convolution)
            self.convolutions.append(f"conv{index}")
            channels = filters
        self.head = nn.Linear(channels, spec.num_classes)

    def features(self, x: Tensor) -> Tensor:
        """What the head is given of a batch of images."""
        for name in self.convolutions:
            x = F.relu(getattr(self, name)(x))
        return x.mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images."""
        return self.head(self.features(x))


class Detector(nn.Module):
    """A one-stage detector without anchors, see `DetectorSpec`.

    (n, c, h, w) float -> (n, places, classes + 4): all places of the first level row by row, then
    those of the next; logits of the classes, then the four numbers of a box.
    """

    def __init__(self, spec: DetectorSpec):
        super().__init__()
        self.levels, channels = spec.levels, spec.input_shape[2]
        self.convolutions = []
        for index, (filters, stride) in enumerate(spec.convolutions):
            self.add_module(f"conv{index}", ConvBN(channels, filters, stride, spec))
            self.convolutions.append(f"conv{index}")
            channels = filters
        self.head = nn.Conv2d(channels, spec.num_classes + 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """What the head says at each place of each level."""
        found = []
        for index, name in enumerate(self.convolutions):
            x = F.relu(getattr(self, name)(x))
            if index in self.levels:
                found.append(self.head(x).permute(0, 2, 3, 1).flatten(1, 2))
        return torch.cat(found, 1)


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
    """The ResNet of He et al. (2015), section 4.2 or table 1. (n, c, h, w) -> (n, classes)."""

    def __init__(self, spec: ResNetSpec):
        super().__init__()
        self.large_stem = spec.large_stem
        stride, kernel = (2, 7) if spec.large_stem else (1, 3)
        self.stem = ConvBN(spec.input_shape[2], spec.widths[0], stride, spec, kernel)
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

    def features(self, x: Tensor) -> Tensor:
        """What the head is given of a batch of images."""
        x = F.relu(self.stem(x))
        if self.large_stem:
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        for name in self.stages:
            x = getattr(self, name)(x)
        return x.mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images."""
        return self.head(self.features(x))


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
        for name, inputs, width, stride in residual_blocks(spec):
            stage, _, block = name.partition(".")
            if not hasattr(self, stage):
                self.add_module(stage, nn.Sequential())
            self.get_submodule(stage).add_module(block, Bottleneck(inputs, width, stride, spec))
        self.stages = [f"stage{index}" for index in range(len(spec.blocks))]
        self.head = nn.Linear(EXPANSION * spec.widths[-1], spec.num_classes)

    def features(self, x: Tensor) -> Tensor:
        """What the head is given of a batch of images."""
        x = F.max_pool2d(F.relu(self.stem(x)), 3, stride=2, padding=1)
        for name in self.stages:
            x = getattr(self, name)(x)
        return x.mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images."""
        return self.head(self.features(x))


class TransformerBlock(nn.Module):
    """Pre-norm self-attention and feed-forward, each around a shortcut."""

    def __init__(self, spec: GPTSpec):
        super().__init__()
        self.heads, self.dropout, self.causal = spec.heads, spec.dropout, spec.causal
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
        """Multi-head attention; the columns of `qkv` are q, k and v, each head by head."""
        n, t, width = x.shape
        q, k, v = (
            part.view(n, t, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        return self.projection(y.transpose(1, 2).reshape(n, t, width))


class GPT(nn.Module):
    """A transformer of one stack. (n, t) int64 codes -> logits (n, t, vocabulary)."""

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

    def features(self, x: Tensor) -> Tensor:
        """What the head is given at every position."""
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        x = F.dropout(x, self.dropout, self.training)
        for name in self.blocks:
            x = getattr(self, name)(x)
        return self.ln(x)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next character at every position, or of the hidden one at its own."""
        return self.head(self.features(x))


class Features(nn.Module):
    """A model of the kit without its head: the same modules, and the same mode."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """What the head is given."""
        return self.model.features(x)


def build(spec: ModelSpec, weights: dict[str, np.ndarray] | None = None) -> nn.Module:
    """Build the model of `spec` on `runtime.device()`, with canonical `weights` if given.

    Without `weights` it keeps PyTorch's own initial values. Raises ValueError where the weights do
    not fit.
    """
    families = {"cnn": CNN, "resnet": ResNet, "bottleneck": BottleneckResNet, "gpt": GPT}
    model = (families | {"detector": Detector})[spec.family](spec)
    if weights is not None:
        import_weights(model, weights)
    return model.to(runtime.device())


def split_head(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The model's features and its head, x -> features -> logits; both share its weights."""
    return Features(model), model.head


# Weights: PyTorch's names and layouts against the canonical ones ------------------------------

_CANONICAL = {
    nn.Conv2d: {"weight": "kernel", "bias": "bias"},
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
        kind = parametrize.type_before_parametrizations(module)  # such as LoRA
        for own, canonical in _CANONICAL.get(kind, {}).items():
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
    if keras_models.is_keras(model):  # on PyTorch
        keras_models.import_weights(model, weights)
        return
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
    if keras_models.is_keras(model):
        return keras_models.export_weights(model)
    return {
        name: to_canonical(name, tensor.detach().float().cpu().numpy()).copy()
        for name, tensor in _named_tensors(model).items()
    }


def parameter_count(model: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
