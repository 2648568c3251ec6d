"""Mapped input pipeline: decoded photos from arrays on disk that are mapped into memory.

What it changes: images are decoded once, when the arrays are written, and not in every epoch. Of an
image the bytes of its crop are read and no others; what has been read stays in the page cache,
once for all processes. Batches are those of `folder.py`, in its order, with its crops:
float32 images (n, 3, 224, 224) and int64 labels.
`twinbench shards FOLDER TARGET --format arrays` writes the arrays.

Its twin: `tf_impl/input/mapped_arrays.py`.

Where the frameworks differ and why:
- NumPy maps the arrays on both sides: tf.data reads files, and has no operator that maps one. What
  it calls there for a crop is Python, which takes turns with itself; here processes work apart.
- The crop is resized by Pillow here, to bytes, and there in the graph, to float32.

When it helps and when it hurts: it helps where decoding is most of the work and memory is ample:
the arrays take about ten times the space of their JPEG files, and where they don't fit the page
cache the disk decides. Any sample can be had at once, so that no shuffle buffer is needed.

Run it alone: `python -m pt_impl.input.mapped_arrays` prints samples/s beside the work on one core.

Copy with it: `shared/epochs.py`, `shared/shards.py`.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from shared.epochs import MEAN, STD, Epochs, ImageForm, crop_box
from shared.shards import MappedImages, open_shards


def memory_mapped_loader(
    source,
    *,
    batch_size: int,
    seed: int,
    workers: int = 0,
    on_error: str = "raise",
    start_batch: int = 0,
    image_size: int = 224,
    mean: tuple = MEAN,
    std: tuple = STD,
) -> Iterable:
    """`workers` processes, 0 for one a core, map the same files and cut crops from them.

    source: a folder of shards of arrays. All of them are read when this is called, for their
    checksums. on_error: "raise" raises at once where a shard is not what was written; "skip" leaves
    its samples out, which makes their batches smaller, and adds a line for each to the loader's
    list `skipped`. start_batch: batches seen before, over all epochs; the first iteration yields
    exactly what is left of its epoch. A batch of which nothing can be read is not yielded, but
    counts. image_size, mean, std: of the images, as `ImageForm` has them. Yields (x, y), on the GPU
    where there is one; the last may be smaller. Workers stay until the loader is deleted.

    Raises ValueError for settings that don't exist and for a damaged shard, with its file and the
    reason, and what `open_shards` raises.
    """
    form = ImageForm(image_size, mean, std)
    images = MappedImages(open_shards(source, "arrays", on_error))
    if images.damaged and on_error == "raise":
        raise ValueError(next(iter(images.damaged.values())))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    epochs = Epochs(images.size, batch_size=batch_size, seed=seed, start_batch=start_batch)
    batches = DataLoader(
        _Crops(images, image_size),
        batch_sampler=epochs,
        collate_fn=tuple,  # as it is
        num_workers=workers or cores,
        persistent_workers=True,
        prefetch_factor=2,
        pin_memory=torch.cuda.is_available(),
    )
    return _Loader(batches, form)


def work_rate(
    source,
    *,
    seed: int,
    part: int = 0,
    parts: int = 1,
    image_size: int = 224,
    mean: tuple = MEAN,
    std: tuple = STD,
) -> Callable[[], float]:
    """Return `measure() -> samples/s`: the work on samples in this process, with nothing around it.

    Each call crops, resizes, flips and normalises every `parts`-th sample of epoch 0 into the same
    memory. As the limit of a pipeline call it in one single-threaded process a core, at the same
    time, each with a `part` of its own, and add up what they return.
    """
    form = ImageForm(image_size, mean, std)
    images = MappedImages(open_shards(source, "arrays"))
    samples = [
        (rows[0], numbers[0])
        for rows, numbers in Epochs(images.size, batch_size=1, seed=seed).batches(0)
        if images.has(rows)[0]
    ][part::parts]
    out = np.zeros((image_size, 3 * image_size), np.float32)

    def measure() -> float:
        start = time.perf_counter()
        for row, numbers in samples:
            pixels, _ = images.image(row)
            rows = _crop(pixels, numbers, image_size).reshape(out.shape)
            np.multiply(rows, form.scale, out=out)
            np.add(out, form.offset, out=out)
        return len(samples) / (time.perf_counter() - start)

    return measure


class _Loader:
    """An iteration is an epoch; `skipped` says which samples were left out, and why."""

    def __init__(self, batches: DataLoader, form: ImageForm) -> None:
        self.skipped: list[str] = []
        self._batches, self._form = batches, form

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        device, form = _device(), self._form
        scale, offset = (torch.from_numpy(row).to(device) for row in (form.scale, form.offset))
        for x, y, failures in self._batches:
            self.skipped += failures
            if len(y):
                x = x.to(device, non_blocking=True)  # a byte a value, normalised here
                rows = torch.addcmul(offset, x.view(-1, 3 * form.size).float(), scale)
                yield rows.view(x.shape).permute(0, 3, 1, 2), y.to(device, non_blocking=True)


class _Crops(Dataset):
    """The images, and the work on each. Every worker maps the files itself."""

    def __init__(self, images: MappedImages, size: int) -> None:
        self.images, self.size = images, size

    def __getitems__(
        self, batch: tuple[np.ndarray, np.ndarray]
    ) -> tuple[Tensor, Tensor, list[str]]:
        """Images of a batch, uint8 (n, size, size, 3), labels, and what was left out."""
        rows, numbers = batch
        damaged, there = self.images.damaged, self.images.has(rows)
        failures = [f"{damaged[row]}: sample {row:09}" for row in rows.tolist() if row in damaged]
        x, labels = np.empty((there.sum(), self.size, self.size, 3), np.uint8), []
        for out, row, drawn in zip(x, rows[there].tolist(), numbers[there], strict=True):
            pixels, label = self.images.image(row)
            out[:] = _crop(pixels, drawn, self.size)
            labels.append(label)
        return torch.from_numpy(x), torch.tensor(labels, dtype=torch.int64), failures


def _crop(pixels: np.ndarray, numbers: np.ndarray, size: int) -> np.ndarray:
    """Cut from pixels, uint8 (height, width, 3), resized and flipped: uint8 (size, size, 3)."""
    top, left, high, wide = crop_box(*pixels.shape[:2], numbers.tolist())
    crop = Image.fromarray(pixels[top : top + high, left : left + wide])
    found = np.asarray(crop.resize((size, size), Image.Resampling.BILINEAR))
    return found[:, ::-1] if numbers[-1] < 0.5 else found


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    """Print its rate in its second epoch, on 512 photos of 256 pixels."""
    import tempfile

    from shared.conversion import convert
    from shared.photos import make_photos

    with tempfile.TemporaryDirectory() as name:
        folder = make_photos(f"{name}/photos", images=512, size=256, seed=0)
        convert(folder, f"{name}/arrays", form="arrays", samples=64)
        print(f"work on one core: {work_rate(f'{name}/arrays', seed=0)():.0f} samples/s")
        loader = memory_mapped_loader(f"{name}/arrays", batch_size=32, seed=0)
        for _ in range(2):
            start = time.perf_counter()
            rate = sum(len(y) for _, y in loader) / (time.perf_counter() - start)
        print(f"memory_mapped_loader: {rate:.0f} samples/s")


if __name__ == "__main__":
    main()
