"""What model parallelism refuses, and a repair of the pipelines that torch cuts."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

SCHEDULES = ("gpipe", "1f1b")


def check_model_parallel(samples: int, stages: int, micro_batches: int, schedule: str) -> None:
    """Raise ValueError for a schedule that is not there, and numbers that don't fit."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be gpipe or 1f1b, not {schedule!r}")
    if micro_batches < 1 or samples % micro_batches:
        raise ValueError(f"{micro_batches} micro_batches do not divide a batch of {samples}")
    if schedule == "1f1b" and micro_batches < stages:
        raise ValueError(f"1f1b with {stages} stages needs {stages} micro_batches or more")


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters of each group.

    Raises NotImplementedError for parameters that are not the model's.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names.get(id(own)) for own in group["params"]] for group in optimizer.param_groups]
    if any(None in group for group in groups):
        raise NotImplementedError(
            "the optimizer has parameters that the model has not, such as a loss's own: make them"
            " the model's"
        )
    return groups


def check_cut(model: nn.Module, names: list[str]) -> None:
    """Raise ValueError for modules that are not there; NotImplementedError: shared parameters."""
    known = [name for name, _ in model.named_modules() if name]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"cut: there is no module {unknown[0]!r}; there are {', '.join(known)}")
    if len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters())):
        raise NotImplementedError("a parameter is used twice: pipelining would train copies of it")


@contextmanager
def tracing() -> Iterator[None]:
    """Raise NotImplementedError with one line for whatever torch.export does not know inside."""
    try:
        yield
    except Exception as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise NotImplementedError(f"torch.export can't trace the model: {reason}") from None


def check_stages(pipe, names: list[str]) -> None:
    """Raise ValueError where a forward pass does not begin a stage at each name."""
    if pipe.num_stages != len(names) + 1:
        raise ValueError(f"cut: {', '.join(names)} make {pipe.num_stages} stages in a forward pass")


def order_inputs(pipe) -> None:
    """Let the first stage take inputs in the model's order.

    A trace of torch 2.15 has them in the order in which they are used. This can go when a model of
    two inputs, of which it uses the second first, trains in a pipeline without it.
    """
    whole, first = pipe.split_gm.graph, pipe.get_stage_module(0)
    call = next(node for node in whole.nodes if node.op == "call_module")
    given = [node for node in whole.nodes if node.op == "placeholder"]
    taken = [node for node in first.graph.nodes if node.op == "placeholder"]
    pairs = sorted(zip(call.args, taken, strict=True), key=lambda pair: given.index(pair[0]))
    rest = next(node for node in first.graph.nodes if node.op != "placeholder")
    for _, node in pairs:
        rest.prepend(node)
    call.args = tuple(argument for argument, _ in pairs)
    first.recompile()
