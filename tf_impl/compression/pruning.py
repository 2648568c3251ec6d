"""Magnitude pruning: the smallest weights become zero, more and more of them, while a model trains.

What it changes: the kernel of each dense and convolution layer is multiplied with a mask of zeros
and ones in every forward pass. From `begin_step` to `end_step`, every `frequency` steps, the masks
are made anew with the share of zeros that the cubic schedule of Zhu and Gupta (2017, "To prune, or
not to prune", section 3) gives for step t:

    final_sparsity * (1 - (1 - (t - begin_step) / (end_step - begin_step)) ** 3)

It rises fast at first, while there is much to spare, and slowly at the end. What stays are the
weights of largest magnitude: of each layer (`apply_pruning`) or of all layers together
(`apply_global_pruning`, in Keras 3). Biases, normalisation, embeddings, depthwise
convolutions, recurrent and attention layers stay dense. `finalize_pruning` takes the masks away.

Its twin: `pt_impl/compression/pruning.py`.

Where the frameworks differ and why:
- Keras 3 has no pruning of its own, and TensorFlow Model Optimization (tfmot) was made for the
  Keras before it: there are two routes here. In Keras 3 the layers' `call` reads masked kernels, in
  any model that can be copied: the gradient is masked too and a pruned weight stays pruned, as in
  PyTorch. In tf_keras tfmot wraps layers of functional and Sequential models, also within one
  another, but no layers within layers.
- tfmot masks the variable itself in the forward pass, and its gradient reaches pruned weights: each
  step moves them, the next one sets them to zero again, and where one step took it beyond the
  threshold such a weight returns when the masks are next made.
- tfmot makes the masks within the forward passes of training, in the graph, and counts these as
  steps; here `update` states the step, which may have several. In Keras 3 and in PyTorch `update`
  makes the masks. Predictions mask as well, which costs time until the model is finalized.
- `apply_latency_pruning` has no twin: tfmot's `pruning_policy` chooses layers by what a runtime has
  sparse kernels for, and PyTorch's pruning knows no runtime.
- tfmot has no global magnitude. Its wrapped layers have other names ("prune_low_magnitude_" before
  their own) until the end.
- Both round alike (float32, half to even, one weight at least stays) and keep all that tie.

When it helps and when it hurts: it makes a file that compresses better, and it is the first half of
sparse computing. Alone it makes nothing faster and nothing smaller: zeros in a dense tensor are
multiplied like other numbers, and training costs a little more, for masks. It hurts accuracy beyond
what a model can spare, and where training ends with the schedule: leave steps for recovery.

Run it alone: `python -m tf_impl.compression.pruning` prints the dense model against 80% and 95% of
zeros.

Copy with it: `tf_impl/kit/copying.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from inspect import isfunction, signature

import numpy as np
import tensorflow as tf

from tf_impl.kit import copying

_KINDS = (
    "Dense",
    "Conv1D",
    "Conv2D",
    "Conv3D",
    "Conv1DTranspose",
    "Conv2DTranspose",
    "Conv3DTranspose",
)


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

    Make the optimizer for the copy; `model` stays as it is. Call `update(step)` before each train
    step with its number, counted from 1. The training steps `begin_step`, `begin_step + frequency`,
    ... `end_step` begin with new masks. Of n weights of a layer, n times the share of zeros are
    masked, rounded. Finalize the copy before it is copied, exported or saved. With `fit`:
    `LambdaCallback(on_train_batch_begin=lambda batch, logs: update(1 + next(steps)))`.

    final_sparsity: share of zeros at `end_step`, at least 0 and below 1; 0 changes nothing.
    min_weights: layers with fewer stay dense, most of all a first one: they weigh little.

    Raises ValueError, before anything is changed, for settings that cannot work, a model without
    variables, one that is pruned already and one without such layers; NotImplementedError for a
    kernel that two layers share, a model that Keras can't copy (a subclassed one), and in tf_keras
    where tfmot can't follow: a subclassed model, Conv1DTranspose, a layer that runs twice in a
    forward pass, dense or convolution layers within others; ValueError by `update` below step 1.
    Source: `tfmot.sparsity.keras.prune_low_magnitude`; schedule: Zhu and Gupta (2017).
    """
    _check_settings(final_sparsity, begin_step, end_step, frequency)
    if not _is_tf_keras():
        return _mask(model, False, final_sparsity, begin_step, end_step, frequency, min_weights)
    layers = _prunable(model, min_weights)
    _check_calls(model, layers)
    return _wrap(model, layers, final_sparsity, begin_step, end_step, frequency)


