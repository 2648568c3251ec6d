"""How fast input pipelines are: an epoch of a loader, and the work on its samples by itself.

Twin: `tf_impl/kit/input_rates.py`.
Where the frameworks differ: the work is a loop in Python here, and one within a graph there.

Each `..._limit` returns `measure() -> samples/s`: the work on samples in this process, with nothing
around it, on every `parts`-th of them. As the limit of a pipeline call it in one single-threaded
process a core, at the same time, each with its own `part`, and add up what they return.
"""

import io
import time
from collections.abc import Callable, Iterable

import numpy as np
import torch

from pt_impl.kit.photos import crop_photo, decode_photo, load_photo, normalise_into
from pt_impl.kit.small_images import shift, standardise
from shared.epochs import MEAN, STD, Epochs, ImageForm, draw, open_arrays
from shared.images import open_folder
from shared.shards import MappedImages, open_shards, read_tar

SIZE = 224


def second_epoch(loader: Iterable) -> float:
    """Return samples/s of a loader's second epoch, when its workers are there."""
    for _ in range(2):
        start = time.perf_counter()
        rate = sum(len(y) for _, y in loader) / (time.perf_counter() - start)
    return rate


def folder_limit(
    source, *, seed: int, part: int = 0, parts: int = 1, decoder: str = "standard"
) -> Callable[[], float]:
    """Files that are read, decoded, cropped, flipped and normalised, into the same memory."""
    paths, _, epochs = open_folder(source, 1, seed, decoder)
    samples = [(paths[row.item()], numbers[0].tolist()) for row, numbers in epochs][part::parts]
    return _rate(lambda: (load_photo(path, numbers, SIZE, decoder) for path, numbers in samples))


def shards_limit(source, *, seed: int, part: int = 0, parts: int = 1) -> Callable[[], float]:
    """As `folder_limit`, on every `parts`-th tar, and on one where there are fewer."""
    opened = open_shards(source, "tar")
    shards = opened.shards[part % len(opened.shards) :: parts]
    numbers = draw(opened.size, seed=seed, epoch=0)
    return _rate(
        lambda: (
            decode_photo(io.BytesIO(data), numbers[row].tolist(), SIZE)
            for shard in shards
            for row, _, data in read_tar(shard.files[0])
        )
    )


def mapped_arrays_limit(source, *, seed: int, part: int = 0, parts: int = 1) -> Callable[[], float]:
    """Samples that are cropped, resized, flipped and normalised, into the same memory."""
    images = MappedImages(open_shards(source, "arrays"))
    samples = [
        (rows[0], numbers[0])
        for rows, numbers in Epochs(images.size, batch_size=1, seed=seed).batches(0)
        if images.has(rows)[0]
    ][part::parts]
    return _rate(
        lambda: (crop_photo(images.image(row)[0], numbers, SIZE) for row, numbers in samples)
    )


def in_memory_limit(
    source, *, seed: int, part: int = 0, parts: int = 1, batch_size: int = 128, cached: bool = False
) -> Callable[[], float]:
    """Every `parts`-th batch, and one where there are fewer; `cached`: they are standardised."""
    x, _, epochs = open_arrays(source, batch_size, seed)
    x = torch.from_numpy(x.transpose(0, 3, 1, 2).copy())
    x, prepare = (standardise(x), lambda x: x) if cached else (x, standardise)
    batches = list(epochs)
    batches = batches[part % len(batches) :: parts]

    def measure() -> float:
        start = time.perf_counter()
        for rows, places in batches:
            shift(prepare(x[torch.from_numpy(rows)]), torch.from_numpy(places))
        return sum(len(rows) for rows, _ in batches) / (time.perf_counter() - start)

    return measure


def _rate(photos: Callable[[], Iterable[np.ndarray]]) -> Callable[[], float]:
    """Normalise the photos, too."""
    form, out = ImageForm(SIZE, MEAN, STD), np.zeros((SIZE, 3 * SIZE), np.float32)

    def measure() -> float:
        start, seen = time.perf_counter(), 0
        for pixels in photos():
            normalise_into(out, pixels, form)
            seen += 1
        return seen / (time.perf_counter() - start)

    return measure
