"""Knowledge distillation: a small student learns from a large teacher that is trained already.

What it changes: the loss. Beside the labels, the student follows the teacher's probabilities, both
softened by a temperature T (Hinton, Vinyals and Dean, 2015, "Distilling the Knowledge in a Neural
Network", section 2):

    alpha T^2 KL(softmax(teacher / T) || softmax(student / T)) + (1 - alpha) loss_fn

T^2 keeps the size of the soft gradient where T changes. The teacher runs in evaluation mode,
without gradients, and stays as it was. `make_train_step` runs it in every step,
`make_stored_train_step` reads what `store_logits` has computed before.

Its twin: `pt_impl/compression/distillation.py`.

Where the frameworks differ and why:
- Keras's `KLDivergence` takes probabilities and clips them to [1e-7, 1]. The student's logarithms,
  which tutorials hand it, are below zero: all are clipped to one value and the gradient is zero,
  however plausible the loss. So the sum is written out here, over logarithms. PyTorch's `kl_div`
  takes log-probabilities, but by default divides by the classes too.
- Keras has the mode per call; PyTorch sets the teacher's and puts it back. Keras 3 moves the seeds
  of an LSTM's dropout on in evaluation mode, too: such changes of both models are dropped, so that
  a teacher that draws when it predicts draws the same in every step.
- The teacher's pass stands outside the tape, so that nothing of it is kept for a backward pass.
  There it is under `no_grad`.
- The graph knows shapes while it is traced, before it has changed anything; there the first step
  tries the student once in evaluation mode.
- For `fit`, `DistilledTraining` is a mixin of a model class with the meaning of this file. Keras
  3's own `keras.distillation.Distiller` makes the teacher untrainable for good, and its KL clips at
  1e-7, below which a student's class gets no gradient.

When it helps and when it hurts: it helps a student that must be small, most with few labels or none
(alpha 1). Each step costs a forward pass of the teacher, often many times the student's own step.
Without random augmentation the teacher says the same in every epoch: store it once. With it, the
teacher has to see just what the student sees (Beyer et al., 2021, "Knowledge distillation: A good
teacher is patient and consistent"). It hurts where the teacher is no better than the student, or so
far above it that the student cannot follow (Cho and Hariharan, 2019, "On the Efficacy of Knowledge
Distillation"). T and alpha have no values that are right everywhere.

Run it alone: `python -m tf_impl.compression.distillation` prints a student alone, with a teacher in
every step and with stored logits.
"""

import contextlib
import inspect
import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf


def soft_loss(
    student_logits: tf.Tensor,
    teacher_logits: tf.Tensor,
    *,
    temperature: float,
    class_axis: int = -1,
) -> tf.Tensor:
    """Return T^2 KL(teacher || student) at temperature T, the mean over all positions: a scalar.

    Logits of one shape, classes along `class_axis`, and any float dtype; half-width ones are cast
    to float32.
    """
    logits = student_logits, teacher_logits
    return tf.reduce_mean(_divergence(*logits, temperature=temperature, class_axis=class_axis))


def _divergence(student_logits, teacher_logits, *, temperature: float, class_axis: int):
    """T^2 KL(teacher || student) of every position."""
    log_q, log_p = (
        tf.nn.log_softmax(_at_least_float32(logits) / temperature, axis=class_axis)
        for logits in (student_logits, teacher_logits)
    )
    # Logarithms on both sides: a probability that underflows must not become an infinity.
    return tf.reduce_sum(tf.exp(log_p) * (log_p - log_q), axis=class_axis) * temperature**2


