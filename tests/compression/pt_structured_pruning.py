"""PyTorch's models and words for the tests of structured pruning."""

from collections import OrderedDict

import numpy as np
import torch
import torchvision
from torch import nn
from torch.nn.utils import prune

from tests.compression.pt_distillation import numpy


def widths(model):
    """The shape of each parameter, by name."""
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def finite(model, x):
    return bool(model(x).isfinite().all())


class Branches(nn.Module):
    """Two inputs, a sum, a product, groups, a concatenation, flattened pixels, two outputs."""

    def __init__(self):
        super().__init__()
        self.stem, self.left = (nn.Conv2d(n, 8, 3, padding=1) for n in (3, 8))
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.grouped, self.point = nn.Conv2d(8, 12, 1, groups=2), nn.Conv2d(8, 6, 1)
        self.norm, self.pool = nn.BatchNorm2d(18, eps=1e-3), nn.MaxPool2d(4)
        self.hidden, self.head, self.more = nn.Linear(72, 10), nn.Linear(10, 4), nn.Linear(10, 2)

    def forward(self, images, scale):
        x = self.stem(images)
        x = x + scale * self.left(torch.relu(x))
        x = self.norm(torch.cat([self.grouped(self.deep(x)), self.point(x)], 1))
        x = torch.relu(self.hidden(self.pool(x).flatten(1)))
        return {"y": self.head(x), "more": (self.more(x),)}


def branches(weights, images):
    """The model with such weights, and its inputs."""
    kinds = {"kernel": "weight", "gamma": "weight", "mean": "running_mean"}
    kinds |= {"variance": "running_var", "bias": "bias", "beta": "bias"}
    model, state = Branches().eval(), {}
    for name, value in weights.items():
        layer, kind = name.split(".")
        if layer == "hidden" and kind == "kernel":  # channel by channel here
            value = value.reshape(2, 2, 18, 10).transpose(2, 0, 1, 3).reshape(72, 10)
        if kind == "kernel":
            axes = (2, 3, 0, 1) if layer == "deep" else (3, 2, 0, 1)
            value = value.transpose(axes) if value.ndim == 4 else value.T
        state[f"{layer}.{kinds[kind]}"] = torch.from_numpy(value.copy())
    model.load_state_dict(state, strict=False)
    x = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    return model, {"images": x, "scale": torch.tensor(1.0)}


def results(model, x):
    with torch.no_grad():
        outputs = model(**x)
    return [numpy(outputs["y"]), numpy(outputs["more"][0])]


def kernels(model):
    """The shape of each kernel."""
    layers = dict(model.named_children())
    return {n: list(m.weight.shape) for n, m in layers.items() if n not in ("norm", "pool")}


class Reading(nn.Module):
    """A linear layer reads what `forward` makes of 4 channels."""

    def __init__(self, features, forward, reads=3):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(reads, 4, 1), nn.Linear(features, 2)
        self.run = forward

    def forward(self, x):
        return self.head(self.run(self.conv(x)))


SPELLINGS = {  # of 3 by 3 pixels: the features that are left
    "flatten(1)": (36, lambda x: x.flatten(1)),
    "flatten(1, -1)": (36, lambda x: x.flatten(1, -1)),
    "flatten(start_dim=1)": (36, lambda x: torch.flatten(x, start_dim=1)),
    "mean((2, 3))": (4, lambda x: x.mean((2, 3))),
    "mean(axis=[-2, -1])": (4, lambda x: torch.mean(x, axis=[-2, -1])),
    "amax(dim=(2, 3))": (4, lambda x: x.amax(dim=(2, 3))),
    "mean((2, 3), True)": (4, lambda x: x.mean((2, 3), True).flatten(1)),
}


def spelled(name):
    features, forward = SPELLINGS[name]
    return Reading(features, forward), torch.ones(2, 3, 3, 3)


# Models of other construction: each takes ROWS


ROWS = torch.from_numpy(np.random.default_rng(2).normal(size=(4, 6, 5)).astype(np.float32))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.place = nn.Linear(5, 8), nn.Parameter(torch.randn(1, 6, 8))
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.norm, self.back = nn.LayerNorm(8), nn.Linear(8, 8)
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.tokens(x) + self.place
        y = self.norm(x)
        near = torch.softmax(self.query(y) @ self.key(y).transpose(1, 2), -1)
        x = x + self.back(near @ self.value(y))
        x = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return self.head(x.mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.lstm = nn.Linear(5, 8), nn.LSTM(8, 6, batch_first=True)
        self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.relu(self.hidden(self.lstm(self.up(x))[0][:, -1])))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)

    def forward(self, x):
        return self.head(self.encoder(self.up(x))[:, 0])


