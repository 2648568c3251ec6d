"""PyTorch's models and words for the tests of adaptation."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pt_impl.kit import models
from pt_impl.recipes import gradient_health, learning_rate_finder  # noqa: F401 - the tests take it
from tests.recipes.pt_recipes import checkpoints, nonfinite, numpy, total  # noqa: F401


def tensor(x):
    return torch.tensor(x) if isinstance(x, np.ndarray) else x.clone()


scalar = torch.tensor


def cast(x, dtype):
    return tensor(x).to(getattr(torch, dtype))


def gradients_at(function, *inputs):
    """Value and gradients of a scalar function of arrays or tensors."""
    tensors = [tensor(value).requires_grad_() for value in inputs]
    value = function(*tensors)
    value.backward()
    return numpy(value), [numpy(each.grad) for each in tensors]


def weights(head):
    """Kernels (in, out) and biases."""
    return [p.detach().numpy().T.copy() for p in head.parameters()]


def restore(other, model, folder):
    other.load_state_dict(model.state_dict())


def count_one_pass(both):
    both.passes.fill_(1)


def plain_gradients(model, head, x, y):
    """Both losses together, gradients of each by name, and those of the domain head."""
    features, top = models.split_head(model)
    parameters = models.named_parameters(model.train())
    out, count = features(torch.cat(x)), len(y)
    label = F.cross_entropy(top(out[:count]), y)
    logits = head(out)
    domain = sum(
        F.binary_cross_entropy_with_logits(part, torch.full_like(part, wanted)) / 2
        for part, wanted in ((logits[:count], 0.0), (logits[count:], 1.0))
    )
    found = []
    for loss in (label, domain):
        gradients = torch.autograd.grad(
            loss, list(parameters.values()), retain_graph=True, allow_unused=True
        )
        named = zip(parameters, gradients, strict=True)
        found.append({k: models.to_canonical(k, g.numpy()) for k, g in named if g is not None})
    of_head = torch.autograd.grad(domain, list(head.parameters()))
    return float(label + domain), *found, [gradient.numpy().T for gradient in of_head]


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, a, b):
        return self.layer(a + b)


def of_two_inputs(technique):
    """An adversarial model, pairs of domains for it, and the logits of the source."""
    torch.manual_seed(0)
    domain = technique.make_domain_head(width=4)
    both = technique.AdversarialModel(Two(), nn.Linear(4, 2), domain, steps=1)
    a, b, c, d = torch.randn(4, 5, 3)
    pairs = [((a, b), (c, d)), ({"a": a, "b": b}, {"a": c, "b": d})]
    return both, pairs, numpy(both.head(both.features(a, b)))


def call(both, inputs):
    return both(*inputs)


def eager_and_graph(technique, both, inputs):
    """A gradient of the domain loss, reversed in full; and compiled."""
    found = []
    for model in (both, torch.compile(both, backend="aot_eager", fullgraph=True)):
        both.zero_grad()
        both.passes.fill_(1)
        technique.domain_loss(*model(*inputs)[1:]).backward()
        found.append(both.features.layer.weight.grad.clone().numpy())
    return found


class Sum(nn.Module):
    def forward(self, x, y=None):
        return x if y is None else x + y


def check_forms(make):
    """Domains of other forms are refused by a model of (source, target): features -> model."""
    a, b, both = torch.randn(4, 3), torch.randn(5, 3), make(Sum())
    assert len(both((a, None), (b, None))[2]) == len(b)
    for words, domains in (
        ("source and target need one form", ((a, a), b[:2])),
        ("source and target need one form", ({"x": a}, {"x": b, "y": b})),
        ("each domain needs samples", (a, b[:0])),
    ):
        with pytest.raises(ValueError, match=words):
            both(*domains)


def without_rows():
    """Features that mix samples, and a head."""
    return nn.Flatten(0, 1), nn.Linear(3, 2)


def run_in_a_graph(both, domains):
    return both(*torch.tensor(domains))
