"""What magnitude pruning refuses: schedules that never end, and models that cannot be masked."""

from collections import Counter
from collections.abc import Iterator

import tensorflow as tf

_KINDS = (
    "Dense",
    "Conv1D",
    "Conv2D",
    "Conv3D",
    "Conv1DTranspose",
    "Conv2DTranspose",
    "Conv3DTranspose",
)


def check_pruning(
    model: tf.keras.Model,
    final_sparsity: float,
    begin_step: int,
    end_step: int,
    frequency: int,
    min_weights: int,
) -> None:
    """Raise ValueError for settings that cannot work, masks, and a model without such layers.

    NotImplementedError for one that cannot be masked; in tf_keras where tfmot cannot follow, too.
    """
    check_schedule(final_sparsity, begin_step, end_step, frequency)
    layers = prunable(model, min_weights)
    if is_tf_keras():
        check_calls(model, layers)


def check_schedule(final_sparsity: float, begin_step: int, end_step: int, frequency: int) -> None:
    """Raise ValueError for settings that cannot work."""
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


def check_global_pruning(
    model: tf.keras.Model,
    final_sparsity: float,
    begin_step: int,
    end_step: int,
    frequency: int,
    min_weights: int,
) -> None:
    """Raise as `check_pruning` does, and NotImplementedError in tf_keras."""
    check_schedule(final_sparsity, begin_step, end_step, frequency)
    if is_tf_keras():
        raise NotImplementedError("tfmot prunes each layer by itself: it has no global magnitude")
    prunable(model, min_weights)


def check_latency_pruning(
    model: tf.keras.Model,
    policy,
    final_sparsity: float,
    begin_step: int,
    end_step: int,
    frequency: int,
) -> list:
    """Return the layers for which XNNPACK has sparse kernels.

    policy: makes tfmot's, which has to be asked only in tf_keras. Raises as `check_pruning`.
    """
    check_schedule(final_sparsity, begin_step, end_step, frequency)
    if not is_tf_keras():
        raise NotImplementedError("tfmot's pruning_policy takes only models of tf_keras")
    policy, layers = policy(), prunable(model, 0)
    try:
        policy.ensure_model_supports_pruning(model)
    except ValueError as error:
        raise NotImplementedError(f"XNNPACK has no sparse kernels for it: {error}") from error
    layers = [layer for layer in layers if policy.allow_pruning(layer)]
    if not layers:
        raise ValueError("the model has no pointwise convolution to prune")
    check_calls(model, layers)
    return layers


def check_step(step: int) -> None:
    """Raise ValueError for a step below 1."""
    if step < 1:
        raise ValueError(f"steps are counted from 1, not from {step!r}")


def check_masked(model: tf.keras.Model) -> list:
    """Return the layers with masks; ValueError where there are none."""
    layers = [layer for layer in model._flatten_layers() if _has_mask(layer)]
    if not layers:
        raise ValueError("the model has no masks: it comes from apply_pruning, and only once")
    return layers


def is_tf_keras() -> bool:
    """Whether `tf.keras` is tf_keras, and not Keras 3."""
    return tf.keras.Model.__module__.partition(".")[0] == "tf_keras"


def prunable(model: tf.keras.Model, min_weights: int) -> list:
    """Return dense and convolution layers of enough weights; raise where they can't be pruned."""
    subclassed = not (isinstance(model, tf.keras.Sequential) or getattr(model, "inputs", None))
    if subclassed and is_tf_keras():
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


def check_copy(found: list, wanted: int) -> None:
    """Raise NotImplementedError where a copy of the model has another number of layers to mask."""
    if len(found) != wanted:
        raise NotImplementedError("Keras's copy of the model has other layers")


def check_calls(model: tf.keras.Model, layers: list) -> None:
    """Raise NotImplementedError where tfmot can't prune the layers."""
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


def _has_mask(layer) -> bool:
    """Whether it is wrapped by tfmot, or its `call` masks."""
    return hasattr(layer, "pruning_obj") or hasattr(vars(layer).get("call"), "mask")


def _own_weights(layer) -> list:
    """A layer's weights, not those of layers within it."""
    kept = getattr(layer, "_trainable_variables", None)  # Keras 3
    return list(kept if kept is not None else layer._trainable_weights)
