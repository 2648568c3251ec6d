"""Structured pruning: whole channels leave a network, which becomes a smaller one.

What it changes: of the channels that each convolution and dense layer makes, those whose filters
have the smallest L1 norm go (Li et al., 2017, "Pruning Filters for Efficient ConvNets", section
3.1), with their normalisation entries and with what later layers would have read of them. Where
layers make the same channels (they are added, multiplied, or filtered one by one), they lose the
same ones: those are a dependency group (Fang et al., 2023, "DepGraph: Towards Any Structural
Pruning"). The result is an ordinary dense model with fewer channels: less arithmetic, less memory,
a smaller file, on any hardware and in any runtime. Removing a share s of all channels leaves about
(1 - s)^2 of the multiply-accumulates and weights, since each layer loses inputs and outputs.

Its twin: `pt_impl/compression/structured_pruning.py`.

Where the frameworks differ and why:
- Which layer feeds which stands in a Keras model's graph, and channels are followed through it
  here; the smaller model is a clone with other layer configurations. Subclassed models have no
  graph and are refused. A PyTorch model is code: there `torch_pruning` finds the groups in what
  autograd records, and `forward` stays as it is over smaller modules.
- `MultiHeadAttention` has a width of its own for what it reads, its heads and what it gives, so it
  loses what it reads and gives. `nn.MultiheadAttention` has one for all, and stays whole.
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

Copy with it: `tf_impl/kit/copying.py`.
"""

import warnings
from functools import partial
from inspect import isfunction
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_impl.kit import copying

_BY_PIXEL = (
    "SpatialDropout",
    "ZeroPadding",
    "Cropping",
    "UpSampling",
    "MaxPooling",
    "AveragePooling",
    "GlobalMaxPooling",
    "GlobalAveragePooling",
)
# What changes no channel by another: element by element, or pixel by pixel within a channel.
_WITHIN_CHANNELS = {
    "InputLayer",
    "ReLU",
    "LeakyReLU",
    "ELU",
    "Activation",
    "Identity",
    "ActivityRegularization",
    "Dropout",
    "AlphaDropout",
    "GaussianDropout",
    "GaussianNoise",
    "StochasticDepth",
    *(f"{name}{axes}D" for axes in (1, 2, 3) for name in _BY_PIXEL),
}
_MERGES = {"Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum"}
_OPERATORS = {  # of keras.ops, and of TensorFlow in models of tf_keras, element by element
    "Add",
    "Subtract",
    "Multiply",
    "Divide",
    "TrueDivide",
    "Power",
    "Maximum",
    "Minimum",
    "Negative",
    "Abs",
    "Absolute",
    "Square",
    "Sqrt",
    "Exp",
    "Relu",
    "Relu6",
    "Silu",
    "Gelu",
    "Sigmoid",
    "HardSigmoid",
    "HardSilu",
    "Tanh",
    "Softplus",
    "LeakyRelu",
    "Elu",
    "Mish",
    "Identity",
    "Cast",
    "__operators__.add",
    "__operators__.sub",
    "__operators__.mul",
    "math.add",
    "math.subtract",
    "math.multiply",
    "math.divide",
    "math.truediv",
    "nn.relu",
    "nn.relu6",
    "nn.silu",
    "nn.gelu",
    "math.sigmoid",
    "math.tanh",
    "nn.leaky_relu",
    "nn.elu",
}
_FUNCTIONS = (  # of keras.activations and of tf.nn, element by element
    "relu",
    "relu6",
    "leaky_relu",
    "elu",
    "selu",
    "gelu",
    "silu",
    "swish",
    "mish",
    "linear",
    "sigmoid",
    "hard_sigmoid",
    "tanh",
    "softplus",
    "softsign",
    "exponential",
    "hard_swish",
    "hard_silu",
)
_CONVOLUTIONS = {"Conv1D", "Conv2D", "Conv3D"}
_TRANSPOSED = {"Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose"}
_DEPTHWISE = {"DepthwiseConv1D", "DepthwiseConv2D"}
_NORMS = {"BatchNormalization", "LayerNormalization", "GroupNormalization", "LayerScale"}


