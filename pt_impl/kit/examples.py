"""Something to build for what builds its model in each process: examples of "module:function".

What it holds: functions that give a model, its optimizer (without steps behind it) and its loss,
a task's train step with its batches, and a deep network for what depth does.
Twin: `tf_impl/kit/examples.py`.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from pt_impl.kit import data, models, training
from shared import datasets
from shared.specs import TASKS
from shared.weights import init_weights


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
    return _built("digits-cnn")


def text_gpt_wide() -> tuple:
    """Return a transformer of ten million parameters, from the weights of seed 0."""
    return _built("text-gpt-wide")


def train_step(task: str, batch_size: int | None = None) -> tuple:
    """Return the plain step of a task, and four batches of its data in memory.

    batch_size: None is the task's compute batch. Raises ValueError for a task whose data is files.
    """
    known = [name for name, one in TASKS.items() if one.dataset.kind != "photos"]
    if task not in known:
        raise ValueError(f"{task!r} is no task with data in memory; these are: {', '.join(known)}")
    size = batch_size or TASKS[task].compute_batch
    with tempfile.TemporaryDirectory() as folder:
        place = datasets.materialise(TASKS[task].dataset, Path(folder))
        x, y = data.to_device(*(part[: 4 * size] for part in datasets.load(place, "train")))
    step = training.make_train_step(*_built(task))
    return step, [(x[at : at + size], y[at : at + size]) for at in range(0, len(x), size)]


def _built(task: str) -> tuple:
    task = TASKS[task]
    model = models.build(task.model, init_weights(task.model, seed=0))
    return model, training.make_optimizer(model, task.recipe), training.loss_of(task)
