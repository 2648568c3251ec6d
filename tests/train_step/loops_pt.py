"""Train steps in a loop of one's own: plain, with a technique by hand, with its piece."""

import torch
import torch.nn.functional as F
from torch import nn


def plain(model, optimizer, loss_fn):
    def step(x, y):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def mixed_precision_by_hand(model, optimizer, loss_fn):
    def step(x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        loss = loss_fn(output.float(), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def mixed_precision_with_piece(model, optimizer, loss_fn):
    from pt_impl.train_step.mixed_precision import MixedPrecision, to_float32

    precision = MixedPrecision(model)

    def step(x, y):
        optimizer.zero_grad()
        with precision.autocast():
            output = model(x)
        loss = loss_fn(to_float32(output), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def loss_scaling_by_hand(model, optimizer, loss_fn):
    scaler = torch.amp.GradScaler("cpu")

    def step(x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            output = model(x)
        loss = loss_fn(output.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def loss_scaling_with_piece(model, optimizer, loss_fn):
    from pt_impl.train_step.loss_scaling import LossScaler

    scaler = LossScaler(model)

    def step(x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            output = model(x)
        loss = loss_fn(output.float(), y)
        scaler.backward(loss)
        scaler.step(optimizer)
        return loss.detach()

    return step


def gradient_accumulation_by_hand(model, optimizer, loss_fn):
    def step(x, y):
        optimizer.zero_grad()
        total = 0.0
        for part_x, part_y in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
            loss = loss_fn(model(part_x), part_y) * (len(part_x) / len(x))
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return step


def gradient_accumulation_with_piece(model, optimizer, loss_fn):
    from pt_impl.train_step.gradient_accumulation import GradientAccumulator

    accumulator = GradientAccumulator(model, micro_batches=4)

    def step(x, y):
        optimizer.zero_grad()
        total = 0.0
        for part_x, part_y, share in accumulator.split(x, y):
            loss = loss_fn(model(part_x), part_y) * share
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return step


def gradient_clipping_by_hand(model, optimizer, loss_fn):
    def step(x, y):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    return step


def gradient_clipping_with_piece(model, optimizer, loss_fn):
    from pt_impl.train_step.gradient_clipping import GradientClipper

    clipper = GradientClipper(model, max_norm=0.1)

    def step(x, y):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        clipper.clip()
        optimizer.step()
        return loss.detach()

    return step


def train(make) -> list[float]:
    """Three losses of a step, and the weights after them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    step = make(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy)
    x, y = torch.randn(10, 6), torch.randint(0, 3, (10,))
    losses = [float(step(x, y)) for _ in range(3)]
    return losses + nn.utils.parameters_to_vector(model.parameters()).tolist()
