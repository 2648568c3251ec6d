"""Which weights of two models correspond, and the code that copies them."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import nn

from bench.port import conversions, pytorch_side, tensorflow_side
from bench.port.pytorch_side import PyTorchSide
from bench.port.report import Match
from bench.port.tensorflow_side import TensorFlowSide

NORMS = ("batch_norm", "norm")
L = keras.layers
CONVOLUTIONS = (L.Conv1D, L.Conv2D, L.Conv3D)
TRANSPOSED = (L.Conv1DTranspose, L.Conv2DTranspose, L.Conv3DTranspose)
DEPTHWISE = (L.DepthwiseConv1D, L.DepthwiseConv2D)
SEPARABLE = (L.SeparableConv1D, L.SeparableConv2D)
CELLS = {L.LSTMCell: "lstm", L.GRUCell: "gru", L.SimpleRNNCell: "rnn"}
GATES = {"lstm": 4, "gru": 3, "rnn": 1}


@dataclass
class Unit:
    """A layer's weights on one side. shape: of its kernel as PyTorch has it, for comparing.

    parts: role ("kernel", "bias", ...) -> PyTorch's names of weights, or Keras's variable. how:
    the conversions of roles, where they are not those of the kind.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    parts: dict[str, Any]
    how: dict[str, tuple] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind == "convolution" and set(self.shape[2:]) == {1}:  # may be dense elsewhere
            self.kind, self.shape = "dense", self.shape[:2]


@dataclass(frozen=True)
class Transfer:
    """One variable of Keras and the weights of PyTorch that it is made of."""

    names: tuple[str, ...]
    how: str
    arguments: tuple
    variable: Any
    role: str

    @property
    def joined(self) -> bool:
        """Whether Keras has the sum of PyTorch's two."""
        return len(self.names) > 1 and len(self.variable.shape) == 1

    def convert(self, arrays: dict[str, np.ndarray], *, gradient: bool = False) -> np.ndarray:
        """PyTorch's arrays in Keras's layout. A gradient of a sum is that of the first."""
        given = [np.asarray(arrays[name]) for name in self.names]
        if gradient and self.joined:
            given[1] = np.zeros_like(given[1])
        return getattr(conversions, self.how)(*given, *self.arguments, tuple(self.variable.shape))


@dataclass(frozen=True)
class Pair:
    """Layers whose weights correspond."""

    pt: Unit
    tf: Unit
    how: str
    transfers: tuple[Transfer, ...]

    @property
    def layers(self) -> tuple[str, str]:
        """The names of both layers: of one in nn.LSTM that of the module."""
        name = re.sub(r"_l\d+(_reverse)?$", "", self.pt.name) if self.pt.kind in GATES else ""
        return name or self.pt.name, self.tf.name


