"""Data checks: find NaN, invalid labels, imbalance and leaks before they cost a run.

    print(check_data(train_set, num_classes=10, low=0.0, high=1.0))
    print(check_splits(train_set, test_set))

What it changes: nothing. A model trains on faulty data without an error. Each check reads its data
once and returns a report of a few lines, or raises it (`strict`). `check_data` finds NaN and
infinity, values outside a range, labels that are not a class, and imbalanced classes.
`check_splits` finds samples that are in two splits, by a hash of every byte.

Its twin: `pt_impl/recipes/data_checks.py`, which says where the frameworks differ.

When it helps and when it hurts: use it before the first training on new data. It reads all data,
and `check_splits` keeps 16 bytes per sample. It finds certain faults (NaN, invalid labels) and what
exceeds your limits (range, balance). It can't find near duplicates or wrong labels.

Run it alone: `python -m tf_impl.recipes.data_checks` checks the digits, without and with planted
faults.

Copy with it: `shared/data_checks.py`, `shared/findings.py`, `tf_impl/kit/values.py`.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from shared.data_checks import Tally, check_batch, check_seen, compare_splits, look_at_balance
from shared.findings import Report, is_one, many
from tf_impl.kit.values import named_batches, values_of


def check_data(
    data: Iterable,
    *,
    num_classes: int = 0,
    low: float = -math.inf,
    high: float = math.inf,
    imbalance: float = 10.0,
    ignore_label: int = -100,
    strict: bool = False,
) -> Report:
    """Look at all batches of `data` once.

    Args:
        data: a `tf.data.Dataset` of batches, a `keras.utils.PyDataset`, or batches: (x, y),
            (x, y, sample_weight) or x, each a tensor, an array, or a dict, tuple or list of them.
            What is neither a pair nor three, such as a dict, is only x.
        num_classes: integer labels are 0 to num_classes - 1; 0: only negative ones are faults.
        low, high: the range of the values of x.
        imbalance: how many times as many samples as the rarest class the most frequent one may
            have; counted where a sample has one label.
        ignore_label: a label that is no class on purpose.
        strict: raise what is found.

    Raises:
        ValueError: no batch, batches without labels where `num_classes` is given, parts of
            different lengths; with `strict`, the report.
    """
    tally, classes, batches, samples = Tally(), {}, 0, 0
    for batch in named_batches(data):
        samples += check_batch(batch, num_classes)
        for name, leaf in batch:
            values = values_of(leaf)
            if values is None or not values.size:  # text, or no sample
                continue
            tally.place = name, batches
            limits = (low, high) if name.startswith("x") else (-math.inf, math.inf)
            _look_at_values(tally, np.atleast_1d(values), *limits)
            if name.startswith("y") and values.ndim:
                counts = _look_at_labels(tally, values, num_classes, ignore_label)
                classes.setdefault(name, Counter()).update(counts)
        batches += 1
    check_seen(samples)
    report = Report(f"{many(batches, 'batch')}, {many(samples, 'sample')}")
    tally.write(report)
    for name, counts in classes.items():
        look_at_balance(report, name, counts, num_classes, imbalance)
    if strict:
        report.raise_if_found()
    return report


def check_splits(first: Iterable, second: Iterable, *, strict: bool = False) -> Report:
    """Look for samples whose x is in both, the same in every byte; `data` as in `check_data`."""
    report = compare_splits(_digests(first), _digests(second))
    if strict:
        report.raise_if_found()
    return report


def _look_at_values(tally: Tally, values: np.ndarray, low: float, high: float) -> None:
    if values.dtype == bool:
        return
    least, most = float(values.min()), float(values.max())  # NaN where one is
    if low <= least and most <= high and math.isfinite(least) and math.isfinite(most):
        return
    tally.add("nan", np.isnan(values))
    tally.add("infinity", np.isinf(values))
    outside = np.isfinite(values) & ((values < low) | (values > high))
    if outside.any():
        finite = values[np.isfinite(values)]
        what = f": from {finite.min():.4g} to {finite.max():.4g}, not within {low:g} to {high:g}"
        tally.add("range", outside, what)


def _look_at_labels(
    tally: Tally, values: np.ndarray, num_classes: int, ignore: int
) -> dict[int, int]:
    """Add what is no label; return samples by class, where each has one label."""
    one_each = values.ndim == 1 or (values.ndim == 2 and values.shape[1] == 1)
    if values.dtype == bool:
        return {}
    if not np.issubdtype(values.dtype, np.integer):
        if num_classes < 2 or values.ndim != 2 or values.shape[1] != num_classes:
            return {}
        apart = (np.abs(values.sum(1) - 1) > 1e-3) | (values < 0).any(1)
        tally.add("label", apart, ": they are not distributions over the classes")
        values, one_each = values[~apart].argmax(1), True
    bad = values < 0
    if num_classes:
        bad |= values >= num_classes
    bad &= values != ignore
    if bad.any():
        some = ", ".join(str(each) for each in np.unique(values[bad])[:5].tolist())
        valid = f"0 to {num_classes - 1}" if num_classes else "0 or more"
        tally.add("label", bad, f": {some}, not {valid}")
    if not one_each:
        return {}
    labels, counts = np.unique(values[~bad & (values != ignore)], return_counts=True)
    return dict(zip(labels.tolist(), counts.tolist(), strict=True))


def _digests(data: Iterable) -> Iterator[bytes]:
    """A hash of each sample's x, with its names, dtypes and shapes."""
    for batch in named_batches(data):
        rows = []
        for name, leaf in batch:
            if not name.startswith("x") or is_one(leaf):
                continue
            values = values_of(leaf)
            if values is None:
                rows.append([f"{name} {text!r}".encode() for text in np.asarray(leaf).tolist()])
                continue
            head = f"{name} {values.dtype} {values.shape[1:]} ".encode()
            rows.append([head + row.tobytes() for row in values])
        for parts in zip(*rows, strict=True):
            yield hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def main() -> None:
    """Print reports of the digits, and of some with faults."""
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    x, y = (np.array(part) for part in demo.train)
    print(check_data([(x, y)], num_classes=10, low=-10, high=10))
    print(check_splits([demo.train], [demo.test]))
    x[7, 3, 3, 0], y[5] = math.nan, 10
    print(check_data([(x, y)], num_classes=10, low=-10, high=10))
    print(check_splits([demo.train], [(x[20:23], y[20:23])]))


if __name__ == "__main__":
    main()
