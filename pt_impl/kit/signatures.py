"""What the inputs and outputs of an exported file are called, and sizes to try it with.

Twin: `tf_impl/kit/signatures.py`.
Where the frameworks differ: `torch.export` knows the bounds of each size that is open; a
`tf.function` knows none.
"""

import contextlib
import inspect
import io
import logging
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor, nn

_LARGE = 2**24  # elements of a tensor that is not made only to look


def call_arguments(model: nn.Module, inputs) -> tuple[tuple, dict]:
    """Return the positional and the named arguments with which a model is called for its inputs.

    A tuple is `*x` and a dict `**x`, as PyTorch's users have it; all else is the one argument.
    """
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


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


def _resized(tensor: Tensor, axis: int, size: int) -> Tensor:
    """The tensor with another size along an axis: its rows as often as they are needed."""
    rows = torch.arange(size, device=tensor.device) % tensor.shape[axis]
    return tensor.index_select(axis, rows)


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
