"""How the tests of accumulation read what a step has applied, and how far two of them are apart."""

from __future__ import annotations

import numpy as np


def tensors(applied, statistics=False):
    """The gradients of a step, or the statistics after it, as float64 arrays."""
    return {
        name: np.array(value, dtype=np.float64)
        for name, value in applied.items()
        if name != "loss" and name.endswith((".bn.mean", ".bn.variance")) == statistics
    }


def apart(ours, theirs):
    """The largest relative L2 difference of a tensor."""
    assert ours.keys() == theirs.keys()
    norm = np.linalg.norm
    return max(norm(ours[name] - theirs[name]) / norm(theirs[name]) for name in theirs)


def relative(ours, theirs):
    return max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))


def weighted(parts, shares, **kwargs):
    parts = [tensors(part, **kwargs) for part in parts]
    return {
        name: sum(share * part[name] for share, part in zip(shares, parts, strict=True))
        for name in parts[0]
    }


def of_parts(cnn, momentum):
    """The statistics before a step, and those that each part alone has given."""
    before = tensors(cnn["start"], statistics=True)
    return before, [
        {n: (v - (1 - momentum) * before[n]) / momentum for n, v in alone.items()}
        for alone in (tensors(part, statistics=True) for part in cnn["alone"])
    ]
