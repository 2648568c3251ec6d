"""What weight quantization refuses: models without layers to round, and weights that do not fit."""

import copy
import math

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map  # torch has no public one

from pt_impl.kit.checks.example_inputs import check_example_inputs

MOST_APART = 0.5  # relative L2: outputs over rounded weights to the model's


def check_weight_quantization(
    model: nn.Module, inputs, *, inputs_by: int = 1, outputs_by: int = 1
) -> set[str]:
    """Return the names of the linear layers whose weights torchao can round.

    Those are layers that a call of the model calls, whose inputs and outputs are multiples of
    these. `nn.MultiheadAttention` reads the weight of its last layer without a call.
    """
    check_example_inputs(model, inputs)
    called = _called(model, inputs)
    if not called:
        raise NotImplementedError("the model has no linear layer that it calls")
    if any(layer.weight.dtype == torch.float64 for layer in called.values()):
        raise NotImplementedError("torchao rounds no weights of float64: call .float() first")
    fitting = {
        name
        for name, layer in called.items()
        if layer.in_features % inputs_by == layer.out_features % outputs_by == 0
    }
    if not fitting:
        multiples = f"multiples of {inputs_by} inputs and {outputs_by} outputs"
        raise NotImplementedError(f"the model has no linear layer with {multiples}")
    return fitting


def check_rounded(rounded: nn.Module, model: nn.Module, inputs) -> None:
    """Refuse a copy with rounded weights that does not compute, or computes something else."""
    wanted = _outputs(copy.deepcopy(model).cpu().eval(), inputs)
    try:
        found = _outputs(rounded, inputs)
    except Exception as error:  # of a module that reads the weight of another one
        line = " ".join(str(error).split())[:300]
        raise NotImplementedError(f"torchao's weights do not compute in it: {line}") from error
    off = max(map(_apart, found, wanted))
    if not off <= MOST_APART:
        raise RuntimeError(f"outputs of the quantized model are {off:.2%} off the model's")


def _called(model: nn.Module, inputs) -> dict[str, nn.Linear]:
    """Linear layers that are called; not those whose weight is computed, as a weight norm does."""
    model, called = copy.deepcopy(model).cpu().eval(), {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and "weight" in layer._parameters:
            layer.register_forward_hook(lambda layer, *_, name=name: called.update({name: layer}))
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it calls no layer; not for integers
    try:
        _outputs(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return called


def _outputs(model: nn.Module, inputs) -> list[Tensor]:
    inputs = tree_map(lambda part: part.cpu().clone(), inputs)  # a model may change them in place
    with torch.no_grad():
        if isinstance(inputs, dict):
            output = model(**inputs)
        else:
            output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    return tree_leaves(getattr(output, "logits", output))


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """Relative L2, where both are finite; inf where only one of them is."""
    finite = theirs.isfinite()
    if not torch.equal(ours.isfinite(), finite):
        return math.inf
    ours, theirs = ours[finite].double(), theirs[finite].double()
    return ((ours - theirs).norm() / (theirs.norm().item() or 1.0)).item()
