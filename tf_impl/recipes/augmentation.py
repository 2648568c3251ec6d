"""Augmentation: random changes of images during training.

    policy = Policy(rotation=10, zoom=0.1, shift=0.1, mixup=0.2)
    step = make_augmenting_step(step, policy, generator)  # on the device, a batch at once
    dataset = augmented_dataset(dataset, policy)  # or on the host, in a map of tf.data

What it changes: how an image looks in each epoch. The test set stays as it is. Geometry (flips,
rotation, zoom, shift) is one bilinear sampling of each image. Colour is brightness (added),
contrast (around the image's mean) and saturation (around its grey). Mixup (Zhang et al., 2018,
"mixup: Beyond Empirical Risk Minimization") blends two samples and their labels with a share drawn
from Beta(alpha, alpha). Cutmix (Yun et al., 2019) pastes a box of another sample and mixes labels
by area. `draw` draws random numbers and `transform` applies them.

Its twin: `pt_impl/recipes/augmentation.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps most if labels are few and the change keeps the label
true. A flipped digit is not a digit, and a six rotated far is a nine. Mixup and cutmix need longer
training, and their training loss can't be compared. On the host it slows the input pipeline, on the
device the step.

Run it alone: `python -m tf_impl.recipes.augmentation` prints accuracies and samples/s.

Copy with it: `shared/augmentation.py`, `tf_impl/kit/checks/augmentation.py`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from shared.augmentation import Policy, check_alpha, check_border
from tf_impl.kit.checks.augmentation import (
    check_dataset,
    check_float,
    check_images,
    check_nhwc,
    check_sample_losses,
)

BORDERS = {"zero": "CONSTANT", "nearest": "NEAREST", "reflect": "REFLECT"}
GREY = (0.299, 0.587, 0.114)  # of red, green and blue: ITU-R BT.601


class Parameters(NamedTuple):
    """What is done to each sample of a batch; None where it is done to none.

    Flips come first, then rotation and zoom about the middle, then the shift; colour is last.
    """

    flip_horizontal: tf.Tensor | None = None  # (batch,) bool: left becomes right
    flip_vertical: tf.Tensor | None = None  # (batch,) bool: up becomes down
    angle: tf.Tensor | None = None  # (batch,) degrees, counter-clockwise as one sees it
    zoom: tf.Tensor | None = None  # (batch,) 2 shows the middle twice as large
    shift: tf.Tensor | None = None  # (batch, 2) down and right, in shares of height and width
    brightness: tf.Tensor | None = None  # (batch,) is added
    contrast: tf.Tensor | None = None  # (batch,) multiplies what differs from the image's mean
    saturation: tf.Tensor | None = None  # (batch,) multiplies what differs from the pixel's grey


class Mix(NamedTuple):
    """Whom each sample is mixed with, and how."""

    partner: tf.Tensor  # (batch,) indices
    share: tf.Tensor  # (batch,) what is left of the sample itself
    box: tf.Tensor  # (batch, 4) top, bottom, left, right of what cutmix pastes; zeros for mixup


class MixedLabels(NamedTuple):
    """Labels of a mixed batch: `share` of `labels`, the rest of `partners`."""

    labels: tf.Tensor
    partners: tf.Tensor
    share: tf.Tensor


def draw(policy: Policy, x: tf.Tensor, generator) -> Parameters:
    """Draw what is done to each sample of the batch x.

    generator: a `tf.random.Generator`, or a seed, two integers, as stateless functions take it.
    All nine numbers of a sample are drawn whether they are needed or not: what is switched on does
    not change the numbers of the rest.
    """
    u = tf.random.stateless_uniform([tf.shape(x)[0], 9], _seeds(generator, 1)[0])

    def within(column: int, most: float, middle: float) -> tf.Tensor | None:
        return middle + most * (2 * u[:, column] - 1) if most else None

    return Parameters(
        flip_horizontal=u[:, 0] < policy.flip_horizontal if policy.flip_horizontal else None,
        flip_vertical=u[:, 1] < policy.flip_vertical if policy.flip_vertical else None,
        angle=within(2, policy.rotation, 0.0),
        zoom=within(3, policy.zoom, 1.0),
        shift=policy.shift * (2 * u[:, 4:6] - 1) if policy.shift else None,
        brightness=within(6, policy.brightness, 0.0),
        contrast=within(7, policy.contrast, 1.0),
        saturation=within(8, policy.saturation, 1.0),
    )


def transform(x: tf.Tensor, parameters: Parameters, *, border: str = "zero") -> tf.Tensor:
    """Apply `parameters` to the batch x, NHWC of a float dtype; x itself where they are None.

    Raises ValueError for another dtype or rank, and for a saturation without three channels.
    """
    check_border(border)
    p = parameters
    check_images(x, p.saturation is not None)
    if p.angle is None and p.zoom is None and p.shift is None:
        for flipped, axis in ((p.flip_horizontal, 2), (p.flip_vertical, 1)):
            if flipped is not None:
                x = tf.where(_column(flipped), tf.reverse(x, [axis]), x)
    else:
        x = _sample(x, p, BORDERS[border])
    if p.saturation is not None:
        grey = tf.reduce_sum(x * tf.constant(GREY, x.dtype), -1, keepdims=True)
        x = grey + (x - grey) * tf.cast(_column(p.saturation), x.dtype)
    if p.contrast is not None:
        # In float32: the sum of an image's values is beyond float16.
        mean = tf.reduce_mean(tf.cast(x, tf.float32), [1, 2, 3], keepdims=True)
        mean = tf.cast(mean, x.dtype)
        x = mean + (x - mean) * tf.cast(_column(p.contrast), x.dtype)
    return x if p.brightness is None else x + tf.cast(_column(p.brightness), x.dtype)


def draw_mixup(x: tf.Tensor, generator, *, alpha: float = 0.0) -> Mix:
    """Draw partners and shares of Beta(alpha, alpha) for the batch x; of 0, nothing is mixed."""
    for_share, for_partners = _seeds(generator, 2)
    share = tf.cast(_beta(tf.shape(x)[0], alpha, for_share), tf.float32)
    return Mix(_partners(x, for_partners), share, tf.zeros([tf.shape(x)[0], 4], tf.int64))


def draw_cutmix(x: tf.Tensor, generator, *, alpha: float = 0.0) -> Mix:
    """Draw partners and boxes for the batch x, NHWC; the share is what the box leaves of the area.

    A box has the image's proportions and 1 - Beta(alpha, alpha) of its area, about any pixel; what
    is beyond the image is cut off. Raises ValueError for an x of another rank.
    """
    check_nhwc(x)
    for_share, for_partners, for_place = _seeds(generator, 3)
    shape = tf.shape(x)
    removed = tf.cast(tf.sqrt(1 - _beta(shape[0], alpha, for_share)), tf.float32)
    place = tf.random.stateless_uniform([shape[0], 2], for_place)
    edges = []
    for axis in (0, 1):
        size = tf.cast(shape[1 + axis], tf.float32)
        half = tf.floor(size * removed / 2)
        middle = tf.floor(place[:, axis] * size)
        edges += [tf.clip_by_value(middle - half, 0, size)]
        edges += [tf.clip_by_value(middle + half, 0, size)]
    box = tf.cast(tf.stack(edges, 1), tf.int64)
    area = (box[:, 1] - box[:, 0]) * (box[:, 3] - box[:, 2])
    share = 1 - tf.cast(area, tf.float32) / tf.cast(shape[1] * shape[2], tf.float32)
    return Mix(_partners(x, for_partners), share, box)


def mixup(x: tf.Tensor, y: tf.Tensor, mix: Mix) -> tuple[tf.Tensor, MixedLabels]:
    """Blend each sample with its partner; y is of any shape that begins with the batch, or several.

    Raises ValueError for an x that is not float: its dtype has no shares.
    """
    check_float(x)
    share = tf.cast(tf.reshape(mix.share, [-1] + [1] * (x.shape.rank - 1)), x.dtype)
    mixed = share * x + (1 - share) * tf.gather(x, mix.partner)
    return mixed, _mixed_labels(y, mix)


def cutmix(x: tf.Tensor, y: tf.Tensor, mix: Mix) -> tuple[tf.Tensor, MixedLabels]:
    """Paste each sample's box from its partner, NHWC."""
    top, bottom, left, right = (_column(edge) for edge in tf.unstack(mix.box, axis=1))
    row = tf.range(tf.shape(x, tf.int64)[1])[:, None, None]
    column = tf.range(tf.shape(x, tf.int64)[2])[:, None]
    inside = (row >= top) & (row < bottom) & (column >= left) & (column < right)
    return tf.where(inside, tf.gather(x, mix.partner), x), _mixed_labels(y, mix)


