"""The detection loss against plain NumPy, place by place; trained twins stand in `test_parity`."""

import numpy as np
import pytest

from shared import boxes, datasets
from shared.specs import TASKS, DatasetSpec, DetectorSpec
from shared.weights import init_weights

TASK = TASKS["digits-detection"]
SPEC = DetectorSpec((20, 24, 3), ((4, 2), (4, 2), (4, 2)), (1, 2), (8.0,), num_classes=3)
SCENES = DatasetSpec("scenes", "scenes", train_size=24, test_size=8, image_size=64, objects=4)
PLACES = 39
RADIUS = 1.0  # strides from the middle of an object, within which a place answers for it
FRAMEWORKS = ("pt", "tf")
MODELS = "kit"


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """x and labels of real scenes."""
    return datasets.load(datasets.materialise(SCENES, tmp_path_factory.mktemp("data")), "train")


def labels():
    """Two images: a small and a large object, a small one; rows that hold none."""
    return np.array(
        [
            [[3, 3, 9, 8, 2], [10, 2, 22, 18, 0], [0, 0, 0, 0, -1]],
            [[0, 0, 0, 0, -1], [14, 11, 20, 17, 1], [0, 0, 0, 0, -1]],
        ],
        np.float32,
    )


def answering(rows):
    """By the rule, in plain Python: place -> the row of the object that it answers for."""
    found = {}
    for place, (centre, stride, (low, high)) in enumerate(zip(*boxes.locations(SPEC), strict=True)):
        for row in rows:
            middle, sides = (row[:2] + row[2:4]) / 2, row[2:4] - row[:2]
            near = np.abs(centre - middle).max() < RADIUS * stride
            if row[4] >= 0 and near and low < sides.max() <= high:
                other = found.get(place)
                if other is None or sides.prod() < (other[2:4] - other[:2]).prod():
                    found[place] = row
    return found


def generalized_iou(a, b):
    common = np.prod(np.clip(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0, None))
    hull = np.prod(np.maximum(a[2:], b[2:]) - np.minimum(a[:2], b[:2]))
    union = np.prod(a[2:] - a[:2]) + np.prod(b[2:] - b[:2]) - common
    return common / union - (hull - union) / hull


def loss_by_hand(output, rows_of_images):
    total, count = 0.0, 0
    centres, strides, _ = boxes.locations(SPEC)
    for answers, rows in zip(output, rows_of_images, strict=True):
        found = answering(rows)
        count += len(found)
        for place, answer in enumerate(answers):
            row = found.get(place)
            for number, logit in enumerate(answer[:-4]):
                wanted = row is not None and row[4] == number
                right = 1 / (1 + np.exp(-logit if wanted else logit))
                total += -(0.25 if wanted else 0.75) * (1 - right) ** 2 * np.log(right)
            if row is not None:
                middle = centres[place] + answer[-4:-2] * strides[place]
                half = np.exp(answer[-2:]) * strides[place] / 2
                box = np.concatenate([middle - half, middle + half])
                total += 1 - generalized_iou(box, row[:4])
    return total / max(count, 1)


@pytest.fixture(scope="module")
def assigned(kit, models):
    """`assigned(labels, spec)`: boxes, classes and whether there is one, of each place."""

    def assign(rows, spec=SPEC):
        places = [models.tensor(part) for part in boxes.locations(spec)]
        return map(models.numpy, kit.detection.assign(models.tensor(rows), *places))

    return assign


def test_the_loss_is_that_of_numpy(kit, models):
    output = np.random.default_rng(0).normal(size=(2, PLACES, 7))
    loss, rows = kit.detection.make_detection_loss(SPEC), models.tensor(labels())
    expected = loss_by_hand(output, labels())
    for given, dtype, bar in (
        (models.tensor(output), np.float64, 1e-9),
        (models.tensor(output.astype(np.float32)), np.float32, 1e-5),
        (models.bfloat16(output.astype(np.float32)), np.float32, 0.02),
    ):
        value = models.numpy(loss(given, rows))
        assert value.dtype == dtype
        assert float(value) == pytest.approx(expected, rel=bar)


