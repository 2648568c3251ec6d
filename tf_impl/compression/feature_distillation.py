"""Feature distillation: a student's hidden layer imitates one of a trained teacher.

    taught = attach_regressor(student, teacher, x, student_layer="a", teacher_layer="b")
    output, features = taught(x, training=True)
    loss = loss_fn(output, y) + weight * tf.reduce_mean(tf.square(features - target))

What it changes: the loss. It also contains the distance between the output of a student's layer and
that of a teacher's layer (FitNets: Romero et al., 2014, "Hints for Thin Deep Nets"). The student is
thinner, so a regressor widens its features. It is trained, too, and dropped afterwards. FitNets
learns first features, then logits (`distillation.py`). Here labels and features are learned in one
stage, as is usual today. The teacher does not change.

Its twin: `pt_impl/compression/feature_distillation.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps thin, deep students, which are hard to train from their
output only, and tasks without logits: regression, embeddings. Each step costs the teacher's pass,
since features are too large to store for most data. It hurts if the layers do not correspond:
layers that are too deep hold the student back (FitNets, section 2.2). The scale of features differs
between models and layers, so `weight` has to be tuned.

Run it alone: `python -m tf_impl.compression.feature_distillation` prints a student without and with
features.

Copy with it: `tf_impl/kit/calling.py`, `tf_impl/kit/checks/feature_distillation.py`.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tf_impl.kit.calling import add_own_losses, at_least_float32, call, infer, scale_loss
from tf_impl.kit.checks.feature_distillation import (
    check_feature_distillation,
    check_features,
    layer_in_graph,
)


def attach_regressor(
    student: tf.keras.Model,
    teacher: tf.keras.Model,
    x,
    *,
    student_layer: str,
    teacher_layer: str,
    seed: int = 0,
) -> tf.keras.Model:
    """Return a model x -> (the student's output, its features as wide as the teacher's).

    The student is shared, not copied. Make the optimizer from the variables of the model returned:
    the regressor's are among them.

    Args:
        x: example input, as in `make_train_step`.
        student_layer, teacher_layer: names (`get_layer`) of layers that give features of one shape
            but for the channels: (n, channels), (n, t, channels) or (n, h, w, channels).
        seed: NumPy draws the regressor's kernel from it. It is linear in the channels, the same at
            every position; its bias is 0.

    Raises:
        ValueError: a model has no variables, or a layer is not there or gives something else.
        NotImplementedError: a model is subclassed.
    """
    readers = _up_to(student, student_layer), _up_to(teacher, teacher_layer)
    ours, theirs = (infer(reader, x).shape.as_list() for reader in readers)
    check_features(ours, theirs, student_layer, teacher_layer)
    inputs, output, features = layer_in_graph(student, student_layer)
    regressor = tf.keras.layers.Dense(theirs[-1], name="regressor")
    regressed = regressor(features)
    shape = ours[-1], theirs[-1]
    kernel = np.random.default_rng(seed).normal(0.0, ours[-1] ** -0.5, shape)
    regressor.set_weights([kernel, np.zeros(theirs[-1])])
    return tf.keras.Model(inputs, [output, regressed])


def make_train_step(
    taught: tf.keras.Model,
    teacher: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
    *,
    teacher_layer: str,
    weight: float = 1.0,
) -> Callable:
    """Make the train step that learns from the labels and the teacher's features.

    Args:
        taught: what `attach_regressor` returned, with the same teacher and layer.
        optimizer: of the variables of `taught`.
        loss_fn: `loss_fn(output, y)` gets the student's output.
        weight: of the features; 0 runs no teacher.

    Returns:
        `step(x, y) -> loss`: the weighted sum and the student's own losses, a scalar on the device.
        x: a tensor, or a structure of them as `fit` hands it over.

    Raises:
        ValueError: the weight is below 0, or the student has no trainable variables; Keras raises
            it for an optimizer that was built without the regressor's.
    """
    check_feature_distillation(taught, weight)
    variables = taught.trainable_variables
    reader = _up_to(teacher, teacher_layer)

    @tf.function(jit_compile=False)
    def step(x, y):
        target = infer(reader, x) if weight else None
        with tf.GradientTape() as tape:
            output, features = call(taught, x, training=True)
            loss = loss_fn(output, y)
            if weight:
                # In float32: squares of float16 overflow beyond 255.
                pair = at_least_float32(features), at_least_float32(target)
                apart = tf.reduce_mean(tf.math.squared_difference(*pair))
                loss += tf.cast(weight * apart, loss.dtype)
            loss = add_own_losses(loss, taught)
            scaled = scale_loss(loss, optimizer)
        gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def _up_to(model: tf.keras.Model, layer: str) -> tf.keras.Model:
    """Return a model of the layers that lead to this one: x -> its output."""
    inputs, _, features = layer_in_graph(model, layer)
    return tf.keras.Model(inputs, features)


def main() -> None:
    """Print the digits student alone and with the teacher's features, after one epoch."""
    from shared import teacher as trained
    from tf_impl.kit import models, training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-student")
    teacher, x = models.build(trained.TASK.model, trained.load().weights), demo.train[0][:1]
    theirs = "stage2.block2.relu"  # 8 x 8 pixels, as conv1.bn gives them
    print("step      ms a step  accuracy after an epoch")
    for name in ("alone", "features"):
        student, optimizer, loss_fn = demo.build()
        if name == "alone":
            step = training.make_train_step(student, optimizer, loss_fn)
        else:
            layers = {"student_layer": "conv1.bn", "teacher_layer": theirs}
            taught = attach_regressor(student, teacher, x, **layers)
            optimizer = training.make_optimizer(taught, demo.task.recipe)
            step = make_train_step(taught, teacher, optimizer, loss_fn, teacher_layer=theirs)
        ms = demo.fit(step)
        print(f"{name:8}{ms:11.2f}{demo.score(student):24.1f}")


if __name__ == "__main__":
    main()
