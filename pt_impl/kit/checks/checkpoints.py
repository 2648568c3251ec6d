"""What checkpoints refuse: files of another model or optimizer, and weights beyond float16."""

import torch
from torch import nn
from torch.nn.parameter import is_lazy

# Settings that torch's schedules, and optimizers of named parameters, add to an optimizer's groups.
ADDED = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "param_names"}


def check_checkpoint(
    path, content: dict, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:
    """Raise ValueError where a file is of another model or optimizer, or holds only weights."""
    _check_weights(path, model, content["weights"])
    if optimizer is not None:
        if "optimizer" not in content:
            raise ValueError(f"{path} holds only weights: it can't be resumed from")
        _check_optimizer(path, optimizer, content["optimizer"])


def with_added(optimizer: torch.optim.Optimizer, saved: dict) -> dict:
    """Return an optimizer's saved state, with what schedules have added to its groups here."""
    for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        group |= {key: own[key] for key in ADDED & (own.keys() - group.keys())}
    return saved


def halved(name: str, value):
    """Return a floating tensor in float16; ValueError where a value does not fit."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    half = value.to(torch.float16)
    if half.isfinite().all() != value.isfinite().all():
        raise ValueError(f"{name} has values beyond float16's 65504: leave half_precision out")
    return half


def _check_weights(path, model: nn.Module, weights: dict) -> None:
    ours, theirs = (
        {name: _shape(value) for name, value in each.items()}
        for each in (model.state_dict(), weights)
    )
    for name in ours.keys() & theirs.keys():
        if ours[name] is None:
            ours[name] = theirs[name]
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"{path} is of another model: {name} is {theirs.get(name, 'missing')} there, "
                f"{ours.get(name, 'missing')} here"
            )


def _shape(value) -> tuple | None:
    """None of a lazy layer that was not called yet; a module's extra state may be anything."""
    if is_lazy(value):
        return None
    return tuple(getattr(value, "shape", ()))


def _check_optimizer(path, optimizer: torch.optim.Optimizer, saved: dict) -> None:
    ours = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    keys = [set(group) - ADDED for group in optimizer.param_groups]
    same = keys == [set(group) - ADDED for group in saved["param_groups"]]
    if ours != theirs or not same:
        raise ValueError(f"{path} is of another optimizer: its groups or their settings differ")
