"""A copy of any module, with all of its state, compared with the module.

Twin: `tf_impl/kit/copying.py`.
Where the frameworks differ: `copy.deepcopy` copies any module. Keras makes each layer anew from its
configuration and hands its state over.
"""

import copy

import torch
from torch import Tensor, nn

from pt_impl.kit.calling import infer
from pt_impl.kit.comparing import apart


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
        reason = f"the model does not take the example input: {_one_line(error)}"
        raise ValueError(reason) from error
    try:
        with torch.no_grad():  # TorchScript copies parameters by an operator: they were no leaves
            twin = copy.deepcopy(model)
    except Exception as error:  # such as a tensor that is not a leaf of the graph
        raise NotImplementedError(f"Python cannot copy the model: {_one_line(error)}") from error
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
    if apart(*map(_state, (twin, model))) > 0:
        raise NotImplementedError("the copy has another state")
    if x is not None and apart(_evaluated(twin, x), wanted) > 1e-5:
        raise NotImplementedError("the copy computes something else")
    return twin


def _state(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers, and no extra state of a module."""
    return [value for value in model.state_dict().values() if isinstance(value, Tensor)]


def _evaluated(model: nn.Module, x):
    output = infer(model, x)
    return getattr(output, "logits", output)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
