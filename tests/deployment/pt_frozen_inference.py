"""PyTorch's models and words for the tests of frozen inference."""

from contextlib import contextmanager

import torch
from torch import nn
from torch._inductor.utils import fresh_cache

from pt_impl.kit.checks.frozen_inference import cache_hits  # noqa: F401 - the tests take it


@contextmanager
def new_cache():
    """As in another process: nothing is compiled, and nothing kept."""
    torch._dynamo.reset()
    with fresh_cache():
        yield


def twice():
    """A convolution that is called twice, of which one call has a BatchNorm."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)

        def forward(self, x):
            return self.bn(self.conv(x)) + self.conv(x)

    return Twice()


def branch():
    """A model that asks for a value."""

    class Branch(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    return Branch()
