"""PyTorch's models for the tests of gradient accumulation."""

import torch
from torch import nn

from tests.train_step.pt_steps import (  # noqa: F401 - the tests take these
    dense,
    descent,
    freeze,
    recorder,
    squares,
    state,
    tensor,
)


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
