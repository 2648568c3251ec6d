"""What an exported file takes and gives: any model as a function of tensors that have names.

Twin: `tf_impl/kit/signatures.py`.
Where the frameworks differ: `torch.export` follows one call of the model. It knows the bounds of
each size that is open, and files are tried beyond them; a `tf.function` knows none.
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
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten  # there is no public one

from shared import runtimes

_LARGE = 2**24  # elements of a tensor that is not made only to look


class Signature(nn.Module):
    """A model as a function of tensors one by one, whose outputs are a tuple of tensors.

    example: the tensors that it is recorded with. inputs, outputs: their names, those of the
    model's arguments, of a dict's keys or a dataclass's fields, else input_0 or output_0, ...
    open_axes: of each input, the axes whose size is open. samples: inputs of some calls, of other
    sizes where these are open, and what the model gave; beyond: the same, of sizes at which its
    code may branch.

    Raises ValueError for inputs without samples along the first axis, NotImplementedError for
    inputs that the model does not take and outputs that are no tensors.
    """

    def __init__(
        self, model: nn.Module, example_inputs, *, dynamic_batch: bool, dynamic_sequence: bool
    ) -> None:
        super().__init__()
        self.model, self.training, self.largest = model, False, None
        parts, self.structure = tree_flatten(example_inputs)
        self.fixed = [None if isinstance(part, Tensor) else part for part in parts]
        self.places = [place for place, part in enumerate(parts) if isinstance(part, Tensor)]
        tensors = [parts[place] for place in self.places]
        if not tensors or not all(tensor.ndim for tensor in tensors):
            raise ValueError("the model's inputs are tensors with the samples along the first axis")
        names = _input_names(model, example_inputs, len(parts))
        self.inputs = [names[place] for place in self.places]
        opened = [axis for axis, is_open in ((0, dynamic_batch), (1, dynamic_sequence)) if is_open]
        self.open_axes = [[axis for axis in opened if axis < part.ndim] for part in tensors]
        self.example = tuple(map(_at_least_two, tensors, self.open_axes))
        self.outputs, self.beyond, self.changes_inputs = [], [], False
        with recording(model, "The model"):
            self.samples = [self._sample(self.example)]
        for axis in opened:
            # A trace takes `len(x)` for a constant. Some models take one size, or know a longest.
            with contextlib.suppress(NotImplementedError), recording(model, "Other sizes"):
                others = [_resized(part, axis, -1 if axis else 1) for part in self.example]
                self.samples.append(self._sample(others))

    def dynamic_shapes(self) -> tuple:
        """Return the open axes as `torch.export` takes them, of `self.largest` at most."""
        if any(isinstance(part, torch.jit.RecursiveScriptModule) for part in self.modules()):
            raise NotImplementedError("torch.export cannot follow TorchScript within the model")
        size = torch.export.Dim.DYNAMIC(max=self.largest)
        return (tuple(dict.fromkeys(axes, size) for axes in self.open_axes),)

    def program(self, module: nn.Module | None = None) -> torch.export.ExportedProgram:
        """Return what `torch.export` records of the model, or of a module in its place."""
        what, shapes, refused = (module or self, self.example), self.dynamic_shapes(), []
        for strict in (False, True):  # Dynamo, which is slower, knows that `len(x)` is open
            try:
                return torch.export.export(*what, dynamic_shapes=shapes, strict=strict)
            except Exception as error:
                refused.append(error)
        raise refused[0]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return what the model gives."""
        return tuple(part for _, part in self._named(*tensors))

    def look_beyond(self, program: torch.export.ExportedProgram) -> None:
        """Call the model with sizes just beyond the bounds of a program, where it takes them.

        Of a branch on an open size (`if x.shape[1] > 8`) a program has the side of the example.
        """
        nodes = {node.name: node for node in program.graph.nodes}
        shapes = [nodes[name].meta["val"].shape for name in program.graph_signature.user_inputs]
        for symbol, bounds in program.range_constraints.items():
            # Below 2 all are bound: torch.export takes a size of 1 for a constant.
            sizes = [int(bounds.lower) - 1] if bounds.lower > 2 else []
            sizes += [int(bounds.upper) + 1] if bounds.upper < (self.largest or _LARGE) else []
            for size in sizes:
                inputs = []
                for part, shape in zip(self.example, shapes, strict=True):
                    for axis, own in enumerate(shape):
                        is_it = isinstance(own, torch.SymInt) and own.node.expr == symbol
                        if is_it and part.numel() // part.shape[axis] * size <= _LARGE:
                            part = _resized(part, axis, size - part.shape[axis])
                    inputs.append(part)
                with contextlib.suppress(NotImplementedError), recording(self.model, "Others"):
                    self.beyond.append(self._sample(inputs))

    def _sample(self, inputs) -> tuple[list, list]:
        copies = [part.clone() for part in inputs]
        named = self._named(*copies)
        self.changes_inputs |= any(part._version > 0 for part in copies)
        self.outputs = self.outputs or [name for name, _ in named]
        tensors = inputs, [part for _, part in named]
        return tuple([part.cpu().numpy() for part in each] for each in tensors)

    def _named(self, *tensors: Tensor) -> list[tuple[str, Tensor]]:
        parts = list(self.fixed)
        for place, tensor in zip(self.places, tensors, strict=True):
            parts[place] = tensor.clone() if self.changes_inputs else tensor  # a file's are kept
        return named_tensors(call(self.model, tree_unflatten(parts, self.structure)))