def make_train_step(
    student: tf.keras.Model,
    teacher: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
    *,
    temperature: float = 4.0,
    alpha: float = 0.9,
    class_axis: int = -1,
) -> Callable:
    """Return `step(x, y) -> loss`: one update of the student, with the teacher's logits for x.

    x: a tensor, or a structure of them as `fit` hands it over: unpacked only where `call` takes
    several arguments. Both give logits of one shape, or several of them in a tuple, list or dict,
    whose soft losses are added up (one of one class adds nothing); of a dict with "logits" these
    alone. `loss_fn(output, y)` returns the mean over the batch. loss: scalar on the device, the
    weighted sum and the student's own losses (of regularisers, of `add_loss`). temperature: above
    0. alpha: the share of the teacher, 0 (the plain step, no teacher runs) to 1 (`loss_fn` is not
    called, y may be anything). class_axis: where logits have their classes.

    Raises ValueError for settings out of range and for a student without trainable variables; the
    first step does, before anything is changed, where the teacher's logits have another shape (it
    knows other classes), where no output has two classes or one has no axis of classes, where
    labels y say that classes are along another axis, and, unless it is traced into another graph,
    where one of both gives probabilities: rows that sum to one.
    """
    _check(student, temperature, alpha)
    _check_built(teacher, "teacher")
    variables = student.trainable_variables

    @tf.function(jit_compile=False)
    def update(x, y):
        target = _logits(_evaluated(teacher, x)) if alpha else None
        with tf.GradientTape() as tape:
            output = _call(student, x, training=True)
            loss = _loss(loss_fn, output, y, target, temperature, alpha, class_axis)
            loss = sum((tf.cast(term, loss.dtype) for term in student.losses), loss)
            scaled = _scaled(loss, optimizer)
        gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    looked = alpha == 0

    def step(x, y):
        nonlocal looked
        if not looked and tf.executing_eagerly():  # a graph would look again in every step
            target = _logits(_evaluated(teacher, x))
            _refuse_probabilities(student, x, target, class_axis)
            looked = True
        return update(x, y)

    return step


def make_stored_train_step(
    student: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
    *,
    temperature: float = 4.0,
    alpha: float = 0.9,
    class_axis: int = -1,
) -> Callable:
    """Return `step(x, (y, teacher_logits)) -> loss`: `make_train_step` without the teacher.

    teacher_logits: the rows of `store_logits` that belong to x. All else is as there.
    """
    _check(student, temperature, alpha)
    variables = student.trainable_variables

    @tf.function(jit_compile=False)
    def update(x, y):
        labels, target = y
        with tf.GradientTape() as tape:
            output = _call(student, x, training=True)
            loss = _loss(loss_fn, output, labels, target, temperature, alpha, class_axis)
            loss = sum((tf.cast(term, loss.dtype) for term in student.losses), loss)
            scaled = _scaled(loss, optimizer)
        gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    looked = alpha == 0

    def step(x, y):
        nonlocal looked
        if not looked and tf.executing_eagerly():
            _refuse_probabilities(student, x, y[1], class_axis)
            looked = True
        return update(x, y)

    return step


class DistilledTraining:
    """A mixin for `fit`: `class Student(DistilledTraining, keras.Model)`; Keras 3.

    After `learn_from` it trains with the loss of this file, the compiled loss being `loss_fn`;
    evaluation has the compiled loss alone.
    """

    def learn_from(
        self,
        teacher: tf.keras.Model,
        *,
        temperature: float = 4.0,
        alpha: float = 0.9,
        class_axis: int = -1,
    ) -> None:
        """Follow the teacher from now on: before `fit`. Settings, Raises: as `make_train_step`.

        But for probabilities: `fit` sees logits in a graph alone, where it can't tell.
        """
        _check(self, temperature, alpha)
        _check_built(teacher, "teacher")

        def weighted(x, y, output, hard, weights):
            if alpha == 0:
                return hard
            target = _logits(_evaluated(teacher, x))
            target = tf.nest.map_structure(tf.stop_gradient, target)  # `fit` has a tape around it
            of_batch = (output, y, target, temperature, alpha, class_axis)
            return _loss(lambda *_: hard, *of_batch, weights=weights)

        # Functions: of an attribute that is a model Keras would train the variables, too.
        self._weighted, self._share = weighted, alpha

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        """The loss of a batch, as Keras asks for it."""
        hard = super().compute_loss(x, y, y_pred, sample_weight, training)
        if not training:
            return hard
        if not hasattr(self, "_weighted"):
            raise ValueError("the student has no teacher yet: say learn_from(teacher)")
        # Keras divides the loss of each replica by their number, since gradients are summed.
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        soft_and_hard = self._weighted(x, y, y_pred, hard * replicas, sample_weight)
        # Its own losses are in `hard` already, and the teacher takes no share of them.
        return (soft_and_hard + self._share * sum(self.losses)) / replicas


def store_logits(teacher: tf.keras.Model, x, *, batch_size: int = 256) -> tf.Tensor:
    """Return the teacher's logits for all samples of x, computed `batch_size` at a time.

    x: as in `make_train_step`, with the samples along the first axis of every tensor in it; what
    is none, such as None for a mask, goes with every part. Of several outputs all are stored, in
    their structure.
    """

    # A smaller last batch makes a graph for any batch size, not one for each.
    @tf.function(jit_compile=False, reduce_retracing=True)
    def infer(rows):
        return _logits(_evaluated(teacher, rows))

    def some(start):
        rows = slice(start, start + batch_size)
        return tf.nest.map_structure(lambda v: v[rows] if _has_samples(v) else v, x)

    samples = next(filter(_has_samples, tf.nest.flatten(x))).shape[0]
    parts = map(some, range(0, samples, batch_size))
    return tf.nest.map_structure(lambda *rows: tf.concat(rows, axis=0), *map(infer, parts))


