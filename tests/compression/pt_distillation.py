"""PyTorch's models and words for the tests of distillation and feature distillation."""

from dataclasses import dataclass

import torch
from torch import nn

from pt_impl import kit  # noqa: F401 - the tests take these
from pt_impl.compression import distillation, pruning, structured_pruning  # noqa: F401
from tests.compression.teaching import LEFT, RIGHT, TARGET

X, Y = torch.from_numpy(LEFT), torch.from_numpy(TARGET)
PAIR = X, torch.from_numpy(RIGHT)
MAP = torch.zeros((9, 2, 2), dtype=torch.int64)  # labels of `pixels`
LAYERS = "conv1", "stage1"  # of CNN and RESNET: both give 4 x 4 pixels
NEUTRAL = 0.0  # the neutral setting is the plain step to the last bit
ACTIVATION = "conv1"  # a function without a name
OTHER_PIXELS = "conv0"


def recorder(model):
    """An optimizer that puts the gradient in the parameter's place."""

    class Recorder(torch.optim.SGD):
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.data.copy_(parameter.grad)

    return Recorder(model.parameters(), lr=1.0)


def descent(model, rate=0.1):
    return torch.optim.SGD(model.parameters(), lr=rate)


def state(optimizer):
    return sum(v.abs().sum().item() for s in optimizer.state.values() for v in s.values())


def numpy(tensor):
    return tensor.detach().numpy()


def channels_last(images):
    """Images in NumPy, in the layout of the data sets."""
    return images.numpy().transpose(0, 2, 3, 1)


# Losses


def soft(technique, ours, theirs, temperature):
    """Value and gradient of the soft loss of NumPy's logits."""
    student = torch.from_numpy(ours).requires_grad_()
    loss = technique.soft_loss(student, torch.from_numpy(theirs), temperature=temperature)
    loss.backward()
    return loss.item(), student.grad.numpy()


def cast(values, dtype):
    return torch.as_tensor(values).to(getattr(torch, dtype))


def mistaken(ours, theirs, *, temperature, class_axis):
    """Keras's KLDivergence()(log_softmax, log_softmax), in PyTorch's words."""
    return _clipped(*(torch.log_softmax(v / temperature, -1) for v in (theirs, ours)))


def half_mistaken(ours, theirs, *, temperature, class_axis):
    """The same with the teacher's probabilities."""
    p = torch.softmax(theirs / temperature, -1)
    return _clipped(p, torch.log_softmax(ours / temperature, -1))


def _clipped(p, q):
    p, q = p.clip(1e-7, 1.0), q.clip(1e-7, 1.0)
    return (p * (p / q).log()).sum(-1).mean()


def no_loss(output, labels):
    """0, with a gradient of 0."""
    return 0.0 * getattr(output, "logits", output).sum()


# Models


def linear(kernel):
    layer = nn.Linear(*kernel.shape, bias=False)
    layer.weight.data.copy_(torch.from_numpy(kernel.T.copy()))
    return layer


def kernel(model):
    return model.weight.detach().numpy().T


def dense(outputs, activation=None):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, outputs), *([nn.Softmax(-1)] if activation else []))


def flat():
    """Outputs without an axis of classes."""
    return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))


def freeze(model):
    return model.requires_grad_(False)


def pixels(seed):
    """Logits (n, classes, h, w)."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 12), nn.Unflatten(1, (3, 2, 2)))


def two_maps(seed):
    class Maps(nn.Sequential):
        def forward(self, x):
            return {"out": super().forward(x), "aux": super().forward(x)}

    return Maps(*pixels(seed))


class Forked(nn.Module):
    """Two outputs by name behind `hidden`."""

    def __init__(self, width, classes="classes"):
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.name = nn.Linear(4, width), classes
        self.classes, self.size = nn.Linear(width, 3), nn.Linear(width, 1)

    def forward(self, x):
        x = self.hidden(x)
        return {self.name: self.classes(x), "size": self.size(x)}


class Two(nn.Module):
    """Two inputs, and a third that may be None."""

    def __init__(self, width):
        super().__init__()
        self.left, self.right = nn.Linear(4, width), nn.Linear(4, width)
        self.norm, self.head = nn.BatchNorm1d(width), nn.Linear(width, 3)
        torch.manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, a, b, offset=None):
        return self.head(torch.tanh(self.norm(self.left(a) + self.right(b))))


def two_inputs():
    """(student, teacher, x) with several inputs: each kind."""
    return [two_inputs_in_a_graph()]


def two_inputs_in_a_graph():
    """One in which layers can be found by name."""
    return Two(3), Two(6), PAIR


def optional_inputs():
    """A model, its inputs, and the same by name with None for one that is left out."""
    return Two(6), PAIR, {"offset": None, "a": PAIR[0], "b": PAIR[1]}


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor


class Named(nn.Module):
    """Inputs by name and logits in an output; `ran` counts complete passes."""

    def __init__(self, width):
        super().__init__()
        torch.manual_seed(width)
        self.body, self.act = nn.Linear(4, width), nn.ReLU(inplace=True)
        self.head, self.ran = nn.Linear(width, 3), 0

    def forward(self, *, left, right):
        hidden = self.body(left + right)
        x = self.act(hidden)
        self.ran += 1
        return Output(self.head(x), hidden)


def by_name():
    """(student, teacher, x) whose inputs have names: each kind."""
    return [(Named(3), Named(6), {"left": PAIR[0], "right": PAIR[1]})]


def predicted(model, x):
    with torch.no_grad():
        if isinstance(x, dict):
            return model(**x).logits
        return model.eval()(*x) if isinstance(x, tuple) else model(x)


# What a teacher keeps


def mix_modes(model):
    """A root in evaluation mode over a BatchNorm in training mode, and the reverse."""
    model.eval()
    model.stem.train()
    model.stage1.train()
    model.stage1.block0.conv0.bn.eval()


def modes(model):
    return [module.training for module in model.modules()]


def gradients(model):
    return sum(parameter.grad is not None for parameter in model.parameters())


# Features


def regressor(taught):
    layer = taught.regressor
    weight = layer.weight.detach().numpy()[..., 0, 0].T
    return {"kernel": weight, "bias": layer.bias.detach().numpy()}


def feature_error(taught, teacher, layer, x):
    """The mean squared error as written out by hand."""
    with torch.no_grad():
        seen = []
        hook = teacher.get_submodule(layer).register_forward_hook(lambda *c: seen.append(c[-1]))
        teacher.eval()(x)
        hook.remove()
        _, ours = taught.train()(x)
        return (ours - seen[0]).square().mean().item()


def twice():
    """A layer "0" that runs twice, and "1"."""
    return nn.Sequential(layer := nn.Linear(4, 4), nn.Tanh(), layer)
