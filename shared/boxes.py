"""Boxes: where a detector predicts them, what its output means, and how good they are.

What both frameworks do after a prediction, in NumPy, so that it is the same: `decode` turns a
detector's output into boxes with scores and suppresses duplicates; `mean_average_precision` is that
of COCO (Lin et al., 2014; the rule is that of its published evaluation): detections of a class are
taken by falling score, at most `MOST` an image, and each is matched with the free object that it
overlaps most, if by the threshold at least; precision is made to fall with recall and read at 101
recalls; the mean is over classes that have an object, then over thresholds. Objects of all sizes
count, and there are no crowds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shared.specs import DetectorSpec, level_sizes

CONFIDENT = 0.05  # detections of lower scores are dropped (Lin et al., 2017, section 4.1)
CANDIDATES = 200  # an image, by score, of which duplicates are suppressed
DUPLICATE = 0.6  # overlap with a better detection of its class beyond which one is dropped (FCOS)
MOST = 100  # detections of an image
OVERLAPS = {"mAP": tuple(np.linspace(0.5, 0.95, 10)), "mAP50": (0.5,)}
RECALLS = np.linspace(0.0, 1.0, 101)


@dataclass(frozen=True)
class Boxes:
    """The boxes of one image.

    corners: (k, 4), left, top, right and bottom; labels: (k,), classes; scores: (k,), only of
    detections.
    """

    corners: np.ndarray
    labels: np.ndarray
    scores: np.ndarray | None = None


def locations(spec: DetectorSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The places at which a detector predicts, in the order of its output, float32.

    Returns their centres (places, 2), x and y in pixels, their strides (places,), and between which
    lengths of the longer side the objects lie that belong to them (places, 2).
    """
    bounds = (0.0, *spec.limits, np.inf)
    centres, strides, limits = [], [], []
    for number, (height, width, stride) in enumerate(level_sizes(spec)):
        rows, columns = np.mgrid[:height, :width]
        centres.append((np.stack([columns, rows], -1).reshape(-1, 2) + 0.5) * stride)
        strides.append(np.full(height * width, stride))
        limits.append(np.tile(bounds[number : number + 2], (height * width, 1)))
    found = (np.concatenate(parts).astype(np.float32) for parts in (centres, strides, limits))
    return tuple(found)


def objects(labels: np.ndarray) -> list[Boxes]:
    """The objects of each image, of labels (n, objects, 5) as a data set of "scenes" has them."""
    kept = (rows[rows[:, 4] >= 0] for rows in labels)
    return [Boxes(rows[:, :4], rows[:, 4].astype(np.int64)) for rows in kept]


# Detections -----------------------------------------------------------------------------------


def decode(spec: DetectorSpec, output: np.ndarray) -> list[Boxes]:
    """The detections of each image, of output (n, places, classes + 4), the best first."""
    height, width, _ = spec.input_shape
    centres, strides, _ = locations(spec)
    output = output.astype(np.float64)
    with np.errstate(over="ignore"):  # an untrained detector's boxes may be as large as they like
        scores = 1.0 / (1.0 + np.exp(-output[..., :-4]))
        half = np.exp(output[..., -2:]) * strides[:, None] / 2
    middle = centres + output[..., -4:-2] * strides[:, None]
    corners = np.concatenate([middle - half, middle + half], -1)
    corners = corners.clip(0.0, [width, height, width, height])
    detections = []
    for of_image, boxes in zip(scores, corners, strict=True):
        places, labels = np.nonzero(of_image > CONFIDENT)
        chosen = of_image[places, labels]
        best = np.argsort(-chosen, kind="stable")[:CANDIDATES]
        image = Boxes(boxes[places[best]], labels[best], chosen[best])
        kept = suppress(image)[:MOST]
        detections.append(Boxes(image.corners[kept], image.labels[kept], image.scores[kept]))
    return detections


def suppress(image: Boxes, *, overlap: float = DUPLICATE) -> np.ndarray:
    """Non-maximum suppression: the numbers of the detections that are kept, the best first.

    One is dropped where one of its class that is kept, and has a higher score, overlaps it by more
    than `overlap`. Of equal scores the first counts as higher.
    """
    order = np.argsort(-image.scores, kind="stable")
    same = image.labels[order][:, None] == image.labels[order]
    hides = same & (overlaps(image.corners[order], image.corners[order]) > overlap)
    kept, left = [], np.ones(len(order), bool)
    for number in range(len(order)):
        if left[number]:
            kept.append(number)
            left &= ~hides[number]
    return order[kept]


