"""PyTorch's models that have what the zoo's have not."""

from types import SimpleNamespace

import torch
from torch import nn

from pt_impl import kit  # noqa: F401 - the tests take these
from pt_impl.compression import (
    distillation,  # noqa: F401
    feature_distillation,  # noqa: F401
    post_training_quantization,  # noqa: F401
    pruning,
    quantization_aware_training,  # noqa: F401
    semi_structured_pruning,
    structured_pruning,  # noqa: F401
)
from pt_impl.deployment import export, native_export  # noqa: F401
from pt_impl.kit import copying, int8_files, quantized_files, saving  # noqa: F401
from tests.compression import quick

quick.capture_patterns_once()


class Two(nn.Module):
    """Inputs by name."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, a, b):
        return self.layer(a) - b


class Within(nn.Module):
    """`forward` has a graph of its own."""

    def __init__(self, region):
        super().__init__()
        self.layer, self.head, self.region = nn.Linear(4, 4), nn.Linear(4, 2), region

    def forward(self, x):
        with self.region():
            x = self.layer(x)
        return self.head(x)


class Branching(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x


class Resized(nn.Module):
    """It reads its images' size."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 4, 3, 2), nn.Linear(4, 4)

    def forward(self, x, scale):
        y = self.head(self.body(x).movedim(1, -1)).movedim(-1, 1)
        return nn.functional.interpolate(y, size=x.shape[-2:]) * scale[:, None, None, None]


def by_size(samples, size):
    return {"scale": torch.ones(samples), "x": torch.randn(samples, 3, size, 8)}


def with_conv1d():
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(24, 2))
    return model, torch.randn(16, 3, 8)


def with_conv2d():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    return model, torch.randn(16, 3, 8, 8)


def one_slope():
    """`nn.PReLU()` has one slope; the first channel is the weakest."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.PReLU(), nn.Conv2d(4, 2, 1))
    model[0].weight.data[0] *= 1e-3
    model[0].bias.data[0] = 0.0
    return model, torch.randn(2, 3, 4, 4)


def of_numbers():
    return nn.Linear(4, 2).bfloat16().eval(), torch.randn(2, 4).bfloat16()


def of_codes():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)).bfloat16().eval()
    return model, torch.tensor([[1, 2], [3, 4]])


class Merging(nn.Linear):
    """It merges weights to predict, and takes them apart again to train."""

    def __init__(self):
        super().__init__(4, 4)
        self.merged = False

    def train(self, mode=True):
        if mode == self.merged:
            with torch.no_grad():
                self.weight.mul_(0.5 if mode else 2.0)
            self.merged = not mode
        return super().train(mode)


def merging():
    return nn.Sequential(Merging(), nn.BatchNorm1d(4))


def merged(model):
    return [module.training for module in model.modules()], model[0].merged


class Reads(nn.Module):
    """It reads a layer's weight and does not call the layer, as Swin does.

    Another layer is called in training and read in evaluation.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.read, self.head, self.then = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 2)

    def forward(self, x):
        x = self.head(nn.functional.linear(x, self.read.weight, self.read.bias))
        return self.then(x) if self.training else x @ self.then.weight.T + self.then.bias


def trained(model, update, x):
    """After two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (1, 2):
        update(step)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    return model


def halved(model, how):
    """(model, update, finalize) of a way to mask half of the weights."""
    if how == "2:4":
        masked = semi_structured_pruning.apply_two_to_four(model)
        return masked, lambda step: None, semi_structured_pruning.finalize_two_to_four
    settings = {"final_sparsity": 0.5, "begin_step": 0, "end_step": 1, "frequency": 1}
    return *pruning.apply_pruning(model, **settings), pruning.finalize_pruning


class Wrapped(nn.Linear):
    """Its output is an object."""

    def forward(self, x):
        return SimpleNamespace(logits=super().forward(x), more=x)
