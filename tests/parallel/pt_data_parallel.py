"""PyTorch's models of the tests of data parallelism; each build is (model, optimizer, loss)."""

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from pt_impl.kit import examples, models, replicas, training
from pt_impl.kit.calling import call

OTHER = {"variant": "sharded"}  # beside processes
LACKING = "one_process"  # this machine lacks something for it


def note_threads(count):
    with Path(os.environ["THREADS_SEEN"]).open("a") as file:
        file.write(f"{count}\n")


def digits():
    """The digits CNN, in a process that notes how many threads it has."""
    note_threads(torch.get_num_threads())
    return examples.digits_cnn()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


@dataclass
class Output:
    logits: torch.Tensor


class Mixed(nn.Module):
    """Two inputs by name, blocks in a list, a weight used twice, and an output with logits."""

    def __init__(self):
        super().__init__()
        self.codes, self.numbers = nn.Embedding(12, 8), nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 12)
        self.head.weight = self.codes.weight

    def forward(self, numbers, codes):
        x = self.codes(codes).mean(1) + self.numbers(numbers)
        for block in self.blocks:
            x = x + block(x)
        return Output(self.head(x))


def mixed():
    torch.manual_seed(0)
    model = Mixed()
    return model, torch.optim.AdamW(model.parameters(), 0.01), training.cross_entropy


all_dense = mixed  # embeddings have dense gradients


def without_statistics():
    """Its BatchNorm has no running statistics, and normalises with the batch alone."""
    model, optimizer, loss_fn = mixed()
    model.numbers.bias = None  # which the normalisation takes off again, but for rounding
    model.numbers = nn.Sequential(model.numbers, nn.BatchNorm1d(8, track_running_stats=False))
    optimizer.add_param_group({"params": list(model.numbers[1].parameters())})
    return model, optimizer, loss_fn


def masks():
    """The gradient of a row is the dropout mask of the sample that is this row of the identity."""
    layer = nn.Linear(8, 64, bias=False)
    nn.init.ones_(layer.weight)
    model = nn.Sequential(layer, nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.5)
    return model, optimizer, lambda output, y: output.mean()


def small():
    """Where what trains does not matter, and has to take little time."""
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy


def plain(build, x, y, batches):
    """(weights, losses) of plain PyTorch."""
    model, optimizer, _ = build()
    losses = []
    for rows in batches:
        given = {name: torch.from_numpy(part[rows]) for name, part in x.items()}
        optimizer.zero_grad()
        loss = F.cross_entropy(model(**given).logits, torch.from_numpy(y[rows]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {name: value.numpy() for name, value in model.state_dict().items()}, losses


def own_layout(images):
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def canonical(weights):
    """Those of a digits CNN by the names that both frameworks share."""
    model, _, _ = examples.digits_cnn()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    return models.export_weights(model)


def warn(monkeypatch, port, other):
    """What says that others can reach what listens at a port: the first host's torchrun."""
    for rank in (0, 1):
        replicas._warn_of_torchrun(rank, "127.0.0.1", port)
    replicas._warn_of_torchrun(0, "127.0.0.1", other)


# In one process


def weighted():
    """The optimizer trains a loss's own parameter beside the model."""
    model, scale = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), scale], 0.1)
    return model, optimizer, lambda output, y: F.mse_loss(output * scale, y)


def while_blocks_run(apply_fsdp, **settings):
    """(shares of the model that are whole, dtypes) while each layer runs; and dtypes behind it."""
    from torch.distributed.tensor import DTensor

    model, _, loss_fn = mixed()
    shares, dtypes = [], []

    def note(layer, *_):
        every = [*model.parameters()]
        whole = sum(p.numel() for p in every if not isinstance(p, DTensor))
        shares.append(whole / sum(p.numel() for p in every))
        dtypes.append(layer.weight.dtype)

    for block in model.blocks:
        for layer in (block.up, block.down):
            layer.register_forward_hook(note)
    apply_fsdp(model, **settings)
    x = {"numbers": torch.ones(2, 6), "codes": torch.zeros(2, 4, dtype=torch.int64)}
    loss_fn(call(model, x), torch.zeros(2, dtype=torch.int64)).backward()
    return shares, set(dtypes), {p.dtype for p in model.parameters()}


class Optional(nn.Linear):
    def forward(self, x, mask=None):
        return super().forward(x)


def losses_with_none(technique, two=None):
    """Losses of micro-batches of a dict, without a None in it and with one at its head."""
    numbers, found = torch.arange(12.0).reshape(4, 3), []
    for x in ({"x": numbers}, {"mask": None, "x": numbers}):
        torch.manual_seed(0)
        model = technique.apply_data_parallel(Optional(3, 2))
        step = technique.make_train_step(
            model, torch.optim.SGD(model.parameters(), 0.1), F.mse_loss, micro_batches=2
        )
        for batch, samples in itertools.islice(
            technique.distribute(model, [(x, torch.zeros(4, 2))]), 1
        ):
            found.append(float(step(*batch, samples)))
    return found


class NormAct(nn.BatchNorm1d):
    """As in timm."""

    def forward(self, x):
        return super().forward(x).relu()


class Counting(nn.Linear):
    """Of an extra state."""

    def get_extra_state(self):
        return {"steps": 1}
