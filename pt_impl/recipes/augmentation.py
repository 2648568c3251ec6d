"""Augmentation: random changes of images during training.

    policy = Policy(rotation=10, zoom=0.1, shift=0.1, mixup=0.2)
    step = make_augmenting_step(step, policy, generator)  # on the device, a batch at once
    dataset = augmented_dataset(dataset, policy)  # or on the host, in a DataLoader's workers

What it changes: how an image looks in each epoch. The test set stays as it is. Geometry (flips,
rotation, zoom, shift) is one bilinear sampling of each image. Colour is brightness (added),
contrast (around the image's mean) and saturation (around its grey). Mixup (Zhang et al., 2018,
"mixup: Beyond Empirical Risk Minimization") blends two samples and their labels with a share drawn
from Beta(alpha, alpha). Cutmix (Yun et al., 2019) pastes a box of another sample and mixes labels
by area. `draw` draws random numbers and `transform` applies them.

Its twin: `tf_impl/recipes/augmentation.py`.

Where the frameworks differ and why:
- With the same parameters images agree to float32's rounding.
- PyTorch: random numbers come from a `torch.Generator`, whose state goes into a checkpoint. Every
  DataLoader worker has a copy of the dataset. So there numbers depend only on the seed, the epoch
  and the batch's first index.
- TensorFlow: random numbers come from stateless functions of a seed. A step takes seeds from a
  `tf.random.Generator`, a variable that goes into a checkpoint. A `tf.data` pipeline maps in
  parallel, so it takes seeds from a dataset of random numbers, whose position is saved with the
  iterator.
- `grid_sample` (PyTorch) takes coordinates from -1 to 1, so a sample that is not moved skips it.
  `ImageProjectiveTransformV3` (TensorFlow) takes pixels and does not run under XLA: augment before
  the step.
- A batch is NCHW in PyTorch and NHWC in TensorFlow.
- Keras's layers (`RandomRotation`, `MixUp`, ...) draw and apply in one call.

When it helps and when it hurts: it helps most if labels are few and the change keeps the label
true. A flipped digit is not a digit, and a six rotated far is a nine. Mixup and cutmix need longer
training, and their training loss can't be compared. On the host it slows the input pipeline, on the
device the step.

Run it alone: `python -m pt_impl.recipes.augmentation` prints accuracies and samples/s.

Copy with it: `pt_impl/kit/checks/augmentation.py`, `shared/augmentation.py`.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from pt_impl.kit.checks.augmentation import (
    check_float,
    check_images,
    check_labels,
    check_nchw,
    check_sample_losses,
)
from shared.augmentation import Policy, check_alpha, check_border

BORDERS = {"zero": "zeros", "nearest": "border", "reflect": "reflection"}
GREY = (0.299, 0.587, 0.114)  # of red, green and blue: ITU-R BT.601


class Parameters(NamedTuple):
    """What is done to each sample of a batch; None where it is done to none.

    Flips come first, then rotation and zoom about the middle, then the shift; colour is last.
    """

    flip_horizontal: Tensor | None = None  # (batch,) bool: left becomes right
    flip_vertical: Tensor | None = None  # (batch,) bool: up becomes down
    angle: Tensor | None = None  # (batch,) degrees, counter-clockwise as one sees it
    zoom: Tensor | None = None  # (batch,) 2 shows the middle twice as large
    shift: Tensor | None = None  # (batch, 2) down and right, in shares of the height and the width
    brightness: Tensor | None = None  # (batch,) is added
    contrast: Tensor | None = None  # (batch,) multiplies what differs from the image's mean
    saturation: Tensor | None = None  # (batch,) multiplies what differs from the pixel's grey


class Mix(NamedTuple):
    """Whom each sample is mixed with, and how."""

    partner: Tensor  # (batch,) indices
    share: Tensor  # (batch,) what is left of the sample itself
    box: Tensor  # (batch, 4) top, bottom, left, right of what cutmix pastes; zeros for mixup


class MixedLabels(NamedTuple):
    """Labels of a mixed batch: `share` of `labels`, the rest of `partners`."""

    labels: Tensor
    partners: Tensor
    share: Tensor


def draw(policy: Policy, x: Tensor, generator: torch.Generator) -> Parameters:
    """Draw what is done to each sample of the batch x.

    All nine numbers of a sample are drawn whether they are needed or not: what is switched on does
    not change the numbers of the rest.
    """
    u = torch.rand(len(x), 9, generator=generator, device=generator.device).to(x.device)

    def within(column: int, most: float, middle: float) -> Tensor | None:
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


def transform(x: Tensor, parameters: Parameters, *, border: str = "zero") -> Tensor:
    """Apply `parameters` to the batch x, NCHW of a float dtype; x itself where they are None.

    Raises ValueError for another dtype or rank, and for a saturation without three channels.
    """
    check_border(border)
    p = parameters
    check_images(x, p.saturation is not None)
    if p.angle is None and p.zoom is None and p.shift is None:
        for flipped, axis in ((p.flip_horizontal, 3), (p.flip_vertical, 2)):
            if flipped is not None:
                x = torch.where(_column(flipped), x.flip(axis), x)
    else:
        x = _sample(x, p, BORDERS[border])
    if p.saturation is not None:
        grey = (x * x.new_tensor(GREY)[:, None, None]).sum(1, keepdim=True)
        x = grey + (x - grey) * _column(p.saturation).to(x.dtype)
    if p.contrast is not None:
        mean = x.mean((1, 2, 3), keepdim=True)
        x = mean + (x - mean) * _column(p.contrast).to(x.dtype)
    return x if p.brightness is None else x + _column(p.brightness).to(x.dtype)


def draw_mixup(x: Tensor, generator: torch.Generator, *, alpha: float = 0.0) -> Mix:
    """Draw partners and shares of Beta(alpha, alpha) for the batch x; of 0, nothing is mixed."""
    share = _beta(len(x), alpha, generator).to(x.device, torch.float32)
    return Mix(_partners(x, generator), share, torch.zeros(len(x), 4, device=x.device).long())


def draw_cutmix(x: Tensor, generator: torch.Generator, *, alpha: float = 0.0) -> Mix:
    """Draw partners and boxes for the batch x, NCHW; the share is what the box leaves of the area.

    A box has the image's proportions and 1 - Beta(alpha, alpha) of its area, about any pixel; what
    is beyond the image is cut off. Raises ValueError for an x of another rank.
    """
    check_nchw(x)
    removed = (1 - _beta(len(x), alpha, generator)).sqrt()
    place = torch.rand(len(x), 2, generator=generator, device=generator.device)
    edges = []
    for axis, size in enumerate(x.shape[2:]):
        half = (size * removed / 2).floor()
        middle = (place[:, axis] * size).floor()
        edges += [(middle - half).clamp(0, size), (middle + half).clamp(0, size)]
    box = torch.stack(edges, 1).long()
    area = (box[:, 1] - box[:, 0]) * (box[:, 3] - box[:, 2])
    share = 1 - area.float() / (x.shape[2] * x.shape[3])
    return Mix(_partners(x, generator), share.to(x.device), box.to(x.device))


def mixup(x: Tensor, y: Tensor, mix: Mix) -> tuple[Tensor, MixedLabels]:
    """Blend each sample with its partner; y is of any shape that begins with the batch.

    Raises ValueError for an x that is not float: its dtype has no shares.
    """
    check_float(x)
    share = mix.share.to(x.dtype).view(-1, *[1] * (x.ndim - 1))
    mixed = share * x + (1 - share) * x[mix.partner]
    return mixed, MixedLabels(y, y[mix.partner], mix.share)


def cutmix(x: Tensor, y: Tensor, mix: Mix) -> tuple[Tensor, MixedLabels]:
    """Paste each sample's box from its partner, NCHW."""
    top, bottom, left, right = (_column(edge) for edge in mix.box.unbind(1))
    row = torch.arange(x.shape[2], device=x.device)[:, None]
    column = torch.arange(x.shape[3], device=x.device)
    inside = (row >= top) & (row < bottom) & (column >= left) & (column < right)
    return torch.where(inside, x[mix.partner], x), MixedLabels(y, y[mix.partner], mix.share)


