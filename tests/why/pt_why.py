"""PyTorch's side of test_why.py: a small model, its plain step, and planted causes."""

from __future__ import annotations

import mmap
import time

import torch
from torch import nn
from torch.nn import functional as F

from pt_impl.kit import training

WIDTH, SAMPLES = 64, 32


class Attention(nn.Module):
    """Self-attention over the rows of a batch, fused or as separate products."""

    def __init__(self, fused: bool):
        super().__init__()
        self.qkv, self.fused = nn.Linear(WIDTH, 3 * WIDTH), fused

    def forward(self, x):
        q, k, v = (part[None] for part in self.qkv(x).split(WIDTH, dim=-1))
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v)[0]
        shares = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) / WIDTH**0.5, dim=-1)
        return torch.matmul(shares, v)[0]


class Cast(nn.Module):
    def forward(self, x):
        for _ in range(32):  # few numbers, whose memory is not given back meanwhile
            x = x.to(torch.float64).to(torch.float32)
        return x


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        for _ in range(6):
            x = self.norm(x)
        return x


class GELU(nn.Module):
    def forward(self, x):
        for _ in range(6):
            x = F.gelu(x)
        return x


class Transposed(nn.Module):
    """A convolution whose input and output are changed to another layout."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        for _ in range(6):
            x = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).contiguous()
        return self.convolution(x)


def model(middle: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [("first", nn.Linear(WIDTH, WIDTH))]
    layers += [("middle", middle)] if middle else []
    built = nn.Sequential()
    for name, layer in [*layers, ("head", nn.Linear(WIDTH, 4))]:
        built.add_module(name, layer)
    return built


def batches(samples: int = SAMPLES) -> list:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, WIDTH, generator=generator)
    return [(x, torch.zeros(samples, dtype=torch.int64))]


def train(built):
    optimizer = torch.optim.SGD(built.parameters(), lr=1e-3)
    return training.make_train_step(built, optimizer, F.cross_entropy)


def plain():
    built = model()
    return train(built), batches(), built


def of(middle: nn.Module, samples: int = 4096):
    built = model(middle)
    return train(built), batches(samples), built


def around(extra):
    """The plain step with a call before it."""
    step, data, built = plain()

    def planted(x, y):
        extra(x)
        return step(x, y)

    return planted, data, built


def sleeping():
    return around(lambda x: time.sleep(0.02))


def busy_python():
    def burn(x):
        until = time.perf_counter() + 0.02
        while time.perf_counter() < until:
            pass

    return around(burn)


def larger_products():
    return of(nn.Sequential(nn.Linear(WIDTH, 1024), nn.Linear(1024, WIDTH)), 1024)


def casts():
    return of(Cast(), 2048)


def norms():
    return of(Norms(), 16384)


def activations():
    return of(GELU(), 16384)


def optimizer_that_loops():
    built = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(24)), nn.Linear(WIDTH, 4))
    built = built.requires_grad_(True)
    step, data, small = plain()
    gradients = [torch.zeros_like(p) for p in built.parameters()]
    optimizer = torch.optim.AdamW(built.parameters(), foreach=False)
    for parameter, gradient in zip(built.parameters(), gradients, strict=True):
        parameter.grad = gradient

    def planted(x, y):
        for _ in range(6):
            optimizer.step()
        return step(x, y)

    return planted, data, small


def waits_for_input():
    step, data, built = plain()

    class Slow:
        def __iter__(self):
            for batch in data:
                time.sleep(0.02)
                yield batch

    return step, Slow(), built


def layout():
    step, data, built = plain()
    images, other = torch.randn(32, 4, 64, 64), Transposed()

    def planted(x, y):
        with torch.no_grad():
            other(images)
        return step(x, y)

    return planted, data, built


def compiles_by_shape():
    """A step whose function is compiled anew for each length, as by shape: the backend is eager."""
    step, _, built = plain()
    torch._dynamo.reset()
    whole = torch.compile(step, backend="eager", dynamic=False)
    torch._dynamo.config.recompile_limit = 10**6

    def planted(x, y):
        return whole(x, y)

    def data():
        samples = 4
        while True:
            yield batches(samples)[0]
            samples += 1

    return planted, data(), built


def unfused_attention():
    return of(Attention(fused=False), 1024)


def beside(compute):
    """The plain step with operators before it whose results nobody needs."""
    return around(lambda _x: compute())


def larger_convolutions():
    images, layer = torch.randn(8, 16, 64, 64), nn.Conv2d(16, 32, 3, padding=1)

    def convolve():
        with torch.no_grad():
            for _ in range(6):
                layer(images)

    return beside(convolve)


def lookups():
    table, rows = torch.randn(50_000, 64), torch.randint(0, 50_000, (100_000,))
    return beside(lambda: F.embedding(rows, table))


def sums():
    values = torch.randn(2000, 2000)
    return beside(lambda: [values.sum() for _ in range(8)])


def products_in_float64():
    values = torch.randn(384, 384, dtype=torch.float64)
    return beside(lambda: [values @ values for _ in range(4)])


def page_faults():
    """Memory that is given back after each use: each page is touched anew."""

    def touch():
        with mmap.mmap(-1, 128 << 20) as memory:
            pages = torch.frombuffer(memory, dtype=torch.uint8).view(-1, mmap.PAGESIZE)
            pages[:, 0].fill_(1)
            del pages

    return beside(touch)


def recurrent():
    layer, x = nn.LSTM(64, 128, batch_first=True), torch.randn(32, 64, 64)

    def run():
        with torch.no_grad():
            layer(x)

    return beside(run)


def reads_results():
    values = torch.randn(2_000_000)
    return beside(lambda: torch.nonzero(values > 0))


def denormals():
    built = model(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))
    with torch.no_grad():
        for parameter in built.get_submodule("middle").parameters():
            parameter.fill_(1e-41)
    return train(built), batches(1024), built
