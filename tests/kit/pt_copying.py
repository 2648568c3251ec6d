"""PyTorch's models for the tests of copies."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from pt_impl.kit import comparing, copying, training, user_model  # noqa: F401 - of tests, too
from shared.specs import Recipe

SGD = Recipe("sgd", learning_rate=0.1, epochs=1, accuracy_batch_size=4)
X = torch.ones(2, 4)
CODES, SHIFT = torch.tensor([1, 2, 3]), torch.randn(3, 4)


class Named(nn.Module):
    """Two inputs, a frozen parameter, tied weights, dropout, and a dictionary out."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.norm.weight.requires_grad_(False)
        self.norm.eval()

    def forward(self, codes, shift):
        return {"logits": self.head(self.drop(self.norm(self.table(codes) + shift)))}


class Counting(nn.Linear):
    """A layer with an extra state, which is no tensor."""

    steps = 1

    def get_extra_state(self):
        return {"steps": self.steps}

    def set_extra_state(self, state):
        self.steps = state["steps"]


class Hides(nn.Module):
    """Keeps what it computes with where no copy takes it."""

    scales: ClassVar[dict] = {}

    def __init__(self):
        super().__init__()
        self.scales[id(self)] = 2.0

    def forward(self, x):
        return self.scales.get(id(self), 1.0) * x


def without_example():
    return Named(), None, (CODES, SHIFT)


def by_a_tuple():
    return Named(), (CODES, SHIFT), (CODES, SHIFT)


def by_names():
    return Named(), {"codes": CODES, "shift": SHIFT}, (CODES, SHIFT)


def with_extra_state():
    return Counting(4, 2), X, (X,)


def masked():
    return prune.random_unstructured(nn.Linear(3, 3), "weight", 0.5)


def dense():
    return nn.Linear(4, 2)


def complex_of(value):
    return torch.tensor([1 + value, 2.0])


# What is looked at


def state(model):
    return [value.detach().numpy().copy() for value in (*model.parameters(), *model.buffers())]


def tensors(model):
    return {id(value) for value in (*model.parameters(), *model.buffers())}


def traits(model):
    """What may be trained, and modes."""
    trained = [parameter.requires_grad for parameter in model.parameters()]
    return trained, [module.training for module in model.modules()]


def outputs(model, x):
    modes = [module.training for module in model.modules()]
    with torch.no_grad():
        output = model.eval()(*x)
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    return [(output["logits"] if isinstance(output, dict) else output).numpy()]


# A file's optimizer


def fine_tuned(**settings):
    """A file's model of which two layers of three are trained, at rates of their own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    groups = [{"params": model[2].parameters(), "lr": 0.2}, {"params": model[1].parameters()}]
    return model, F.cross_entropy, torch.optim.SGD(groups, lr=0.1, **settings)


def updated(file, make_optimizer):
    """The weights after two steps of a file's model, from the same each time, and what ran."""
    torch.manual_seed(0)
    model = file.build(None)
    step = training.make_train_step(model, make_optimizer(model, SGD), file.loss)
    x, y = torch.randn(8, 4), torch.arange(8) % 2
    with torch.profiler.profile() as profile:
        for _ in range(2):
            step(x, y)
    return state(model), [event.key for event in profile.key_averages()]
