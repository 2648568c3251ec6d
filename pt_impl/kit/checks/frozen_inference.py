"""What frozen inference refuses, and what of a carried cache was found."""

import copy
from collections import Counter

import torch
from torch import fx, nn

_KINDS = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._NormBase)


def check_fusion(model: nn.Module) -> None:
    """Refuse a model that torch.fx cannot trace, or that calls a layer to fuse twice.

    Upstream would fold one call's BatchNorm into both.
    """
    try:
        graph = fx.symbolic_trace(copy.deepcopy(model).eval()).graph
    except Exception as error:  # of many kinds, from the model's own code too
        line = " ".join(str(error).split())[:300] or type(error).__name__
        raise NotImplementedError(f"torch.fx cannot trace the model: {line}") from error
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    for name, count in calls.items():
        if count > 1 and isinstance(model.get_submodule(name), _KINDS):
            raise NotImplementedError(f"{name} is called {count} times: it has no one BatchNorm")


def check_copy(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode, without gradients; refuse a model that cannot be copied."""
    try:
        return copy.deepcopy(model).eval().requires_grad_(False)
    except Exception as error:
        line = " ".join(str(error).split())[:300]
        raise NotImplementedError(f"Python cannot copy the model: {line}") from error


def cache_hits() -> int:
    """Graphs of this process that TorchInductor found compiled in its cache."""
    return torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
