"""Plain PyTorch for test_domain_adaptation.py."""

import torch
from torch.nn import functional


def weights(model):
    return [weight.detach().clone().numpy() for weight in model.parameters()]


def make_step(features, head, domain_head, *, rate):
    """A step of two gradients and no reversal: the labels' less `strength` times the domains'."""
    labelled, domains = (list(m.parameters()) for m in (head, domain_head))
    heads = {id(weight) for weight in labelled}  # which the kit's features hold, too
    shared = [weight for weight in features.parameters() if id(weight) not in heads]
    optimizer = torch.optim.SGD([*shared, *labelled, *domains], lr=rate, momentum=0.9)
    features.train()

    def step(x, y, target, strength):
        both = features(torch.cat([x, target]))
        cost = functional.cross_entropy(head(both[: len(x)]), y)
        of_source = torch.cat([torch.zeros(len(x), 1), torch.ones(len(target), 1)])
        confusion = functional.binary_cross_entropy_with_logits(domain_head(both), of_source)
        down = torch.autograd.grad(cost, [*shared, *labelled], retain_graph=True)
        up = torch.autograd.grad(confusion, [*shared, *domains])
        for weight, a, b in zip(shared, down, up, strict=False):
            weight.grad = a - strength * b
        for weight, gradient in zip(labelled, down[len(shared) :], strict=True):
            weight.grad = gradient
        for weight, gradient in zip(domains, up[len(shared) :], strict=True):
            weight.grad = gradient
        optimizer.step()
        return float(cost + confusion)

    return step