class Weights:
    """The match of two models' weights."""

    def __init__(self, pt: PyTorchSide, tf: TensorFlowSide, traces: tuple):
        self.pt, self.tf = pt, tf
        state = pt.model.state_dict(keep_vars=True) | dict(pt.model.named_parameters())
        self.state = {name: tensor for name, tensor in state.items() if hasattr(tensor, "detach")}
        ours = _in_order(pytorch_units(pt.model), _first_use(self.state, traces[0]))
        theirs = list(tensorflow_units(tf, traces[1]))
        flows = _flow_pt(ours, self.state, traces[0]), _flow_tf(theirs, traces[1])
        self.pairs, self.left = self._matched(ours, theirs, flows)
        place = {unit.name: n for n, unit in enumerate(ours)}
        self.pairs.sort(key=lambda pair: place[pair.pt.name])

    def _matched(self, ours: list[Unit], theirs: list[Unit], flows: tuple) -> tuple:
        arrays, pairs, taken = self.arrays(), {}, set()

        def take(a: Unit, b: Unit, how: str) -> None:
            pairs[a.name] = Pair(a, b, how, tuple(_transfers(a, b)))
            taken.add(b.name)

        def open_groups() -> Iterator[tuple[list[Unit], list[Unit]]]:
            groups: dict = defaultdict(lambda: ([], []))
            for place, (units, gone) in enumerate(((ours, pairs), (theirs, taken))):
                for unit in (unit for unit in units if unit.name not in gone):
                    groups[unit.kind, unit.shape][place].append(unit)
            return iter(list(groups.values()))

        for a_group, b_group in open_groups():  # by values, of what is not initialised to ones
            for a in a_group if a_group and a_group[0].kind not in NORMS else ():
                for b in b_group:
                    kernel = next(iter(_transfers(a, b)), None)
                    if b.name not in taken and kernel and _equal(kernel, arrays):
                        take(a, b, "values")
                        break
        for a_group, b_group in open_groups():
            names = {_plain(b.name): b for b in b_group}
            for a in a_group:
                b = names.get(_plain(a.name))
                if b and len(names) == len(b_group) and b.name not in taken:
                    take(a, b, "name")

        def in_order(norms: bool) -> None:
            for a_group, b_group in open_groups():
                for a, b in zip(a_group, b_group, strict=False):
                    take(a, b, "order") if (a.kind in NORMS) == norms else None

        in_order(norms=False)
        for a_group, b_group in open_groups():  # a norm after layers that belong together
            after = {flows[1].get(b.name): b for b in b_group}
            for a in a_group:
                before = pairs.get(flows[0].get(a.name))
                b = after.get(before.tf.name) if before else None
                if b and b.name not in taken:
                    take(a, b, "order")
        in_order(norms=True)
        sides = ((ours, pairs), (theirs, taken))
        left = [[u.name for u in units if u.name not in gone] for units, gone in sides]
        return list(pairs.values()), left

    def arrays(self) -> dict[str, np.ndarray]:
        """PyTorch's weights as they are now."""
        return {name: tensor.detach().numpy() for name, tensor in self.state.items()}

    def matches(self) -> tuple[Match, ...]:
        """The pairs of layers whose weights correspond."""
        return tuple(Match(pair.pt.name, pair.tf.name, pair.how) for pair in self.pairs)

    def equal(self, pair: Pair, arrays: dict[str, np.ndarray]) -> bool:
        """Whether a pair's weights hold the same."""
        return all(_equal(transfer, arrays) for transfer in pair.transfers)

    def copy(self, pair: Pair) -> None:
        """Give Keras's layer PyTorch's weights."""
        arrays = self.arrays()
        for transfer in pair.transfers:
            transfer.variable.assign(transfer.convert(arrays))

    def transfers(self) -> list[tuple[Pair, Transfer]]:
        """All of them with their pairs."""
        return [(pair, transfer) for pair in self.pairs for transfer in pair.transfers]

    def code(self) -> str:
        """A copy_weights that does what the match does."""
        places = {id(variable): n for n, variable in enumerate(self.tf.model.weights)}
        lines = [
            (places[id(transfer.variable)], transfer.names, transfer.how, transfer.arguments,
             tuple(transfer.variable.shape), f"{pair.tf.name}/{transfer.role}")
            for pair, transfer in self.transfers()
        ]  # fmt: skip
        used = {how for _, _, how, *_ in lines} | ({"gated"} if "stacked" in str(lines) else set())
        every = inspect.getmembers(conversions, inspect.isfunction)
        functions = [inspect.getsource(function) for name, function in every if name in used]
        environment = Environment(
            loader=PackageLoader("bench", "templates"), trim_blocks=True, lstrip_blocks=True,
            undefined=StrictUndefined,
        )  # fmt: skip
        template = environment.get_template("copy_weights.py.j2")
        return template.render(functions=functions, lines=sorted(lines))


def _equal(transfer: Transfer, arrays: dict[str, np.ndarray]) -> bool:
    ours, theirs = transfer.convert(arrays), transfer.variable.numpy()
    return bool(np.allclose(ours, theirs, rtol=1e-6, atol=1e-8, equal_nan=True))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


# PyTorch -----------------------------------------------------------------------------------------


