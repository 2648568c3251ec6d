"""Adversarial domain adaptation (DANN): features that do not tell where a sample comes from.

What it changes: a model that learns from a labelled source domain sees unlabelled samples of the
target domain, too (Ganin et al., 2016, "Domain-Adversarial Training of Neural Networks"). A second
head learns to tell the domains apart by the features; the gradient that it sends back is reversed,
so that the features learn what it can't tell.

- `reverse_gradient`: the identity, whose gradient is multiplied by -strength.
- `reversal_strength`: rises from 0 to 1 as 2 / (1 + exp(-gamma progress)) - 1 (section 5.2.2),
  since the domain head's first gradients are noise.
- `AdversarialModel`: any features, head and domain head as one model of (source, target).
- `adversarial_loss`: the loss of the source's labels and that of the domains, each domain half.

Any train step takes them, with clipping, mixed precision or whatever else it has:
`make_train_step(model, optimizer, adversarial_loss(loss_fn))`, then `step((source, target), y)`.
The model counts its passes in training mode, by which the strength rises; the count is saved with
its weights. What is used afterwards is features and head.

Its twin: `tf_impl/adaptation/adversarial.py`.

Where the frameworks differ and why:
- An operation with a gradient of its own is a `torch.autograd.Function` here and a function under
  `tf.custom_gradient` there, which needs `tf.identity`: what it was given itself has its own
  gradient, and the reversal would be lost. There a strength must be a tensor, or the graph keeps
  the first one.
- A tuple is `*x` here. A Keras model gets both domains as one argument, as `fit` hands it over.
- Both domains are one batch for the features, so that BatchNorm's statistics are those of both, in
  training as in evaluation.

When it helps and when it hurts: it helps where the domains differ in what the labels do not depend
on (background, lighting, a sensor), and the classes are about as frequent in both. Where they are
not, features that look alike mix the classes up. A step passes both domains through the features,
about twice the arithmetic of the plain one; the domain head itself is small. It is a game of two:
the losses go up and down more than those of plain training, and clipping the gradients at a norm of
0.5 to 1 is usual. Choose settings without the target's labels, or the figures flatter.

Run it alone: `python -m pt_impl.adaptation.adversarial` prints accuracies on digits over photos.

Copy with it: nothing.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.save_for_backward(strength)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        (strength,) = ctx.saved_tensors
        return -strength * gradient, None


def reverse_gradient(x: Tensor, strength: Tensor | float) -> Tensor:
    """Return x, whose gradient is multiplied by -strength, a scalar, on its way back."""
    if not isinstance(strength, Tensor):
        strength = x.new_tensor(strength)
    return _Reversal.apply(x, strength)


def reversal_strength(progress: Tensor, *, gamma: float = 10.0) -> Tensor:
    """The strength at a progress from 0 to 1: 2 / (1 + exp(-gamma progress)) - 1."""
    return torch.tanh(gamma * progress / 2)  # which is the same, and exact near 0


def make_domain_head(*, width: int, hidden: int = 100, seed: int = 0) -> nn.Module:
    """Make a head that tells domains apart: features (n, width) -> a logit (n, 1), one layer deep.

    NumPy draws its kernels from `seed` (He et al., 2015); biases are 0.
    """
    head = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for layer in (head[0], head[2]):
            inputs, outputs = layer.in_features, layer.out_features
            kernel = random.normal(0.0, (2 / inputs) ** 0.5, (inputs, outputs))
            layer.weight.copy_(torch.from_numpy(kernel.T))
            layer.bias.zero_()
    return head


class AdversarialModel(nn.Module):
    """(source, target) -> logits of the source, domain logits of the source, and of the target.

    Args:
        features: x -> features. Its x: one tensor, a tuple of its arguments or a dict of its
            keywords, with a row a sample, as its features have.
        head: features -> logits.
        domain_head: features -> one logit, above 0 for the target; see `make_domain_head`.
        steps: passes in training mode over which the strength rises; it stays as it is then.
        strength: of the reversal, once it has risen. With 0 the features do not hear of domains.
        gamma: how steeply it rises.

    Raises:
        ValueError: steps is below 1, strength below 0, or gamma not above 0; in a call, features
            have no row a sample, domains another form than each other, or one no samples.
    """

    def __init__(
        self,
        features: nn.Module,
        head: nn.Module,
        domain_head: nn.Module,
        *,
        steps: int,
        strength: float = 1.0,
        gamma: float = 10.0,
    ) -> None:
        if steps < 1 or not strength >= 0 or not gamma > 0:
            raise ValueError(
                "steps must be 1 or more, strength 0 or more, gamma above 0, not "
                f"{steps}, {strength}, {gamma}"
            )
        super().__init__()
        self.features, self.head, self.domain_head = features, head, domain_head
        self.steps, self.strength, self.gamma = steps, strength, gamma
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.to(next(self.parameters()).device)

    def current_strength(self) -> Tensor:
        """The strength of the next pass, a scalar on the device."""
        progress = (self.passes / self.steps).clamp(max=1.0)
        return self.strength * reversal_strength(progress, gamma=self.gamma)

    def forward(self, source, target) -> tuple[Tensor, Tensor, Tensor]:
        """Pass both domains through the features as one batch."""
        features, count = _features(self.features, source, target)
        domains = self.domain_head(reverse_gradient(features, self.current_strength()))
        if self.training:
            # Not in place: what torch.compile compiled would read the new count in its backward.
            self.passes = self.passes + 1
        return self.head(features[:count]), domains[:count], domains[count:]


def domain_loss(source: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of the domains' logits, each domain half of it; ln 2 is what a guess costs."""
    return (F.softplus(source.float()).mean() + F.softplus(-target.float()).mean()) / 2


def adversarial_loss(loss_fn: Callable) -> Callable:
    """Return `loss(outputs, y)` of the model's outputs: `loss_fn(logits, y)` plus `domain_loss`."""

    def loss(outputs, y):
        logits, source, target = outputs
        return loss_fn(logits, y) + domain_loss(source, target)

    return loss


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
    """Print the accuracy on digits over photos of source alone and of DANN, from the same seed."""
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

    for name in ("source alone", "DANN"):
        model = models.build(task.model, init_weights(task.model, seed=0))
        features, head = models.split_head(model)
        if name == "DANN":
            domain_head = make_domain_head(width=head.in_features)
            steps = epochs * (len(x) // size)
            adversary = AdversarialModel(features, head, domain_head, steps=steps)
            optimizer = training.make_optimizer(adversary, task.recipe)
            loss_fn = adversarial_loss(training.cross_entropy)
            step = both(training.make_train_step(adversary, optimizer, loss_fn))
        else:
            optimizer = training.make_optimizer(model, task.recipe)
            loss_fn = training.cross_entropy
            step = source(training.make_train_step(model, optimizer, loss_fn))
        training.fit(step, x, (y, target), batch_size=size, epochs=epochs, seed=0)
        predict = training.make_predict(model)
        accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=600)
        print(f"{name:13}{accuracy:6.1f}% on the target")


if __name__ == "__main__":
    main()
