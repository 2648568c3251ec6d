"""Memory format: where the channels of an image lie in memory.

What it changes: the order of the axes of images, from the input to the last 4-D activation, with
the layers that depend on it. "channels_last" is (n, height, width, channels), TensorFlow's default,
and keeps the channels of one pixel side by side; "channels_first" is (n, channels, height, width).
Weights have one layout for both. Sequences (3-D) and volumes (5-D) stay as they are.

Its twin: `pt_impl/train_step/memory_format.py`.

Where the frameworks differ and why:
- A Keras layer has the format in its configuration (`data_format`, and the `axis` of BatchNorm) and
  builds its variables for it, so a built model cannot be switched: it is rebuilt from its layers'
  configurations, with all that they would save, and both are compared. That takes a functional or
  Sequential model of layers whose channel axis is known here. (`clone_model` with `set_weights`
  alone loses what `Normalization` has adapted.) A PyTorch model is converted in place, whatever it
  is.
- A tensor's shape says its format here; in PyTorch its strides do, under one shape.
- The default is channels_last here and channels_first in PyTorch. "channels_last" leaves an
  ordinary Keras model as it is: the row is the baseline again, and PyTorch's like-named row is
  the one that reads images as it does.
- TensorFlow's own CPU kernels take channels_last only, those of oneDNN both. On a GPU its graph
  optimizer (grappler's layout optimizer) chooses the format of convolutions by itself, whatever
  the model says.

When it helps and when it hurts: channels_first is for models and weights that come so, and for
GPUs without tensor cores, where grappler chooses it anyway. On a CPU there is nothing to gain.

Run it alone: `python -m tf_impl.train_step.memory_format` prints channels_last against
channels_first.

Copy with it: nothing.
"""

import re

import tensorflow as tf

_AXES = {"channels_last": (0, 3, 1, 2), "channels_first": (0, 2, 3, 1)}  # to the other format
_NAMES = {"channels_last": "NHWC", "channels_first": "NCHW"}


def apply_memory_format(
    model: tf.keras.Model, *, memory_format: str = "channels_last"
) -> tf.keras.Model:
    """Return the model in `memory_format`: itself where it is so, else a copy with its weights.

    memory_format: "channels_last" (TensorFlow's default) or "channels_first". A copy has variables
    of its own, so make the optimizer after it; its 4-D inputs and outputs are in the new format
    (`convert_batch`). Layers keep their names, variables their order and shapes. Layers of
    sequences and volumes keep their format. Source: `keras.models.clone_model`.

    Raises ValueError for another format, for a model without layers of images, and for one with
    both formats; NotImplementedError for a model that Keras or this function cannot rebuild, whose
    copy computes something else, and where the device lacks an operator in the format. The model
    itself is never changed.
    """
    _check(memory_format)
    layers = model._flatten_layers(include_self=False)  # those inside layers too
    formats = {layer.data_format for layer in layers if _is_of_images(layer)}
    if not formats:
        raise ValueError("the model has no 2-D layer with a data_format: nothing to convert")
    if formats == {memory_format}:
        return model
    if len(formats) > 1:
        raise ValueError("the model has layers of both formats: build it in one")
    _try_convolution(memory_format)
    functional, axes = _functional(model), _AXES[formats.pop()]
    copy = tf.keras.models.clone_model(
        functional,
        input_tensors=tf.nest.map_structure(lambda t: _input(t, axes), functional.input),
        clone_function=lambda layer: _rebuilt(layer, memory_format),
    )
    _copy_state(functional, copy)
    _compare(functional, copy, axes, _AXES[memory_format])
    return copy


def convert_batch(x, *, memory_format: str = "channels_last"):
    """Return `x`, whose 4-D tensors are (n, height, width, channels), in `memory_format`.

    x: a tensor, or a tuple, list or dict of tensors; "channels_last" returns it as it is. Raises
    ValueError for another format.
    """
    _check(memory_format)
    if memory_format == "channels_last":
        return x
    axes = _AXES["channels_last"]
    return tf.nest.map_structure(lambda v: tf.transpose(v, axes) if len(v.shape) == 4 else v, x)


def _check(memory_format: str) -> None:
    if memory_format not in _AXES:
        raise ValueError(
            f"unknown memory format {memory_format!r}: choose one of {', '.join(_AXES)}"
        )


