"""What distillation refuses: settings out of range, and outputs that are no logits of one shape."""

import math

import numpy as np
import tensorflow as tf

from tf_impl.kit.calling import infer, logits


def check_distillation(
    student: tf.keras.Model,
    temperature: float,
    alpha: float,
    teacher: tf.keras.Model | None = None,
) -> None:
    """Raise ValueError for settings out of range, and for models without variables."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0 and finite, not {temperature!r}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be between 0 and 1, not {alpha!r}")
    for who, model in (("student", student), ("teacher", teacher)):
        if model is not None and not model.built:
            raise ValueError(f"the {who} has no variables yet: call it once on an example input")
    if not student.trainable_variables:
        raise ValueError("the student has no trainable variables: there is nothing to teach")


class FirstBatch:
    """Looks at the first batch of a step, before anything is changed.

    It refuses probabilities, which no graph can tell while it is traced. Within another graph it
    does nothing: that would look in every step.
    """

    def __init__(self, student: tf.keras.Model, class_axis: int) -> None:
        self.student, self.class_axis, self.seen = student, class_axis, False

    def check(self, x, target) -> None:
        """Raise ValueError where logits sum to one. target: logits, or a model to ask for them."""
        if self.seen or not tf.executing_eagerly():
            return
        if callable(target):
            target = logits(infer(target, x))
        outputs = {"student": logits(infer(self.student, x)), "teacher": target}
        for who, output in outputs.items():
            if any(_are_probabilities(part, self.class_axis) for part in tf.nest.flatten(output)):
                raise ValueError(
                    f"the {who} gives probabilities (rows that sum to one), not logits: leave out "
                    "its softmax, or take the logarithm"
                )
        self.seen = True


def check_logits(student, teacher, labels, class_axis: int) -> None:
    """Raise ValueError unless both are logits of one shape, or as many of them in one structure.

    They must have two classes or more along the axis, which labels must lack. A graph knows all
    that while it is traced, before it has changed anything.
    """
    pairs = zip(tf.nest.flatten(student), tf.nest.flatten(teacher), strict=False)
    if not _same_structure(student, teacher) or not all(_are_alike(*pair) for pair in pairs):
        ours, theirs = (
            each.shape.as_list() if tf.is_tensor(each) else type(each).__name__
            for each in (student, teacher)
        )
        raise ValueError(
            "student and teacher must give logits of one shape, with the same classes: "
            f"the student gives {ours}, the teacher {theirs}"
        )
    shapes = [each.shape for each in tf.nest.flatten(teacher)]
    _check_classes([shape.as_list() for shape in shapes if shape.rank is not None], class_axis)
    _check_labels(teacher, labels, class_axis)


def check_taught(student: tf.keras.Model) -> None:
    """Raise ValueError for a student that was not told whom to learn from."""
    if not hasattr(student, "_soft"):
        raise ValueError("the student has no teacher yet: say learn_from(teacher)")


def weights_of(sample_weight, outputs: int) -> list:
    """Return the sample weights of each output: one for all where `fit` was given no more.

    Raises NotImplementedError for another number of them.
    """
    found = tf.nest.flatten(sample_weight)
    found = found * outputs if len(found) == 1 else found
    if len(found) != outputs:
        raise NotImplementedError(f"{len(found)} sample weights for {outputs} outputs of a teacher")
    return found


def _same_structure(ours, theirs) -> bool:
    try:
        tf.nest.assert_same_structure(ours, theirs)
    except (TypeError, ValueError):
        return False
    return True


def _are_alike(ours, theirs) -> bool:
    both = tf.is_tensor(ours) and tf.is_tensor(theirs)
    return both and ours.shape.rank != 0 and ours.shape.is_compatible_with(theirs.shape)


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


def _check_labels(target, labels, class_axis: int) -> None:
    """Raise where labels, which lack the axis of the classes, say that it is another one.

    Of several outputs each has its own labels, in the same structure, or all have the same.
    """
    outputs = tf.nest.flatten(target)
    same = _same_structure(labels, target)
    each = tf.nest.flatten(labels) if same else [labels] * len(outputs)
    for output, own in zip(outputs, each, strict=True):
        if not tf.is_tensor(own) or None in (output.shape.rank, own.shape.rank):
            continue
        shape, found = output.shape.as_list(), own.shape.as_list()
        axes = [a for a in range(1, len(shape)) if shape[:a] + shape[a + 1 :] == found]
        if axes and class_axis % len(shape) not in axes:
            raise ValueError(
                f"labels of {found} and logits of {shape} have the classes along axis {axes[0]}, "
                f"not {class_axis}: say so by class_axis"
            )


def _are_probabilities(output, class_axis: int) -> bool:
    """Whether no value is below zero and the classes sum to one everywhere."""
    rows = np.asarray(tf.cast(output, tf.float64))
    if rows.ndim == 0 or rows.shape[class_axis] < 2 or not len(rows) or (rows < 0).any():
        return False
    return bool((np.abs(rows.sum(class_axis) - 1) < 1e-2).all())
