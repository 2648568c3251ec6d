"""Plain PyTorch for test_image_classification.py."""

import torch


def by_hand(model, batches):
    """Losses of SGD with momentum."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), []
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def is_channels_last(model, x):
    """Whether the channels lie last in the weights and in what a convolution makes."""
    outputs = []
    hook = model.conv0.register_forward_hook(lambda module, x, output: outputs.append(output))
    with torch.no_grad():
        model.eval()(x.contiguous())
    hook.remove()
    last = torch.channels_last
    return all(t.is_contiguous(memory_format=last) for t in (model.conv0.conv.weight, *outputs))
