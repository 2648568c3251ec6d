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

Its twin: `pt_impl/adaptation/discrepancy.py`.

Where the frameworks differ and why:
- Distances are differences of large numbers, so they stay in float32. A Keras policy reaches layers
  alone, so the features are cast; PyTorch's autocast would take the product of the features in
  bfloat16, and is switched off there.
- A Keras model gets both domains as one argument, as `fit` hands it over; a tuple is `*x` there.
- Both domains are one batch for the features, so that BatchNorm's statistics are those of both, in
  training as in evaluation.

When it helps and when it hurts: it helps where adversarial training does, with a loss that goes
down and nothing to balance but one weight. The estimate is noisy with small batches, and costs the
square of the batch: nothing beside the second domain's pass through the features. It hurts where
the classes are not about as frequent in both domains, and where the weight is so large that
features fall together. Choose settings without the target's labels, or the figures flatter.

Run it alone: `python -m tf_impl.adaptation.discrepancy` prints accuracies on digits over photos.

Copy with it: nothing.
"""

import math
from collections.abc import Callable

import tensorflow as tf

_LEAST = 1e-12  # mean squared distance, where all features are the same


def mmd(
    source: tf.Tensor, target: tf.Tensor, *, bandwidths: tuple = (0.25, 0.5, 1.0, 2.0, 4.0)
) -> tf.Tensor:
    """The squared maximum mean discrepancy of features (n, ...) and (m, ...), unbiased, float32.

    bandwidths: of the kernels, over the mean squared distance of all pairs of both.

    Raises ValueError for no bandwidth, one that is not above 0, and for a domain of one sample;
    where a graph learns of that only as it runs, InvalidArgumentError.
    """
    _check_bandwidths(bandwidths)
    sizes = source.shape[0], target.shape[0]  # None where a graph leaves them open
    if 1 in sizes:
        raise ValueError(f"each domain needs two samples, not {sizes[0]} and {sizes[1]}")
    message = "each domain needs two samples"
    enough = [tf.debugging.assert_greater(tf.shape(x)[0], 1, message) for x in (source, target)]
    with tf.control_dependencies(filter(lambda check: check is not None, enough)):
        count = tf.shape(source)[0]
    features = tf.cast(tf.concat([source, target], 0), tf.float32)
    distances = _squared_distances(tf.reshape(features, (tf.shape(features)[0], -1)))
    scale = tf.maximum(_mean_of_pairs(tf.stop_gradient(distances)), _LEAST)
    kernels = [tf.exp(-distances / (width * scale)) for width in bandwidths]
    kernel = tf.add_n(kernels) / len(kernels)
    within = _mean_of_pairs(kernel[:count, :count]) + _mean_of_pairs(kernel[count:, count:])
    return within - 2 * tf.reduce_mean(kernel[:count, count:])


def _squared_distances(x: tf.Tensor) -> tf.Tensor:
    """(n, n) of rows (n, d), through their product, about their mean: less is lost to rounding."""
    x -= tf.stop_gradient(tf.reduce_mean(x, 0))
    norms = tf.reduce_sum(tf.square(x), 1)
    return tf.nn.relu(norms[:, None] + norms[None] - 2 * tf.matmul(x, x, transpose_b=True))


def _mean_of_pairs(square: tf.Tensor) -> tf.Tensor:
    """The mean over pairs of different rows."""
    count = tf.cast(tf.shape(square)[0], square.dtype)
    return (tf.reduce_sum(square) - tf.linalg.trace(square)) / (count * (count - 1))


class AlignedModel(tf.keras.Model):
    """(source, target) -> logits of the source, features of the source, and of the target.

    Args:
        features: x -> features, a tensor with a row a sample; built. Its x: a tensor or a structure
            of tensors.
        head: features -> logits, built.

    A call raises ValueError where features have no row a sample.
    """

    def __init__(self, features: tf.keras.Model, head: tf.keras.layers.Layer) -> None:
        super().__init__()
        self.features, self.head = features, head
        self.built = True  # as its parts are

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


def main() -> None:
    """Print the accuracy on digits over photos of source alone and with MMD, from the same seed."""
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
