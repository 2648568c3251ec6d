"""Keras layers made anew for images whose channels are on another axis, with all that they hold.

A built layer cannot be switched: it is made of its configuration. `keras.models.clone_model` calls
what makes it, and wires the new layers as the old ones were.
"""

import tensorflow as tf


def as_functional(model: tf.keras.Model) -> tf.keras.Model:
    """Return a plain functional model over the layers of `model`, which clone_model takes.

    Raises NotImplementedError for a subclassed model.
    """
    try:
        if isinstance(model, tf.keras.Sequential):
            return tf.keras.Model(model.inputs[0], model.outputs[0], name=model.name)
        return tf.keras.Model(model.input, model.output, name=model.name)
    except (AttributeError, ValueError) as error:  # there are none
        raise NotImplementedError(
            "Keras rebuilds functional and Sequential models only: build a subclassed model with"
            " the data_format that it is to have"
        ) from error


def rebuilt(layer, memory_format: str):
    """Return a new layer of the configuration of `layer`, with its channel axis in `memory_format`.

    Raises NotImplementedError for a layer of images that may compute something else then.
    """
    images = has_images(tensors_of(layer))
    if type(layer) is tf.keras.layers.Lambda and not images:
        return layer  # it has no state, and Keras 3 cannot make a lambda anew
    config = layer.get_config()
    if not images:
        return type(layer).from_config(config)
    if any(len(tensor.shape) == 5 for tensor in tensors_of(layer)):
        raise NotImplementedError(
            f"{type(layer).__name__} {layer.name!r} makes images of 5-D sequences or volumes, which"
            f" stay as they are: build the model for {memory_format}"
        )
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


def copy_state(model, copy) -> None:
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


def check_copy(model, copy, to_new: tuple, to_old: tuple) -> None:
    """Raise NotImplementedError where the copy does not compute what the model does.

    to_new, to_old: the orders of axes that turn images to the copy's format, and back.
    """

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


def tensors_of(layer) -> list:
    """Return what goes into the calls of a layer in functional models, and what comes out."""
    nodes = layer._inbound_nodes
    return tf.nest.flatten([[node.input_tensors, node.outputs] for node in nodes])


def has_images(tensors: list) -> bool:
    """Return whether one of them has four axes."""
    return any(len(tensor.shape) == 4 for tensor in tensors)


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


def _outputs(model, x):
    return model(x, training=False)