def _try_convolution(memory_format: str) -> None:
    """Train one convolution; raise NotImplementedError with TensorFlow's reason if it cannot."""
    x, kernel = tf.ones((2, 4, 4, 4)), tf.ones((3, 3, 4, 4))
    try:
        with tf.GradientTape() as tape:
            tape.watch((x, kernel))
            y = tf.nn.conv2d(x, kernel, 1, "VALID", data_format=_NAMES[memory_format])
        tape.gradient(y, (x, kernel))
    except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
        # Without the names of functions and nodes that TensorFlow puts around its words.
        reason = re.sub(r"\{\{.*?\}\} | \[Op:.*", "", error.message, flags=re.DOTALL)
        raise NotImplementedError(f"no training in {memory_format} here: {reason}") from error


def _is_of_images(layer) -> bool:
    """Whether the layer has a data_format, and 4-D inputs where it says what it gets."""
    if not hasattr(layer, "data_format"):
        return False
    known = _tensors(layer)  # none inside subclassed models and layers
    return _has_images(known) if known else "2D" in type(layer).__name__


def _tensors(layer) -> list:
    """What goes into the calls of a layer in functional models, and what comes out."""
    nodes = layer._inbound_nodes
    return tf.nest.flatten([[node.input_tensors, node.outputs] for node in nodes])


def _has_images(tensors: list) -> bool:
    return any(len(tensor.shape) == 4 for tensor in tensors)


def _functional(model: tf.keras.Model) -> tf.keras.Model:
    """A plain functional model over the layers of `model`, which clone_model takes in any case."""
    try:
        if isinstance(model, tf.keras.Sequential):
            return tf.keras.Model(model.inputs[0], model.outputs[0], name=model.name)
        return tf.keras.Model(model.input, model.output, name=model.name)
    except (AttributeError, ValueError) as error:  # there are none
        raise NotImplementedError(
            "Keras rebuilds functional and Sequential models only: build a subclassed model with"
            " the data_format that it is to have"
        ) from error


def _input(tensor, axes: tuple[int, ...]):
    """An input like `tensor`, with its axes in the other order where it is 4-D."""
    shape = list(tensor.shape)
    if len(shape) == 4:
        shape = [shape[axis] for axis in axes]
    return tf.keras.Input(batch_shape=shape, dtype=tensor.dtype, name=tensor.name)


def _rebuilt(layer, memory_format: str):
    """A new layer of the configuration of `layer`, with its channel axis in `memory_format`."""
    images = _has_images(_tensors(layer))
    if type(layer) is tf.keras.layers.Lambda and not images:
        return layer  # it has no state, and Keras 3 cannot make a lambda anew
    config = layer.get_config()
    if not images:
        return type(layer).from_config(config)
    if "axis" in config:
        config["axis"] = _channel_axis(layer, config["axis"], memory_format)
    elif tuple(config.get("target_shape", ())[:2]) == (1, 1):
        # One value a channel becomes a map of one pixel, as in squeeze and excitation.
        _, _, channels = config["target_shape"]
        config["target_shape"] = (channels, 1, 1) if memory_format == "channels_first" else None
    if _depends_on_order(layer, config):
        raise NotImplementedError(
            f"{type(layer).__name__} {layer.name!r} may depend on the order of the axes: build"
            f" the model for {memory_format}"
        )
    if "data_format" in config:
        config["data_format"] = memory_format
    return type(layer).from_config(config)


def _channel_axis(layer, axis, memory_format: str) -> int:
    """The axis of channels in the new format, for a layer that worked on it in the old one."""
    (axis,) = axis if isinstance(axis, list | tuple) and len(axis) == 1 else [axis]
    old = 1 if memory_format == "channels_last" else 3
    if not isinstance(axis, int) or axis % 4 != old:
        raise NotImplementedError(f"{layer.name!r} works on axis {axis}, not on channels")
    return 4 - old if memory_format == "channels_first" else -1


def _depends_on_order(layer, config: dict) -> bool:
    """Whether it may compute something else on maps whose channels are on another axis."""
    layers = tf.keras.layers
    pixelwise = (layers.Activation, layers.ReLU, layers.LeakyReLU, layers.Dropout)
    merging = (layers.Add, layers.Subtract, layers.Multiply, layers.Average, layers.Maximum)
    moved = (layers.BatchNormalization, layers.Concatenate, layers.Normalization)
    moved += (layers.LayerNormalization, layers.GroupNormalization)
    if isinstance(layer, layers.Rescaling):
        return not all(isinstance(config[key], int | float) for key in ("scale", "offset"))
    if isinstance(layer, layers.Reshape):
        return config["target_shape"] is None or config["target_shape"][1:] != (1, 1)
    known = "data_format" in config or isinstance(layer, pixelwise + merging + moved)
    if not known and not _is_arithmetic(layer):
        return True
    # A softmax runs over the last axis, and an activation that is not a name over any.
    activation = config.get("activation", "linear")
    of_one_axis = activation in ("softmax", "log_softmax", "sparsemax", "glu")
    return of_one_axis or isinstance(activation, dict) or bool(config.get("noise_shape"))


