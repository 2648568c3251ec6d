"""Tensor parallelism: parts of the same layers on several devices; with replicas, a hybrid.

    mesh = dtensor.create_mesh([("data", 2), ("model", 2)], devices=devices)
    split = apply_tensor_parallel(model, mesh, plan_pairs(model, pairs="block*.up > block*.down"))
    step = make_train_step(split, optimizer, loss_fn, mesh)

What it changes: each device computes a part of each pair of dense layers. The first of a pair is
split by its outputs, the second by its inputs, and the pair ends with one sum over all devices. The
backward pass has another sum (Megatron-LM, Shoeybi et al., 2019). In the hybrid each of several
replicas is split like this, and gets a part of the batch. Losses and weights are those of one
device with the whole batch.

Its twin: `pt_impl/parallel/tensor_parallel.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps if layers are wide and links are very fast: each pair
costs two sums of activations per step, during which all devices wait. Every device computes the
other layers in full. Dropout draws other masks.
- The optimizer runs one operation at a time, which takes most of a small model's step.

Run it alone: `python -m tf_impl.parallel.tensor_parallel` prints two and four devices against one.

Copy with it: `shared/pairs.py`, `tf_impl/kit/calling.py`, `tf_impl/kit/optimizers.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from shared.pairs import check_pair, match_pairs
from tf_impl.kit.calling import call_arguments
from tf_impl.kit.optimizers import (
    check_dense,
    check_keras,
    check_tensor_parallel,
    copy_optimizer,
    stateless_call,
)


@dataclass(frozen=True)
class Split:
    """A model, and the DTensor variables that replace the model's, in the same order."""

    model: tf.keras.Model
    trained: list
    state: list

    def outputs(self, x) -> tuple:
        """What the model gives for x in training, its state afterwards, and its own losses."""
        given = call_arguments(self.model, x)
        return stateless_call(self.model, self.trained, self.state, given)

    def arrays(self) -> dict[str, np.ndarray]:
        """All weights, whole, by their paths in the model."""
        own = [*self.model.trainable_variables, *self.model.non_trainable_variables]
        laid_out = [*self.trained, *self.state]
        values = {id(v): value for v, value in zip(own, laid_out, strict=True)}
        names = {id(v): v.path.removeprefix(f"{self.model.name}/") for v in self.model.variables}
        return {name: _whole(values[key]) for key, name in names.items()}


def apply_tensor_parallel(model, mesh, plan):
    """Lay the variables of a Keras 3 model out over a mesh of devices; return the model with them.

    plan: name of a layer -> "outputs" or "inputs", by which it is split over the mesh's dimension
    "model", as `plan_pairs` makes it. All else is whole on each device. The model stays as it is.

    Raises NotImplementedError in tf_keras.
    """
    check_keras()
    axes = {}
    for name, split in plan.items():
        layer = model.get_layer(name)
        kernel = [dtensor.UNSHARDED, "model"] if split == "outputs" else ["model"]
        axes[id(layer.kernel)] = kernel
        if layer.use_bias and split == "outputs":
            axes[id(layer.bias)] = ["model"]

    def laid_out(variable):
        value = _placed(variable.value, mesh, *axes.get(id(variable), []))
        return dtensor.DVariable(value, name=variable.path.replace("/", "."))

    trained = [laid_out(variable) for variable in model.trainable_variables]
    return Split(model, trained, [laid_out(own) for own in model.non_trainable_variables])


def plan_pairs(model, *, pairs: str, shards: int = 2):
    """The plan that splits pairs of dense layers: the first by outputs, the second by inputs.

    pairs: "first > second", separated by commas: names of dense layers, or patterns with *, ? and
    [] whose matches are paired in order. What lies between a pair works element by element.

    Raises ValueError for names that are not there and sizes that do not divide, NotImplementedError
    for layers that can't be split.
    """
    known, plan = {layer.name: layer for layer in model.layers}, {}
    for names in match_pairs(pairs, list(known)):
        first, second = (known[name] for name in names)
        for layer in (first, second):
            check_dense(layer)
        check_pair(*names, (first.units, second.kernel.shape[0]), shards)
        plan |= {first.name: "outputs", second.name: "inputs"}
    return plan


