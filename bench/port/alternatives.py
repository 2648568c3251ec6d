"""What a call of PyTorch may mean in TensorFlow: the checks of causes that act in a forward pass.

Each function looks at a call and yields changes of it. A change is the cause of a difference where
the call's own output is nowhere in TensorFlow's run, and the changed one is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.port.pytorch_side import RECURRENT, Event
from bench.port.recurrent import Settings, is_packed, run, run_packed

EPSILONS = (1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 1e-12, 1.001e-5, 1e-2, 1e-4)
SLOPES = (0.3, 0.2, 0.1, 0.01, 1.0)
EPSILON_AT = {"batch_norm": 7, "layer_norm": 4, "group_norm": 4, "rms_norm": 3, "instance_norm": 7}
ACTIVATIONS: dict[str, Callable] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "gelu": F.gelu,
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "selu": F.selu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "mish": F.mish,
}


@dataclass(frozen=True)
class Change:
    """A call that is made otherwise: the cause, PyTorch's value and TensorFlow's, and the call.

    alike: which other calls are changed with it, as far as they have the same setting. shown_later:
    whether the changed call gives what it takes, so that only calls after it show the effect.
    together: what another call is changed to with it, None for all other calls.
    """

    key: str
    a: str
    b: str
    apply: Callable[[Event], Any]
    alike: tuple = ()
    shown_later: bool = False
    together: Callable[[Event], Any] | None = None


@dataclass
class Context:
    """What the checks know beside the call: epsilons and slopes of Keras's layers, its recurrent
    layers, the batch's token numbers, and the events before."""

    epsilons: tuple[float, ...] = ()
    slopes: tuple[float, ...] = ()
    recurrent: tuple[Settings, ...] = ()
    tokens: tuple[Tensor, ...] = ()
    events: list[Event] = field(default_factory=list)
    training: bool = False


def changes(event: Event, context: Context) -> Iterator[Change]:
    """All changes of a call."""
    name = event.name
    if name.startswith("conv_transpose"):
        yield from _transposed(event)
    elif name.startswith("conv"):
        yield from _convolution(event, context)
    elif name.startswith("adaptive_avg_pool"):
        yield from _whole_pooling(event)
    elif name.startswith(("max_pool", "avg_pool")):
        yield from _pooling(event)
    elif name in EPSILON_AT:
        yield from _normalisation(event, context)
    elif name in ("softmax", "log_softmax"):
        yield from _softmax(event)
    elif name in ("flatten", "reshape", "view", "unflatten"):
        yield from _flatten(event, context)
        yield from _split(event)
    elif name == "interpolate":
        yield from _interpolation(event)
    elif name in RECURRENT:
        yield from _recurrent(event, context)
    elif name in ("__getitem__", "cat", "concat"):
        yield from _last(event, context)
    elif name in ("mean", "sum", "max", "amax"):
        yield from _masked_pooling(event, context)
    elif name in ("multi_head_attention_forward", "scaled_dot_product_attention"):
        yield from _attention(event, context)
    elif name in ("masked_fill", "masked_fill_"):
        yield Change("mask", "a mask", "none", lambda e: e.args[0], (name,), shown_later=True)
    elif name in ("add", "__add__", "__radd__", "__iadd__", "add_"):
        yield from _sum(event)
    elif name in ("mul", "__mul__", "div", "__truediv__", "__rmul__"):
        yield from _scale(event, context)
    if name in ACTIVATIONS or name == "relu_":
        yield from _activation(event, context)
    yield from _denormals(event)


# Padding -----------------------------------------------------------------------------------------


def _tuple(value: Any, dims: int) -> tuple:
    if isinstance(value, (tuple, list)):
        return tuple(value) if len(value) == dims else tuple(value) * dims
    return (value,) * dims


