"""Models that nobody here wrote, built as their authors build them: small, with random weights.

Each function returns (model, x, y, loss_fn) anew and the same each time. x follows PyTorch's
convention: a tuple is the model's arguments, a mapping its keywords, anything else its argument.
Every tensor has SAMPLES rows; losses are means over them.
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


def cross_entropy(output, y: Tensor) -> Tensor:
    return F.cross_entropy(output.float().flatten(0, -2), y.flatten())


def labels() -> Tensor:
    return torch.arange(SAMPLES) % CLASSES


class Tied(nn.Module):
    """A language model: one weight is embedding and head; the causal mask is a 4-D buffer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(CausalBlock(8, 6) for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, codes):
        x = self.embedding(codes)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class CausalBlock(nn.Module):
    def __init__(self, width, length):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("mask", torch.ones(1, 1, length, length).tril())

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2)).masked_fill(self.mask == 0, -1e4).softmax(-1)
        return x + self.drop(weights @ v).squeeze(1)


def tied():
    codes = torch.randint(0, 11, (SAMPLES, 6))
    return Tied(), codes, codes.roll(1, 1), cross_entropy


class Attention(nn.Module):
    """`nn.MultiheadAttention`, which reads the weights of its `out_proj` and never calls it."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head((x + self.attention(x, x, x)[0]).mean(1))


def attention():
    return Attention(), torch.randn(SAMPLES, 5, 8), labels(), cross_entropy


def encoder():
    """`nn.TransformerEncoder` with a padding mask, given as keywords."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    mask = torch.zeros(SAMPLES, 5, dtype=torch.bool)
    mask[:, 4] = True
    x = {"src": torch.randn(SAMPLES, 5, 8), "src_key_padding_mask": mask}

    def loss_fn(output, y):
        return cross_entropy(output[:, 0, :CLASSES], y)

    return model, x, labels(), loss_fn


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        _, (hidden, _) = self.lstm(x)
        return self.head(hidden[-1])


def lstm():
    return Recurrent(), torch.randn(SAMPLES, 5, 4), labels(), cross_entropy


class TwoInputs(nn.Module):
    """Two inputs, a tuple of outputs, a parameter that no loss reaches and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 6), nn.Linear(5, 6)
        self.head, self.unused = nn.Linear(6, CLASSES), nn.Linear(2, 2)
        self.right.bias.requires_grad_(False)

    def forward(self, a, b):
        hidden = torch.tanh(self.left(a) + self.right(b))
        return self.head(hidden), hidden


def two_inputs():
    def loss_fn(output, y):
        return cross_entropy(output[0], y) + output[1].float().square().mean()

    x = (torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 5))
    return TwoInputs(), x, labels(), loss_fn


class Classifier(nn.Module):
    """Keywords in, a dataclass with `.logits` out, as `transformers` has it."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, CLASSES)

    def forward(self, input_ids, attention_mask=None, scale=1.0):
        hidden = self.embedding(input_ids) * scale
        pooled = (hidden * attention_mask.unsqueeze(-1)).mean(1)
        return Output(logits=self.head(torch.tanh(pooled)), hidden=(hidden,))


def keywords():
    """In a mapping that is no dict, as tokenizers return it, with a setting among the tensors."""
    codes = torch.randint(0, 11, (SAMPLES, 6))
    x = UserDict(input_ids=codes, attention_mask=(codes > 2).float(), scale=0.5)
    return Classifier(), x, labels(), lambda output, y: cross_entropy(output.logits, y)


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
    return InPlace(), torch.randn(SAMPLES, 3, 6, 6), labels(), cross_entropy


class Pieces(nn.Module):
    """One argument that is a list of tensors; 1-D convolutions; a dict out."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(2, 6, 3, padding=1)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, pieces):
        x = torch.cat(pieces, -1)
        return {"logits": self.head(F.gelu(self.convolution(x)).mean(-1))}


def pieces():
    x = [torch.randn(SAMPLES, 2, 4), torch.randn(SAMPLES, 2, 3)]
    return Pieces(), x, labels(), lambda output, y: cross_entropy(output["logits"], y)


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


ALL = (tied, attention, encoder, lstm, two_inputs, keywords, in_place, pieces)


def make(name: str, seed: int = 0):
    """(model, x, y, loss_fn) of that name, the same each time."""
    torch.manual_seed(seed)
    return next(maker for maker in ALL if maker.__name__ == name)()


def call(model, x):
    """Plain code: the model called as its users call it."""
    if isinstance(x, dict | UserDict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)
