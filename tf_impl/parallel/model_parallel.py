"""Model parallelism: one model in stages on several devices, by batch or by micro-batches.

    stages = apply_model_parallel(model, micro_batch_x, cut="block1")
    step = make_train_step(stages, optimizer, loss_fn, micro_batches=4, schedule="1f1b")
    loss = step(x, y, samples)

What it changes: which device holds which layers. A stage holds some layers and their optimizer.
Activations go to the next stage, and their gradients come back. In a plain split one stage works at
a time. A pipeline cuts the batch into micro-batches, so that stages work at the same time: first
all forward passes, then all backward passes (GPipe, Huang et al., 2019), or each backward pass as
soon as it can start (1F1B, Narayanan et al., 2019). Losses and weights are those of one device with
the whole batch.

Its twin: `pt_impl/parallel/model_parallel.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps if a model does not fit into one device. Otherwise one
device, or data parallelism, is faster. With p stages and m micro-batches of equal cost, a stage is
idle for (p-1)/(m+p-1) of the time. In a pipeline BatchNorm sees one micro-batch at a time. Dropout
draws other masks.

Run it alone: `python -m tf_impl.parallel.model_parallel` prints one device against two.

Copy with it: `tf_impl/kit/copying.py`, `tf_impl/kit/optimizers.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import tensorflow as tf

from tf_impl.kit.copying import copy_model
from tf_impl.kit.optimizers import (
    check_cut,
    check_model_parallel,
    check_parts,
    check_stage_optimizer,
    copy_optimizer,
    cutting,
)


@dataclass(frozen=True)
class Stage:
    """Layers on a device, copies of those of a model, and the paths of their weights in it."""

    device: str
    model: tf.keras.Model
    names: list[str]

    def arrays(self) -> dict[str, np.ndarray]:
        """The weights by their paths in the whole model."""
        return {
            name: weight.numpy()
            for name, weight in zip(self.names, self.model.weights, strict=True)
        }

    def forward(self, x, wait: list, loss: Callable) -> tuple:
        """Inputs, output, the stage's own losses and tape of a micro-batch, once `wait` is there.

        The last stage's output is its loss.
        """
        with tf.device(self.device), tf.control_dependencies(wait):
            x = tf.nest.map_structure(_entered, x)
            with tf.GradientTape() as tape:
                tape.watch([part for part in tf.nest.flatten(x) if part.dtype.is_floating])
                output = loss(self.model(x, training=True))
                own = [tf.cast(term, tf.float32) for term in self.model.losses]
                return x, output, tf.add_n(own) if own else tf.zeros([]), tape

    def backward(self, x, output, own, tape, upstream, wait: list) -> tuple:
        """Gradients of the inputs and of the variables, None where none is reached."""
        with tf.device(self.device), tf.control_dependencies(wait):
            variables, given = self.model.trainable_variables, tf.nest.flatten(x)
            if upstream is None:
                upstream = tf.nest.map_structure(tf.ones_like, output)
            targets = [*tf.nest.flatten(output), own]
            gradients = tape.gradient(
                targets, [*given, *variables], [*tf.nest.flatten(upstream), tf.ones([])]
            )
            return gradients[: len(given)], gradients[len(given) :]


def apply_model_parallel(model, x, *, cut: str):
    """Copy the model in stages to devices, GPUs or logical CPUs; return the list of stages.

    Args:
        x: inputs of one micro-batch.
        cut: names of the layers that begin a stage, separated by commas; what lies on both sides of
            a cut has one tensor in common.

    Raises ValueError for names that are not there, NotImplementedError for a model that can't be
    cut.
    """
    names = [name.strip() for name in cut.split(",")]
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    devices = [device.name for device in tf.config.list_logical_devices(kind)]
    check_cut(model, names, len(devices))
    stages = []
    for part, device in zip(_cut(model, names), devices, strict=False):
        with tf.device(device):
            copy = copy_model(part, x)
        paths = [getattr(w, "path", w.name).removeprefix(f"{model.name}/") for w in part.weights]
        stages.append(Stage(device, copy, paths))
        x = part(x, training=False)
    return stages


def _cut(model, names: list[str]) -> list[tf.keras.Model]:
    """What lies between the layers of these names, as models that share the model's layers."""
    one = isinstance(model, tf.keras.Sequential)  # whose ends have no structure
    entering, end = (model.inputs[0], model.outputs[0]) if one else (model.input, model.output)
    order, parts = [layer.name for layer in model.layers], []
    for name in [*sorted(names, key=order.index), None]:
        leaving = model.get_layer(name).input if name else end
        if leaving is entering:
            raise ValueError(f"cut: nothing is left for the stage before {name!r}")
        with cutting(names):
            parts.append(tf.keras.Model(entering, leaving))
        entering = leaving
    check_parts(parts, names)
    return parts


def make_train_step(model, optimizer, loss_fn, *, micro_batches: int = 1, schedule: str = "gpipe"):
    """Make `step(x, y, samples) -> loss`: one graph of all stages and micro-batches.

    Args:
        model: the stages of `apply_model_parallel`.
        optimizer: without state yet; each stage gets one like it.
        schedule: "gpipe", or "1f1b", in which a stage keeps the activations of no more
            micro-batches than there are stages.

    Raises NotImplementedError for an optimizer that clips by the norm of all gradients, expects a
    scaled loss, or leaves variables out of its decay by anything but their names.
    """
    check_stage_optimizer(optimizer)
    optimizers = []
    for stage in model:
        with tf.device(stage.device):
            optimizers.append(copy_optimizer(optimizer, stage.model.trainable_variables))

    @tf.function(jit_compile=False)
    def step(x, y, samples):
        parts = zip(*(_split(whole, micro_batches) for whole in (x, y)), strict=True)
        losses, gradients = _passes(model, loss_fn, list(parts), schedule)
        for stage, own, every in zip(model, optimizers, gradients, strict=True):
            with tf.device(stage.device):
                means = [_mean(each) for each in zip(*every, strict=True)]
                pairs = zip(means, stage.model.trainable_variables, strict=True)
                reached = [pair for pair in pairs if pair[0] is not None]
                if reached:  # a stage may have no variables
                    own.apply_gradients(reached)
        return tf.add_n(losses) / micro_batches

    return step