def _mixed_labels(y, mix: Mix) -> MixedLabels:
    partners = tf.nest.map_structure(lambda labels: tf.gather(labels, mix.partner), y)
    return MixedLabels(y, partners, mix.share)


def make_mixed_loss(sample_loss: Callable) -> Callable:
    """Return `loss(outputs, y)`: the mean loss, of mixed labels by their shares.

    sample_loss: `sample_loss(outputs, labels)` gives one value a sample, as
    `tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)` does. For cross-entropy the
    result is exactly that of the mixed label distributions. Plain labels, as of a validation, are
    taken as they are.
    """

    def loss(outputs, y) -> tf.Tensor:
        if not isinstance(y, MixedLabels):
            return tf.reduce_mean(_sample_losses(sample_loss, outputs, y))
        own = _sample_losses(sample_loss, outputs, y.labels)
        other = _sample_losses(sample_loss, outputs, y.partners)
        return tf.reduce_mean(y.share * own + (1 - y.share) * other)

    return loss


def soft_labels(y: MixedLabels, *, num_classes: int) -> tf.Tensor:
    """Mixed labels (batch, ...) as distributions (batch, ..., num_classes), for a loss of `fit`."""
    own, other = (tf.one_hot(labels, num_classes) for labels in (y.labels, y.partners))
    share = tf.reshape(y.share, [-1] + [1] * (own.shape.rank - 1))
    return share * own + (1 - share) * other