def _evaluated(model: tf.keras.Model, x):
    """The output in evaluation mode, in which no variable changes."""
    with getattr(tf.keras, "StatelessScope", contextlib.nullcontext)():  # of Keras 3
        return _call(model, x, training=False)


def _has_samples(value) -> bool:
    return len(getattr(value, "shape", ())) > 0


def _call(model: tf.keras.Model, x, training: bool):
    """Call the model as `fit` does: x is one argument, but where `call` takes several."""
    names = [
        parameter
        for parameter in inspect.signature(model.call).parameters.values()
        if parameter.name not in ("training", "mask") and parameter.kind != parameter.VAR_KEYWORD
    ]
    needed = sum(parameter.default is parameter.empty for parameter in names)
    several = needed > 1 or (names and names[0].kind == names[0].VAR_POSITIONAL)
    if isinstance(x, tuple | list) and several:
        return model(*x, training=training)
    if isinstance(x, dict) and len(names) > 1 and x.keys() <= {name.name for name in names}:
        return model(**x, training=training)
    return model(x, training=training)


def _logits(output):
    """What says classes: all of an output, or of a dict what it has under that name."""
    return output["logits"] if isinstance(output, dict) and "logits" in output else output


def _loss(
    loss_fn,
    output,
    labels,
    target,
    temperature: float,
    alpha: float,
    class_axis: int,
    weights=None,
):
    """The weighted sum; what has no weight is not computed. weights: of `fit`'s samples."""
    if alpha == 0:
        return loss_fn(output, labels)
    student = _logits(output)
    _check_logits(student, target)
    shapes = [logits.shape for logits in tf.nest.flatten(target)]
    _check_classes([shape.as_list() for shape in shapes if shape.rank is not None], class_axis)
    _check_labels(target, labels, class_axis)
    pairs = zip(tf.nest.flatten(student), tf.nest.flatten(target), strict=True)
    settings = {"temperature": temperature, "class_axis": class_axis}
    if weights is None:
        soft = alpha * sum(soft_loss(*pair, **settings) for pair in pairs)
    else:
        each = [_divergence(*pair, **settings) for pair in pairs]
        soft = alpha * sum(map(_weighted_mean, each, _weights(weights, len(each))))
    if alpha == 1:
        return soft
    hard = (1 - alpha) * loss_fn(output, labels)
    return tf.cast(soft, hard.dtype) + hard


def _weights(weights, outputs: int) -> list:
    """Those of each output; one for all where `fit` was given no more."""
    found = tf.nest.flatten(weights)
    found = found * outputs if len(found) == 1 else found
    if len(found) != outputs:
        raise NotImplementedError(f"{len(found)} sample weights for {outputs} outputs of a teacher")
    return found


def _weighted_mean(values, weights):
    """The mean over all positions of values times weights, as Keras's losses take it."""
    for _ in range(values.shape.rank - weights.shape.rank):
        weights = weights[..., tf.newaxis]
    return tf.reduce_mean(values * tf.cast(weights, values.dtype))


def _at_least_float32(logits):
    return logits if logits.dtype == tf.float64 else tf.cast(logits, tf.float32)


def _scaled(loss, optimizer):
    """The loss to take gradients of: Keras 3's LossScaleOptimizer divides them by its scale."""
    return optimizer.scale_loss(loss) if hasattr(optimizer, "scale_loss") else loss


def _check(student: tf.keras.Model, temperature: float, alpha: float) -> None:
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0 and finite, not {temperature!r}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be between 0 and 1, not {alpha!r}")
    _check_built(student, "student")
    if not student.trainable_variables:
        raise ValueError("the student has no trainable variables: there is nothing to teach")


def _check_built(model: tf.keras.Model, who: str) -> None:
    if not model.built:
        raise ValueError(f"the {who} has no variables yet: call it once on an example input")


