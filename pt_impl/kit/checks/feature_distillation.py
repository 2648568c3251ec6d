"""What feature distillation refuses: layers that are not there, and features that do not match."""

import math

import torch
from torch import Tensor, nn

from pt_impl.kit.calling import infer

_CHANNELS_SECOND = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d)
_CHANNELS_LAST = (nn.Linear, nn.LayerNorm)  # not kinds of them, which may turn images
_IMAGES = (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.GroupNorm)


def check_feature_distillation(
    taught: nn.Module,
    teacher: nn.Module,
    optimizer: torch.optim.Optimizer,
    teacher_layer: str,
    weight: float,
) -> None:
    """Raise ValueError for a weight below 0, nothing to train, and an optimizer that lacks a part.

    As `check_layer` does for the teacher's.
    """
    if not 0 <= weight < math.inf:
        raise ValueError(f"weight must be at least 0 and finite, not {weight!r}")
    if not any(parameter.requires_grad for parameter in taught.student.parameters()):
        raise ValueError("the student has no trainable parameters: there is nothing to teach")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not held.issuperset(map(id, taught.regressor.parameters())):
        raise ValueError("the optimizer lacks the regressor: make it from taught.parameters()")
    check_layer(teacher, teacher_layer)


def check_layer(model: nn.Module, layer: str) -> None:
    """Raise ValueError for a name that no module of the model has."""
    modules = dict(model.named_modules())
    if layer not in modules:
        known = ", ".join(filter(None, modules))
        raise ValueError(f"the model has no layer {layer!r}; it has {known}")


def one_tensor(caught: list, layer: str) -> Tensor:
    """Return the tensor that a layer gave. Raises ValueError unless it was one, once."""
    if len(caught) != 1:
        raise ValueError(f"{layer!r} runs {len(caught)} times: it must give one tensor, once")
    if not isinstance(caught[0], Tensor):
        kind = type(caught[0]).__name__
        raise ValueError(f"{layer!r} gives a {kind}: it must give one tensor, once")
    return caught[0]


def channel_axis(ours: Tensor, theirs: Tensor, student: tuple, teacher: tuple, x) -> int:
    """Return where both features have their channels, 1 or -1.

    student, teacher: (model, name of its layer). Channels are last in rows (n, channels), in
    sequences (n, t, channels) that no 1-D convolution or BatchNorm gave, and in images that an
    `nn.Linear` or `nn.LayerNorm` gave.

    Raises ValueError for features that differ in another axis.
    """
    kinds = [model.get_submodule(layer) for model, layer in (student, teacher)]
    second = ours.ndim == 3 and any(isinstance(kind, _CHANNELS_SECOND) for kind in kinds)
    last = ours.ndim != 4 or any(_ends_in_rows(*each, x) for each in (student, teacher))
    axis = -1 if last and not second else 1
    wanted = list(theirs.shape)
    if ours.ndim == theirs.ndim:
        wanted[axis] = ours.shape[axis]
    if ours.ndim not in (2, 3, 4) or list(ours.shape) != wanted:
        raise ValueError(
            f"the student's {student[1]!r} gives {list(ours.shape)}, the teacher's "
            f"{teacher[1]!r} {list(theirs.shape)}: name layers that differ only in channels, "
            f"axis {axis}"
        )
    return axis


def _ends_in_rows(model: nn.Module, layer: str, x) -> bool:
    """Whether the layer gives the very tensor of one within that works on the last axis.

    Or one of its shape, as a sum has, where none within that has channels second gives such.
    """
    named, given, found = model.get_submodule(layer), [], []
    kinds = (*_CHANNELS_LAST, *_IMAGES)
    within = [module for module in named.modules() if type(module) in kinds]
    hooks = [m.register_forward_hook(lambda m, _, y: given.append((m, y))) for m in within]

    def look(module, inputs, features):
        alike = [m for m, y in given if y.shape == features.shape]
        found.append(
            any(y is features and type(m) in _CHANNELS_LAST for m, y in given)
            or (bool(alike) and all(type(m) in _CHANNELS_LAST for m in alike))
        )

    hooks.append(named.register_forward_hook(look))
    try:
        infer(model, x)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0]