def make_mixed_loss(sample_loss: Callable) -> Callable:
    """Return `loss(outputs, y)`: the mean loss, of mixed labels by their shares.

    sample_loss: `sample_loss(outputs, labels)` gives one value a sample, as
    `nn.CrossEntropyLoss(reduction="none")` does. For cross-entropy the result is exactly that of
    the mixed label distributions. Plain labels, as of a validation, are taken as they are.
    """

    def loss(outputs, y) -> Tensor:
        if not isinstance(y, MixedLabels):
            return _sample_losses(sample_loss, outputs, y, len(y)).mean()
        own = _sample_losses(sample_loss, outputs, y.labels, len(y.share))
        other = _sample_losses(sample_loss, outputs, y.partners, len(y.share))
        return (y.share * own + (1 - y.share) * other).mean()

    return loss


def soft_labels(y: MixedLabels, *, num_classes: int) -> Tensor:
    """Mixed labels (batch, ...) as distributions (batch, ..., num_classes)."""
    own, other = (F.one_hot(labels, num_classes) for labels in (y.labels, y.partners))
    share = y.share.view(-1, *[1] * (own.ndim - 1))
    return share * own + (1 - share) * other


def augment(policy: Policy, x: Tensor, y, generator: torch.Generator) -> tuple:
    """Draw and apply all of `policy` to a batch: (x, y), y mixed labels where it mixes."""
    x = transform(x, draw(policy, x, generator), border=policy.border)
    if policy.mixup and policy.cutmix:
        first = torch.rand(1, generator=generator, device=generator.device).item() < 0.5
    else:
        first = bool(policy.mixup)
    if first:
        return mixup(x, y, draw_mixup(x, generator, alpha=policy.mixup))
    if policy.cutmix:
        return cutmix(x, y, draw_cutmix(x, generator, alpha=policy.cutmix))
    return x, y


