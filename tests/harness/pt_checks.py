"""Plain PyTorch: a short training of the digits CNN, its held-out loss, and its logits."""

import torch
import torch.nn.functional as F

from pt_impl.kit import models


def trained(spec, weights, batches, rate):
    """A model after a step of SGD with momentum on each batch of NHWC arrays."""
    model = models.build(spec, weights).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(_images(x)), torch.tensor(y)).backward()
        optimizer.step()
    return model


def held_out_loss(model, x, y):
    """The mean cross-entropy in evaluation mode."""
    with torch.no_grad():
        return F.cross_entropy(model.eval()(_images(x)), torch.tensor(y)).item()


def logits(spec, weights, x):
    """The outputs in evaluation mode."""
    with torch.no_grad():
        return models.build(spec, weights).eval()(_images(x)).numpy()


def _images(x):
    return torch.tensor(x).permute(0, 3, 1, 2).contiguous()