def _is_arithmetic(operation) -> bool:
    """Whether it stands for x + 3 and the like, in Keras 3: of maps, or of a map and a number."""
    names = ("Add", "Subtract", "Multiply", "Divide", "TrueDivide", "Maximum", "Minimum")
    if type(operation).__name__ not in names or isinstance(operation, tf.keras.layers.Layer):
        return False
    given = [(n.arguments.args, n.arguments.kwargs) for n in operation._inbound_nodes]
    return all(
        len(v.shape) == 4 if tf.keras.backend.is_keras_tensor(v) else isinstance(v, int | float)
        for v in tf.nest.flatten(given)
    )


def _copy_state(model, copy) -> None:
    """Hand over what each layer would save, and the seeds of Keras 3, which it would not."""
    for layer, twin in zip(model._flatten_layers(), copy._flatten_layers(), strict=True):
        store = {}
        layer.save_own_variables(store)
        if store:
            twin.load_own_variables(store)
            getattr(twin, "finalize_state", int)()  # what `Normalization` computes from them
        seeds = (getattr(part, "_seed_generators", ()) for part in (layer, twin))
        for ours, theirs in zip(*seeds, strict=True):
            theirs.state.assign(ours.state)


def _compare(model, copy, to_new: tuple, to_old: tuple) -> None:
    """Raise NotImplementedError where the copy does not compute what the model does."""

    def turned(tree, axes):
        return tf.nest.map_structure(
            lambda v: tf.transpose(v, axes) if len(v.shape) == 4 else v, tree
        )

    def example(tensor):
        shape = [2, *(size or 64 for size in tensor.shape[1:])]
        return tf.cast(tf.random.stateless_uniform(shape, seed=(0, 1)), tensor.dtype)

    try:
        x = tf.nest.map_structure(example, model.input)
        of_model = _outputs(model, x)
        of_copy = turned(_outputs(copy, turned(x, to_new)), to_old)
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise NotImplementedError(f"the copy can't be compared with the model: {said}") from error
    for ours, theirs in zip(tf.nest.flatten(of_model), tf.nest.flatten(of_copy), strict=True):
        ours, theirs = tf.cast(ours, tf.float64), tf.cast(theirs, tf.float64)
        apart = tf.reduce_max(tf.abs(ours - theirs)) / tf.reduce_max(tf.abs(ours))
        if not apart < 1e-4 and tf.reduce_any(ours != theirs):
            raise NotImplementedError(f"the copy's output differs by a relative {apart:.1e}")


def _outputs(model, x):
    return model(x, training=False)


def main() -> None:
    """Print channels_last against channels_first on the digits CNN, in interleaved samples."""
    import os
    import statistics
    import tempfile
    import time
    from pathlib import Path

    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import data, models, operators, runtime, training

    runtime.configure(threads=os.cpu_count() or 1, seed=0)
    task = TASKS["digits-cnn"]
    with tempfile.TemporaryDirectory() as folder:
        x, y = datasets.load(datasets.materialise(task.dataset, Path(folder)), "train")
        batches = datasets.first_batches(x, y, task.compute_batch, 10, seed=0)
    batches = data.resident_batches(batches)
    steps, kept, losses, times = {}, {}, {}, {}
    for name in _AXES:
        model = models.build(task.model, init_weights(task.model, seed=0))
        try:
            kept[name] = apply_memory_format(model, memory_format=name)
        except NotImplementedError as error:
            print(f"{name} is not measured: {error}")
            continue
        optimizer = training.make_optimizer(kept[name], task.recipe)
        steps[name] = training.make_train_step(kept[name], optimizer, training.cross_entropy)
        times[name] = []
    for _ in range(20):
        for name, step in steps.items():
            start = time.perf_counter()
            for x, y in batches:
                losses[name] = step(convert_batch(x, memory_format=name), y)
            runtime.synchronize()
            times[name].append((time.perf_counter() - start) / len(batches))
    print(f"digits-cnn, batch {task.compute_batch}: ms a step, ratio, last loss, formats")
    baseline = statistics.median(times["channels_last"])
    for name, step in steps.items():
        seconds, loss = statistics.median(times[name]), runtime.to_float(losses[name])
        x, y = batches[0]
        x = convert_batch(x, memory_format=name)
        seen = operators.convolution_formats(kept[name], lambda step=step, x=x, y=y: step(x, y))
        print(f"{name:15}{seconds * 1e3:8.2f}{seconds / baseline:7.2f}{loss:9.4f}  {seen}")


if __name__ == "__main__":
    main()
