"""A model as a graph of ATen operators, for techniques that change a graph.

Twin: `tf_impl/kit/tracing.py`.
Where the frameworks differ: `torch.export` follows one call, and the graph holds copies of the
weights and the sizes of the example. A `tf.function` is traced with a signature, refuses by itself
what does not fit it, and reads the model's variables.
"""

import contextlib
import copy
import functools
import io
import itertools
import logging
import operator
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map  # torch has no public one


def outputs(model: nn.Module, inputs):
    """Return what the model gives; of an output with `.logits`, a dataclass of more, only these.

    inputs: a tensor, a tuple of the model's positional arguments or a dict of those by name.
    """
    output = model(**inputs) if isinstance(inputs, dict) else model(*input_tensors(inputs))
    return getattr(output, "logits", output)


def input_tensors(inputs) -> tuple[Tensor, ...]:
    """Return the tensors of inputs, as `outputs` takes these."""
    if isinstance(inputs, dict):
        return tuple(inputs.values())
    return inputs if isinstance(inputs, tuple) else (inputs,)


def trace(model: nn.Module, inputs, *, training: bool = False) -> fx.GraphModule:
    """Return the model as a graph of ATen operators, in evaluation mode, on the CPU.

    inputs: as `check_example_inputs` accepts them, which is called before; the graph takes any
    number of samples of these sizes, and returns what `outputs` does. The model is left as it is.
    training: in training mode, on the model's device and by Dynamo, which notes the function of
    `torch.nn` that each operator is of.

    Raises NotImplementedError for a model that upstream cannot capture.
    Source: `torch.export.export`.
    """
    if training:
        graph = _capture(copy.deepcopy(model).train(), inputs, strict=True)
        for node in graph.graph.find_nodes(op="get_attr"):
            if not isinstance(operator.attrgetter(node.target)(graph), Tensor):
                what = "a graph of its own: autocast, no_grad or cond within forward"
                raise NotImplementedError(f"the graph has {node.target}, {what}")
        return graph
    with torch.no_grad():
        two = tree_map(lambda part: part[[0, 0]].cpu(), inputs)  # one would fix their number
        return _capture(copy.deepcopy(model).cpu().eval(), two, strict=False)


def _capture(model: nn.Module, inputs, *, strict: bool) -> fx.GraphModule:
    arguments, keywords = (), {}
    if isinstance(inputs, dict):
        keywords = inputs
    else:
        arguments = input_tensors(inputs)
    varies = tree_map(lambda _: {0: torch.export.Dim.DYNAMIC}, keywords or arguments)
    model.__class__ = _returning_logits(type(model), _changes_inputs(model, inputs))
    # The plain tracer takes `len(x)` for a constant; Dynamo, which is slower, does not.
    for way in dict.fromkeys((strict, True)):
        try:
            with _layers_by_operators(), quietly():
                program = torch.export.export(
                    model, arguments, keywords, dynamic_shapes=varies, strict=way
                )
            graph = program.module(check_guards=False)
            places = graph.graph.find_nodes(op="placeholder")
            kinds = map(_kind, input_tensors(inputs))
            graph.meta["takes"] = {a.target: b for a, b in zip(places, kinds, strict=True)}
            return graph
        except Exception as error:
            refused = error
    raise NotImplementedError(f"torch.export cannot capture it: {_reason(refused)}") from refused


@torch.random.fork_rng()
def _changes_inputs(model: nn.Module, inputs) -> bool:
    """Whether the model, which is a copy, changes them in place; they are left as they are."""
    copies, model = tree_map(Tensor.clone, inputs), copy.deepcopy(model)
    with torch.no_grad():
        outputs(model, copies)
    return any(part._version > 0 for part in input_tensors(copies))


def _returning_logits(kind: type, copies_inputs: bool) -> type:
    """The class, returning what `outputs` does; a module around it would rename parameters.

    copies_inputs: whether the graph begins with copies of its inputs, to leave them as they are.
    """

    def forward(self, *arguments, **keywords):
        if copies_inputs:
            arguments, keywords = tree_map(Tensor.clone, (arguments, keywords))
        output = kind.forward(self, *arguments, **keywords)
        if isinstance(output, dict) and "logits" not in output:
            return output  # Dynamo cannot ask an OrderedDict for an attribute
        return getattr(output, "logits", output)

    functools.update_wrapper(forward, kind.forward)
    return type(kind.__name__, (kind,), {"forward": forward})


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

    inputs: as `outputs` takes them; their number of samples is open. Those on another device than
    the graph are refused, too; a file without sizes takes all.
    """
    takes = program.meta.get("takes", {})
    named = isinstance(inputs, dict)
    given = inputs if named else dict(zip(takes, input_tensors(inputs), strict=False))
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


def _kind(part: Tensor) -> tuple[str, tuple[int, ...]]:
    """The dtype of an input, and its sizes but the number of samples."""
    return str(part.dtype)[6:], tuple(part.shape[1:])
