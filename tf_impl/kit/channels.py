"""Which channels of a Keras model belong together, as its graph says.

A layer without weights is taken for one that leaves channels apart, if it leaves their number as
it is. So this is a guess: compare the smaller model's outputs.

Twin: `pt_impl/kit/channels.py`.
Where the frameworks differ: Keras models have graphs. A module is code, traced for one example.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

_TRANSPOSED = {"Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose"}
_MAKERS = {"Dense", "Conv1D", "Conv2D", "Conv3D", *_TRANSPOSED}
_DEPTHWISE = {"DepthwiseConv1D", "DepthwiseConv2D"}
_NORMS = {"BatchNormalization", "LayerNormalization", "GroupNormalization", "LayerScale"}


class Use(NamedTuple):
    """Channels along an axis of one of a layer's weights."""

    weight: int  # its place in `layer.weights`; -1 for a layer without
    axis: int
    side: str  # "in": it reads them, "out": it makes them, "both": one by one
    channels: np.ndarray  # their numbers
    runs: int = 1  # into how many equal parts the layer divides them


class Channels:
    """The channels of a functional or Sequential model, by numbers: `uses` of each layer.

    `shapes`: layer -> the channels at the end of a shape that it is told. `stays`: number -> why
    the channel has to stay, "" for an output of the model. `refused`: layer -> why none passes it.

    Raises NotImplementedError for a subclassed model.
    """

    def __init__(self, model: tf.keras.Model) -> None:
        self.uses, self.shapes, self.stays, self.refused, self._same = {}, {}, {}, {}, []
        function = getattr(model, "_functional", model)  # of a Sequential model in Keras 3
        if (levels := getattr(function, "_nodes_by_depth", None)) is None:
            raise NotImplementedError("a subclassed model has no graph to follow channels in")
        found = {}  # tensor -> its channels
        for node in (node for depth in sorted(levels, reverse=True) for node in levels[depth]):
            inputs = [found[id(tensor)] for tensor in _inputs(node)]
            outputs = tf.nest.flatten(node.outputs)
            made = self._through(node, inputs, outputs)
            found |= {id(tensor): row for tensor, row in zip(outputs, made, strict=True)}
        ends = [found[id(tensor)] for tensor in tf.nest.flatten(function.outputs)]
        self._keep(np.concatenate(ends), "")

    def numbers(self, channels) -> list[int]:
        """Return for each channel the number of all that are the same."""
        return [self._find(channel) for channel in channels]

    def gone(self, channels: np.ndarray, removed: set[int]) -> np.ndarray:
        """Return which of the channels are removed, as booleans."""
        return np.array([number in removed for number in self.numbers(channels)], bool)

    def _find(self, channel: int) -> int:
        while self._same[channel] != channel:
            self._same[channel] = channel = self._same[self._same[channel]]
        return channel

    def _new(self, count: int) -> np.ndarray:
        first = len(self._same)
        self._same.extend(range(first, first + count))
        return np.arange(first, first + count)

    def _join(self, first: np.ndarray, second: np.ndarray) -> None:
        """Make two rows of channels the same, one by one."""
        for pair in zip(first, second, strict=True):
            low, high = sorted(map(self._find, pair))
            self._same[high] = low
            if high in self.stays:
                self.stays.setdefault(low, self.stays[high])

    def _keep(self, channels: np.ndarray, why: str) -> np.ndarray:
        self.stays |= {n: self.stays.get(n, why) for n in self.numbers(channels)}
        return channels

    def _use(self, layer, *uses: Use) -> np.ndarray:
        """Note what a layer's weights have, the same in each of its calls; return what it makes."""
        before = self.uses.setdefault(layer, list(uses))
        for old, new in zip(before, uses, strict=True):
            self._join(old.channels, new.channels)
        return before[-1].channels

    def _through(self, node, inputs: list, outputs: list) -> list[np.ndarray]:
        """The channels of what a layer gives; those that it reads stay where it is not known."""
        layer = node.operation if hasattr(node, "operation") else node.layer  # Keras 3, tf_keras
        counts = [[0, *tensor.shape][-1] or 0 for tensor in outputs]  # 0 where it varies
        if not inputs:
            return [self._keep(self._new(n), "they are the model's inputs") for n in counts]
        why = _refusal(layer)
        if why is None and len(outputs) == 1:
            made = self._made(node, layer, inputs, outputs[0], counts[0])
            if made is not None and len(made) == counts[0]:
                return [made]
        why = why or f"{layer.name!r} ({type(layer).__name__}) can't be followed"
        self.refused[layer] = why
        self._keep(np.concatenate(inputs), why)
        return [self._keep(self._new(count), why) for count in counts]

    def _made(self, node, layer, inputs: list, output, count: int) -> np.ndarray | None:
        kind, channels = kind_of(layer), inputs[0]
        if makes_channels(layer):
            reads, makes = (-1, -2) if kind in _TRANSPOSED else (-2, -1)
            made, runs = self._new(count), getattr(layer, "groups", 1)
            bias = [Use(1, 0, "out", made, runs)] * layer.use_bias
            read = Use(0, reads, "in", channels, runs)
            return self._use(layer, read, *bias, Use(0, makes, "out", made, runs))
        if kind == "MultiHeadAttention":
            return self._attend(node, layer, inputs, count)
        if kind == "Embedding":
            return self._use(layer, Use(0, 1, "out", self._new(count)))
        if kind in _DEPTHWISE | _NORMS and getattr(layer, "depth_multiplier", 1) == 1:
            runs = layer.groups if kind == "GroupNormalization" else 1
            axes = [-2 if len(weight.shape) > 1 else 0 for weight in layer.weights]
            uses = [Use(n, axis, "both", channels, runs) for n, axis in enumerate(axes)]
            return self._use(layer, *(uses or [Use(-1, 0, "both", channels, runs)]))
        if kind == "Concatenate" and layer.axis in (-1, len(output.shape) - 1):
            return np.concatenate(inputs)
        if kind in ("Flatten", "Reshape"):
            return self._reshape(layer, channels, _inputs(node)[0].shape, output.shape)
        return None if getattr(layer, "weights", ()) else self._merge(inputs)

    def _merge(self, inputs: list) -> np.ndarray | None:
        """Rows of channels that become one, element by element; a single channel meets all."""
        widest = max(inputs, key=len)
        if any(len(row) not in (1, len(widest)) for row in inputs):
            return None
        for row in inputs:
            if len(row) == len(widest):
                self._join(widest, row)
            else:
                self._keep(row, "a single channel meets several")
        return widest

    def _reshape(self, layer, channels, before, after) -> np.ndarray | None:
        """Flattened pixels repeat the channels; other shapes may leave the last axis as it is."""
        if len(after) == 2 and None not in before[1:-1]:
            return np.tile(channels, int(np.prod(before[1:-1])))
        if after[-1] != before[-1]:
            return None
        self.shapes[layer] = channels
        return channels

    def _attend(self, node, layer, inputs: list, count: int) -> np.ndarray | None:
        """Attention reads its inputs by three kernels and makes channels by a fourth."""
        held = node.arguments if hasattr(node, "arguments") else node
        args = held.args if hasattr(held, "args") else held.call_args
        given = [id(tensor) for tensor in _inputs(node)]
        known = len(set(given)) == 1 or given == [id(v) for v in args if v is not None]
        if not known or len(inputs) > 3:
            return None  # which is the query and which a mask
        (query, value, key), places = (*inputs, inputs[-1])[:3], {}
        for place, weight in enumerate(layer.weights):
            *_, part, name = getattr(weight, "path", weight.name).partition(":")[0].split("/")
            places[part, name] = place
        rows, made = {"query": query, "key": key, "value": value}, self._new(count)
        reads = [Use(places[name, "kernel"], 0, "in", row) for name, row in rows.items()]
        makes = [n for (part, _), n in places.items() if part == "attention_output"]
        return self._use(layer, *reads, *(Use(place, -1, "out", made) for place in makes))