def augment(policy: Policy, x: tf.Tensor, y, generator) -> tuple:
    """Draw and apply all of `policy` to a batch: (x, y), y mixed labels where it mixes."""
    for_images, for_choice, for_mixup, for_cutmix = _seeds(generator, 4)
    x = transform(x, draw(policy, x, for_images), border=policy.border)

    def mixed():
        return mixup(x, y, draw_mixup(x, for_mixup, alpha=policy.mixup))

    def cut():
        return cutmix(x, y, draw_cutmix(x, for_cutmix, alpha=policy.cutmix))

    if policy.mixup and policy.cutmix:
        return tf.cond(tf.random.stateless_uniform([], for_choice) < 0.5, mixed, cut)
    if policy.mixup:
        return mixed()
    return cut() if policy.cutmix else (x, y)


def make_augmenting_step(step: Callable, policy: Policy, generator) -> Callable:
    """Return `step(x, y) -> loss` over augmented batches, on the device where x is.

    Where the policy mixes, the step's loss is one of `make_mixed_loss`. The `tf.random.Generator`
    is a variable: the step stays one graph. It has the optimizer and the scale of a mixed-precision
    step as the given one has.
    """

    @tf.function(jit_compile=False)
    def augmenting(x, y):
        return step(*augment(policy, x, y, generator))

    for name in {"loss_scale", "optimizer"} & set(dir(step)):
        setattr(augmenting, name, getattr(step, name))
    return augmenting


