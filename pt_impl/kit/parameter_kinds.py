"""Which parameters of a model are kernels, and which are biases, norms' or embeddings'.

Twin: `tf_impl/kit/parameter_kinds.py`.
Where the frameworks differ: `Linear.weight` and an embedding's are both `weight`, so the module
tells them apart. Keras calls kernels kernels.
"""

from collections.abc import Iterable

import torch
from torch import nn

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def of_kinds(model: nn.Module, kinds: Iterable[str]) -> list[nn.Parameter]:
    """Return the parameters of these kinds, frozen ones as well, in the model's order.

    kinds: of "kernel", "bias", "norm" and "embedding". Kernels are weights of two or more axes that
    are no embedding's, nor tied to one. What is none of these (class tokens, positions, slopes) is
    of kind "other".
    """
    found = _kinds(model)
    return [parameter for parameter in model.parameters() if found[id(parameter)] in kinds]


def _kinds(model: nn.Module) -> dict[int, str]:
    found: dict[int, str] = {}
    for module in model.modules():
        kind = _type(module)
        for name, parameter in _own(module):
            if issubclass(kind, nn.Embedding | nn.EmbeddingBag):
                found[id(parameter)] = "embedding"  # also where a head is tied to it
            elif issubclass(kind, NORMS):
                found.setdefault(id(parameter), "norm")
            elif "bias" in name:
                found.setdefault(id(parameter), "bias")
            else:
                kernel = "weight" in name and parameter.ndim > 1
                found.setdefault(id(parameter), "kernel" if kernel else "other")
    return found


def _type(module: nn.Module) -> type:
    """Its class; of what is TorchScript the one of torch.nn that it was made from, if it was."""
    scripted = isinstance(module, torch.jit.ScriptModule)
    return getattr(nn, module.original_name, nn.Module) if scripted else type(module)


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of this module itself, by the names that it knows them by."""
    found = list(module.named_parameters(recurse=False))
    if nn.utils.parametrize.is_parametrized(module):  # what a weight is computed from is its own
        for name, originals in module.parametrizations.items():
            found += [(name, p) for p in originals.parameters(recurse=False)]
    return found
