"""The named values of a batch, which checks look at.

Twin: `pt_impl/kit/values.py`.
Where the frameworks differ: values become NumPy arrays; there they stay tensors on their device.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import tensorflow as tf

from shared.findings import leaves


def named_batches(data: Iterable) -> Iterator[list[tuple[str, object]]]:
    """Yield (name, leaf) of each batch's x, y and sample_weight.

    A dict, or what is neither a pair nor three, is only x.
    """
    if isinstance(data, tf.keras.utils.Sequence):  # in Keras 3 another name of PyDataset
        batches = (data[number] for number in range(len(data)))
    else:
        batches = data
    for batch in batches:
        several = isinstance(batch, tuple | list) and len(batch) in (2, 3)
        parts = zip(("x", "y", "sample_weight"), batch if several else (batch,), strict=False)
        yield [leaf for name, part in parts for leaf in leaves(part, name)]


def values_of(leaf) -> np.ndarray | None:
    """Return a leaf as an array; None where it is text, which has no values.

    Raises NotImplementedError for ragged and sparse tensors.
    """
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        raise NotImplementedError(
            f"{type(leaf).__name__}: make it dense first, or check its values"
        )
    array = np.asarray(leaf)
    if array.dtype.kind == "V" or array.dtype.name == "bfloat16":
        return array.astype(np.float32)
    return None if array.dtype.kind in "SUO" else array


def nonfinite(values: np.ndarray | None) -> str:
    """Return how many values are NaN or infinite, "" for none."""
    if values is None:
        return ""
    nan, infinite = int(np.isnan(values).sum()), int(np.isinf(values).sum())
    parts = [f"{nan} NaN"] * bool(nan) + [f"{infinite} infinite"] * bool(infinite)
    return f"{' and '.join(parts)} of {values.size} values" if parts else ""