def pytorch_units(model: nn.Module) -> Iterator[Unit]:
    """A model's layers that have weights."""
    for name, module in model.named_modules():
        held = dict(module.named_parameters(recurse=False))
        at = f"{name}." if name else ""
        names = {n: (f"{at}{n}",) for n in held}
        if isinstance(module, nn.RNNBase):
            yield from _recurrent(name, at, module)
        elif isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            for part, role in enumerate(("query", "key", "value")):
                parts = {"kernel": (f"{at}in_proj_weight",)}
                if module.in_proj_bias is not None:
                    parts["bias"] = (f"{at}in_proj_bias",)
                how = dict.fromkeys(parts, ("packed", (part,)))
                shape = (module.embed_dim, module.embed_dim)
                yield Unit(f"{at}{role}", "dense", shape, parts, how)
        elif isinstance(module, nn.modules.batchnorm._NormBase):
            roles = {"gamma": "weight", "beta": "bias"}
            roles |= {"moving_mean": "running_mean", "moving_variance": "running_var"}
            there = {role: n for role, n in roles.items() if getattr(module, n, None) is not None}
            parts = {role: (f"{at}{n}",) for role, n in there.items()}
            yield Unit(name, "batch_norm", (module.num_features,), parts) if parts else None
        elif set(held) in ({"weight"}, {"weight", "bias"}):
            kind, weight = _kind(module), held["weight"]
            first = "gamma" if kind == "norm" else "kernel"
            second = "beta" if kind == "norm" else "bias"
            parts = {first: names["weight"]} | ({second: names["bias"]} if "bias" in held else {})
            yield Unit(name, kind, tuple(weight.shape), parts)
        else:
            for n, parameter in held.items():
                shape = tuple(s for s in parameter.shape if s != 1)
                yield Unit(f"{at}{n}", "parameter", shape, {"kernel": names[n]})


def _kind(module: nn.Module) -> str:
    kinds = {
        nn.modules.conv._ConvTransposeNd: "transposed",
        nn.modules.conv._ConvNd: "convolution",
        nn.Linear: "dense",
        nn.Embedding: "embedding",
    }
    usual = "norm" if "Norm" in type(module).__name__ else "parameter"
    return next((kind for base, kind in kinds.items() if isinstance(module, base)), usual)


def _recurrent(name: str, at: str, module: nn.RNNBase) -> Iterator[Unit]:
    kind = module.mode.lower().split("_")[0]
    for layer in range(module.num_layers):
        for way in ("", "_reverse")[: 1 + module.bidirectional]:
            end = f"_l{layer}{way}"
            parts = {"kernel": (f"{at}weight_ih{end}",), "recurrent": (f"{at}weight_hh{end}",)}
            if module.bias:
                parts["bias"] = (f"{at}bias_ih{end}", f"{at}bias_hh{end}")
            shape = tuple(getattr(module, f"weight_ih{end}").shape)
            single = module.num_layers == 1 and not module.bidirectional
            yield Unit(name if single else f"{name}{end}", kind, shape, parts)


def _in_order(units: Iterator[Unit], used: dict[str, int]) -> list[Unit]:
    """Units in the order of execution; those that are not used come last."""
    last = len(used)
    return sorted(
        filter(None, units),
        key=lambda unit: min(used.get(name, last) for part in unit.parts.values() for name in part),
    )


def _first_use(state: dict, trace: pytorch_side.Trace) -> dict[str, int]:
    names = {id(tensor): name for name, tensor in state.items()}
    used: dict[str, int] = {}
    for event in trace.events:
        for tensor in event.tensors():
            if id(tensor) in names:
                used.setdefault(names[id(tensor)], event.place)
    return used


def _flow_pt(units: list[Unit], state: dict, trace: pytorch_side.Trace) -> dict[str, str]:
    """Unit -> the unit whose output it takes."""
    used = _first_use(state, trace)
    places = {
        used[n]: u.name for u in units for part in u.parts.values() for n in part if n in used
    }
    given = {id(event.out): event.place for event in trace.events}
    flow = {}
    for event in trace.events:
        sources = [given[id(t)] for t in event.tensors() if id(t) in given]
        if event.place in places and sources and sources[0] in places:
            flow[places[event.place]] = places[sources[0]]
    return flow


# Keras -------------------------------------------------------------------------------------------


def tensorflow_units(tf: TensorFlowSide, trace: tensorflow_side.Trace) -> Iterator[Unit]:
    """A model's layers that have weights, in the order of execution."""
    names = {id(call.layer): call.name for call in reversed(trace.calls)}
    order = {
        layer: place for place, layer in enumerate(dict.fromkeys(id(c.layer) for c in trace.calls))
    }
    layers = sorted(tf.layers(), key=lambda layer: order.get(id(layer), len(order)))
    for layer in layers:
        held = [v for v in tensorflow_side.held(layer) if "seed" not in v.name]
        if held:
            yield from _units(names.get(id(layer), layer.name), layer, held)


