"""Frozen descriptions of data sets, models, training recipes and tasks.

Everything that two frameworks must agree on stands here, once: sizes, epsilons, momenta,
learning rates, batch sizes. Both kits read these values and set them explicitly, because the
frameworks' own defaults differ (Adam's epsilon, BatchNorm's momentum, AdamW's decay, ...).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log, prod

NO_LABEL = -100  # where nothing is asked; PyTorch's cross-entropy knows it by that


@dataclass(frozen=True)
class DatasetSpec:
    """A data set that is made or read offline.

    `kind` "digits": images, float32, NHWC in [0, 1] before standardising, labels int64.
    `kind` "text": `sequence_length + 1` character codes a row; x and y are int64, y shifted by one.
    `kind` "masked": `sequence_length` codes a row, some of them hidden; y has those that are asked
    for, as many in each row, and `NO_LABEL` elsewhere.
    `kind` "crops": square crops of two real photos, float32, NHWC, three channels, each channel
    standardised. Those of the test split show the same photos: they are for the proof that two
    programs predict alike, not for an accuracy.
    `kind` "file": the batches of a user's file, in a folder of this name: see `shared.user_model`.
    `kind` "domains": digits on black, three channels, and beside them the splits "target" (as many,
    over photos), "test" (over photos) and "source_test" (on black), standardised as the first.
    `kind` "photos": `train_size` JPEG files of about `image_size` pixels, in a sub-folder for each
    class; there are no arrays of them, and no test split.
    `kind` "scenes": at most `objects` digits of several sizes over a photo, without overlap. Images
    as of "crops"; labels float32, a row an object: left, top, right and bottom in pixels and the
    class, which is -1 in rows that hold no object.
    """

    name: str
    kind: str
    train_size: int
    test_size: int
    seed: int = 2026
    image_size: int = 32
    num_classes: int = 10
    sequence_length: int = 0
    objects: int = 0


class Spec:
    """What the spec of any model tells.

    `from_file`: whether a user's file makes the model, so that nothing is known of its layers.
    """

    from_file = False


@dataclass(frozen=True)
class CNNSpec(Spec):
    """Convolutions with BatchNorm and ReLU, then global average pooling and a dense head.

    `convolutions` holds (filters, stride) of 3x3 convolutions with explicit padding of one on
    each side (TensorFlow's SAME pads a strided convolution differently) and no bias, since
    BatchNorm follows. Without `batch_norm` none follows, and they have a bias.
    """

    input_shape: tuple[int, int, int]
    convolutions: tuple[tuple[int, int], ...]
    num_classes: int
    batch_norm: bool = True
    bn_momentum: float = 0.1  # share of the new batch; Keras calls 1 - this "momentum"
    bn_eps: float = 1e-5
    family: str = "cnn"


@dataclass(frozen=True)
class ResNetSpec(Spec):
    """The ResNet of two-convolution blocks of He et al. (2015), with projection shortcuts.

    A stage a width, each of `blocks_per_stage` blocks: with three widths the CIFAR ResNet of
    section 4.2. `large_stem`: ImageNet's (table 1), a 7x7 convolution and a 3x3 maximum, each of
    stride 2, in place of a 3x3 convolution; with four widths and two blocks that is ResNet-18.
    """

    input_shape: tuple[int, int, int]
    blocks_per_stage: int
    widths: tuple[int, ...]
    num_classes: int
    large_stem: bool = False
    bn_momentum: float = 0.1
    bn_eps: float = 1e-5
    family: str = "resnet"


@dataclass(frozen=True)
class BottleneckSpec(Spec):
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
LARGE_KERNEL = 7  # of ImageNet's stem, which a maximum follows


@dataclass(frozen=True)
class GPTSpec(Spec):
    """A transformer of one stack: pre-norm, learned positions, tanh-GELU, untied head.

    `causal`: a place sees those before it, as in GPT; else all of them, as in BERT.

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
    causal: bool = True
    family: str = "gpt"


@dataclass(frozen=True)
class DetectorSpec(Spec):
    """A small one-stage detector without anchors, after FCOS (Tian et al., 2019).

    `convolutions` as in `CNNSpec`. What those leave whose numbers are in `levels` goes through one
    shared head, a 3x3 convolution: at each place a logit for each class, and a box as in YOLOX (Ge
    et al., 2021): how far its middle lies to the right and below, and the logarithms of its width
    and height, all in strides of the level.
    An object belongs to the level whose range holds its longer side: `limits` are the lengths in
    pixels between one level and the next. The levels have equally many channels.
    """

    input_shape: tuple[int, int, int]
    convolutions: tuple[tuple[int, int], ...]
    levels: tuple[int, ...]
    limits: tuple[float, ...]
    num_classes: int
    bn_momentum: float = 0.1
    bn_eps: float = 1e-5
    family: str = "detector"


@dataclass(frozen=True)
class FileSpec(Spec):
    """A model that a user's file makes: see `shared.user_model`.

    `parameters` and `state` are what one framework counts: names and shapes of what is trained, and
    of what is kept and not trained.
    """

    path: str
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()
    state: tuple[tuple[str, tuple[int, ...]], ...] = ()
    family: str = "file"
    from_file = True


ModelSpec = CNNSpec | ResNetSpec | BottleneckSpec | GPTSpec | DetectorSpec | FileSpec


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


# Values that an optimizer keeps of each parameter: momentum, or moments.
KEPT_OF_A_PARAMETER = {"sgd": 1, "adamw": 2, "rmsprop": 1}

LOSS_MARGIN = 0.05 * log(2)  # nats, which are 0.05 bits: a difference of losses that counts as none


@dataclass(frozen=True)
class LossCheck:
    """A short training that tells whether a row keeps its baseline's loss.

    `steps` batches of `batch_size`, then the loss of the test split's first `held_out` samples; of
    text the first `length` characters of each. `learning_rate` is so low that rounding stays
    rounding: initial weights that differ in their last bit move that loss by less than a tenth of
    `LOSS_MARGIN` (`tests/harness/test_checks.py`).
    """

    steps: int
    batch_size: int
    learning_rate: float
    held_out: int
    length: int = 0


# What a task may be judged by -> whether more of it is better. "mAP": the mean of the average
# precision over classes and ten overlaps from 0.5 to 0.95, in percent; "mAP50": at 0.5 only.
METRICS = {"accuracy": True, "bits_per_character": False, "mAP": True, "mAP50": True}


def more_is_better(metric: str | None) -> bool:
    """Whether more of a metric is better; of one that nobody knows, less is."""
    return METRICS.get(metric, False)


@dataclass(frozen=True)
class Task:
    """A model on a data set with its recipe, two batch sizes and its parity bar.

    `small_batch` shows what a step costs beside its arithmetic; `compute_batch` is large enough
    for arithmetic to dominate. `metric`: one of METRICS. `margin` is the difference in the metric
    that counts as none. `parity` bounds relative differences between the frameworks in float32.
    Without these three it is a classifier: a point of accuracy is no difference.
    `target`: the metric at which a training counts as having learned the task, where rows show how
    soon: about nine tenths of what plain training ends with.
    `rounding`: how far losses of the same work may be from one another within a framework.
    `paired`: whether both frameworks start from equal weights. `blocks`: of its matches at most, in
    a run that ends by looks: steps that are long scatter little, and take most of a run's time.
    `loss_check`: the short training by which rows are told that change how it is trained.
    `deployed`: the recipe of the one model a run that is trained for predictions; without it these
    are of initial weights.
    """

    name: str
    dataset: DatasetSpec
    model: ModelSpec
    recipe: Recipe
    small_batch: int
    compute_batch: int
    metric: str = "accuracy"
    margin: float = 1.0
    parity: float = 1e-5
    target: float | None = None
    rounding: float = 1e-5
    paired: bool = True
    blocks: int | None = None
    loss_check: LossCheck | None = None
    deployed: Recipe | None = None


_DIGITS = DatasetSpec("digits", "digits", train_size=9_000, test_size=1_797)
_TEXT = DatasetSpec("stdlib-text", "text", train_size=8_192, test_size=512, sequence_length=64)
_LONG_TEXT = DatasetSpec(
    "stdlib-text-256", "text", train_size=2_048, test_size=128, sequence_length=256
)
_MASKED = replace(_TEXT, name="stdlib-text-masked", kind="masked")
_LONG_MASKED = replace(_LONG_TEXT, name="stdlib-text-256-masked", kind="masked")
TEXT_CHECK = LossCheck(16, 4, learning_rate=3e-4, held_out=32, length=64)


def _text_task(
    name: str,
    dataset: DatasetSpec,
    *,
    small_batch: int,
    compute_batch: int,
    blocks: int | None = None,
    **model,
) -> Task:
    """A GPT that learns the next characters of `dataset`, or a BERT that learns hidden ones.

    `model` are further fields of its spec.
    """
    masked = dataset.kind == "masked"
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
        model=GPTSpec(
            vocabulary=99 if masked else 98,  # one more: the code of what is hidden
            sequence_length=dataset.sequence_length,
            causal=not masked,
            **model,
        ),
        recipe=recipe,
        small_batch=small_batch,
        compute_batch=compute_batch,
        metric="bits_per_character",
        margin=0.05,
        parity=1e-4,
        blocks=blocks,
        # Of masks that are drawn, no two rows have the same.
        loss_check=None if model.get("dropout") else TEXT_CHECK,
    )