def call(model: nn.Module, x):
    """Return what the model gives for x: a tensor, a tuple `*x` or a dict `**x`."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


@contextlib.contextmanager
def recording(model: nn.Module, target: str) -> Iterator[None]:
    """In evaluation mode, without gradients; errors become NotImplementedError, on one line.

    Afterwards modes are as they were. Of what torch.export prints and logs nothing is shown where
    the model is refused.
    """
    modes, said = {module: module.training for module in model.modules()}, io.StringIO()
    level, fast = logging.root.manager.disable, torch.backends.mha.get_fastpath_enabled()
    model.eval()
    logging.disable(logging.CRITICAL)
    # One operator for a whole `nn.TransformerEncoderLayer`, which other runtimes lack.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), contextlib.redirect_stderr(said), runtimes.translating(target):
            yield
    finally:
        logging.disable(level)
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, mode in modes.items():
            if module.training != mode:
                module.train(mode)  # some do more in it, as LoRA does
    print(said.getvalue(), end="", file=sys.stderr)


def tensors_of(x) -> list[Tensor]:
    """Return the tensors in x, in nested tuples, lists and dicts."""
    return [part for part in tree_leaves(x) if isinstance(part, Tensor)]


def named_tensors(output, name: str = "") -> list[tuple[str, Tensor]]:
    """Return the tensors of an output, each with the name of its place.

    Raises NotImplementedError where something in it is no tensor.
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
    named = (named_tensors(part, key) for key, part in inside.items() if part is not None)
    return [pair for each in named for pair in each]


def _input_names(model: nn.Module, inputs, count: int) -> list[str]:
    """What the model calls its inputs: the keys of a dict, or `forward`'s arguments."""
    if isinstance(inputs, dict) and len(inputs) == count:
        return list(map(str, inputs))
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    known = inspect.signature(model.forward).parameters.values()
    names = [argument.name for argument in known if argument.kind in kinds][:count]
    given = len(inputs) if isinstance(inputs, tuple) else 1
    return names if len(names) == count == given else [f"input_{n}" for n in range(count)]


def _resized(tensor: Tensor, axis: int, more: int) -> Tensor:
    """The tensor with more or fewer rows along an axis, two or more: its own, again."""
    if axis >= tensor.ndim:
        return tensor
    size = tensor.shape[axis]
    rows = torch.arange(size + (more if size + more > 1 else 1), device=tensor.device) % size
    return tensor.index_select(axis, rows)


def _at_least_two(tensor: Tensor, axes: list[int]) -> Tensor:
    for axis in axes:  # a size of one would become a constant
        tensor = torch.cat([tensor] * 2, axis) if tensor.shape[axis] == 1 else tensor
    return tensor
