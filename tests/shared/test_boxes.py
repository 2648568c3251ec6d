"""mAP is COCO's, figure for figure; suppression and decoding do what they say."""

import io
from contextlib import redirect_stdout
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from shared import boxes
from shared.boxes import Boxes, mean_average_precision
from shared.specs import TASKS, DetectorSpec

SPEC = DetectorSpec((20, 24, 3), ((4, 2), (4, 2), (4, 2)), (1, 2), (8.0,), num_classes=3)
NOTHING = Boxes(np.zeros((0, 4)), np.zeros(0, int), np.zeros(0))

# Whole coordinates and few scores, so that overlaps and scores are often equal.
BOX = st.tuples(*[st.integers(0, 6)] * 2, *[st.integers(1, 5)] * 2)
OBJECT = st.tuples(BOX, st.integers(0, 2))
DETECTION = st.tuples(BOX, st.integers(0, 2), st.integers(1, 9))
IMAGE = st.tuples(st.lists(OBJECT, max_size=4), st.lists(DETECTION, max_size=6))
SCENES = st.lists(IMAGE, min_size=1, max_size=4).filter(lambda s: any(there for there, _ in s))


def image(rows, scored=False):
    """Boxes of rows (left, top, width, height), class and, if `scored`, tenths of a score."""
    if not rows:
        return NOTHING if scored else replace(NOTHING, scores=None)
    corners = np.array([[x, y, x + w, y + h] for (x, y, w, h), *_ in rows], float)
    scores = np.array([row[2] / 10 for row in rows]) if scored else None
    return Boxes(corners, np.array([row[1] for row in rows]), scores)


def both(scenes):
    """Detections and objects of each image."""
    return [image(d, True) for _, d in scenes], [image(t) for t, _ in scenes]


def certain(truth):
    """Each object detected as it is."""
    return [replace(t, scores=np.linspace(1, 0.5, len(t.labels))) for t in truth]


def coco(scenes, metric):
    """What pycocotools makes of the same boxes."""
    truth, detected = [], []
    for number, (there, detections) in enumerate(scenes):
        for box, label in there:
            about = {"id": len(truth) + 1, "iscrowd": 0, "area": box[2] * box[3]}
            about |= {"image_id": number, "category_id": label, "bbox": list(box)}
            truth.append(about)
        for box, label, score in detections:
            about = {"image_id": number, "category_id": label, "bbox": list(box)}
            detected.append(about | {"score": score / 10})
    if not detected:
        return 0.0
    whole = COCO()
    whole.dataset = {"info": {}, "images": [{"id": n} for n in range(len(scenes))]}
    whole.dataset |= {"annotations": truth, "categories": [{"id": n} for n in range(3)]}
    with redirect_stdout(io.StringIO()):
        whole.createIndex()
        evaluation = COCOeval(whole, whole.loadRes(detected), "bbox")
        if metric == "mAP50":
            evaluation.params.iouThrs = np.array([0.5])
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][..., 0, -1]  # objects of all sizes, 100 detections
    return 100 * precision[precision > -1].mean()


# Against what is published ---------------------------------------------------------------------


@given(SCENES)
@settings(deadline=None)
def test_map_is_that_of_pycocotools(scenes):
    for metric in boxes.OVERLAPS:
        ours = mean_average_precision(*both(scenes), metric=metric)
        assert ours == pytest.approx(coco(scenes, metric), abs=1e-9)


def test_map_is_that_of_pycocotools_where_images_have_more_detections_than_count():
    random = np.random.default_rng(0)

    def box():
        return (*random.integers(0, 90, 2).tolist(), *random.integers(5, 30, 2).tolist())

    scenes = []
    for _ in range(3):
        there = [(box(), int(random.integers(3))) for _ in range(60)]
        found = [((*b[:2], b[2] + 1, b[3]), c, int(random.integers(1, 10))) for b, c in there]
        found += [(box(), int(random.integers(2)), int(random.integers(1, 10))) for _ in range(500)]
        scenes.append((there, found))
    every = [len(found) for _, found in scenes]
    assert min(every) > 4 * boxes.MOST
    ours = mean_average_precision(*both(scenes))
    assert 1 < ours < 60
    assert ours == pytest.approx(coco(scenes, "mAP"), abs=1e-9)


