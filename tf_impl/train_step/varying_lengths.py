"""Varying lengths: samples padded to fewer lengths, batched by length, or packed into rows.

    x, y = pad(samples)  # to the longest of the batch; labels of padding do not count
    x, y = pack(samples, most=64)  # several samples in a row, each sees only itself
    step = make_train_step(model, optimizer, shapes="signature")  # one graph for all lengths

What it changes: how much of a batch is padding, and how many shapes a compiler sees. The loss is
the mean over real tokens. So padding and packing change it and its gradient only by rounding.
Batches by length (`batches` of `shared/lengths.py`) combine other samples.

Its twin: `pt_impl/train_step/varying_lengths.py`, which says where the frameworks differ.

When it helps and when it hurts: the more lengths differ, the more padding costs. If half of the
samples are shorter than a fifth of the longest, three quarters of full batches are padding. Packing
avoids nearly all of it, but the model has to take positions and a mask, and attention still
computes masked scores. Batches by length need no change of the model, but each batch holds similar
samples. Padding to a multiple, or to few lengths, trades some padding for fewer graphs.

Run it alone: `python -m tf_impl.train_step.varying_lengths` prints the share of padding.

Copy with it: `shared/lengths.py`, `tf_impl/kit/calling.py`.
"""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from shared.lengths import first_fit, skewed_lengths, target_length
from tf_impl.kit.calling import logits

NO_LABEL = -100  # as PyTorch's cross_entropy has it; the loss leaves it out
SHAPES = ("plain", "relaxed", "signature")

Batch = tuple[tuple[tf.Tensor, ...], tf.Tensor]  # what the model is called with, labels (n, t)


def pad(
    samples: Sequence[tuple[np.ndarray, np.ndarray]],
    *,
    padding: str = "longest",
    multiple: int = 16,
    most: int = 64,
) -> Batch:
    """Return ((codes,), labels) of samples under one another, (n, length) int64.

    A causal model needs no mask: padding stands behind all that is real.

    Args:
        samples: codes and labels, both of (its length,).
        padding: "longest" of the batch, the next "multiple", the next of "few" lengths (`most`, its
            half, its quarter, ...), or "full", which is `most`.

    Raises:
        ValueError for another padding, and for a sample longer than `most`.
    """
    lengths = [len(codes) for codes, _ in samples]
    length = target_length(lengths, padding=padding, multiple=multiple, most=most)
    padded = []
    for parts, value in zip(zip(*samples, strict=True), (0, NO_LABEL), strict=True):
        ragged = tf.RaggedTensor.from_row_lengths(np.concatenate(parts), lengths)
        padded.append(ragged.to_tensor(default_value=value, shape=(None, length)))
    return (padded[0],), padded[1]


def pack(samples: Sequence[tuple[np.ndarray, np.ndarray]], *, most: int = 64) -> Batch:
    """Return ((codes, positions, allowed), labels) of samples one after another in rows of `most`.

    positions begin anew with each sample; `allowed` (rows, 1, most, most) is `block_mask`.

    Raises:
        ValueError for a sample longer than `most`.
    """
    lengths = [len(codes) for codes, _ in samples]
    target_length(lengths, padding="full", multiple=1, most=most)
    rows = first_fit(lengths, most=most)
    sizes = [sum(lengths[sample] for sample in inside) for inside in rows]

    def joined(part_of: Callable, value: int) -> tf.Tensor:
        """Rows of what `part_of(number in its row, sample)` gives, padded with `value`."""
        parts = [part_of(*one) for inside in rows for one in enumerate(inside, 1)]
        ragged = tf.RaggedTensor.from_row_lengths(np.concatenate(parts), sizes)
        return ragged.to_tensor(default_value=value, shape=(None, most))

    codes = joined(lambda _, sample: samples[sample][0], 0)
    labels = joined(lambda _, sample: samples[sample][1], NO_LABEL)
    positions = joined(lambda _, sample: np.arange(lengths[sample]), 0)
    segments = joined(lambda number, sample: np.full(lengths[sample], number), 0)
    return (codes, positions, block_mask(segments)), labels


def block_mask(segments: tf.Tensor) -> tf.Tensor:
    """Which place sees which, (n, 1, t, t) bool: those before it in its own segment, and itself.

    segments: (n, t) int64, the number of the sample at each place.
    """
    places = tf.range(tf.shape(segments)[1])
    same = segments[:, :, None] == segments[:, None, :]
    return (same & (places[:, None] >= places))[:, None]


def bucketed_batches(
    samples: Sequence[tuple[np.ndarray, np.ndarray]],
    *,
    batch_size: int = 8,
    boundaries: tuple = (8, 16, 32),
) -> tf.data.Dataset:
    """Return batches as `pad` makes them, each of samples between two boundaries, in their order.

    A batch is given when its bucket is full, and what is left at the end.
    """
    lengths = [len(codes) for codes, _ in samples]
    codes, labels = (
        tf.RaggedTensor.from_row_lengths(np.concatenate(parts), lengths)
        for parts in zip(*samples, strict=True)
    )
    data = tf.data.Dataset.from_tensor_slices((codes, labels))
    data = data.map(lambda x, y: (tf.ensure_shape(x, (None,)), tf.ensure_shape(y, (None,))))
    data = data.bucket_by_sequence_length(
        lambda x, y: tf.size(x),
        bucket_boundaries=list(boundaries),
        bucket_batch_sizes=[batch_size] * (len(boundaries) + 1),
        padding_values=(tf.constant(0, tf.int64), tf.constant(NO_LABEL, tf.int64)),
    )
    return data.map(lambda x, y: ((x,), y))


def token_loss(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Mean cross-entropy of the real tokens, a scalar. logits: (n, t, classes); labels: (n, t)."""
    real = labels != NO_LABEL
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.where(real, labels, 0), tf.cast(logits, tf.float32)
    )
    return tf.reduce_sum(tf.where(real, losses, 0.0)) / tf.reduce_sum(tf.cast(real, tf.float32))


def make_train_step(
    model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer, *, shapes: str = "plain"
) -> Callable:
    """Make `step(x, y) -> loss` of what `pad` and `pack` return.

    Args:
        model: called with the parts of x; gives logits, or an output that has them as `.logits`.
        shapes: "plain" traces a graph for each shape. "relaxed": the second is for any length;
            "signature": the first, for what `pad` returns.

    Raises:
        ValueError for other shapes.
    """
    if shapes not in SHAPES:
        raise ValueError(f"unknown shapes {shapes!r}: choose one of {', '.join(SHAPES)}")

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = token_loss(logits(model(*x, training=True)), y)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    if shapes == "signature":
        any_length = tf.TensorSpec((None, None), tf.int64)
        return tf.function(step, input_signature=[(any_length,), any_length], jit_compile=False)
    return tf.function(step, reduce_retracing=shapes == "relaxed", jit_compile=False)


def main() -> None:
    """Print the share of padding in a batch of 32 samples, by how it is made."""
    samples = [(np.ones(n, np.int64),) * 2 for n in skewed_lengths(32, most=64, seed=0)]
    made = {name: pad(samples, padding=name) for name in ("full", "few", "multiple", "longest")}
    for name, (_, labels) in (made | {"packed": pack(samples)}).items():
        share = float(tf.reduce_mean(tf.cast(labels == NO_LABEL, tf.float32)))
        print(f"{name:10}{tuple(labels.shape)!s:>12}{share:8.0%} padding")


if __name__ == "__main__":
    main()