# Variants: each returns stages, an optimizer that is not used, and the step ----------------------


def layer_split(build, x, *, cut: str) -> tuple:
    """A whole batch goes through the stages, one after another: a pipeline of one micro-batch."""
    return pipeline(build, x, cut=cut, micro_batches=1)


def pipeline(build, x, *, cut: str, micro_batches: int, schedule: str = "gpipe") -> tuple:
    """Stages that work on micro-batches side by side, a device each.

    x: inputs of one batch. cut, schedule: as in `apply_model_parallel` and `make_train_step`.

    Raises ValueError for names that are not there and numbers that don't fit, NotImplementedError
    for models and optimizers that can't be split.
    """
    samples = len(tf.nest.flatten(x)[0])
    check_model_parallel(samples, len(cut.split(",")) + 1, micro_batches, schedule)
    model, optimizer, loss_fn = build()
    check_stage_optimizer(optimizer)  # before the model is copied
    micro_batch = tf.nest.map_structure(lambda whole: whole[: samples // micro_batches], x)
    stages = apply_model_parallel(model, micro_batch, cut=cut)
    settings = {"micro_batches": micro_batches, "schedule": schedule}
    return stages, optimizer, make_train_step(stages, optimizer, loss_fn, **settings)


# Parts ------------------------------------------------------------------------------------------


def _passes(stages: list[Stage], loss_fn: Callable, parts: list, schedule: str) -> tuple:
    """All forward and backward passes: losses of micro-batches, gradients of stages by them."""
    kept, gradients = [[] for _ in stages], [[] for _ in stages]
    losses = []

    def forward(number):
        value, labels = parts[number]
        for place, stage in enumerate(stages):
            # 1F1B: a stage that keeps as many as there are stages left sends one back first.
            back = number - len(stages) + place
            wait = _reached(gradients[place][back]) if schedule == "1f1b" and back >= 0 else []
            last = stage is stages[-1]
            kept[place].append(stage.forward(value, wait, partial(_loss, loss_fn, labels, last)))
            value = kept[place][-1][1]
        losses.append(tf.add_n([tf.cast(value, tf.float32), *(own[-1][2] for own in kept)]))

    def backward(number):
        upstream = None
        for place, stage in reversed(list(enumerate(stages))):
            wait = tf.nest.flatten([each[1] for each in kept[place]]) if schedule == "gpipe" else []
            upstream, own = stage.backward(*kept[place][number], upstream, wait)
            gradients[place].append(own)

    for number in range(len(parts)):
        forward(number)
        if schedule == "1f1b":
            backward(number)
    for number in range(len(parts) if schedule == "gpipe" else 0):
        backward(number)
    return losses, gradients


def _entered(tensor):
    """The tensor on a stage's device, with the mask that tf_keras hangs on tensors."""
    own, mask = tf.identity(tensor), getattr(tensor, "_keras_mask", None)
    if mask is not None:
        own._keras_mask = mask
    return own


def _loss(loss_fn: Callable, labels, last: bool, output):
    return loss_fn(output, labels) if last else output


def _reached(gradients: list) -> list:
    return [tf.convert_to_tensor(own) for own in gradients if own is not None]


def _mean(gradients: tuple):
    """Of one variable's gradients, None where none reached it; those of embeddings stay sparse."""
    reached = [own for own in gradients if own is not None]
    if reached and all(isinstance(own, tf.IndexedSlices) for own in reached):
        values = tf.concat([own.values for own in reached], 0) / len(gradients)
        indices = tf.concat([own.indices for own in reached], 0)
        return tf.IndexedSlices(values, indices, reached[0].dense_shape)
    return tf.add_n(_reached(gradients)) / len(gradients) if reached else None


def _split(samples, micro_batches: int) -> list:
    """The micro-batches of a structure of tensors."""
    parts = [tf.split(part, micro_batches) for part in tf.nest.flatten(samples)]
    return [tf.nest.pack_sequence_as(samples, each) for each in zip(*parts, strict=True)]


def main() -> None:
    """Print steps of two devices, a layer split and a pipeline, then of one."""
    from statistics import median

    from shared.parallel import Run
    from tf_impl.kit import replicas

    codes, here = np.random.default_rng(0).integers(0, 98, (80, 64)), __spec__.name
    build, piped = "tf_impl.kit.examples:text_gpt_wide", {"micro_batches": 4, "schedule": "1f1b"}
    print("text-gpt-wide, batch 8: ms a step, last loss")
    for name, make, parts, settings in (
        ("one device", "tf_impl.parallel.data_parallel:one_process", 1, {"replicas": 1}),
        ("layer split", f"{here}:layer_split", 2, {"cut": "block1.ln0"}),
        ("pipeline", f"{here}:pipeline", 2, {"cut": "block1.ln0"} | piped),
    ):
        run = Run(replicas=1, parts=parts, global_batch=8, steps=10)
        result = replicas.launch(make, build, (codes, codes), run, settings)
        print(f"{name:12}{1e3 * median(result.step_s):8.1f}{result.losses[-1]:9.4f}")


if __name__ == "__main__":
    main()
