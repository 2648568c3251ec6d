"""PyTorch's models and words for the tests of pruning."""

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.sparse import _semi_structured_conversions as conversions

from pt_impl import kit
from tests.compression.pt_distillation import numpy  # noqa: F401 - the tests take it
from tests.compression.teaching import LEFT

ONES = torch.ones(2, 9)


def masks(model):
    """Canonical name -> mask."""
    return {
        name: kit.models.to_canonical(name, module.weight_mask.numpy())
        for path, module in model.named_modules()
        if hasattr(module, "weight_mask")
        for name in [f"{path.removesuffix('.conv')}.kernel"]
    }


def forward(model, x=LEFT):
    """A pass in training mode."""
    return model.train()(torch.as_tensor(x))


def zeros(model):
    """The share of zeros of each tensor, by name."""
    return {name: float((v == 0).float().mean()) for name, v in model.state_dict().items()}


def zeros_by_layer(model):
    """The share of zeros of each layer's kernel."""
    layers = {name: getattr(layer, "weight", None) for name, layer in model.named_children()}
    return {n: float((w == 0).float().mean()) for n, w in layers.items() if w is not None}


def linear(kernel):
    layer = nn.Linear(*kernel.shape, bias=False)
    layer.weight.data.copy_(torch.from_numpy(kernel.T.copy()))
    return nn.Sequential(layer)


def without_kernels():
    return nn.BatchNorm1d(3)


class Foreign(nn.Module):
    """Two convolutions, an embedding and attention; two inputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.depthwise = nn.Conv1d(4, 6, 1), nn.Conv1d(6, 6, 1, groups=6)
        self.table, self.norm = nn.Embedding(5, 6), nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.inside = nn.ModuleDict({"head": nn.Linear(6, 2)})

    def forward(self, a, codes):
        x = self.depthwise(self.conv(a[:, :, None]))[:, :, 0] + self.table(codes)
        x = self.norm(x)[:, None]
        return self.inside["head"](self.attention(x, x, x)[0])[:, 0]


def codes():
    return torch.from_numpy(np.arange(9) % 5)


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


def language():
    """The head's weight is the embedding's."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    model[2].weight = model[0].weight
    return model


def twice():
    """One layer runs twice."""
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


def computed():
    """Norms of weights compute three kernels, and one is the layer's own."""
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), *newly_computed())


def newly_computed():
    """The same without the one that a fresh model cannot be copied with."""
    norms = nn.utils.spectral_norm, parametrizations.weight_norm
    return nn.Sequential(*(norm(nn.Linear(4, 4)) for norm in norms), nn.Linear(4, 4))


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))


def packed_and_unpacked(kernel):
    """What the format of GPUs makes of a kernel."""
    return conversions.sparse_semi_structured_to_dense_cutlass(
        *conversions.sparse_semi_structured_from_dense_cutlass(kernel)
    )


class Grouped(nn.Module):
    """A plain and a grouped convolution, an embedding and a linear layer; two inputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.grouped = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1, groups=2)
        self.head, self.table = nn.Linear(8, 3), nn.Embedding(5, 8)

    def forward(self, images, codes):
        return self.head(self.grouped(self.conv(images)).mean((2, 3)) + self.table(codes))
