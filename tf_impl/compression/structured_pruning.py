"""Structured pruning: whole channels leave a convolutional network, which becomes a smaller one.

What it changes: of each convolution the channels whose filters have the smallest L1 norm go (Li et
al., 2017, "Pruning Filters for Efficient ConvNets", section 3.1), with their BatchNorm entries and
with what the next layer would have read of them. The result is an ordinary dense model with fewer
channels: less arithmetic, less memory, a smaller file, on any hardware and in any runtime. Removing
a share s of all channels leaves about (1 - s)^2 of the multiply-accumulates and weights, since each
layer loses inputs and outputs.

Its twin: `pt_impl/compression/structured_pruning.py`.

Where the frameworks differ and why:
- Which layer feeds which stands in a Keras model's graph, and the smaller model is a clone with
  other layer configurations. Subclassed models have no graph and are refused. A PyTorch model is
  code: there it is traced, and its `forward` stays as it is over smaller modules.
- Flattened images are ordered pixel by pixel here (NHWC), channel by channel there (NCHW).
- TensorFlow Model Optimization has no structured pruning. `torch.nn.utils.prune.ln_structured`
  only masks channels, and saves nothing.

When it helps and when it hurts: it is the kind of pruning that makes a model faster everywhere. It
costs more accuracy than single weights do at the same share, since a channel cannot be picked
apart: train the smaller model on. From a start at random, training the small model from scratch is
as good (Liu et al., 2019, "Rethinking the Value of Network Pruning"). Kernels gain little where
the channels that stay no longer fill vector registers: prefer counts that are multiples of 8 or 16.

Run it alone: `python -m tf_impl.compression.structured_pruning` prints sizes and times of smaller
models.
"""

from inspect import isfunction

import numpy as np
import tensorflow as tf

# What changes no channel by another: element by element, or pixel by pixel within a channel.
_WITHIN_CHANNELS = (
    *("ReLU", "LeakyReLU", "ELU", "Activation", "Dropout", "SpatialDropout2D"),
    *("ZeroPadding2D", "MaxPooling2D", "AveragePooling2D"),
)
_FUNCTIONS = (  # of keras.activations and of tf.nn, element by element
    *("relu", "relu6", "leaky_relu", "elu", "selu", "gelu", "silu", "swish", "mish", "linear"),
    *("sigmoid", "hard_sigmoid", "tanh", "softplus", "softsign", "exponential"),
)
_TAKE_PIXELS_AWAY = ("GlobalAveragePooling2D", "GlobalMaxPooling2D", "Flatten")


def remove_channels(model: tf.keras.Model, *, share: float) -> tf.keras.Model:
    """Return a smaller copy of `model`: `share` of each convolution's channels are gone.

    model: functional or Sequential, channels last, a chain of `Conv2D` with BatchNormalization,
    activations and pooling between them, from the input to the first `Dense`; what comes after
    that is of any kind and stays as it is. `model` itself is left as it was (`Lambda` layers behind
    the chain are shared); make a new optimizer for the copy.
    share: at least 0 and below 1. Of n channels the round(n * (1 - share)) whose whole filters have
    the largest L1 norm stay, at least one, in their order; of equal ones the first.

    Raises ValueError for another share, a model without variables and one without `Conv2D`;
    NotImplementedError, which names the place, where the model is no such chain: subclassed models,
    branches, grouped convolutions, other layers, activations over channels (softmax) or of one's
    own, a layer that runs twice, no `Dense`.
    Source: Li et al. (2017).
    """
    if not 0.0 <= share < 1.0:
        raise ValueError(f"share must be at least 0 and below 1, not {share!r}")
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    if not any(type(layer) is tf.keras.layers.Conv2D for layer in model._flatten_layers()):
        raise ValueError("the model has no 2-D convolution to take channels from")
    changed = {}  # layer -> what changes in its configuration, and its weights
    stay = None  # which channels of what flows here are left; None: all, as in the input
    for layer in _chain(model):
        settings, weights, stay = _shrink(layer, stay, share)
        changed[layer] = settings, weights
    copies = {}

    def copy(layer):
        # Keras 3 hands over operators that are no layers, and cannot make a lambda anew.
        if not isinstance(layer, tf.keras.layers.Layer) or _kind(layer) == "Lambda":
            return layer
        if layer not in copies:
            settings, _ = changed.get(layer, ({}, None))
            config = layer.get_config() | settings
            if "activation" in config and isfunction(getattr(layer, "activation", None)):
                config["activation"] = layer.activation  # others may have its name
            copies[layer] = layer.__class__.from_config(config)
        return copies[layer]

    smaller = tf.keras.models.clone_model(model, clone_function=copy)
    for layer, copied in copies.items():
        _, weights = changed.get(layer, ({}, layer.get_weights()))
        copied.set_weights(weights)
    return smaller


