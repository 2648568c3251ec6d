"""What a call of PyTorch may correspond to in TensorFlow: changed calls in a forward pass.

A change is the cause of a difference if the call's output is nowhere in TensorFlow's run, but the
changed call's output is. Changes of one argument are in the table of causes; the others are here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.port.causes import CATALOGUE
from bench.port.pytorch_side import RECURRENT, Event
from bench.port.recurrent import Settings, is_packed, run, run_packed

ACTIVATIONS: dict[str, Callable] = {
    function.__name__: function
    for function in (
        *(F.relu, F.relu6, F.silu, F.gelu, F.elu, F.leaky_relu, F.selu, F.hardswish),
        *(F.hardsigmoid, torch.sigmoid, torch.tanh, F.softplus, F.mish),
    )
}


@dataclass(frozen=True)
class Change:
    """A changed call: the cause, PyTorch's value and TensorFlow's, and the call.

    alike: which other calls with the same setting are changed with it. shown_later: whether the
    changed call returns its input, so that only later calls show the effect. together: how another
    call is changed with it; None for no other.
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
    """What the checks know besides the call.

    values: by cause, the settings of Keras's layers. recurrent: their settings. tokens: returns the
    token numbers of the batch. events: all calls.
    """

    values: dict[str, tuple] = field(default_factory=dict)
    recurrent: tuple[Settings, ...] = ()
    tokens: tuple[Callable[[], Tensor], ...] = ()
    events: list[Event] = field(default_factory=list)
    training: bool = False


def again(**changed: tuple[int, Any]) -> Callable[[Event], Any]:
    """The call with other arguments: `name=(position, value)`."""
    return lambda event: event.again(**changed)


def given(place: int) -> Callable[[Event], Tensor]:
    """The call's input at this position, unchanged."""
    return lambda event: event.args[place]


def of(function: Callable[[Tensor], Tensor]) -> Callable[[Event], Tensor]:
    """Another function of the first argument."""
    return lambda event: function(event.args[0])


def changes(event: Event, context: Context) -> Iterator[Change]:
    """All changes of a call to try."""
    name = event.name
    if name.startswith("conv_transpose"):
        yield from _transposed(event)
    elif name.startswith("conv"):
        yield from _convolution(event, context)
    elif name.startswith("adaptive_avg_pool"):
        yield from _whole_pooling(event)
    elif name.startswith(("max_pool", "avg_pool")):
        yield from _pooling(event)
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
        yield Change("mask", "a mask", "no mask", given(0), (name,), True)
    elif name in ("add", "__add__", "__radd__", "__iadd__", "add_"):
        yield from _sum(event)
    elif name in ("mul", "__mul__", "div", "__truediv__", "__rmul__"):
        yield from _scale(event, context)
    yield from _arguments(event, context)
    if name.removesuffix("_") in ACTIVATIONS:
        for other, function in ACTIVATIONS.items():
            if other != name.removesuffix("_"):
                yield Change("activation", name, other, of(function), (event.place,))
        yield Change("activation", name, "linear", given(0), (event.place,), True)
    yield from _denormals(event)


def _arguments(event: Event, context: Context) -> Iterator[Change]:
    """The changes of one argument that the table of causes has."""
    for key, cause in CATALOGUE.items():
        argument = cause.argument
        place = argument.at.get(event.name) if argument else None
        if place is None or (key == "norm_frozen" and not context.training):
            continue
        name, before = argument.name, event.argument(place, argument.name, argument.default)
        is_tensor = isinstance(before, Tensor)
        a = "True" if is_tensor else _written(before)
        for value in dict.fromkeys((*context.values.get(key, ()), *argument.values)):
            if is_tensor or value != before:
                b = "False" if is_tensor else _written(value)
                yield Change(key, a, b, again(**{name: (place, value)}), (event.name, a))


