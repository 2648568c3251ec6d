"""PyTorch's models and words for the tests of quantization."""

import copy
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torchao.quantization import pt2e

from pt_impl import kit
from pt_impl.kit import int8_files, integers, pt2e_repairs, quantized_files  # noqa: F401
from pt_impl.kit.checks import quantization_aware_training as checks  # noqa: F401
from tests import workers
from tests.compression import quick
from tests.compression.pt_distillation import channels_last, linear, numpy  # noqa: F401

quick.capture_patterns_once()
if not workers.campaign():  # a graph is read before code is made of it
    integers.compile_fx_inner = quick.as_it_is


def tensor(array):
    return torch.from_numpy(np.ascontiguousarray(array))


def images_of(array):
    """Images in the framework's layout."""
    return tensor(array.transpose(0, 3, 1, 2))


def convolution(kernel):
    """A 1x1 convolution."""
    layer = nn.Conv2d(*kernel.shape[2:], 1, bias=False)
    layer.weight.data.copy_(tensor(kernel.transpose(3, 2, 0, 1)))
    return layer


def without_kernels():
    return nn.Sequential(nn.BatchNorm2d(6), nn.ReLU())


def evaluate(model, x):
    """What a model gives in evaluation mode; its modes and ranges stay."""
    model = copy.deepcopy(model).eval()
    model.apply(pt2e.disable_observer)
    with torch.no_grad():
        return model(*x if isinstance(x, tuple) else (x,))


def state(model):
    return {name: value.clone().numpy() for name, value in model.state_dict().items()}


def gradients(model, x, y):
    model = copy.deepcopy(model)
    kit.training.cross_entropy(model(x), y).backward()
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


@contextmanager
def spoiled(model):
    """Its first kernel is not finite inside."""
    kernel = next(model.parameters())
    kept = kernel.detach().clone()
    kernel.data.mul_(float("nan"))
    yield
    kernel.data.copy_(kept)


def levels(path):
    """Different values of each kernel in the file."""
    tensors = torch.load(path, weights_only=True)["tensors"]
    return [len(t.unique()) for t in tensors if t.dtype == torch.int8]


# Models ------------------------------------------------------------------------------------------


def attention():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.5, batch_first=True)
    return layer, torch.randn(8, 5, 16)


def fitted(model, x, steps=10):
    """Losses of plain SGD that pulls all outputs to 1."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = ((model(x) - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def dropping():
    """Convolution, BatchNorm and dropout; modes differ."""
    torch.manual_seed(0)
    pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *pooled, nn.Dropout(), nn.Linear(4, 2)
    )
    model[1].eval()
    return model, torch.randn(16, 1, 6, 6)


class Branches(nn.Module):
    """What it computes depends on values."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(6, 8, 3)

    def forward(self, x):
        y = self.conv(x)
        return y if y.sum() > 0 else -y


def narrow_norm():
    """Its epsilon is above the variances, which move fast."""
    norm = nn.BatchNorm2d(8, eps=1e-3, momentum=0.5)
    norm.running_var.fill_(1e-6)
    return norm


class Parts(nn.Module):
    """What capturing might lose, side by side.

    Two tensors of unequal ranges are averaged; BatchNorm comes after additions that are the
    model's; BatchNorm has variances below its epsilon.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
        self.second.weight.data.mul_(8)
        self.both = nn.Sequential(nn.Conv2d(16, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(8, 4)
        self.sums = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(3))
        self.literal = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 8, 3, bias=bias), narrow_norm(), nn.Hardswish())
            for bias in (False, True)
        )

    def forward(self, x):
        joined = self.both(torch.cat([self.first(x), self.second(x)], 1))
        residual, constant, after = self.sums
        return {
            "joined": self.head(joined.flatten(1)),
            "residual": self.norms[0](residual(x) + x),
            "constant": constant(self.norms[1](x + 1.0)),
            "convolution plus 1": self.norms[2](after(x) + 1.0),
            "no bias": self.literal[0](x),
            "bias": self.literal[1](x),
        }


def unfolded_norm(kind):
    """A model with BatchNorm that torchao cannot fold."""
    layers = {
        "no weights": (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False)),
        "no statistics": (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False)),
        "transposed": (nn.ConvTranspose2d(4, 8, 3, groups=2), nn.BatchNorm2d(8)),
    }[kind]
    return nn.Sequential(nn.Conv2d(3, layers[0].in_channels, 1), *layers, nn.Hardswish())


def graph_of_a_gpu():
    """A graph that names a GPU: 1 + x."""
    graph, ops, gpu = torch.fx.Graph(), torch.ops.aten, torch.device("cuda")
    x = graph.placeholder("x")
    ones = graph.call_function(ops.ones.default, ([2],), {"device": gpu})
    moved = graph.call_function(ops.to.device, (x, gpu, torch.float32))
    graph.output(graph.call_function(ops.add.Tensor, (ones, moved)))
    return torch.fx.GraphModule(nn.Module(), graph)


# Files -------------------------------------------------------------------------------------------


class Functions(nn.Module):
    """A layer of a subclass, and a product by a function."""

    class Conv(nn.Conv2d):
        pass

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.kernel = self.Conv(1, 8, 3), nn.Parameter(torch.randn(4, 8) / 4)

    def forward(self, x):
        x = torch.relu(self.conv(x)).mean((2, 3))
        return nn.functional.linear(x, self.kernel)


class TwoOutputs(nn.Module):
    """Of a convolution and of a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(1, 8, 3), nn.Linear(8, 4)

    def forward(self, x):
        y = torch.relu(self.conv(x))
        return {"conv": y, "head": self.head(y.mean((2, 3)))}


class Named(nn.Conv2d):
    """Its output holds a string."""

    def forward(self, x):
        return {"y": super().forward(x), "name": "y"}


def no_tensor():
    return Named(1, 8, 3)


class Twice(nn.Module):
    """A layer runs twice."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3)

    def forward(self, x):
        return self.conv(self.conv(x))


def nothing():
    return nn.ReLU()


def run(quantized, x):
    """What a quantized model in memory predicts."""
    return quantized(x)


def bombs(mark, bomb, whole):
    """Files of PyTorch's own format that would do something if they were run."""
    file = mark.with_name("bomb")

    def saved(**changes):
        torch.save({"nodes": [], "tensors": [], "names": [], **changes}, file)
        return file.read_bytes()

    def called(name, *arguments):
        return saved(nodes=[["placeholder", [], {}], [name, list(arguments), {}]])

    code = f"self=x0); __import__('pathlib').Path({str(mark)!r}).touch(); y = dict(a"
    keyword = [["placeholder", [], {}], ["aten.relu.default", [], {code: 1}]]
    return {
        "a tensor is a bomb": saved(tensors=[bomb]),
        "a file is written": called("aten.save.default", 1, str(mark)),
        "a file is opened": called("aten.from_file.default", str(mark), True, 8),
        "another library": called("os.system", f"touch {mark}"),
        "no operator": called("operator.attrgetter", "x"),
        "a keyword is code": saved(nodes=[*keyword, ["output", ["%1"], {}]]),
    }


def dense(kernel, axes=()):
    """A linear layer within a model."""
    return nn.Sequential(linear(kernel))


def normed():
    """A layer with a weight norm, and one without."""
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))


def encoder():
    """Multi-head attention reads the weight of its last layer, 32 x 32, without calling it."""
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), torch.randn(6, 5, 32)


def programs(mark):
    """Whole files of programs that write a file."""
    return {}
