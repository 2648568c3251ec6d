"""Graphs as data: a traced model in one file, which is read without executing code from it.

What it holds: the way from a model to a graph of operators with its tensors, to a file, and back.
Twin: `tf_impl/kit/programs.py`.
Where the frameworks differ: TensorFlow's graphs are data by nature (GraphDef). PyTorch's are Python
objects: `torch.export.load` unpickles what a file holds and looks functions up by their names. Here
a file is a list of nodes that `torch.load(weights_only=True)` reads, and a node may name nothing
but operators of ATen and of quantization, and arithmetic on sizes.
"""

import copy
import operator
import pickle
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from shared import archives

_NAMESPACES = ("aten", "quantized_decomposed", "torchao")
_FILES = ("from_file", "save")  # operators of ATen that read and write files
_ARITHMETIC = ("getitem", "add", "sub", "mul", "floordiv", "mod", "neg", "eq", "ge", "le")


def trace(model: nn.Module, inputs) -> fx.GraphModule:
    """Return the model as a graph of ATen operators, in evaluation mode, on the CPU.

    inputs: as `check` takes them. The graph takes any number of samples. The model is left as it
    is, and the graph holds copies of its weights.

    Raises ValueError as `check` does; NotImplementedError for a model that does not return one
    tensor or that upstream cannot capture.
    Source: `torch.export.export`.
    """
    output = check(model, inputs)
    if not isinstance(output, Tensor):
        raise NotImplementedError(f"the model returns {type(output).__name__}, not one tensor")
    two, model = _two(inputs), copy.deepcopy(model).cpu().eval()
    varies = tuple({0: torch.export.Dim.DYNAMIC} for _ in two)
    try:
        with torch.no_grad():
            program = torch.export.export(model, two, dynamic_shapes=varies)
    except Exception as error:
        raise NotImplementedError(f"torch.export cannot capture it: {_line(error)}") from error
    return program.module(check_guards=False)


def check(model: nn.Module, inputs):
    """Return what the model makes of two samples, in evaluation mode, on the CPU.

    inputs: a tensor, or a tuple of the model's positional arguments, tensors all; samples along
    the first axis. The model is left as it is.

    Raises ValueError for inputs without samples, with values that are not finite, or that the model
    does not take.
    """
    parts = inputs if isinstance(inputs, tuple) else (inputs,)
    if not all(isinstance(part, Tensor) and part.ndim for part in parts):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(f"inputs must be tensors with samples along an axis, not {kinds}")
    counts = [len(part) for part in parts]
    if not counts or min(counts) == 0 or len(set(counts)) > 1:
        raise ValueError(f"inputs must have samples, as many in each tensor, not {counts}")
    if not all(part.isfinite().all() for part in parts):
        raise ValueError("inputs hold values that are not finite")
    try:
        with torch.no_grad():
            return copy.deepcopy(model).cpu().eval()(*_two(inputs))
    except Exception as error:
        given = ", ".join(f"{str(part.dtype)[6:]} {list(part.shape[1:])}" for part in parts)
        raise ValueError(f"the model takes no samples of {given}: {_line(error)}") from error


def _two(inputs) -> tuple[Tensor, ...]:
    """Two samples of each input: one would fix their number."""
    return tuple(
        part[[0, 0]].cpu() for part in (inputs if isinstance(inputs, tuple) else (inputs,))
    )


def save(program: fx.GraphModule, path) -> Path:
    """Write a graph of ATen operators, as `trace` returns it, to `path`.

    Raises NotImplementedError, and writes nothing, for a graph that
    holds something else than operators. Returns the path.
    """
    nodes, tensors, places = [], [], {}

    def plain(value):
        """Arguments, in which "%3" stands for what the node of number 3 gives."""
        if isinstance(value, (list, tuple)):
            return [plain(part) for part in value]
        return f"%{places[value]}" if isinstance(value, fx.Node) else value

    for node in program.graph.nodes:
        kind, arguments = node.op, plain(node.args)
        if kind == "get_attr":
            arguments = [len(tensors)]
            tensors.append(operator.attrgetter(node.target)(program).detach())
        elif kind == "call_function":
            kind = _name(node.target)
        elif kind == "output" and not isinstance(node.args[0][0], fx.Node):
            raise NotImplementedError("the graph does not return one tensor")
        elif kind not in ("placeholder", "output"):
            raise NotImplementedError(f"the graph has {node.target}, which is no operator")
        nodes.append([kind, arguments, {key: plain(value) for key, value in node.kwargs.items()}])
        places[node] = len(places)
    torch.save({"nodes": nodes, "tensors": tensors}, path)
    return Path(path)


def load(path) -> fx.GraphModule:
    """Read what `save` wrote, on the CPU. Executes no code of the file.

    Raises FileNotFoundError, and ValueError for a file that is damaged or something else.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        archives.check_zip(path)  # torch.load looks at no checksum
        found = torch.load(path, map_location="cpu", weights_only=True)
        return _graph(found["nodes"], found["tensors"])
    except pickle.UnpicklingError:  # whose words advise to load it all the same
        raise ValueError(f"{path} is no whole file of a program: it holds other things") from None
    except Exception as error:
        raise ValueError(f"{path} is no whole file of a program: {_line(error)}") from None


def _graph(nodes: list, tensors: list) -> fx.GraphModule:
    """The graph anew. Its names are made here, since they become part of generated code."""
    graph, root, made = fx.Graph(), nn.Module(), []

    def real(value):
        if isinstance(value, list):
            return [real(part) for part in value]
        if isinstance(value, str) and value.startswith("%"):
            return made[int(value[1:])]
        return value

    for kind, arguments, keywords in nodes:
        number = len(made)
        if kind == "placeholder":
            made.append(graph.placeholder(f"x{number}"))
        elif kind == "get_attr":
            root.register_buffer(f"tensor{number}", tensors[arguments[0]])
            made.append(graph.get_attr(f"tensor{number}"))
        elif kind == "output":
            made.append(graph.output(real(arguments[0][0])))
        else:
            keywords = {key: real(value) for key, value in keywords.items()}
            made.append(graph.call_function(_function(kind), tuple(real(arguments)), keywords))
    graph.lint()
    return fx.GraphModule(root, graph)


def _name(function: Callable) -> str:
    """The name of an operator, such as "aten.conv2d.default" or "operator.mul"."""
    if function in (getattr(operator, name) for name in _ARITHMETIC):
        return f"operator.{function.__name__}"
    name = str(function)
    if not isinstance(function, torch._ops.OpOverload) or _function(name) is not function:
        raise NotImplementedError(f"the graph has {name}, which is no operator of ATen")
    return name


def _function(name: str) -> Callable:
    """The operator of that name; ValueError for whatever else a file may name."""
    space, *rest = name.split(".")
    if space == "operator" and rest[0] in _ARITHMETIC:
        return getattr(operator, rest[0])
    if space in _NAMESPACES and rest[0] not in _FILES:
        found = operator.attrgetter(".".join(rest))(getattr(torch.ops, space))
        if isinstance(found, torch._ops.OpOverload):
            return found
    raise ValueError(f"{name} is no operator that a program may have")


def _line(error: Exception) -> str:
    """An error's words as one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
