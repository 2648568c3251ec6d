"""Models of PyTorch that nobody here wrote, built as their authors build them.

Each function returns (model, x, y, loss_fn) anew and the same each time. Every tensor has SAMPLES
rows; losses are means over them.
"""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES, CLASSES = 7, 3


@dataclass
class Output:
    """As libraries of pretrained models return it: a dataclass, no container to torch."""

    logits: Tensor
    hidden: tuple[Tensor, ...] | None = None


class CausalBlock(nn.Module):
    """Attention with a 4-D buffer for a mask, and dropout."""

    def __init__(self, width, length):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("mask", torch.ones(1, 1, length, length).tril())

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2)).masked_fill(self.mask == 0, -1e4).softmax(-1)
        return x + self.drop(weights @ v).squeeze(1)


class Everything(nn.Module):
    """Keywords in, a dataclass with `.logits` out, as `transformers` has it.

    One weight is embedding and head; there is a parameter that no loss reaches, one that is
    frozen, and an activation in place.
    """

    def __init__(self):
        super().__init__()
        self.embedding, self.block = nn.Embedding(11, 8), CausalBlock(8, 6)
        self.hidden = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.SiLU(inplace=True))
        self.head, self.unused = nn.Linear(8, 11, bias=False), nn.Linear(2, 2)
        self.head.weight = self.embedding.weight
        self.hidden[0].bias.requires_grad_(False)

    def forward(self, input_ids, attention_mask=None, scale=1.0):
        x = self.block(self.embedding(input_ids) * scale)
        x = self.hidden(x * attention_mask.unsqueeze(-1))
        return Output(logits=self.head(x), hidden=(x,))


def everything():
    """In a mapping that is no dict, as tokenizers return it, with a setting among the tensors."""
    torch.manual_seed(0)
    codes = torch.randint(0, 11, (SAMPLES, 6))
    x = UserDict(input_ids=codes, attention_mask=(codes > 2).float(), scale=0.5)

    def loss_fn(output, y):
        logits = output.logits.float().flatten(0, 1)
        return F.cross_entropy(logits, y.flatten()) + output.hidden[0].float().square().mean()

    return Everything(), x, codes.roll(1, 1), loss_fn


class InPlace(nn.Module):
    """Activations and sums in place, BatchNorm, residual and concatenated branches."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(True))
        self.depthwise = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU6(True))
        self.grouped = nn.Sequential(nn.Conv2d(8, 4, 1, groups=2), nn.BatchNorm2d(4), nn.GELU())
        self.head = nn.Sequential(nn.Dropout(0.2, inplace=False), nn.Linear(12, CLASSES))

    def forward(self, x):
        x = self.stem(x)
        y = self.depthwise(x)
        y += x
        y = torch.cat([y, self.grouped(y)], 1)
        return self.head(y.mean((2, 3)))


def in_place():
    torch.manual_seed(0)
    x, y = torch.randn(SAMPLES, 3, 6, 6), torch.arange(SAMPLES) % CLASSES
    return InPlace(), x, y, lambda output, y: F.cross_entropy(output.float(), y)


class Pieces(nn.Module):
    """One argument that is a list of tensors; 1-D convolutions; a dict out."""

    def __init__(self):
        super().__init__()
        self.convolution, self.head = nn.Conv1d(2, 6, 3, padding=1), nn.Linear(6, CLASSES)

    def forward(self, pieces):
        x = torch.cat(pieces, -1)
        return {"logits": self.head(F.gelu(self.convolution(x)).mean(-1))}


def pieces():
    torch.manual_seed(0)
    x, y = [torch.randn(SAMPLES, 2, 4), torch.randn(SAMPLES, 2, 3)], torch.arange(SAMPLES) % CLASSES
    return Pieces(), x, y, lambda output, y: F.cross_entropy(output["logits"].float(), y)


class Attention(nn.Module):
    """`nn.MultiheadAttention`, which reads the weights of its `out_proj` and never calls it."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head((x + self.attention(x, x, x)[0]).mean(1))


class Merging(nn.Linear):
    """As LoRA has it: evaluation merges what is trained into the weight, training takes it out."""

    def __init__(self):
        super().__init__(4, 4)
        self.weight.requires_grad_(False)
        self.more, self.merged = nn.Parameter(torch.ones(4, 4)), False

    def train(self, mode=True):
        super().train(mode)
        if self.merged == mode:
            self.weight.data += -self.more if mode else self.more
            self.merged = not mode
        return self

    def forward(self, x):
        return F.linear(x, self.weight if self.merged else self.weight + self.more, self.bias)


class Keeping(nn.Module):
    """Keeps a tensor of its first call, as others do the angles of their positions."""

    kept = None

    def forward(self, x):
        self.kept = torch.ones(4) if self.kept is None else self.kept
        return x * self.kept


class Named(dict):
    """A dict whose entries are attributes, too."""

    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)


class Linked(dict):
    """The same, as it is often written."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Deep(nn.Module):
    """Like blocks, whose kind depends on the model: each holds `depth` layers."""

    def __init__(self, depth, blocks=1):
        super().__init__()
        torch.manual_seed(0)
        layers = [[nn.Linear(4, 4) for _ in range(depth)] for _ in range(blocks)]
        self.blocks = nn.ModuleList(nn.Sequential(*inside, nn.Tanh()) for inside in layers)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
