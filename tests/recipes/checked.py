"""What the tests of the checks share: a clean dataset, its tensors, and what a call says."""

from __future__ import annotations

import sys

import numpy as np

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
CLASSES, BATCH = 4, 8


def arrays(count=64):
    """A clean dataset, the same in every process: x from 0 to 1, classes in balance."""
    random = np.random.default_rng(1)
    x = random.uniform(0, 1, (count, 8, 8, 1)).astype(np.float32)
    return x, np.arange(count) % CLASSES


def said(call):
    """The report's text, or what was raised."""
    try:
        return str(call())
    except (ValueError, NotImplementedError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"


def tensor(x):
    """An array as the framework's tensor, in its layout."""
    if FRAMEWORK == "tf":
        import tensorflow as tf

        return tf.constant(x)
    import torch

    x = torch.as_tensor(np.ascontiguousarray(x))
    return x.permute(0, 3, 1, 2).contiguous() if x.ndim == 4 else x
