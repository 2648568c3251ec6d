"""Feature distillation: a student's hidden layer follows one of a trained teacher.

What it changes: the loss. Beside the labels, the output of a layer of the student is drawn to that
of a layer of the teacher (FitNets: Romero et al., 2014, "Hints for Thin Deep Nets"):

    loss_fn + weight mean((regressor(student's features) - teacher's features)^2)

The student is thinner than the teacher, so a regressor, trained along with it, widens its features;
it is dropped afterwards. `attach_regressor` makes the model that gives both, `make_train_step` the
step. FitNets first trains the layers up to the student's on the features alone, then all of it on
logits (`distillation.py`); here labels and features are learned in one stage, as is usual today.
The teacher runs in evaluation mode, without gradients, and stays as it was.

Its twin: `pt_impl/compression/feature_distillation.py`.

Where the frameworks differ and why:
- Keras finds layers in the graph of a functional or Sequential model; a subclassed one has none and
  is refused. A hook in PyTorch catches the output of any module while it runs.
- A Keras model of the layers up to the teacher's leaves out those behind it; there the hook ends
  the pass.
- A name stands for what the layer gives: ReLU as a layer has a name of its own, as a function it
  has none. `get_layer` knows the layers of the first level, not those within a nested model.
- Channels are last in images here and second there: a dense layer here, a 1x1 convolution there.
- Keras 3 moves the seeds of an LSTM's dropout on in evaluation mode, too: such changes of both
  models are dropped.
- Keras 3's own `keras.distillation.FeatureDistillation` has no regressor: both layers must give the
  same width.

When it helps and when it hurts: it helps thin and deep students, which are hard to train from their
output alone, and tasks without logits (regression, embeddings). Each step costs the teacher's
pass, and features are too large to store for most data. It hurts where the layers do not
correspond: too deep a pair regularises the student away from its own solution (FitNets, section
2.2). The scale of features differs between models and layers, so `weight` needs a search.

Run it alone: `python -m tf_impl.compression.feature_distillation` prints a student alone and with
features.
"""

import contextlib
import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf


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

    The student is shared, not copied, and stays as it is; the optimizer has to be made from the
    variables of the model returned, since the regressor's are among them. The regressor is linear
    in the channels, the same at every position; NumPy draws its kernel from `seed`, the bias is 0.
    x: example input, as in `make_train_step`. Layers: names (`get_layer`) of layers that give a
    float tensor (n, channels), (n, t, channels) or (n, h, w, channels). The two must agree in all
    but the channels.

    Raises ValueError for a model without variables and for a layer that is not there or gives
    something else, NotImplementedError for a subclassed model.
    """
    readers = _reader(student, student_layer), _reader(teacher, teacher_layer)
    ours, theirs = (_evaluated(reader, x).shape.as_list() for reader in readers)
    if len(ours) not in (2, 3, 4) or ours[:-1] != theirs[:-1]:
        raise ValueError(
            f"the student's {student_layer!r} gives {ours}, the teacher's {teacher_layer!r} "
            f"{theirs}: name layers that differ in channels alone"
        )
    inputs, outputs = ours[-1], theirs[-1]
    regressor = tf.keras.layers.Dense(outputs, name="regressor")
    features = regressor(readers[0].outputs[0])
    kernel = np.random.default_rng(seed).normal(0.0, inputs**-0.5, (inputs, outputs))
    regressor.set_weights([kernel, np.zeros(outputs)])
    return tf.keras.Model(_graph(student).input, [_graph(student).output, features])


def make_train_step(
    taught: tf.keras.Model,
    teacher: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
    *,
    teacher_layer: str,
    weight: float = 1.0,
) -> Callable:
    """Return `step(x, y) -> loss`: one update from the labels and the teacher's features.

    taught: what `attach_regressor` returned, with the same teacher and layer. x: a tensor, or a
    structure of them as `fit` hands it over. `loss_fn(output, y)` gets
    the student's output. loss: scalar on the device, the weighted sum and the student's own losses
    (of regularisers, of `add_loss`). weight: of the features; 0 runs no teacher.

    Raises ValueError for a weight below 0 and for a student without trainable variables; Keras does
    for an optimizer that was built without the regressor's.
    """
    if not 0 <= weight < math.inf:
        raise ValueError(f"weight must be at least 0 and finite, not {weight!r}")
    variables = taught.trainable_variables
    if len(variables) == len(taught.get_layer("regressor").trainable_variables):
        raise ValueError("the student has no trainable variables: there is nothing to teach")
    reader = _reader(teacher, teacher_layer)

    @tf.function(jit_compile=False)
    def step(x, y):
        target = _evaluated(reader, x) if weight else None
        with tf.GradientTape() as tape:
            output, features = taught(x, training=True)
            loss = loss_fn(output, y)
            loss = sum((tf.cast(term, loss.dtype) for term in taught.losses), loss)
            if weight:
                apart = tf.math.squared_difference(*map(_at_least_float32, (features, target)))
                loss += tf.cast(weight * tf.reduce_mean(apart), loss.dtype)
            scaled = _scaled(loss, optimizer)
        gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def _evaluated(model: tf.keras.Model, x):
    """The output in evaluation mode, in which no variable changes."""
    with getattr(tf.keras, "StatelessScope", contextlib.nullcontext)():  # of Keras 3
        return model(x, training=False)


def _at_least_float32(features):
    """Squares of float16 overflow beyond 255."""
    half = features.dtype in (tf.float16, tf.bfloat16)
    return tf.cast(features, tf.float32) if half else features


def _scaled(loss, optimizer):
    """The loss to take gradients of: Keras 3's LossScaleOptimizer divides them by its scale."""
    return optimizer.scale_loss(loss) if hasattr(optimizer, "scale_loss") else loss


