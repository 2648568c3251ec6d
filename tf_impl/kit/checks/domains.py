"""What domain adaptation refuses: features without a row a sample, and settings out of range.

`adversarial.py` and `discrepancy.py` have the same inputs, and so the same checks.
"""

import math

import tensorflow as tf


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


def check_two_samples(source: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """Return how many samples the source has.

    Raises ValueError for a domain of one sample: it has no pair. Where a graph learns of that only
    as it runs, it raises InvalidArgumentError.
    """
    sizes = source.shape[0], target.shape[0]  # None where a graph leaves them open
    if 1 in sizes:
        raise ValueError(f"each domain needs two samples, not {sizes[0]} and {sizes[1]}")
    message = "each domain needs two samples"
    enough = [tf.debugging.assert_greater(tf.shape(x)[0], 1, message) for x in (source, target)]
    with tf.control_dependencies([check for check in enough if check is not None]):
        return tf.shape(source)[0]


def check_features(features: tf.Tensor, x) -> None:
    """Raise ValueError unless features have a row a sample of x, as far as a graph knows."""
    rows, samples = features.shape[0], tf.nest.flatten(x)[0].shape[0]
    if rows != samples and None not in (rows, samples):
        raise ValueError(f"features need a row a sample, of {samples}: they are {features.shape}")
