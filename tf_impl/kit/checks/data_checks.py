"""What checks of data refuse: batches without samples or labels, and parts that do not fit."""

from tf_impl.kit.findings import is_one


def check_batch(named: list, num_classes: int) -> int:
    """Return how many samples a batch has.

    named: (name, leaf) of x, y and sample_weight; a number by itself belongs to the whole batch.

    Raises ValueError where `num_classes` is given for a batch without labels, where neither x nor
    y has a tensor, and where they have different lengths.
    """
    if num_classes and not any(name.startswith("y") for name, _ in named):
        raise ValueError(
            "num_classes is given, but a batch has no labels: each must be (x, y) or "
            "(x, y, sample_weight)"
        )
    lengths = {name: len(leaf) for name, leaf in named if not is_one(leaf)}
    if not lengths:
        raise ValueError("a batch is empty: neither x nor y has a tensor")
    if len(set(lengths.values())) > 1:
        raise ValueError(f"parts of a batch have different lengths: {lengths}")
    return next(iter(lengths.values()))


def check_seen(samples: int) -> None:
    """Raise ValueError where the data had no sample."""
    if not samples:
        raise ValueError("there is no batch to check")
