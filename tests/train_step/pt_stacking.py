"""PyTorch's model and plain step for the tests of stacking."""

import math

import numpy as np
import torch
from torch import nn

from pt_impl.train_step.optimizer_implementations import fused_sgd
from tests.train_step.pt_steps import dense, dtypes, kept  # noqa: F401 - the tests take these

SMALL = 2.0**-6  # times the loss: no gradient overflows in float16 at the scaler's first scale


def sgd(model, rate, *, fused=False):
    if fused:
        return fused_sgd(model, learning_rate=rate)
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def small_loss(output, y):
    return SMALL * nn.functional.cross_entropy(output, y)


def plain_model(dtype):
    """No layer of it mixes samples, so that parts add up to the batch."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Tanh())
    parts = {"stem": nn.Conv2d(3, 4, 3), "body": body, "flat": nn.Flatten()}
    model = nn.Sequential()
    for name, layer in (parts | {"head": nn.Linear(16, 3)}).items():
        model.add_module(name, layer)
    return model


def plain_batch(samples=7):
    images = np.random.default_rng(1).normal(size=(samples, 3, 6, 6)).astype(np.float32)
    return torch.from_numpy(images), torch.arange(samples) % 3


def plain_step(model, rate, *, dtype, max_norm):
    """As a user of PyTorch writes it."""
    optimizer = sgd(model, rate)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == "float16")

    def step(x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", getattr(torch, dtype), enabled=dtype != "float32"):
            output = model(x)
        loss = small_loss(output.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if max_norm < math.inf:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def weights(model):
    """All of them, as one vector."""
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])


def is_compiled_in_bfloat16(kit, step, x, y):
    ran = kit.runtime.operator_dtypes(step, x, y)
    return kit.runtime.trace_count(step) is not None and set(ran["convolution"]) == {"bfloat16"}
