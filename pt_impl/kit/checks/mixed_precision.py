"""What half-width arithmetic refuses: models and devices that cannot compute in it."""

import torch
from torch import nn

DTYPES = ("bfloat16", "float16", "float32")


def check_mixed_precision(model: nn.Module, dtype: str, keep_fp32: str) -> list[nn.Module]:
    """Check the settings against model and device; return the modules to keep in float32.

    Raises ValueError for an unknown dtype or layer, half-width parameters and a model without any;
    NotImplementedError where the device or a layer cannot compute in `dtype`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    kept = _find_modules(model, keep_fp32)
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise ValueError("the model has no parameters: there is nothing to compute with")
    device = parameter.device.type
    if dtype == "float32":
        return kept
    for name, parameter in model.named_parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(f"master weights are float32, but {name} is {parameter.dtype}")
    _check_device(device, dtype)
    if device == "cpu":
        _check_layers(model, kept)
    return kept


def _check_layers(model: nn.Module, kept: list[nn.Module]) -> None:
    """Raise NotImplementedError for layers without kernels under a CPU's autocast."""
    # oneDNN has none for an LSTM in half precision, which torch asks it for, below AVX-512.
    lacks_lstm = torch.backends.cpu.get_cpu_capability() in ("AVX2", "NO AVX")
    for name, module in model.named_modules():
        if module in kept:
            continue
        if isinstance(module, nn.Bilinear):
            raise NotImplementedError(
                f"a CPU's autocast does not cast what nn.Bilinear gets: keep_fp32={name!r}"
            )
        if isinstance(module, nn.LSTM) and lacks_lstm:
            raise NotImplementedError(
                f"a CPU without AVX-512 has no nn.LSTM in half precision: keep_fp32={name!r}"
            )


def _check_device(device: str, dtype: str) -> None:
    if not torch.amp.is_autocast_available(device):
        raise NotImplementedError(f"torch has no autocast for the device {device!r}")
    bfloat16_on_gpu = (device, dtype) == ("cuda", "bfloat16")
    if bfloat16_on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise NotImplementedError("this GPU has no bfloat16 arithmetic: choose float16")


def _find_modules(model: nn.Module, names: str) -> list[nn.Module]:
    """Return the named submodules and all that they contain, each once."""
    modules = dict(model.named_modules())
    kept: dict[nn.Module, None] = {}
    for name in filter(None, map(str.strip, names.split(","))):
        if name not in modules:
            known = ", ".join(filter(None, modules))
            raise ValueError(f"keep_fp32: the model has no layer {name!r}; it has {known}")
        owner = name.rpartition(".")[0]
        if owner and isinstance(modules[owner], nn.MultiheadAttention):
            raise NotImplementedError(
                f"keep_fp32: MultiheadAttention reads the weights of {name!r} and never calls it:"
                f" keep {owner!r}"
            )
        kept |= dict.fromkeys(modules[name].modules())
    return list(kept)
