"""PyTorch's models for the tests of memory format."""

import torch
from torch import nn

from pt_impl.kit import operators  # noqa: F401 - the tests take it
from tests.train_step.pt_steps import dense

DEFAULT = "channels_first"


def counts(number):
    """What `number` convolutions read and write, but for the one channel of the first's input."""
    return 2 * number - 1, 2 * number - 1


class Two(nn.Module):
    """Two images whose branches meet, a transposed convolution, buffers that are no weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
        self.norm, self.up = nn.BatchNorm2d(16), nn.ConvTranspose2d(16, 4, 2, 2)
        self.head = nn.Linear(4, 5)
        self.register_buffer("grid", torch.zeros(1, 1, 1, 2, 3))
        self.register_buffer("table", torch.zeros(1, 2, 3, 4))

    def forward(self, a, b):
        both = torch.cat([self.left(a), self.right(b)], 1).relu()
        return {"logits": self.head(self.up(self.norm(both)).mean((2, 3)))}


class Reshaping(nn.Module):
    """An operator between convolutions writes channels_first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.second(self.first(x).contiguous())


def tabled():
    """No convolution, and a 4-D buffer."""
    model = dense()
    model.register_buffer("table", torch.zeros(1, 2, 3, 4))
    return model
