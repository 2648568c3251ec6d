"""Tuned input pipeline: a folder of JPEG files as batches, close to the limit of the work itself.

What it changes: what stands between the work on a sample and the training loop. `tuned_loader`
decodes in processes that write normalised images straight into a ring of batches which all
processes share; what comes back is the number of a slot. `threads_loader` decodes in threads. Both
give the batches of `folder.py`, from the same files with the same crops.

Its twin: `tf_impl/input/tuned_folder.py`.

Where the frameworks differ and why:
- A DataLoader moves every batch between processes, in newly made shared memory whose pages the
  kernel has to clear first. The ring is made and touched once. tf.data needs none: its threads
  share the memory of the process, their tensors are the caller's, and what decides there is the
  number of calls in flight.
- Threads in Python take turns for what is not decoding or resizing. In TensorFlow no Python runs
  for a sample, so `threads_loader` has no twin.

When it helps and when it hurts: it helps where samples are large and their work is short, such as
photos. The ring takes memory for workers * 2 + 2 batches. Threads take less and start at once.

Run it alone: `python -m pt_impl.input.tuned_folder` prints samples/s of both.

Copy with it: `shared/epochs.py`, `shared/images.py`.
"""

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.io import decode_jpeg
from torchvision.transforms.v2 import functional as F

from shared.epochs import MEAN, STD, Epochs, ImageForm, crop_box
from shared.images import open_folder, refuse_huge_jpeg

UNREADABLE = (OSError, RuntimeError, SyntaxError, ValueError, Image.DecompressionBombError)
PREFETCH = 2  # batches ahead; for each worker, where there are processes


def tuned_loader(
    source,
    *,
    batch_size: int,
    seed: int,
    workers: int = 0,
    decoder: str = "standard",
    on_error: str = "raise",
    start_batch: int = 0,
    image_size: int = 224,
    mean: tuple = MEAN,
    std: tuple = STD,
) -> Iterable:
    """Decode in `workers` processes, 0 for one a core, into a ring of shared batches.

    source: a folder with a sub-folder of JPEG files for each class. decoder: "standard" (Pillow) or
    "fast" (torchvision). on_error: "raise" ends at a file that can't be read; "skip" makes its
    batch smaller and adds a line to the loader's list `skipped`. start_batch: batches seen before,
    over all epochs; the first iteration yields exactly what is left of its epoch. A batch of which
    nothing can be read is not yielded, but counts. image_size, mean, std: of the images, as
    `ImageForm` has them. Yields (x, y) on the GPU if there is one: float32 (n, 3, image_size,
    image_size), channels last in memory, and int64.

    **A batch is valid until the next but one is asked for**, when its slot is written again. Copy
    what you keep: `x.clone()`. Workers and ring stay until the loader is deleted. The ring takes
    (workers * 2 + 2) * batch_size images of /dev/shm, 602 kB each at 224 pixels; containers often
    make it small.

    Raises ValueError for settings that don't exist and a folder without images; while it iterates,
    ValueError for a file that can't be read, with its name and the reason, and RuntimeError where
    something still refers to a batch whose slot is due, or a worker has died.
    """
    form = ImageForm(image_size, mean, std)
    paths, labels, epochs = open_folder(source, batch_size, seed, decoder, on_error, start_batch)
    workers = workers or _cores()
    # PREFETCH batches a worker are on their way. One is the consumer's, and one its last, to which
    # its loop still refers while it asks for the next.
    slots = workers * PREFETCH + 2
    # The copy into shared memory touches every page of it, once.
    ring = torch.zeros(slots, batch_size, image_size, 3 * image_size).share_memory_()
    turns = _Turns(epochs, slots)
    processes = DataLoader(
        _Writer(ring, paths, decoder, form),
        batch_sampler=turns,
        collate_fn=tuple,  # as it is
        num_workers=workers,
        prefetch_factor=PREFETCH,
        persistent_workers=True,
    )

    def batches() -> Iterator:
        for slot, rows, failures in processes:
            yield turns.lend(slot, ring[slot, : len(rows)].numpy()), rows, failures

    return _Loader(batches, labels, on_error)


