"""What stacked compression refuses: models that were not pruned first."""

import tensorflow as tf


def check_combinations(masks: list[tf.Tensor]) -> None:
    """Raise ValueError where no kernel has a zero. masks: of each kernel, what is not zero."""
    if all(tf.reduce_all(mask) for mask in masks):
        raise ValueError("no kernel of the model has a zero to keep: prune it first")
