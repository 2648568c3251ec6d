"""Frozen descriptions of data sets, models, training recipes and tasks.

Everything that two frameworks must agree on stands here, once: sizes, epsilons, momenta,
learning rates, batch sizes. Both kits read these values and set them explicitly, because the
frameworks' own defaults differ (Adam's epsilon, BatchNorm's momentum, AdamW's decay, ...).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class DatasetSpec:
    """A data set that is made or read offline.

    `kind` "digits": images, float32, NHWC in [0, 1] before standardising, labels int64.
    `kind` "text": `sequence_length + 1` character codes a row; x and y are int64, y shifted by one.
    `kind` "crops": square crops of two real photos, float32, NHWC, three channels, each channel
    standardised. Those of the test split show the same photos: they are for the proof that two
    programs predict alike, not for an accuracy.
    `kind` "photos": `train_size` JPEG files of about `image_size` pixels, in a sub-folder for each
    class; there are no arrays of them, and no test split.
    """

    name: str
    kind: str
    train_size: int
    test_size: int
    seed: int = 2026
    image_size: int = 32
    num_classes: int = 10
    sequence_length: int = 0


@dataclass(frozen=True)
class CNNSpec:
    """Convolutions with BatchNorm and ReLU, then global average pooling and a dense head.

    `convolutions` holds (filters, stride) of 3x3 convolutions with explicit padding of one on
    each side (TensorFlow's SAME pads a strided convolution differently) and no bias, since
    BatchNorm follows.
    """

    input_shape: tuple[int, int, int]
    convolutions: tuple[tuple[int, int], ...]
    num_classes: int
    bn_momentum: float = 0.1  # share of the new batch; Keras calls 1 - this "momentum"
    bn_eps: float = 1e-5
    family: str = "cnn"


@dataclass(frozen=True)
class ResNetSpec:
    """The CIFAR ResNet of He et al. (2015), section 4.2, with projection shortcuts.

    Three stages of `blocks_per_stage` two-convolution blocks: 6n + 2 layers.
    """

    input_shape: tuple[int, int, int]
    blocks_per_stage: int
    widths: tuple[int, ...]
    num_classes: int
    bn_momentum: float = 0.1
    bn_eps: float = 1e-5
    family: str = "resnet"


@dataclass(frozen=True)
class BottleneckSpec:
    """The ImageNet ResNet of He et al. (2015), table 1, with bottleneck blocks: 50 layers and more.

    A 7x7 stem and a 3x3 maximum, each of stride 2, then stages of `blocks` blocks. A block is a 1x1
    convolution to its stage's width, a 3x3 one and a 1x1 one to `EXPANSION` times the width, around
    a shortcut, which is a projection where the channels change. The first block of each stage but
    the first halves the image in its 3x3 convolution ("v1.5", as torchvision has it), not in the
    1x1 before it.
    """

    input_shape: tuple[int, int, int]
    blocks: tuple[int, ...]
    widths: tuple[int, ...]
    num_classes: int
    bn_momentum: float = 0.1
    bn_eps: float = 1e-5
    family: str = "bottleneck"


EXPANSION = 4  # channels that leave a bottleneck block, over its width


@dataclass(frozen=True)
class GPTSpec:
    """A decoder-only transformer: pre-norm, learned positions, tanh-GELU, untied head.

    No projection has a bias but the two of the feed-forward block. The attention's key bias
    would have a true gradient of zero, so there is none. `dropout` is where GPT-2 has it: on the
    embeddings, the shares of the attention, and what each branch adds.
    """

    vocabulary: int
    sequence_length: int
    width: int
    heads: int
    layers: int
    ln_eps: float = 1e-5
    dropout: float = 0.0
    family: str = "gpt"


ModelSpec = CNNSpec | ResNetSpec | BottleneckSpec | GPTSpec


@dataclass(frozen=True)
class Recipe:
    """How a task is trained. Nothing is left to a framework's default.

    `optimizer`: "sgd" (with `momentum`, not Nesterov), "adamw" (the only one with `weight_decay`)
    or "rmsprop". The learning rate is constant. `epochs` is what reaches the plateau, and
    `accuracy_batch_size` what is used there.
    """

    optimizer: str
    learning_rate: float
    epochs: int
    accuracy_batch_size: int
    momentum: float = 0.9
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    rho: float = 0.9


@dataclass(frozen=True)
class Task:
    """A model on a data set with its recipe, two batch sizes and its parity bar.

    `small_batch` shows what a step costs beside its arithmetic; `compute_batch` is large enough
    for arithmetic to dominate. `metric`: "accuracy" (percent, more is better) or
    "bits_per_character" (less is better). `margin` is the difference in the metric that counts
    as none. `parity` bounds relative differences between the frameworks in float32.
    """

    name: str
    dataset: DatasetSpec
    model: ModelSpec
    recipe: Recipe
    small_batch: int
    compute_batch: int
    metric: str
    margin: float
    parity: float


_DIGITS = DatasetSpec("digits", "digits", train_size=9_000, test_size=1_797)
_TEXT = DatasetSpec("stdlib-text", "text", train_size=8_192, test_size=512, sequence_length=64)
_LONG_TEXT = DatasetSpec(
    "stdlib-text-256", "text", train_size=2_048, test_size=128, sequence_length=256
)


def _text_task(
    name: str, dataset: DatasetSpec, *, small_batch: int, compute_batch: int, **model
) -> Task:
    """A GPT that learns characters of `dataset`; `model` are further fields of its spec."""
    recipe = Recipe(
        "adamw",
        learning_rate=1e-3,
        epochs=4,
        accuracy_batch_size=32,
        weight_decay=0.01,
        beta2=0.99,
    )
    return Task(
        name=name,
        dataset=dataset,
        model=GPTSpec(vocabulary=98, sequence_length=dataset.sequence_length, **model),
        recipe=recipe,
        small_batch=small_batch,
        compute_batch=compute_batch,
        metric="bits_per_character",
        margin=0.05,
        parity=1e-4,
    )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="digits-cnn",
            dataset=_DIGITS,
            model=CNNSpec((32, 32, 1), ((16, 2), (32, 2), (32, 2), (64, 2)), num_classes=10),
            recipe=Recipe("sgd", learning_rate=0.02, epochs=4, accuracy_batch_size=64),
            small_batch=4,
            compute_batch=128,
            metric="accuracy",
            margin=1.0,
            parity=1e-5,
        ),
        Task(
            name="digits-resnet20",
            dataset=_DIGITS,
            model=ResNetSpec((32, 32, 1), 3, (16, 32, 64), num_classes=10),
            recipe=Recipe("sgd", learning_rate=0.05, epochs=6, accuracy_batch_size=64),
            small_batch=4,
            compute_batch=32,
            metric="accuracy",
            margin=1.0,
            parity=1e-5,
        ),
        # At most a tenth of the parameters of digits-resnet20, its teacher: for distillation.
        Task(
            name="digits-student",
            dataset=_DIGITS,
            model=CNNSpec((32, 32, 1), ((8, 2), (16, 2), (32, 2), (32, 2)), num_classes=10),
            recipe=Recipe("sgd", learning_rate=0.02, epochs=4, accuracy_batch_size=64),
            small_batch=4,
            compute_batch=64,
            metric="accuracy",
            margin=1.0,
            parity=1e-5,
        ),
        _text_task("text-gpt", _TEXT, width=96, heads=4, layers=2, small_batch=2, compute_batch=8),
        # Deep, so that activations outweigh everything else: for techniques that save memory.
        _text_task(
            "text-gpt-deep",
            _LONG_TEXT,
            width=128,
            heads=4,
            layers=12,
            small_batch=1,
            compute_batch=16,
        ),
        # With dropout, as transformers are trained: attention then keeps its scores. Each framework
        # draws masks of its own, so twins cannot be compared step by step.
        _text_task(
            "text-gpt-dropout",
            _LONG_TEXT,
            width=128,
            heads=4,
            layers=12,
            dropout=0.1,
            small_batch=1,
            compute_batch=16,
        ),
        # Wide: about 10 million parameters, for techniques that work on parameters.
        _text_task(
            "text-gpt-wide", _TEXT, width=512, heads=8, layers=3, small_batch=1, compute_batch=16
        ),
        # Photos that are really decoded: files, for input pipelines alone.
        Task(
            name="photos",
            dataset=DatasetSpec(
                "photos", "photos", train_size=1_024, test_size=0, image_size=256, num_classes=6
            ),
            model=CNNSpec((224, 224, 3), ((16, 2), (32, 2), (64, 2), (64, 2)), num_classes=6),
            recipe=Recipe("sgd", learning_rate=0.02, epochs=1, accuracy_batch_size=32),
            small_batch=8,
            compute_batch=32,
            metric="accuracy",
            margin=1.0,
            parity=1e-5,
        ),
        # ResNet-50, of the size in which models are deployed: for predictions in runtimes.
        Task(
            name="photos-resnet50",
            dataset=DatasetSpec(
                "photo-crops", "crops", train_size=64, test_size=64, image_size=224, num_classes=6
            ),
            model=BottleneckSpec((224, 224, 3), (3, 4, 6, 3), (64, 128, 256, 512), num_classes=6),
            recipe=Recipe("sgd", learning_rate=0.02, epochs=1, accuracy_batch_size=8),
            small_batch=2,
            compute_batch=8,
            metric="accuracy",
            margin=1.0,
            parity=1e-5,
        ),
    )
}


@dataclass(frozen=True)
class Layer:
    """One multiply-accumulate layer: `name`, MACs a sample, and whether the input's gradient is
    needed (not for the first layer, whose input is data)."""

    name: str
    macs: int
    input_gradient: bool = True


def layers(spec: ModelSpec) -> list[Layer]:
    """The matrix products and convolutions of `spec`, in order, with their MACs a sample."""
    if isinstance(spec, CNNSpec):
        return _cnn_layers(spec)
    if isinstance(spec, ResNetSpec):
        return _resnet_layers(spec)
    if isinstance(spec, BottleneckSpec):
        return _bottleneck_layers(spec)
    return _gpt_layers(spec)


def _cnn_layers(spec: CNNSpec) -> list[Layer]:
    *size, channels = spec.input_shape
    found = []
    for index, (filters, stride) in enumerate(spec.convolutions):
        size = _strided(size, stride)
        macs = prod(size) * 9 * channels * filters
        found.append(Layer(f"conv{index}", macs, input_gradient=index > 0))
        channels = filters
    return [*found, Layer("head", channels * spec.num_classes)]


def _strided(size: list[int], stride: int) -> list[int]:
    """Height and width after a kernel of odd size with padding on both sides of half of it."""
    return [-(-length // stride) for length in size]


def _resnet_layers(spec: ResNetSpec) -> list[Layer]:
    *size, channels = spec.input_shape
    found = [Layer("stem", prod(size) * 9 * channels * spec.widths[0], input_gradient=False)]
    channels = spec.widths[0]
    for stage, width in enumerate(spec.widths):
        for block in range(spec.blocks_per_stage):
            name = f"stage{stage}.block{block}"
            size = _strided(size, 2 if stage > 0 and block == 0 else 1)
            found.append(Layer(f"{name}.conv0", prod(size) * 9 * channels * width))
            found.append(Layer(f"{name}.conv1", prod(size) * 9 * width * width))
            if channels != width:
                found.append(Layer(f"{name}.shortcut", prod(size) * channels * width))
            channels = width
    return [*found, Layer("head", channels * spec.num_classes)]


def _bottleneck_layers(spec: BottleneckSpec) -> list[Layer]:
    *size, channels = spec.input_shape
    size = _strided(size, 2)
    found = [Layer("stem", prod(size) * 49 * channels * spec.widths[0], input_gradient=False)]
    size, channels = _strided(size, 2), spec.widths[0]
    for name, inputs, width, stride in bottlenecks(spec):
        small = _strided(size, stride)
        found.append(Layer(f"{name}.conv0", prod(size) * inputs * width))
        found.append(Layer(f"{name}.conv1", prod(small) * 9 * width * width))
        size, channels = small, EXPANSION * width
        found.append(Layer(f"{name}.conv2", prod(size) * width * channels))
        if inputs != channels:
            found.append(Layer(f"{name}.shortcut", prod(size) * inputs * channels))
    return [*found, Layer("head", channels * spec.num_classes)]


def bottlenecks(spec: BottleneckSpec) -> list[tuple[str, int, int, int]]:
    """Name, channels that go in, width and stride of each block, in order."""
    found, channels = [], spec.widths[0]
    for stage, (count, width) in enumerate(zip(spec.blocks, spec.widths, strict=True)):
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            found.append((f"stage{stage}.block{block}", channels, width, stride))
            channels = EXPANSION * width
    return found


def _gpt_layers(spec: GPTSpec) -> list[Layer]:
    length, width = spec.sequence_length, spec.width
    found = []
    for index in range(spec.layers):
        name = f"block{index}"
        found.append(Layer(f"{name}.qkv", length * width * 3 * width))
        # Scores and weighted values over all pairs: the mask saves no arithmetic on a CPU.
        found.append(Layer(f"{name}.attention", 2 * length * length * width))
        found.append(Layer(f"{name}.projection", length * width * width))
        found.append(Layer(f"{name}.up", length * width * 4 * width))
        found.append(Layer(f"{name}.down", length * 4 * width * width))
    return [*found, Layer("head", length * width * spec.vocabulary)]


def forward_flops(spec: ModelSpec, batch_size: int) -> int:
    """FLOPs of one forward pass: two per multiply-accumulate, convolutions and products alone."""
    return 2 * batch_size * sum(layer.macs for layer in layers(spec))


def train_step_flops(spec: ModelSpec, batch_size: int) -> int:
    """FLOPs of forward, weight gradients and input gradients (none for the first layer)."""
    each = (layer.macs * (3 if layer.input_gradient else 2) for layer in layers(spec))
    return 2 * batch_size * sum(each)


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of each trainable parameter, in canonical layout.

    Convolution kernels are (height, width, in, out), dense kernels (in, out), embeddings
    (entries, width).
    """
    if isinstance(spec, GPTSpec):
        return _gpt_shapes(spec)
    shapes: dict[str, tuple[int, ...]] = {}

    def convolution(name: str, inputs: int, outputs: int, kernel: int = 3) -> None:
        shapes[f"{name}.kernel"] = (kernel, kernel, inputs, outputs)
        shapes[f"{name}.bn.gamma"] = (outputs,)
        shapes[f"{name}.bn.beta"] = (outputs,)

    channels = spec.input_shape[2]
    if isinstance(spec, CNNSpec):
        for index, (filters, _) in enumerate(spec.convolutions):
            convolution(f"conv{index}", channels, filters)
            channels = filters
    elif isinstance(spec, BottleneckSpec):
        convolution("stem", channels, spec.widths[0], kernel=7)
        for name, inputs, width, _ in bottlenecks(spec):
            channels = EXPANSION * width
            convolution(f"{name}.conv0", inputs, width, kernel=1)
            convolution(f"{name}.conv1", width, width)
            convolution(f"{name}.conv2", width, channels, kernel=1)
            if inputs != channels:
                convolution(f"{name}.shortcut", inputs, channels, kernel=1)
    else:
        convolution("stem", channels, spec.widths[0])
        channels = spec.widths[0]
        for stage, width in enumerate(spec.widths):
            for block in range(spec.blocks_per_stage):
                name = f"stage{stage}.block{block}"
                convolution(f"{name}.conv0", channels, width)
                convolution(f"{name}.conv1", width, width)
                if channels != width:
                    convolution(f"{name}.shortcut", channels, width, kernel=1)
                channels = width
    shapes["head.kernel"] = (channels, spec.num_classes)
    shapes["head.bias"] = (spec.num_classes,)
    return shapes


def _gpt_shapes(spec: GPTSpec) -> dict[str, tuple[int, ...]]:
    width = spec.width
    shapes: dict[str, tuple[int, ...]] = {
        "tokens.embedding": (spec.vocabulary, width),
        "positions.embedding": (spec.sequence_length, width),
    }
    for index in range(spec.layers):
        name = f"block{index}"
        shapes[f"{name}.ln0.gamma"] = shapes[f"{name}.ln0.beta"] = (width,)
        shapes[f"{name}.qkv.kernel"] = (width, 3 * width)
        shapes[f"{name}.projection.kernel"] = (width, width)
        shapes[f"{name}.ln1.gamma"] = shapes[f"{name}.ln1.beta"] = (width,)
        shapes[f"{name}.up.kernel"] = (width, 4 * width)
        shapes[f"{name}.up.bias"] = (4 * width,)
        shapes[f"{name}.down.kernel"] = (4 * width, width)
        shapes[f"{name}.down.bias"] = (width,)
    shapes["ln.gamma"] = shapes["ln.beta"] = (width,)
    shapes["head.kernel"] = (width, spec.vocabulary)
    return shapes


def state_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of what is kept but not trained: BatchNorm's running statistics."""
    state = {}
    for name, shape in parameter_shapes(spec).items():
        if name.endswith(".bn.gamma"):
            state[name.replace("gamma", "mean")] = shape
            state[name.replace("gamma", "variance")] = shape
    return state


def parameter_count(spec: ModelSpec) -> int:
    """Number of trainable parameters."""
    return sum(prod(shape) for shape in parameter_shapes(spec).values())
