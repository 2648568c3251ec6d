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

Its twin: `pt_impl/adaptation/adversarial.py`.

Where the frameworks differ and why:
- An operation with a gradient of its own is a function under `tf.custom_gradient`, which needs
  `tf.identity`: what it was given itself has its own gradient, and the reversal would be lost. In
  PyTorch it is a `torch.autograd.Function`.
- The strength is a tensor that the graph computes from a variable: a Python number would be a
  constant of the graph, the first step's for good.
- A Keras model gets both domains as one argument, as `fit` hands it over; a tuple is `*x` there.
- Both domains are one batch for the features, so that BatchNorm's statistics are those of both, in
  training as in evaluation.

When it helps and when it hurts: it helps where the domains differ in what the labels do not depend
on (background, lighting, a sensor), and the classes are about as frequent in both. Where they are
not, features that look alike mix the classes up. A step passes both domains through the features,
about twice the arithmetic of the plain one; the domain head itself is small. It is a game of two:
the losses go up and down more than those of plain training, and clipping the gradients at a norm of
0.5 to 1 is usual. Choose settings without the target's labels, or the figures flatter.

Run it alone: `python -m tf_impl.adaptation.adversarial` prints accuracies on digits over photos.

Copy with it: nothing.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf


@tf.custom_gradient
def _reversed(x, strength):
    def gradient(upstream):
        return -tf.cast(strength, upstream.dtype) * upstream, None

    return tf.identity(x), gradient


def reverse_gradient(x: tf.Tensor, strength: tf.Tensor) -> tf.Tensor:
    """Return x, whose gradient is multiplied by -strength, a scalar, on its way back."""
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
        if steps < 1 or not strength >= 0 or not gamma > 0:
            raise ValueError(
                "steps must be 1 or more, strength 0 or more, gamma above 0, not "
                f"{steps}, {strength}, {gamma}"
            )
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
        rows, samples = features.shape[0], tf.nest.flatten(both)[0].shape[0]
        if rows != samples and None not in (rows, samples):
            raise ValueError(
                f"features need a row a sample, of {samples}: they are {features.shape}"
            )
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
    """Print the accuracy on digits over photos of source alone and of DANN, from the same seed."""
    import tempfile
    from pathlib import Path

    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import data, models, training

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
            domain_head = make_domain_head(width=head.kernel.shape[0])
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