def _wrap(model, layers, final_sparsity, begin_step, end_step, frequency) -> tuple:
    """Copy the model, whose layers tfmot wraps; its schedule goes by the step of `update`."""
    sparsity = _tfmot().sparsity.keras
    schedule = sparsity.PolynomialDecay(
        0.0, final_sparsity, begin_step, end_step, power=3, frequency=frequency
    )
    now, copies = tf.Variable(0, trainable=False, dtype=tf.int64), {}

    def at_step(passes):
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
        return sparsity.prune_low_magnitude(copies[layer], pruning_schedule=at_step)

    pruned = tf.keras.models.clone_model(model, clone_function=copy)
    copying.copy_state(list(copies.items()))
    _callback(pruned)

    def update(step: int) -> None:
        if step < 1:
            raise ValueError(f"steps are counted from 1, not from {step!r}")
        now.assign(step)

    return pruned, update


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
    _check_settings(final_sparsity, begin_step, end_step, frequency)
    if _is_tf_keras():
        raise NotImplementedError("tfmot prunes each layer by itself: it has no global magnitude")
    return _mask(model, True, final_sparsity, begin_step, end_step, frequency, min_weights)


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
    _check_settings(final_sparsity, begin_step, end_step, frequency)
    if not _is_tf_keras():
        raise NotImplementedError("tfmot's pruning_policy takes models of tf_keras alone")
    policy, layers = _tfmot().sparsity.keras.PruneForLatencyOnXNNPack(), _prunable(model, 0)
    try:
        policy.ensure_model_supports_pruning(model)
    except ValueError as error:
        raise NotImplementedError(f"XNNPACK has no sparse kernels for it: {error}") from error
    layers = [layer for layer in layers if policy.allow_pruning(layer)]
    if not layers:
        raise ValueError("the model has no pointwise convolution to prune")
    _check_calls(model, layers)
    return _wrap(model, layers, final_sparsity, begin_step, end_step, frequency)


def finalize_pruning(model: tf.keras.Model) -> tf.keras.Model:
    """Set what is masked to zero and return a model without masks over the same variables.

    Names and types are those of the model that was pruned. Training on would fill the zeros again.
    Raises ValueError for a model without masks.
    """
    layers = [layer for layer in model._flatten_layers() if _has_mask(layer)]
    if not layers:
        raise ValueError("the model has no masks: it comes from apply_pruning, and only once")
    if _is_tf_keras():
        _callback(model).on_epoch_end(-1)  # the last step has moved pruned weights: mask them again
        return _tfmot().sparsity.keras.strip_pruning(model)
    for layer in layers:
        layer.kernel.assign(layer.kernel * layer.call.mask)
        layer.kernel.constraint = layer.call.constraint
        del layer.call
    copying.retrace(model)
    for traced in ("train_function", "test_function", "predict_function"):  # by `fit`, with masks
        setattr(model, traced, None)
    return model


class _MaskedCall:
    """A layer's `call` over its kernel times a mask: for this call alone, its gradient too.

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


def _mask(model, together, final_sparsity, begin_step, end_step, frequency, min_weights) -> tuple:
    """Copy the model, whose kernels get masks of ones; `together`: one threshold for all."""
    count = len(_prunable(model, min_weights))
    model = copying.copy_model(model)
    layers = _prunable(model, min_weights)
    if len(layers) != count:
        raise NotImplementedError("Keras's copy of the model has other layers")
    for layer in layers:
        layer.call = _MaskedCall(layer)
    copying.retrace(model)
    calls = [layer.call for layer in layers]
    groups = [calls] if together else [[call] for call in calls]

    def update(step: int) -> None:
        if step < 1:
            raise ValueError(f"steps are counted from 1, not from {step!r}")
        if begin_step <= step <= end_step and (step - begin_step) % frequency == 0:
            sparsity = _sparsity(step, final_sparsity, begin_step, end_step)
            for group in groups:
                _mask_smallest(group, sparsity)

    return model, update


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


def _check_settings(final_sparsity, begin_step, end_step, frequency) -> None:
    if not 0.0 <= final_sparsity < 1.0:
        raise ValueError(f"final_sparsity must be at least 0 and below 1, not {final_sparsity!r}")
    if not 0 <= begin_step < end_step:
        raise ValueError(
            f"begin_step must be at least 0 and below end_step, not {begin_step!r} and {end_step!r}"
        )
    if frequency < 1:
        raise ValueError(f"frequency must be at least 1, not {frequency!r}")
    if (end_step - begin_step) % frequency:
        raise ValueError(
            f"no update would fall on end_step, where final_sparsity is reached: {end_step} - "
            f"{begin_step} must be a multiple of the frequency, {frequency}"
        )


def _is_tf_keras() -> bool:
    return tf.keras.Model.__module__.partition(".")[0] == "tf_keras"


def _has_mask(layer) -> bool:
    """Whether it is wrapped by tfmot, or its `call` masks."""
    return hasattr(layer, "pruning_obj") or isinstance(vars(layer).get("call"), _MaskedCall)


def _prunable(model: tf.keras.Model, min_weights: int) -> list:
    """The dense and convolution layers of enough weights; raise where they can't be pruned."""
    subclassed = not (isinstance(model, tf.keras.Sequential) or getattr(model, "inputs", None))
    if subclassed and _is_tf_keras():
        raise NotImplementedError("tfmot prunes functional and Sequential models, not subclassed")
    if subclassed:
        raise NotImplementedError(
            "a subclassed model says nothing of its inputs: Keras can't copy it"
        )
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    if any(_has_mask(layer) for layer in model._flatten_layers()):
        raise ValueError("the model has pruning masks already: finalize it first")
    kinds = [getattr(tf.keras.layers, kind) for kind in _KINDS]
    # Of these types exactly, as in tfmot: a subclass may use its kernel in another way.
    known = [layer for layer in model._flatten_layers() if type(layer) in kinds]
    found = [layer for layer in known if tf.size(layer.kernel) >= min_weights]
    if not found:
        least = f" of {min_weights} weights or more" if min_weights else ""
        raise ValueError(f"the model has no dense or convolution layer{least} to prune")
    owners = Counter(id(w) for layer in model._flatten_layers() for w in _own_weights(layer))
    for layer in found:
        if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
            raise NotImplementedError(f"{layer.name!r} makes its kernel of others (LoRA, integers)")
        if owners[id(layer.kernel)] > 1:
            raise NotImplementedError(f"the kernel of {layer.name!r} has two owners")
    return found


