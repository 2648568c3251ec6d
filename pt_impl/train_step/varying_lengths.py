"""Varying lengths: samples padded to fewer lengths, batched by length, or packed into rows.

    x, y = pad(samples)  # to the longest of the batch; labels of padding do not count
    x, y = pack(samples, most=64)  # several samples in a row, each sees only itself
    step = make_train_step(model, optimizer, shapes="marked")  # one graph for all lengths

What it changes: how much of a batch is padding, and how many shapes a compiler sees. The loss is
the mean over real tokens. So padding and packing change it and its gradient only by rounding.
Batches by length (`batches` of `shared/lengths.py`) combine other samples.

Its twin: `tf_impl/train_step/varying_lengths.py`.

Where the frameworks differ and why:
- PyTorch: eager code compiles nothing, so shapes may vary freely. TensorFlow: a plain `tf.function`
  traces a graph for every shape, which takes as long as many steps.
- PyTorch: `torch.compile` with static shapes makes a graph for every length, and after eight the
  step is eager. By default the second graph is dynamic. With `marked` the first one is, too.
- TensorFlow: with `reduce_retracing` the second graph is for any length, with a signature the
  first.
- Batches by length: PyTorch has a sampler that knows all lengths, tf.data has
  `bucket_by_sequence_length`.

When it helps and when it hurts: the more lengths differ, the more padding costs. If half of the
samples are shorter than a fifth of the longest, three quarters of full batches are padding. Packing
avoids nearly all of it, but the model has to take positions and a mask, and attention still
computes masked scores. Batches by length need no change of the model, but each batch holds similar
samples. Padding to a multiple, or to few lengths, trades some padding for fewer graphs.

Run it alone: `python -m pt_impl.train_step.varying_lengths` prints the share of padding.

Copy with it: `pt_impl/kit/calling.py`, `shared/lengths.py`.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from pt_impl.kit.calling import logits
from shared.lengths import first_fit, skewed_lengths, target_length

NO_LABEL = -100  # what cross_entropy leaves out
SHAPES = ("plain", "static", "dynamic", "marked")

Batch = tuple[tuple[Tensor, ...], Tensor]  # what the model is called with, and labels (n, t)


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
        whole = pad_sequence([torch.tensor(one) for one in parts], True, value)
        padded.append(F.pad(whole, (0, length - whole.shape[1]), value=value))
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
    codes, positions, segments = (torch.zeros(len(rows), most, dtype=torch.int64) for _ in "abc")
    labels = torch.full_like(codes, NO_LABEL)
    for row, inside in enumerate(rows):
        start = 0
        for number, sample in enumerate(inside, 1):
            place = slice(start, start + lengths[sample])
            codes[row, place] = torch.tensor(samples[sample][0])
            labels[row, place] = torch.tensor(samples[sample][1])
            positions[row, place] = torch.arange(lengths[sample])
            segments[row, place] = number
            start = place.stop
    return (codes, positions, block_mask(segments)), labels


def block_mask(segments: Tensor) -> Tensor:
    """Which place sees which, (n, 1, t, t) bool: those before it in its own segment, and itself.

    segments: (n, t) int64, the number of the sample at each place.
    """
    same = segments[:, :, None] == segments[:, None, :]
    return torch.tril(same)[:, None]


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the real tokens, a scalar. logits: (n, t, classes); labels: (n, t)."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL)


def make_train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, shapes: str = "plain"
) -> Callable:
    """Make `step(x, y) -> loss` of what `pad` and `pack` return.

    Args:
        model: called with the parts of x; gives logits, or an output that has them as `.logits`.
        shapes: "plain" is eager. "static": a graph for each shape; "dynamic": one for all, found by
            tracing sizes as symbols; "marked": only lengths are symbols.

    Raises:
        ValueError for other shapes.
    """
    if shapes not in SHAPES:
        raise ValueError(f"unknown shapes {shapes!r}: choose one of {', '.join(SHAPES)}")

    def forward(x, y):
        return token_loss(logits(model(*x)), y)

    if shapes != "plain":
        dynamic = {"static": False, "dynamic": True, "marked": None}[shapes]
        forward = torch.compile(forward, dynamic=dynamic)

    def step(x, y):
        if shapes == "marked":
            for part in (*x, y):
                _mark_lengths(part)
        optimizer.zero_grad(set_to_none=True)
        loss = forward(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _mark_lengths(part: Tensor) -> None:
    """The compiler raises where it would make a constant of one of them."""
    for axis in range(1, part.ndim):
        if part.shape[axis] > 1:
            torch._dynamo.mark_dynamic(part, axis)


def main() -> None:
    """Print the share of padding in a batch of 32 samples, by how it is made."""
    samples = [(np.ones(n, np.int64),) * 2 for n in skewed_lengths(32, most=64, seed=0)]
    made = {name: pad(samples, padding=name) for name in ("full", "few", "multiple", "longest")}
    for name, (_, labels) in (made | {"packed": pack(samples)}).items():
        share = (labels == NO_LABEL).float().mean().item()
        print(f"{name:10}{tuple(labels.shape)!s:>12}{share:8.0%} padding")


if __name__ == "__main__":
    main()
