"""PyTorch's models of the tests of model and tensor parallelism: (model, optimizer, loss).

Their optimizers say what they were given in a file for each process, in the folder that MARKS names
in the environment.
"""

import json
import os
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import nn

from pt_impl.kit import data, models, replicas, training  # noqa: F401 - the tests take it
from pt_impl.parallel import model_parallel, tensor_parallel
from pt_impl.train_step import gradient_accumulation  # noqa: F401 - the tests take it
from shared.specs import TASKS
from shared.weights import init_weights
from tests.parallel.splitting import MOMENTUM, RATE, weights


class Recording(torch.optim.SGD):
    def step(self):
        super().step()
        own = [p for group in self.param_groups for p in group["params"]]
        momenta = [state["momentum_buffer"] for state in self.state.values()]
        parts, momenta = (
            sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in every)
            for every in (own, momenta)
        )
        links = psutil.Process().net_connections("inet")
        mark = {"elements": parts, "momenta": momenta, "threads": torch.get_num_threads()}
        mark["addresses"] = sorted({link.laddr.ip for link in links})
        Path(os.environ["MARKS"], f"{os.getpid()}.json").write_text(json.dumps(mark))


def built(model):
    optimizer = Recording(model.parameters(), lr=RATE, momentum=MOMENTUM)
    return model, optimizer, training.cross_entropy


def net(norm):
    layers = OrderedDict(conv0=nn.Conv2d(3, 8, 3, bias=False), relu0=nn.ReLU())
    layers |= {"conv1": nn.Conv2d(8, 8, 3, bias=False)}
    if norm:
        layers |= {"bn": nn.BatchNorm2d(8)}
    layers |= {"relu1": nn.ReLU(), "pool": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten()}
    layers |= {"up": nn.Linear(8, 16), "act": nn.ReLU(), "down": nn.Linear(16, 10)}
    model = nn.Sequential(layers)
    models.import_weights(model, weights(norm))
    return model


def cnn():
    return built(net(norm=False))


def norm():
    """In evaluation mode, as a model is that was loaded."""
    return built(net(norm=True).eval())


def gpt():
    spec = TASKS["text-gpt"].model
    return built(models.build(spec, init_weights(spec, 0)))


class Output(NamedTuple):
    """As many libraries wrap what a model gives."""

    logits: object


class Mixed(nn.Module):
    """Inputs by name, and an output with logits."""

    def __init__(self):
        super().__init__()
        self.codes, self.numbers = nn.Embedding(12, 8), nn.Linear(6, 8)
        self.up, self.act, self.down = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10)

    def forward(self, numbers, codes):
        x = self.codes(codes).mean(1) + self.numbers(numbers)
        return Output(self.down(self.act(self.up(x))))


def mixed():
    torch.manual_seed(0)
    return built(Mixed())


def drawn():
    """Weights that are drawn when it is built, and a loss of labels by name."""
    layers = OrderedDict(flat=nn.Flatten(), up=nn.Linear(432, 16), down=nn.Linear(16, 10))
    model, optimizer, loss_fn = built(nn.Sequential(layers))
    return model, optimizer, lambda output, y: loss_fn(output, y["digit"])


def tied():
    model, _, _ = gpt()
    model.head.weight = model.tokens.weight
    return built(model)


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def untraceable():
    return built(nn.Sequential(OrderedDict(branch=Branching(), conv0=net(norm=False))))


def plain(batches):
    """(weights, losses) of the mixed model in plain PyTorch."""
    model, optimizer, _ = mixed()
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        given = {name: torch.from_numpy(part) for name, part in x.items()}
        loss = F.cross_entropy(model(**given).logits, torch.from_numpy(y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {name: value.numpy() for name, value in model.state_dict().items()}, losses


def own_layout(x):
    """Images as PyTorch's models take them."""
    images = not isinstance(x, dict) and x.ndim == 4
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if images else x


tensor = torch.as_tensor


def canonical(build, weights):
    """By the names that both frameworks share."""
    model, _, _ = build()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    return models.export_weights(model)


STAGE_REFUSALS = [  # (build, settings, what is said)
    (tied, {"cut": "block1"}, "a parameter is used twice: pipelining would train copies"),
    (untraceable, {"cut": "conv0"}, "torch.export can't trace the model: "),
]
PART_REFUSALS = [
    (tied, {"pairs": "block*.up > block*.down"}, "a parameter is used twice: parts would train"),
]


# In one process


def loss_of_drawn(x, y, seed):
    """That of the first step of `drawn`, and the names of its weights."""
    torch.manual_seed(seed)
    model, optimizer, loss_fn = drawn()
    images, labels = data.to_device(x, y)
    step = training.make_train_step(model, optimizer, loss_fn)
    return float(step(images, {"digit": labels})), set(model.state_dict())


class Two(nn.Module):
    """Uses one of two inputs first."""

    def __init__(self, first):
        super().__init__()
        self.first, self.head = first, nn.Linear(4, 2)

    def forward(self, query, input):
        if self.first == "query":
            return self.head(query.relu() - input.exp())
        scaled = input.exp()
        return self.head(query.relu() - scaled)


def staged_output(model, x, arguments, named):
    """What two stages give, both in this process."""
    with (
        mock.patch.object(torch.distributed.pipelining.Pipe, "build_stage", lambda pipe, *_: pipe),
        mock.patch.object(torch.distributed, "get_rank", return_value=0),
    ):
        pipe = model_parallel.apply_model_parallel(model, x, cut="head")
    return pipe.get_stage_module(1)(pipe.get_stage_module(0)(*arguments, **named))


class FakeMesh(dict):
    """What a step asks of a mesh of two replicas."""

    def size(self):
        return 2


def of_unequal_replicas(seed):
    """(losses, gradients) of replicas of two and three rows averaged as FSDP2 does; and of all."""
    torch.manual_seed(seed)
    x, y, model = torch.randn(5, 3), torch.randn(5, 2), nn.Linear(3, 2)
    losses, gradients = [], []
    for rank in range(2):
        axis = SimpleNamespace(size=lambda: 2, get_local_rank=lambda rank=rank: rank)
        given = model, torch.optim.SGD(model.parameters(), 0.0), F.mse_loss
        step = tensor_parallel.make_train_step(*given, FakeMesh(data=axis))
        losses.append(step(x, y, len(x)).item())
        gradients.append(model.weight.grad.clone())
    whole = F.mse_loss(model(x), y)
    (gradient,) = torch.autograd.grad(whole, [model.weight])
    return (sum(losses), whole.item()), (sum(gradients).numpy() / 2, gradient.numpy())
