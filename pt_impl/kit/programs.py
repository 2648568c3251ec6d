"""Any model: called as its users do, copied, compared, traced, and its graph as a file of data.

What it holds: what techniques do with a model whatever it is, and the way from it to a graph of
operators with its tensors, to a file that is read without executing code from it, and back.
Twin: `tf_impl/kit/programs.py`.
Where the frameworks differ: TensorFlow's graphs are data by nature (GraphDef). PyTorch's are Python
objects: `torch.export.load` unpickles what a file holds and looks functions up by their names. Here
a file is a list of nodes that `torch.load(weights_only=True)` reads, and a node may name nothing
but operators of ATen and of quantization, and arithmetic on sizes.
"""

import contextlib
import copy
import functools
import inspect
import io
import itertools
import logging
import math
import operator
import pickle
import re
import sys
import textwrap
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from keyword import iskeyword
from pathlib import Path

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map, tree_unflatten

_LARGE = 2**24  # elements of a tensor that is not made only to look
_NAMESPACES = ("aten", "quantized_decomposed", "torchao")
_FILES = ("from_file", "save")  # operators of ATen that read and write files
_LAYERS = tuple(
    getattr(torch.ops.aten, name)
    for name in ("linear", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)))
)
_ARITHMETIC = ("getitem", "add", "sub", "mul", "floordiv", "mod", "neg", "eq", "ge", "le")


def call_arguments(model: nn.Module, inputs) -> tuple[tuple, dict]:
    """Return the positional and the named arguments with which a model is called for its inputs.

    A tuple is `*x` and a dict `**x`, as PyTorch's users have it; all else is the one argument.
    """
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def call(model: nn.Module, inputs):
    """Return the model's output; of one with `.logits`, a dataclass of more, these alone."""
    arguments, named = call_arguments(model, inputs)
    output = model(*arguments, **named)
    return getattr(output, "logits", output)


def copy_model(model: nn.Module, x=None) -> nn.Module:
    """Return a copy of any module that shares nothing with it, in the same mode.

    x: an example input, on which the outputs of both are compared in evaluation mode; without it
    only their parameters and buffers are. `model` stays as it is.

    Raises ValueError where `x` does not fit the model, and NotImplementedError where Python cannot
    copy the model or the copy computes something else.
    """
    try:
        wanted = None if x is None else _evaluated(model, x)
    except Exception as error:
        raise ValueError(f"the model does not take the example input: {one_line(error)}") from error
    try:
        twin = copy.deepcopy(model)
    except Exception as error:  # such as a tensor that is not a leaf of the graph
        raise NotImplementedError(f"Python cannot copy the model: {one_line(error)}") from error
    if apart(*map(_state, (twin, model))) > 0:
        raise NotImplementedError("the copy has another state")
    if x is not None and apart(_evaluated(twin, x), wanted) > 1e-5:
        raise NotImplementedError("the copy computes something else")
    return twin


