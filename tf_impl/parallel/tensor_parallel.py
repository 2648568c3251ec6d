"""Tensor parallel: parts of the same layers on several devices; with replicas, a hybrid.

What it changes: pairs of dense layers lose none of their arithmetic, but each device has a part of
it. The first of a pair is split by its outputs, the second by its inputs, so that a device computes
its part of what lies between them, and one sum over all devices ends the pair; going back there is
another (Megatron-LM, Shoeybi et al., 2019). In the hybrid each of several replicas is split in this
way, and takes its part of the batch. Losses and weights are those of one device with the batch.

Its twin: `pt_impl/parallel/tensor_parallel.py`.

Where the frameworks differ and why:
- TensorFlow has one process with a device for each part; on a CPU these share its memory. PyTorch
  has a process for each, which talks to the others through gloo or, on GPUs, NCCL.
- Variables have a layout here (DTensor), and the compiler finds out what travels. A plan names
  modules and how to split them there (`parallelize_module`).
- Keras 3's own distribution works with JAX alone. Its models are called without their variables
  here (`stateless_call`), and variables of DTensor take their place, in the optimizer too.
- DTensor's graphs let a read of a variable overtake the assignment before it, so the optimizer runs
  eagerly, an operation at a time, which costs most of a small model's step.
- Each replica holds all of its part here. There the hybrid shards parameters, gradients and the
  optimizer's state over the replicas (FSDP2: ZeRO, Rajbhandari et al., 2020).

When it helps and when it hurts: it helps where layers are wide and devices have the fastest links
there are: two sums of activations a pair and step, in which all devices wait for one another. The
other layers are computed by all. BatchNorm sees the whole batch here, that of a replica there;
dropout draws other masks.

Run it alone: `python -m tf_impl.parallel.tensor_parallel` prints two and four devices against one.
"""

import contextlib
import importlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from shared.datasets import batch_order
from shared.specs import TASKS
from shared.weights import init_weights
from tf_impl.kit import data, models, training


@dataclass(frozen=True)
class Trained:
    """What a run leaves.

    weights: the state of the whole model by Keras's paths within it, in Keras's layouts. losses: of
    each step, the mean over its batch. ended: when each was over, on the clock of `time.monotonic`.
    """

    weights: dict[str, np.ndarray]
    losses: list[float]
    ended: list[float]


def train_tensor_parallel(
    build, dataset, *, pairs: str, shards: int = 2, global_batch: int, steps: int, seed: int
) -> Trained:
    """Train with pairs of dense layers split over `shards` devices.

    It is a hybrid of one replica: see `train_hybrid`.
    """
    given = {"global_batch": global_batch, "steps": steps, "seed": seed}
    return train_hybrid(build, dataset, pairs=pairs, shards=shards, replicas=1, **given)


def train_hybrid(
    build,
    dataset,
    *,
    pairs: str,
    shards: int = 2,
    replicas: int = 2,
    global_batch: int,
    steps: int,
    seed: int,
) -> Trained:
    """Train replicas of the model on their parts of each batch, each split over `shards` devices.

    build: "module:function", importable from here, which gives a Keras 3 model, its optimizer
    (without state yet), and a loss that is a mean over samples. dataset: arrays x and y, images
    NHWC; `steps` batches of `global_batch` samples are taken in the shared order of `seed`. pairs:
    "first > second", separated by commas: names of dense layers, or patterns with *, ? and [] whose
    matches are paired in order. What lies between a pair works element by element. Devices are the
    GPUs, or logical devices of the CPU: they are made here if TensorFlow has not begun, else there
    must be enough of them.

    Raises, before anything is trained, ValueError for names that are not there and numbers that do
    not fit, NotImplementedError for layers that can't be split, and in tf_keras.
    """
    x, y = dataset
    if steps < 1 or not 1 <= global_batch <= len(x) == len(y):
        raise ValueError(f"{steps} steps of {global_batch} from {len(x)} samples, {len(y)} labels")
    if replicas < 1 or global_batch % replicas:
        raise ValueError(f"{replicas} replicas do not divide a batch of {global_batch}")
    if not hasattr(tf.keras, "StatelessScope"):
        raise NotImplementedError("tf_keras can't call a model without its variables: use Keras 3")
    devices = _devices(replicas * shards)
    tf.keras.utils.set_random_seed(seed)
    model, optimizer, loss_fn = _build(build)
    split = _plan(model, pairs, shards)
    mesh = dtensor.create_mesh([("data", replicas), ("model", shards)], devices=devices)
    variables, step = _make_step(model, optimizer, loss_fn, split, mesh)
    epochs = (batch_order(len(x), global_batch, seed=seed, epoch=n) for n in itertools.count())
    losses, ended = [], []
    for rows in itertools.islice(itertools.chain.from_iterable(epochs), steps):
        losses.append(float(step(*(_placed(part[rows], mesh, "data") for part in (x, y)))))
        ended.append(time.monotonic())
    names = {path: path.removeprefix(f"{model.name}/") for path in variables}
    weights = {names[path]: _whole(variable) for path, variable in variables.items()}
    return Trained(weights, losses, ended)


def _devices(count: int) -> list[str]:
    """The names of so many GPUs or logical CPU devices, which can only be made at the start."""
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    cpu = tf.config.list_physical_devices("CPU")[0]
    if kind == "CPU" and not tf.config.get_logical_device_configuration(cpu):
        with contextlib.suppress(RuntimeError):  # TensorFlow has begun
            logical = [tf.config.LogicalDeviceConfiguration()] * count
            tf.config.set_logical_device_configuration(cpu, logical)
    names = [device.name for device in tf.config.list_logical_devices(kind)]
    if len(names) < count:
        raise ValueError(f"{count} parts need {count} devices, TensorFlow began with {len(names)}")
    return names[:count]


