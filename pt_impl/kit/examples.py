"""Something to build for what builds its model in each process: examples of "module:function".

What it holds: functions that give a model, its optimizer (without steps behind it) and its loss,
a task's train step with its batches, and a deep network for what depth does.
Twin: `tf_impl/kit/examples.py`.
"""

import torch
from torch import Tensor, nn

from pt_impl.kit.demo import Demo
from shared import demo
from shared.specs import TASKS


class DeepNetwork(nn.Module):
    """Dense layers with rectifiers and a head of 10, plain or with a shortcut around each."""

    def __init__(self, layers: int, width: int, residual: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 10)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        """(n, width) -> (n, 10)."""
        for layer in self.layers:
            out = torch.relu(layer(x))
            x = x + out if self.residual else out
        return self.head(x)


def deep_network(*, layers: int = 30, width: int = 64, residual: bool = False) -> nn.Module:
    """Return dense layers with rectifiers and a head of 10, plain or with shortcuts."""
    return DeepNetwork(layers, width, residual)


def digits_cnn() -> tuple:
    """Return the digits CNN from the weights of seed 0."""
    return demo.built(Demo.kit, TASKS["digits-cnn"])


def text_gpt_wide() -> tuple:
    """Return a transformer of ten million parameters, from the weights of seed 0."""
    return demo.built(Demo.kit, TASKS["text-gpt-wide"])


def train_step(task: str, batch_size: int | None = None) -> tuple:
    """Return the plain step of a task, and four batches of its data; see `shared/demo.py`."""
    return demo.train_step(Demo.kit, task, batch_size)
