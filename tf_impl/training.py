"""Training in TensorFlow: optimizers from a recipe, the baseline step, fit and evaluate."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from shared.specs import Recipe
from tf_impl import data, runtime


def make_optimizer(model: tf.keras.Model, recipe: Recipe) -> tf.keras.optimizers.Optimizer:
    """Make Keras's optimizer of `recipe`, with its variables, for the model's parameters.

    Where its rule is not PyTorch's to the last bit:
    sgd: Keras keeps -lr * momentum buffer; equal while the learning rate is constant.
    adamw: Keras adds eps before the bias correction of v, so that its eps counts as
    eps / sqrt(1 - beta2 ** t): the update of a gradient g differs by a relative
    eps / (|g| * sqrt(1 - beta2)) in the first step, and less in each later one.
    rmsprop: Keras takes sqrt(v + epsilon), PyTorch sqrt(v) + eps. epsilon = eps ** 2 makes both
    limits equal, v = 0 and v >> eps ** 2; in between they differ by a relative eps / sqrt(v).
    Raises ValueError for another optimizer's name.
    """
    optimizers = tf.keras.optimizers
    if recipe.optimizer == "sgd":
        optimizer = optimizers.SGD(recipe.learning_rate, momentum=recipe.momentum, nesterov=False)
    elif recipe.optimizer == "adamw":
        optimizer = optimizers.AdamW(
            recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            beta_1=recipe.beta1,
            beta_2=recipe.beta2,
            epsilon=recipe.eps,
            amsgrad=False,
        )
    elif recipe.optimizer == "rmsprop":
        optimizer = optimizers.RMSprop(
            recipe.learning_rate, rho=recipe.rho, momentum=0.0, epsilon=recipe.eps**2
        )
    else:
        raise ValueError(f"unknown optimizer {recipe.optimizer!r}: sgd, adamw or rmsprop")
    # tf_keras compiles each update with XLA on a GPU unless told not to; the baseline is not XLA.
    optimizer.jit_compile = False
    optimizer.build(model.trainable_variables)
    return optimizer


def cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Mean cross-entropy over all positions, scalar float32.

    `labels` is int64 (n,) or (n, t), `logits` has one more axis and is cast to float32.
    """
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.cast(logits, tf.float32))
    return tf.reduce_mean(losses)


def make_train_step(
    model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer, loss_fn: Callable
) -> Callable:
    """Make the baseline step(x, y) -> loss: one graph, not XLA; the loss stays on the device."""
    variables = model.trainable_variables

    @tf.function(jit_compile=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(model(x, training=True), y)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def make_predict(model: tf.keras.Model) -> Callable:
    """Make predict(x) -> logits in evaluation mode, one graph, not XLA."""

    @tf.function(jit_compile=False, reduce_retracing=True)
    def predict(x):
        return model(x, training=False)

    return predict


def fit(
    step: Callable, x: tf.Tensor, y: tf.Tensor, *, batch_size: int, epochs: int, seed: int
) -> float:
    """Train over a resident split in the shared order; return the last loss.

    Raises ValueError where the split holds no whole batch.
    """
    loss = None
    for epoch in range(epochs):
        for batch in data.epoch_batches(x, y, batch_size=batch_size, seed=seed, epoch=epoch):
            loss = step(*batch)
    if loss is None:
        raise ValueError(f"no batch of {batch_size} in {len(x)} rows and {epochs} epochs")
    return runtime.to_float(loss)


def evaluate(
    predict: Callable, x: tf.Tensor, y: tf.Tensor, *, metric: str, batch_size: int
) -> float:
    """Metric over a whole resident split: "accuracy" in percent or "bits_per_character".

    Raises ValueError for another metric.
    """
    metrics = {"accuracy": _correct, "bits_per_character": _bits}
    if metric not in metrics:
        raise ValueError(f"unknown metric {metric!r}: {', '.join(metrics)}")
    total = 0.0
    for start in range(0, len(x), batch_size):
        rows = slice(start, start + batch_size)
        total += float(metrics[metric](predict(x[rows]), y[rows]))
    scale = 100.0 if metric == "accuracy" else 1.0
    return scale * total / int(tf.size(y))


def _correct(logits, labels):
    return tf.math.count_nonzero(tf.argmax(logits, axis=-1) == labels)


def _bits(logits, labels):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.cast(logits, tf.float32))
    return tf.reduce_sum(losses) / np.log(2.0)