def _build(build: str) -> tuple:
    module, _, name = str(build).partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f'build must be "module:function", not {build!r}: {error}') from None
    return function()


def _plan(model: tf.keras.Model, pairs: str, shards: int) -> dict[str, list[str]]:
    """The path of each variable that is split -> what its axes are split over."""
    known, plan = {layer.name: layer for layer in model.layers}, {}
    for pair in pairs.split(","):
        sides = [part.strip() for part in pair.split(">")]
        found = [[name for name in known if fnmatchcase(name, side)] for side in sides]
        if len(found) != 2 or not found[0] or len(found[0]) != len(found[1]):
            raise ValueError(f"pairs: {pair.strip()!r} matches {found}: two lists of equal length")
        for names in zip(*found, strict=True):
            layers = [known[name] for name in names]
            for layer in layers:
                if not isinstance(layer, tf.keras.layers.Dense):
                    kind = type(layer).__name__
                    raise NotImplementedError(
                        f"pairs: {layer.name} is a {kind}, only Dense is split"
                    )
            first, second = layers
            sizes = first.units, second.kernel.shape[0]
            if sizes[0] != sizes[1] or shards < 2 or sizes[0] % shards:
                raise ValueError(
                    f"pairs: {names[0]} > {names[1]}: {sizes} do not go into {shards} shards"
                )
            plan[first.kernel.path] = [dtensor.UNSHARDED, "model"]
            plan[second.kernel.path] = ["model", dtensor.UNSHARDED]
            if first.use_bias:
                plan[first.bias.path] = ["model"]
    return plan


def _make_step(model, optimizer, loss_fn: Callable, split: dict, mesh) -> tuple:
    """The variables of DTensor by path, and `step(x, y) -> loss` that trains them."""
    variables = {}
    for variable in model.variables:
        value = _placed(variable.numpy(), mesh, *split.get(variable.path, []))
        variables[variable.path] = dtensor.DVariable(value, name=variable.path.replace("/", "."))
    trained = [variables[variable.path] for variable in model.trainable_variables]
    state = [variables[variable.path] for variable in model.non_trainable_variables]
    with dtensor.default_mesh(mesh), tf.variable_creator_scope(_like(trained)):
        optimizer = type(optimizer).from_config(optimizer.get_config())
        optimizer.build(trained)

    @tf.function(jit_compile=False)
    def gradients(x, y):
        with tf.GradientTape() as tape:
            logits, changed = model.stateless_call(trained, state, x, training=True)
            loss = loss_fn(logits, y)
        return loss, [tf.convert_to_tensor(g) for g in tape.gradient(loss, trained)], changed

    def step(x, y):
        loss, found, changed = gradients(x, y)
        with dtensor.default_mesh(mesh):  # eagerly: see above
            optimizer.apply(found, trained)
            for variable, value in zip(state, changed, strict=True):
                variable.assign(value)
        return loss

    return variables, step


def _like(trained: list) -> Callable:
    """A creator that lays the optimizer's variables out as those that their names begin with."""

    def create(_, **given):
        value = given["initial_value"]
        value = value() if callable(value) else tf.convert_to_tensor(value)
        owners = [v for v in trained if given["name"].startswith(f"{v.name.split(':')[0]}_")]
        mesh = trained[0].layout.mesh
        layout = owners[0].layout if owners else dtensor.Layout.replicated(mesh, value.shape.rank)
        return dtensor.DVariable(dtensor.relayout(value, layout), name=given["name"])

    return create


def _placed(value: np.ndarray, mesh, *axes: str):
    """A tensor with its first axes split over those of the mesh."""
    value = tf.constant(value)
    whole = dtensor.copy_to_mesh(value, dtensor.Layout.replicated(mesh, value.shape.rank))
    rest = [dtensor.UNSHARDED] * (value.shape.rank - len(axes))
    return dtensor.relayout(whole, dtensor.Layout([*axes, *rest], mesh))


def _whole(variable) -> np.ndarray:
    layout = dtensor.Layout.replicated(variable.layout.mesh, variable.shape.rank)
    return dtensor.unpack(dtensor.relayout(variable.read_value(), layout))[0].numpy()


def text_gpt_wide() -> tuple:
    """A transformer of ten million parameters, its optimizer and its loss: something to build."""
    task = TASKS["text-gpt-wide"]
    model = models.build(task.model, init_weights(task.model, seed=0))
    return model, training.make_optimizer(model, task.recipe), training.cross_entropy


def main() -> None:
    """Print steps of four devices, of two with parts of each block, and of one."""
    x, build = np.random.default_rng(0).integers(0, 98, (80, 64)), f"{__spec__.name}:text_gpt_wide"
    given = {"pairs": "block*.up > block*.down", "global_batch": 8, "steps": 10, "seed": 0}
    both = train_hybrid(build, (x, x), **given)
    split = train_tensor_parallel(build, (x, x), **given)
    step, alone = training.make_train_step(*text_gpt_wide()), Trained({}, [], [])
    for rows in batch_order(len(x), 8, seed=0, epoch=0):
        alone.losses.append(float(step(*data.to_device(x[rows], x[rows]))))
        alone.ended.append(time.monotonic())
    print("text-gpt-wide, batch 8: ms a step, last loss")
    for name, found in (("hybrid", both), ("tensor parallel", split), ("one device", alone)):
        print(f"{name:16}{1e3 * np.median(np.diff(found.ended)):8.1f}{found.losses[-1]:9.4f}")


if __name__ == "__main__":
    main()