class Rotary(nn.Module):
    """Halves of channels are swapped, and added to themselves."""

    def __init__(self):
        super().__init__()
        self.turned, self.up, self.head = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.turned(x)
        x = 0.6 * x + 0.8 * torch.cat([-x[..., 4:], x[..., :4]], -1)
        return self.head(torch.relu(self.up(x)))


class Auxiliary(nn.Module):
    """A head that runs in training alone reads what the body makes."""

    def __init__(self):
        super().__init__()
        self.up, self.middle = nn.Linear(5, 8), nn.Linear(8, 6)
        self.aside, self.head = nn.Linear(8, 3), nn.Linear(6, 3)

    def forward(self, x):
        x = torch.relu(self.up(x))
        y = self.head(torch.relu(self.middle(x)))
        return y + self.aside(x) if self.training else y


class Rounding(nn.Module):
    """Half a percent off with half of its channels, as large sums are in half precision."""

    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.relu(self.up(x))
        return self.head(x) * (1 + x.shape[-1] / 800)


def squares():
    return nn.Sequential(nn.Linear(5, 8), nn.RMSNorm(8), nn.Linear(8, 6), nn.Linear(6, 3))


def norms():
    return nn.Sequential(
        *(nn.Conv1d(6, 8, 3), nn.GroupNorm(2, 8), nn.GELU(), nn.ConvTranspose1d(8, 4, 2)),
        *(nn.PReLU(4), nn.Flatten(), nn.Linear(16, 3)),
    )


def alone():
    return nn.Sequential(nn.Conv1d(6, 8, 3), nn.GroupNorm(8, 8), nn.Conv1d(8, 4, 3))


def frozen():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).requires_grad_(False)


# What is refused: (model, inputs)


IMAGES, FLAT = torch.randn(2, 4, 8, 8), torch.randn(2, 4)


def reading(forward, features=4):
    return Reading(features, forward, reads=4), IMAGES


def _splitting(x):
    left, right = x.split((2, 2), 1)
    return torch.cat([right, left], 1).mean((2, 3))


class Tasks(nn.Module):
    """Of two heads the example takes one."""

    def __init__(self):
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(4, 32), nn.Linear(32, 4), nn.Linear(32, 3)

    def forward(self, x, task="a"):
        return (self.a if task == "a" else self.b)(torch.relu(self.trunk(x)))


def masked():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(256, 2))
    prune.l1_unstructured(model[0], "weight", 0.5)
    return model, IMAGES


def masked_after_a_prediction():
    """Which leaves a masked weight that is a tensor like others."""
    model, images = masked()
    with torch.no_grad():
        model(images)
    return model, images


def stacked(*layers):
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    return nn.Sequential(*layers, *head), IMAGES


def misnamed():
    layers = {"conv": nn.Conv2d(4, 4, 1), "relu": nn.Softmax(1), "rest": nn.Flatten()}
    return nn.Sequential(OrderedDict(layers | {"head": nn.Linear(256, 2)})), IMAGES


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    model[2].weight = model[0].weight
    return model, FLAT


def shuffling():
    shuffles = torchvision.models.shufflenet_v2_x0_5(weights=None)
    return nn.Sequential(nn.Conv2d(4, 3, 1), shuffles), IMAGES


UNFOLLOWED = {
    "outputs": lambda: (nn.Linear(4, 2), FLAT),
    "no layer": lambda: (nn.Sequential(nn.ReLU()), IMAGES),
    "no head": lambda: (nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), IMAGES),
    "masked": masked,
    "masked, after a prediction": masked_after_a_prediction,
    "shuffles": shuffling,
    "unknown": lambda: stacked(nn.Conv2d(4, 4, 1), nn.LocalResponseNorm(2)),
    "transposed groups": lambda: stacked(nn.ConvTranspose2d(4, 4, 2, groups=2)),
    "mixes": lambda: reading(lambda x: torch.softmax(x, 1).mean((2, 3))),
    "over channels": lambda: reading(lambda x: x.cumsum(1).mean((2, 3))),
    "flattens samples": lambda: reading(lambda x: x.flatten(end_dim=1), 8),
    "splits": lambda: reading(_splitting),
    "misnamed": misnamed,
    "tied": tied,
    "branch": lambda: (Tasks(), FLAT),
    "no copy": lambda: (nn.utils.weight_norm(nn.Linear(4, 2)), FLAT),
    "rounds": lambda: (Rounding(), ROWS),
}