def remove_channels(model: tf.keras.Model, x, *, share: float) -> tf.keras.Model:
    """Return a smaller copy of `model`: `share` of the channels of its layers are gone.

    Cut are convolutions and `Dense`, but those whose channels are the model's outputs. What else
    can't be followed from channel to channel stays whole, and a warning names it. `model` itself
    is left as it was (`Lambda` layers are shared); make a new optimizer for the copy.
    x: example input, a structure as `fit` hands it over. model: functional or Sequential.
    share: at least 0 and below 1. Of n channels the round(n * (1 - share)) whose filters have the
    largest L1 norm stay, at least one, in their order; of equal ones the first. Norms of layers
    that make the same channels are added up; within groups (of a convolution, of
    `GroupNormalization`) each loses as many.

    The copy's outputs are compared with those of the original in which nothing reads what was
    removed. Raises ValueError for another share, a model without variables and one without such
    layers; NotImplementedError, with the reason, for a subclassed model, where no layer can be cut
    and where the outputs would differ.
    Source: Li et al. (2017); Fang et al. (2023).
    """
    if not 0.0 <= share < 1.0:
        raise ValueError(f"share must be at least 0 and below 1, not {share!r}")
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    for layer in model._flatten_layers():  # of tfmot, or a `call` over a mask, which no copy has
        if hasattr(layer, "pruning_obj") or hasattr(vars(layer).get("call"), "mask"):
            raise ValueError("the model has pruning masks: finalize it first")
    makers = [layer for layer in model._flatten_layers() if _makes_channels(layer)]
    if not makers:
        raise ValueError("the model has no convolution or dense layer to take channels from")
    flow = _follow(model)
    groups, whole = _groups(flow, makers)
    if not groups:
        reason = _line(whole) or "all of them are its outputs"
        raise NotImplementedError(f"no layer of the model can lose channels: {reason}")
    removed = set().union(*(_weakest(flow, *group, share) for group in groups))
    smaller = _copy(model, flow, removed)
    _compare(smaller, _unread(model, flow, removed) if removed else model, x)
    if whole:
        warnings.warn(f"left whole: {_line(whole)}", stacklevel=2)
    return smaller


# What flows through the model ------------------------------------------------------------------


class _Use(NamedTuple):
    """Channels along an axis of a layer's weight; a layer may have several."""

    weight: int  # its number in `layer.weights`
    axis: int
    channels: np.ndarray  # a number for each, the same for the same channel anywhere
    side: str  # "in": it is read, "out": it is made, "both": it is changed by itself
    groups: int = 1


class _Flow:
    """The channels of a model: which are one and the same, which have to stay, who uses them."""

    def __init__(self):
        self.same, self.stays, self.uses, self.settings, self.refused = [], {}, {}, {}, {}

    def new(self, count: int) -> np.ndarray:
        """Numbers for channels that nothing else has."""
        first = len(self.same)
        self.same.extend(range(first, first + count))
        return np.arange(first, first + count)

    def find(self, channel: int) -> int:
        """The number that stands for all that are the same channel."""
        while self.same[channel] != channel:
            self.same[channel] = channel = self.same[self.same[channel]]
        return channel

    def roots(self, channels) -> list[int]:
        """`find` for many."""
        return [self.find(channel) for channel in channels]

    def join(self, first: np.ndarray, second: np.ndarray) -> None:
        """Make two rows of channels the same, one by one."""
        for one, other in zip(self.roots(first), self.roots(second), strict=True):
            one, other = self.find(one), self.find(other)
            low, high = min(one, other), max(one, other)
            self.same[high] = low
            if high in self.stays:
                self.stays.setdefault(low, self.stays[high])

    def keep(self, channels: np.ndarray, reason: str) -> np.ndarray:
        """Mark channels that must stay; the first reason counts."""
        for channel in self.roots(channels):
            self.stays.setdefault(channel, reason)
        return channels

    def use(self, layer, *uses: _Use) -> None:
        """Note what a layer's weights have; of a layer that runs again these are the same."""
        before = self.uses.setdefault(layer, list(uses))
        for old, new in zip(before, uses, strict=True):
            self.join(old.channels, new.channels)


