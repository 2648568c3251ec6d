"""A graph as a file of data, which is read without executing code from it.

Twin: `tf_impl/kit/saving.py`.
Where the frameworks differ: TensorFlow's graphs are data by nature (GraphDef). PyTorch's are Python
objects: `torch.export.load` unpickles what a file holds and looks functions up by their names. Here
a file is a list of nodes that `torch.load(weights_only=True)` reads, and a node may name nothing
but operators of ATen and of quantization, and arithmetic on sizes.
"""

import operator
import pickle
import zipfile
from collections.abc import Callable
from keyword import iskeyword
from pathlib import Path

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_unflatten  # torch has no public one

_NAMESPACES = ("aten", "quantized_decomposed", "torchao")
_FILES = ("from_file", "save")  # operators of ATen that read and write files
_FORMATS = {
    str(value).removeprefix("torch."): value
    for value in (torch.contiguous_format, torch.preserve_format, torch.channels_last)
}
_ARITHMETIC = ("getitem", "add", "sub", "mul", "floordiv", "mod", "neg", "eq", "ge", "le")


def save(program: fx.GraphModule, path) -> Path:
    """Write a graph of ATen operators, as `trace` returns it, to `path`.

    Raises NotImplementedError, and writes nothing, for a graph that holds something else than
    operators; RuntimeError, and leaves no file, where what was written can't be read again. Returns
    the path.
    """
    nodes, tensors, places = [], [], {}

    def plain(value):
        """Arguments; "%3" stands for what node 3 gives, "@contiguous_format" for the format."""
        if isinstance(value, (list, tuple)):
            return [plain(part) for part in value]
        if isinstance(value, torch.memory_format):
            return f"@{value}".replace("torch.", "")
        return f"%{places[value]}" if isinstance(value, fx.Node) else value

    for node in program.graph.nodes:
        kind, arguments = node.op, plain(node.args)
        if kind == "get_attr":
            arguments = [len(tensors)]
            tensors.append(_held(program, node.target))
        elif kind == "call_function":
            kind = _name(node.target)
        elif kind == "output":
            arguments = [_structure(_returned(program, node), plain)]
        elif kind == "placeholder":
            arguments = plain(program.meta.get("takes", {}).get(node.target, ()))
        else:
            raise NotImplementedError(f"the graph has {node.target}, which is no operator")
        nodes.append([kind, arguments, {key: plain(value) for key, value in node.kwargs.items()}])
        places[node] = len(places)
    names = list(_names(program))
    try:
        torch.save({"nodes": nodes, "tensors": tensors, "names": names}, path)
        load(path)
    except (TypeError, pickle.PicklingError, ValueError) as error:
        Path(path).unlink(missing_ok=True)
        raise NotImplementedError(f"the graph cannot be written: {error}") from error
    return Path(path)


def _held(program: fx.GraphModule, name: str) -> Tensor:
    """The tensor that a program has under a name."""
    found = operator.attrgetter(name)(program)
    if not isinstance(found, Tensor):
        raise NotImplementedError(
            f"the graph has {name}, a graph of its own: autocast, no_grad or cond within forward"
        )
    return found.detach()


def _names(program: fx.GraphModule) -> tuple[str, ...]:
    """The names of a program's inputs where these are a dict."""
    info = getattr(program.graph._codegen, "pytree_info", None)
    if info is None:
        return getattr(program, "names", ())
    arguments, keywords = tree_unflatten(list(range(info.in_spec.num_leaves)), info.in_spec)
    return () if arguments else tuple(keywords)


def _returned(program: fx.GraphModule, node: fx.Node):
    """What the graph returns: its nodes in the structure of the model's output."""
    (output,) = node.args
    info = getattr(program.graph._codegen, "pytree_info", None)
    return output if info is None else tree_unflatten(list(output), info.out_spec)


def _structure(output, plain: Callable):
    if isinstance(output, dict):
        return {"dict": {str(name): _structure(part, plain) for name, part in output.items()}}
    if isinstance(output, (tuple, list)):
        kind = "tuple" if isinstance(output, tuple) else "list"
        return {kind: [_structure(part, plain) for part in output]}
    if not isinstance(output, fx.Node):
        raise NotImplementedError(f"the graph returns {output!r}, which it does not compute")
    return plain(output)


def load(path) -> fx.GraphModule:
    """Read what `save` wrote, on the CPU. Executes no code of the file.

    Raises FileNotFoundError, and ValueError for a file that is damaged or something else.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():  # torch.load looks at no checksum
                raise ValueError(f"{damaged} in it is damaged")
        found = torch.load(path, map_location="cpu", weights_only=True)
        return _graph(found["nodes"], found["tensors"], found["names"])
    except pickle.UnpicklingError:  # whose words advise to load it all the same
        raise ValueError(f"{path} is not a complete program file: it holds other things") from None
    except Exception as error:
        raise ValueError(f"{path} is not a complete program file: {_one_line(error)}") from None


def _graph(nodes: list, tensors: list, names: list) -> fx.GraphModule:
    """The graph anew. Its names are made here, since they become part of generated code.

    Inputs that were a dict get the names of its keys, which have to be such as Python's are.
    """
    graph, root, made, takes = fx.Graph(), nn.Module(), [], {}
    if not all(name.isidentifier() and not iskeyword(name) for name in names):
        raise ValueError("an input has a name that is none")

    def returned(value):
        if not isinstance(value, dict):
            return real(value)
        ((kind, inside),) = value.items()
        if kind == "dict":
            return {str(name): returned(part) for name, part in inside.items()}
        return {"tuple": tuple, "list": list}[kind](returned(part) for part in inside)

    def real(value):
        if isinstance(value, list):
            return [real(part) for part in value]
        if isinstance(value, str) and value.startswith("%"):
            return made[int(value[1:])]
        if isinstance(value, str) and value.startswith("@"):
            return _FORMATS[value[1:]]
        return value

    inputs = iter(names)
    for kind, arguments, keywords in nodes:
        number = len(made)
        if kind == "placeholder":
            made.append(graph.placeholder(next(inputs) if names else f"x{number}"))
            if arguments:
                takes[made[-1].target] = str(arguments[0]), tuple(map(int, arguments[1]))
        elif kind == "get_attr":
            root.register_buffer(f"tensor{number}", tensors[arguments[0]])
            made.append(graph.get_attr(f"tensor{number}"))
        elif kind == "output":
            made.append(graph.output(returned(arguments[0])))
        else:
            function = _function(kind)
            _check_keywords(function, keywords)  # they become part of generated code, too
            keywords = {key: real(value) for key, value in keywords.items()}
            made.append(graph.call_function(function, tuple(real(arguments)), keywords))
    graph.lint()
    program = fx.GraphModule(root, graph)
    program.names, program.meta["takes"] = tuple(names), takes
    return program


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


def _check_keywords(function: Callable, keywords: dict) -> None:
    schema = getattr(function, "_schema", None)  # what is Python's own takes none
    known = {argument.name for argument in schema.arguments} if schema else set()
    if unknown := [name for name in keywords if name not in known]:
        raise ValueError(f"{function} takes no {unknown[0]!r}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
