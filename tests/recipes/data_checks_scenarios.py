"""One framework's share of the tests of the checks of data; `worker.py` runs it."""

from __future__ import annotations

import math

import numpy as np

from bench.recipes import bench_data_checks
from shared.specs import TASKS
from tests import workers
from tests.recipes.checked import BATCH, CLASSES, FRAMEWORK, arrays, said, tensor

impl = workers.implementation(FRAMEWORK, "recipes.data_checks")
checks = impl.recipes.data_checks


def batches(x, y):
    """Framework batches of (x, y)."""
    return [
        tuple(tensor(part[at : at + BATCH]) for part in (x, y)) for at in range(0, len(y), BATCH)
    ]


def planted():
    """Reports on data with one fault each."""
    found = {}

    def look(name, plant, **settings):
        x, y = arrays()
        x, y = plant(x, y)
        given = {"num_classes": CLASSES, "low": 0.0, "high": 1.0} | settings
        found[name] = said(lambda: checks.check_data(batches(x, y), **given))

    def put(value, *places):
        def plant(x, y):
            for place in places:
                x[place] = value
            return x, y

        return plant

    def relabel(where, label):
        return lambda x, y: (x, np.where(np.isin(np.arange(len(y)), where), label, y))

    look("clean", lambda x, y: (x, y))
    look("nan", put(np.nan, (19, 2, 3, 0), (19, 2, 4, 0), (40, 0, 0, 0)))
    look("infinity", put(-np.inf, (63, 7, 7, 0)))
    look("range", put(255, (9, 1, 1, 0)))
    look("range of bytes", lambda x, y: ((x * 255).astype(np.uint8), y))
    look("label", relabel([5], 4))
    look("negative label", relabel([5], -1), num_classes=0)
    look("ignored label", relabel([5], -100))
    look("ignored label of its own", relabel([5], 255), ignore_label=255)
    look("absent class", lambda x, y: (x, y % 3))
    look("imbalance", lambda x, y: (x, np.where(np.arange(64) < 2, 3, y % 3)))
    look("imbalance allowed", lambda x, y: (x, np.where(y == 3, 2, y)), num_classes=3)
    look("one-hot", lambda x, y: (x, np.eye(CLASSES, dtype=np.float32)[y]))
    look("one-hot label", lambda x, y: (x, 0.5 * np.eye(CLASSES, dtype=np.float32)[y]))
    look("nan label", lambda x, y: (x, np.where(y == 1, np.nan, y).astype(np.float32)))
    look("dense labels", lambda x, y: (x, np.zeros((64, 5), int)))
    look("strict", put(np.nan, (19, 2, 3, 0)), strict=True)
    return found


def structures():
    """Data in other forms than a list of pairs of tensors."""
    x, y = arrays()
    bad = x.copy()
    bad[3, 0, 0, 0] = np.nan
    nested = [({"image": (tensor(x), tensor(bad)), "name": ["a"] * 64}, {"y": [0, 1] * 32})]
    found = {
        "nested": said(lambda: checks.check_data(nested)),
        "inputs alone": said(lambda: checks.check_data([tensor(bad)])),
        "arrays": said(lambda: checks.check_data([(bad, y)])),
        "half": said(lambda: checks.check_data([own.half(bad)])),
        "no batch": said(lambda: checks.check_data([])),
        "no labels": said(lambda: checks.check_data([{"x": x, "y": y}], num_classes=CLASSES)),
        "parts apart": said(lambda: checks.check_data([(x, y[:3])])),
    }
    for name, dataset in own.datasets(bad, y).items():
        found[name] = said(lambda dataset=dataset: checks.check_data(dataset, num_classes=CLASSES))
    return found


def numbers():
    """Labels in other integers and in lists of numbers, and a number beside the inputs."""
    x, y = np.zeros((400, 2), np.float32), np.arange(200).repeat(2)
    one = [({"a": x, "scale": 1.0, "unit": np.float32(2)}, y)]
    few = list(tensor(y[:8]))
    found = {
        "bytes": said(lambda: checks.check_data([(x, y.astype(np.uint8))], num_classes=200)),
        "shorts": said(lambda: checks.check_data([(x, y.astype(np.uint16))], num_classes=200)),
        "list": said(lambda: checks.check_data([(x, list(y))], num_classes=200)),
        "tensors": said(lambda: checks.check_data([(x[:8], few)], num_classes=4)),
        "beside": said(lambda: checks.check_data(one, num_classes=200)),
        "nan beside": said(lambda: checks.check_data([({"a": x, "scale": math.nan}, y)])),
        "bytes in range": said(
            lambda: checks.check_data([np.array([[1, 2, 250]], np.uint8)], low=-1, high=200)
        ),
        "more classes": said(lambda: checks.check_data([(x, y.astype(np.uint8))], num_classes=300)),
    }
    return found | {"splits": said(lambda: checks.check_splits(one, one))}


def splits():
    """Samples in both splits."""
    x, y = arrays()
    other = np.random.default_rng(2).uniform(0, 1, (24, 8, 8, 1)).astype(np.float32)
    leaking = other.copy()
    leaking[[3, 11]] = x[[60, 2]]
    near = other.copy()
    near[5] = np.nextafter(x[7], 2)
    first = batches(x, y)

    def look(second, **settings):
        return said(lambda: checks.check_splits(first, batches(second, y[:24]), **settings))

    named = [({"a": tensor(x), "b": tensor(x[::-1].copy())}, tensor(y))]
    half = [({"a": tensor(x), "b": tensor(x)}, tensor(y))]
    texts = ([(["one", "two"], [0, 1])], [(["three", "two"], [0, 1])])
    return {
        "clean": look(other),
        "two": look(leaking),
        "no sample": said(lambda: checks.check_splits(first, [*batches(x, y), (x[:0], y[:0])])),
        "strict": look(leaking, strict=True),
        "near": look(near),
        "itself": said(lambda: checks.check_splits(named, named)),
        "one of two inputs": said(lambda: checks.check_splits(named, half)),
        "texts": said(lambda: checks.check_splits(*texts)),
    }


def faults():
    """What the benchmark plants and says of it, by fault."""
    random = np.random.default_rng(2)
    shape = (600, *TASKS["digits-cnn"].model.input_shape)
    x = random.uniform(0, 1, shape).astype(np.float32)
    return bench_data_checks._faults(impl, x, np.arange(600) % 10)


class _PT:
    def half(self, x):
        return tensor(x).bfloat16()

    def datasets(self, x, y):
        import torch
        from torch.utils.data import DataLoader, IterableDataset, TensorDataset

        class Stream(IterableDataset):
            def __iter__(self):
                parts = (torch.as_tensor(part).split(8) for part in (x, y))
                return zip(*parts, strict=True)

        samples = TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
        return {
            "dataset of samples": samples,
            "loader": DataLoader(samples, batch_size=16),
            "stream": Stream(),
        }


class _TF:
    def half(self, x):
        import tensorflow as tf

        return tf.cast(x, tf.bfloat16)

    def datasets(self, x, y):
        import tensorflow as tf

        class Batches(tf.keras.utils.Sequence):
            def __len__(self):
                return 4

            def __getitem__(self, number):
                rows = slice(16 * number, 16 * number + 16)
                return x[rows], y[rows], np.ones(16, np.float32)

        pairs = tf.data.Dataset.from_tensor_slices((x, y))
        return {"tf.data": pairs.batch(16), "a Sequence with weights": Batches()}


own = _PT() if FRAMEWORK == "pt" else _TF()


SCENARIOS = (planted, structures, numbers, splits, faults)
