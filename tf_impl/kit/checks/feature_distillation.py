"""What feature distillation refuses: layers that a graph lacks, and features that differ."""

import math

import tensorflow as tf


def check_feature_distillation(taught: tf.keras.Model, weight: float) -> None:
    """Raise ValueError for a weight below 0, and for a student without trainable variables."""
    if not 0 <= weight < math.inf:
        raise ValueError(f"weight must be at least 0 and finite, not {weight!r}")
    regressor = taught.get_layer("regressor")
    if len(taught.trainable_variables) == len(regressor.trainable_variables):
        raise ValueError("the student has no trainable variables: there is nothing to teach")


def layer_in_graph(model: tf.keras.Model, name: str) -> tuple:
    """Return (the model's inputs, its output, what the layer gives), symbolic tensors of its graph.

    A layer's own `output` is that of its first call, which may have been in another model.

    Raises ValueError for a model without variables, and for a layer that is not there or gives no
    single tensor, once; NotImplementedError for a subclassed model.
    """
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    if getattr(model, "inputs", None) is None:
        raise NotImplementedError(
            f"{type(model).__name__} is subclassed and has no graph in which to find {name!r}: "
            "Keras gives a layer's output in functional and Sequential models only"
        )
    layers = {layer.name: layer for layer in model.layers}
    if name not in layers:
        raise ValueError(f"the model has no layer {name!r}; it has {', '.join(layers)}")
    graph = getattr(model, "_functional", model)  # of a Sequential model in Keras 3
    nodes = [node for level in graph._nodes_by_depth.values() for node in level]
    calls = [tf.nest.flatten(node.outputs) for node in nodes if _layer(node) is layers[name]]
    if len(calls) != 1:
        raise ValueError(f"{name!r} runs {len(calls)} times: it must give one tensor, once")
    if len(calls[0]) != 1:
        raise ValueError(f"{name!r} gives {len(calls[0])} tensors: it must give one")
    return graph.input, graph.output, calls[0][0]


def check_features(ours: list, theirs: list, student_layer: str, teacher_layer: str) -> None:
    """Raise ValueError for features whose shapes differ in more than the channels."""
    if len(ours) not in (2, 3, 4) or ours[:-1] != theirs[:-1]:
        raise ValueError(
            f"the student's {student_layer!r} gives {ours}, the teacher's {teacher_layer!r} "
            f"{theirs}: name layers that differ only in channels"
        )


def _layer(node):
    return node.operation if hasattr(node, "operation") else node.layer  # Keras 3, tf_keras