def _units(name: str, layer: Any, held: list) -> Iterator[Unit]:
    parts = {variable.name: variable for variable in held}
    kernel = held[0]
    size, is_a = tuple(kernel.shape), partial(isinstance, layer)
    cell = next((kind for base, kind in CELLS.items() if is_a(base)), None)
    bias = {"bias": parts["bias"]} if "bias" in parts else {}
    if cell:
        roles = {"kernel": "kernel", "recurrent_kernel": "recurrent", "bias": "bias"}
        parts = {roles[n]: v for n, v in parts.items()}
        yield Unit(name.rpartition("/")[0] or name, cell, size[::-1], parts)
    elif is_a(SEPARABLE):
        shape, point = (size[-2] * size[-1], 1, *size[:-2]), held[1]
        yield Unit(f"{name}/depthwise", "convolution", shape, {"kernel": kernel})
        shape = (point.shape[-1], point.shape[-2], *point.shape[:-2])
        yield Unit(name, "convolution", shape, {"kernel": point} | bias)
    elif is_a((*CONVOLUTIONS, *TRANSPOSED, *DEPTHWISE)):
        kind = "transposed" if is_a(TRANSPOSED) else "convolution"
        shape = (size[-2] * size[-1], 1) if is_a(DEPTHWISE) else (size[-1], size[-2])
        yield Unit(name, kind, (*shape, *size[:-2]), {"kernel": kernel} | bias)
    elif is_a((L.Dense, L.EinsumDense)):
        shape = size[::-1] if is_a(L.Dense) else _matrix(layer.equation, size)
        yield Unit(name, "dense", shape, parts)
    elif is_a(L.BatchNormalization):
        yield Unit(name, "batch_norm", (size[0],), parts)
    elif "Norm" in type(layer).__name__:
        roles = {"scale": "gamma"}
        yield Unit(name, "norm", size, {roles.get(n, n): v for n, v in parts.items()})
    elif "Embedding" in type(layer).__name__ and len(held) == 1:
        yield Unit(name, "embedding", size, {"kernel": kernel})
    else:
        for variable in held:
            shape = tuple(s for s in variable.shape if s != 1)
            yield Unit(f"{name}/{variable.name}", "parameter", shape, {"kernel": variable})


def _matrix(equation: str, size: tuple[int, ...]) -> tuple[int, int]:
    """(out, in) of an EinsumDense's kernel."""
    inputs, rest = equation.replace(" ", "").split(",")
    letters = rest.split("->")[0]
    taken = int(np.prod([n for n, letter in zip(size, letters, strict=True) if letter in inputs]))
    return int(np.prod(size)) // taken, taken


def _flow_tf(units: list[Unit], trace: tensorflow_side.Trace) -> dict[str, str]:
    names = {unit.name for unit in units}
    given = {id(call.out): call.name for call in trace.calls}
    flow = {}
    for call in trace.calls:
        sources = [given[id(tensor)] for tensor in call.inputs if id(tensor) in given]
        if call.name in names and sources and sources[0] in names:
            flow[call.name] = sources[0]
    return flow


# Both --------------------------------------------------------------------------------------------


def _transfers(a: Unit, b: Unit) -> Iterator[Transfer]:
    """How Keras's variables are made of PyTorch's weights, as far as both have them."""
    for role, names in a.parts.items():
        variable = b.parts.get(role)
        if variable is not None and np.prod(variable.shape):
            how, arguments = a.how.get(role, (_conversion(a, role, variable), ()))
            yield Transfer(names, how, arguments, variable, role)


def _conversion(unit: Unit, role: str, variable: Any) -> str:
    if unit.kind in GATES:
        names = ("stacked", "gated") if unit.kind == "gru" else ("summed", "recurrent")
        return names[role != "bias"]
    if role == "kernel" and unit.kind == "convolution":
        deep = unit.shape[1] == 1 and tuple(variable.shape)[-2] != 1
        return "depthwise" if deep else "convolution"
    kinds = {"dense": "dense", "transposed": "convolution"}
    return kinds.get(unit.kind, "same") if role == "kernel" else "same"
