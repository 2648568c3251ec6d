"""PyTorch's models for the tests of mixed precision."""

from functools import partial

import torch
from torch import nn

from pt_impl.deployment.reduced_precision import make_predict
from tests.train_step.pt_steps import dense, descent, dtypes, kept, squares  # noqa: F401

KEPT_TWICE = "head", "head"  # a kept layer is wrapped for good, and once


class Custom(nn.Module):
    """Two inputs, a dict as output, layers in a list; somebody else has wrapped `left`."""

    def __init__(self, seen):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.block = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.scale, self.seen = nn.Parameter(torch.full((8, 3), 0.1)), seen
        self.left.forward = partial(self.wrapped, self.left.forward)

    def wrapped(self, forward, x):
        self.seen["wrapper"] = "called"
        return forward(x)

    def forward(self, a, b):
        a, b = self.left(a), self.right(b)
        self.seen.update(left=dtypes([a]), right=dtypes([b]))
        for block in self.block:
            a = torch.relu(block(a + b))
        self.seen["block"] = dtypes([a])
        return {"logits": a @ self.scale, "pair": (a, b)}


def custom(technique, keep):
    """The dtypes of a custom model's parts and outputs, and the losses of its training."""
    seen = {}
    model = Custom(seen)

    def loss_fn(output, y):
        seen["output"] = dtypes([output["logits"], *output["pair"]])
        return nn.functional.cross_entropy(output["logits"], y)

    x, y = (torch.randn(16, 8), torch.randn(16, 8)), torch.arange(16) % 3
    step = technique.make_train_step(model, descent(model), loss_fn, keep_fp32=keep)
    losses = [step(x, y).item() for _ in range(20)]
    predicted = make_predict(model, keep_fp32=keep)(x)
    assert seen.pop("wrapper")
    return seen | {"predicted": dtypes([predicted["logits"]])}, losses


def statistics(technique, images):
    """Mean and variance of a BatchNorm behind a convolution that changes nothing."""
    model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1, momentum=1.0))
    nn.init.ones_(model[0].weight)
    step = technique.make_train_step(model, descent(model, 0.0), lambda output, y: output.mean())
    step(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()), None)
    return model[1].running_mean.item(), model[1].running_var.item() * (1 - 1 / images.size)


def half():
    return dense().bfloat16()
