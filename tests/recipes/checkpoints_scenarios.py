"""One framework's share of the checkpoints' tests; `worker.py` runs it.

The model has dropout and the optimizer is AdamW, so that a step depends on weights, moments, the
step count and random numbers.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests import workers

NAME = sys.argv[1]
FRAMEWORK = "pt" if NAME == "pt" else "tf"
impl = workers.implementation(FRAMEWORK, "recipes.checkpoints")
checkpoints = impl.recipes.checkpoints
STEPS = 5
SUFFIX = "pt" if FRAMEWORK == "pt" else "npz"
RATE = 0.0 if NAME == "tf_keras" else 0.5  # its dropout draws from what no checkpoint holds

if FRAMEWORK == "pt":
    import torch

    def make(seed, width=16):
        """A model with dropout and its optimizer; all draws begin at `seed`."""
        torch.manual_seed(seed)
        layers = torch.nn
        model = layers.Sequential(
            layers.Linear(8, width), layers.Dropout(RATE), layers.Linear(width, 4)
        )
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    def make_step(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(torch.tensor(x)), torch.tensor(y))
            loss.backward()
            optimizer.step()

        return step

    def weights(model):
        return [value.numpy().copy() for value in model.state_dict().values()]

    def fill(model, value):
        with torch.no_grad():
            next(model.parameters()).fill_(value)

    def low(seed):
        """A layer in bfloat16."""
        torch.manual_seed(seed)
        return torch.nn.Linear(3, 4, dtype=torch.bfloat16)

    def low_values(model):
        return [value.float().numpy() for value in model.state_dict().values()]

    def foreign(path):
        """A pickle that would run code."""
        torch.save({"version": 1, "weights": Path("x"), "state": {}}, path)

else:
    import tensorflow as tf

    def make(seed, width=16):
        """A model with dropout and its optimizer; all draws begin at `seed`."""
        tf.keras.utils.set_random_seed(seed)
        layers = tf.keras.layers
        model = tf.keras.Sequential([layers.Dense(width), layers.Dropout(RATE), layers.Dense(4)])
        model(np.zeros((1, 8), np.float32))
        return model, tf.keras.optimizers.AdamW(0.05)

    def low(seed):
        """A layer in bfloat16."""
        tf.keras.utils.set_random_seed(seed)
        model = tf.keras.Sequential([tf.keras.layers.Dense(4, dtype="bfloat16")])
        model(np.zeros((1, 3), np.float32))
        assert {tf.as_dtype(variable.dtype) for variable in model.variables} == {tf.bfloat16}
        return model

    def low_values(model):
        return [tf.cast(value, tf.float32).numpy() for value in model.variables]

    def make_step(model, optimizer):
        losses = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = losses(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        return lambda x, y: step(tf.constant(x), tf.constant(y))

    def weights(model):
        return [np.array(value) for value in model.get_weights()]

    def fill(model, value):
        variable = model.trainable_variables[0]
        variable.assign(tf.fill(variable.shape, value))

    def foreign(path):
        """An archive with an object, which would be unpickled."""
        np.savez(path, head=np.array([object()], dtype=object))


def batch(step):
    random = np.random.default_rng(step)
    return random.normal(size=(16, 8)).astype(np.float32), random.integers(0, 4, 16)


def same(one, other):
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def trained(folder):
    """A model and its optimizer after three steps."""
    model, optimizer = make(1)
    step = make_step(model, optimizer)
    for number in range(3):
        step(*batch(number))
    return model, optimizer


def resumed():
    """Weights of undisturbed training against those of one interrupted after each step."""
    model, optimizer = make(1)
    step = make_step(model, optimizer)
    for number in range(STEPS):
        without = weights(model)
        step(*batch(number))
    wanted, found = weights(model), {}
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, str(number)) for number in range(1, STEPS)]
        model, optimizer = make(1)
        step = make_step(model, optimizer)
        for number, each in enumerate(folders):
            step(*batch(number))
            checkpoints.Checkpoints(each, model, optimizer).save(number + 1, {"place": number + 1})
        for each in folders:
            model, optimizer = make(99)  # as a new process would: other weights, other draws
            state = checkpoints.Checkpoints(each, model, optimizer).resume()
            step = make_step(model, optimizer)
            for number in range(state["place"], STEPS):
                step(*batch(number))
            found[each.name] = same(weights(model), wanted)
    return {"same": found, "a step is seen": not same(without, wanted)}


def kinds():
    """Bytes of each kind, and what comes back."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = trained(folder)
        wanted = weights(model)
        path = Path(folder) / f"one.{SUFFIX}"
        for name, kept, half in (
            ("whole", optimizer, False),
            ("weights", None, False),
            ("half", None, True),
        ):
            size = checkpoints.save_checkpoint(path, model, kept, {"a": 1}, half_precision=half)
            other, _ = make(5)
            state = checkpoints.load_checkpoint(path, other)
            back = weights(other)
            found[name] = {
                "bytes": size,
                "exact": same(back, wanted),
                "rounded": same(back, [_rounded(value) for value in wanted]),
                "state": state,
            }
    return found


