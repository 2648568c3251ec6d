"""PyTorch's models and words for the tests of exports."""

from dataclasses import dataclass

import torch
from torch import nn
from torch._inductor import config as inductor

from tests.compression.pt_distillation import modes, numpy  # noqa: F401 - the tests take these

KINDS = ("onnx", "openvino")
SIDES = (1, 32, 32)  # of the digits
EXPORTER = "onnxscript"


def tensor(array):
    return torch.from_numpy(array)


def built(model, *x):
    """A model in evaluation mode."""
    return model.eval()


@dataclass
class Output:
    """What no framework knows."""

    logits: object
    inside: dict
    nothing: object = None


class Named(nn.Module):
    """Inputs by name, one of them None; an object out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.norm = nn.Linear(5, 3), nn.BatchNorm1d(3)
        self.norm.eval()  # frozen, while the model trains

    def forward(self, *, left, right, mask=None):
        logits = self.norm(self.head(left)) - right[:, :3]
        return Output(logits=logits, inside={"z": left.sum(1), "a": right.sum(1)})


NAMED = {"logits", "inside.z", "inside.a"}


def named():
    return Named()


def named_inputs(left, right):
    return {"right": tensor(right), "left": tensor(left), "mask": None}


def named_outputs(model, x):
    """What the model predicts, by the names of its outputs."""
    with torch.no_grad():
        output = model.eval()(**x)
    parts = {"logits": output.logits}
    parts |= {f"inside.{name}": part for name, part in output.inside.items()}
    return {name: part.numpy() for name, part in parts.items()}


class Function(nn.Module):
    """A model of one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def window(x):
    """It branches on a size."""
    return (x[:, 4:] if x.shape[1] > 8 else x).mean(1)


def same_on_both_sides(x):
    return x.sum(1) if x.shape[1] > 6 else x.flip(1).sum(1)


def random():
    return Function(lambda x: x + torch.rand_like(x))


def words():
    """No tensor comes out."""
    return Function(lambda x: "text"), torch.ones(2, 5)


def nothing():
    return nn.ReLU()


def eigenvalues():
    return Function(lambda x: torch.linalg.eigvals(x @ x.transpose(0, 1)).real)


def branch():
    return Function(lambda x: x if x.sum() > 0 else -x)


# Native exports ----------------------------------------------------------------------------------

PACKAGE = "model.pt2"
NAMED_BY = "torchscript"  # what names are tested with: a package needs the C++ compiler
INPUT = "x"
PARTS = (None,)  # of a package, which is one file


def program(predict, x):
    """The operators that a prediction calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        predict(x)
    return {event.key for event in profile.key_averages()}


def is_compiled(ran):
    """Frozen: BatchNorm is part of convolutions whose kernels are packed for the CPU."""
    packed = {"mkldnn::_convolution_pointwise", "mkldnn::_linear_pointwise"}
    return packed <= ran and "aten::convolution" not in ran


def dtypes(model):
    return {str(parameter.dtype) for parameter in model.parameters()}


def loop():
    """A loop over time, which a trace takes for one of so many steps."""

    def run(x):
        total = x[:, 0]
        for step in range(1, x.shape[1]):
            total = (total + x[:, step]).tanh()
        return total

    return Function(run)


def always():
    """A branch that is always taken."""
    return Function(lambda x: 2 * x if x.abs().sum() >= 0 else x)


def last_eight():
    return Function(lambda x: (x[:, -8:] if x.shape[1] > 8 else x).mean(1))


def archive(path):
    """A zip archive of something else."""
    torch.save({"a": 1}, path)
    return path


def no_compiler():
    """Inside, the C++ compiler is a name that leads nowhere."""
    return inductor.patch({"cpp.cxx": ("/nowhere/c++",)})


def small():
    return nn.Linear(7, 11), torch.ones(2, 7)