def same_padding(size: tuple, kernel: tuple, stride: tuple, dilation: tuple) -> list[tuple]:
    """How many rows padding='same' of TensorFlow puts before and after, for each axis."""
    pads = []
    for n, k, s, d in zip(size, kernel, stride, dilation, strict=True):
        whole = max((math.ceil(n / s) - 1) * s + (k - 1) * d + 1 - n, 0)
        pads.append((whole // 2, whole - whole // 2))
    return pads


def _flat(pads: list[tuple]) -> list[int]:
    return [n for pair in reversed(pads) for n in pair]


def _convolution(event: Event, context: Context) -> Iterator[Change]:
    x, weight = event.argument(0, "input"), event.argument(1, "weight")
    dims = weight.ndim - 2
    stride, padding, dilation = (
        _tuple(event.argument(place, name, default), dims)
        for place, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    if padding[0] == "same" or padding[0] == "valid":
        padding = tuple((k - 1) * d // 2 for k, d in zip(weight.shape[2:], dilation, strict=True))
        padding = padding if event.argument(4, "padding") == "same" else (0,) * dims
    size = tuple(x.shape[2:])
    options = {
        "padding='same'": same_padding(size, tuple(weight.shape[2:]), stride, dilation),
        "padding='valid'": [(0, 0)] * dims,
        "padding on both ends": [(k // 2, k // 2) for k in weight.shape[2:]],
    }
    for words, pads in options.items():
        if pads == [(p, p) for p in padding]:
            continue

        def apply(e: Event, words: str = words) -> Tensor:
            x, weight = e.argument(0, "input"), e.argument(1, "weight")
            pads = {
                "padding='same'": lambda: same_padding(
                    tuple(x.shape[2:]), tuple(weight.shape[2:]), stride, dilation
                ),
                "padding='valid'": lambda: [(0, 0)] * dims,
                "padding on both ends": lambda: [(k // 2, k // 2) for k in weight.shape[2:]],
            }[words]()
            changed = {"input": (0, F.pad(x, _flat(pads))), "padding": (4, 0)}
            return e.again(**changed)

        alike = (event.name, stride, padding, words)
        yield Change("padding", str(padding), str(tuple(_flat(pads))), apply, alike)
    if event.argument(2, "bias") is not None:

        def change(e):
            return (e.again(bias=(2, None)))  # fmt: skip

        yield Change("missing_bias", "True", "False", change, (event.name,))
    for other in (1, 2):
        if set(stride) <= {1, 2} and other not in stride:

            def change(e, s=other):
                return (e.again(stride=(3, s)))  # fmt: skip

            back = _given_back(event, context, stride, other)
            words = (str(stride[0]), str(other))
            yield Change("stride_place", *words, change, (event.place,), together=back)


def _given_back(event: Event, context: Context, stride: tuple, other: int) -> Callable | None:
    """The change of the block's next convolution that had the stride which this one gets."""
    block = event.layer.rpartition(".")[0]
    for later in context.events:
        if later.place <= event.place or later.name != event.name:
            continue
        if later.layer.rpartition(".")[0] != block:
            return None
        if set(_tuple(later.argument(3, "stride", 1), len(stride))) == {other}:
            place = later.place
            return lambda e: e.again(stride=(3, stride)) if e.place == place else None
    return None


def _transposed(event: Event) -> Iterator[Change]:
    weight = event.argument(1, "weight")
    dims = weight.ndim - 2
    stride = _tuple(event.argument(3, "stride", 1), dims)

    def apply(e: Event, *, valid: bool) -> Tensor:
        x, kernel = e.argument(0, "input"), e.argument(1, "weight").shape[2:]
        whole = e.again(padding=(4, 0), output_padding=(5, 0))
        for axis, (k, s) in enumerate(zip(kernel, stride, strict=True), start=2):
            length = (x.shape[axis] - 1) * s + max(k, s) if valid else x.shape[axis] * s
            before = 0 if valid else max(k - s, 0) // 2
            short = before + length - whole.shape[axis]
            if short > 0:
                pads = [0, 0] * (whole.ndim - 1 - axis) + [0, short]
                whole = F.pad(whole, pads)
            whole = whole.narrow(axis, before, length)
        return whole

    a = str(_tuple(event.argument(4, "padding", 0), dims))
    for valid, words in ((False, "padding='same'"), (True, "padding='valid'")):

        def apply_as(e, v=valid):
            return (apply(e, valid=v))  # fmt: skip

        yield Change("transposed_padding", a, words, apply_as, (event.name, stride))


def _whole_pooling(event: Event) -> Iterator[Change]:
    """A mean over the whole image that takes other axes for it."""
    x = event.args[0]
    if x.ndim == 4 and event.out.shape[2:].numel() == 1:
        for axes in ((1, 3), (1, 2)):

            def change(e, axes=axes):
                return (e.args[0].mean(axes).reshape(e.args[0].shape[0], -1, 1, 1))  # fmt: skip

            yield Change("data_format", "channels_first", "channels_last", change, (event.name,))


def _pooling(event: Event) -> Iterator[Change]:
    name, dims = event.name, int(event.name[event.name.index("pool") + 4])
    biggest = "max" in name
    kernel = _tuple(event.argument(1, "kernel_size"), dims)
    stride = _tuple(event.argument(2, "stride") or kernel, dims)
    padding = _tuple(event.argument(3, "padding", 0), dims)
    place = 5 if biggest else 4
    ceil = bool(event.argument(place, "ceil_mode", False))
    pool = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[dims]
    largest = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[dims]

    def same(e: Event, value: float = -math.inf) -> Tensor:
        x = e.argument(0, "input")
        pads = _flat(same_padding(tuple(x.shape[2:]), kernel, stride, (1,) * dims))
        if biggest:
            return largest(F.pad(x, pads, value=value), kernel, stride)
        counted = pool(F.pad(torch.ones_like(x), pads), kernel, stride)
        return pool(F.pad(x, pads), kernel, stride) / counted

    def zeros(e: Event) -> Tensor:
        return largest(
            F.pad(e.argument(0, "input"), _flat([(p, p) for p in padding])), kernel, stride
        )

    alike = (name, stride)
    size = tuple(event.argument(0, "input").shape[2:])
    pads = str(tuple(_flat(same_padding(size, kernel, stride, (1,) * dims))))
    yield Change("padding", str(padding), pads, same, alike)
    if biggest and any(padding):
        yield Change("padding", "padding of -inf", "padding of zeros", zeros, alike)
    if not biggest and any(padding):
        flip = not event.argument(5, "count_include_pad", True)

        def change(e):
            return (e.again(count_include_pad=(5, flip)))  # fmt: skip

        yield Change("pool_padding_counted", str(not flip), str(flip), change, alike)

    def change(e):
        return (e.again(ceil_mode=(place, not ceil)))  # fmt: skip

    yield Change("ceil_mode", str(ceil), str(not ceil), change, alike)

    def valid(e):
        return (e.again(padding=(3, 0)))  # fmt: skip

    if any(padding):
        yield Change("padding", str(padding), "padding='valid'", valid, alike)


# Normalisation and activations -------------------------------------------------------------------


def _normalisation(event: Event, context: Context) -> Iterator[Change]:
    place = EPSILON_AT[event.name]
    before = event.argument(place, "eps", 1e-5)
    alike = (event.name, before)
    for epsilon in dict.fromkeys((*context.epsilons, *EPSILONS)):
        if epsilon != before:

            def change(e, value=epsilon):
                return (e.again(eps=(place, value)))  # fmt: skip

            yield Change("norm_epsilon", f"{before:g}", f"{epsilon:g}", change, alike)
    if event.name == "batch_norm" and context.training:
        flip = not event.argument(5, "training", False)

        def change(e):
            return (e.again(training=(5, flip)))  # fmt: skip

        yield Change("norm_frozen", str(not flip), str(flip), change, alike)


def _activation(event: Event, context: Context) -> Iterator[Change]:
    x, name = event.argument(0, "input"), event.name
    if name == "gelu":
        before = event.argument(1, "approximate", "none")
        after = "tanh" if before == "none" else "none"

        def change(e):
            return (F.gelu(e.args[0], approximate=after))  # fmt: skip

        yield Change("gelu", str(before == "tanh"), after, change, (name,))
    if name in ("leaky_relu", "elu"):
        function, before = ACTIVATIONS[name], event.argument(1, "", None)
        before = event.kwargs.get("negative_slope", event.kwargs.get("alpha", before))
        linear = 1.0 if name == "leaky_relu" else None  # no activation at all: see below
        for slope in dict.fromkeys((*filter(None, context.slopes), *SLOPES)):
            if slope == linear:
                continue

            def change(e, s=slope):
                return (function(e.args[0], s))  # fmt: skip

            yield Change("negative_slope", f"{before}", f"{slope:g}", change, (name, before))
    for other, function in ACTIVATIONS.items():
        if other != name and isinstance(x, Tensor):

            def change(e, f=function):
                return (f(e.args[0]))  # fmt: skip

            yield Change("activation", other, name, change, (event.place,))

    def change(e):
        return (e.args[0])  # fmt: skip

    yield Change("activation", "linear", name, change, (event.place,), True)


def _softmax(event: Event) -> Iterator[Change]:
    before = event.argument(1, "dim")
    ndim = event.out.ndim
    for dim in range(ndim):
        if before is None or dim != before % ndim:

            def change(e, d=dim):
                return (getattr(F, e.name)(e.args[0], dim=d))  # fmt: skip

            yield Change("softmax_axis", f"{before}", f"{dim}", change, (event.name, before))


def _denormals(event: Event) -> Iterator[Change]:
    """Where all numbers are so small that a flush to zero shows."""
    tiny = torch.finfo(torch.float32).tiny
    if event.out.dtype == torch.float32 and 0 < float(event.out.detach().abs().max()) < 1e6 * tiny:

        def flushed(e: Event) -> Tensor:
            out = e.function(*e.args, **e.kwargs)
            return torch.where(out.abs() < tiny, torch.zeros_like(out), out)

        yield Change("denormals", "kept", "flushed to zero", flushed, ())


# Order of axes -----------------------------------------------------------------------------------


def _flatten(event: Event, context: Context) -> Iterator[Change]:
    """An image or a sequence that is made one vector, or is split otherwise."""
    if event.args[0].ndim < 3:
        return
    taken = [e.name for e in context.events if any(t is event.out for t in e.tensors())]
    key = "flatten_order" if taken[:1] == ["linear"] else "reshape_order"
    for source, target in ((1, -1), (-1, 1), (0, 1)):

        def apply(e: Event, source: int = source, target: int = target) -> Tensor:
            shape = e.function(*e.args, **e.kwargs).shape
            return e.args[0].movedim(source, target).reshape(shape)

        yield Change(key, "channels first", "channels last", apply, (event.name, key))


def _split(event: Event) -> Iterator[Change]:
    """An axis that is split in two, such as into heads: the same numbers in the other order."""
    x = event.args[0]
    pairs = enumerate(zip(x.shape, event.out.shape, strict=False))
    axis = next((n for n, (a, b) in pairs if a != b), None)
    if event.out.ndim != x.ndim + 1 or axis is None:
        return

    def apply(e: Event) -> Tensor:
        shape = list(e.function(*e.args, **e.kwargs).shape)
        shape[axis], shape[axis + 1] = shape[axis + 1], shape[axis]
        return e.args[0].reshape(shape).transpose(axis, axis + 1)

    split = tuple(event.out.shape[axis : axis + 2])
    words = [str(split), str(split[::-1])]
    yield Change("reshape_order", *words, apply, (event.name, event.layer, axis))


def _sum(event: Event) -> Iterator[Change]:
    """A residual that TensorFlow lacks."""
    first, second = (*event.args, None)[:2]
    if not all(isinstance(t, Tensor) and t.shape == event.out.shape for t in (first, second)):
        return
    for place in (0, 1):

        def change(e, p=place):
            return (e.args[p])  # fmt: skip

        yield Change("missing_residual", "add it", "leave it out", change, (event.place,), True)


def _scale(event: Event, context: Context) -> Iterator[Change]:
    """Scores of attention that are divided by another number."""
    before = [e for e in context.events if e.place < event.place and e.out is event.args[0]]
    if not before or "matmul" not in before[-1].name or event.out.ndim < 3:
        return
    size = before[-1].args[0].shape[-1]
    for scale in (size**-0.5, 1.0, 1 / size):

        def change(e, s=scale):
            return (e.args[0] * s)  # fmt: skip

        yield Change(
            "attention_scale", "otherwise", f"{scale:g}", change, (event.name, event.layer)
        )


def _interpolation(event: Event) -> Iterator[Change]:
    before = event.argument(3, "mode", "nearest")
    corners = event.argument(4, "align_corners", None)
    smooth = {3: "linear", 4: "bilinear", 5: "trilinear"}[event.args[0].ndim]
    options: list[tuple] = list(product((smooth, "bicubic"), (False, True)))
    for mode, align in [*options, ("nearest", None), ("nearest-exact", None), ("area", None)]:
        if (mode == "bicubic" and event.args[0].ndim != 4) or (mode, align) == (before, corners):
            continue
        if mode == before and not align and not corners:
            continue

        def change(e, m=mode, a=align):
            return (e.again(mode=(3, m), align_corners=(4, a)))  # fmt: skip

        names = [f"mode='{m}', align_corners={c}" for m, c in ((before, corners), (mode, align))]
        yield Change("interpolation", *names, change, (event.name, before, corners))


# Recurrent layers and attention ------------------------------------------------------------------


def _recurrent(event: Event, context: Context) -> Iterator[Change]:
    kind, name, packed = event.name.split("_")[0], event.name, is_packed(event.args)

    def call(
        e: Event,
        settings: Settings,
        mask: Tensor | None = None,
        *,
        flip: bool = False,
        zeros: bool = False,
    ) -> Any:
        if packed:
            return run_packed(kind, e.args, settings)
        x, _, weights, biases, layers, _, _, both, first = e.args[:9]
        first = first != flip
        out, last = run(kind, x, weights, biases, layers, both, first, settings, mask)
        if zeros:
            kept = mask if first else mask.T
            out = out * kept[..., None].to(out.dtype)
        return out, last

    usual = Settings(activation="relu" if name == "rnn_relu" else "tanh")
    for settings in dict.fromkeys(context.recurrent):
        if settings.kind == kind and settings != usual:
            key = "recurrent_activation" if settings.reset_after else "gru_reset"

            def change(e, s=settings):
                return (call(e, s))  # fmt: skip

            yield Change(key, str(usual), str(settings), change, (name,), packed)
    if packed:
        return
    first = event.args[8]

    def change(e):
        return (call(e, usual, flip=True))  # fmt: skip

    yield Change("batch_first", str(first), str(not first), change, (name,))
    for mask in _masks(event.args[0], context, first):
        for zeros in (False, True):

            def change(e, m=mask, z=zeros):
                return (call(e, usual, m, zeros=z))  # fmt: skip

            words = ("mask_zero=False", "pack_padded_sequence with the lengths")
            yield Change("mask", *words, change, (name, zeros))


def _masks(x: Tensor, context: Context, first: bool) -> Iterator[Tensor]:
    """Which steps hold a token, by each input of whole numbers that has the shape of the steps."""
    steps = tuple(x.shape[:2]) if first else tuple(x.shape[:2])[::-1]
    for tokens in context.tokens:
        if tuple(tokens.shape) == steps and bool((tokens == 0).any()):
            yield tokens != 0


def _last(event: Event, context: Context) -> Iterator[Change]:
    """The last output of a layer that runs both ways."""
    layers = [e for e in context.events if e.name in RECURRENT and e.place < event.place]
    if not layers or is_packed(layers[-1].args):
        return
    both, first = layers[-1].args[7:9]
    out = layers[-1].out
    half = out.shape[-1] // 2
    time = 1 if first else 0

    def ends(sequence: Tensor) -> Tensor:
        forward, backward = sequence.select(time, -1), sequence.select(time, 0)
        return torch.cat([forward[..., :half], backward[..., half:]], -1)

    if both and event.name == "__getitem__" and event.args[0].shape == out.shape:

        def change(e):
            return (ends(e.args[0]))  # fmt: skip

        yield Change("recurrent_last", "out[:, -1]", "both ends", change, ("__getitem__",))
    elif both and event.name != "__getitem__" and event.out.shape == ends(out).shape:
        place = layers[-1].place
        last: dict[str, Tensor] = {}

        def change(e: Event) -> Tensor:
            sequence = e.args[0][0]
            return last.get("out", out).select(time, -1) + 0 * sequence.sum()

        yield Change("recurrent_last", "both ends", "out[:, -1]", change, (event.name, place))


def _masked_pooling(event: Event, context: Context) -> Iterator[Change]:
    x, dim = event.args[0], event.argument(1, "dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if x.ndim != 3 or dim != 1:
        return
    for mask in _masks(x, context, True):

        def apply(e: Event, mask: Tensor = mask) -> Tensor:
            kept = mask[..., None].to(e.args[0].dtype)
            return (e.args[0] * kept).sum(1) / kept.sum(1)

        yield Change("mask", "mask_zero=False", "the tokens that count", apply, (event.name,))


def _attention(event: Event, context: Context) -> Iterator[Change]:
    packed = event.name == "multi_head_attention_forward"
    at, name = (16, "attn_mask") if packed else (3, "attn_mask")
    query, key = event.args[:2]
    rows, columns = (query.shape[0], key.shape[0]) if packed else (query.shape[-2], key.shape[-2])
    plain = {"key_padding_mask": (14, None)} if packed else {}
    plain |= {"is_causal": (5, False)} if not packed or "is_causal" in event.kwargs else {}
    padding = event.argument(14, "key_padding_mask") if packed else None
    mask = event.argument(at, name)
    if mask is not None or padding is not None or event.argument(5, "is_causal", False) is True:

        def change(e):
            return (e.again(**{name: (at, None)}, **plain))  # fmt: skip

        causal = _is_causal(mask) or event.kwargs.get("is_causal") is True
        key_of = "causal" if causal and padding is None else "mask"
        yield Change(key_of, "use_causal_mask=True", "none", change, (event.name,))
    if rows == columns:
        future = torch.ones(rows, columns, dtype=torch.bool).triu(1)
        blocked = future if packed else ~future

        def change(e):
            return (e.again(**{name: (at, blocked)}, **plain))  # fmt: skip

        yield Change("causal", "False", "True", change, (event.name,))
    shape = key.transpose(0, 1) if packed else torch.empty(key.shape[0], key.shape[-2], 1)
    for tokens in _masks(shape, context, True):
        if packed:

            def change(e, t=tokens):
                return (e.again(key_padding_mask=(14, ~t)))  # fmt: skip
        else:

            def change(e, t=tokens):
                return e.again(attn_mask=(3, t[:, None, None, :]), is_causal=(5, False))

        yield Change("mask", "attention_mask=None", "key_padding_mask", change, (event.name,))
    if packed and padding is not None:
        opposite = padding == 0 if padding.dtype == torch.bool else -1e9 * (padding == 0)

        def change(e):
            return (e.again(key_padding_mask=(14, opposite)))  # fmt: skip

        yield Change("attention_mask", "mask", "~mask", change, (event.name,))
    if not packed:
        if mask is not None and mask.dtype == torch.bool:

            def change(e):
                return (e.again(attn_mask=(3, ~mask)))  # fmt: skip

            yield Change("attention_mask", "mask", "~mask", change, (event.name,))
        for scale in (1.0, 1 / query.shape[-1]):

            def change(e, s=scale):
                return (e.again(scale=(6, s)))  # fmt: skip

            yield Change("attention_scale", "the root", f"{scale:g}", change, (event.name,))
    if packed:

        def turned(e: Event) -> Tensor:
            swapped = [tensor.transpose(0, 1) for tensor in e.args[:3]]
            out = e.function(*swapped, *e.args[3:], **e.kwargs)[0]
            return out.transpose(0, 1), None

        yield Change("batch_first", "one", "the other", turned, (event.name,))


def _is_causal(mask: Tensor | None) -> bool:
    if mask is None or mask.shape[-1] != mask.shape[-2]:
        return False
    hidden = mask if mask.dtype == torch.bool else mask < -1e4
    return bool(torch.equal(hidden, torch.ones_like(hidden).triu(1)))
