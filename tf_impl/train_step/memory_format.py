"""Memory format: where the channels of an image lie in memory.

What it changes: the order of the axes of images, from the input to the last 4-D activation, with
the layers that depend on it. "channels_last" is (n, height, width, channels), TensorFlow's default,
and keeps the channels of one pixel side by side; "channels_first" is (n, channels, height, width).
Weights have one layout for both.

Its twin: `pt_impl/train_step/memory_format.py`.

Where the frameworks differ and why:
- A Keras layer has the format in its configuration (`data_format`, and the `axis` of BatchNorm) and
  builds its variables for it, so a built model cannot be switched: it is rebuilt from its layers'
  configurations, with its weights. That takes a functional or Sequential model of layers whose
  channel axis is known here. A PyTorch model is converted in place, whatever it is.
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
"""

import re
from collections import Counter
from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.eager import context

_AXES = {"channels_last": (0, 3, 1, 2), "channels_first": (0, 2, 3, 1)}  # to the other format
_NAMES = {"channels_last": "NHWC", "channels_first": "NCHW"}


def apply_memory_format(
    model: tf.keras.Model, *, memory_format: str = "channels_last"
) -> tf.keras.Model:
    """Return the model in `memory_format`: itself where it is so, else a copy with its weights.

    memory_format: "channels_last" (TensorFlow's default) or "channels_first". A copy has variables
    of its own, so make the optimizer after it; its 4-D inputs and outputs are in the new format
    (`convert_batch`). Layers keep their names, variables their order and shapes.
    Source: `keras.models.clone_model`.

    Raises ValueError for another format, for a model without layers that have one, and for one with
    both; NotImplementedError for a model that Keras or this function cannot rebuild, and where the
    device has no convolution in the format. The model itself is never changed.
    """
    _check(memory_format)
    layers = model._flatten_layers(include_self=False)  # those inside layers too
    found = {layer.data_format for layer in layers if hasattr(layer, "data_format")}
    if not found:
        raise ValueError("the model has no layer with a data_format: nothing to convert")
    if found == {memory_format}:
        return model
    if len(found) > 1:
        raise ValueError("the model has layers of both formats: build it in one")
    _try_convolution(memory_format)
    functional, axes = _functional(model), _AXES[found.pop()]
    copy = tf.keras.models.clone_model(
        functional,
        input_tensors=tf.nest.map_structure(lambda t: _input(t, axes), functional.input),
        clone_function=lambda layer: _rebuilt(layer, memory_format),
    )
    copy.set_weights(model.get_weights())
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


def convolution_formats(model: tf.keras.Model, call: Callable) -> dict[str, int]:
    """Count the 2-D convolutions of `call()`, forward and backward, by memory format.

    Returns for example {"channels_last": 11}. `call` runs a `tf.function` that is not XLA; what
    counts is the graph that was executed, after grappler rewrote it. The program of XLA has no such
    formats: there nothing is counted.
    """
    call()  # may trace
    runtime = context.context()
    # The runtime hands out a graph when it instantiates it, so the call has to do that again.
    runtime.clear_kernel_cache()
    runtime.enable_graph_collection()
    try:
        call()
        graphs = runtime.export_run_metadata().function_graphs
    finally:
        runtime.disable_graph_collection()
    names = {name: ours for ours, name in _NAMES.items()}
    nodes = (n for graph in graphs for part in graph.partition_graphs for n in part.node)
    formats = (n.attr["data_format"].s.decode() for n in nodes if "Conv2" in n.op)
    return dict(Counter(names.get(name, "other") for name in formats))


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
    layers, config = tf.keras.layers, layer.get_config()
    if any(len(t.shape) == 4 for t in tf.nest.flatten([layer.input, layer.output])):
        pixelwise = (layers.Activation, layers.ReLU, layers.LeakyReLU, layers.Dropout)
        merging = (layers.Add, layers.Subtract, layers.Multiply, layers.Average, layers.Maximum)
        last = memory_format == "channels_last"
        if isinstance(layer, (layers.BatchNormalization, layers.Concatenate)):
            axis = config["axis"][0] if isinstance(config["axis"], list) else config["axis"]
            if axis % 4 != (1 if last else 3):
                raise NotImplementedError(f"{layer.name!r} works on axis {axis}, not on channels")
            config["axis"] = -1 if last else 1
        # A softmax runs over the last axis, and an activation that is not a name over any.
        elif (
            not ("data_format" in config or isinstance(layer, pixelwise + merging))
            or config.get("activation", "linear") in ("softmax", "log_softmax", "sparsemax", "glu")
            or isinstance(config.get("activation"), dict)
            or config.get("noise_shape")
        ):
            raise NotImplementedError(
                f"{type(layer).__name__} {layer.name!r} may depend on the order of the axes: build"
                f" the model for {memory_format}"
            )
    if "data_format" in config:
        config["data_format"] = memory_format
    return type(layer).from_config(config)


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
    from tf_impl.kit import data, models, runtime, training

    runtime.configure(threads=os.cpu_count() or 1, seed=0)
    task = TASKS["digits-cnn"]
    with tempfile.TemporaryDirectory() as folder:
        x, y = datasets.load(datasets.materialise(task.dataset, Path(folder)), "train")
        batches = datasets.first_batches(x, y, task.compute_batch, 10, seed=0)
    batches = data.resident_batches(batches)
    steps, kept, losses, taken = {}, {}, {}, {}
    for name in _AXES:
        model = models.build(task.model, init_weights(task.model, seed=0))
        try:
            kept[name] = apply_memory_format(model, memory_format=name)
        except NotImplementedError as error:
            print(f"{name} is not measured: {error}")
            continue
        optimizer = training.make_optimizer(kept[name], task.recipe)
        steps[name] = training.make_train_step(kept[name], optimizer, training.cross_entropy)
        taken[name] = []
    for _ in range(20):
        for name, step in steps.items():
            start = time.perf_counter()
            for x, y in batches:
                losses[name] = step(convert_batch(x, memory_format=name), y)
            runtime.synchronize()
            taken[name].append((time.perf_counter() - start) / len(batches))
    print(f"digits-cnn, batch {task.compute_batch}: ms a step, ratio, last loss, formats")
    baseline = statistics.median(taken["channels_last"])
    for name, step in steps.items():
        seconds, loss = statistics.median(taken[name]), runtime.to_float(losses[name])
        x, y = batches[0]
        x = convert_batch(x, memory_format=name)
        seen = convolution_formats(kept[name], lambda step=step, x=x, y=y: step(x, y))
        print(f"{name:15}{seconds * 1e3:8.2f}{seconds / baseline:7.2f}{loss:9.4f}  {seen}")


if __name__ == "__main__":
    main()
