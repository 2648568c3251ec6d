"""The baseline: one float32 graph that trains, prediction, and the loops around them.

What it holds: optimizers from a `shared.specs.Recipe`, a task's loss, the train step that every
technique is compared with, training for some epochs, evaluation.
Twin: `pt_impl/kit/training.py`.
Where the frameworks differ: this step is one `tf.function`, without XLA, as TensorFlow is used by
default; its twin is eager. Keras places the epsilon of Adam and RMSprop elsewhere.
"""

import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from shared import boxes
from shared.specs import NO_LABEL, DetectorSpec, Recipe, Task
from tf_impl.kit import data, detection
from tf_impl.kit.calling import add_own_losses, call, scale_loss

Step = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
Predict = Callable[[tf.Tensor], tf.Tensor]


def make_optimizer(model: tf.keras.Model, recipe: Recipe) -> tf.keras.optimizers.Optimizer:
    """Make the optimizer of `recipe` with every hyperparameter explicit, and its variables.

    The implementation is Keras's own. The rules are those of the twin, in Keras's form:

    - "sgd": Keras keeps -lr times PyTorch's buffer: equal while the learning rate is constant.
    - "adamw": Keras adds its epsilon to sqrt(v) before v is corrected for bias, PyTorch after. With
      epsilon = eps * sqrt(1 - beta2) the first step is equal, where one small gradient makes a
      small v; in step t the term is eps * sqrt((1 - beta2) / (1 - beta2**t)) to PyTorch's eps, so
      an update differs by less than a relative eps / sqrt(v̂).
    - "rmsprop": Keras takes sqrt(v + epsilon), PyTorch sqrt(v) + eps. With epsilon = eps**2 both
      are equal where v is 0 or large; an update differs by less than a relative eps / sqrt(v).

    Raises ValueError for another name.
    """
    optimizers = tf.keras.optimizers
    if recipe.optimizer == "sgd":
        optimizer = optimizers.SGD(
            learning_rate=recipe.learning_rate, momentum=recipe.momentum, nesterov=False
        )
    elif recipe.optimizer == "adamw":
        optimizer = optimizers.AdamW(
            learning_rate=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            beta_1=recipe.beta1,
            beta_2=recipe.beta2,
            epsilon=recipe.eps * math.sqrt(1.0 - recipe.beta2),
            amsgrad=False,
        )
    elif recipe.optimizer == "rmsprop":
        optimizer = optimizers.RMSprop(
            learning_rate=recipe.learning_rate,
            rho=recipe.rho,
            momentum=0.0,
            epsilon=recipe.eps**2,
            centered=False,
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


def sample_cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Cross-entropy of each sample, float32 (n,), of logits (n, classes) and labels (n,)."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.cast(logits, tf.float32))


def softmax(logits: tf.Tensor) -> tf.Tensor:
    """The probabilities of the last axis's classes."""
    return tf.nn.softmax(logits)


def probability_cross_entropy(probabilities: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Mean of -log of the labels' probabilities, (n, classes) and (n,), where a model gives these.

    Not as exact as `cross_entropy`: `recipes/loss_checks.py` shows what is lost.
    """
    return -tf.reduce_mean(tf.math.log(tf.gather(probabilities, labels, batch_dims=1)))


def masked_cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Mean cross-entropy over the positions whose label is not `NO_LABEL`, scalar float32."""
    asked = tf.cast(labels != NO_LABEL, tf.float32)
    return tf.reduce_sum(_nats(logits, labels)) / tf.reduce_sum(asked)


def loss_of(task: Task) -> Callable:
    """The loss that a task is trained with: `loss(output, y)`."""
    if isinstance(task.model, DetectorSpec):
        return detection.make_detection_loss(task.model)
    if task.dataset.kind == "masked":
        return masked_cross_entropy
    return cross_entropy


def make_train_step(
    model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer, loss_fn: Callable
) -> Step:
    """Make the baseline step: one graph, not XLA. `step(x, y)` updates the model, returns the loss.

    The loss stays on the device: reading it on the host would wait for the device in every step.
    The model's own losses (of its regularisers, of `add_loss`) are added to it, as `fit` does. x is
    handed over as `fit` does, too: a structure as one argument, but where `call` needs several.
    """
    variables = model.trainable_variables

    @tf.function(jit_compile=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = add_own_losses(loss_fn(call(model, x, training=True), y), model)
            scaled = scale_loss(loss, optimizer)
        gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def make_update(
    model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer, gradients: list
) -> Callable:
    """Make `update()`: only the optimizer's part of a step, on what `gradients` hold then.

    gradients: a tensor, or a `tf.Variable` that is read anew, a trainable variable of the model.
    """
    variables = model.trainable_variables

    @tf.function(jit_compile=False)
    def update():
        now = [tf.convert_to_tensor(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(now, variables, strict=True))

    return update


def make_predict(model: tf.keras.Model) -> Predict:
    """Make `predict(x) -> logits` in evaluation mode, which Keras has per call, not per model."""

    # A smaller last batch makes a graph for any batch size, not one for each.
    @tf.function(jit_compile=False, reduce_retracing=True)
    def predict(x):
        return call(model, x, training=False)

    return predict


def fit(
    step: Step, x: tf.Tensor, y: tf.Tensor, *, batch_size: int, epochs: int, seed: int
) -> float:
    """Train for `epochs` over the shared batch order; x and y as `data.to_device` returned them.

    Returns the loss of the last batch. Raises ValueError where no batch would be drawn.
    """
    loss = None
    for epoch in range(epochs):
        for batch in data.epoch_batches(x, y, batch_size=batch_size, seed=seed, epoch=epoch):
            loss = step(*batch)
    if loss is None:
        raise ValueError(f"no batch of {batch_size} in {epochs} epochs of {len(x)} samples")
    return float(loss)


def evaluate(
    predict: Predict, x: tf.Tensor, y: tf.Tensor, *, metric: str, batch_size: int
) -> float:
    """Evaluate over all of x and y: "accuracy" in percent, or "bits_per_character".

    The last batch may be smaller. Positions whose label is `NO_LABEL` don't count. Sums stay on the
    device until the end.
    """
    score = {"accuracy": _correct, "bits_per_character": _bits}.get(metric)
    if score is None:
        raise ValueError(f"unknown metric {metric!r}: accuracy or bits_per_character")
    total = sum(
        score(predict(x[start : start + batch_size]), y[start : start + batch_size])
        for start in range(0, len(x), batch_size)
    )
    return float(total) / int(tf.math.count_nonzero(y != NO_LABEL))


def evaluate_task(
    predict: Predict, x: tf.Tensor, y: tf.Tensor, task: Task, *, batch_size: int, metric: str = ""
) -> float:
    """Evaluate by the task's metric over all of x and y, or by another `metric` of its kind."""
    metric = metric or task.metric
    if metric not in boxes.OVERLAPS:
        return evaluate(predict, x, y, metric=metric, batch_size=batch_size)
    outputs = [
        np.asarray(predict(x[start : start + batch_size]), np.float32)
        for start in range(0, len(x), batch_size)
    ]
    found = boxes.decode(task.model, np.concatenate(outputs))
    objects = boxes.objects(np.array(y))
    return boxes.mean_average_precision(found, objects, metric=metric)


def _correct(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    right = tf.cast(tf.argmax(logits, axis=-1) == labels, tf.float64)
    return 100.0 * tf.reduce_sum(right)


def _bits(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(_nats(logits, labels), tf.float64)) / math.log(2.0)


def _nats(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Cross-entropy at each position, float32, zero where the label is `NO_LABEL`."""
    logits = tf.cast(logits, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), logits)
    return tf.where(labels != NO_LABEL, losses, 0.0)


def digits_cnn(batch_size: int) -> Callable:
    """The baseline step of the digits CNN on `batch_size` random images: a trial of that size."""
    from shared.specs import TASKS
    from tf_impl.kit import models

    task, random = TASKS["digits-cnn"], np.random.default_rng(0)
    model = models.build(task.model)
    optimizer = make_optimizer(model, task.recipe)
    step = make_train_step(model, optimizer, cross_entropy)
    images = random.normal(size=(batch_size, *task.model.input_shape)).astype(np.float32)
    batch = data.to_device(images, random.integers(0, 10, batch_size))
    return lambda: step(*batch)
