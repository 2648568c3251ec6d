"""Magnitude pruning: while a model trains, more and more of its smallest weights become zero.

    model, update = apply_pruning(model, final_sparsity=0.8, begin_step=0, end_step=1000)
    for number, (x, y) in enumerate(batches, 1):  # with an optimizer for the new model
        update(number)  # before the step
    model = finalize_pruning(model)  # after training

What it changes: kernels of dense and convolution layers are multiplied by masks of zeros and ones
in every forward pass. The masks are updated every `frequency` steps. Their share of zeros rises
fast at first and slowly later (Zhu and Gupta, 2017, section 3). The largest weights stay: of each
layer, or of all layers together (`apply_global_pruning`).

Its twin: `pt_impl/compression/pruning.py`, which says where the frameworks differ.

When it helps and when it hurts: files compress better, and sparse kernels can use the zeros
(`sparse_inference.py`). By itself it makes nothing faster or smaller: zeros in a dense tensor are
multiplied like other numbers. Leave steps for recovery after `end_step`. Global magnitude can make
a whole layer zero.

Run it alone: `python -m tf_impl.compression.pruning` compares the dense model with 80% and 95%
zeros.

Copy with it: `tf_impl/kit/checks/pruning.py`, `tf_impl/kit/copying.py`.
"""

from collections.abc import Callable
from inspect import isfunction, signature

import numpy as np
import tensorflow as tf

from tf_impl.kit.checks.pruning import (
    check_copy,
    check_global_pruning,
    check_latency_pruning,
    check_masked,
    check_pruning,
    check_step,
    is_tf_keras,
    prunable,
)
from tf_impl.kit.copying import copy_model, copy_state, retrace


def apply_pruning(
    model: tf.keras.Model,
    *,
    final_sparsity: float,
    begin_step: int,
    end_step: int,
    frequency: int = 100,
    min_weights: int = 0,
) -> tuple[tf.keras.Model, Callable]:
    """Return a copy of `model` that can be pruned, and `update(step)`: each layer by itself.

    Make the optimizer for the copy; `model` stays as it is. Finalize the copy before it is copied,
    exported or saved. tfmot's wrapped layers have "prune_low_magnitude_" before their names.

    Args:
        model: functional or Sequential. Masked are `Dense` and convolutions of these types exactly.
        final_sparsity: share of zeros at `end_step`, at least 0 and below 1; 0 changes nothing. Of
            n weights of a layer, n times the share are masked, rounded.
        begin_step, end_step, frequency: new masks at steps `begin_step`, `begin_step + frequency`,
            ... `end_step`.
        min_weights: layers with fewer stay dense, most of all a first one: they weigh little.

    Returns:
        The copy, and `update(step)`, to be called before each train step with its number, counted
        from 1; it raises ValueError for a step below 1. With `fit`:
        `LambdaCallback(on_train_batch_begin=lambda batch, logs: update(1 + next(steps)))`.

    Raises:
        ValueError, before anything is changed: settings that cannot work, a model without
            variables, one that is pruned already, and one without such layers.
        NotImplementedError: a kernel that two layers share, a subclassed model, and in tf_keras
            Conv1DTranspose, a layer that runs twice in a forward pass, layers within others.

    Source: `tfmot.sparsity.keras.prune_low_magnitude`; schedule: Zhu and Gupta, 2017, "To prune, or
    not to prune".
    """
    check_pruning(model, final_sparsity, begin_step, end_step, frequency, min_weights)
    layers = prunable(model, min_weights)
    if is_tf_keras():
        return _wrap(model, layers, final_sparsity, begin_step, end_step, frequency)
    model, calls = _masked(model, min_weights, len(layers))
    groups = [[call] for call in calls]
    return model, _make_update(groups, final_sparsity, begin_step, end_step, frequency)


def apply_global_pruning(
    model: tf.keras.Model,
    *,
    final_sparsity: float,
    begin_step: int,
    end_step: int,
    frequency: int = 100,
    min_weights: int = 0,
) -> tuple[tf.keras.Model, Callable]:
    """Do what `apply_pruning` does, with one threshold for all layers together.

    Arguments, result and errors are the same; the share of zeros is that of all kernels. Raises
    NotImplementedError in tf_keras: tfmot has no global magnitude.
    """
    check_global_pruning(model, final_sparsity, begin_step, end_step, frequency, min_weights)
    model, calls = _masked(model, min_weights, len(prunable(model, min_weights)))
    return model, _make_update([calls], final_sparsity, begin_step, end_step, frequency)


