"""Adversarial domain adaptation (DANN): features that do not tell where a sample comes from.

    model = AdversarialModel(features, head, make_domain_head(width=64), steps=1000)
    loss_fn = adversarial_loss(loss_fn)  # for any train step, with model((source, target))

What it changes: a model that learns from a labelled source domain sees unlabelled samples of the
target domain, too (Ganin et al., 2016, "Domain-Adversarial Training of Neural Networks"). A second
head learns to tell the domains apart from the features. Its gradient is reversed, so the features
learn to hide the domain. The domain head's first gradients are noise. So the reversal grows with
the training steps, which the model counts and saves. Only features and head are used afterwards.

Its twin: `pt_impl/adaptation/adversarial.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps if the domains differ in what does not affect the label:
background, lighting, a sensor. Classes have to be about equally frequent in both, otherwise it
mixes them up. Two domains are about twice the arithmetic. Losses go up and down, since two heads
compete. Clipping gradients at a norm of 0.5 to 1 is usual. Choose settings without the target's
labels, otherwise the accuracy looks too good.

Run it alone: `python -m tf_impl.adaptation.adversarial` prints accuracies on digits over photos.

Copy with it: `tf_impl/kit/checks/domains.py`.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tf_impl.kit.checks.domains import check_adversarial, check_features


@tf.custom_gradient
def _reversed(x, strength):
    def gradient(upstream):
        return -tf.cast(strength, upstream.dtype) * upstream, None

    # x itself would bring its own gradient, and the reversal would be lost.
    return tf.identity(x), gradient


def reverse_gradient(x: tf.Tensor, strength: tf.Tensor) -> tf.Tensor:
    """Return x, whose gradient is multiplied by -strength, a scalar, on its way back.

    Hand over a tensor where the strength changes: of a number, a graph keeps the first one.
    """
    return _reversed(x, strength)


def reversal_strength(progress: tf.Tensor, *, gamma: float = 10.0) -> tf.Tensor:
    """The strength at a progress from 0 to 1: 2 / (1 + exp(-gamma progress)) - 1."""
    return tf.tanh(gamma * progress / 2)  # which is the same, and exact near 0


def make_domain_head(*, width: int, hidden: int = 100, seed: int = 0) -> tf.keras.Model:
    """Make a head that tells domains apart: features (n, width) -> a logit (n, 1), one layer deep.

    NumPy draws its kernels from `seed` (He et al., 2015); biases are 0.
    """
    layers = tf.keras.layers
    head = tf.keras.Sequential(
        [tf.keras.Input((width,)), layers.Dense(hidden, activation="relu"), layers.Dense(1)]
    )
    random = np.random.default_rng(seed)
    for layer in head.layers:
        inputs, outputs = layer.kernel.shape
        kernel = random.normal(0.0, (2 / inputs) ** 0.5, (inputs, outputs))
        layer.set_weights([kernel, np.zeros(outputs)])
    return head


class AdversarialModel(tf.keras.Model):
    """(source, target) -> logits of the source, domain logits of the source, and of the target.

    Args:
        features: x -> features, built. Its x: a tensor or a structure of tensors, with a row a
            sample.
        head: features -> logits, built.
        domain_head: features -> one logit, above 0 for the target; see `make_domain_head`.
        steps: passes in training mode over which the strength rises; it stays as it is then.
        strength: of the reversal, once it has risen. With 0 the features do not hear of domains.
        gamma: how steeply it rises.

    Raises:
        ValueError: steps is below 1, strength below 0, or gamma not above 0; in a call, features
            have no row a sample.
    """

    def __init__(
        self,
        features: tf.keras.Model,
        head: tf.keras.layers.Layer,
        domain_head: tf.keras.layers.Layer,
        *,
        steps: int,
        strength: float = 1.0,
        gamma: float = 10.0,
    ) -> None:
        check_adversarial(steps, strength, gamma)
        super().__init__()
        self.features, self.head, self.domain_head = features, head, domain_head
        self.steps, self.strength, self.gamma = steps, strength, gamma
        # A whole number, which no policy of mixed precision rounds.
        self.passes = self.add_weight(
            name="passes", shape=(), dtype="int64", initializer="zeros", trainable=False
        )
        self.built = True  # as its parts are

    def current_strength(self) -> tf.Tensor:
        """The strength of the next pass, a scalar on the device."""
        passed = tf.cast(tf.convert_to_tensor(self.passes), tf.float32)
        progress = tf.minimum(passed / self.steps, 1.0)
        return self.strength * reversal_strength(progress, gamma=self.gamma)

    def call(self, inputs, training=None):
        """Pass both domains, (source, target), through the features as one batch."""
        source, target = inputs
        both = tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), source, target)
        features = self.features(both)  # Keras hands `training` on
        check_features(features, both)
        count = tf.shape(tf.nest.flatten(source)[0])[0]
        domains = self.domain_head(reverse_gradient(features, self.current_strength()))
        if training:
            self.passes.assign_add(1)
        return self.head(features[:count]), domains[:count], domains[count:]


def domain_loss(source: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """Cross-entropy of the domains' logits, each domain half of it; ln 2 is what a guess costs."""
    source, target = tf.cast(source, tf.float32), tf.cast(target, tf.float32)
    return (tf.reduce_mean(tf.nn.softplus(source)) + tf.reduce_mean(tf.nn.softplus(-target))) / 2


def adversarial_loss(loss_fn: Callable) -> Callable:
    """Return `loss(outputs, y)` of the model's outputs: `loss_fn(logits, y)` plus `domain_loss`."""

    def loss(outputs, y):
        logits, source, target = outputs
        return loss_fn(logits, y) + domain_loss(source, target)

    return loss


def main() -> None:
    """Print the accuracy on digits over photos of source only and of DANN, from the same seed."""
    from tf_impl.kit import models, training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-to-photos")
    recipe, (x, y) = demo.task.recipe, demo.train
    how = {"epochs": recipe.epochs, "batch_size": recipe.accuracy_batch_size}
    model, optimizer, loss_fn = demo.build()
    demo.fit(training.make_train_step(model, optimizer, loss_fn), **how)
    print(f"source only  {demo.score(model):6.1f}% on the target")
    model = demo.build()[0]
    features, head = models.split_head(model)
    domain_head = make_domain_head(width=head.kernel.shape[0])
    steps = recipe.epochs * (len(x) // recipe.accuracy_batch_size)
    adversary = AdversarialModel(features, head, domain_head, steps=steps)
    optimizer = training.make_optimizer(adversary, recipe)
    step = training.make_train_step(adversary, optimizer, adversarial_loss(loss_fn))
    demo.fit(lambda x, y: step((x, y[1]), y[0]), y=(y, demo.target), **how)
    print(f"DANN         {demo.score(model):6.1f}% on the target")


if __name__ == "__main__":
    main()
