"""PyTorch's models for the tests of the guard."""

import math

import torch
from torch import nn

from pt_impl import kit
from pt_impl.train_step.gradient_clipping import GradientClipper
from tests.train_step.pt_steps import (  # noqa: F401 - the tests take these
    dense,
    descent,
    freeze,
    reads,
    squares,
    state,
    tensor,
)

FACTOR = torch.ones(())


def with_nan(x, count):
    x = x.clone()
    x.view(-1)[5 : 5 + count] = math.nan
    return x


def root(logits, labels):
    """The loss and a root, which for labels below zero is that of zero: finite, but steep."""
    factor = (labels >= 0).all().float()
    labels = torch.where(labels < 0, -1 - labels, labels)
    size = (logits * factor).square().sum()
    return kit.training.cross_entropy(logits, labels) + 1e-3 * size.sqrt()


def clipping_step(technique, model, optimizer, loss_fn):
    """A loop with the guard and the clipper, which share a norm."""
    guard, clipper = technique.FiniteGuard(model), GradientClipper(model, max_norm=0.5)

    def step(x, y):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        norm = clipper.norm()
        guard.check(x, y, loss, norm)
        clipper.clip(norm)
        optimizer.step()
        return loss.detach()

    return step


class Two(nn.Module):
    """Two inputs, and a root behind one of the two layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = (nn.Linear(4, 2, bias=False) for _ in range(2))

    def forward(self, a, b):
        return self.right(b).sum(-1) + self.left(a).square().sum(-1).sqrt()


def two(*x):
    return Two()


class Mixed(nn.Module):
    """A sparse graph and complex numbers as inputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, graph, x):
        return graph @ self.layer(x.abs())


def mixed(graph, x, kind):
    """A model and its inputs, of a graph as a matrix."""
    graph = torch.from_numpy(graph)
    graph = graph.to_sparse_csr() if kind == "compressed" else graph.to_sparse()
    return Mixed(), (graph, torch.from_numpy(x))
