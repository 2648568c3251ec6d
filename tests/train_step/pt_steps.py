"""PyTorch's models and words for most tests of train steps."""

from collections import UserDict

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pt_impl import kit  # noqa: F401 - the tests take these
from tests.compression.pt_distillation import (  # noqa: F401
    cast,
    descent,
    freeze,
    numpy,
    recorder,
    state,
)


def tensor(values):
    return torch.as_tensor(values)


def dense(inputs=4, outputs=3):
    torch.manual_seed(1)
    return nn.Linear(inputs, outputs)


def squares(output, y):
    return nn.functional.mse_loss(output, y)


def dtypes(tensors):
    return {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}


def kept(prepared):
    """What training keeps: parameters, gradients and the optimizer's state."""
    parameters = list(prepared.model.parameters())
    states = [v for s in prepared.optimizer.state.values() for v in s.values()]
    return [*parameters, *(p.grad for p in parameters), *states]


def call(model, x):
    """Plain code: a mapping is the model's keywords, a tuple its arguments."""
    if isinstance(x, dict | UserDict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def reads(function, *arguments) -> int:
    """How often a call reads a value from the device on the host, which waits for it."""

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function is torch.ops.aten._local_scalar_dense.default
            return function(*args, **(kwargs or {}))

    with Reads() as reads:
        function(*arguments)
    return reads.count


# Gradient accumulation ----------------------------------------------------------------------------


class Spy(torch.autograd.Function):
    events = []  # noqa: RUF012 - what a test looks at

    @staticmethod
    def forward(ctx, x):
        Spy.events.append(f"forward {len(x)}")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Spy.events.append(f"backward {len(gradient)}")
        return gradient


def spied():
    """A model that notes when it goes forward and backward, and the notes."""
    model = dense()
    model.register_forward_hook(lambda module, inputs, output: Spy.apply(output))
    return model, Spy.events


class Deep(nn.Module):
    """Its activations outweigh all else: 12 of 16 MiB for 1024 samples of 4096 numbers."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4096))

    def forward(self, x):
        for _ in range(12):
            x = torch.tanh(x * self.scale)
        return x


deep = Deep


# Gradient clipping --------------------------------------------------------------------------------


def embedding():
    return nn.Embedding(4, 2)


def only_weight(model):
    return model.weight.detach().numpy()


def total(values):
    return values.sum()


def clipped(make, gradients):
    """The gradients after clipping, and their norm before it where there is one; None is missing.

    make: the clipper of a model.
    """
    tensors = [None if g is None else torch.from_numpy(g) for g in gradients]
    model = nn.ParameterList(
        [torch.zeros(1) if g is None else torch.zeros_like(g) for g in tensors]
    )
    for parameter, gradient in zip(model, tensors, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()
    clipper = make(model)
    norm = clipper.norm().item() if hasattr(clipper, "norm") else None
    clipper.clip()
    return [np.array(p.grad) for p in model if p.grad is not None], norm


def scaled(technique, prepared, loss_fn, x, y, scale, max_norm, in_order):
    """A loop of GradScaler's with the clipper; out of order it clips before `unscale_`."""
    model, optimizer = prepared.model, prepared.optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(loss_fn(model(x), y)).backward()
    if in_order:
        scaler.unscale_(optimizer)
    technique.GradientClipper(model, max_norm=max_norm).clip()
    scaler.step(optimizer)


# Optimizer implementations ------------------------------------------------------------------------


def buffers(model):
    """Tensors to hold the gradients."""
    return [torch.zeros_like(parameter) for parameter in model.parameters()]


def fill(buffers, carrier):
    """Put a model's parameters there."""
    for buffer, value in zip(buffers, carrier.parameters(), strict=True):
        buffer.copy_(value.detach())


def looked_up(make):
    """What the first update makes of a table of zeros that looks row 0 up twice."""
    model = torch.nn.Embedding(3, 1, _weight=torch.zeros(3, 1))
    optimizer = make(model, learning_rate=0.5)
    (model(torch.tensor([0, 0, 1])) * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
    optimizer.step()
    return model.weight.detach().flatten().tolist()
