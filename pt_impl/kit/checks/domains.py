"""What domain adaptation refuses: domains that do not go together, and settings out of range.

`adversarial.py` and `discrepancy.py` have the same inputs, and so the same checks.
"""

import math

from torch import Tensor


def check_adversarial(steps: int, strength: float, gamma: float) -> None:
    """Raise ValueError for settings out of range."""
    if steps < 1 or not strength >= 0 or not gamma > 0:
        raise ValueError(
            "steps must be 1 or more, strength 0 or more, gamma above 0, not "
            f"{steps}, {strength}, {gamma}"
        )


def check_discrepancy(weight: float, bandwidths: tuple) -> None:
    """Raise ValueError for settings out of range."""
    if not 0 <= weight < math.inf:
        raise ValueError(f"weight must be at least 0 and finite, not {weight!r}")
    check_bandwidths(bandwidths)


def check_bandwidths(bandwidths: tuple) -> None:
    """Raise ValueError for no bandwidth, and for one that is not above 0."""
    if not bandwidths or not all(0 < width < math.inf for width in bandwidths):
        raise ValueError(f"bandwidths must be one or more numbers above 0, not {bandwidths!r}")


def check_two_samples(source: Tensor, target: Tensor) -> None:
    """Raise ValueError for a domain of one sample: it has no pair."""
    if len(source) < 2 or len(target) < 2:
        raise ValueError(f"each domain needs two samples, not {len(source)} and {len(target)}")


def count_samples(source, target) -> tuple[int, int]:
    """Return how many samples each domain has.

    Raises ValueError for domains of two forms, and for one without samples.
    """
    _check_forms(source, target)
    counts = _samples(source), _samples(target)
    if not all(counts):
        raise ValueError(f"each domain needs samples, not {counts[0]} and {counts[1]}")
    return counts


def check_features(features, samples: int) -> None:
    """Raise ValueError unless features are a tensor with a row a sample."""
    shape = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
    if not isinstance(features, Tensor) or features.ndim == 0 or len(features) != samples:
        raise ValueError(f"features need a row a sample, of {samples}: they are {shape}")


def _check_forms(source, target) -> None:
    """Raise unless both are tensors, None, or the same tuples or dicts of them."""
    if isinstance(source, dict) and isinstance(target, dict) and source.keys() == target.keys():
        pairs = [(part, target[name]) for name, part in source.items()]
    elif isinstance(source, tuple) and isinstance(target, tuple) and len(source) == len(target):
        pairs = list(zip(source, target, strict=True))
    else:
        of_tensors = isinstance(source, Tensor) and isinstance(target, Tensor)
        if not of_tensors and not (source is None and target is None):  # such as no mask in either
            raise ValueError(
                "source and target need one form: tensors, or the same tuples or dicts of them"
            )
        return
    for pair in pairs:
        _check_forms(*pair)


def _samples(x) -> int:
    """The rows of the first tensor of an input, all of which have a row a sample."""
    if isinstance(x, Tensor):
        return len(x)
    for part in x.values() if isinstance(x, dict) else x or ():
        if count := _samples(part):
            return count
    return 0
