"""Domain adaptation by discrepancy (MMD): features with similar distributions in both domains.

    model = AlignedModel(features, head)
    loss_fn = discrepancy_loss(loss_fn)  # for any train step, with model(source, target)

What it changes: a model that learns from a labelled source domain sees unlabelled samples of the
target domain, too. The maximum mean discrepancy between the features of both is added to its loss
(Gretton et al., 2012, "A Kernel Two-Sample Test"; Long et al., 2015, "Learning Transferable
Features with Deep Adaptation Networks"):

    MMD^2 = mean k(s, s') + mean k(t, t') - 2 mean k(s, t)

over pairs of different samples. k is the mean of several Gaussian kernels, since one that is too
narrow or too wide sees nothing. Only features and head are used afterwards.

Its twin: `tf_impl/adaptation/discrepancy.py`.

Where the frameworks differ and why:
- Distances are differences of large numbers, so they need float32. PyTorch: autocast, which would
  multiply features in bfloat16, is switched off. TensorFlow: the features are cast, since a Keras
  policy affects only layers.
- A PyTorch model gets the domains as two arguments, a Keras model as one, because `fit` passes one.
- In both, one batch holds both domains. So BatchNorm's statistics are those of both.

When it helps and when it hurts: it helps in the same cases as adversarial training. Its loss falls
steadily, and only one weight has to be chosen. The estimate is noisy with small batches. It hurts
if classes are not about equally frequent in both domains, or if the weight is so large that all
features become equal. Choose settings without the target's labels, otherwise the accuracy looks too
good.

Run it alone: `python -m pt_impl.adaptation.discrepancy` prints accuracies on digits over photos.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/domains.py`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pt_impl.kit.calling import call, concatenate
from pt_impl.kit.checks.domains import (
    check_bandwidths,
    check_discrepancy,
    check_features,
    check_two_samples,
    count_samples,
)

_LEAST = 1e-12  # mean squared distance, where all features are the same


def mmd(
    source: Tensor, target: Tensor, *, bandwidths: tuple = (0.25, 0.5, 1.0, 2.0, 4.0)
) -> Tensor:
    """The squared maximum mean discrepancy of features (n, ...) and (m, ...), float32.

    The unbiased estimate (Gretton et al., lemma 6): 0 on average for domains that are alike, so
    sometimes below. bandwidths: of the kernels exp(-|a - b|^2 / width), over the mean squared
    distance of all pairs of both, which is a constant for the gradient.

    Raises ValueError for no bandwidth, one that is not above 0, and for a domain of one sample.
    """
    check_bandwidths(bandwidths)
    check_two_samples(source, target)
    count = len(source)
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
        count, others = count_samples(source, target)
        features = call(self.features, concatenate([source, target]))
        check_features(features, count + others)
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
    check_discrepancy(weight, bandwidths)

    def loss(outputs, y):
        logits, source, target = outputs
        return loss_fn(logits, y) + weight * mmd(source, target, bandwidths=bandwidths)

    return loss


def main() -> None:
    """Print the accuracy on digits over photos of source only and with MMD, from the same seed."""
    from pt_impl.kit import models, training
    from pt_impl.kit.demo import Demo

    demo = Demo("digits-to-photos")
    recipe, (_, y) = demo.task.recipe, demo.train
    how = {"epochs": recipe.epochs, "batch_size": recipe.accuracy_batch_size}
    model, optimizer, loss_fn = demo.build()
    demo.fit(training.make_train_step(model, optimizer, loss_fn), **how)
    print(f"source only  {demo.score(model):6.1f}% on the target")
    model, optimizer, loss_fn = demo.build()
    aligned = AlignedModel(*models.split_head(model))
    step = training.make_train_step(aligned, optimizer, discrepancy_loss(loss_fn))
    demo.fit(lambda x, y: step((x, y[1]), y[0]), y=(y, demo.target), **how)
    print(f"MMD          {demo.score(model):6.1f}% on the target")


if __name__ == "__main__":
    main()