def test_map_by_hand():
    """Two objects; by score: a hit, the same box again, the other object at an overlap of 0.6.

    At thresholds to 0.6: precision 1 at the first 51 recalls (0 to 0.5), then 2/3 at 50. Above, the
    second object is never found: precision 1 at 51 recalls, then 0.
    """
    truth = [image([((0, 0, 10, 10), 1), ((50, 0, 10, 10), 1)])]
    boxes = ((0, 0, 10, 10), 1, 9), ((0, 0, 10, 10), 1, 8), ((50, 0, 10, 6), 1, 7)
    detected = [image(boxes, True)]
    low, high = (51 + 50 * 2 / 3) / 101, 51 / 101
    assert mean_average_precision(detected, truth, metric="mAP50") == pytest.approx(100 * low)
    expected = 100 * (3 * low + 7 * high) / 10
    assert mean_average_precision(detected, truth) == pytest.approx(expected)


# What must hold ----------------------------------------------------------------------------------


@given(SCENES)
def test_perfect_boxes_give_all_and_none_give_nothing(scenes):
    _, truth = both(scenes)
    apart = [t if len(np.unique(t.corners, axis=0)) == len(t.corners) else NOTHING for t in truth]
    if any(len(t.labels) for t in apart):
        assert mean_average_precision(certain(apart), apart) == pytest.approx(100.0)
        assert mean_average_precision([NOTHING] * len(apart), apart) == 0.0


@given(SCENES, st.randoms(use_true_random=False))
def test_the_order_of_images_and_of_detections_does_not_matter(scenes, random):
    found, truth = both(scenes)
    scores = iter(np.random.default_rng(random.randrange(99)).permutation(100) / 100)  # no ties
    found = [replace(f, scores=np.array([next(scores) for _ in f.labels])) for f in found]
    before = mean_average_precision(found, truth)
    pairs = list(zip(found, truth, strict=True))
    random.shuffle(pairs)
    turned = [
        (Boxes(f.corners[::-1], f.labels[::-1], f.scores[::-1]), Boxes(t.corners, t.labels))
        for f, t in pairs
    ]
    assert mean_average_precision(*zip(*turned, strict=True)) == pytest.approx(before)


@given(SCENES)
def test_only_the_order_of_scores_counts(scenes):
    found, truth = both(scenes)
    scaled = [replace(f, scores=f.scores**3 / 7) for f in found]
    assert mean_average_precision(scaled, truth) == mean_average_precision(found, truth)


@given(SCENES)
def test_a_second_detection_of_an_object_is_a_false_one(scenes):
    detected, truth = both(scenes)
    twice = [
        Boxes(*(np.concatenate([part, part]) for part in (f.corners, f.labels, f.scores)))
        for f in certain(truth)
    ]
    once, again = (mean_average_precision(f, truth) for f in (certain(truth), twice))
    assert again <= once
    # By score each object comes twice in a row, so that half of all are false at full recall.
    one = [image([((0, 0, 4, 4), 0), ((9, 0, 4, 4), 0)])]
    doubled = [image([((0, 0, 4, 4), 0, 9), ((0, 0, 4, 4), 0, 8), ((9, 0, 4, 4), 0, 7)], True)]
    assert mean_average_precision(doubled, one) == pytest.approx(100 * (51 + 50 * 2 / 3) / 101)
    assert mean_average_precision(detected, truth) <= 100.0


@given(SCENES)
def test_a_detection_of_another_class_finds_nothing(scenes):
    _, truth = both(scenes)
    wrong = [replace(f, labels=f.labels + 3) for f in certain(truth)]
    assert mean_average_precision(wrong, truth) == 0.0


# What is refused ---------------------------------------------------------------------------------

GOOD = image([((0, 0, 4, 4), 0)])
FOUND = image([((0, 0, 4, 4), 0, 9)], True)


@pytest.mark.parametrize(
    ("detected", "truth", "reason"),
    [
        ([FOUND, FOUND], [GOOD], "detections of 2 images, objects of 1"),
        ([NOTHING], [NOTHING], "there are no objects: mAP is a mean over classes that have one"),
        ([], [], "there are no objects: mAP is a mean over classes that have one"),
        ([GOOD], [GOOD], "detections of image 0: 1 boxes need a score each"),
        (
            [replace(FOUND, scores=np.array([np.nan]))],
            [GOOD],
            "detections of image 0: a score is not a finite number",
        ),
        (
            [FOUND],
            [replace(GOOD, corners=np.array([[0, 0, np.inf, 1]]))],
            "objects of image 0: a corner is not a finite number",
        ),
        (
            [replace(FOUND, corners=np.array([[4.0, 0, 0, 4]]))],
            [GOOD],
            "detections of image 0: a box ends before it begins (left, top, right, bottom)",
        ),
        (
            [replace(FOUND, corners=np.zeros((1, 5)))],
            [GOOD],
            "detections of image 0: corners have shape (1, 5), not (1, 4)",
        ),
        (
            [FOUND],
            [replace(GOOD, labels=np.zeros(2, int))],
            "objects of image 0: 1 boxes, labels of shape (2,)",
        ),
    ],
)
def test_what_are_no_boxes_is_refused_in_one_line(detected, truth, reason):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        mean_average_precision(detected, truth)
    assert str(error.value) == reason