def augmented_dataset(
    dataset: tf.data.Dataset, policy: Policy, *, seed: int = 0
) -> tf.data.Dataset:
    """Return the dataset of batches (x, y) with augmented x, NHWC; or (x, y, sample_weight).

    Each pass over it draws anew; a new one of the same seed repeats them all. With `.repeat()`
    after it, an iterator that is saved in a checkpoint goes on with the same numbers.

    Raises ValueError for other elements, and for weights where the policy mixes samples.
    """
    check_dataset(dataset, policy)
    seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).batch(2)

    def augmented(batch, numbers):
        x, y, *weights = batch
        return *augment(policy, x, y, numbers), *weights

    pairs = tf.data.Dataset.zip((dataset, seeds))
    return pairs.map(augmented, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _seeds(generator, count: int) -> list[tf.Tensor]:
    """`count` seeds of two integers each, of a generator or a seed."""
    if isinstance(generator, tf.random.Generator):
        generator = generator.make_seeds(1)[:, 0]
    if count == 1:
        return [generator]
    return tf.unstack(tf.random.split(tf.cast(generator, tf.int64), count))


def _column(values: tf.Tensor) -> tf.Tensor:
    """(batch,) as (batch, 1, 1, 1)."""
    return values[:, None, None, None]


def _sample(x: tf.Tensor, p: Parameters, fill_mode: str) -> tf.Tensor:
    """Sample x where the pixels of the changed images come from."""
    size = tf.shape(x)[1:3]
    middle = (tf.cast(size, tf.float32) - 1) / 2
    matrix, offset = _geometry(p, size, tf.shape(x)[0])
    # The op counts (x, y) from the corner: what is undone about the middle is written for that.
    constant = middle - tf.linalg.matvec(matrix, middle + offset)
    (yy, yx), (xy, xx) = (tf.unstack(row, axis=-1) for row in tf.unstack(matrix, axis=-2))
    y0, x0 = tf.unstack(constant, axis=-1)
    zero = tf.zeros_like(xx)
    moved = tf.raw_ops.ImageProjectiveTransformV3(
        images=tf.cast(x, tf.float32),
        transforms=tf.stack([xx, xy, x0, yx, yy, y0, zero, zero], -1),
        output_shape=size,
        fill_value=0.0,
        interpolation="BILINEAR",
        fill_mode=fill_mode,
    )
    return tf.ensure_shape(tf.cast(moved, x.dtype), x.shape)


def _geometry(p: Parameters, size: tf.Tensor, batch: tf.Tensor) -> tuple:
    """The matrix and the offset, in pixels (down, right), by which a pixel finds where it is from.

    The change is undone from its end: the shift, then rotation and zoom, then flips.
    """
    ones = tf.ones([batch])
    angle = (ones * 0 if p.angle is None else p.angle) * (math.pi / 180)
    zoom = ones if p.zoom is None else p.zoom
    signs = [
        ones if flipped is None else tf.where(flipped, -ones, ones)
        for flipped in (p.flip_vertical, p.flip_horizontal)
    ]
    cos, sin = tf.cos(angle) / zoom, tf.sin(angle) / zoom
    rotation = tf.stack([tf.stack([cos, sin], -1), tf.stack([-sin, cos], -1)], -2)
    matrix = tf.stack(signs, -1)[..., None] * rotation
    shift = tf.zeros([batch, 2]) if p.shift is None else p.shift
    return matrix, shift * tf.cast(size, tf.float32)


def _beta(count: tf.Tensor, alpha: float, seed: tf.Tensor) -> tf.Tensor:
    """Of Beta(alpha, alpha); ones for 0. In float64: gamma variates of a small alpha vanish."""
    check_alpha(alpha)
    if not alpha:
        return tf.ones([count], tf.float64)
    pair = tf.random.stateless_gamma([count, 2], seed, alpha=alpha, dtype=tf.float64)
    total = tf.reduce_sum(pair, 1)
    return tf.where(total > 0, pair[:, 0] / tf.where(total > 0, total, 1), 0.5)


def _partners(x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """A random order of the batch."""
    numbers = tf.random.stateless_uniform([tf.shape(x)[0]], seed, dtype=tf.float64)
    return tf.cast(tf.argsort(numbers), tf.int64)


def _sample_losses(sample_loss: Callable, outputs, labels) -> tf.Tensor:
    """The loss of each sample; raises where the loss has averaged already."""
    losses = sample_loss(outputs, labels)
    check_sample_losses(losses)
    return tf.reduce_mean(losses, tf.range(1, tf.rank(losses))) if losses.shape.rank > 1 else losses


def main() -> None:
    """Print the accuracy on few digits after eight epochs, and milliseconds a step."""
    from tf_impl.kit import training
    from tf_impl.kit.demo import Demo

    policies = {
        "none": Policy(),
        "geometry": Policy(rotation=10, zoom=0.1, shift=0.1),
        "colour": Policy(brightness=0.2, contrast=0.2),
        "mixup": Policy(mixup=0.2),
        "cutmix": Policy(cutmix=1.0),
    }
    demo = Demo("digits-few")
    print("augmentation  accuracy %  ms a step")
    for name, policy in policies.items():
        model, optimizer, _ = demo.build()
        loss = make_mixed_loss(training.sample_cross_entropy)
        step = training.make_train_step(model, optimizer, loss)
        step = make_augmenting_step(step, policy, tf.random.Generator.from_seed(0))
        ms = demo.fit(step, epochs=8)
        print(f"{name:12}{demo.score(model):12.1f}{ms:11.2f}")


if __name__ == "__main__":
    main()