def apply_latency_pruning(
    model: tf.keras.Model,
    *,
    final_sparsity: float,
    begin_step: int,
    end_step: int,
    frequency: int = 100,
) -> tuple[tf.keras.Model, Callable]:
    """Do what `apply_pruning` does, to the layers that XNNPACK has sparse kernels for; tf_keras.

    Those are pointwise convolutions, in a model that begins with a strided 3x3 convolution, ends in
    a global average and has nothing between that XNNPACK could not run in their layout. On CPUs
    with AVX it runs dense kernels all the same. Arguments, result and errors are those of
    `apply_pruning`. NotImplementedError, with the layer, is for other models, too, and in Keras 3.
    Source: `tfmot.sparsity.keras.PruneForLatencyOnXNNPack`.
    """
    schedule = final_sparsity, begin_step, end_step, frequency

    def make_policy():
        return _tfmot().sparsity.keras.PruneForLatencyOnXNNPack()

    layers = check_latency_pruning(model, make_policy, *schedule)
    return _wrap(model, layers, *schedule)


def finalize_pruning(model: tf.keras.Model) -> tf.keras.Model:
    """Set what is masked to zero and return a model without masks over the same variables.

    Names and types are those of the model that was pruned. Training on would fill the zeros again.
    Raises ValueError for a model without masks.
    """
    layers = check_masked(model)
    if is_tf_keras():
        _callback(model).on_epoch_end(-1)  # the last step has moved pruned weights: mask them again
        return _tfmot().sparsity.keras.strip_pruning(model)
    for layer in layers:
        layer.kernel.assign(layer.kernel * layer.call.mask)
        layer.kernel.constraint = layer.call.constraint
        del layer.call
    retrace(model)
    for traced in ("train_function", "test_function", "predict_function"):  # by `fit`, with masks
        setattr(model, traced, None)
    return model


# In Keras 3 -------------------------------------------------------------------------------------


class _MaskedCall:
    """A layer's `call` over its kernel times a mask: for this call only, its gradient too.

    The kernel has the zeros as well, by a constraint: others may read it without this call.
    """

    def __init__(self, layer):
        self.call = layer.call
        self.kernel = layer.kernel
        self.mask = tf.Variable(tf.ones(layer.kernel.shape, layer.kernel.dtype), trainable=False)
        self.__signature__ = signature(layer.call)
        self.constraint = layer.kernel.constraint
        layer.kernel.constraint = self.constrained

    def constrained(self, kernel):
        kernel = kernel * self.mask
        return kernel if self.constraint is None else self.constraint(kernel) * self.mask

    def __call__(self, *args, **kwargs):
        kernel = tf.convert_to_tensor(self.kernel.value)  # in the layer's compute dtype
        masked = kernel * tf.cast(self.mask, kernel.dtype)
        with tf.keras.StatelessScope(state_mapping=[(self.kernel, masked)]):
            return self.call(*args, **kwargs)


def _masked(model: tf.keras.Model, min_weights: int, count: int) -> tuple:
    """Return a copy whose kernels get masks of ones, and the calls of its layers."""
    model = copy_model(model)
    layers = prunable(model, min_weights)
    check_copy(layers, count)
    for layer in layers:
        layer.call = _MaskedCall(layer)
    retrace(model)
    return model, [layer.call for layer in layers]


def _make_update(
    groups: list[list], final: float, begin: int, end: int, frequency: int
) -> Callable:
    """Make `update(step)`; each group of layers has one threshold."""

    def update(step: int) -> None:
        check_step(step)
        if begin <= step <= end and (step - begin) % frequency == 0:
            sparsity = _sparsity(step, final, begin, end)
            for calls in groups:
                _mask_smallest(calls, sparsity)

    return update


def _sparsity(step: int, final: float, begin: int, end: int) -> np.float32:
    """The share of zeros at `step`, in float32: in float64 some counts would be rounded apart."""
    left = np.float32(1) - np.float32(step - begin) / np.float32(end - begin)
    return np.float32(final) - np.float32(final) * left**3