def test_an_unknown_metric_is_refused():
    with pytest.raises(ValueError, match="unknown metric 'mAP75': mAP or mAP50"):
        mean_average_precision([FOUND], [GOOD], metric="mAP75")


# Overlap, suppression, decoding ------------------------------------------------------------------


def test_overlap_by_hand():
    one = np.array([[0, 0, 4, 4]])
    others = np.array([[0, 0, 4, 4], [2, 0, 6, 4], [4, 0, 8, 4], [1, 1, 3, 3], [2, 2, 2, 2]])
    assert boxes.overlaps(one, others).tolist() == [[1.0, 8 / 24, 0.0, 4 / 16, 0.0]]
    assert boxes.overlaps(others[4:], others[4:]).tolist() == [[0.0]]


@given(st.lists(DETECTION, max_size=12))
def test_of_those_that_overlap_the_best_is_kept(rows):
    detected = image(rows, True)
    kept = boxes.suppress(detected, overlap=0.5)
    assert sorted(detected.scores[kept], reverse=True) == detected.scores[kept].tolist()
    shared = boxes.overlaps(detected.corners, detected.corners) > 0.5
    shared &= detected.labels[:, None] == detected.labels
    np.fill_diagonal(shared, False)
    assert not shared[np.ix_(kept, kept)].any()
    for dropped in set(range(len(rows))) - set(kept.tolist()):
        better = kept[detected.scores[kept] >= detected.scores[dropped]]
        assert shared[dropped, better].any()


def test_an_output_is_read_at_the_places_it_stands_for():
    centres, strides, limits = boxes.locations(SPEC)
    assert len(centres) == 5 * 6 + 3 * 3
    assert strides.tolist() == [4.0] * 30 + [8.0] * 9
    assert limits[[0, 30]].tolist() == [[0.0, 8.0], [8.0, np.inf]]
    assert centres[[0, 1, 6, 30, 38]].tolist() == [[2, 2], [6, 2], [2, 6], [4, 4], [20, 20]]
    output = np.full((2, 39, 7), -9.0)
    # In the second image: class 2 at the place (6, 2), its middle half a stride right and a
    # quarter below, two strides wide and one high.
    output[1, 1] = [-9, -9, 1, 0.5, 0.25, *np.log([2, 1])]
    output[1, 38] = [0, -9, -9, -0.5, 0, *np.log([3, 2])]  # which reaches beyond the image
    first, second = boxes.decode(SPEC, output)
    assert len(first.labels) == len(first.scores) == 0
    assert second.labels.tolist() == [2, 0]
    assert second.scores == pytest.approx([1 / (1 + np.exp(-1)), 0.5])
    assert second.corners == pytest.approx(np.array([[4, 1, 12, 5], [4, 12, 24, 20]]))


def test_an_output_that_is_no_number_detects_nothing():
    for value in (np.nan, -np.inf):
        found = boxes.decode(SPEC, np.full((1, 39, 7), value, np.float32))
        assert len(found[0].labels) == 0


def test_objects_are_the_rows_that_hold_one():
    labels = np.array([[[1, 2, 3, 4, 7], [0, 0, 0, 0, -1]], [[0, 0, 0, 0, -1]] * 2], np.float32)
    first, second = boxes.objects(labels)
    assert first.corners.tolist() == [[1, 2, 3, 4]]
    assert first.labels.tolist() == [7]
    assert len(second.labels) == 0


def test_each_object_of_the_task_has_a_level():
    spec = TASKS["digits-detection"].model
    limits = np.unique(boxes.locations(spec)[2], axis=0)
    assert limits[0, 0] == 0.0
    assert limits[-1, 1] == np.inf
    assert (limits[1:, 0] == limits[:-1, 1]).all()
