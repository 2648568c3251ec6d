"""PyTorch's models for the tests of gradient clipping."""

import numpy as np
import torch
from torch import nn

from tests.train_step.pt_steps import (  # noqa: F401 - the tests take these
    dense,
    descent,
    freeze,
    reads,
    recorder,
    squares,
    tensor,
)


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
