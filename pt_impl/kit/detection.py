"""The loss of a one-stage detector: which place answers for which object, and how wrong it is.

What it holds: the loss of FCOS (Tian et al., 2019, "FCOS: Fully Convolutional One-Stage Object
Detection", section 3.1) without its centre-ness branch: focal loss over all places and classes
(Lin et al., 2017, "Focal Loss for Dense Object Detection"), and generalised IoU (Rezatofighi et
al., 2019) at the places near an object's centre ("center sampling"); both over the number of these.
Boxes are said as in YOLOX (Ge et al., 2021), so that a place beside a thin object can answer, too.
Twin: `tf_impl/kit/detection.py`.
Where the frameworks differ: `gather` here wants an index for each number that it takes. All shapes
are fixed, on both sides: places without an object are masked, not left out.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pt_impl.kit import runtime
from shared import boxes
from shared.specs import DetectorSpec

ALPHA, GAMMA = 0.25, 2.0  # of the focal loss
RADIUS = 1.0  # strides from an object's centre, across and down, within which a place answers


def make_detection_loss(spec: DetectorSpec) -> Callable[[Tensor, Tensor], Tensor]:
    """Make `loss(output, labels)`, a scalar of at least float32, for a detector of `spec`.

    output: (n, places, classes + 4), see `models.Detector`; labels: (n, objects, 5), a row an
    object: left, top, right, bottom and class, which is -1 where there is none.
    """
    places = [torch.from_numpy(part).to(runtime.device()) for part in boxes.locations(spec)]

    def detection_loss(output: Tensor, labels: Tensor) -> Tensor:
        output = output if output.dtype == torch.float64 else output.float()
        wanted, labels_there, found = assign(labels.to(output.dtype), *places)
        classes = F.one_hot(labels_there.long().clamp(min=0), spec.num_classes) * found[..., None]
        lost = focal_loss(output[..., :-4], classes.to(output.dtype)).sum()
        corners = to_corners(output[..., -4:], places[0], places[1])
        lost = lost + ((1 - generalized_iou(corners, wanted)) * found).sum()
        return lost / found.sum().clamp(min=1)

    return detection_loss


def assign(labels: Tensor, centres: Tensor, strides: Tensor, limits: Tensor) -> tuple:
    """For each place: the box (n, places, 4) and class of its object, and whether it has one.

    It has the smallest of the objects that belong to its level and whose centres are near.
    """
    corners, classes = labels[:, None, :, :4], labels[:, None, :, 4]
    sides = corners[..., 2:] - corners[..., :2]
    middle = (corners[..., :2] + corners[..., 2:]) / 2
    near = (centres[:, None] - middle).abs().amax(-1) < RADIUS * strides[:, None]
    longer = sides.amax(-1)
    fits = (longer > limits[:, :1]) & (longer <= limits[:, 1:])
    candidates = near & fits & (classes >= 0)
    area = torch.where(candidates, _area(sides), torch.inf)
    chosen = area.argmin(-1)[..., None].expand(-1, -1, 5)
    row = labels.gather(1, chosen)
    return row[..., :4], row[..., 4], candidates.any(-1)


def focal_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """Cross-entropy of each logit, less where it is nearly right; `wanted` is 0 or 1."""
    right = wanted * logits.sigmoid() + (1 - wanted) * (-logits).sigmoid()
    weight = ALPHA * wanted + (1 - ALPHA) * (1 - wanted)
    entropy = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    return weight * (1 - right) ** GAMMA * entropy


def to_corners(output: Tensor, centres: Tensor, strides: Tensor) -> Tensor:
    """Left, top, right and bottom in pixels, from what the head says of a box."""
    middle = centres + output[..., :2] * strides[:, None]
    half = output[..., 2:].exp() * strides[:, None] / 2
    return torch.cat([middle - half, middle + half], -1)


def generalized_iou(ours: Tensor, theirs: Tensor) -> Tensor:
    """Intersection over union, less the share of the hull that is in neither box: -1 to 1."""
    larger, smaller = torch.maximum(ours, theirs), torch.minimum(ours, theirs)
    common = _area((smaller[..., 2:] - larger[..., :2]).clamp(min=0))
    hull = _area(larger[..., 2:] - smaller[..., :2])
    union = sum(_area(one[..., 2:] - one[..., :2]) for one in (ours, theirs)) - common
    return common / union - (hull - union) / hull


def _area(sides: Tensor) -> Tensor:
    return sides[..., 0] * sides[..., 1]
