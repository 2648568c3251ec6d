"""A trial that leaves no trace: model, optimizer and random numbers come back bit for bit.

Twin: `tf_impl/kit/restoring.py`.
Where the frameworks differ: random state is global here; Keras 3 layers hold theirs as variables of
the model. Gradients and modes are state of a module; in TensorFlow they are values and arguments.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@contextmanager
def restored(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Give model, optimizer and generators back what they had, whatever happens inside.

    Parameters (those of a loss too, where the optimizer has them), buffers, gradients, modes, the
    optimizer's state and rates, and torch's random state. A state that was empty is empty again.
    """
    # A model may put another tensor in place of a buffer.
    places = [(m, *each) for m in model.modules() for each in m.named_buffers(recurse=False)]
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    parameters = list(dict.fromkeys([*model.parameters(), *trained]))
    tensors = [*parameters, *model.buffers()]
    kept = [tensor.detach().clone() for tensor in tensors]
    gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
    modes = {module: module.training for module in model.modules()}
    states = {p: {k: _kept(v) for k, v in s.items()} for p, s in optimizer.state.items()}
    rates = [_kept(group["lr"]) for group in optimizer.param_groups]
    random, on_gpus = torch.get_rng_state(), torch.cuda.get_rng_state_all()
    try:
        yield
    finally:
        for module, mode in modes.items():  # first: some write their weights in it, as LoRA does
            if module.training != mode:
                module.train(mode)
        for module, name, buffer in places:
            setattr(module, name, buffer)
        for tensor, value in zip(tensors, kept, strict=True):
            _given_back(tensor, value)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.state.clear()
        for parameter, state in states.items():
            optimizer.state[parameter] = {name: _given_back(*v) for name, v in state.items()}
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = _given_back(*rate)
        torch.set_rng_state(random)
        torch.cuda.set_rng_state_all(on_gpus)


def _kept(value) -> tuple:
    """A value and a copy of it."""
    return value, value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


@torch.no_grad()
def _given_back(value, kept):
    """What was kept, in the same tensor if it is one: a captured step goes on reading that one."""
    return value.copy_(kept) if isinstance(value, Tensor) else kept
