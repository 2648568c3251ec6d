"""The loss of a one-stage detector: which place answers for which object, and how wrong it is.

What it holds: the loss of FCOS (Tian et al., 2019, "FCOS: Fully Convolutional One-Stage Object
Detection", section 3.1) without its centre-ness branch: focal loss over all places and classes
(Lin et al., 2017, "Focal Loss for Dense Object Detection"), and generalised IoU (Rezatofighi et
al., 2019) at the places near an object's centre ("center sampling"); both over the number of these.
Boxes are said as in YOLOX (Ge et al., 2021), so that a place beside a thin object can answer, too.
Twin: `pt_impl/kit/detection.py`.
Where the frameworks differ: `tf.gather` takes whole rows. All shapes are fixed, on both sides:
places without an object are masked, not left out.
"""

from collections.abc import Callable

import tensorflow as tf

from shared import boxes
from shared.specs import DetectorSpec

ALPHA, GAMMA = 0.25, 2.0  # of the focal loss
RADIUS = 1.0  # strides from an object's centre, across and down, within which a place answers


def make_detection_loss(spec: DetectorSpec) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Make `loss(output, labels)`, a scalar of at least float32, for a detector of `spec`.

    output: (n, places, classes + 4), see `models.build`; labels: (n, objects, 5), a row an object:
    left, top, right, bottom and class, which is -1 where there is none.
    """
    places = boxes.locations(spec)

    def detection_loss(output, labels):
        output = tf.cast(output, tf.float32) if output.dtype.size < 4 else output
        centres, strides, limits = (tf.cast(part, output.dtype) for part in places)
        labels = tf.cast(labels, output.dtype)
        wanted, labels_there, found = assign(labels, centres, strides, limits)
        found = tf.cast(found, output.dtype)
        classes = tf.one_hot(tf.cast(labels_there, tf.int32), spec.num_classes, dtype=output.dtype)
        lost = tf.reduce_sum(focal_loss(output[..., :-4], classes * found[..., None]))
        corners = to_corners(output[..., -4:], centres, strides)
        lost += tf.reduce_sum((1 - generalized_iou(corners, wanted)) * found)
        return lost / tf.maximum(tf.reduce_sum(found), 1)

    return detection_loss


def assign(
    labels: tf.Tensor, centres: tf.Tensor, strides: tf.Tensor, limits: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """For each place: the box (n, places, 4) and class of its object, and whether it has one.

    It has the smallest of the objects that belong to its level and whose centres are near.
    """
    corners, classes = labels[:, None, :, :4], labels[:, None, :, 4]
    sides = corners[..., 2:] - corners[..., :2]
    middle = (corners[..., :2] + corners[..., 2:]) / 2
    distance = tf.reduce_max(tf.abs(centres[:, None] - middle), -1)
    longer = tf.reduce_max(sides, -1)
    fits = (longer > limits[:, :1]) & (longer <= limits[:, 1:])
    candidates = (distance < RADIUS * strides[:, None]) & fits & (classes >= 0)
    area = tf.where(candidates, _area(sides), tf.cast(float("inf"), sides.dtype))
    row = tf.gather(labels, tf.argmin(area, -1), batch_dims=1)
    return row[..., :4], row[..., 4], tf.reduce_any(candidates, -1)


def focal_loss(logits: tf.Tensor, wanted: tf.Tensor) -> tf.Tensor:
    """Cross-entropy of each logit, less where it is nearly right; `wanted` is 0 or 1."""
    right = wanted * tf.sigmoid(logits) + (1 - wanted) * tf.sigmoid(-logits)
    weight = ALPHA * wanted + (1 - ALPHA) * (1 - wanted)
    entropy = tf.nn.sigmoid_cross_entropy_with_logits(labels=wanted, logits=logits)
    return weight * (1 - right) ** GAMMA * entropy


def to_corners(output: tf.Tensor, centres: tf.Tensor, strides: tf.Tensor) -> tf.Tensor:
    """Left, top, right and bottom in pixels, from what the head says of a box."""
    middle = centres + output[..., :2] * strides[:, None]
    half = tf.exp(output[..., 2:]) * strides[:, None] / 2
    return tf.concat([middle - half, middle + half], -1)


def generalized_iou(ours: tf.Tensor, theirs: tf.Tensor) -> tf.Tensor:
    """Intersection over union, less the share of the hull that is in neither box: -1 to 1."""
    larger, smaller = tf.maximum(ours, theirs), tf.minimum(ours, theirs)
    common = _area(tf.maximum(smaller[..., 2:] - larger[..., :2], 0))
    hull = _area(larger[..., 2:] - smaller[..., :2])
    union = sum(_area(one[..., 2:] - one[..., :2]) for one in (ours, theirs)) - common
    return common / union - (hull - union) / hull


def _area(sides):
    return sides[..., 0] * sides[..., 1]