def _follow(model: tf.keras.Model) -> _Flow:
    """Number the channels of all that the model computes, from the input to the outputs."""
    function = getattr(model, "_functional", model)  # of a Sequential model in Keras 3
    levels = getattr(function, "_nodes_by_depth", None)
    if levels is None:
        raise NotImplementedError("a subclassed model has no graph to follow channels in")
    flow, found = _Flow(), {}
    for node in (node for depth in sorted(levels, reverse=True) for node in levels[depth]):
        layer, outputs = _layer(node), tf.nest.flatten(node.outputs)
        inputs = [found[id(tensor)] for tensor in _inputs(node)]
        if not inputs:
            made = [flow.keep(flow.new(_count(t)), "they are the model's inputs") for t in outputs]
        else:
            made = _through(flow, node, layer, inputs, outputs)
        found |= {id(tensor): channels for tensor, channels in zip(outputs, made, strict=True)}
    for tensor in tf.nest.flatten(function.outputs):
        flow.keep(found[id(tensor)], "")
    return flow


def _layer(node):
    return node.operation if hasattr(node, "operation") else node.layer  # Keras 3, tf_keras


def _inputs(node) -> list:
    inputs = node.input_tensors if hasattr(node, "operation") else node.keras_inputs
    return tf.nest.flatten(inputs)


def _count(tensor) -> int:
    """The length of the last axis; none where it varies."""
    return (tensor.shape[-1] or 0) if len(tensor.shape) else 0


def _kind(layer) -> str | None:
    """The name of a layer type of Keras; None for a type of one's own, whatever it is called."""
    keras, module = (kind.__module__.partition(".")[0] for kind in (tf.keras.Model, type(layer)))
    return type(layer).__name__ if module == keras else None


def _makes_channels(layer) -> bool:
    return _kind(layer) in {"Dense", *_CONVOLUTIONS, *_TRANSPOSED}


def _through(flow: _Flow, node, layer, inputs: list, outputs: list) -> list[np.ndarray]:
    """The channels of what a layer gives; what is not known keeps all that it reads and gives."""
    kind, channels = _kind(layer), inputs[0]
    reason = _refusal(layer, kind)
    if reason is None and len(outputs) == 1:
        made, count = None, _count(outputs[0])
        if _makes_channels(layer):
            made = _make(flow, layer, kind, channels, count)
        elif kind in _DEPTHWISE | _NORMS:
            made = _change(flow, layer, kind, channels)
        elif kind in _MERGES or _is_operator(node, layer):
            made = _merge(flow, inputs)
        elif kind == "Concatenate" and layer.axis in (-1, len(outputs[0].shape) - 1):
            made = np.concatenate(inputs)
        elif kind == "Concatenate":
            made = _merge(flow, inputs)
        elif kind in ("Flatten", "Reshape"):
            made = _reshape(flow, layer, kind, channels, _inputs(node)[0].shape, outputs[0].shape)
        elif kind == "Embedding":
            made = flow.new(count)
            flow.use(layer, _Use(0, 1, made, "out"))
            made = flow.uses[layer][0].channels
        elif kind == "MultiHeadAttention":
            made = _attend(flow, node, layer, inputs, count)
        elif kind in _WITHIN_CHANNELS:
            made = channels
        if made is not None and len(made) == count:
            return [made]
    reason = reason or f"{layer.name!r} ({type(layer).__name__}) can't be followed"
    flow.refused[layer] = reason
    for row in inputs:
        flow.keep(row, reason)
    return [flow.keep(flow.new(_count(tensor)), reason) for tensor in outputs]