def make_augmenting_step(step: Callable, policy: Policy, generator: torch.Generator) -> Callable:
    """Return `step(x, y) -> loss` over augmented batches, on the device where x is.

    Where the policy mixes, the step's loss is one of `make_mixed_loss`. A generator on the same
    device keeps the numbers there. A mixed-precision step's scaler is saved and resumed as before.
    """

    def augmenting(x, y):
        with torch.no_grad():
            x, y = augment(policy, x, y, generator)
        return step(x, y)

    for name in {"loss_scale", "state_dict", "load_state_dict"} & set(dir(step)):
        setattr(augmenting, name, getattr(step, name))
    return augmenting


def augmented_dataset(dataset: Dataset, policy: Policy, *, seed: int = 0) -> Dataset:
    """Return the dataset of (x, y) with augmented x, CHW, for a DataLoader with or without workers.

    A DataLoader asks it for whole batches, which are augmented at once. Call `set_epoch(epoch)`
    before each epoch, or all see the same changes; workers that persist see it, too.
    """
    return _AugmentedDataset(dataset, policy, seed)


class _AugmentedDataset(Dataset):
    def __init__(self, dataset: Dataset, policy: Policy, seed: int) -> None:
        self.dataset, self.policy, self.seed = dataset, policy, seed
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # workers see it change

    def set_epoch(self, epoch: int) -> None:
        self.epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list:
        """What the DataLoader asks for: the samples of a whole batch."""
        many = getattr(self.dataset, "__getitems__", None)
        samples = many(indices) if many else [self.dataset[index] for index in indices]
        x, y = default_collate(samples)
        check_labels(y)
        x, y = augment(self.policy, x, y, self._generator(int(indices[0])))
        if not isinstance(y, MixedLabels):
            return list(zip(x, y, strict=True))
        return [(one, MixedLabels(*labels)) for one, *labels in zip(x, *y, strict=True)]

    def _generator(self, first: int) -> torch.Generator:
        key = repr((self.seed, int(self.epoch), first)).encode()
        number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little", signed=True)
        return torch.Generator().manual_seed(number)


