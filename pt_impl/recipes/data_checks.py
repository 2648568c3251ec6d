"""Data checks: find NaN, invalid labels, imbalance and leaks before they cost a run.

    print(check_data(train_loader, num_classes=10, low=0.0, high=1.0))
    print(check_splits(train_loader, test_loader))

What it changes: nothing. A model trains on faulty data without an error. Each check reads its data
once and returns a report of a few lines, or raises it (`strict`). `check_data` finds NaN and
infinity, values outside a range, labels that are not a class, and imbalanced classes.
`check_splits` finds samples that are in two splits, by a hash of every byte.

Its twin: `tf_impl/recipes/data_checks.py`.

Where the frameworks differ and why:
- On a CPU an invalid label raises in both. On a GPU it ends PyTorch's CUDA context, and gives a NaN
  loss in TensorFlow.
- PyTorch ignores the label -100 silently.
- A batch is (x, y) in PyTorch, and in Keras (x, y) or (x, y, sample_weight).

When it helps and when it hurts: use it before the first training on new data. It reads all data,
and `check_splits` keeps 16 bytes per sample. It finds certain faults (NaN, invalid labels) and what
exceeds your limits (range, balance). It can't find near duplicates or wrong labels.

Run it alone: `python -m pt_impl.recipes.data_checks` checks the digits, without and with planted
faults.

Copy with it: `pt_impl/kit/values.py`, `shared/data_checks.py`, `shared/findings.py`.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from pt_impl.kit.values import named_batches, values_of
from shared.data_checks import Tally, check_batch, check_seen, compare_splits, look_at_balance
from shared.findings import Report, is_one, many


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
        data: a DataLoader, a Dataset of samples, or batches: (x, y) or x, each a tensor, an array,
            or a dict, tuple or list of them. What is no pair, such as (x, y, weights), is only x.
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
            if values is None or not values.numel():  # text, or no sample
                continue
            tally.place = name, batches
            limits = (low, high) if name.startswith("x") else (-math.inf, math.inf)
            _look_at_values(tally, torch.atleast_1d(values), *limits)
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


def _look_at_values(tally: Tally, values: Tensor, low: float, high: float) -> None:
    if values.dtype == torch.bool:
        return
    least, most = (edge.item() for edge in torch.aminmax(values))  # NaN where one is
    if low <= least and most <= high and math.isfinite(least) and math.isfinite(most):
        return
    if not values.is_floating_point():
        values = values.long()  # bytes would wrap what they are compared with
    for check, bad in (("nan", values.isnan()), ("infinity", values.isinf())):
        if bad.any():  # only then a mask leaves the device
            tally.add(check, bad.cpu().numpy())
    finite = values.isfinite()
    outside = finite & ((values < low) | (values > high))
    if outside.any():
        least, most = (edge.item() for edge in torch.aminmax(values[finite]))
        what = f": from {least:.4g} to {most:.4g}, not within {low:g} to {high:g}"
        tally.add("range", outside.cpu().numpy(), what)


def _look_at_labels(tally: Tally, values: Tensor, num_classes: int, ignore: int) -> dict[int, int]:
    """Add what is no label; return samples by class, where each has one label."""
    one_each = values.ndim == 1 or (values.ndim == 2 and values.shape[1] == 1)
    if values.is_floating_point():
        if num_classes < 2 or values.ndim != 2 or values.shape[1] != num_classes:
            return {}
        apart = ((values.sum(1) - 1).abs() > 1e-3) | (values < 0).any(1)
        if apart.any():
            tally.add("label", apart.cpu().numpy(), ": they are not distributions over the classes")
        values, one_each = values[~apart].argmax(1), True
    elif values.dtype == torch.bool:
        return {}
    values = values.long()  # bytes would wrap what they are compared with
    bad = values < 0
    if num_classes:
        bad |= values >= num_classes
    bad &= values != ignore
    if bad.any():
        some = ", ".join(str(each) for each in values[bad].unique()[:5].tolist())
        valid = f"0 to {num_classes - 1}" if num_classes else "0 or more"
        tally.add("label", bad.cpu().numpy(), f": {some}, not {valid}")
    if not one_each:
        return {}
    labels, counts = values[~bad & (values != ignore)].unique(return_counts=True)
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
                rows.append([f"{name} {text!r}".encode() for text in leaf])
                continue
            head = f"{name} {values.dtype} {tuple(values.shape[1:])} ".encode()
            size = math.prod(values.shape[1:])  # which reshape cannot tell of no sample
            flat = values.cpu().contiguous().reshape(len(values), size)
            rows.append([head + row.tobytes() for row in flat.view(torch.uint8).numpy()])
        for parts in zip(*rows, strict=True):
            yield hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def main() -> None:
    """Print reports of the digits, and of some with faults."""
    from pt_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    x, y = (part.clone() for part in demo.train)
    print(check_data([(x, y)], num_classes=10, low=-10, high=10))
    print(check_splits([demo.train], [demo.test]))
    x[7, 0, 3, 3], y[5] = math.nan, 10
    print(check_data([(x, y)], num_classes=10, low=-10, high=10))
    print(check_splits([demo.train], [(x[20:23], y[20:23])]))


if __name__ == "__main__":
    main()
