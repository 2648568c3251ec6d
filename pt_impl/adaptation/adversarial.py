"""Adversarial domain adaptation (DANN): features that do not tell where a sample comes from.

    model = AdversarialModel(features, head, make_domain_head(width=64), steps=1000)
    loss_fn = adversarial_loss(loss_fn)  # for any train step, with model(source, target)

What it changes: a model that learns from a labelled source domain sees unlabelled samples of the
target domain, too (Ganin et al., 2016, "Domain-Adversarial Training of Neural Networks"). A second
head learns to tell the domains apart from the features. Its gradient is reversed, so the features
learn to hide the domain. The domain head's first gradients are noise. So the reversal grows with
the training steps, which the model counts and saves. Only features and head are used afterwards.

Its twin: `tf_impl/adaptation/adversarial.py`.

Where the frameworks differ and why:
- A custom gradient is a `torch.autograd.Function` in PyTorch and a `tf.custom_gradient` function in
  TensorFlow.
- A PyTorch model gets the domains as two arguments, a Keras model as one, because `fit` passes one.
- In both, one batch holds both domains. So BatchNorm's statistics are those of both.

When it helps and when it hurts: it helps if the domains differ in what does not affect the label:
background, lighting, a sensor. Classes have to be about equally frequent in both, otherwise it
mixes them up. Two domains are about twice the arithmetic. Losses go up and down, since two heads
compete. Clipping gradients at a norm of 0.5 to 1 is usual. Choose settings without the target's
labels, otherwise the accuracy looks too good.

Run it alone: `python -m pt_impl.adaptation.adversarial` prints accuracies on digits over photos.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/domains.py`.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pt_impl.kit.calling import call, concatenate
from pt_impl.kit.checks.domains import check_adversarial, check_features, count_samples


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
        check_adversarial(steps, strength, gamma)
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
        count, others = count_samples(source, target)
        features = call(self.features, concatenate([source, target]))
        check_features(features, count + others)
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


def main() -> None:
    """Print the accuracy on digits over photos of source only and of DANN, from the same seed."""
    from pt_impl.kit import models, training
    from pt_impl.kit.demo import Demo

    demo = Demo("digits-to-photos")
    recipe, (x, y) = demo.task.recipe, demo.train
    how = {"epochs": recipe.epochs, "batch_size": recipe.accuracy_batch_size}
    model, optimizer, loss_fn = demo.build()
    demo.fit(training.make_train_step(model, optimizer, loss_fn), **how)
    print(f"source only  {demo.score(model):6.1f}% on the target")
    model = demo.build()[0]
    features, head = models.split_head(model)
    domain_head = make_domain_head(width=head.in_features)
    steps = recipe.epochs * (len(x) // recipe.accuracy_batch_size)
    adversary = AdversarialModel(features, head, domain_head, steps=steps)
    optimizer = training.make_optimizer(adversary, recipe)
    step = training.make_train_step(adversary, optimizer, adversarial_loss(loss_fn))
    demo.fit(lambda x, y: step((x, y[1]), y[0]), y=(y, demo.target), **how)
    print(f"DANN         {demo.score(model):6.1f}% on the target")


if __name__ == "__main__":
    main()