_SHALLOW = {"width": 96, "heads": 4, "layers": 2, "small_batch": 2, "compute_batch": 8}
_DEEP = {"width": 128, "heads": 4, "layers": 12, "small_batch": 1, "compute_batch": 16}
_REALISTIC = {"width": 384, "heads": 6, "layers": 6, "small_batch": 1, "compute_batch": 4}
_REALISTIC |= {"blocks": 3}
_BASE = {"width": 768, "heads": 12, "layers": 12, "small_batch": 4, "compute_batch": 32}
_BASE |= {"blocks": 3}

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
            target=90.0,
            loss_check=LossCheck(128, 64, learning_rate=0.005, held_out=512),
            deployed=Recipe("sgd", learning_rate=0.02, epochs=2, accuracy_batch_size=64),
        ),
        # Few labels, each seen often: the training split is learned by heart, the test split isn't.
        Task(
            name="digits-few",
            dataset=DatasetSpec("digits-few", "digits", train_size=600, test_size=1_797),
            model=CNNSpec((32, 32, 1), ((16, 2), (32, 2), (32, 2), (64, 2)), num_classes=10),
            recipe=Recipe("sgd", learning_rate=0.02, epochs=40, accuracy_batch_size=60),
            small_batch=4,
            compute_batch=60,
            target=60.0,
        ),
        Task(
            name="digits-resnet20",
            dataset=_DIGITS,
            model=ResNetSpec((32, 32, 1), 3, (16, 32, 64), num_classes=10),
            recipe=Recipe("sgd", learning_rate=0.05, epochs=6, accuracy_batch_size=64),
            small_batch=4,
            compute_batch=32,
        ),
        # Domain adaptation: MNIST to MNIST-M (Ganin et al., 2016, section 5.2.4) in small. Network
        # and rate are those of digits-cnn; the epochs make about 500 steps.
        Task(
            name="digits-to-photos",
            dataset=DatasetSpec("digits-domains", "domains", train_size=2_560, test_size=1_198),
            model=CNNSpec((32, 32, 3), ((16, 2), (32, 2), (32, 2), (64, 2)), num_classes=10),
            recipe=Recipe("sgd", learning_rate=0.02, epochs=12, accuracy_batch_size=64),
            small_batch=16,
            compute_batch=64,
        ),
        # At most a tenth of the parameters of digits-resnet20, its teacher: for distillation.
        Task(
            name="digits-student",
            dataset=_DIGITS,
            model=CNNSpec((32, 32, 1), ((8, 2), (16, 2), (32, 2), (32, 2)), num_classes=10),
            recipe=Recipe("sgd", learning_rate=0.02, epochs=4, accuracy_batch_size=64),
            small_batch=4,
            compute_batch=64,
        ),
        _text_task("text-gpt", _TEXT, **_SHALLOW),
        _text_task("text-bert", _MASKED, **_SHALLOW),
        # Deep, so that activations outweigh everything else: for techniques that save memory.
        _text_task("text-gpt-deep", _LONG_TEXT, **_DEEP),
        # With dropout, as transformers are trained: attention then keeps its scores. Each framework
        # draws its own masks, so twins cannot be compared step by step.
        _text_task("text-gpt-dropout", _LONG_TEXT, **_DEEP, dropout=0.1),
        # Wide: about 10 million parameters, for techniques that work on parameters.
        _text_task(
            "text-gpt-wide", _TEXT, width=512, heads=8, layers=3, small_batch=1, compute_batch=16
        ),
        # Of realistic size, for techniques whose answer depends on it: a GPT, a BERT and ResNet-18
        # of about 10 million parameters. The batch is the smallest power of two of which a step
        # keeps more activations than parameters and optimizer have values: see
        # docs/decisions/2026-11-28-realistic-work-is-the-headline.md.
        _text_task("text-gpt-10m", _LONG_TEXT, **_REALISTIC),
        _text_task("text-bert-10m", _LONG_MASKED, **_REALISTIC),
        # Of the base size of GPT-2 and BERT, 85 million parameters in their blocks: for a GPU.
        _text_task("text-gpt-base", _LONG_TEXT, **_BASE),
        _text_task("text-bert-base", _LONG_MASKED, **_BASE),
        Task(
            name="photos-resnet18",
            dataset=DatasetSpec(
                "photo-crops-64",
                "crops",
                train_size=256,
                test_size=2_048,
                image_size=64,
                num_classes=6,
            ),
            model=ResNetSpec((64, 64, 3), 2, (64, 128, 256, 512), num_classes=6, large_stem=True),
            # So low that rounding stays rounding: weights that are changed by 1e-6 move no loss of
            # ten steps by a tenth of the bar. At 0.02 they move it by 1.6e-4.
            loss_check=LossCheck(32, 8, learning_rate=0.001, held_out=256),
            # Of held-out crops 58% are right after 4 epochs, 66% after 6, 60% after 8 and 67% after
            # 10: 6 were taken after that was seen.
            deployed=Recipe("sgd", learning_rate=0.01, epochs=6, accuracy_batch_size=16),
            recipe=Recipe("sgd", learning_rate=0.001, epochs=4, accuracy_batch_size=32),
            small_batch=4,
            compute_batch=64,
            blocks=3,
        ),
        # Photos that are really decoded: files, only for input pipelines.
        Task(
            name="photos",
            dataset=DatasetSpec(
                "photos", "photos", train_size=512, test_size=0, image_size=256, num_classes=6
            ),
            model=CNNSpec((224, 224, 3), ((16, 2), (32, 2), (64, 2), (64, 2)), num_classes=6),
            recipe=Recipe("sgd", learning_rate=0.02, epochs=1, accuracy_batch_size=32),
            small_batch=8,
            compute_batch=32,
        ),
        # ResNet-50, of the size in which models are deployed: for predictions in runtimes.
        Task(
            name="photos-resnet50",
            dataset=DatasetSpec(
                "photo-crops", "crops", train_size=256, test_size=64, image_size=224, num_classes=6
            ),
            model=BottleneckSpec((224, 224, 3), (3, 4, 6, 3), (64, 128, 256, 512), num_classes=6),
            recipe=Recipe("sgd", learning_rate=0.02, epochs=1, accuracy_batch_size=8),
            small_batch=2,
            compute_batch=8,
            blocks=3,
        ),
        # Where are the digits, and which? The margin is twice that of accuracy, set before anything
        # was trained: mAP averages ten overlaps of which the strictest ask for half a pixel, and
        # scatters about twice as much between seeds; eight seeds can just establish two points.
        # Eight epochs are no plateau: more would gain more, at 18 s a seed on one thread as it is.
        # An evaluation takes 25 steps' time, so that no target is looked for on the way.
        Task(
            name="digits-detection",
            dataset=DatasetSpec(
                "digit-scenes", "scenes", train_size=1_500, test_size=256, image_size=64, objects=4
            ),
            model=DetectorSpec(
                (64, 64, 3),
                ((16, 2), (32, 2), (64, 1), (64, 2), (64, 1)),
                levels=(2, 4),
                limits=(16.0,),
                num_classes=10,
            ),
            recipe=Recipe("adamw", learning_rate=3e-3, epochs=8, accuracy_batch_size=16),
            small_batch=4,
            compute_batch=16,
            metric="mAP",
            margin=2.0,
            parity=1e-4,  # as of all that is trained with AdamW
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
    if isinstance(spec, GPTSpec):
        return _gpt_layers(spec)
    convolutions = [
        Layer(name, prod(size) * prod(kernel), input_gradient=number > 0)
        for number, (name, kernel, size) in enumerate(_convolutions(spec))
    ]
    places = 1
    if isinstance(spec, DetectorSpec):
        places = sum(height * width for height, width, _ in level_sizes(spec))
    return [*convolutions, Layer("head", places * prod(_head(spec)))]


Kernel = tuple[int, int, int, int]  # height, width, channels in and out


def _convolutions(spec: ModelSpec) -> Iterator[tuple[str, Kernel, list[int]]]:
    """Each convolution but a head, in order: its name, its kernel, height and width behind it."""
    *size, channels = spec.input_shape
    if isinstance(spec, CNNSpec | DetectorSpec):
        for index, (filters, stride) in enumerate(spec.convolutions):
            size = _strided(size, stride)
            yield f"conv{index}", (3, 3, channels, filters), size
            channels = filters
        return
    bottleneck = isinstance(spec, BottleneckSpec)
    large = bottleneck or spec.large_stem
    length, stride = (LARGE_KERNEL, 2) if large else (3, 1)
    size = _strided(size, stride)
    yield "stem", (length, length, channels, spec.widths[0]), size
    size = _strided(size, stride)  # the maximum, where there is one
    for name, inputs, width, stride in residual_blocks(spec):
        small = _strided(size, stride)
        outputs = _outputs(spec, width)
        if bottleneck:
            yield f"{name}.conv0", (1, 1, inputs, width), size
            yield f"{name}.conv1", (3, 3, width, width), small
            yield f"{name}.conv2", (1, 1, width, outputs), small
        else:
            yield f"{name}.conv0", (3, 3, inputs, width), small
            yield f"{name}.conv1", (3, 3, width, width), small
        if inputs != outputs:
            yield f"{name}.shortcut", (1, 1, inputs, outputs), small
        size = small


def _head(spec: ModelSpec) -> tuple[int, ...]:
    """The shape of the head's kernel: a detector's is a convolution."""
    if isinstance(spec, CNNSpec | DetectorSpec):
        channels = spec.convolutions[-1][0]
    else:
        channels = _outputs(spec, spec.widths[-1])
    if isinstance(spec, DetectorSpec):
        return (3, 3, channels, spec.num_classes + 4)
    return (channels, spec.num_classes)


def level_sizes(spec: DetectorSpec) -> list[tuple[int, int, int]]:
    """Height and width of each level of a detector, and its stride in pixels of the image."""
    size, total, levels = list(spec.input_shape[:2]), 1, []
    for index, (_, stride) in enumerate(spec.convolutions):
        size, total = _strided(size, stride), total * stride
        if index in spec.levels:
            levels.append((*size, total))
    return levels


def _strided(size: list[int], stride: int) -> list[int]:
    """Height and width after a kernel of odd size with padding on both sides of half of it."""
    return [-(-length // stride) for length in size]


def residual_blocks(spec: ResNetSpec | BottleneckSpec) -> list[tuple[str, int, int, int]]:
    """Name, channels that go in, width and stride of each block, in order."""
    stages = len(spec.widths)
    counts = spec.blocks if isinstance(spec, BottleneckSpec) else [spec.blocks_per_stage] * stages
    blocks, channels = [], spec.widths[0]
    for stage, (count, width) in enumerate(zip(counts, spec.widths, strict=True)):
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            blocks.append((f"stage{stage}.block{block}", channels, width, stride))
            channels = _outputs(spec, width)
    return blocks


def _outputs(spec: ResNetSpec | BottleneckSpec, width: int) -> int:
    """The channels that leave a block of this width."""
    return EXPANSION * width if isinstance(spec, BottleneckSpec) else width


def _gpt_layers(spec: GPTSpec) -> list[Layer]:
    length, width = spec.sequence_length, spec.width
    products = []
    for index in range(spec.layers):
        name = f"block{index}"
        products.append(Layer(f"{name}.qkv", length * width * 3 * width))
        # Scores and weighted values over all pairs: the mask saves no arithmetic on a CPU.
        products.append(Layer(f"{name}.attention", 2 * length * length * width))
        products.append(Layer(f"{name}.projection", length * width * width))
        products.append(Layer(f"{name}.up", length * width * 4 * width))
        products.append(Layer(f"{name}.down", length * 4 * width * width))
    return [*products, Layer("head", length * width * spec.vocabulary)]


def forward_flops(spec: ModelSpec, batch_size: int) -> int | None:
    """FLOPs of one forward pass: two per multiply-accumulate, of convolutions and products.

    None of a model whose layers are not described here.
    """
    if isinstance(spec, FileSpec):
        return None
    return 2 * batch_size * sum(layer.macs for layer in layers(spec))


def train_step_flops(spec: ModelSpec, batch_size: int) -> int | None:
    """FLOPs of forward, weight gradients and input gradients (none for the first layer).

    None of a model whose layers are not described here.
    """
    if isinstance(spec, FileSpec):
        return None
    each = (layer.macs * (3 if layer.input_gradient else 2) for layer in layers(spec))
    return 2 * batch_size * sum(each)


def kept_activations(spec: ModelSpec, batch_size: int) -> int | None:
    """Values that a plain train step in float32 keeps of its forward pass for its backward pass.

    As PyTorch keeps them in eager mode, with fused attention and without dropout: TensorFlow keeps
    the scores of attention, too. The batch and what is kept of a row or a channel are left out.
    None of a model whose layers are not described here.
    """
    if isinstance(spec, FileSpec):
        return None
    if isinstance(spec, GPTSpec):
        # Of a block: the input of each normalisation and of each product, q, k and v, what
        # attention gives, and up's result. At the end the last two inputs and the logits.
        place = spec.layers * 16 * spec.width + 2 * spec.width + spec.vocabulary
        return batch_size * spec.sequence_length * place
    kept = 0
    for name, kernel, size in _convolutions(spec):
        # What BatchNorm is given, and what the rectifier behind it, or behind the sum, leaves.
        rectified = not name.endswith("shortcut")
        normalised = getattr(spec, "batch_norm", True)
        kept += (normalised + rectified) * prod(size) * kernel[-1]
        if name == "stem" and kernel[0] == LARGE_KERNEL:  # and where each maximum was, in 8 bytes
            kept += 3 * prod(_strided(size, 2)) * kernel[-1]
    return batch_size * kept


def lasting_values(task: Task) -> int | None:
    """Values that stay from step to step: parameters, and what the optimizer keeps of each."""
    if isinstance(task.model, FileSpec):
        return None
    return (1 + KEPT_OF_A_PARAMETER[task.recipe.optimizer]) * parameter_count(task.model)


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of each trainable parameter, in canonical layout.

    Convolution kernels are (height, width, in, out), dense kernels (in, out), embeddings
    (entries, width).
    """
    if isinstance(spec, FileSpec):
        return dict(spec.parameters)
    if isinstance(spec, GPTSpec):
        return _gpt_shapes(spec)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, kernel, _ in _convolutions(spec):
        shapes[f"{name}.kernel"] = kernel
        if isinstance(spec, CNNSpec) and not spec.batch_norm:
            shapes[f"{name}.bias"] = kernel[-1:]
        else:
            shapes[f"{name}.bn.gamma"] = shapes[f"{name}.bn.beta"] = kernel[-1:]
    head = _head(spec)
    return shapes | {"head.kernel": head, "head.bias": head[-1:]}


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
    if isinstance(spec, FileSpec):
        return dict(spec.state)
    state = {}
    for name, shape in parameter_shapes(spec).items():
        if name.endswith(".bn.gamma"):
            state[name.replace("gamma", "mean")] = shape
            state[name.replace("gamma", "variance")] = shape
    return state


def parameter_count(spec: ModelSpec) -> int:
    """Number of trainable parameters."""
    return sum(prod(shape) for shape in parameter_shapes(spec).values())
