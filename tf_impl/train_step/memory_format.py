"""Memory format: where the channels of an image lie in memory.

    model = apply_memory_format(model, memory_format="channels_first")  # before the optimizer
    x = convert_batch(x, memory_format="channels_first")  # each batch

What it changes: the order of the axes of images, from the input to the last 4-D activation.
"channels_last" is (n, height, width, channels), TensorFlow's default. "channels_first" is (n,
channels, height, width). Weights have one layout for both. Sequences (3-D) and volumes (5-D) stay
as they are.

Its twin: `pt_impl/train_step/memory_format.py`, which says where the frameworks differ.

When it helps and when it hurts: channels_first is for models and weights that come in this format,
and for GPUs without tensor cores. On a GPU TensorFlow's layout optimizer (grappler) chooses the
format of convolutions by itself. On a CPU nothing is gained: TensorFlow's own kernels take only
channels_last, oneDNN's take both.

Run it alone: `python -m tf_impl.train_step.memory_format` compares channels_last with
channels_first.

Copy with it: `tf_impl/kit/checks/memory_format.py`, `tf_impl/kit/rebuilding.py`.
"""

import tensorflow as tf

from tf_impl.kit.checks.memory_format import check_memory_format, check_name
from tf_impl.kit.rebuilding import as_functional, check_copy, copy_state, rebuilt

_AXES = {"channels_last": (0, 3, 1, 2), "channels_first": (0, 2, 3, 1)}  # to the other format


def apply_memory_format(
    model: tf.keras.Model, *, memory_format: str = "channels_last"
) -> tf.keras.Model:
    """Return the model in `memory_format`: itself where it is so, else a copy with its weights.

    A copy has its own variables, so make the optimizer after it; its 4-D inputs and outputs are in
    the new format (`convert_batch`). Layers keep their names, variables their order and shapes.
    Source: `keras.models.clone_model`, which with only `set_weights` would lose what
    `Normalization` has adapted.

    Args:
        model: functional or Sequential, where it is in the other format; never changed.
        memory_format: "channels_last" (TensorFlow's default) or "channels_first".

    Returns:
        The model to train.

    Raises:
        ValueError: another format, a model without layers of images, and one with both formats.
        NotImplementedError: a model that Keras or `rebuilt` cannot rebuild, whose copy computes
            something else, and a device that lacks an operator in the format.
    """
    given = check_memory_format(model, memory_format)
    if given == memory_format:
        return model
    functional, axes = as_functional(model), _AXES[given]
    copy = tf.keras.models.clone_model(
        functional,
        input_tensors=tf.nest.map_structure(lambda tensor: _input(tensor, axes), functional.input),
        clone_function=lambda layer: rebuilt(layer, memory_format),
    )
    copy_state(functional, copy)
    check_copy(functional, copy, axes, _AXES[memory_format])
    return copy


def _input(tensor, axes: tuple[int, ...]):
    """An input like `tensor`, with its axes in the other order where it is 4-D."""
    shape = list(tensor.shape)
    if len(shape) == 4:
        shape = [shape[axis] for axis in axes]
    return tf.keras.Input(batch_shape=shape, dtype=tensor.dtype, name=tensor.name)


def convert_batch(x, *, memory_format: str = "channels_last"):
    """Return `x`, whose 4-D tensors are (n, height, width, channels), in `memory_format`.

    x: a tensor, or a tuple, list or dict of tensors; "channels_last" returns it as it is. Raises
    ValueError for another format.
    """
    check_name(memory_format)
    if memory_format == "channels_last":
        return x
    axes = _AXES["channels_last"]
    return tf.nest.map_structure(lambda v: tf.transpose(v, axes) if len(v.shape) == 4 else v, x)


def main() -> None:
    """Print channels_last against channels_first on the digits CNN, where both train."""
    from functools import partial

    from tf_impl.kit import training
    from tf_impl.kit.demo import Demo

    demo, steps = Demo("digits-cnn"), {}
    for name in _AXES:
        model, _, loss_fn = demo.build()
        try:
            model = apply_memory_format(model, memory_format=name)
        except NotImplementedError as error:
            print(f"{name} is not measured: {error}")
            continue
        optimizer = training.make_optimizer(model, demo.task.recipe)
        step = training.make_train_step(model, optimizer, loss_fn)
        convert = partial(convert_batch, memory_format=name)
        steps[name] = lambda x, y, step=step, convert=convert: step(convert(x), y)
    for name, ms in demo.times(steps).items():
        print(f"{name:15}{ms:8.2f} ms a step")


if __name__ == "__main__":
    main()
