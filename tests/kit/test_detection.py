"""The detection loss against plain NumPy, place by place; twins are compared in `test_parity`."""

import numpy as np
import pytest
import torch

from pt_impl.kit import data, detection, runtime, training
from shared import boxes, datasets
from shared.specs import TASKS, DatasetSpec, DetectorSpec
from shared.weights import init_weights

TASK = TASKS["digits-detection"]
SPEC = DetectorSpec((20, 24, 3), ((4, 2), (4, 2), (4, 2)), (1, 2), (8.0,), num_classes=3)
SCENES = DatasetSpec("scenes", "scenes", train_size=24, test_size=8, image_size=64, objects=4)
PLACES = 39


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    """Whatever the machine has, tensors are on the CPU."""
    monkeypatch.setattr(runtime, "device", lambda: "cpu")


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
            near = np.abs(centre - middle).max() < detection.RADIUS * stride
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


def test_the_loss_is_that_of_numpy():
    output = np.random.default_rng(0).normal(size=(2, PLACES, 7))
    loss = detection.make_detection_loss(SPEC)
    expected = loss_by_hand(output, labels())
    found = loss(torch.from_numpy(output), torch.from_numpy(labels()))
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(expected, rel=1e-9)
    for dtype, bar in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        found = loss(torch.from_numpy(output).to(dtype), torch.from_numpy(labels()))
        assert found.dtype == torch.float32
        assert float(found) == pytest.approx(expected, rel=bar)


def test_images_without_an_object_teach_that_there_is_none():
    output = torch.zeros(2, PLACES, 7, dtype=torch.float64, requires_grad=True)
    empty = torch.tensor([0.0, 0, 0, 0, -1]).expand(2, 3, 5)
    loss = detection.make_detection_loss(SPEC)(output, empty)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(2 * PLACES * 3 * 0.75 * 0.25 * np.log(2))
    assert (output.grad[..., :-4] > 0).all()
    assert (output.grad[..., -4:] == 0).all()


def test_places_answer_for_the_object_of_their_level_that_is_near():
    places = [torch.from_numpy(part) for part in boxes.locations(SPEC)]
    wanted, classes, found = detection.assign(torch.from_numpy(labels()), *places)
    for image, rows in enumerate(labels()):
        expected = answering(rows)
        assert set(found[image].nonzero().flatten().tolist()) == set(expected)
        for place, row in expected.items():
            assert [*wanted[image, place].tolist(), float(classes[image, place])] == row.tolist()
    # Each small object has its places on the fine level, the large one on the coarse.
    assert found[0, :30].any()
    assert found[0, 30:].any()
    assert not found[1, 30:].any()


def test_of_two_objects_the_smaller_is_answered_for():
    rows = np.array([[[2, 2, 10, 10, 0], [3, 3, 9, 9, 1]]], np.float32)
    places = [torch.from_numpy(part) for part in boxes.locations(SPEC)]
    for order in ([0, 1], [1, 0]):
        _, classes, found = detection.assign(torch.from_numpy(rows[:, order]), *places)
        assert found.any()
        assert set(classes[found].tolist()) == {1.0}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ([0, 0, 4, 4], 1.0),
        ([2, 0, 6, 4], 8 / 24),  # the hull is the union
        ([8, 0, 12, 4], -4 * 4 / 48),
        ([0, 0, 2, 2], 4 / 16),
    ],
)
def test_generalized_iou_by_hand(other, expected):
    one = torch.tensor([[0.0, 0, 4, 4]])
    found = detection.generalized_iou(one, torch.tensor([other], dtype=torch.float32))
    assert float(found) == pytest.approx(expected)


def test_each_object_of_a_scene_has_a_place_and_the_right_answers_are_perfect(scenes):
    """What the loss asks for is what `decode` reads: then mAP is 100, and there is little loss."""
    _, rows = scenes
    places = [torch.from_numpy(part) for part in boxes.locations(TASK.model)]
    wanted, classes, found = detection.assign(torch.from_numpy(np.array(rows)), *places)
    centres, strides, _ = places
    middle, sides = (wanted[..., :2] + wanted[..., 2:]) / 2, wanted[..., 2:] - wanted[..., :2]
    output = torch.full((*found.shape, 14), -9.0)
    output[..., -4:-2] = (middle - centres) / strides[:, None]
    output[..., -2:] = (sides / strides[:, None]).clamp(min=1e-3).log()  # rows of no object
    image, place = found.nonzero(as_tuple=True)
    output[image, place, classes[image, place].long()] = 9.0
    objects = boxes.objects(np.array(rows))
    detections = boxes.decode(TASK.model, output.numpy())
    assert [len(d.labels) for d in detections] == [len(o.labels) for o in objects]
    assert boxes.mean_average_precision(detections, objects) == pytest.approx(100.0)
    loss = detection.make_detection_loss(TASK.model)
    right = float(loss(output, torch.from_numpy(np.array(rows))))
    assert right < 1e-3
    assert float(loss(output.roll(1, 0), torch.from_numpy(np.array(rows)))) > 1


def test_a_task_has_its_own_loss_and_metric(scenes):
    assert training.loss_of(TASKS["digits-cnn"]) is training.cross_entropy
    x, y = data.to_device(*scenes)
    output = np.random.default_rng(0).normal(size=(len(x), 320, 14)).astype(np.float32)
    answers = iter(torch.from_numpy(output).split(10))
    found = training.evaluate_task(lambda x: next(answers), x, y, TASK, batch_size=10)
    truth = boxes.objects(y.numpy())
    assert found == boxes.mean_average_precision(boxes.decode(TASK.model, output), truth)


def test_a_detector_expects_little_before_it_is_trained():
    bias = init_weights(TASK.model, 0)["head.bias"]
    assert 1 / (1 + np.exp(-bias[:10])) == pytest.approx(0.01)
    assert (bias[10:] == 0).all()
