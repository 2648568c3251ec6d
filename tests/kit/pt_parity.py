"""PyTorch's words for the tests of equal work."""

import contextlib

import torch

from pt_impl.kit import detection  # noqa: F401 - tests take it

cross_entropy_64 = torch.nn.functional.cross_entropy


def numpy(tensor):
    return tensor.detach().cpu().numpy().copy()


def channels_last(x):
    return numpy(x.permute(0, 2, 3, 1) if x.ndim == 4 else x)


def gradients(model, named, loss_fn, x, y):
    model.zero_grad()
    loss_fn(model.train()(x), y).backward()
    return [numpy(parameter.grad) for parameter in named.values()]


def keeps_biased_variance(wide):
    return False


@contextlib.contextmanager
def float64():
    """Models are built and run in float64 inside."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def eager():
    return contextlib.nullcontext()


def update(optimizer, parameters, gradients):
    """One step against tensors by the names of parameters."""
    for name, parameter in parameters.items():
        parameter.grad = gradients[name].detach().clone()
    optimizer.step()