def _column(values: Tensor) -> Tensor:
    """(batch,) as (batch, 1, 1, 1)."""
    return values[:, None, None, None]


def _sample(x: Tensor, p: Parameters, padding: str) -> Tensor:
    """Sample x where the pixels of the changed images come from, counted from the middle."""
    height, width = x.shape[2:]
    matrix, offset, still = _geometry(p, height, width, len(x), x.device)
    row = torch.arange(height, device=x.device) - (height - 1) / 2
    column = torch.arange(width, device=x.device) - (width - 1) / 2
    row, column = torch.meshgrid(row, column, indexing="ij")
    places = torch.stack([row, column], -1).view(1, -1, 2) - offset[:, None]
    places = (places @ matrix.mT).view(len(x), height, width, 2)
    # grid_sample counts (x, y), each from -1 to 1 between the outer edges of the outer pixels.
    grid = places.flip(-1) / torch.tensor([width / 2, height / 2], device=x.device)
    moved = F.grid_sample(
        x.float(), grid, mode="bilinear", padding_mode=padding, align_corners=False
    )
    return torch.where(_column(still), x, moved.to(x.dtype))


def _geometry(p: Parameters, height: int, width: int, batch: int, device) -> tuple:
    """The matrix and the offset, in pixels (down, right), by which a pixel finds where it is from.

    The change is undone from its end: the shift, then rotation and zoom, then flips. Also: which
    samples are not moved at all.
    """
    ones = torch.ones(batch, device=device)
    angle = torch.deg2rad(ones * 0 if p.angle is None else p.angle)
    zoom = ones if p.zoom is None else p.zoom
    signs = [
        ones if flipped is None else torch.where(flipped, -ones, ones)
        for flipped in (p.flip_vertical, p.flip_horizontal)
    ]
    cos, sin = angle.cos() / zoom, angle.sin() / zoom
    rotation = torch.stack([torch.stack([cos, sin], -1), torch.stack([-sin, cos], -1)], -2)
    matrix = torch.stack(signs, -1)[..., None] * rotation
    shift = torch.zeros(batch, 2, device=device) if p.shift is None else p.shift
    offset = shift * torch.tensor([height, width], dtype=torch.float32, device=device)
    still = (matrix == torch.eye(2, device=device)).all((1, 2)) & (offset == 0).all(1)
    return matrix, offset, still


def _beta(count: int, alpha: float, generator: torch.Generator) -> Tensor:
    """Of Beta(alpha, alpha); ones for 0. In float64: gamma variates of a small alpha vanish."""
    check_alpha(alpha)
    if not alpha:
        return torch.ones(count, dtype=torch.float64, device=generator.device)
    alphas = torch.full((count, 2), alpha, dtype=torch.float64, device=generator.device)
    pair = torch._standard_gamma(alphas, generator=generator)  # torch.distributions takes none
    return (pair[:, 0] / pair.sum(1)).nan_to_num(0.5)


def _partners(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randperm(len(x), generator=generator, device=generator.device).to(x.device)


def _sample_losses(sample_loss: Callable, outputs, labels, batch: int) -> Tensor:
    """The loss of each sample; raises where the loss has averaged already."""
    losses = sample_loss(outputs, labels)
    check_sample_losses(losses, batch)
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


def main() -> None:
    """Print the accuracy on few digits after eight epochs, and milliseconds a step."""
    from pt_impl.kit import training
    from pt_impl.kit.demo import Demo

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
        step = make_augmenting_step(
            step, policy, torch.Generator(demo.train[0].device).manual_seed(0)
        )
        ms = demo.fit(step, epochs=8)
        print(f"{name:12}{demo.score(model):12.1f}{ms:11.2f}")


if __name__ == "__main__":
    main()
