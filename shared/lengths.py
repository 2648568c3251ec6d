"""Samples of many lengths: which are batched together, to which length, and packed into which row.

A sample is a pair of arrays of one length, codes and labels. Nothing here knows a framework.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PADDINGS = ("longest", "multiple", "few", "full")
WINDOW = 16  # batches whose samples are sorted together: an epoch stays nearly shuffled


def skewed_lengths(count: int, *, most: int, seed: int) -> np.ndarray:
    """Lengths as those of sentences: log-normal, half of them below a fifth of `most`, int64."""
    drawn = np.random.default_rng(seed).lognormal(np.log(most / 5), 0.8, count)
    return np.clip(drawn.round(), 2, most).astype(np.int64)


def shorten(x: np.ndarray, y: np.ndarray, lengths: Sequence[int]) -> list[tuple]:
    """Samples: the first codes and labels of each row, as many as its length."""
    return [(row[:n], labels[:n]) for row, labels, n in zip(x, y, lengths, strict=True)]


def target_length(lengths: Sequence[int], *, padding: str, multiple: int, most: int) -> int:
    """The length to which a batch is padded.

    padding: "longest" of the batch; the next "multiple"; "few", the next of `most`, its half, its
    quarter and so on; or "full", `most` itself. Raises ValueError for another, and where a sample
    is longer than `most`.
    """
    longest = max(lengths)
    if padding not in PADDINGS:
        raise ValueError(f"unknown padding {padding!r}: choose one of {', '.join(PADDINGS)}")
    if longest > most:
        raise ValueError(f"a sample of {longest} is longer than most, {most}")
    if padding == "multiple":
        return min(most, -(-longest // multiple) * multiple)
    if padding == "few":
        while most // 2 >= longest:
            most //= 2
    return longest if padding == "longest" else most


def first_fit(lengths: Sequence[int], *, most: int) -> list[list[int]]:
    """Rows of at most `most`: the numbers of the samples in each, the longest sample first."""
    rows: list[list[int]] = []
    left: list[int] = []
    for sample in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        row = next((row for row, room in enumerate(left) if lengths[sample] <= room), len(rows))
        if row == len(rows):
            rows.append([])
            left.append(most)
        rows[row].append(sample)
        left[row] -= lengths[sample]
    return rows


def batches(
    lengths: Sequence[int], *, batch_size: int, seed: int, by_length: bool = False
) -> list[np.ndarray]:
    """The samples of an epoch's batches, shuffled; the last batch may be smaller.

    by_length: a window of batches at a time is sorted by length before it is cut, and the batches
    are shuffled: alike samples are together, and each epoch brings others together.
    """
    random = np.random.default_rng(seed)
    order, lengths = random.permutation(len(lengths)), np.asarray(lengths)
    if by_length:
        size = WINDOW * batch_size
        windows = [order[at : at + size] for at in range(0, len(order), size)]
        order = np.concatenate([w[np.argsort(lengths[w], kind="stable")] for w in windows])
    cut = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
    if by_length:
        random.shuffle(places := np.arange(len(cut)))
        cut = [cut[place] for place in places]
    return cut
