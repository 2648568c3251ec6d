"""PyTorch's side of test_varying_lengths.py."""

import torch
import torch.nn.functional as F


def loss_and_gradients(model, loss_of):
    """The loss, and its gradients by the order of names, as NumPy."""
    model.zero_grad()
    loss = loss_of()
    loss.backward()
    return loss.item(), [p.grad.numpy().copy() for _, p in sorted(model.named_parameters())]


def plain_loss(model, codes, labels):
    """The mean loss of one sample without padding."""
    logits = model(torch.as_tensor(codes)[None])
    return F.cross_entropy(logits[0], torch.as_tensor(labels))


def sgd(model, rate):
    """Plain SGD."""
    return torch.optim.SGD(model.parameters(), lr=rate)


def forget_graphs():
    """Compile anew, and count from 0."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