def _refusal(layer, kind: str | None) -> str | None:
    """Why a layer of a known kind can't be followed; None if it can."""
    config = layer.get_config() if isinstance(layer, tf.keras.layers.Layer) else {}
    axis = config.get("axis", -1)
    if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
        return f"{layer.name!r} makes its kernel of others (LoRA, integers)"
    if config.get("data_format") == "channels_first":
        return f"{layer.name!r} does not have its channels last"
    if kind in _NORMS and not isinstance(axis, int) and len(axis) != 1:
        return f"{layer.name!r} normalizes over several axes"
    if kind in _NORMS and (axis if isinstance(axis, int) else axis[0]) not in _last(layer):
        return f"{layer.name!r} does not have its channels last"
    if not _within_channels(layer):
        return f"the activation of {layer.name!r} is none that is known to leave channels apart"
    return None


def _last(layer) -> tuple:
    """The numbers of a layer's last axis."""
    shape = getattr(getattr(layer, "input", None), "shape", None)
    return (-1,) if shape is None else (-1, len(shape) - 1)


def _within_channels(layer) -> bool:
    """Whether the layer's activation, if it has one, is a function of single elements."""
    activation, places = getattr(layer, "activation", None), (tf.keras.activations, tf.nn)
    if _kind(activation) in _WITHIN_CHANNELS:  # a layer
        return _within_channels(activation)
    known = [getattr(place, name, None) for place in places for name in _FUNCTIONS]
    return activation is None or activation in known


def _is_operator(node, layer) -> bool:
    """Whether it is an operator on single elements, of tensors and plain numbers alone."""
    if isinstance(layer, tf.keras.layers.Layer) and _kind(layer) != "TFOpLambda":
        return False
    name = layer.name.removeprefix("tf.") if _kind(layer) == "TFOpLambda" else _kind(layer)
    held = node.arguments if hasattr(node, "arguments") else node
    values = tf.nest.flatten(
        [held.args, held.kwargs] if hasattr(held, "args") else [held.call_args, held.call_kwargs]
    )
    inputs = {id(tensor) for tensor in _inputs(node)}
    plain = all(id(v) in inputs or isinstance(v, (int, float, str, type(None))) for v in values)
    return plain and (name or "").rstrip("_0123456789") in _OPERATORS | {"nn.relu6", "Relu6"}


def _make(flow: _Flow, layer, kind: str, channels: np.ndarray, count: int) -> np.ndarray:
    """A layer that mixes what it reads and makes channels of its own."""
    made, groups = flow.new(count), getattr(layer, "groups", 1)
    reads, makes = (-1, -2) if kind in _TRANSPOSED else (-2, -1)
    flow.use(
        layer,
        _Use(0, makes, made, "out", groups),
        _Use(0, reads, channels, "in", groups),
        *[_Use(1, 0, made, "out", groups)] * layer.use_bias,
    )
    return flow.uses[layer][0].channels


def _change(flow: _Flow, layer, kind: str, channels: np.ndarray) -> np.ndarray | None:
    """A layer that changes channels one by one, with weights for each."""
    if kind in _DEPTHWISE and layer.depth_multiplier != 1:
        return None
    if kind == "LayerNormalization" and len(layer.weights) and layer.weights[0].shape.rank != 1:
        return None
    groups = getattr(layer, "groups", 1) if kind == "GroupNormalization" else 1
    axes = [-2 if kind in _DEPTHWISE and len(w.shape) > 1 else 0 for w in layer.weights]
    uses = [_Use(n, axis, channels, "both", groups) for n, axis in enumerate(axes)]
    flow.use(layer, *(uses or [_Use(-1, 0, channels, "both", groups)]))
    return channels


def _merge(flow: _Flow, inputs: list) -> np.ndarray | None:
    """Rows of channels that become one, element by element; a single channel meets all."""
    widest = max(inputs, key=len)
    for channels in inputs:
        if len(channels) == len(widest):
            flow.join(widest, channels)
        elif len(channels) == 1:
            flow.keep(channels, "a single channel meets several")
        else:
            return None
    return widest


