"""What example inputs have to be for a model to be traced, rounded or written.

Twin: `tf_impl/kit/checks/example_inputs.py`.
"""

import copy

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map  # torch has no public one


def check_example_inputs(model: nn.Module, inputs):
    """Return what the model makes of two samples, in evaluation mode, on the CPU.

    inputs: a tensor, a tuple of the model's positional arguments or a dict of those by name,
    tensors all; samples along the first axis. The model is left as it is.

    Raises ValueError for inputs without samples, with values that are not finite, or that the model
    does not take; NotImplementedError for a model that cannot be copied or that returns something
    else than tensors, in tuples, lists and dicts.
    """
    tensors = tuple(inputs.values()) if isinstance(inputs, dict) else _tuple(inputs)
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
        raise NotImplementedError(f"the model cannot be copied: {_one_line(error)}") from error
    try:
        with torch.no_grad():
            two = _two(inputs)
            output = copied(**two) if isinstance(two, dict) else copied(*_tuple(two))
            output = getattr(output, "logits", output)
    except Exception as error:
        given = ", ".join(f"{str(part.dtype)[6:]} {list(part.shape[1:])}" for part in tensors)
        raise ValueError(f"the model takes no samples of {given}: {_one_line(error)}") from error
    _check_output(output)
    return output


def _tuple(inputs) -> tuple:
    return inputs if isinstance(inputs, tuple) else (inputs,)


def _check_output(output) -> None:
    for part in _leaves(output):
        if not isinstance(part, Tensor):
            raise NotImplementedError(
                f"the model returns {type(part).__name__}, which is no tensor"
            )


def _leaves(output) -> list[Tensor]:
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return [leaf for part in output for leaf in _leaves(part)]
    return [output]


def _two(inputs):
    """Two samples of each input: one would fix their number."""
    return tree_map(lambda part: part[[0, 0]].cpu(), inputs)


def _one_line(error: Exception) -> str:
    """Return an error's words as one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