def threads_loader(
    source,
    *,
    batch_size: int,
    seed: int,
    workers: int = 0,
    decoder: str = "standard",
    on_error: str = "raise",
    start_batch: int = 0,
    image_size: int = 224,
    mean: tuple = MEAN,
    std: tuple = STD,
) -> Iterable:
    """Decode in `workers` threads, 0 for one a core, into new batches: nothing leaves the process.

    Pillow and torchvision let go of the interpreter's lock while they decode and resize. All else
    is as for `tuned_loader`, but the batches are the caller's to keep.
    """
    form = ImageForm(image_size, mean, std)
    paths, labels, epochs = open_folder(source, batch_size, seed, decoder, on_error, start_batch)

    def batches() -> Iterator:
        pool, coming = ThreadPoolExecutor(workers or _cores()), deque()
        try:
            for rows, numbers in epochs:
                x = np.empty((len(rows), image_size, 3 * image_size), np.float32)
                futures = [
                    pool.submit(_write, out, paths[row], drawn, decoder, form)
                    for out, row, drawn in zip(x, rows, numbers.tolist(), strict=True)
                ]
                coming.append((x, rows, futures))
                if len(coming) > PREFETCH:
                    yield _finished(*coming.popleft())
            while coming:
                yield _finished(*coming.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    return _Loader(batches, labels, on_error)


def _finished(x: np.ndarray, rows: np.ndarray, futures: list) -> tuple:
    """Wait for a batch; take out what could not be read."""
    failures = [future.result() for future in futures]
    if any(failures):
        good = [failure is None for failure in failures]
        x, rows = x[good], rows[good]
    return _images(x), rows.tolist(), [*filter(None, failures)]


def _images(x: np.ndarray) -> Tensor:
    """Rows of pixels (n, size, 3 * size) as images (n, 3, size, size), without a copy."""
    images = torch.from_numpy(x)
    return images.view(len(x), x.shape[1], x.shape[1], 3).permute(0, 3, 1, 2)


class _Writer(Dataset):
    """The work that fills a slot of the ring. Workers have the same memory."""

    def __init__(self, ring: Tensor, paths: list[str], decoder: str, form: ImageForm) -> None:
        self.ring, self.paths, self.decoder, self.form = ring, paths, decoder, form

    def __getitems__(self, ticket: tuple) -> tuple[int, list[int], list[str]]:
        """Fill a slot in a worker; return it, the rows that it holds, and what failed."""
        slot, rows, numbers = ticket
        out, good, failures = self.ring[slot].numpy(), [], []
        for row, drawn in zip(rows.tolist(), numbers.tolist(), strict=True):
            failure = _write(out[len(good)], self.paths[row], drawn, self.decoder, self.form)
            if failure:
                failures.append(failure)
            else:
                good.append(row)
        return slot, good, failures


class _Turns:
    """Gives batches their slots in turn, epoch after epoch, but none that is still referred to."""

    def __init__(self, epochs: Epochs, slots: int) -> None:
        self._epochs, self._slots = epochs, slots
        self._lent: dict[int, weakref.ref] = {}  # by slot: the batch that is, or was, in it
        self._last = -1

    def __iter__(self) -> Iterator[tuple]:
        # After the last slot that was given out, whatever was under way when an epoch was left.
        for step, (rows, numbers) in enumerate(self._epochs, self._last + 1):
            slot = step % self._slots
            if slot in self._lent and self._lent[slot]() is not None:
                raise RuntimeError(
                    "a batch of tuned_loader is still in use two batches later, when its memory is "
                    "due: copy what you keep (x.clone())"
                )
            yield slot, rows, numbers

    def lend(self, slot: int, batch: np.ndarray) -> Tensor:
        """The batch in a slot; whatever is made of it without a copy keeps `batch` alive."""
        self._last, self._lent[slot] = slot, weakref.ref(batch)
        return _images(batch)


class _Loader:
    """An iteration is an epoch; `skipped` says which files could not be read, and why."""

    def __init__(self, batches: Callable, labels: np.ndarray, on_error: str) -> None:
        self.skipped: list[str] = []
        self._batches, self._labels = batches, torch.from_numpy(labels)
        self._raises = on_error == "raise"

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        device = _device()
        for x, rows, failures in self._batches():
            if failures and self._raises:
                raise ValueError(failures[0])
            self.skipped += failures
            if rows:
                yield x.to(device), self._labels[rows].to(device)


def _write(
    out: np.ndarray, path: str, numbers: list[float], decoder: str, form: ImageForm
) -> str | None:
    """Write an image's rows, float32 (size, 3 * size), or return why it can't be read."""
    try:
        pixels = _pixels(path, numbers, decoder, form.size)
    except UNREADABLE as error:
        reason = str(error).partition("\n")[0]
        return f"{path}: {type(error).__name__}: {reason}"
    np.multiply(pixels.reshape(out.shape), form.scale, out=out)
    np.add(out, form.offset, out=out)
    return None


def _pixels(path: str, numbers: list[float], decoder: str, size: int) -> np.ndarray:
    """Decoded, cropped, resized and flipped: uint8 (size, size, 3)."""
    if decoder == "fast":
        data = np.fromfile(path, np.uint8)
        refuse_huge_jpeg(data)
        image = decode_jpeg(torch.from_numpy(data), mode="RGB")
        height, width = image.shape[1:]
    else:
        with Image.open(path, formats=["JPEG"]) as file:
            image = file if file.mode == "RGB" else file.convert("RGB")
            image.load()
        width, height = image.size
    image = F.resized_crop(image, *crop_box(height, width, numbers), [size, size])
    image = F.horizontal_flip(image) if numbers[-1] < 0.5 else image
    return image.permute(1, 2, 0).numpy() if decoder == "fast" else np.asarray(image)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    """Print each loader's rate in its second epoch, on 512 photos of 256 pixels."""
    import tempfile

    from shared.photos import make_photos

    with tempfile.TemporaryDirectory() as name:
        folder = make_photos(f"{name}/photos", images=512, size=256, seed=0)
        for make in (tuned_loader, threads_loader):
            loader = make(folder, batch_size=32, seed=0)
            for _ in range(2):
                start = time.perf_counter()
                rate = sum(len(y) for _, y in loader) / (time.perf_counter() - start)
            print(f"{make.__name__}: {rate:.0f} samples/s")


if __name__ == "__main__":
    main()
