"""What compilation refuses: modes that `torch.compile` has not, and names of no block."""

from fnmatch import fnmatchcase

import torch
from torch import nn

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def check_compilation(mode: str) -> None:
    """Raise ValueError for an unknown mode."""
    if mode not in _MODES:
        raise ValueError(f"unknown mode {mode!r}: choose one of {', '.join(_MODES)}")


def check_blocks(model: nn.Module, blocks: str) -> list[nn.Module]:
    """Return the submodules that `blocks` names, but for those inside another of them.

    Raises ValueError for names that no submodule has.
    """
    # Containers such as ModuleList never run themselves, so there is nothing to compile.
    modules = {name: module for name, module in model.named_modules() if name and _runs(module)}
    chosen: dict[str, None] = {}
    for pattern in filter(None, map(str.strip, blocks.split(","))):
        names = [name for name in modules if fnmatchcase(name, pattern)]
        if not names:
            known = ", ".join(modules)
            raise ValueError(f"blocks: the model has no block {pattern!r}; it has {known}")
        chosen |= dict.fromkeys(names)
    inside = {n for n in chosen for other in chosen if n.startswith(f"{other}.")}
    return [modules[name] for name in chosen if name not in inside]


def _runs(module: nn.Module) -> bool:
    """Whether it has a forward; the class of TorchScript's modules has none to be asked for."""
    scripted = isinstance(module, torch.jit.ScriptModule)
    return scripted or type(module).forward is not nn.Module.forward
