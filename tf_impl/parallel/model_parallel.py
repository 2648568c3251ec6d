"""Model parallel: one model in stages on several devices, a batch or micro-batches at a time.

What it changes: where layers are and what travels between them. A stage holds layers in a row and
their optimizer; activations go to the next stage, and their gradients come back. In the plain layer
split one stage works at a time. A pipeline cuts the batch into micro-batches, so that stages work
side by side: all forward, then all back (GPipe, Huang et al., 2019), or back as soon as one can be
(1F1B, Narayanan et al., 2019). Losses and weights are those of one device with the whole batch.

Its twin: `pt_impl/parallel/model_parallel.py`.

Where the frameworks differ and why:
- TensorFlow has one process with a device a stage; on a CPU they share its memory, nothing is sent.
  PyTorch has a process a stage, which talks to the others through gloo or, on GPUs, NCCL.
- A functional Keras model is a graph already: a stage is a copy of the layers in between, made
  below `tf.device`. PyTorch traces the model and cuts the trace before a named module.
- A schedule is one graph with control dependencies here, and a loop in each process there.

When it helps and when it hurts: it helps where a model does not fit into one device; else one, or
data parallel, is faster. p stages and m micro-batches of even cost idle for (p-1)/(m+p-1) of the
time. BatchNorm sees a micro-batch at a time in a pipeline; dropout draws other masks.

Run it alone: `python -m tf_impl.parallel.model_parallel` prints one device against two.
"""

import contextlib
import importlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

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


@dataclass(frozen=True)
class _Stage:
    """Layers on a device, their optimizer, and the paths of what they are copies of."""

    device: str
    model: tf.keras.Model
    optimizer: tf.keras.optimizers.Optimizer
    names: list[str]

    def forward(self, x, wait: list, loss: Callable | None) -> tuple:
        """Input, output and tape of a micro-batch, once `wait` is there; `loss` ends the last."""
        with tf.device(self.device), tf.control_dependencies(wait):
            x = tf.identity(x)
            with tf.GradientTape() as tape:
                tape.watch(x if x.dtype.is_floating else [])
                output = self.model(x, training=True)
                return x, loss(output) if loss else output, tape

    def backward(self, x, output, tape, upstream, wait: list) -> list:
        """Gradients of the input (None for codes) and of the variables, once `wait` is there."""
        with tf.device(self.device), tf.control_dependencies(wait):
            found = tape.gradient(output, [x, *self.model.trainable_variables], upstream)
            return [found[0], *map(tf.convert_to_tensor, found[1:])]


def train_layer_split(
    build, dataset, *, cut: str, global_batch: int, steps: int, seed: int
) -> Trained:
    """Train with the whole batch as one micro-batch, stage after stage: see `train_pipeline`."""
    given = {"global_batch": global_batch, "steps": steps, "seed": seed}
    return train_pipeline(build, dataset, cut=cut, micro_batches=1, **given)


def train_pipeline(
    build,
    dataset,
    *,
    cut: str,
    micro_batches: int,
    schedule: str = "gpipe",
    global_batch: int,
    steps: int,
    seed: int,
) -> Trained:
    """Train in stages, a device each, that work on micro-batches side by side.

    build: "module:function", importable from here, which gives a functional or Sequential model,
    its optimizer (without state yet), and a loss that is a mean over samples. dataset: arrays x and
    y, images NHWC; `steps` batches of `global_batch` samples are taken in the shared order of
    `seed`. cut: names of the layers that begin a stage, separated by commas; one tensor crosses a
    cut. schedule: "gpipe", or "1f1b", in which a stage keeps the activations of no more of them
    than there are stages. Devices are GPUs, or logical CPUs, made here if TensorFlow has not begun.

    Raises, before anything is trained, ValueError for names that are not there and numbers that do
    not fit, NotImplementedError for models and optimizers that can't be split.
    """
    names = [name.strip() for name in cut.split(",")]
    stages = len(names) + 1
    if schedule not in ("gpipe", "1f1b"):
        raise ValueError(f"schedule must be gpipe or 1f1b, not {schedule!r}")
    if micro_batches < 1 or global_batch % micro_batches:
        raise ValueError(f"{micro_batches} micro_batches do not divide a batch of {global_batch}")
    if schedule == "1f1b" and micro_batches < stages:
        raise ValueError(f"1f1b with {stages} stages needs {stages} micro_batches or more")
    x, y = dataset
    if steps < 1 or not 1 <= global_batch <= len(x) == len(y):
        raise ValueError(f"{steps} steps of {global_batch} from {len(x)} samples, {len(y)} labels")
    devices = _devices(stages)
    tf.keras.utils.set_random_seed(seed)
    model, optimizer, loss_fn = _build(build)
    line = _split(model, optimizer, names, devices)
    step = _make_step(line, loss_fn, micro_batches, schedule)
    epochs = (batch_order(len(x), global_batch, seed=seed, epoch=n) for n in itertools.count())
    losses, ended = [], []
    for rows in itertools.islice(itertools.chain.from_iterable(epochs), steps):
        losses.append(float(step(*data.to_device(x[rows], y[rows]))))
        ended.append(time.monotonic())
    copies = [pair for stage in line for pair in zip(stage.names, stage.model.weights, strict=True)]
    return Trained({name: copy.numpy() for name, copy in copies}, losses, ended)


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
        raise ValueError(f"{count} stages need {count} devices, TensorFlow began with {len(names)}")
    return names[:count]


