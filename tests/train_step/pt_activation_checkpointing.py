"""PyTorch's models for the tests of activation checkpointing."""

import gc
import random
from collections import OrderedDict

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode  # noqa: F401 - the tests take it

from pt_impl import kit

X = torch.ones(2, 4)
GENERATOR = torch.Generator()
PICTURES = torch.ones(2, 1, 8, 8)


class Keyworded(nn.Module):
    """Two inputs, one by a keyword of checkpoint's own, dropout and BatchNorm, a dict as output."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, a, *, debug):
        a = self.drop(torch.tanh(self.norm(self.inner(a) + debug)))
        return {"a": a, "sum": (a + debug).tanh()}


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Keyworded() for _ in range(3))

    def forward(self, x):
        a, b = x, x.cos()
        for block in self.blocks:
            output = block(a, debug=b)
            a, b = output["a"] + a, output["sum"]
        return {"out": (a, b)}


def statistics():
    """Layers that read the buffers that they change; a frozen BatchNorm."""
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    frozen = nn.BatchNorm1d(8)
    frozen.running_mean.fill_(0.5)
    frozen.train = lambda mode=True: frozen
    frozen.training = False
    return nn.Sequential(
        nn.Sequential(spectral, nn.BatchNorm1d(8, momentum=None), nn.Tanh()),
        nn.Sequential(nn.Linear(8, 8), frozen, nn.Tanh()),
    )


class Noisy(nn.Linear):
    """Draws numbers not only from torch."""

    def __init__(self, draw):
        super().__init__(8, 8)
        self.draw, self.generator = draw, GENERATOR

    def forward(self, x):
        return (super().forward(x) * self.draw()).tanh()


DRAWS = {
    "python": random.random,
    "numpy": np.random.random,
    "own": lambda: torch.rand((), generator=GENERATOR).item(),
}


class Masked(nn.Module):
    """A large mask, and a statistic that is changed through `.data`, which no version counts."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("mask", torch.ones(1, 1, 256, 256).tril())
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        x = self.norm(self.inner(x)) * self.mask[0, 0, 8, :8] - self.mean
        self.mean.data.lerp_(x.detach().mean(0), 0.1)
        return torch.tanh(x)


def masked():
    return nn.Sequential(*[Masked() for _ in range(4)])


MAKERS = {
    "keywords": (Two, "blocks.*"),
    "statistics": (statistics, "*"),
    "masks": (masked, "*"),
    **{
        name: (lambda draw=draw: nn.Sequential(*[Noisy(draw) for _ in range(3)]), "*")
        for name, draw in DRAWS.items()
    },
}


def trained(technique, name, blocks=None, seed=0):
    """Loss, gradients and buffers after two steps, the first of which runs backward twice.

    And the numbers drawn next.
    """
    make, every = MAKERS[name]
    kit.runtime.set_seed(0)
    model = make().train()
    technique.apply_checkpointing(model, blocks=every if blocks is None else blocks)
    kit.runtime.set_seed(seed)
    GENERATOR.manual_seed(0)
    for _ in range(2):
        loss = sum(value.square().sum() for value in tree_leaves(model(torch.randn(6, 8))))
        loss.backward(retain_graph=True)
        loss.backward()
    tensors = [loss, *(p.grad for p in model.parameters()), *model.buffers()]
    drawn = [np.array(draw()) for draw in DRAWS.values()]
    return [np.array(tensor.detach(), float) for tensor in tensors] + drawn


def held(model, x) -> int:
    """Bytes of tensors between the passes, but for the model's own."""
    storages = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    for _ in range(2):
        loss = model(x).square().sum()
        gc.collect()
        tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        loss.backward()
    return sum(size for pointer, size in sizes.items() if pointer not in storages)


def perceptron(normal=nn.Identity):
    parts = [nn.Linear(8, 16), normal(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 8), nn.Tanh()]
    return nn.Sequential(*parts)


def penalized(technique, blocks):
    """Gradients of a gradient penalty of a critic under spectral norm."""
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    inside = nn.Sequential(nn.Tanh(), normed, nn.Tanh())
    critic = nn.Sequential(nn.Linear(4, 8), inside, nn.Linear(8, 1))
    technique.apply_checkpointing(critic, blocks=blocks)
    x = torch.linspace(-1.0, 1.0, 24).reshape(6, 4)
    mixed = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    (critic(x).mean() + (slope.norm(dim=1) - 1.0).square().mean()).backward()
    return [parameter.grad.tolist() for parameter in critic.parameters()]


def hooked():
    """Its weight is made by a hook of torch's old spectral norm."""
    return nn.utils.spectral_norm(nn.Linear(4, 4))


class Added(nn.Linear):
    """Writes into a product."""

    def forward(self, x):
        y = super().forward(x)
        y += x
        return y.tanh()


WRITING = {  # the first three into a product
    "gru": lambda: nn.GRU(4, 4),
    "silu": lambda: nn.Sequential(nn.Linear(4, 4), nn.SiLU(inplace=True)),
    "added": lambda: Added(4, 4),
    "relu": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)),
    "tanh": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
}


def of_convolutions():
    """As a U-Net, which has no other product."""
    inside = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    return nn.Sequential(OrderedDict(block=inside, last=nn.Conv2d(4, 1, 1)))


def step_of(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return kit.training.make_train_step(model, optimizer, lambda output, y: output.square().mean())


class Shared(nn.Module):
    """Changes in place what its block was given ("input") or gives ("product"), after it."""

    def __init__(self, changed):
        super().__init__()
        self.first, self.block, self.changed = nn.Linear(4, 4), Both(4, 4), changed

    def forward(self, x):
        hidden = self.first(x)
        product, bounded = self.block(hidden)
        (hidden if self.changed == "input" else product).mul_(2)
        return (hidden + product) * bounded


class Both(nn.Linear):
    def forward(self, x):
        product = super().forward(x + 1.0)
        return product, product.tanh()
