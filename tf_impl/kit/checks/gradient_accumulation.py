"""What gradient accumulation refuses: batches that cannot be cut, and models without gradients."""

import tensorflow as tf


def check_gradient_accumulation(model: tf.keras.Model, micro_batches: int) -> None:
    """Raise ValueError for a number of parts below 1, and a model without trainable variables."""
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches must be an integer of at least 1, not {micro_batches!r}")
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    if not model.trainable_variables:
        raise ValueError("the model has no trainable variables: there is no gradient to add")


def count_samples(batch, micro_batches: int) -> int | tf.Tensor:
    """Return the number of samples: an int where it is known while tracing, else a scalar tensor.

    Raises ValueError where tensors disagree on it, and for fewer samples than parts; the graph
    raises InvalidArgumentError where only it knows the number. NotImplementedError: a SparseTensor.
    """
    tensors = [leaf for leaf in tf.nest.flatten(batch) if tf.is_tensor(leaf)]
    if any(isinstance(tensor, tf.SparseTensor) for tensor in tensors):
        raise NotImplementedError("a SparseTensor is not cut into parts: give tf.sparse.to_dense")
    sizes = {leaf.shape[0] if leaf.shape.rank else "a scalar" for leaf in tensors}
    known = sizes - {None}
    if not sizes or len(known) > 1 or "a scalar" in known:
        got = ", ".join(sorted(map(str, sizes)))
        raise ValueError(f"the tensors of x and y need one first axis, the samples: got {got}")
    few = f"samples do not fill {micro_batches} micro-batches: drop this batch, or make fewer parts"
    if known:
        if min(known) < micro_batches:
            raise ValueError(f"{min(known)} {few}")
        return min(known)
    samples = tf.shape(tensors[0])[0]
    check = tf.debugging.assert_greater_equal(samples, micro_batches, few)
    # Every part is cut with this number, so none runs before the check.
    with tf.control_dependencies([check]):
        return tf.identity(samples)