def _build(build: str) -> tuple:
    module, _, name = str(build).partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f'build must be "module:function", not {build!r}: {error}') from None
    return function()


def _split(model, optimizer, names: list[str], devices: list[str]) -> list[_Stage]:
    """Copy what lies between the layers of these names, and the optimizer, to each device."""
    ends = [getattr(model, name, None) or [] for name in ("inputs", "outputs")]
    if [len(end) for end in ends] != [1, 1]:
        raise NotImplementedError("only a functional or Sequential model of one input is cut")
    if getattr(optimizer, "global_clipnorm", None):
        raise NotImplementedError("global_clipnorm: a stage would clip by the norm of its own part")
    known = [layer.name for layer in model.layers]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"cut: there is no layer {unknown[0]!r}; there are {', '.join(known)}")
    stages, entering = [], ends[0][0]
    for name, device in zip([*sorted(names, key=known.index), None], devices, strict=True):
        leaving = model.get_layer(name).input if name else ends[1][0]
        if leaving is entering:
            raise ValueError(f"cut: nothing is left for the stage before {name!r}")
        try:
            part = tf.keras.Model(entering, leaving)
            with tf.device(device):
                copy = tf.keras.models.clone_model(part)
                own = type(optimizer).from_config(optimizer.get_config())
                own.build(copy.trainable_variables)
        except ValueError as error:
            reason = str(error).splitlines()[0]
            raise NotImplementedError(f"cut: {', '.join(names)} can't be: {reason}") from None
        copy.set_weights(part.get_weights())
        paths = [getattr(w, "path", w.name).removeprefix(f"{model.name}/") for w in part.weights]
        stages.append(_Stage(device, copy, own, paths))
        entering = leaving
    return stages


def _make_step(line: list, loss_fn: Callable, micro_batches: int, schedule: str) -> Callable:
    """One graph of all stages and micro-batches: `step(x, y) -> loss`."""

    @tf.function(jit_compile=False)
    def step(x, y):
        parts = list(zip(tf.split(x, micro_batches), tf.split(y, micro_batches), strict=True))
        kept, gradients = [[] for _ in line], [[] for _ in line]  # of each stage's micro-batches

        def forward(number):
            value, labels = parts[number]
            for place, stage in enumerate(line):
                # 1F1B: a stage that keeps as many as there are stages left sends one back first.
                back = number - len(line) + place
                wait = gradients[place][back] if schedule == "1f1b" and back >= 0 else []
                loss = (lambda logits: loss_fn(logits, labels)) if stage is line[-1] else None
                kept[place].append(stage.forward(value, wait, loss))
                value = kept[place][-1][1]
            return value

        def backward(number):
            upstream = None
            for place, stage in reversed(list(enumerate(line))):
                wait = [output for _, output, _ in kept[place]] if schedule == "gpipe" else []
                upstream, *own = stage.backward(*kept[place][number], upstream, wait)
                gradients[place].append(own)

        losses = []
        for number in range(micro_batches):
            losses.append(forward(number))
            if schedule == "1f1b":
                backward(number)
        for number in range(micro_batches if schedule == "gpipe" else 0):
            backward(number)
        for stage, own in zip(line, gradients, strict=True):
            with tf.device(stage.device):
                means = [tf.add_n(every) / micro_batches for every in zip(*own, strict=True)]
                pairs = zip(means, stage.model.trainable_variables, strict=True)
                stage.optimizer.apply_gradients(pairs)
        return tf.add_n(losses) / micro_batches

    return step


def text_gpt_wide() -> tuple:
    """A transformer of ten million parameters, its optimizer and its loss: something to build."""
    task = TASKS["text-gpt-wide"]
    model = models.build(task.model, init_weights(task.model, seed=0))
    return model, training.make_optimizer(model, task.recipe), training.cross_entropy


def main() -> None:
    """Print steps of two devices, a layer split and a pipeline, then of one."""
    x, build = np.random.default_rng(0).integers(0, 98, (80, 64)), f"{__spec__.name}:text_gpt_wide"
    given = {"cut": "block1.ln0", "global_batch": 8, "steps": 10, "seed": 0}
    split = train_layer_split(build, (x, x), **given)
    piped = train_pipeline(build, (x, x), micro_batches=4, schedule="1f1b", **given)
    step, alone = training.make_train_step(*text_gpt_wide()), Trained({}, [], [])
    for rows in batch_order(len(x), 8, seed=0, epoch=0):
        alone.losses.append(float(step(*data.to_device(x[rows], x[rows]))))
        alone.ended.append(time.monotonic())
    print("text-gpt-wide, batch 8: ms a step, last loss")
    for name, found in (("layer split", split), ("pipeline", piped), ("one device", alone)):
        print(f"{name:12}{1e3 * np.median(np.diff(found.ended)):8.1f}{found.losses[-1]:9.4f}")


if __name__ == "__main__":
    main()