def make_train_step(model, optimizer, loss_fn, mesh):
    """Make `step(x, y, samples) -> loss`, which takes the batch of all replicas.

    Args:
        model: of `apply_tensor_parallel`.
        optimizer: without state yet; one like it gets its state in the layout of the variables.

    Raises NotImplementedError for an optimizer that Keras applies to a sparse gradient otherwise,
    for one that expects a scaled loss, for Muon, and for weights with a constraint.
    """
    check_tensor_parallel(model.model, optimizer)
    with dtensor.default_mesh(mesh), tf.variable_creator_scope(_like(model.trained)):
        optimizer = copy_optimizer(optimizer, model.trained, model.model.trainable_variables)

    @tf.function(jit_compile=False)
    def gradients(x, y):
        with tf.GradientTape() as tape:
            output, changed, own_losses = model.outputs(x)
            loss = loss_fn(output, y)
            loss = sum((tf.cast(term, loss.dtype) for term in own_losses), loss)
        each = tape.gradient(loss, model.trained)
        return loss, [None if g is None else tf.convert_to_tensor(g) for g in each], changed

    def step(x, y, samples):
        x, y = (
            tf.nest.map_structure(lambda part: _placed(part, mesh, "data"), own) for own in (x, y)
        )
        graph = gradients.get_concrete_function(x, y)  # traced once for each shape
        # Constants, such as those of Normalization, are on one device until they are placed.
        constants = [_on_mesh(captured, mesh) for captured in graph.captured_inputs]
        graph.set_external_captures(constants)
        loss, found, changed = gradients(x, y)
        # Eagerly: DTensor's graphs let a read of a variable overtake the assignment before it.
        with dtensor.default_mesh(mesh):
            pairs = zip(found, model.trained, strict=True)
            reached = [pair for pair in pairs if pair[0] is not None]
            optimizer.apply_gradients(reached)
            for variable, value in zip(model.state, changed, strict=True):
                variable.assign(value)
        return loss

    return step


# Variants: each returns the split model, an optimizer that is not used, and the step -------------


def tensor_parallel(build, *, pairs: str, shards: int = 2) -> tuple:
    """Pairs of dense layers split over `shards` devices. pairs: as in `plan_pairs`."""
    return _train_on(_devices()[:shards], build, pairs, shards)


def hybrid(build, *, pairs: str, shards: int = 2) -> tuple:
    """Replicas of the model on their parts of each batch, each split over `shards` devices.

    There are as many replicas as `shards` go into all devices. pairs: as in `plan_pairs`.
    """
    return _train_on(_devices(), build, pairs, shards)


# Parts ------------------------------------------------------------------------------------------


def _devices() -> list[str]:
    """The names of all GPUs, or of all logical CPUs."""
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    return [device.name for device in tf.config.list_logical_devices(kind)]


def _train_on(devices: list[str], build, pairs: str, shards: int) -> tuple:
    """What trains on these devices: a row of `shards` for each replica."""
    model, optimizer, loss_fn = build()
    plan = plan_pairs(model, pairs=pairs, shards=shards)
    replicas = len(devices) // shards
    mesh = dtensor.create_mesh(
        [("data", replicas), ("model", shards)], devices=devices[: replicas * shards]
    )
    split = apply_tensor_parallel(model, mesh, plan)
    return split, optimizer, make_train_step(split, optimizer, loss_fn, mesh)


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


def _placed(value, mesh, *axes: str):
    """A tensor with its first axes split over those of the mesh."""
    value = tf.convert_to_tensor(value)
    whole = dtensor.copy_to_mesh(value, dtensor.Layout.replicated(mesh, value.shape.rank))
    rest = [dtensor.UNSHARDED] * (value.shape.rank - len(axes))
    return dtensor.relayout(whole, dtensor.Layout([*axes, *rest], mesh))


def _on_mesh(captured, mesh):
    """What a graph captured; a tensor of one device whole on each."""
    if captured.dtype == tf.resource or dtensor.is_dtensor(captured):
        return captured
    return _placed(captured, mesh)


def _whole(variable) -> np.ndarray:
    layout = dtensor.Layout.replicated(variable.layout.mesh, variable.shape.rank)
    return dtensor.unpack(dtensor.relayout(variable.read_value(), layout))[0].numpy()


def main() -> None:
    """Print steps of four devices, of two with parts of each block, and of one."""
    from statistics import median

    from shared.parallel import Run
    from tf_impl.kit import replicas

    codes, here = np.random.default_rng(0).integers(0, 98, (80, 64)), __spec__.name
    build, pairs = "tf_impl.kit.examples:text_gpt_wide", {"pairs": "block*.up > block*.down"}
    print("text-gpt-wide, batch 8: ms a step, last loss")
    for name, make, count, parts, settings in (
        ("one device", "tf_impl.parallel.data_parallel:one_process", 1, 1, {"replicas": 1}),
        ("tensor parallel", f"{here}:tensor_parallel", 1, 2, pairs),
        ("hybrid", f"{here}:hybrid", 2, 2, pairs),
    ):
        run = Run(replicas=count, parts=parts, global_batch=8, steps=10)
        result = replicas.launch(make, build, (codes, codes), run, settings)
        print(f"{name:16}{1e3 * median(result.step_s):8.1f}{result.losses[-1]:9.4f}")


if __name__ == "__main__":
    main()