def _own_weights(layer) -> list:
    """A layer's weights, not those of layers within it."""
    kept = getattr(layer, "_trainable_variables", None)  # Keras 3
    return list(kept if kept is not None else layer._trainable_weights)


def _check_calls(model: tf.keras.Model, layers: list) -> None:
    """Raise where tfmot can't prune the layers."""
    calls = Counter(_calls(model))
    for layer in layers:
        if type(layer) is tf.keras.layers.Conv1DTranspose:
            raise NotImplementedError(f"tfmot does not know Conv1DTranspose, as {layer.name!r} is")
        if calls[layer] != 1:
            where = "runs more than once" if calls[layer] else "is within another layer"
            raise NotImplementedError(
                f"tfmot prunes what a functional model runs once a step, but {layer.name!r} {where}"
            )


def _calls(model: tf.keras.Model) -> Iterator:
    """The layers that a forward pass calls, with those of models within the model."""
    for level in model._nodes_by_depth.values():
        for node in level:
            yield node.layer
            if getattr(node.layer, "_is_graph_network", False):
                yield from _calls(node.layer)


def main() -> None:
    """Print the digits CNN trained to its plateau, and from there on dense and pruned."""
    import itertools
    import statistics
    import tempfile
    import time
    from pathlib import Path

    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import data, models, runtime, training

    task = TASKS["digits-cnn"]
    recipe = task.recipe
    with tempfile.TemporaryDirectory() as folder:
        folder = datasets.materialise(task.dataset, Path(folder))
        train = data.to_device(*datasets.load(folder, "train"))
        test = data.to_device(*datasets.load(folder, "test"))
    weights = init_weights(task.model, seed=0)
    print("                ms a step  accuracy  zeros in all kernels")
    for name, sparsity in (("trained", 0), ("dense", 0), ("80% zeros", 0.8), ("95% zeros", 0.95)):
        model, update = models.build(task.model, weights), None
        if sparsity:
            settings = {"begin_step": 0, "end_step": 420, "frequency": 10, "min_weights": 1000}
            model, update = apply_pruning(model, final_sparsity=sparsity, **settings)
        optimizer = training.make_optimizer(model, recipe)
        step = training.make_train_step(model, optimizer, training.cross_entropy)
        times, numbers, size = [], itertools.count(1), recipe.accuracy_batch_size
        for epoch in range(recipe.epochs):
            for pair in data.epoch_batches(*train, batch_size=size, seed=0, epoch=epoch):
                start = time.perf_counter()
                if update:
                    update(next(numbers))
                step(*pair)
                runtime.synchronize()
                times.append(time.perf_counter() - start)
        if update:
            model = finalize_pruning(model)
        predict = training.make_predict(model)
        accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=size)
        kernels = [v for k, v in models.export_weights(model).items() if k.endswith("kernel")]
        zeros = sum((k == 0).sum() for k in kernels) / sum(k.size for k in kernels)
        ms = statistics.fmean(times[10:]) * 1e3  # not the trace of the first step
        print(f"{name:14}{ms:11.2f}{accuracy:10.1f}{zeros:22.3f}")
        if name == "trained":
            weights = models.export_weights(model)


if __name__ == "__main__":
    main()
