"""Activation checkpointing: less memory for deep models, for one more forward pass.

    model = apply_checkpointing(model, blocks="block*")  # once; the training loop stays as it is

What it changes: for the backward pass, a block keeps only its inputs. Its activations are freed,
and recomputed when the gradient gets there, with the same random numbers. The results are those of
the plain model. With n equal blocks, memory holds n inputs and the activations of one block at most
(Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost").

Its twin: `pt_impl/train_step/activation_checkpointing.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps if activations need more memory than parameters, gradients
and optimizer: deep models, long sequences, large batches. It adds up to a third to a step's
arithmetic. Small blocks save nothing, since each keeps its input. Nor does one block around
everything.
- The executor runs what is ready in its own order, so the peak differs between processes: measure
  it.

Run it alone: `python -m tf_impl.train_step.activation_checkpointing` compares no blocks recomputed,
every other one, and all.

Copy with it: `tf_impl/kit/checks/activation_checkpointing.py`, `tf_impl/kit/submodels.py`.
"""

from collections.abc import Callable
from functools import partial

import tensorflow as tf

from tf_impl.kit.checks import activation_checkpointing as checks
from tf_impl.kit.submodels import with_submodels


def apply_checkpointing(model: tf.keras.Model, *, blocks: str) -> tf.keras.Model:
    """Have the blocks of `model` recomputed in the backward pass.

    A block takes any arguments, one of them floating-point, and returns any tensors. Source:
    `tf.recompute_grad`.

    Args:
        model: with its variables.
        blocks: comma-separated names, or patterns with *, ? and [] ("block*", "stage*.block?"). A
            name is that of a layer at any depth or, in a functional or Sequential model, of a
            group: the layers whose names go on with a dot or underscore (not those that Keras
            numbers, as in dense_1), with what lies between them. What lies within another chosen
            block is recomputed with it. "" chooses none.

    Returns:
        The model to train: with groups a new functional model, not compiled, that shares its layers
        with `model`; without, `model`, changed. Either trains in `fit`, too. Saving keeps no
        recomputation.

    Raises:
        ValueError: before anything is changed, unknown names, blocks that overlap or are recomputed
            already and a model without variables.
        NotImplementedError: before that, tf_keras and SpectralNormalization, which writes to a
            weight; when the model is traced, a block that does so, adds a loss, takes or gives
            complex numbers, draws random numbers without their own Keras seed generator or
            changes variables of others; and a gradient of a block's gradient.
    """
    layers, groups = checks.check_activation_checkpointing(model, blocks, _recomputed)
    if groups:
        model, submodels = with_submodels(model, groups)
        layers = layers + submodels
    for layer in layers:
        layer.call = partial(_recomputed, layer, layer.call)
    return model


def _recomputed(layer: tf.keras.layers.Layer, forward: Callable, /, *args, **kwargs):
    """Run `forward`, and have the backward pass run it again, from the state that it found."""
    inputs = tf.nest.flatten((args, kwargs))
    checks.check_inputs(layer, inputs)
    floating = [index for index, value in enumerate(inputs) if _is_float(value)]
    context = layer._get_call_context()
    modes = {name: context.get_value(name) for name in layer._call_context_args}
    state = layer.non_trainable_variables  # statistics and seeds
    state_before = [tf.identity(variable.value) for variable in state]
    outputs_of_first_run = []

    def arguments(tensors):
        """The block's arguments with these tensors in the places of its floating-point ones."""
        values = list(inputs)
        for index, tensor in zip(floating, tensors, strict=True):
            values[index] = _masked_like(inputs[index], tensor)
        return tf.nest.pack_sequence_as((args, kwargs), values)

    def run_first(tensors):
        args, kwargs = arguments(tensors)
        # Seeds wait for the inputs, or the masks of all blocks would be drawn, and kept, ahead.
        with tf.control_dependencies(tensors), checks.check_first_run(layer):
            outputs = forward(*args, **kwargs)
        checks.check_outputs(layer, outputs)
        outputs_of_first_run.append(outputs)
        return outputs

    def run_again(tensors):
        args, kwargs = arguments(tensors)
        with tf.control_dependencies(tensors):  # which in the second run wait for the gradient
            values = [tf.identity(value) for value in state_before]
        with checks.second_run_scope(state, values) as scope:
            # The whole layer, since autocast and `training` reach what is inside from there.
            outputs = _call_plainly(layer, forward, args, modes | kwargs)
        checks.check_second_run(layer, scope.state_mapping.keys(), state)
        return outputs

    @tf.recompute_grad
    def run(*tensors):
        outputs = run_again(tensors) if outputs_of_first_run else run_first(tensors)
        return [value for value in tf.nest.flatten(outputs) if _is_float(value)]

    results = iter(run(*[inputs[index] for index in floating]))
    outputs = outputs_of_first_run[0]
    flat = [
        _masked_like(value, next(results)) if _is_float(value) else value
        for value in tf.nest.flatten(outputs)
    ]
    return tf.nest.pack_sequence_as(outputs, flat)


def _call_plainly(layer: tf.keras.layers.Layer, forward: Callable, args: tuple, kwargs: dict):
    """Call the layer with its own `call` in place of the one that recomputes."""
    recomputing, layer.call = layer.call, forward
    try:
        return layer(*args, **kwargs)
    finally:
        layer.call = recomputing


def _is_float(value) -> bool:
    return tf.is_tensor(value) and tf.as_dtype(value.dtype).is_floating


def _masked_like(source, tensor: tf.Tensor) -> tf.Tensor:
    """Give `tensor` the Keras mask of what it stands for."""
    if getattr(source, "_keras_mask", None) is not None:
        tensor._keras_mask = source._keras_mask
    return tensor


def main() -> None:
    """Print blocks recomputed against all kept, in order of memory: a process's peak only rises."""
    import resource

    from tf_impl.kit import runtime, training
    from tf_impl.kit.demo import Demo

    demo = Demo("text-gpt-deep")
    print("blocks                   ms a step  last loss  peak resident memory in MiB")
    for blocks in ("block*", "block[02468], block10", ""):
        model, optimizer, loss_fn = demo.build()
        model = apply_checkpointing(model, blocks=blocks)
        step = training.make_train_step(model, optimizer, loss_fn)
        step(*demo.batches[0])  # traces
        ms = demo.times({blocks: step}, rounds=1)[blocks]
        loss = runtime.to_float(step(*demo.batches[0]))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(f"{blocks or 'none':22}{ms:12.0f}{loss:11.4f}{peak:14}")


if __name__ == "__main__":
    main()
