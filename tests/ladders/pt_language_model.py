"""Plain PyTorch for test_language_model.py."""

import multiprocessing

import torch
import torch.distributed as dist


def before_anything_runs():
    """Nothing: replicas are processes."""


def by_hand(model, batches):
    """Losses of AdamW at the places that have a label."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01
    )
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x)[y >= 0], y[y >= 0])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def is_fused(run, batch):
    """Whether the update has a kernel of its own."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run.step(*batch)
    return "aten::_fused_adamw_" in {event.name for event in profile.events()}


def watch(model, sizes):
    """Note the batch size of each call of the model."""
    model.register_forward_pre_hook(lambda module, x: sizes.append(len(x[0])))


def replicas(run):
    """How many there are; all but one are processes of their own."""
    return dist.get_world_size() if len(multiprocessing.active_children()) == 1 else None


def gradient(cross_entropy, logits, y):
    """Of a loss to its logits."""
    given = torch.tensor(logits, requires_grad=True)
    cross_entropy(given, torch.tensor(y)).backward()
    return given.grad.numpy()
