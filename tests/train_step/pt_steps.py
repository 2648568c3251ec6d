"""PyTorch's models and words for the tests of train steps."""

from collections import UserDict

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

KERAS_3 = False


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