def kind_of(layer) -> str | None:
    """Return the name of a layer type of Keras; None for a user's type with such a name."""
    keras, module = (kind.__module__.partition(".")[0] for kind in (tf.keras.Model, type(layer)))
    return type(layer).__name__ if module == keras else None


def makes_channels(layer) -> bool:
    """Whether it is a convolution or dense layer that mixes the channels that it reads."""
    return kind_of(layer) in _MAKERS


def is_depthwise(layer) -> bool:
    """Whether it is a convolution that filters channels one by one."""
    return kind_of(layer) in _DEPTHWISE


def _refusal(layer) -> str | None:
    """Why no channels can be followed through a layer; None if they can."""
    config = layer.get_config() if isinstance(layer, tf.keras.layers.Layer) else {}
    if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
        return f"{layer.name!r} makes its kernel of others (LoRA, integers)"
    axis = config.get("axis", -1) if kind_of(layer) in _NORMS else -1
    axes, shape = np.ravel(axis), getattr(getattr(layer, "input", None), "shape", ())
    if len(axes) > 1:
        return f"{layer.name!r} normalizes over several axes"
    if config.get("data_format") == "channels_first" or axes[0] not in (-1, len(shape) - 1):
        return f"{layer.name!r} does not have its channels last"
    return None


def _inputs(node) -> list:
    return tf.nest.flatten(getattr(node, "keras_inputs", node.input_tensors))  # tf_keras; Keras 3