def _chain(model: tf.keras.Model) -> list:
    """The layers with weights, in order, up to the first `Dense`."""
    function = getattr(model, "_functional", model)  # of a Sequential model in Keras 3
    levels = getattr(function, "_nodes_by_depth", None)
    if levels is None:
        raise NotImplementedError("a subclassed model has no graph to follow channels in")
    nodes = [node for depth in sorted(levels, reverse=True) for node in levels[depth]]
    results = {id(tensor) for tensor in tf.nest.flatten(function.outputs)}
    found, images, node = [], True, nodes[0]
    while True:
        previous, node = node, _only_user(node, nodes, results)
        layer = _layer(node)
        kind = _kind(layer)
        if node.parent_nodes != [previous]:
            raise NotImplementedError(f"{layer.name!r} joins branches of the model")
        if images and not _within_channels(layer):
            raise NotImplementedError(
                f"the activation of {layer.name!r} is none that is known to leave channels apart"
            )
        if images and kind in ("Conv2D", "BatchNormalization"):
            if layer in found:
                raise NotImplementedError(f"{layer.name!r} runs more than once")
            _check_layer(layer)
            found.append(layer)
        elif not images and kind == "Dense":
            return [*found, layer]
        elif images and kind in _TAKE_PIXELS_AWAY:
            images = False
        elif kind not in _WITHIN_CHANNELS:
            raise NotImplementedError(f"{layer.name!r} can't be followed from channel to channel")


def _layer(node):
    return node.operation if hasattr(node, "operation") else node.layer  # Keras 3, tf_keras


def _within_channels(layer) -> bool:
    """Whether the layer's activation, if it has one, is a function of single elements."""
    activation, places = getattr(layer, "activation", None), (tf.keras.activations, tf.nn)
    if _kind(activation) in _WITHIN_CHANNELS:  # a layer
        return _within_channels(activation)
    known = [getattr(place, name, None) for place in places for name in _FUNCTIONS]
    return activation is None or activation in known


def _kind(layer) -> str | None:
    """The name of a layer type of Keras; None for a type of one's own, whatever it is called."""
    keras, module = (kind.__module__.partition(".")[0] for kind in (tf.keras.Model, type(layer)))
    return type(layer).__name__ if module == keras else None


def _only_user(node, nodes: list, results: set[int]):
    """The one node that reads what `node` makes."""
    users = [other for other in nodes if node in other.parent_nodes]
    if any(id(tensor) in results for tensor in tf.nest.flatten(node.outputs)):
        raise NotImplementedError(f"{_layer(node).name!r} is an output before any Dense layer")
    if len(users) != 1:
        raise NotImplementedError(f"{_layer(node).name!r} feeds {len(users)} layers, not one")
    return users[0]


def _check_layer(layer) -> None:
    config = layer.get_config()
    if config.get("groups", 1) != 1:
        raise NotImplementedError(f"{layer.name!r} is a grouped convolution")
    if config.get("data_format") == "channels_first" or config.get("axis", -1) not in (-1, 3, [3]):
        raise NotImplementedError(f"{layer.name!r} does not have its channels last")


def _shrink(layer, stay: np.ndarray | None, share: float) -> tuple[dict, list, np.ndarray | None]:
    """What a layer's smaller copy has: settings, weights; and the channels that flow on."""
    weights = layer.get_weights()
    everything = stay is None
    if isinstance(layer, tf.keras.layers.Conv2D):
        kernel, *bias = weights
        largest = _largest(kernel, share)
        kernel = kernel if everything else kernel[:, :, stay]
        smaller = [kernel[..., largest], *(values[largest] for values in bias)]
        return {"filters": int(largest.sum())}, smaller, largest
    if isinstance(layer, tf.keras.layers.BatchNormalization):
        return {}, weights if everything else [values[stay] for values in weights], stay
    kernel, *bias = weights
    if not everything:
        # A flattened pixel is a run of rows, one for each of its channels.
        kernel = kernel[np.tile(stay, len(kernel) // len(stay))]
    return {}, [kernel, *bias], None


def _largest(kernel: np.ndarray, share: float) -> np.ndarray:
    """Mark the filters that stay. Norms are summed in float64, so that twins agree."""
    norms = np.abs(kernel.astype(np.float64)).sum((0, 1, 2))
    count = max(round(len(norms) * (1 - share)), 1)
    marked = np.zeros(len(norms), bool)
    marked[np.argsort(-norms, kind="stable")[:count]] = True
    return marked


def main() -> None:
    """Print the trained digits CNN, and from there on with fewer and fewer channels."""
    import statistics
    import tempfile
    import time
    from pathlib import Path

    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import data, models, runtime, training

    task = TASKS["digits-cnn"]
    recipe, size = task.recipe, task.recipe.accuracy_batch_size
    with tempfile.TemporaryDirectory() as folder:
        folder = datasets.materialise(task.dataset, Path(folder))
        train = data.to_device(*datasets.load(folder, "train"))
        test = data.to_device(*datasets.load(folder, "test"))
    x = test[0][: task.compute_batch]
    weights = init_weights(task.model, seed=0)
    rows = {"trained": 0.0, "0% removed": 0.0, "50%": 0.5, "80%": 0.8, "90%": 0.9}
    print(f"channels    parameters  ms a batch of {len(x)}  accuracy")
    for name, share in rows.items():
        model = remove_channels(models.build(task.model, weights), share=share)
        optimizer = training.make_optimizer(model, recipe)
        step = training.make_train_step(model, optimizer, training.cross_entropy)
        training.fit(step, *train, batch_size=size, epochs=recipe.epochs, seed=0)
        predict, taken = training.make_predict(model), []
        for _ in range(50):
            start = time.perf_counter()
            predict(x)
            runtime.synchronize()
            taken.append((time.perf_counter() - start) * 1e3)
        accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=size)
        count, ms = models.parameter_count(model), statistics.median(taken[10:])
        print(f"{name:10}{count:12}{ms:19.2f}{accuracy:10.1f}")
        if name == "trained":
            weights = models.export_weights(model)


if __name__ == "__main__":
    main()
