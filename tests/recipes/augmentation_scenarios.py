"""One framework's share of the tests of augmentation; `worker.py` runs it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from tests import workers

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
impl = workers.implementation(FRAMEWORK, "recipes.augmentation")
ours = impl.recipes.augmentation
Policy, Parameters, Mix = ours.Policy, ours.Parameters, ours.Mix
BATCH, HEIGHT, WIDTH = 6, 9, 12
FULL = {
    "flip_horizontal": 0.5,
    "flip_vertical": 0.25,
    "rotation": 30.0,
    "zoom": 0.2,
    "shift": 0.1,
    "brightness": 0.3,
    "contrast": 0.4,
    "saturation": 0.5,
}


def images(count=BATCH, channels=3):
    random = np.random.default_rng(5)
    return random.normal(size=(count, HEIGHT, WIDTH, channels)).astype(np.float32)


def labels(count=BATCH):
    return np.random.default_rng(6).integers(0, 4, count)


def given():
    """Parameters of each kind, by name: the same in every process."""
    random = np.random.default_rng(7)
    flips = {
        "flip_horizontal": np.arange(BATCH) % 2 == 0,
        "flip_vertical": np.arange(BATCH) % 3 == 0,
    }
    geometry = {
        "angle": random.uniform(-180, 180, BATCH).astype(np.float32),
        "zoom": random.uniform(0.5, 2, BATCH).astype(np.float32),
        "shift": random.uniform(-0.3, 0.3, (BATCH, 2)).astype(np.float32),
    }
    colour = {
        "brightness": random.uniform(-1, 1, BATCH).astype(np.float32),
        "contrast": random.uniform(0, 2, BATCH).astype(np.float32),
        "saturation": random.uniform(0, 2, BATCH).astype(np.float32),
    }
    return {
        "flips": (flips, "zero"),
        "rotation": ({"angle": geometry["angle"]}, "zero"),
        "zoom": ({"zoom": geometry["zoom"]}, "zero"),
        "shift": ({"shift": geometry["shift"]}, "zero"),
        "geometry": (flips | geometry, "zero"),
        "geometry nearest": (flips | geometry, "nearest"),
        "geometry reflect": (flips | geometry, "reflect"),
        "brightness": ({"brightness": colour["brightness"]}, "zero"),
        "contrast": ({"contrast": colour["contrast"]}, "zero"),
        "saturation": ({"saturation": colour["saturation"]}, "zero"),
        "everything": (flips | geometry | colour, "reflect"),
    }


def transforms():
    """What comes of given parameters."""
    x, found = images(), {}
    for name, (parameters, border) in given().items():
        out = ours.transform(own.image(x), own.parameters(parameters), border=border)
        found[name] = {"given": parameters, "border": border, "out": own.back(out)}
    return {"x": x, "cases": found}


def neutral():
    """What a policy leaves as it is, bit for bit."""
    x = own.image(images())
    drawn = ours.draw(Policy(), x, own.generator(0))
    some = {
        "flip_horizontal": np.array([False, True] * 3),
        "angle": np.array([0.0, 0.0, 20.0] * 2, np.float32),
        "shift": np.zeros((BATCH, 2), np.float32),
    }
    out = own.back(ours.transform(x, own.parameters(some), border="zero"))
    mixed = [
        mix(x, own.label(labels()), draw(x, own.generator(0), alpha=0.0))
        for mix, draw in ((ours.mixup, ours.draw_mixup), (ours.cutmix, ours.draw_cutmix))
    ]
    both = ours.augment(Policy(), x, own.label(labels()), own.generator(0))
    return {
        "nothing is drawn": all(each is None for each in drawn),
        "the same images": ours.transform(x, drawn) is x and both[0] is x,
        "still sample among moved ones": np.array_equal(out[0], images()[0]),
        "moved sample": not np.array_equal(out[2], images()[2]),
        "alpha 0": all(np.array_equal(own.back(each), images()) for each, _ in mixed),
        "alpha 0, share": all(np.all(np.array(y.share) == 1) for _, y in mixed),
    }


def layouts():
    """Other layouts and dtypes, or unknown shapes."""
    parameters = own.parameters(given()["everything"][0])
    wanted = ours.transform(own.image(images()), parameters)
    return own.other_layouts(images(), parameters, own.back(wanted))


def draws():
    """Ranges of 4,000 draws, and what repeats them."""
    x = own.image(images(4000, 1))
    drawn = ours.draw(Policy(**FULL), x, own.generator(3))
    found = {name: np.array(value) for name, value in drawn._asdict().items()}
    state, continued = own.resumed_draws(Policy(**FULL), x)
    without = ours.draw(Policy(**FULL | {"rotation": 0.0}), x, own.generator(3))
    return {
        "low": {name: value.min() for name, value in found.items()},
        "high": {name: value.max() for name, value in found.items()},
        "mean": {name: value.mean() for name, value in found.items()},
        "repeats": same(drawn, ours.draw(Policy(**FULL), x, own.generator(3))),
        "other seed": same(drawn, ours.draw(Policy(**FULL), x, own.generator(4))),
        "resumed": same(state, continued),
        "without rotation": without.angle is None and same(without[3:], drawn[3:]),
        "correlation": np.corrcoef(found["angle"], found["zoom"])[0, 1],
    }


def same(one, other):
    return all(np.array_equal(np.array(a), np.array(b)) for a, b in zip(one, other, strict=True))


def mixes():
    """Mixing by given and by drawn numbers."""
    x, y = images(), labels()
    partner, share = np.array([3, 2, 5, 0, 4, 1]), np.linspace(0, 1, BATCH).astype(np.float32)
    rows = [[0, 4, 0, 6], [2, 9, 3, 12], [0, 0, 0, 0], [0, 9, 0, 12], [8, 9, 11, 12], [1, 2, 0, 12]]
    mix = Mix(own.label(partner), own.numbers(share), own.label(np.array(rows)))
    blended, blended_labels = ours.mixup(own.image(x), own.label(y), mix)
    pasted, pasted_labels = ours.cutmix(own.image(x), own.label(y), mix)
    many = own.image(images(3000, 1))
    drawn = {
        alpha: ours.draw_mixup(many, own.generator(1), alpha=alpha) for alpha in (0.01, 0.5, 1)
    }
    cut = ours.draw_cutmix(many, own.generator(1), alpha=1.0)
    return {
        "x": x,
        "y": y,
        "partner": partner,
        "share": share,
        "box": rows,
        "blended": own.back(blended),
        "pasted": own.back(pasted),
        "labels": [np.array(part) for part in blended_labels],
        "pasted labels": [np.array(part) for part in pasted_labels],
        "shares": {alpha: np.array(mix.share) for alpha, mix in drawn.items()},
        "partners": np.array(drawn[1].partner),
        "cut": {"box": np.array(cut.box), "share": np.array(cut.share)},
        "repeats": same(cut, ours.draw_cutmix(many, own.generator(1), alpha=1.0)),
        "other seed": same(cut, ours.draw_cutmix(many, own.generator(2), alpha=1.0)),
    }


def loss():
    """The loss of mixed labels, and of plain ones."""
    x, y = own.image(images()), own.label(labels())
    logits = np.random.default_rng(8).normal(size=(BATCH, 4)).astype(np.float32) * 5
    partner, share = np.array([3, 2, 5, 0, 4, 1]), np.linspace(0.1, 0.9, BATCH)
    mix = Mix(own.label(partner), own.numbers(share.astype(np.float32)), None)
    _, mixed = ours.mixup(x, y, mix)
    soft = ours.soft_labels(mixed, num_classes=4)
    _, many = ours.mixup(x, own.label(np.tile(labels()[:, None], BATCH)), mix)
    mean = ours.make_mixed_loss(own.sample_cross_entropy)
    value, gradient = own.with_gradient(lambda z: mean(z, mixed), logits)
    return {
        "logits": logits,
        "soft": np.array(soft),
        "soft of many": np.array(ours.soft_labels(many, num_classes=4)),
        "labels": [np.array(part) for part in mixed],
        "value": value,
        "gradient": gradient,
        "plain": float(mean(own.numbers(logits), y)),
        "plain labels": labels(),
    }


def host():
    """The input pipeline."""
    policy = Policy(rotation=30, brightness=0.5)
    return own.pipeline(policy) | {"mixed": own.mixed_pipeline(Policy(mixup=1.0))}


def device():
    """A step over augmented batches: what it was given."""
    x, y = own.image(images()), own.label(labels())
    seen = []

    def step(x, y):
        own.record(seen, x)
        return x

    found = {}
    policy = Policy(rotation=30, mixup=1.0)
    augmenting = ours.make_augmenting_step(step, policy, own.generator(1))
    outputs = [own.back(augmenting(x, y)) for _ in range(3)]
    random = own.generator(1)
    wanted = [own.back(ours.augment(policy, x, y, random)[0]) for _ in range(3)]
    found["as augmented"] = max(
        float(np.abs(a - b).max()) for a, b in zip(outputs, wanted, strict=True)
    )
    found["differ"] = not np.array_equal(outputs[0], outputs[1])
    found["calls of the step"] = len(seen)
    both = Policy(mixup=1.0, cutmix=1.0)
    augmenting = ours.make_augmenting_step(step, both, own.generator(1))
    outputs = [own.back(augmenting(x, y)) for _ in range(20)]
    # A cut batch has pixels of the originals alone.
    originals = np.unique(images())
    found["cut"] = [bool(np.isin(each, originals).all()) for each in outputs]
    return found


def refusals():
    x, y = own.image(images()), own.label(labels())
    one = own.image(images(2, 1))
    mixed = ours.mixup(x, y, ours.draw_mixup(x, own.generator(0), alpha=1.0))[1]
    averaged = ours.make_mixed_loss(lambda outputs, labels: own.numbers(np.float32(1)))
    cases = {
        "integers": lambda: ours.transform(own.label(images().astype(int)), Parameters()),
        "mixup of integers": lambda: ours.mixup(
            own.label(images().astype(int)), y, ours.draw_mixup(x, own.generator(0), alpha=1.0)
        ),
        "one image": lambda: ours.transform(x[0], Parameters()),
        "one channel": lambda: ours.transform(
            one, own.parameters({"saturation": np.ones(2, np.float32)})
        ),
        "border": lambda: ours.transform(x, Parameters(), border="mirror"),
        "border of a policy": lambda: Policy(border="mirror"),
        "probability": lambda: Policy(flip_horizontal=1.5),
        "negative": lambda: Policy(rotation=-1.0),
        "not a number": lambda: Policy(shift=float("nan")),
        "zoom": lambda: Policy(zoom=1.0),
        "alpha": lambda: ours.draw_mixup(x, own.generator(0), alpha=-1.0),
        "cutmix of one image": lambda: ours.draw_cutmix(x[0], own.generator(0), alpha=1.0),
        "averaged loss": lambda: averaged(x, mixed),
    }
    found = {}
    for name, call in cases.items():
        try:
            call()
            found[name] = None
        except ValueError as error:
            found[name] = str(error)
    return found


class _PT:
    def image(self, x):
        import torch

        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1)))

    def numbers(self, x):
        import torch

        return torch.as_tensor(x)

    label = numbers

    def back(self, x):
        return np.moveaxis(x.float().numpy(), 1, -1)

    def generator(self, seed):
        import torch

        return torch.Generator().manual_seed(seed)

    def parameters(self, given):
        return Parameters(**{name: self.numbers(value) for name, value in given.items()})

    def record(self, seen, x):
        seen.append(x)

    def resumed_draws(self, policy, x):
        first = self.generator(3)
        ours.draw(policy, x, first)
        second = self.generator(9)
        second.set_state(first.get_state())
        return ours.draw(policy, x, first), ours.draw(policy, x, second)

    def other_layouts(self, x, parameters, wanted):
        import torch

        last = self.image(x).contiguous(memory_format=torch.channels_last)
        out = ours.transform(last, parameters)
        half = ours.transform(self.image(x).bfloat16(), parameters)
        bytes_ = torch.full((1, 1, 32, 32), 200, dtype=torch.float16)
        contrast = ours.transform(bytes_, Parameters(contrast=torch.tensor([1.5])))
        return {
            "of a large sum": float(contrast.mean(dtype=torch.float32)),
            "apart": float(np.abs(self.back(out) - wanted).max()),
            "layout kept": out.is_contiguous(memory_format=torch.channels_last),
            "half apart": float(np.abs(self.back(half) - wanted).max()),
            "half kept": half.dtype == torch.bfloat16,
        }

    def sample_cross_entropy(self, outputs, labels):
        import torch

        return torch.nn.functional.cross_entropy(outputs, labels, reduction="none")

    def with_gradient(self, function, z):
        import torch

        z = torch.tensor(z, requires_grad=True)
        value = function(z)
        value.backward()
        return value.item(), z.grad.numpy()

    def loader(self, policy, seed=1, workers=0, persistent=False, data=None, start=0):
        from torch.utils.data import DataLoader, TensorDataset

        x = images(32) * 0 + 1 if data is None else data
        pairs = TensorDataset(self.image(x), self.numbers(labels(32)))
        dataset = ours.augmented_dataset(pairs, policy, seed=seed)
        settings = {"num_workers": workers, "persistent_workers": persistent}
        batches = [range(at, at + 4) for at in range(start, 32, 4)]
        return dataset, DataLoader(dataset, batch_sampler=batches, **settings)

    def epochs(self, policy, **settings):
        dataset, loader = self.loader(policy, **settings)
        found = []
        for epoch in (0, 1):
            dataset.set_epoch(epoch)
            found.append([self.back(x) for x, _ in loader])
        return found

    def pipeline(self, policy):
        alone = self.epochs(policy)
        dataset, _ = self.loader(policy)
        return {
            "batches": len(alone[0]),
            "distinct": len({each.tobytes() for epoch in alone for each in epoch}),
            "repeats": np.array_equal(alone, self.epochs(policy)),
            "other seed": np.array_equal(alone, self.epochs(policy, seed=2)),
            "resumed": np.array_equal(
                [epoch[3:] for epoch in alone], self.epochs(policy, start=12)
            ),
            "with workers": np.array_equal(alone, self.epochs(policy, workers=2)),
            "with workers that persist": np.array_equal(
                alone, self.epochs(policy, workers=2, persistent=True)
            ),
            "one sample": list(dataset[0][0].shape) == [3, HEIGHT, WIDTH] and len(dataset) == 32,
        }

    def mixed_pipeline(self, policy):
        x = images(32)
        _, loader = self.loader(policy, data=x, workers=2)
        return self._mixed(x, [(self.back(a), y) for a, y in loader])

    def _mixed(self, x, batches):
        """Blends of the batch's own images, which the labels' shares tell."""
        found = []
        for at, (out, y) in enumerate(batches):
            own_images = x[4 * at : 4 * at + 4]
            share = np.array(y.share)[:, None, None, None]
            rest = (out - share * own_images) / np.maximum(1 - share, 1e-6)
            near = [
                min(float(np.abs(image - other).max()) for other in own_images)
                for image, part in zip(rest, share, strict=True)
                if part < 0.9
            ]
            found.append(isinstance(y, ours.MixedLabels) and max(near, default=0.0) < 1e-4)
        return len(found) == 8 and all(found)


class _TF(_PT):
    def image(self, x):
        import tensorflow as tf

        return tf.constant(x)

    numbers = label = image

    def back(self, x):
        return np.array(x).astype(np.float32)

    def generator(self, seed):
        import tensorflow as tf

        return tf.random.Generator.from_seed(seed)

    def record(self, seen, x):
        import tensorflow as tf

        assert tf.inside_function()
        seen.append(1)  # once a trace

    def resumed_draws(self, policy, x):
        import tensorflow as tf

        first, second = self.generator(3), self.generator(9)
        ours.draw(policy, x, first)
        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(random=first).write(str(Path(folder) / "random"))
            tf.train.Checkpoint(random=second).read(path).assert_consumed()
        return ours.draw(policy, x, first), ours.draw(policy, x, second)

    def other_layouts(self, x, parameters, wanted):
        import tensorflow as tf

        spec = tf.TensorSpec([None, None, None, 3])
        graph = tf.function(lambda x: ours.transform(x, parameters), input_signature=[spec])
        half = ours.transform(tf.cast(x, tf.bfloat16), parameters)
        bytes_ = tf.fill([1, 32, 32, 1], tf.constant(200, tf.float16))
        contrast = ours.transform(bytes_, Parameters(contrast=tf.constant([1.5])))
        return {
            "of a large sum": float(tf.reduce_mean(tf.cast(contrast, tf.float32))),
            "apart": float(np.abs(self.back(graph(self.image(x))) - wanted).max()),
            "layout kept": graph(self.image(x)).shape == x.shape,
            "half apart": float(np.abs(self.back(half) - wanted).max()),
            "half kept": half.dtype == tf.bfloat16,
        }

    def sample_cross_entropy(self, outputs, labels):
        import tensorflow as tf

        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)

    def with_gradient(self, function, z):
        import tensorflow as tf

        z = tf.Variable(z)
        with tf.GradientTape() as tape:
            value = function(z)
        return float(value), np.array(tape.gradient(value, z))

    def batches(self, policy, seed=1, data=None):
        import tensorflow as tf

        x = images(32) * 0 + 1 if data is None else data
        pairs = tf.data.Dataset.from_tensor_slices((x, labels(32))).batch(4)
        return ours.augmented_dataset(pairs, policy, seed=seed)

    def pipeline(self, policy):
        import tensorflow as tf

        def passes(seed=1):
            dataset = self.batches(policy, seed=seed)
            return [[x.numpy() for x, _ in dataset] for _ in range(2)]

        alone = passes()
        iterator = iter(self.batches(policy).repeat())
        for _ in range(11):
            next(iterator)
        other = iter(self.batches(policy).repeat())
        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(iterator=iterator).write(str(Path(folder) / "place"))
            tf.train.Checkpoint(iterator=other).read(path).assert_consumed()
        rest = [next(other)[0].numpy() for _ in range(5)]
        return {
            "batches": len(alone[0]),
            "distinct": len({each.tobytes() for epoch in alone for each in epoch}),
            "repeats": np.array_equal(alone, passes()),
            "other seed": np.array_equal(alone, passes(seed=2)),
            "resumed": np.array_equal(rest, [next(iterator)[0].numpy() for _ in range(5)])
            and np.array_equal(rest, alone[1][3:]),
        }

    def mixed_pipeline(self, policy):
        x = images(32)
        return self._mixed(x, [(self.back(a), y) for a, y in self.batches(policy, data=x)])


def host_loader():
    """Whether the kit's loader on the host gives the batches that the device's epochs have."""
    x, y = images(20), np.arange(20)
    seen = []

    def wrap(dataset):
        seen.append(dataset)
        return dataset

    loader = impl.kit.data.host_loader(x, y, wrap, batch_size=8, seed=3)
    on_host = [[(own.back(a), np.asarray(b)) for a, b in loader] for _ in range(2)]
    whole = impl.kit.data.to_device(x, y)
    on_device = [
        [
            (own.back(a), np.asarray(b))
            for a, b in impl.kit.data.epoch_batches(*whole, batch_size=8, seed=3, epoch=epoch)
        ]
        for epoch in range(2)
    ]
    pairs = [zip(*epochs, strict=True) for epochs in zip(on_host, on_device, strict=True)]
    return {
        "equal": all(
            np.array_equal(a, c) and np.array_equal(b, d)
            for epoch in pairs
            for (a, b), (c, d) in epoch
        ),
        "batches": [len(epoch) for epoch in on_host],
        "another order": not np.array_equal(on_host[0][0][1], on_host[1][0][1]),
        "wrapped": len(seen),
    }


def structures():
    """Batches of `tf.data` as `fit` takes them: with weights, and with labels in a dict."""
    import tensorflow as tf

    def batches(policy, *parts):
        dataset = tf.data.Dataset.from_tensor_slices(parts if len(parts) > 1 else parts[0])
        return list(ours.augmented_dataset(dataset.batch(4), policy))

    x, y = images(8), labels(8)
    flips, mixes, weights = Policy(flip_horizontal=0.5), Policy(mixup=0.5), np.arange(8.0)
    named = batches(mixes, x, {"a": y, "b": -y})
    cases = {
        "weights of mixed": lambda: batches(mixes, x, y, weights),
        "x alone": lambda: batches(flips, x),
        "dict": lambda: batches(flips, {"image": x}, y),
        "integers": lambda: batches(flips, x.astype(np.uint8), y),
        "not batched": lambda: batches(flips, x[0], y),
    }
    said = {}
    for name, call in cases.items():
        try:
            call()
        except ValueError as error:
            said[name] = str(error)
    return {
        "weights": np.concatenate([batch[2] for batch in batches(flips, x, y, weights)]),
        "same images": all(
            np.array_equal(one[0], other[0])
            for one, other in zip(batches(flips, x, y, weights), batches(flips, x, y), strict=True)
        ),
        "named": all(
            np.array_equal(part["a"], -part["b"])
            for _, mixed in named
            for part in (mixed.labels, mixed.partners)
        ),
        "partners": np.concatenate([mixed.partners["a"] for _, mixed in named]),
        "unnamed": np.concatenate([mixed.partners for _, mixed in batches(mixes, x, y)]),
        "said": said,
    }


own = _PT() if FRAMEWORK == "pt" else _TF()
SCENARIOS = (transforms, neutral, layouts, draws, mixes, loss, host, host_loader, device, refusals)
SCENARIOS += () if FRAMEWORK == "pt" else (structures,)
