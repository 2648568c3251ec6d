"""Knowledge distillation: a small student learns from a large trained teacher.

    target = teacher(x, training=False)  # outside the tape
    with tf.GradientTape() as tape:
        output = student(x, training=True)
        soft = soft_loss(output, target, temperature=4.0)
        loss = alpha * soft + (1 - alpha) * loss_fn(output, y)

What it changes: the loss. The student learns from the labels and from the teacher's probabilities,
softened by a temperature T: T^2 KL(softmax(teacher / T) || softmax(student / T)) (Hinton, Vinyals
and Dean, 2015, section 2). T^2 keeps the size of the soft gradient the same for any T. The teacher
does not change. `make_train_step` runs it in every step. `make_stored_train_step` reads the logits
that `store_logits` has computed before.
- For `fit` there is a mixin, `DistilledTraining`.

Its twin: `pt_impl/compression/distillation.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps a student that must be small, most with few labels or none
(alpha 1). Without random augmentation the teacher's logits are the same in every epoch: store them.
With augmentation the teacher has to see the same images as the student (Beyer et al., 2021), which
costs its forward pass in every step. It hurts if the teacher is no better than the student, or far
better (Cho and Hariharan, 2019). Tune T and alpha.

Run it alone: `python -m tf_impl.compression.distillation` prints a student without a teacher, with
one in every step, and with stored logits.

Copy with it: `tf_impl/kit/calling.py`, `tf_impl/kit/checks/distillation.py`.
"""

from collections.abc import Callable

import tensorflow as tf

from tf_impl.kit.calling import (
    add_own_losses,
    at_least_float32,
    call,
    concatenate,
    infer,
    logits,
    rows,
    scale_loss,
)
from tf_impl.kit.checks.distillation import (
    FirstBatch,
    check_distillation,
    check_logits,
    check_taught,
    weights_of,
)


def soft_loss(
    student_logits: tf.Tensor,
    teacher_logits: tf.Tensor,
    *,
    temperature: float,
    class_axis: int = -1,
) -> tf.Tensor:
    """Return T^2 KL(teacher || student) at temperature T, the mean over all positions: a scalar.

    Logits of one shape, classes along `class_axis`, and any float dtype; half-precision ones are
    cast to float32.
    """
    return tf.reduce_mean(_divergence(student_logits, teacher_logits, temperature, class_axis))