def _written(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


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
    kernel = tuple(event.argument(1, "weight").shape[2:])
    stride, padding, dilation = (
        _tuple(event.argument(place, name, default), len(kernel))
        for place, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    none = [(0, 0)] * len(kernel)
    now = [(p, p) for p in padding] if padding[0] not in ("same", "valid") else none
    if padding[0] == "same":
        now = [((k - 1) * d // 2,) * 2 for k, d in zip(kernel, dilation, strict=True)]

    def pads(e: Event, how: str) -> list[tuple]:
        x, size = e.argument(0, "input"), tuple(e.argument(1, "weight").shape[2:])
        same = same_padding(tuple(x.shape[2:]), size, stride, dilation)
        return {"same": same, "none": none, "both ends": [(k // 2, k // 2) for k in size]}[how]

    for how in ("same", "none", "both ends"):
        if (other := pads(event, how)) != now:

            def apply(e: Event, how: str = how) -> Tensor:
                x = F.pad(e.argument(0, "input"), _flat(pads(e, how)))
                return e.again(input=(0, x), padding=(4, 0))

            alike = (event.name, stride, padding, how)
            yield Change("padding", str(padding), str(tuple(_flat(other))), apply, alike)
    for other in (1, 2):
        if set(stride) <= {1, 2} and other not in stride:
            a, b, back = str(stride[0]), str(other), _given_back(event, context, stride, other)
            change, alike = again(stride=(3, other)), (event.place,)
            yield Change("stride_place", a, b, change, alike, together=back)


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
    dims = event.argument(1, "weight").ndim - 2
    stride = _tuple(event.argument(3, "stride", 1), dims)

    def apply(e: Event, *, valid: bool) -> Tensor:
        x, kernel = e.argument(0, "input"), e.argument(1, "weight").shape[2:]
        whole = e.again(padding=(4, 0), output_padding=(5, 0))
        for axis, (k, s) in enumerate(zip(kernel, stride, strict=True), start=2):
            length = (x.shape[axis] - 1) * s + max(k, s) if valid else x.shape[axis] * s
            before = 0 if valid else max(k - s, 0) // 2
            short = before + length - whole.shape[axis]
            if short > 0:
                whole = F.pad(whole, [0, 0] * (whole.ndim - 1 - axis) + [0, short])
            whole = whole.narrow(axis, before, length)
        return whole

    a = str(_tuple(event.argument(4, "padding", 0), dims))
    for valid, words in ((False, "padding='same'"), (True, "padding='valid'")):
        change = partial(apply, valid=valid)
        yield Change("transposed_padding", a, words, change, (event.name, stride))


def _whole_pooling(event: Event) -> Iterator[Change]:
    """A mean over the whole image that takes other axes for it."""
    if event.args[0].ndim == 4 and event.out.shape[2:].numel() == 1:
        for axes in ((1, 3), (1, 2)):
            mean = partial(lambda x, axes: x.mean(axes).reshape(len(x), -1, 1, 1), axes=axes)
            yield Change("data_format", "", "", of(mean), (event.name,))


def _pooling(event: Event) -> Iterator[Change]:
    name, dims = event.name, int(event.name[event.name.index("pool") + 4])
    biggest = "max" in name
    kernel = _tuple(event.argument(1, "kernel_size"), dims)
    stride = _tuple(event.argument(2, "stride") or kernel, dims)
    padding = _tuple(event.argument(3, "padding", 0), dims)
    pool = getattr(F, f"{name[:3]}_pool{dims}d")

    def pads(e: Event) -> list[int]:
        size = tuple(e.argument(0, "input").shape[2:])
        return _flat(same_padding(size, kernel, stride, (1,) * dims))

    def same(e: Event) -> Tensor:
        x = e.argument(0, "input")
        if biggest:
            return pool(F.pad(x, pads(e), value=-math.inf), kernel, stride)
        counted = pool(F.pad(torch.ones_like(x), pads(e)), kernel, stride)
        return pool(F.pad(x, pads(e)), kernel, stride) / counted

    def zeros(e: Event) -> Tensor:
        return pool(F.pad(e.argument(0, "input"), _flat([(p, p) for p in padding])), kernel, stride)

    alike = (name, stride)
    yield Change("padding", str(padding), str(tuple(pads(event))), same, alike)
    if any(padding):
        if biggest:
            yield Change("padding", "padding of -inf", "padding of zeros", zeros, alike)
        yield Change("padding", str(padding), str((0, 0) * dims), again(padding=(3, 0)), alike)


def _denormals(event: Event) -> Iterator[Change]:
    """Where all numbers are so small that a flush to zero shows."""
    tiny = torch.finfo(torch.float32).tiny
    if event.out.dtype == torch.float32 and 0 < float(event.out.detach().abs().max()) < 1e6 * tiny:

        def flushed(e: Event) -> Tensor:
            out = e.function(*e.args, **e.kwargs)
            return out - torch.where(out.abs() < tiny, out, 0.0).detach()  # gradients stay

        yield Change("denormals", "kept", "flushed to zero", flushed)


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

        yield Change(key, "", "", apply, (event.name, key))


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

    yield Change("reshape_order", "", "", apply, (event.name, event.layer, axis))


def _sum(event: Event) -> Iterator[Change]:
    """A residual that TensorFlow lacks."""
    first, second = (*event.args, None)[:2]
    if not all(isinstance(t, Tensor) and t.shape == event.out.shape for t in (first, second)):
        return
    for place in (0, 1):
        words = ("add it", "leave it out")
        yield Change("missing_residual", *words, given(place), (event.place,), True)


def _scale(event: Event, context: Context) -> Iterator[Change]:
    """Scores of attention that are divided by another number."""
    before = [e for e in context.events if e.place < event.place and e.out is event.args[0]]
    if not before or "matmul" not in before[-1].name or event.out.ndim < 3:
        return
    size = before[-1].args[0].shape[-1]
    for scale in (size**-0.5, 1.0, 1 / size):
        scaled = of(partial(torch.mul, other=scale))
        yield Change("attention_scale", "", f"{scale:g}", scaled, (event.name, event.layer))


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
        change, alike = (
            again(mode=(3, mode), align_corners=(4, align)),
            (event.name, before, corners),
        )
        names = [f"mode='{m}', align_corners={c}" for m, c in ((before, corners), (mode, align))]
        yield Change("interpolation", *names, change, alike)


# Recurrent layers and attention ------------------------------------------------------------------


def _recurrent(event: Event, context: Context) -> Iterator[Change]:
    kind, name, packed = event.name.split("_")[0], event.name, is_packed(event.args)
    usual = Settings(activation="relu" if name == "rnn_relu" else "tanh")

    def computed(e: Event, settings: Settings) -> tuple[Tensor, Tensor]:
        return (run_packed if packed else run)(kind, e.args, settings)

    def turned(e: Event) -> tuple[Tensor, Tensor]:
        return run(kind, (*e.args[:8], not e.args[8]), usual)

    def masked(e: Event, kept: Callable[[], Tensor], zeros: bool) -> tuple[Tensor, Tensor]:
        mask = kept()
        out, last = run(kind, e.args, usual, mask)
        steps = (mask if e.args[8] else mask.T)[..., None].to(out.dtype)
        return (out * steps if zeros else out), last

    for settings in dict.fromkeys(context.recurrent):
        if settings.kind == kind and settings != usual:
            key = "recurrent_activation" if settings.reset_after else "gru_reset"
            apply = partial(computed, settings=settings)
            yield Change(key, str(usual), str(settings), apply, (name,), packed)
    if packed:
        return
    first = event.args[8]
    yield Change("batch_first", str(first), str(not first), turned, (name,))
    words = ("mask_zero=False", "pack_padded_sequence with the lengths")
    for kept, zeros in product(_masks(event.args[0], context, first), (False, True)):
        apply = partial(masked, kept=kept, zeros=zeros)
        yield Change("mask", *words, apply, (name, zeros))


def _masks(x: Tensor, context: Context, first: bool) -> Iterator[Callable[[], Tensor]]:
    """Give which steps hold a token, by each input of whole numbers with the steps' shape."""
    steps = tuple(x.shape[:2]) if first else tuple(x.shape[:2])[::-1]
    for tokens in context.tokens:
        if tuple(tokens().shape) == steps and bool((tokens() == 0).any()):
            yield partial(lambda now: now() != 0, tokens)


def _last(event: Event, context: Context) -> Iterator[Change]:
    """The last output of a layer that runs both ways."""
    layers = [e for e in context.events if e.name in RECURRENT and e.place < event.place]
    if not layers or is_packed(layers[-1].args) or not layers[-1].args[7]:
        return
    out, time = layers[-1].out, 1 if layers[-1].args[8] else 0
    half = out.shape[-1] // 2

    def ends(sequence: Tensor) -> Tensor:
        forward, backward = sequence.select(time, -1), sequence.select(time, 0)
        return torch.cat([forward[..., :half], backward[..., half:]], -1)

    if event.name == "__getitem__" and event.args[0].shape == out.shape:
        yield Change("recurrent_last", "", "", of(ends), ("__getitem__",))
    elif event.name != "__getitem__" and event.out.shape == ends(out).shape:
        single = of(lambda parts: out.select(time, -1) + 0 * parts[0].sum())
        yield Change("recurrent_last", "", "", single, (event.name, layers[-1].place))


def _masked_pooling(event: Event, context: Context) -> Iterator[Change]:
    x, dim = event.args[0], event.argument(1, "dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if x.ndim != 3 or dim != 1:
        return
    for mask in _masks(x, context, True):

        def apply(e: Event, mask: Callable[[], Tensor] = mask) -> Tensor:
            kept = mask()[..., None].to(e.args[0].dtype)
            return (e.args[0] * kept).sum(1) / kept.sum(1)

        yield Change("mask", "mask_zero=False", "the mean of the tokens that count", apply,
                     (event.name,))  # fmt: skip


def _attention(event: Event, context: Context) -> Iterator[Change]:
    packed, name, a = event.name == "multi_head_attention_forward", (event.name,), "attn_mask"
    at = 16 if packed else 3
    query, key = event.args[:2]
    rows, columns = (query.shape[0], key.shape[0]) if packed else (query.shape[-2], key.shape[-2])
    plain = {"key_padding_mask": (14, None)} if packed else {}
    plain |= {"is_causal": (5, False)} if not packed or "is_causal" in event.kwargs else {}
    padding = event.argument(14, "key_padding_mask") if packed else None
    mask, causal = event.argument(at, a), event.argument(5, "is_causal", False) is True
    if mask is not None or padding is not None or causal:
        causal = _is_causal(mask) or event.kwargs.get("is_causal") is True
        cause = "causal" if causal and padding is None else "mask"
        words = ("True", "False") if cause == "causal" else ("attention_mask=mask", "no mask")
        yield Change(cause, *words, again(attn_mask=(at, None), **plain), name)
    if rows == columns:
        future = torch.ones(rows, columns, dtype=torch.bool).triu(1)
        blocked = future if packed else ~future
        yield Change("causal", "False", "True", again(attn_mask=(at, blocked), **plain), name)
    shape = key.transpose(0, 1) if packed else torch.empty(key.shape[0], key.shape[-2], 1)
    for kept in _masks(shape, context, True):

        def masked(e: Event, kept: Callable[[], Tensor] = kept) -> Any:
            if packed:
                return e.again(key_padding_mask=(14, ~kept()))
            return e.again(attn_mask=(3, kept()[:, None, None, :]), is_causal=(5, False))

        yield Change("mask", "attention_mask=None", "key_padding_mask", masked, name)
    to_turn, place = ("key_padding_mask", 14) if packed else (a, 3)
    if padding is not None or (not packed and mask is not None and mask.dtype == torch.bool):

        def opposite(e: Event) -> Any:
            now = e.argument(place, to_turn)
            turned = ~now if now.dtype == torch.bool else -1e9 * (now == 0)
            return e.again(**{to_turn: (place, turned)})

        yield Change("attention_mask", "", "", opposite, name)
    for scale in () if packed else (1.0, 1 / query.shape[-1]):
        yield Change("attention_scale", "", f"{scale:g}", again(scale=(6, scale)), name)
    if packed:

        def turned(e: Event) -> tuple[Tensor, None]:
            swapped = [tensor.transpose(0, 1) for tensor in e.args[:3]]
            return e.function(*swapped, *e.args[3:], **e.kwargs)[0].transpose(0, 1), None

        yield Change("batch_first", "", "", turned, name)


def _is_causal(mask: Tensor | None) -> bool:
    if mask is None or mask.shape[-1] != mask.shape[-2]:
        return False
    hidden = mask if mask.dtype == torch.bool else mask < -1e4
    return bool(torch.equal(hidden, torch.ones_like(hidden).triu(1)))