def _state(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers, and no extra state of a module."""
    return [value for value in model.state_dict().values() if isinstance(value, Tensor)]


def _evaluated(model: nn.Module, x):
    """The output in evaluation mode; every module's mode as it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            return call(model, x)
    finally:
        for module, mode in modes.items():
            if module.training != mode:
                module.train(mode)  # some do more in it, as LoRA does


def parts(inputs) -> tuple[Tensor, ...]:
    """Return the tensors of a tensor, a tuple or a dict of them, as `call` takes these."""
    if isinstance(inputs, dict):
        return tuple(inputs.values())
    return inputs if isinstance(inputs, tuple) else (inputs,)


def input_names(model: nn.Module, inputs, count: int) -> list[str]:
    """Return what the model calls its inputs: the keys of a dict, or `forward`'s arguments.

    count: of the tensors and other things in `inputs`.
    """
    if isinstance(inputs, dict) and len(inputs) == count:
        return list(map(str, inputs))
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    known = inspect.signature(model.forward).parameters.values()
    names = [argument.name for argument in known if argument.kind in kinds][:count]
    given = len(inputs) if isinstance(inputs, tuple) else 1
    if len(names) == count == given:
        return names
    return [f"input_{place}" for place in range(count)]


def named_tensors(output, name: str = "") -> list[tuple[str, Tensor]]:
    """Return the tensors of an output, each with the name of its place.

    Those of a dict or dataclass have their keys, others numbers. Raises NotImplementedError where
    something in it is no tensor.
    """
    if isinstance(output, Tensor):
        return [(name or "output", output)]
    if is_dataclass(output) and not isinstance(output, dict):
        output = {field.name: getattr(output, field.name) for field in fields(output)}
    if isinstance(output, dict):
        inside = {f"{name}.{key}" if name else str(key): part for key, part in output.items()}
    elif isinstance(output, tuple | list):
        inside = {f"{name or 'output'}_{place}": part for place, part in enumerate(output)}
    else:
        raise NotImplementedError(f"a file's outputs are tensors, not {type(output).__name__}")
    return [
        pair
        for key, part in inside.items()
        if part is not None
        for pair in named_tensors(part, key)
    ]


def _resized(tensor: Tensor, axis: int, size: int) -> Tensor:
    """The tensor with another size along an axis: its rows as often as they are needed."""
    rows = torch.arange(size, device=tensor.device) % tensor.shape[axis]
    return tensor.index_select(axis, rows)


def beyond_bounds(program, inputs: tuple[Tensor, ...]) -> Iterator[list[Tensor]]:
    """Inputs of sizes for which an ExportedProgram may not hold: just beyond what it is bound to.

    Of a branch on an open size (`if x.shape[1] > 8`) it has the side that the example took. Its
    inputs are tensors, as many as `inputs`; those that would be large are left out.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    shapes = [nodes[name].meta["val"].shape for name in program.graph_signature.user_inputs]
    for symbol, bounds in program.range_constraints.items():
        # Below 2 all are bound: torch.export takes a size of 1 for a constant.
        sizes = [int(bounds.lower) - 1] if bounds.lower > 2 else []
        sizes += [int(bounds.upper) + 1] if bounds.upper < _LARGE else []
        for size in sizes:
            others = []
            for tensor, shape in zip(inputs, shapes, strict=True):
                for axis, own in enumerate(shape):
                    if isinstance(own, torch.SymInt) and own.node.expr == symbol:
                        large = tensor.numel() // tensor.shape[axis] * size > _LARGE
                        tensor = tensor if large else _resized(tensor, axis, size)
                others.append(tensor)
            yield others


def trace(model: nn.Module, inputs, *, training: bool = False) -> fx.GraphModule:
    """Return the model as a graph of ATen operators, in evaluation mode, on the CPU.

    inputs: as `check` takes them, and so does the graph: any number of samples of these sizes. It
    returns what `call` does. The model is left as it is, and the graph holds copies of its weights.
    training: in training mode, on the model's device and by Dynamo, which notes the function of
    `torch.nn` that each operator is of.

    Raises ValueError as `check` does; NotImplementedError for a model that returns something else
    than tensors, in tuples, lists and dicts, or that upstream cannot capture.
    Source: `torch.export.export`.
    """
    check(model, inputs)
    if training:
        graph = _capture(copy.deepcopy(model).train(), inputs, strict=True)
        for node in graph.graph.find_nodes(op="get_attr"):
            _held(graph, node.target)
        return graph
    with torch.no_grad():
        return _capture(copy.deepcopy(model).cpu().eval(), _two(inputs), strict=False)


def _capture(model: nn.Module, inputs, *, strict: bool) -> fx.GraphModule:
    arguments, keywords = (), {}
    if isinstance(inputs, dict):
        keywords = inputs
    else:
        arguments = parts(inputs)
    varies = tree_map(lambda _: {0: torch.export.Dim.DYNAMIC}, keywords or arguments)
    model.__class__ = _returning_logits(type(model))
    # The plain tracer takes `len(x)` for a constant; Dynamo, which is slower, does not.
    for way in dict.fromkeys((strict, True)):
        try:
            with _layers_by_operators(), quietly():
                program = torch.export.export(
                    model, arguments, keywords, dynamic_shapes=varies, strict=way
                )
            graph = program.module(check_guards=False)
            places = graph.graph.find_nodes(op="placeholder")
            kinds = map(_kind, parts(inputs))
            graph.meta["takes"] = {a.target: b for a, b in zip(places, kinds, strict=True)}
            return graph
        except Exception as error:
            refused = error
    raise NotImplementedError(f"torch.export cannot capture it: {_reason(refused)}") from refused


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without what torch.export prints and logs of a model that it refuses: its graph so far.

    What others say meanwhile is printed where nothing is refused.
    """
    level, said = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(said):
            yield
    finally:
        logging.disable(level)
    print(said.getvalue(), end="", file=sys.stderr)


def _reason(error: Exception) -> str:
    """The begin of an error of torch.export, and the line of the model that it names."""
    reason = textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
    places = re.findall(r'File "([^"]+)", line (\d+), in \w+\n\s+(.+)', str(error))
    own = [place for place in places if "/torch/" not in Path(place[0]).as_posix()]
    return f"{reason} ({Path(own[-1][0]).name}:{own[-1][1]}: {own[-1][2]})" if own else reason


def _kind(part: Tensor) -> tuple[str, tuple[int, ...]]:
    """The dtype of an input, and its sizes but the number of samples."""
    return str(part.dtype)[6:], tuple(part.shape[1:])


class Program(fx.GraphModule):
    """A graph of `trace`, or what was made of one, that refuses inputs of other sizes.

    Where a model asks for a size, as in `interpolate(y, size=x.shape[-2:])`, its graph has that of
    the example.
    """

    def __init__(self, root: fx.GraphModule, graph: fx.Graph):
        super().__init__(root, graph)
        self.meta.update(root.meta)

    def __call__(self, *arguments, **named):
        """Compute, or raise ValueError."""
        takes = self.meta.get("takes", {})
        check_sizes(self, dict(zip(takes, arguments, strict=False)) | named)
        return super().__call__(*arguments, **named)


def check_sizes(program: fx.GraphModule, inputs) -> None:
    """Raise ValueError where inputs have other sizes than those of which a graph was made.

    inputs: as `call` takes them; their number of samples is open. A file without sizes takes all.
    On another device than the graph they are refused, too.
    """
    takes = program.meta.get("takes", {})
    arguments, named = call_arguments(program, inputs)
    given = dict(zip(takes, arguments, strict=False)) | named
    if given.keys() != takes.keys():
        return  # whose own error tells the arguments
    held = next(itertools.chain(program.parameters(), program.buffers()), None)
    devices = {part.device for part in given.values()}
    if held is not None and devices != {held.device}:
        found = ", ".join(map(str, devices))
        raise ValueError(f"inputs are on {found}, and the file's weights on {held.device}")
    if any(tuple(given[name].shape[1:]) != sizes for name, (_, sizes) in takes.items()):
        wanted = ", ".join(f"{dtype} {['any', *sizes]}" for dtype, sizes in takes.values())
        found = ", ".join(f"{_kind(given[name])[0]} {list(given[name].shape)}" for name in takes)
        raise ValueError(
            f"inputs must be {wanted}, as those of the example, not {found}".replace("'", "")
        )


@contextlib.contextmanager
def _layers_by_operators() -> Iterator[None]:
    """Without the one operator that evaluates a whole `nn.TransformerEncoderLayer`.

    It hides the layer's products from quantizers, and other runtimes have none like it.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _returning_logits(kind: type) -> type:
    """The class, returning what `call` does: no module around it, which would rename parameters."""

    def forward(self, *arguments, **keywords):
        output = kind.forward(self, *arguments, **keywords)
        if isinstance(output, dict) and "logits" not in output:
            return output  # Dynamo cannot ask an OrderedDict for an attribute
        return getattr(output, "logits", output)

    functools.update_wrapper(forward, kind.forward)
    return type(kind.__name__, (kind,), {"forward": forward})


def check(model: nn.Module, inputs):
    """Return what the model makes of two samples, in evaluation mode, on the CPU.

    inputs: a tensor, a tuple of the model's positional arguments or a dict of those by name,
    tensors all; samples along the first axis. The model is left as it is.

    Raises ValueError for inputs without samples, with values that are not finite, or that the model
    does not take; NotImplementedError for a model that cannot be copied or that returns something
    else than tensors, in tuples, lists and dicts.
    """
    tensors = parts(inputs)
    if not all(isinstance(part, Tensor) and part.ndim for part in tensors):
        kinds = ", ".join(type(part).__name__ for part in tensors)
        raise ValueError(f"inputs must be tensors with samples along an axis, not {kinds}")
    counts = [len(part) for part in tensors]
    if not counts or min(counts) == 0 or len(set(counts)) > 1:
        raise ValueError(f"inputs must have samples, as many in each tensor, not {counts}")
    if not all(part.isfinite().all() for part in tensors):
        raise ValueError("inputs hold values that are not finite")
    try:
        copied = copy.deepcopy(model).cpu().eval()
    except Exception as error:  # of tensors that are no leaves, and of whatever a module holds
        raise NotImplementedError(f"the model cannot be copied: {one_line(error)}") from error
    try:
        with torch.no_grad():
            output = call(copied, _two(inputs))
    except Exception as error:
        given = ", ".join(f"{str(part.dtype)[6:]} {list(part.shape[1:])}" for part in tensors)
        raise ValueError(f"the model takes no samples of {given}: {one_line(error)}") from error
    _check_output(output)
    return output


def _check_output(output) -> None:
    for part in _leaves(output):
        if not isinstance(part, Tensor):
            raise NotImplementedError(
                f"the model returns {type(part).__name__}, which is no tensor"
            )


def apart(ours, theirs) -> float:
    """Return the largest relative L2 difference of an output of `ours` to its one of `theirs`.

    Outputs are tensors, or tuples, lists and dicts of them, which some runtimes return as a tuple.
    inf where their number, a shape or what is finite differs.
    """
    ours, theirs = _leaves(ours), _leaves(theirs)
    if [part.shape for part in ours] != [part.shape for part in theirs]:
        return math.inf
    return max((_distance(*pair) for pair in zip(ours, theirs, strict=True)), default=0.0)


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative L2; what is not a finite number has to be the same in both."""
    ours, theirs = (v.to(torch.promote_types(v.dtype, torch.float64)) for v in (ours, theirs))
    finite = theirs.isfinite()
    same = torch.equal(ours.isfinite(), finite)
    if not same or not torch.allclose(ours[~finite], theirs[~finite], equal_nan=True):
        return math.inf
    difference = (ours[finite] - theirs[finite]).norm().item()
    return difference / (theirs[finite].norm().item() or 1.0)


def _leaves(output) -> list[Tensor]:
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return [leaf for part in output for leaf in _leaves(part)]
    return [output]


def _two(inputs):
    """Two samples of each input: one would fix their number."""
    return tree_map(lambda part: part[[0, 0]].cpu(), inputs)


def save(program: fx.GraphModule, path) -> Path:
    """Write a graph of ATen operators, as `trace` returns it, to `path`.

    Raises NotImplementedError, and writes nothing, for a graph that holds something else than
    operators; RuntimeError, and leaves no file, where what was written can't be read again. Returns
    the path.
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
    torch.save({"nodes": nodes, "tensors": tensors, "names": names}, path)
    try:
        load(path)
    except ValueError as error:
        Path(path).unlink()
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
        raise ValueError(f"{path} is no whole file of a program: it holds other things") from None
    except Exception as error:
        raise ValueError(f"{path} is no whole file of a program: {one_line(error)}") from None


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


def warn_of_float_layers(program: fx.GraphModule) -> None:
    """Warn of the convolutions and linear layers that torchao left over float32 weights."""
    left = []
    for node in program.graph.nodes:
        if getattr(node.target, "overloadpacket", None) in _LAYERS:
            weight = node.args[1]
            if "dequantize" not in str(weight.target):
                left.append(weight.target if weight.op == "get_attr" else node.name)
    if left:
        warnings.warn(
            f"left in float32: {', '.join(map(str, left))}: torchao rounds Conv2d and Linear, and "
            "Conv1d only before ReLU",
            stacklevel=4,
        )


def one_line(error: Exception) -> str:
    """Return an error's words as one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