def _reshape(flow, layer, kind, channels, before, after) -> np.ndarray | None:
    """Flattened pixels repeat the channels; other shapes may leave the last axis alone."""
    pixels = before[1:-1]
    if len(after) == 2 and None not in pixels:
        return np.tile(channels, int(np.prod(pixels)))
    if kind == "Reshape" and after[-1] == before[-1]:
        flow.settings[layer] = "target_shape", channels
        return channels
    return None


def _attend(flow: _Flow, node, layer, inputs: list, count: int) -> np.ndarray | None:
    """Attention reads its inputs by three kernels and makes channels by a fourth."""
    held = node.arguments if hasattr(node, "arguments") else node
    args = held.args if hasattr(held, "args") else held.call_args
    given = [id(tensor) for tensor in _inputs(node)]
    if given != [id(v) for v in args if v is not None] and len(set(given)) > 1:
        return None  # which is the query and which a mask is not known
    query, value, key = (*inputs, inputs[-1])[:3] if len(inputs) < 4 else (None,) * 3
    numbers = {}
    for number, weight in enumerate(layer.weights):
        *_, part, name = getattr(weight, "path", weight.name).partition(":")[0].split("/")
        numbers[part, name] = number
    made = flow.new(count)
    reads = {"query": query, "key": key, "value": value}
    uses = [_Use(numbers[name, "kernel"], 0, row, "in") for name, row in reads.items()]
    makes = [(n, -1) for part, n in numbers.items() if part[0] == "attention_output"]
    flow.use(layer, *uses, *(_Use(number, axis, made, "out") for number, axis in makes))
    return flow.uses[layer][-1].channels


# Which channels go ------------------------------------------------------------------------------


def _groups(flow: _Flow, makers: list) -> tuple[list[tuple], dict[str, str]]:
    """The groups that can be cut, as (channels, runs); and layers that can't: name -> why."""
    found, whole, seen = [], {}, set()
    made = {maker: flow.roots(_made(flow, maker)) for maker in makers}
    # The widest first: what a narrower one makes may be a part of it.
    for maker in sorted(makers, key=lambda maker: -len(made[maker])):
        channels = made[maker]
        if maker in seen or not channels:
            if not channels:
                within = "it is within another layer"
                whole[maker.name] = flow.refused.get(maker, within)
            continue
        seen |= {other for other in makers if not set(channels).isdisjoint(made[other])}
        reasons = [flow.stays[channel] for channel in channels if channel in flow.stays]
        runs = _runs(flow, channels)
        if not any(reasons) and runs is None:
            reasons = ["groups of channels do not fit together"]
        if not reasons:
            found.append((channels, runs))
        elif any(reasons):
            whole[maker.name] = next(filter(None, reasons))
    return found, whole


def _made(flow: _Flow, maker) -> np.ndarray:
    return flow.uses[maker][0].channels if maker in flow.uses else np.zeros(0, int)


def _runs(flow: _Flow, channels: list[int]) -> int | None:
    """Into how many equal runs grouped layers divide the channels; None if they do not."""
    runs = 1
    if len(set(channels)) < len(channels):
        return None
    for use in (use for uses in flow.uses.values() for use in uses if use.groups > 1):
        here = flow.roots(use.channels)
        if not set(here).isdisjoint(channels):
            if here != channels or max(use.groups, runs) % min(use.groups, runs):
                return None
            runs = max(use.groups, runs)
    return runs


