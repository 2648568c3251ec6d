"""What regularization refuses: shares out of range, optimizers whose decay is L2, unclear heads."""

import torch
from torch import nn
from torch.optim import Optimizer


def check_decay(weight_decay: float) -> None:
    """Raise ValueError for a decay below 0, or that is no number."""
    if not 0 <= weight_decay < float("inf"):
        raise ValueError(f"weight_decay is 0 or more, not {weight_decay!r}")


def check_decayed(parameters: list) -> None:
    """Raise ValueError where nothing decays."""
    if not parameters:
        raise ValueError("the model has nothing that decays")


def check_optimizer(optimizer: Optimizer, decayed: list[nn.Parameter]) -> None:
    """Raise for an optimizer that cannot have decoupled decay of these parameters.

    Raises NotImplementedError where its decay is L2, ValueError where it has a scheduler,
    which counts its groups, or where it trains none of them.
    """
    kind = type(optimizer).__name__
    always = kind in ("AdamW", "Adafactor", "Muon")
    for group in optimizer.param_groups:
        plain = kind == "SGD" and not group["momentum"]  # L2 and decay are the same
        if not (always or plain or group.get("decoupled_weight_decay")):
            raise NotImplementedError(
                f"the weight_decay of {kind} is a gradient, which its state takes in: use AdamW or "
                "decoupled_weight_decay=True, or l2_penalty for what it does"
            )
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ValueError("the optimizer has a scheduler: set the decay first")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not held & {id(p) for p in decayed}:
        raise ValueError("the model has nothing in the optimizer that decays")


def check_share(share: float, name: str) -> None:
    """Raise ValueError for a share that is not in [0, 1)."""
    if not 0 <= share < 1:
        raise ValueError(f"{name} is at least 0 and below 1, not {share!r}")


def check_batch_sizes(batch_size: int, nominal_batch_size: int) -> None:
    """Raise ValueError for a batch size below 1."""
    if batch_size < 1 or nominal_batch_size < 1:
        raise ValueError(f"batch sizes are 1 or more, not {batch_size}, {nominal_batch_size}")


def check_scripted(model: nn.Module) -> None:
    """Raise NotImplementedError for dropout whose rate is a constant of TorchScript."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and "Dropout" in module.original_name:
            raise NotImplementedError(f"{name} is TorchScript, of which its rate is a constant")


def check_dropouts(found: list[str]) -> None:
    """Raise ValueError where a model has no dropout whose rate could be set."""
    if not found:
        raise ValueError("the model has no dropout that is on: use add_dropout")


def find_head(model: nn.Module, head: str, hook: type) -> nn.Module:
    """Return the module before which dropout is to stand: the one of this name, or the last Linear.

    hook: the type of what drops a module's input already.

    Raises ValueError where there is none, one of several that none names, or dropout before it.
    """
    modules = dict(model.named_modules())
    head = head or _last_linear(modules)
    if head not in modules or not head:
        raise ValueError(f"no head {head!r}: name the module before which dropout is to stand")
    hooked = any(isinstance(each, hook) for each in modules[head]._forward_pre_hooks.values())
    if hooked or isinstance(_before(modules, head), nn.Dropout):
        raise ValueError(f"{head} has dropout before it: set its rate with set_dropout_rate")
    return modules[head]


def _last_linear(modules: dict[str, nn.Module]) -> str:
    """The name of the last one; raises ValueError where another seems to read the same.

    That is the one before, of one module with it, with as many inputs and other outputs: classes
    beside boxes, an actor beside a critic.
    """
    names = [name for name, module in modules.items() if type(module) is nn.Linear]
    if not names:
        return ""
    other, head = names[-2:] if len(names) > 1 else (None, names[0])
    around = head.rpartition(".")[0]
    beside = other is not None and other.rpartition(".")[0] == around
    if beside and not isinstance(modules[around], nn.Sequential):
        count, before = modules[head].in_features, modules[other]
        if before.in_features == count != before.out_features:
            both = f", or {around} for both" if around else ""
            raise ValueError(f"{other} seems to be a head beside {head}: name one{both}")
    return head


def _before(modules: dict[str, nn.Module], head: str) -> nn.Module | None:
    """The layer that runs before the head, as far as definitions tell: within blocks they don't."""
    leaves = [name for name, module in modules.items() if not list(module.children())]
    if head not in leaves[1:]:
        return None
    before = leaves[leaves.index(head) - 1]
    around = [name for name in modules if before.startswith(f"{name}.")]
    within = [modules[name] for name in around if not head.startswith(f"{name}.")]
    return modules[before] if all(isinstance(m, nn.Sequential) for m in within) else None
