"""Domain adaptation by discrepancy (MMD): features whose distributions are near each other.

What it changes: a model that learns from a labelled source domain sees unlabelled samples of the
target domain, too, and the maximum mean discrepancy (MMD) between the features of both is added to
its loss (Gretton et al., 2012, "A Kernel Two-Sample Test"; Long et al., 2015, "Learning
Transferable Features with Deep Adaptation Networks"):

    MMD^2 = mean k(s, s') + mean k(t, t') - 2 mean k(s, t)

over pairs of different samples (the unbiased estimate, lemma 6: 0 on average for domains that are
alike, so sometimes below). k is the mean of Gaussian kernels exp(-|a - b|^2 / width): several,
since one that is too narrow or too wide sees nothing. The widths are `bandwidths` times the mean
squared distance in the batch, which is a constant for the gradient.

- `mmd`: of any features. `AlignedModel`: any features and head as one model of (source, target).
- `discrepancy_loss`: the loss of the source's labels and the weighted discrepancy.

Any train step takes them: `make_train_step(model, optimizer, discrepancy_loss(loss_fn))`, then
`step((source, target), y)`. What is used afterwards is features and head.

Its twin: `tf_impl/adaptation/discrepancy.py`.

Where the frameworks differ and why:
- Distances are differences of large numbers, so they stay in float32. Autocast would take the
  product of the features in bfloat16, and is switched off here; a Keras policy reaches layers
  alone, so there the features are cast.
- A tuple is `*x` here. A Keras model gets both domains as one argument, as `fit` hands it over.
- Both domains are one batch for the features, so that BatchNorm's statistics are those of both, in
  training as in evaluation.

When it helps and when it hurts: it helps where adversarial training does, with a loss that goes
down and nothing to balance but one weight. The estimate is noisy with small batches, and costs the
square of the batch: nothing beside the second domain's pass through the features. It hurts where
the classes are not about as frequent in both domains, and where the weight is so large that
features fall together. Choose settings without the target's labels, or the figures flatter.

Run it alone: `python -m pt_impl.adaptation.discrepancy` prints accuracies on digits over photos.

Copy with it: nothing.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

_LEAST = 1e-12  # mean squared distance, where all features are the same


def mmd(
    source: Tensor, target: Tensor, *, bandwidths: tuple = (0.25, 0.5, 1.0, 2.0, 4.0)
) -> Tensor:
    """The squared maximum mean discrepancy of features (n, ...) and (m, ...), unbiased, float32.

    bandwidths: of the kernels, over the mean squared distance of all pairs of both.

    Raises ValueError for no bandwidth, one that is not above 0, and for a domain of one sample.
    """
    _check_bandwidths(bandwidths)
    count = len(source)
    if count < 2 or len(target) < 2:
        raise ValueError(f"each domain needs two samples, not {count} and {len(target)}")
    with torch.autocast(source.device.type, enabled=False):
        distances = _squared_distances(torch.cat([source, target]).flatten(1).float())
        scale = _mean_of_pairs(distances.detach()).clamp(min=_LEAST)
        kernels = [torch.exp(-distances / (width * scale)) for width in bandwidths]
        kernel = sum(kernels) / len(kernels)
        within = _mean_of_pairs(kernel[:count, :count]) + _mean_of_pairs(kernel[count:, count:])
        return within - 2 * kernel[:count, count:].mean()


def _squared_distances(x: Tensor) -> Tensor:
    """(n, n) of rows (n, d), through their product, about their mean: less is lost to rounding."""
    x = x - x.mean(0).detach()
    norms = x.square().sum(1)
    return (norms[:, None] + norms[None] - 2 * x @ x.T).clamp(min=0)


def _mean_of_pairs(square: Tensor) -> Tensor:
    """The mean over pairs of different rows."""
    count = len(square)
    return (square.sum() - square.trace()) / (count * (count - 1))


class AlignedModel(nn.Module):
    """(source, target) -> logits of the source, features of the source, and of the target.

    Args:
        features: x -> features, a tensor with a row a sample. Its x: one tensor, a tuple of its
            arguments or a dict of its keywords.
        head: features -> logits.

    A call raises ValueError where features have no row a sample, domains another form than each
    other, or one no samples.
    """

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.features, self.head = features, head

    def forward(self, source, target) -> tuple[Tensor, Tensor, Tensor]:
        """Pass both domains through the features as one batch."""
        features, count = _features(self.features, source, target)
        return self.head(features[:count]), features[:count], features[count:]


def discrepancy_loss(
    loss_fn: Callable,
    *,
    weight: float = 1.0,
    bandwidths: tuple = (0.25, 0.5, 1.0, 2.0, 4.0),
) -> Callable:
    """Return `loss(outputs, y)` of the model's outputs: `loss_fn(logits, y)` plus weight x `mmd`.

    Raises ValueError for a weight below 0, and as `mmd`.
    """
    if not 0 <= weight < math.inf:
        raise ValueError(f"weight must be at least 0 and finite, not {weight!r}")
    _check_bandwidths(bandwidths)

    def loss(outputs, y):
        logits, source, target = outputs
        return loss_fn(logits, y) + weight * mmd(source, target, bandwidths=bandwidths)

    return loss


def _check_bandwidths(bandwidths: tuple) -> None:
    if not bandwidths or not all(0 < width < math.inf for width in bandwidths):
        raise ValueError(f"bandwidths must be one or more numbers above 0, not {bandwidths!r}")


def _features(module: nn.Module, source, target) -> tuple[Tensor, int]:
    """The features of both domains as one batch, and how many of their rows are the source's."""
    joined, counts = _joined(source, target), (_samples(source), _samples(target))
    if not all(counts):
        raise ValueError(f"each domain needs samples, not {counts[0]} and {counts[1]}")
    features = _call(module, joined)
    shape = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
    if not isinstance(features, Tensor) or features.ndim == 0 or len(features) != sum(counts):
        raise ValueError(f"features need a row a sample, of {sum(counts)}: they are {shape}")
    return features, counts[0]


