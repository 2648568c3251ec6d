"""What weight quantization refuses: models without layers to round, and weights that do not fit."""

import warnings

import numpy as np
import tensorflow as tf

from tf_impl.kit.copying import distance, output_arrays

MOST_APART = 0.5  # relative L2: outputs over rounded weights to the model's


def check_weight_quantization(model: tf.keras.Model, inputs) -> None:
    """Refuse a model that keeps all its weights; warn of dense layers that keep theirs."""
    if not hasattr(tf.keras, "quantizers"):
        raise NotImplementedError("tf_keras has no quantization of weights: use Keras 3")
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    layers = model._flatten_layers()
    recurrent = [layer for layer in layers if isinstance(layer, tf.keras.layers.RNN)]
    if names := [layer.name for layer in recurrent if layer.stateful]:
        raise NotImplementedError(
            f"{', '.join(names)} would lose the state that it keeps from call to call: make the"
            " model with stateful=False"
        )
    _check_inputs(model, inputs)
    dense = [layer for layer in layers if type(layer) is tf.keras.layers.Dense]
    wrappers = [one for one in layers if isinstance(one, tf.keras.layers.TimeDistributed)]
    left = [wrapper.layer for wrapper in wrappers if wrapper.layer in dense]
    if len(left) == len(dense):
        where = " outside of TimeDistributed" if left else ""
        raise NotImplementedError(f"the model has no dense layer{where}")
    if left:
        warnings.warn(
            f"left in float32: {', '.join(layer.name for layer in left)}: TimeDistributed calls "
            "them past Keras's quantization; Dense by itself does the same",
            stacklevel=3,
        )


def _check_inputs(model: tf.keras.Model, inputs) -> None:
    tensors = tf.nest.flatten(inputs)
    if not all(isinstance(part, tf.Tensor) and part.shape.rank for part in tensors):
        kinds = ", ".join(type(part).__name__ for part in tensors)
        raise ValueError(f"inputs must be tensors with samples along an axis, not {kinds}")
    counts = [part.shape[0] for part in tensors]
    if not counts or min(counts) == 0 or len(set(counts)) > 1:
        raise ValueError(f"inputs must have samples, as many in each tensor, not {counts}")
    if not all(np.isfinite(part).all() for part in tensors if part.dtype.is_floating):
        raise ValueError("inputs hold values that are not finite")
    try:
        output_arrays(model, tf.nest.map_structure(lambda part: part[:1], inputs))
    except Exception as error:
        given = ", ".join(f"{part.dtype.name} {list(part.shape[1:])}" for part in tensors)
        line = " ".join(str(error).split())[:300]
        raise ValueError(f"the model takes no samples of {given}: {line}") from error


def check_rounded(rounded: tf.keras.Model, model: tf.keras.Model, inputs) -> None:
    """Refuse a copy with rounded weights that does not compute, or computes something else."""
    try:
        found = output_arrays(rounded, inputs)
    except Exception as error:  # of a layer that reads another one's kernel
        line = " ".join(str(error).split())[:300]
        raise NotImplementedError(f"Keras's weights do not compute in it: {line}") from error
    off = max(map(distance, found, output_arrays(model, inputs)))
    if not off <= MOST_APART:
        raise RuntimeError(f"outputs of the quantized model are {off:.2%} off the model's")