def _divergence(student_logits, teacher_logits, temperature: float, class_axis: int) -> tf.Tensor:
    """Return T^2 KL(teacher || student) of each position."""
    log_q, log_p = (
        tf.nn.log_softmax(at_least_float32(each) / temperature, axis=class_axis)
        for each in (student_logits, teacher_logits)
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
    """Make the train step that asks the teacher about each batch.

    Args:
        student, teacher: built; both give logits of one shape, as a tensor or under "logits"; or
            several in a tuple, list or dict, whose soft losses are added up.
        optimizer: of the student.
        loss_fn: `loss_fn(output, y)` returns the mean over the batch.
        temperature: above 0.
        alpha: the teacher's share. 0 is the plain step, and no teacher runs; with 1, `loss_fn` is
            not called and y may be anything.
        class_axis: where logits have their classes.

    Returns:
        `step(x, y) -> loss`: the weighted sum and the student's own losses, a scalar on the device.
        x: as `fit` hands it over, unpacked only where `call` takes several arguments.

    Raises:
        ValueError: settings are out of range, a model is not built, or the student has no
            trainable variables. In the first step, before anything is changed: the teacher knows
            other classes, logits have fewer than two classes, labels y show classes along another
            axis, or (unless traced into another graph) a model gives probabilities.
    """
    check_distillation(student, temperature, alpha, teacher)
    first_batch = FirstBatch(student, class_axis)
    learn = make_stored_train_step(
        student, optimizer, loss_fn, temperature=temperature, alpha=alpha, class_axis=class_axis
    )

    @tf.function(jit_compile=False)
    def update(x, y):
        return learn(x, (y, logits(infer(teacher, x)) if alpha else None))

    def step(x, y):
        if alpha > 0:
            first_batch.check(x, teacher)
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
    check_distillation(student, temperature, alpha)
    first_batch = FirstBatch(student, class_axis)
    variables = student.trainable_variables

    def soft(output, target, labels):
        output, settings = logits(output), {"temperature": temperature, "class_axis": class_axis}
        check_logits(output, target, labels, class_axis)  # while the graph is traced
        pairs = zip(tf.nest.flatten(output), tf.nest.flatten(target), strict=True)
        return sum(soft_loss(*pair, **settings) for pair in pairs)

    @tf.function(jit_compile=False)
    def update(x, y):
        labels, target = y
        with tf.GradientTape() as tape:
            output = call(student, x, training=True)
            loss = alpha * soft(output, target, labels) if alpha > 0 else 0.0
            if alpha < 1:
                hard = (1 - alpha) * loss_fn(output, labels)
                loss = hard + tf.cast(loss, hard.dtype)
            loss = add_own_losses(loss, student)
            scaled = scale_loss(loss, optimizer)
        gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    def step(x, y):
        if alpha > 0:
            first_batch.check(x, y[1])
        return update(x, y)

    return step


class DistilledTraining:
    """A mixin for `fit`: `class Student(DistilledTraining, keras.Model)`; Keras 3.

    After `learn_from` it trains with the loss of this file, the compiled loss being `loss_fn`;
    evaluation has only the compiled loss.
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

        But not for probabilities: `fit` sees logits only in a graph, where it can't tell.
        """
        check_distillation(self, temperature, alpha, teacher)
        loss = _SoftLoss(temperature, class_axis)

        def soft(x, y, output, sample_weight):
            target = logits(infer(teacher, x))
            target = tf.nest.map_structure(tf.stop_gradient, target)  # `fit` has a tape around it
            check_logits(logits(output), target, y, class_axis)
            each = tf.nest.flatten(target), tf.nest.flatten(logits(output))
            return sum(map(loss, *each, weights_of(sample_weight, len(each[0]))))

        # A function: Keras would train an attribute that is a model.
        self._soft, self._alpha = soft, alpha

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        """The loss of a batch, as Keras asks for it."""
        hard = super().compute_loss(x, y, y_pred, sample_weight, training)
        if not training:
            return hard
        check_taught(self)
        if self._alpha == 0:
            return hard
        # Its own losses are in `hard` already, and the teacher takes no share of them. Each replica
        # gives its part of the loss.
        own = sum(self.losses) / tf.distribute.get_strategy().num_replicas_in_sync
        soft = self._alpha * (self._soft(x, y, y_pred, sample_weight) + own)
        return soft if self._alpha == 1 else soft + (1 - self._alpha) * hard


class _SoftLoss(tf.keras.losses.Loss):
    """`soft_loss` as `fit` takes losses: of samples with weights, and of replicas."""

    def __init__(self, temperature: float, class_axis: int) -> None:
        super().__init__(name="soft_loss")
        self.temperature, self.class_axis = temperature, class_axis

    def call(self, y_true, y_pred):
        return _divergence(y_pred, y_true, self.temperature, self.class_axis)


def store_logits(teacher: tf.keras.Model, x, *, batch_size: int = 256) -> tf.Tensor:
    """Return the teacher's logits for all samples of x, computed `batch_size` at a time.

    x: as in `make_train_step`, with the samples along the first axis of every tensor in it; what
    has no first axis, such as None for a mask, goes with every part. Several outputs are all
    stored, in their structure.
    """

    # A smaller last batch makes a graph for any batch size, not one for each.
    @tf.function(jit_compile=False, reduce_retracing=True)
    def predict(part):
        return logits(infer(teacher, part))

    samples = max(each.shape[0] for each in tf.nest.flatten(x) if getattr(each, "shape", ()) != ())
    starts = range(0, samples, batch_size)
    return concatenate([predict(rows(x, start, start + batch_size)) for start in starts])


def main() -> None:
    """Print the digits student alone, taught, and taught by stored logits, after two epochs."""
    from shared import teacher as trained
    from tf_impl.kit import models, training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-student")
    teacher = models.build(trained.TASK.model, trained.load().weights)
    x, y = demo.train
    ways = {
        "alone": (training.make_train_step, y),
        "taught": (lambda student, *rest: make_train_step(student, teacher, *rest), y),
        "stored": (make_stored_train_step, (y, store_logits(teacher, x))),
    }
    print("step      ms a step  accuracy after 2 epochs")
    for name, (make, labels) in ways.items():
        student, optimizer, loss_fn = demo.build()
        ms = demo.fit(make(student, optimizer, loss_fn), epochs=2, y=labels)
        print(f"{name:8}{ms:11.2f}{demo.score(student):24.1f}")


if __name__ == "__main__":
    main()
