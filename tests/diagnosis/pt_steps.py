"""Steps of PyTorch with a part that is known."""

import functools
import json
import tempfile
import threading
import time
from itertools import pairwise

import pytest
import torch
from torch import distributed as dist
from torch import nn

from pt_impl.diagnosis import bottleneck, memory_growth, profiling  # noqa: F401 - tests use it
from pt_impl.kit import data, examples, training  # noqa: F401 - the same
from tests.diagnosis.naps import BACKWARD, FORWARD, arrays, nap

# The machine's peak, which each turn of each profile would look for anew.
profiling.peak = functools.cache(profiling.peak)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        nap(FORWARD, "forward")
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        nap(BACKWARD, "backward")
        return gradient.clone()


def sleep(x):
    return _Sleep.apply(x)


def dense(*widths):
    """Dense layers with ReLU between them."""
    torch.manual_seed(0)
    layers = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolutional():
    """Strided, dilated and in groups, transposed, and dense: images of 16x16 in 3 channels."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.Conv2d(8, 8, 3, groups=8, dilation=2),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.Flatten(),
        nn.Linear(4 * 8 * 8, 2),
    )


def products():
    """What multiplies: a step, and its batch."""
    a, b = torch.ones(96, 160), torch.ones(160, 224)
    many, more = torch.ones(5, 96, 160), torch.ones(5, 160, 224)
    made = {
        "product": (torch.matmul, (a, b)),
        "transposed": (lambda x, y: x.T @ y.T, (torch.ones(160, 96), torch.ones(224, 160))),
        "batch": (torch.matmul, (many, more)),
        "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), (many, more)),
        "bfloat16": (torch.matmul, (a.bfloat16(), b.bfloat16())),
        "compiled": (torch.compile(torch.matmul, backend="aot_eager"), (a, b)),
        "integers": (torch.matmul, (a.int(), b.int())),
    }
    return made | {"large": (torch.matmul, (torch.ones(768, 768), torch.ones(768, 768)))}


def table(rows, width):
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(rows, width, mode="mean"), nn.Linear(width, 2))


def codes(rows, size, length):
    return torch.randint(0, rows, (size, length))


def optimizer_of(model, rule="sgd"):
    rules = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    return rules[rule](model.parameters(), lr=1e-3)


def sleeping_step(model):
    optimizer = optimizer_of(model)

    def step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(sleep(model(x)), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def with_metric(step, model):
    """A step that compares each prediction with its label in Python."""

    def measured(x, y):
        step(x, y)
        logits = model(x)
        return sum(int(row.argmax()) == int(label) for row, label in zip(logits, y, strict=True))

    return measured


class Exchange:
    """Sums with a peer that comes late to each: another rank in a thread of this process."""

    def __init__(self, late):
        store, self.late, self.groups = dist.HashStore(), late, [None, None]
        self.begun = threading.Semaphore(0)
        peer = threading.Thread(target=self._join, args=(store, 1), daemon=True)
        peer.start()
        self._join(store, 0)
        peer.join()
        threading.Thread(target=self._peer, daemon=True).start()

    def _join(self, store, rank):
        self.groups[rank] = dist.ProcessGroupGloo(store, rank, 2)

    def _peer(self):
        value = torch.ones(4)
        while self.begun.acquire():
            time.sleep(self.late)
            self.groups[1].allreduce([value]).wait()

    def sum(self, value):
        self.begun.release()
        self.groups[0].allreduce([value]).wait()


def exchanging(step, late):
    exchange, value = Exchange(late), torch.ones(4)

    def exchanged(x, y):
        loss = step(x, y)
        exchange.sum(value)
        return loss

    return exchanged


def plain_step(model, rule="sgd"):
    """The kit's step."""
    optimizer = optimizer_of(model, rule)
    return training.make_train_step(model, optimizer, training.cross_entropy)


def batch(inputs, size):
    return data.to_device(*arrays(inputs, size))


# What a profile leaves


def read_log(path):
    """The names of events in a log of TensorBoard's."""
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def opened(log):
    """The operators that TensorBoard's plug-in finds in a log; skips where it is not installed."""
    pytest.importorskip("torch_tb_profiler", reason="needs pip install '.[readers]'")
    from torch_tb_profiler.profiler.data import RunProfileData

    with tempfile.TemporaryDirectory() as cache:
        run = RunProfileData.parse("worker", "1", str(log), cache)
        run.process()
    return [operator.name for operator in run.op_list_groupby_name]


def leaking():
    """A step that keeps its graph, and how many calls are a round."""
    model, kept = dense(64, 512, 2), []
    return lambda x, y: kept.append(training.cross_entropy(model(x), y)), 1