def _check_labels(target, labels, class_axis: int) -> None:
    """Raise where labels, which lack the axis of the classes, say that it is another one.

    Of several outputs each has its own labels, in the same structure, or all have the same.
    """
    outputs = tf.nest.flatten(target)
    same = _same_structure(labels, target)
    each = tf.nest.flatten(labels) if same else [labels] * len(outputs)
    for logits, own in zip(outputs, each, strict=True):
        if not tf.is_tensor(own) or None in (logits.shape.rank, own.shape.rank):
            continue
        shape, found = logits.shape.as_list(), own.shape.as_list()
        axes = [a for a in range(1, len(shape)) if shape[:a] + shape[a + 1 :] == found]
        if axes and class_axis % len(shape) not in axes:
            raise ValueError(
                f"labels of {found} and logits of {shape} have the classes along axis {axes[0]}, "
                f"not {class_axis}: say so by class_axis"
            )


def _check_logits(student, teacher) -> None:
    """Raise unless both are logits of one shape, or as many of them in one structure."""
    pairs = zip(tf.nest.flatten(student), tf.nest.flatten(teacher), strict=False)
    if not _same_structure(student, teacher) or not all(_are_alike(*pair) for pair in pairs):
        ours, theirs = (
            logits.shape.as_list() if tf.is_tensor(logits) else type(logits).__name__
            for logits in (student, teacher)
        )
        raise ValueError(
            "student and teacher must give logits of one shape, with the same classes: "
            f"the student gives {ours}, the teacher {theirs}"
        )


def _same_structure(student, teacher) -> bool:
    try:
        tf.nest.assert_same_structure(student, teacher)
    except (TypeError, ValueError):
        return False
    return True


def _check_classes(shapes: list[list], class_axis: int) -> None:
    """Raise where softmax would be 1 everywhere, or be taken over the samples."""
    counts = [_classes(shape, class_axis) for shape in shapes]
    if counts and (min(counts) == 0 or max(counts) < 2):
        raise ValueError(
            f"logits of {shapes[counts.index(min(counts))]} have no two classes along axis "
            f"{class_axis}, so there is nothing to teach: of one logit z give two, 0 and z"
        )


def _classes(shape: list, class_axis: int) -> int:
    """How many there are, 2 where a graph can't tell; 0 where only samples have such an axis."""
    inside = len(shape) > 1 and -len(shape) < class_axis < len(shape)
    return (shape[class_axis] or 2) if inside else 0


def _are_alike(ours, theirs) -> bool:
    tensors = tf.is_tensor(ours) and tf.is_tensor(theirs)
    return tensors and ours.shape.rank != 0 and ours.shape.is_compatible_with(theirs.shape)


def _refuse_probabilities(student, x, target, class_axis: int) -> None:
    """Raise where the teacher's rows, or the student's in evaluation mode, sum to one."""
    outputs = {"student": _logits(_evaluated(student, x)), "teacher": target}
    for who, output in outputs.items():
        if any(_are_probabilities(part, class_axis) for part in tf.nest.flatten(output)):
            raise ValueError(
                f"the {who} gives probabilities (rows that sum to one), not logits: leave out its "
                "softmax, or take the logarithm"
            )


def _are_probabilities(output, class_axis: int) -> bool:
    """Whether no value is below zero and the classes sum to one everywhere."""
    rows = np.asarray(tf.cast(output, tf.float64))
    if rows.ndim == 0 or rows.shape[class_axis] < 2 or not len(rows) or (rows < 0).any():
        return False
    return bool((np.abs(rows.sum(class_axis) - 1) < 1e-2).all())


def main() -> None:
    """Print the digits student alone, taught, and taught by stored logits, after two epochs."""
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
    print("step      ms a step  accuracy after 2 epochs")
    for name in ("alone", "taught", "stored"):
        student = models.build(task.model, init_weights(task.model, seed=0))
        optimizer = training.make_optimizer(student, task.recipe)
        labels = y
        if name == "alone":
            step = training.make_train_step(student, optimizer, loss_fn)
        elif name == "taught":
            step = make_train_step(student, teacher, optimizer, loss_fn)
        else:
            labels = (y, store_logits(teacher, x))
            step = make_stored_train_step(student, optimizer, loss_fn)
        start = time.perf_counter()
        training.fit(step, x, labels, batch_size=64, epochs=2, seed=0)
        runtime.synchronize()
        ms = (time.perf_counter() - start) * 1e3 / (2 * (len(x) // 64))
        predict = training.make_predict(student)
        accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=256)
        print(f"{name:8}{ms:11.2f}{accuracy:24.1f}")


if __name__ == "__main__":
    main()