def test_images_without_an_object_teach_that_there_is_none(kit, models):
    output = np.zeros((2, PLACES, 7))
    empty = models.tensor(np.broadcast_to(np.float32([0, 0, 0, 0, -1]), (2, 3, 5)).copy())
    loss, gradient = models.loss_and_gradient(
        kit.detection.make_detection_loss(SPEC), output, empty
    )
    assert loss == pytest.approx(2 * PLACES * 3 * 0.75 * 0.25 * np.log(2))
    assert (gradient[..., :-4] > 0).all()
    assert (gradient[..., -4:] == 0).all()


def test_places_answer_for_the_object_of_their_level_that_is_near(assigned):
    wanted, classes, has_one = assigned(labels())
    for image, rows in enumerate(labels()):
        expected = answering(rows)
        assert set(has_one[image].nonzero()[0].tolist()) == set(expected)
        for place, row in expected.items():
            assert [*wanted[image, place], classes[image, place]] == row.tolist()
    # Each small object has its places on the fine level, the large one on the coarse.
    assert has_one[0, :30].any()
    assert has_one[0, 30:].any()
    assert not has_one[1, 30:].any()


def test_of_two_objects_the_smaller_is_answered_for(assigned):
    rows = np.array([[[2, 2, 10, 10, 0], [3, 3, 9, 9, 1]]], np.float32)
    for order in ([0, 1], [1, 0]):
        _, classes, has_one = assigned(rows[:, order])
        assert set(classes[has_one].tolist()) == {1.0}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ([0, 0, 4, 4], 1.0),
        ([2, 0, 6, 4], 8 / 24),  # the hull is the union
        ([8, 0, 12, 4], -4 * 4 / 48),
        ([0, 0, 2, 2], 4 / 16),
    ],
)
def test_generalized_iou_by_hand(kit, models, other, expected):
    pair = [models.tensor(np.float32([box])) for box in ([0, 0, 4, 4], other)]
    assert models.numpy(kit.detection.generalized_iou(*pair)) == pytest.approx(expected)


def test_each_object_of_a_scene_has_a_place_and_the_right_answers_are_perfect(
    kit, models, assigned, scenes
):
    """What the loss asks for is what `decode` reads: then mAP is 100, and there is little loss."""
    rows = np.array(scenes[1])
    wanted, classes, has_one = assigned(rows, TASK.model)
    centres, strides, _ = boxes.locations(TASK.model)
    middle, sides = (wanted[..., :2] + wanted[..., 2:]) / 2, wanted[..., 2:] - wanted[..., :2]
    output = np.full((*has_one.shape, 14), -9.0, np.float32)
    output[..., -4:-2] = (middle - centres) / strides[:, None]
    output[..., -2:] = np.log(np.maximum(sides / strides[:, None], 1e-3))  # rows of no object
    image, place = has_one.nonzero()
    output[image, place, classes[image, place].astype(int)] = 9.0
    objects = boxes.objects(rows)
    detections = boxes.decode(TASK.model, output)
    assert [len(d.labels) for d in detections] == [len(o.labels) for o in objects]
    assert boxes.mean_average_precision(detections, objects) == pytest.approx(100.0)
    loss, rows = kit.detection.make_detection_loss(TASK.model), models.tensor(rows)
    assert float(loss(models.tensor(output), rows)) < 1e-3
    assert float(loss(models.tensor(np.roll(output, 1, 0)), rows)) > 1


def test_a_task_has_its_own_loss_and_metric(kit, models, scenes):
    assert kit.training.loss_of(TASKS["digits-cnn"]) is kit.training.cross_entropy
    x, y = kit.data.to_device(*scenes)
    output = np.random.default_rng(0).normal(size=(len(x), 320, 14)).astype(np.float32)
    answers = (models.tensor(output[start : start + 10]) for start in range(0, len(x), 10))
    score = kit.training.evaluate_task(lambda x: next(answers), x, y, TASK, batch_size=10)
    truth = boxes.objects(models.numpy(y))
    assert score == boxes.mean_average_precision(boxes.decode(TASK.model, output), truth)


def test_a_detector_expects_little_before_it_is_trained():
    bias = init_weights(TASK.model, 0)["head.bias"]
    assert 1 / (1 + np.exp(-bias[:10])) == pytest.approx(0.01)
    assert (bias[10:] == 0).all()
