"""What distillation refuses: settings out of range, and outputs that are no logits of one shape."""

import math

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_structure  # torch has no public one

from pt_impl.kit.calling import infer, logits


def check_distillation(student: nn.Module, temperature: float, alpha: float) -> None:
    """Raise ValueError for settings out of range, and for a student without parameters to train."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0 and finite, not {temperature!r}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be between 0 and 1, not {alpha!r}")
    if not any(parameter.requires_grad for parameter in student.parameters()):
        raise ValueError("the student has no trainable parameters: there is nothing to teach")


class FirstBatch:
    """Looks at the first batch of a step, before anything is changed.

    The student is tried in evaluation mode, so BatchNorm has not moved if this raises.
    """

    def __init__(self, student: nn.Module, class_axis: int) -> None:
        self.student, self.class_axis, self.seen = student, class_axis, False

    def check(self, x, labels, target) -> None:
        """Raise ValueError unless the student's output and `target` are logits of one shape.

        They must have two classes or more along the axis, which labels must lack, and must not be
        probabilities.
        """
        if not self.seen:
            _check_logits(logits(infer(self.student, x)), target, self.class_axis)
            _check_labels(target, logits(labels), self.class_axis)
            self.seen = True


def _check_logits(student, teacher, class_axis: int) -> None:
    """Raise unless both are logits of one shape, or as many of them in one structure."""
    pairs = tree_leaves(student), tree_leaves(teacher)
    same = tree_structure(student) == tree_structure(teacher)
    if not same or not all(_are_alike(*pair) for pair in zip(*pairs, strict=True)):
        ours, theirs = (
            list(each.shape) if isinstance(each, Tensor) else type(each).__name__
            for each in (student, teacher)
        )
        raise ValueError(
            "student and teacher must give logits of one shape, with the same classes: "
            f"the student gives {ours}, the teacher {theirs}"
        )
    _check_classes([list(each.shape) for each in pairs[1]], class_axis)
    for who, leaves in zip(("student", "teacher"), pairs, strict=True):
        if any(_are_probabilities(leaf.movedim(class_axis, -1)) for leaf in leaves):
            raise ValueError(
                f"the {who} gives probabilities (rows that sum to one), not logits: leave out its "
                "softmax, or take the logarithm"
            )


def _are_alike(ours, theirs) -> bool:
    both = isinstance(ours, Tensor) and isinstance(theirs, Tensor)
    return both and ours.ndim > 0 and ours.shape == theirs.shape


def _check_classes(shapes: list[list], class_axis: int) -> None:
    """Raise where softmax would be 1 everywhere, or be taken over the samples."""
    counts = [_classes(shape, class_axis) for shape in shapes]
    if min(counts) == 0 or max(counts) < 2:
        raise ValueError(
            f"logits of {shapes[counts.index(min(counts))]} have no two classes along axis "
            f"{class_axis}, so there is nothing to teach: of one logit z give two, 0 and z"
        )


def _classes(shape: list, class_axis: int) -> int:
    """How many there are; 0 where only samples have such an axis."""
    inside = len(shape) > 1 and -len(shape) < class_axis < len(shape)
    return shape[class_axis] if inside else 0


def _check_labels(target, labels, class_axis: int) -> None:
    """Raise where labels, which lack the axis of the classes, say that it is another one.

    Of several outputs each has its own labels, in the same structure, or all have the same.
    """
    outputs = tree_leaves(target)
    same = tree_structure(labels) == tree_structure(target)
    each = tree_leaves(labels) if same else [labels] * len(outputs)
    for output, own in zip(outputs, each, strict=True):
        if not isinstance(own, Tensor):
            continue
        shape, found = list(output.shape), list(own.shape)
        axes = [a for a in range(1, len(shape)) if shape[:a] + shape[a + 1 :] == found]
        if axes and class_axis % len(shape) not in axes:
            raise ValueError(
                f"labels of {found} and logits of {shape} have the classes along axis {axes[0]}, "
                f"not {class_axis}: say so by class_axis"
            )


def _are_probabilities(output: Tensor) -> bool:
    """Whether no value is below zero and each row sums to one."""
    rows = output.detach().double()
    if rows.shape[-1] < 2 or not len(rows) or (rows < 0).any():
        return False
    return bool(((rows.sum(-1) - 1).abs() < 1e-2).all())