def _weakest(flow: _Flow, channels: list[int], runs: int, share: float) -> set[int]:
    """The channels that go. Norms are summed in float64, so that twins agree."""
    norms, places = np.zeros(len(channels)), {c: place for place, c in enumerate(channels)}
    for layer, uses in flow.uses.items():
        depthwise = _kind(layer) in _DEPTHWISE
        use = uses[0]
        if not (depthwise or _makes_channels(layer)):
            continue
        here = [places.get(channel) for channel in flow.roots(use.channels)]
        if all(place is None for place in here):
            continue
        kernel = np.abs(np.asarray(layer.get_weights()[0], np.float64))
        sums = np.moveaxis(kernel, use.axis, 0).reshape(len(here), -1).sum(1)
        for place, norm in zip(here, sums, strict=True):
            if place is not None:
                norms[place] += norm
    count = max(round(len(channels) // runs * (1 - share)), 1)
    order = np.argsort(-norms.reshape(runs, -1), axis=1, kind="stable")[:, count:]
    weakest = (order + np.arange(runs)[:, None] * (len(channels) // runs)).ravel()
    return {channels[place] for place in weakest}


# The smaller model ------------------------------------------------------------------------------


def _copy(model: tf.keras.Model, flow: _Flow, removed: set[int]) -> tf.keras.Model:
    """A clone whose layers have what is left of their weights, and all other state."""
    copies = {}

    def copy(layer):
        # Keras 3 hands over operators that are no layers, and cannot make a lambda anew.
        if not isinstance(layer, tf.keras.layers.Layer) or _kind(layer) == "Lambda":
            return layer
        if layer not in copies:
            config = layer.get_config() | _settings(layer, flow, removed)
            if "activation" in config and isfunction(getattr(layer, "activation", None)):
                config["activation"] = layer.activation  # others may have its name
            copies[layer] = layer.__class__.from_config(config)
        return copies[layer]

    try:
        smaller = tf.keras.models.clone_model(model, clone_function=copy)
    except (TypeError, AttributeError) as error:
        raise NotImplementedError(f"Keras can't make the model anew: {error}") from error
    for layer, copied in copies.items():
        if layer in flow.uses:
            copied.set_weights(_cut(layer, flow, removed))
            copied.trainable = layer.trainable
            for own, other in zip(layer.variables, copied.variables, strict=True):
                if other.trainable and not own.trainable:  # frozen by itself, in Keras 3
                    other.trainable = False
    copying.copy_state([pair for pair in copies.items() if pair[0] not in flow.uses])
    return smaller


def _stays(flow: _Flow, channels: np.ndarray, removed: set[int]) -> np.ndarray:
    return np.array([channel not in removed for channel in flow.roots(channels)], bool)


def _settings(layer, flow: _Flow, removed: set[int]) -> dict:
    """What the configuration of a layer says of its channels."""
    kind, settings = _kind(layer), {}
    if layer in flow.settings:
        name, channels = flow.settings[layer]
        target = layer.get_config()[name]
        left = int(_stays(flow, channels, removed).sum())
        settings[name] = (*target[:-1], target[-1] if target[-1] == -1 else left)
    if layer not in flow.uses:
        return settings
    made = next((u.channels for u in flow.uses[layer][::-1] if u.side in ("out", "both")), ())
    left = int(_stays(flow, made, removed).sum())
    if kind == "MultiHeadAttention":
        settings = {"output_shape": (left,)}
        shapes = ("query_shape", "key_shape", "value_shape")  # tf_keras would build with them
        return settings | {name: None for name in shapes if name in layer.get_config()}
    names = {"Dense": "units", "Embedding": "output_dim", "LayerScale": "projection_dim"}
    name = names.get(kind, "filters")
    return {name: left} if name in layer.get_config() else {}


def _cut(layer, flow: _Flow, removed: set[int]) -> list[np.ndarray]:
    """A layer's weights without the channels."""
    weights = layer.get_weights()
    for use in flow.uses[layer]:
        stays = _stays(flow, use.channels, removed)
        if use.weight < 0 or stays.all():
            continue
        kernel = weights[use.weight]
        if use.side == "in" and use.groups > 1:
            # Each group of filters reads its own run of channels.
            parts = np.split(kernel, use.groups, axis=-1)
            runs = np.split(stays, use.groups)
            weights[use.weight] = np.concatenate(
                [part[..., run, :] for part, run in zip(parts, runs, strict=True)], axis=-1
            )
        else:
            weights[use.weight] = np.compress(stays, kernel, axis=use.axis)
    return weights


def _unread(model: tf.keras.Model, flow: _Flow, removed: set[int]) -> tf.keras.Model:
    """A copy of the whole model in which nothing reads the channels: no layer, no mean over them.

    Its norms over channels, which are patched, are for calls that run at once.
    """
    silent = _copy(model, flow, set())
    for layer, twin in zip(model._flatten_layers(), silent._flatten_layers(), strict=True):
        weights = twin.get_weights() if layer in flow.uses else []
        for use in flow.uses.get(layer, ()):
            stays = _stays(flow, use.channels, removed)
            if use.side == "in":
                _zero(weights[use.weight], use, stays)
            elif _kind(layer) in ("LayerNormalization", "GroupNormalization"):
                twin.call = partial(_normalize_rest, twin, np.flatnonzero(stays))
        if weights:
            twin.set_weights(weights)
    return silent


def _zero(kernel: np.ndarray, use: _Use, stays: np.ndarray) -> None:
    """Let a kernel read nothing of the channels that go."""
    if use.groups == 1:
        np.moveaxis(kernel, use.axis, 0)[~stays] = 0.0
        return
    for part, run in zip(
        np.split(kernel, use.groups, axis=-1), np.split(stays, use.groups), strict=True
    ):
        part[..., ~run, :] = 0.0  # a view


def _normalize_rest(layer, rest: np.ndarray, inputs, **_):
    """What the norm gives if it has these channels alone; the others give 0."""
    x = tf.gather(tf.convert_to_tensor(inputs), rest, axis=-1)
    groups = getattr(layer, "groups", 1)
    shape = x.shape
    if _kind(layer) == "GroupNormalization":
        split = tf.reshape(x, (*shape[:-1], groups, shape[-1] // groups))
        axes = [*range(1, len(shape) - 1), len(shape)]
    else:
        split, axes = x, [-1]
    mean, variance = tf.nn.moments(split, axes, keepdims=True)
    x = tf.reshape((split - mean) * tf.math.rsqrt(variance + layer.epsilon), shape)
    if layer.gamma is not None:
        x = x * tf.gather(tf.convert_to_tensor(layer.gamma), rest)
    if layer.beta is not None:
        x = x + tf.gather(tf.convert_to_tensor(layer.beta), rest)
    return tf.matmul(x, tf.one_hot(rest, inputs.shape[-1], dtype=x.dtype))


def _compare(smaller: tf.keras.Model, silent: tf.keras.Model, x) -> None:
    """Raise unless both models give the same."""
    found, wanted = (
        [np.asarray(part, np.float64) for part in tf.nest.flatten(model(x, training=False))]
        for model in (smaller, silent)
    )
    for ours, theirs in zip(found, wanted, strict=True):
        same = ours.shape == theirs.shape
        off = np.linalg.norm(ours - theirs) if same else np.inf
        if not off <= 1e-4 * np.linalg.norm(theirs) + 1e-12:
            raise NotImplementedError(
                "the smaller model computes something else: its channels can't be followed"
            )


def _line(whole: dict[str, str]) -> str:
    said = [f"{name!r}: {reason}" for name, reason in list(whole.items())[:3]]
    return "; ".join(said) + (f"; and {len(whole) - 3} more" if len(whole) > 3 else "")


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
        model = remove_channels(models.build(task.model, weights), x[:2], share=share)
        optimizer = training.make_optimizer(model, recipe)
        step = training.make_train_step(model, optimizer, training.cross_entropy)
        training.fit(step, *train, batch_size=size, epochs=recipe.epochs, seed=0)
        predict, times = training.make_predict(model), []
        for _ in range(50):
            start = time.perf_counter()
            predict(x)
            runtime.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=size)
        count, ms = models.parameter_count(model), statistics.median(times[10:])
        print(f"{name:10}{count:12}{ms:19.2f}{accuracy:10.1f}")
        if name == "trained":
            weights = models.export_weights(model)


if __name__ == "__main__":
    main()