def _mask_smallest(calls: list[_MaskedCall], sparsity: np.float32) -> None:
    """Mask all but the largest weights; what is masked stays so."""
    dtypes = {call.mask.dtype for call in calls}
    dtype = dtypes.pop() if len(dtypes) == 1 else tf.float64  # holds the values of all others
    magnitudes = [tf.abs(tf.cast(call.kernel.value * call.mask, dtype)) for call in calls]
    every = tf.concat([tf.reshape(magnitude, [-1]) for magnitude in magnitudes], 0)
    kept = _kept(len(every), sparsity)
    threshold = tf.sort(every)[len(every) - kept]  # the smallest that stays
    for call, magnitude in zip(calls, magnitudes, strict=True):
        call.mask.assign(call.mask * tf.cast(magnitude >= threshold, call.mask.dtype))
        call.kernel.assign(call.kernel * call.mask)


def _kept(count: int, sparsity: np.float32) -> int:
    """How many of `count` weights stay: one or more, and no more than there are.

    float32 rounds counts above 2**24, up as well.
    """
    return min(max(int(np.round(np.float32(count) * (np.float32(1) - sparsity))), 1), count)


# In tf_keras ------------------------------------------------------------------------------------


def _wrap(model, layers, final_sparsity, begin_step, end_step, frequency) -> tuple:
    """Copy the model, whose layers tfmot wraps; its schedule goes by the step of `update`."""
    sparsity = _tfmot().sparsity.keras
    schedule = sparsity.PolynomialDecay(
        0.0, final_sparsity, begin_step, end_step, power=3, frequency=frequency
    )
    now, copies = tf.Variable(0, trainable=False, dtype=tf.int64), {}

    def at_step(passes):  # tfmot counts forward passes of training, of which a step may have more
        return schedule(now)

    at_step.get_config = schedule.get_config

    def copy(layer):
        if isinstance(layer, tf.keras.Model):
            return tf.keras.models.clone_model(layer, clone_function=copy)
        config = layer.get_config()
        if "activation" in config and isfunction(getattr(layer, "activation", None)):
            config["activation"] = layer.activation  # others may have its name
        copies[layer] = layer.__class__.from_config(config)
        if layer not in layers:
            return copies[layer]
        # The wrapper calls the layer's `call`, which leaves this regularizer to `__call__`.
        kept = {"activity_regularizer": layer.activity_regularizer}
        return sparsity.prune_low_magnitude(copies[layer], pruning_schedule=at_step, **kept)

    pruned = tf.keras.models.clone_model(model, clone_function=copy)
    copy_state(list(copies.items()))
    _callback(pruned)

    def update(step: int) -> None:
        check_step(step)
        now.assign(step)

    return pruned, update


def _callback(model: tf.keras.Model):
    """Make tfmot's callback for a pruned model: it finds the layers, and counts from 0 if new."""
    callback = _tfmot().sparsity.keras.UpdatePruningStep()
    callback.set_model(model)
    callback.on_train_begin()
    return callback


def _tfmot():
    """Import it: late, since it takes seconds and chooses the Keras of an undecided process."""
    import tensorflow_model_optimization as tfmot

    return tfmot


def main() -> None:
    """Print the digits CNN trained to its plateau, and from there on dense and pruned."""
    import itertools

    from tf_impl.kit import training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    recipe = demo.task.recipe
    trained, optimizer, loss_fn = demo.build()
    demo.fit(training.make_train_step(trained, optimizer, loss_fn), epochs=recipe.epochs)
    print("zeros  ms a step  accuracy")
    for sparsity in (0.0, 0.8, 0.95):
        settings = {"begin_step": 0, "end_step": 200, "frequency": 10, "min_weights": 1000}
        model, update = apply_pruning(trained, final_sparsity=sparsity, **settings)
        step = training.make_train_step(model, training.make_optimizer(model, recipe), loss_fn)
        numbers = itertools.count(1)
        ms = demo.fit(lambda x, y: update(next(numbers)) or step(x, y), epochs=recipe.epochs)  # noqa: B023
        print(f"{sparsity:5.0%}{ms:11.2f}{demo.score(finalize_pruning(model)):10.1f}")


if __name__ == "__main__":
    main()
