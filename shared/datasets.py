"""Data sets as NumPy arrays, made offline and seeded, and the order in which batches visit them.

`materialise` writes a data set once; `load` maps the files read-only, so that both frameworks
read the same bytes. Nothing is downloaded.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shared.specs import DatasetSpec

# Printable ASCII, newline and one code for every other character: 98 codes with the tab.
ALPHABET = "\n\t" + "".join(chr(code) for code in range(32, 127))
SPLITS = ("train", "test")


def materialise(spec: DatasetSpec, folder: Path) -> Path:
    """Write the splits of `spec` below `folder` unless they are there, and return their folder.

    The name of the folder holds every field of the spec, so that another spec never reuses it.
    A folder appears only when it is complete.
    """
    target = folder / f"{spec.name}-{spec.train_size}-{spec.test_size}-{spec.seed}"
    if target.is_dir():
        return target
    make = {"digits": _make_digits, "text": _make_text}[spec.kind]
    partial = folder / f".{target.name}.partial"
    partial.mkdir(parents=True, exist_ok=True)
    for split, (x, y) in make(spec).items():
        np.save(partial / f"{split}_x.npy", x)
        np.save(partial / f"{split}_y.npy", y)
    partial.rename(target)
    return target


def load(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Map x and y of `split` ("train" or "test") read-only. Never executes code (no pickle)."""
    return tuple(
        np.load(folder / f"{split}_{part}.npy", mmap_mode="r", allow_pickle=False)
        for part in ("x", "y")
    )


def batch_order(size: int, batch_size: int, *, seed: int, epoch: int) -> Iterator[np.ndarray]:
    """Indices of each batch of one epoch, shuffled by (seed, epoch); a ragged last batch is dropped."""
    order = np.random.default_rng([seed, epoch]).permutation(size)
    for start in range(0, size - batch_size + 1, batch_size):
        yield order[start : start + batch_size]


def first_batches(
    x: np.ndarray, y: np.ndarray, batch_size: int, count: int, *, seed: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The first `count` batches of the shared stream, over as many epochs as that takes."""
    found: list[tuple[np.ndarray, np.ndarray]] = []
    epoch = 0
    while len(found) < count:
        for rows in batch_order(len(x), batch_size, seed=seed, epoch=epoch):
            found.append((np.asarray(x[rows]), np.asarray(y[rows])))
            if len(found) == count:
                break
        epoch += 1
    return found


# Digits -------------------------------------------------------------------------------------


def _make_digits(spec: DatasetSpec) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Render scikit-learn's 1,797 real digits on a cluttered canvas.

    Two thirds of the originals make the training split, each rendered several times; the others
    are rendered once each for the test split, so that no two test images share an original.
    """
    from sklearn.datasets import load_digits

    originals, labels = load_digits(return_X_y=True)
    originals = (originals.reshape(-1, 8, 8) / 16.0).astype(np.float32)
    random = np.random.default_rng(spec.seed)
    order = random.permutation(len(originals))
    test, train = order[: spec.test_size], order[spec.test_size :]
    chosen = {"train": np.resize(random.permutation(train), spec.train_size), "test": test}
    splits = {}
    for split in SPLITS:
        rows = chosen[split]
        images = np.stack([_render(originals, train, row, spec, random) for row in rows])
        splits[split] = (images[..., None], labels[rows].astype(np.int64))
    mean, std = splits["train"][0].mean(), splits["train"][0].std()
    return {split: ((x - mean) / std, y) for split, (x, y) in splits.items()}


def _render(
    originals: np.ndarray,
    clutter: np.ndarray,
    row: int,
    spec: DatasetSpec,
    random: np.random.Generator,
) -> np.ndarray:
    """One canvas: a digit doubled in size at a random place, pieces of other digits, and noise."""
    size = spec.image_size
    canvas = np.zeros((size, size), np.float32)
    for other in random.choice(clutter, 4):
        piece = originals[other][:4, :4] * 0.7
        top, left = random.integers(0, size - 4, 2)
        canvas[top : top + 4, left : left + 4] = piece
    digit = originals[row].repeat(2, 0).repeat(2, 1)
    top, left = random.integers(2, size - 18, 2)
    region = canvas[top : top + 16, left : left + 16]
    np.maximum(region, digit, out=region)
    return np.clip(canvas + random.normal(0, 0.15, canvas.shape), 0, 1).astype(np.float32)


# Text ---------------------------------------------------------------------------------------


def _make_text(spec: DatasetSpec) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Cut windows of characters from the source of Python's standard library.

    Every fifth module belongs to the test split, so that no window of one split overlaps the other.
    """
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random = np.random.default_rng(spec.seed)
    splits = {}
    for split, size in (("train", spec.train_size), ("test", spec.test_size)):
        own = [s for i, s in enumerate(sources) if (i % 5 == 0) == (split == "test")]
        codes = encode("\n".join(source.read_text("utf-8") for source in own))
        starts = random.integers(0, len(codes) - spec.sequence_length - 1, size)
        windows = codes[starts[:, None] + np.arange(spec.sequence_length + 1)]
        splits[split] = (windows[:, :-1].copy(), windows[:, 1:].copy())
    return splits


def encode(text: str) -> np.ndarray:
    """Character codes, int64: the place in ALPHABET, or `len(ALPHABET)` for any other character."""
    table = {character: code for code, character in enumerate(ALPHABET)}
    return np.array([table.get(character, len(ALPHABET)) for character in text], np.int64)
