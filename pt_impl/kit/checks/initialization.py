"""What initialization refuses: unknown schemes, and kernels that are not there or are computed."""

from torch import nn


def check_initialization(model: nn.Module, scheme: str, gain: float, schemes: tuple) -> None:
    """Raise ValueError for settings out of range, and for a model without parameters yet.

    Raises NotImplementedError for kernels that are computed from others (weight norm and the like).
    """
    if scheme not in schemes or gain <= 0 or (scheme == "default" and gain != 1):
        raise ValueError(
            f"scheme is one of {', '.join(schemes)} and gain above 0 (1 with default), "
            f"not {scheme!r} and {gain}"
        )
    for name, module in model.named_modules():
        if any(nn.parameter.is_lazy(p) for p in module._parameters.values()):
            raise ValueError(f"{name} has no parameters yet: call the model once on an example")
        computed = nn.utils.parametrize.is_parametrized(module)
        hooks = [type(hook).__name__ for hook in module._forward_pre_hooks.values()]
        if computed or {"WeightNorm", "SpectralNorm"} & set(hooks):
            raise NotImplementedError(
                f"{name}: its weight is computed from others: initialize first, then parametrize"
            )