def overlaps(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Intersection over union of each box (n, 4) with each other (m, 4); of empty boxes 0."""
    ours, theirs = ours[:, None].astype(np.float64), theirs[None].astype(np.float64)
    low = np.maximum(ours[..., :2], theirs[..., :2])
    high = np.minimum(ours[..., 2:], theirs[..., 2:])
    common = (high - low).clip(0.0).prod(-1)
    union = sum((boxes[..., 2:] - boxes[..., :2]).prod(-1) for boxes in (ours, theirs)) - common
    return np.divide(common, union, out=np.zeros_like(common), where=union > 0)


# Mean average precision -------------------------------------------------------------------------


def mean_average_precision(
    detected: list[Boxes], truth: list[Boxes], *, metric: str = "mAP"
) -> float:
    """COCO's mAP of the detections in each image against its objects, in percent.

    `metric`: "mAP" (the mean over overlaps from 0.5 to 0.95) or "mAP50" (at 0.5). Where detections
    of different images have the same score, they count in the order of the images.

    Raises ValueError, with what is wrong and in which image, for boxes that are none, detections
    without scores, lists of different lengths, and where there is no object at all.
    """
    if metric not in OVERLAPS:
        raise ValueError(f"unknown metric {metric!r}: {' or '.join(OVERLAPS)}")
    if len(detected) != len(truth):
        raise ValueError(f"detections of {len(detected)} images, objects of {len(truth)}")
    for number, (ours, theirs) in enumerate(zip(detected, truth, strict=True)):
        _check(ours, f"detections of image {number}", scored=True)
        _check(theirs, f"objects of image {number}", scored=False)
    classes = np.unique(np.concatenate([np.zeros(0, int), *(image.labels for image in truth)]))
    if not len(classes):
        raise ValueError("there are no objects: mAP is a mean over classes that have one")
    thresholds = np.array(OVERLAPS[metric])
    precisions = [_average_precision(detected, truth, label, thresholds) for label in classes]
    return 100.0 * float(np.mean(precisions))


def _check(image: Boxes, what: str, *, scored: bool) -> None:
    """Raise ValueError unless these are boxes, as many as labels and, if `scored`, scores."""
    corners, count = image.corners, len(image.corners)
    if corners.shape != (count, 4):
        raise ValueError(f"{what}: corners have shape {corners.shape}, not ({count}, 4)")
    if not np.isfinite(corners).all():
        raise ValueError(f"{what}: a corner is not a finite number")
    if (corners[:, 2:] < corners[:, :2]).any():
        raise ValueError(f"{what}: a box ends before it begins (left, top, right, bottom)")
    if image.labels.shape != (count,):
        raise ValueError(f"{what}: {count} boxes, labels of shape {image.labels.shape}")
    if not scored:
        return
    if image.scores is None or image.scores.shape != (count,):
        raise ValueError(f"{what}: {count} boxes need a score each")
    if not np.isfinite(image.scores).all():
        raise ValueError(f"{what}: a score is not a finite number")


def _average_precision(
    detected: list[Boxes], truth: list[Boxes], label: int, thresholds: np.ndarray
) -> np.ndarray:
    """Of one class, at each threshold."""
    hits, scores, objects_in_all = [], [], 0
    for ours, theirs in zip(detected, truth, strict=True):
        of_class, objects = ours.labels == label, theirs.corners[theirs.labels == label]
        best = np.argsort(-ours.scores[of_class], kind="stable")[:MOST]
        hits.append(_matched(ours.corners[of_class][best], objects, thresholds))
        scores.append(ours.scores[of_class][best])
        objects_in_all += len(objects)
    order = np.argsort(-np.concatenate(scores), kind="stable")
    counted = np.concatenate(hits, axis=1)[:, order].cumsum(1)
    return np.array([_area(row, objects_in_all) for row in counted])


def _matched(detected: np.ndarray, truth: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Whether each detection, by falling score, finds an object: (thresholds, detections)."""
    hits = np.zeros((len(thresholds), len(detected)), bool)
    if not len(truth):
        return hits
    free = np.ones((len(thresholds), len(truth)), bool)
    rows = np.arange(len(thresholds))
    for number, shared in enumerate(overlaps(detected, truth)):
        open_ = np.where(free & (shared >= thresholds[:, None]), shared, -1.0)
        best = len(truth) - 1 - open_[:, ::-1].argmax(1)  # of equals the last, as COCO has it
        hits[:, number] = hit = open_[rows, best] >= 0
        free[rows[hit], best[hit]] = False
    return hits


def _area(counted: np.ndarray, objects_in_all: int) -> float:
    """The mean precision at 101 recalls; `counted`: hits among the first 1, 2, ... detections."""
    precision = counted / np.arange(1, len(counted) + 1)
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    places = np.searchsorted(counted / objects_in_all, RECALLS, side="left")
    return float(np.append(precision, 0.0)[places].mean())