def _rounded(value):
    return value.astype(np.float16).astype(value.dtype) if value.dtype.kind == "f" else value


@contextmanager
def full_disk(size):
    """Files of this process may not grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def faults():
    """What each fault raises, whether the model stayed, and what is left in the folder."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        model, optimizer = trained(folder)
        good = folder / f"good.{SUFFIX}"
        checkpoints.save_checkpoint(good, model, optimizer, {})
        content = good.read_bytes()
        half = folder / f"half.{SUFFIX}"
        checkpoints.save_checkpoint(half, model, None, {})
        (folder / f"cut.{SUFFIX}").write_bytes(content[: len(content) // 2])
        (folder / f"empty.{SUFFIX}").write_bytes(b"")
        flipped = bytearray(content)
        flipped[len(content) // 3] ^= 1
        (folder / f"flipped.{SUFFIX}").write_bytes(flipped)
        foreign(folder / f"foreign.{SUFFIX}")
        wanted = weights(model)
        for name in ("missing", "cut", "empty", "flipped", "foreign", "half"):
            found[name] = _raised(
                lambda n=name: checkpoints.load_checkpoint(
                    folder / f"{n}.{SUFFIX}", model, optimizer
                )
            )
        other, its = make(1, width=12)
        before = weights(other)
        found["other model"] = _raised(lambda: checkpoints.load_checkpoint(good, other, its))
        found["other model stays"] = same(before, weights(other))
        found["model stays"] = same(wanted, weights(model))
        with full_disk(1000):
            found["full disk"] = _raised(
                lambda: checkpoints.save_checkpoint(good, model, optimizer, {}), OSError
            )
        found["good one stays"] = good.read_bytes() == content
        found["left over"] = [p.name for p in folder.iterdir() if p.name.startswith(".")]
        fill(model, 1e5)
        found["overflow"] = _raised(
            lambda: checkpoints.save_checkpoint(half, model, None, {}, half_precision=True)
        )
    return found


def _raised(call, kind=ValueError):
    try:
        call()
    except kind as error:
        return str(error)
    return None


def folder():
    """Which files stay, and what is resumed from where the last ones are damaged."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, optimizer = trained(folder)
        keeper = checkpoints.Checkpoints(
            folder, model, optimizer, keep=2, every=3, higher_is_better=True
        )
        for number, metric in enumerate([0.1, 0.9, 0.2, 0.3, None], start=1):
            fill(model, float(number))
            keeper.save(number, {}, metric)
        found["names"] = sorted(path.stem for path in folder.iterdir())
        again = checkpoints.Checkpoints(folder, model, optimizer, higher_is_better=True)
        found["best"] = again.best
        (folder / f"step-00000005.{SUFFIX}").write_bytes(b"cut off")
        found["resumed"] = again.resume()["step"]
        found["weight"] = float(weights(model)[0].ravel()[0])
        again.every = 3
        for number in (5, 6, 7):  # after four saves
            again.save(number, {})
        found["periodic"] = sorted(path.stem for path in folder.glob("periodic-*"))
        for last in folder.glob("step-*"):
            last.write_bytes(b"")
        found["none is whole"] = _raised(again.resume)
    with tempfile.TemporaryDirectory() as name:
        found["nothing there"] = checkpoints.Checkpoints(name, model, optimizer).resume()
        found["bad keep"] = _raised(lambda: checkpoints.Checkpoints(name, model, optimizer, keep=0))
    return found


def returned():
    """A return to an earlier step, before whose first one nothing was trained; NumPy's numbers."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        model, optimizer = make(0)
        keeper = checkpoints.Checkpoints(name, model, optimizer, keep=2)
        for step in (100, 200, 300):
            keeper.save(step, {}, float("nan"))
        found["best of nan"] = keeper.best
        state = {"rate": np.float64(0.5), "counts": [np.int64(3)]}
        other = checkpoints.Checkpoints(name, model, optimizer, keep=2)
        path = other.save(150, state, np.mean([0.25, 0.75]))
        os.utime(path, (0, 0))  # as a copy of the folder may have it
        again = checkpoints.Checkpoints(name, model, optimizer)
        found |= {"written": path.exists(), "best": again.best, "resumed": again.resume()}
        found["names"] = sorted(path.stem for path in Path(name).iterdir())
        found["object"] = _raised(lambda: again.save(151, {"folder": Path(name)}))
        if FRAMEWORK == "pt":
            place = namedtuple("Place", "epoch batch")(1, 2)  # JSON makes a list of it
            found["named"] = _raised(lambda: again.save(151, {"place": place}))
        else:
            words = np.array(["train", "test"])
            found["words"] = _raised(lambda: again.save(151, {"splits": words}))
        found["left"] = sorted(path.stem for path in Path(name).iterdir())
    return found


def low_precision():
    """Weights in bfloat16 before and after, in another model."""
    with tempfile.TemporaryDirectory() as name:
        path, values = Path(name) / f"low.{SUFFIX}", []
        for seed in (0, 1):
            model = low(seed)
            if seed:
                checkpoints.load_checkpoint(path, model)
            else:
                checkpoints.save_checkpoint(path, model, None, {})
            values.append([np.asarray(v, np.float32).tolist() for v in low_values(model)])
    return values


def drawn_damage():
    """What 60 checkpoints that were cut, changed in places or replaced give, each a line or None.

    And whether the model was changed by one that was refused.
    """
    random, said, stays = np.random.default_rng(0), [], True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, optimizer = trained(folder)
        path = folder / f"good.{SUFFIX}"
        checkpoints.save_checkpoint(path, model, optimizer, {"epoch": 3})
        content, before = path.read_bytes(), weights(model)
        for number in range(60):
            damaged = bytearray(content[: random.integers(len(content))])
            if number % 3:
                damaged = bytearray(content if number % 3 == 1 else random.bytes(200))
                for _ in range(random.integers(1, 9)):
                    damaged[random.integers(len(damaged))] = random.integers(256)
            path.write_bytes(damaged)
            said.append(_raised(lambda: checkpoints.load_checkpoint(path, model, optimizer)))
            stays &= same(before, weights(model))
    return {"said": said, "stays": stays, "folder": name}


def scheduled():
    """Checkpoints written and read with and without a schedule: the rates of the next two steps."""
    if FRAMEWORK != "pt":
        return {"not of it": True}  # a schedule is of the optimizer, and leaves no trace in a file
    found = {}
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "one.pt"
        for then in (False, True):
            for now in (False, True):
                rates = found[f"{then} {now}"] = []
                for schedules in (then, now):
                    model, optimizer = make(0)
                    schedule = None
                    if schedules:
                        schedule = torch.optim.lr_scheduler.OneCycleLR(
                            optimizer, 0.1, total_steps=9, cycle_momentum=False
                        )
                    if path.exists():
                        checkpoints.load_checkpoint(path, model, optimizer)
                    checkpoints.save_checkpoint(path, model, optimizer, {})
                for _ in range(2):
                    rates.append(optimizer.param_groups[0]["lr"])
                    optimizer.step()
                    if schedule:
                        schedule.step()
                path.unlink()
        checkpoints.save_checkpoint(path, model, torch.optim.Adam(model.parameters()), {})
        lazy = torch.nn.LazyLinear(2)  # which has its sizes from its first call, or a file
        checkpoints.save_checkpoint(path.with_name("lazy"), torch.nn.Linear(3, 2), None, {})
        checkpoints.load_checkpoint(path.with_name("lazy"), lazy)
        found["lazy"] = list(lazy.weight.shape)
        other = torch.optim.RAdam(model.parameters())
        found["another"] = _raised(lambda: checkpoints.load_checkpoint(path, model, other))
    return found


def reduced():
    """The rate of an optimizer that read the checkpoint of another, whose rate was reduced."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / f"one.{SUFFIX}"
        model, optimizer = make(0)
        if FRAMEWORK == "pt":
            optimizer.param_groups[0]["lr"] = 0.005
        else:
            optimizer.learning_rate = 0.005
        checkpoints.save_checkpoint(path, model, optimizer, {})
        model, optimizer = make(0)
        checkpoints.load_checkpoint(path, model, optimizer)
    return float(optimizer.param_groups[0]["lr"] if FRAMEWORK == "pt" else optimizer.learning_rate)


def of_keras():
    """What Keras 3 keeps beside the variables of a layer or an optimizer; nothing in PyTorch."""
    if NAME != "tf":
        return {"not of it": True}
    layers, found = tf.keras.layers, {}
    inputs = np.random.default_rng(0).normal(5, 3, (64, 8)).astype(np.float32)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "kept.npz"

        model, _ = make(0)
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1))
        optimizer.build(model.trainable_variables)
        optimizer.dynamic_scale.assign(128.0)
        before = len(optimizer.variables)
        for _ in range(2):
            checkpoints.save_checkpoint(path, model, optimizer, {})
        found["variables"] = [before, len(optimizer.variables)]
        other = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1))
        checkpoints.load_checkpoint(path, model, other)
        found["scales"] = [float(each.dynamic_scale) for each in (optimizer, other)]

        def normalised(adapted):
            normalisation = layers.Normalization()
            model = tf.keras.Sequential([layers.Input((8,)), normalisation, layers.Dense(2)])
            if adapted:
                normalisation.adapt(inputs)
            return model

        one, same_later = normalised(True), normalised(False)
        checkpoints.save_checkpoint(path, one, None, {})
        checkpoints.load_checkpoint(path, same_later)
        found["normalised"] = [np.array(each(inputs)).tolist() for each in (one, same_later)]

        dense, _ = make(0)
        pruning = workers.implementation("tf", "compression.pruning").compression.pruning
        settings = {"final_sparsity": 0.9, "begin_step": 0, "end_step": 1, "frequency": 1}
        (masked, update), (again, _) = (pruning.apply_pruning(dense, **settings) for _ in range(2))
        update(1)
        checkpoints.save_checkpoint(path, masked, None, {})
        found["into a model without"] = _raised(lambda: checkpoints.load_checkpoint(path, dense))
        checkpoints.load_checkpoint(path, again)
        found["masked"] = [np.array(each(inputs)).tolist() for each in (masked, again)]
        found["dense"] = np.array(dense(inputs)).tolist()
        halve = workers.implementation("tf", "compression.semi_structured_pruning").compression
        halves = [halve.semi_structured_pruning.apply_two_to_four(make(seed)[0]) for seed in (0, 1)]
        checkpoints.save_checkpoint(path, halves[0], None, {})
        checkpoints.load_checkpoint(path, halves[1])
        found["halved"] = [np.array(each(inputs)).tolist() for each in halves]
    return found


SCENARIOS = (
    resumed,
    kinds,
    faults,
    folder,
    returned,
    low_precision,
    drawn_damage,
    scheduled,
    reduced,
    of_keras,
)
