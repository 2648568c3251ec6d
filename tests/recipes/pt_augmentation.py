"""PyTorch's words for the tests of augmentation."""

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.recipes.pt_recipes import gradient_at  # noqa: F401 - the tests take it


def tensor(x):
    return torch.as_tensor(x)


def image(x):
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1)))


def back(x):
    return np.moveaxis(x.float().numpy(), 1, -1)


def cast(x, dtype):
    return x.to(getattr(torch, dtype))


def generator(seed):
    return torch.Generator().manual_seed(seed)


def copy_state(one, other, folder):
    other.set_state(one.get_state())


def in_another_layout(x, transform):
    """What is made of the same images with their channels last in memory, and is so, too."""
    made = transform(x.contiguous(memory_format=torch.channels_last))
    assert made.is_contiguous(memory_format=torch.channels_last)
    return made


def sample_cross_entropy(outputs, labels):
    return F.cross_entropy(outputs, labels, reduction="none")


def pairs(x, y):
    return TensorDataset(image(x), tensor(y))


def loader(dataset, start=0, **settings):
    batches = [range(at, at + 4) for at in range(start, 32, 4)]
    return DataLoader(dataset, batch_sampler=batches, **settings)


def epochs_of(technique, data, policy, seed, count):
    """The batches of each epoch."""
    return loaded(technique, data, policy, seed, count)


def loaded(technique, data, policy, seed, count, **settings):
    """The batches of each epoch, by a loader with these settings."""
    dataset = technique.augmented_dataset(pairs(*data), policy, seed=seed)
    given, found = loader(dataset, **settings), []
    for epoch in range(count):
        dataset.set_epoch(epoch)
        found.append(list(given))
    return found


def resumed(technique, data, policy, folder):
    """The images from the fourth batch of the second epoch on."""
    dataset = technique.augmented_dataset(pairs(*data), policy, seed=1)
    dataset.set_epoch(1)
    return [x for x, _ in loader(dataset, start=12)]