def _joined(source, target):
    """Both domains as one batch."""
    if isinstance(source, dict) and isinstance(target, dict) and source.keys() == target.keys():
        return {name: _joined(part, target[name]) for name, part in source.items()}
    if isinstance(source, tuple) and isinstance(target, tuple) and len(source) == len(target):
        return tuple(_joined(*parts) for parts in zip(source, target, strict=True))
    if isinstance(source, Tensor) and isinstance(target, Tensor):
        return torch.cat([source, target])
    if source is None and target is None:  # such as a mask that neither has
        return None
    raise ValueError(
        "source and target need one form: tensors, or the same tuples or dicts of them"
    )


def _samples(x) -> int:
    """The rows of the first tensor of an input, all of which have a row a sample."""
    if isinstance(x, Tensor):
        return len(x)
    for part in x.values() if isinstance(x, dict) else x or ():
        if count := _samples(part):
            return count
    return 0


def _call(module: nn.Module, x):
    if isinstance(x, dict):
        return module(**x)
    return module(*x) if isinstance(x, tuple) else module(x)


def main() -> None:
    """Print the accuracy on digits over photos of source alone and with MMD, from the same seed."""
    import tempfile
    from pathlib import Path

    from pt_impl.kit import data, models, training
    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights

    task = TASKS["digits-to-photos"]
    with tempfile.TemporaryDirectory() as folder:
        folder = datasets.materialise(task.dataset, Path(folder))
        x, y = data.to_device(*datasets.load(folder, "train"))
        target, _ = data.to_device(*datasets.load(folder, "target"))
        test = data.to_device(*datasets.load(folder, "test"))
    size, epochs = task.recipe.accuracy_batch_size, task.recipe.epochs

    def both(step):
        return lambda x, y: step((x, y[1]), y[0])

    def source(step):
        return lambda x, y: step(x, y[0])

    for name in ("source alone", "MMD"):
        model = models.build(task.model, init_weights(task.model, seed=0))
        optimizer = training.make_optimizer(model, task.recipe)
        if name == "MMD":
            aligned = AlignedModel(*models.split_head(model))
            loss_fn = discrepancy_loss(training.cross_entropy)
            step = both(training.make_train_step(aligned, optimizer, loss_fn))
        else:
            loss_fn = training.cross_entropy
            step = source(training.make_train_step(model, optimizer, loss_fn))
        training.fit(step, x, (y, target), batch_size=size, epochs=epochs, seed=0)
        predict = training.make_predict(model)
        accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=600)
        print(f"{name:13}{accuracy:6.1f}% on the target")


if __name__ == "__main__":
    main()