def _reader(model: tf.keras.Model, name: str) -> tf.keras.Model:
    """A model of the layers that lead to the one called `name`: x -> its output."""
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    if getattr(model, "inputs", None) is None:
        raise NotImplementedError(
            f"{type(model).__name__} is subclassed and has no graph in which to find {name!r}: "
            "Keras gives a layer's output in functional and Sequential models only"
        )
    layers = {layer.name: layer for layer in model.layers}
    if name not in layers:
        raise ValueError(f"the model has no layer {name!r}; it has {', '.join(layers)}")
    # A layer's own `output` is that of its first call, which may have been in another model.
    nodes = [node for level in _graph(model)._nodes_by_depth.values() for node in level]
    calls = [tf.nest.flatten(node.outputs) for node in nodes if _layer(node) is layers[name]]
    if len(calls) != 1:
        raise ValueError(f"{name!r} runs {len(calls)} times: it must give one tensor, once")
    if len(calls[0]) != 1:
        raise ValueError(f"{name!r} gives {len(calls[0])} tensors: it must give one")
    return tf.keras.Model(_graph(model).input, calls[0][0])


def _graph(model: tf.keras.Model):
    return getattr(model, "_functional", model)  # of a Sequential model in Keras 3


def _layer(node):
    return node.operation if hasattr(node, "operation") else node.layer  # Keras 3, tf_keras


def main() -> None:
    """Print the digits student alone and with the teacher's features, after one epoch."""
    import tempfile
    import time
    from pathlib import Path

    from shared import datasets
    from shared import teacher as trained
    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import data, models, runtime, training

    task, loss_fn = TASKS["digits-student"], training.cross_entropy
    teacher = models.build(trained.TASK.model, trained.load().weights)
    with tempfile.TemporaryDirectory() as folder:
        folder = datasets.materialise(task.dataset, Path(folder))
        x, y = data.to_device(*datasets.load(folder, "train"))
        test = data.to_device(*datasets.load(folder, "test"))
    print("step      ms a step  accuracy after an epoch")
    for name in ("alone", "features"):
        student = models.build(task.model, init_weights(task.model, seed=0))
        if name == "alone":
            optimizer = training.make_optimizer(student, task.recipe)
            step = training.make_train_step(student, optimizer, loss_fn)
        else:
            # conv1.bn and stage2.block2.relu both give 8 x 8 pixels.
            ours, theirs = "conv1.bn", "stage2.block2.relu"
            taught = attach_regressor(
                student, teacher, x[:1], student_layer=ours, teacher_layer=theirs
            )
            optimizer = training.make_optimizer(taught, task.recipe)
            step = make_train_step(taught, teacher, optimizer, loss_fn, teacher_layer=theirs)
        start = time.perf_counter()
        training.fit(step, x, y, batch_size=64, epochs=1, seed=0)
        runtime.synchronize()
        ms = (time.perf_counter() - start) * 1e3 / (len(x) // 64)
        predict = training.make_predict(student)
        accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=256)
        print(f"{name:8}{ms:11.2f}{accuracy:24.1f}")


if __name__ == "__main__":
    main()
