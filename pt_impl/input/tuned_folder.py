"""Tuned input pipeline: batches from a folder of JPEG files, close to the limit of decoding.

    for x, y in tuned_loader("photos", batch_size=32, seed=0):
        loss = step(x, y)  # x is valid until the next batch but one is asked for

What it changes: how samples get to the training loop. `tuned_loader` decodes in processes that
write normalised images directly into a ring of shared batches, and send only the number of a slot.
`threads_loader` decodes in threads. Batches, files and crops are those of `folder.py`.

Its twin: `tf_impl/input/tuned_folder.py`.

Where the frameworks differ and why:
- PyTorch: a DataLoader sends every batch to the training process, in new shared memory whose pages
  the kernel clears first. The ring is made once, and its batches are reused: x is valid until the
  next batch but one.
- TensorFlow: tf.data's threads share the memory of the process, so the caller may keep a batch. It
  fuses a map with the batch that follows, so that each call copies its image while the cache still
  has it.
- Python threads take turns except while decoding or resizing. In TensorFlow no Python runs for a
  sample, so only PyTorch has `threads_loader`.
- Only TensorFlow has `service_loader`: PyTorch's workers run on the machine that trains.

When it helps and when it hurts: it helps if samples are large and quickly made, such as photos. The
ring needs memory for workers * 2 + 2 batches. Threads need less and start at once.

Run it alone: `python -m pt_impl.input.tuned_folder` prints samples/s of both.

Copy with it: `pt_impl/kit/photos.py`, `shared/epochs.py`, `shared/images.py`.
"""

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pt_impl.kit.photos import PhotoLoader, cores, load_photo, normalise_into
from shared.epochs import MEAN, STD, Epochs, ImageForm
from shared.images import open_folder

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

    **A batch is valid until the next but one is asked for**, when its slot is written again. Copy
    what you keep: `x.clone()`. Workers and ring stay until the loader is deleted. The ring takes
    (workers * 2 + 2) * batch_size images of /dev/shm, 602 kB each at 224 pixels; containers often
    make it small.

    Args:
        source: a folder with a sub-folder of JPEG files for each class.
        decoder: "standard" (Pillow) or "fast" (torchvision).
        on_error: "raise" ends at a file that can't be read; "skip" makes its batch smaller and adds
            a line to the loader's list `skipped`.
        start_batch: batches seen before, over all epochs; the first iteration yields exactly what
            is left of its epoch. A batch of which nothing can be read is not yielded, but counts.
        image_size, mean, std: of the images, as `ImageForm` has them.

    Returns:
        What yields (x, y), on the GPU where there is one: float32 (n, 3, image_size, image_size),
        channels last in memory, and int64.

    Raises:
        ValueError: settings that don't exist, or a folder without images; while it iterates, a file
            that can't be read, with its name and the reason.
        RuntimeError: while it iterates, where something still refers to a batch whose slot is due,
            or a worker has died.
    """
    form = ImageForm(image_size, mean, std)
    paths, labels, epochs = open_folder(source, batch_size, seed, decoder, on_error, start_batch)
    photos, workers = _Photos(paths, labels, decoder, form), workers or cores()
    # PREFETCH batches a worker are on their way. One is the consumer's, and one its last, to which
    # its loop still refers while it asks for the next.
    slots = workers * PREFETCH + 2
    # The copy into shared memory touches every page of it, once.
    ring = torch.zeros(slots, batch_size, image_size, 3 * image_size).share_memory_()
    turns = _Turns(epochs, slots)
    processes = DataLoader(
        _Writer(ring, photos),
        batch_sampler=turns,
        collate_fn=tuple,  # as it is
        num_workers=workers,
        prefetch_factor=PREFETCH,
        persistent_workers=True,
    )
    return PhotoLoader(_Lent(ring, turns, processes), on_error)


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
    photos = _Photos(paths, labels, decoder, form)
    return PhotoLoader(_InThreads(epochs, photos, workers or cores()), on_error)


class _Photos:
    """The files, and the work on each."""

    def __init__(self, paths: list[str], labels: np.ndarray, decoder: str, form: ImageForm) -> None:
        self.paths, self.labels = paths, labels.tolist()
        self.decoder, self.form = decoder, form

    def write(self, out: np.ndarray, row: int, numbers: list[float]) -> str:
        """Write an image's rows, float32 (size, 3 * size), or return why it can't be read."""
        try:
            pixels = load_photo(self.paths[row], numbers, self.form.size, self.decoder)
        except ValueError as error:
            return str(error)
        normalise_into(out, pixels, self.form)
        return ""


class _Writer(Dataset):
    """The work that fills a slot of the ring. Workers have the same memory."""

    def __init__(self, ring: Tensor, photos: _Photos) -> None:
        self.ring, self.photos = ring, photos

    def __getitems__(self, ticket: tuple) -> tuple[int, list[int], list[str]]:
        """Fill a slot in a worker; return it, the labels of what it holds, and what failed."""
        slot, rows, numbers = ticket
        out, labels, failures = self.ring[slot].numpy(), [], []
        for row, drawn in zip(rows.tolist(), numbers.tolist(), strict=True):
            if failure := self.photos.write(out[len(labels)], row, drawn):
                failures.append(failure)
            else:
                labels.append(self.photos.labels[row])
        return slot, labels, failures


class _Turns:
    """Gives batches their slots in turn, epoch after epoch, but none that is still referred to."""

    def __init__(self, epochs: Epochs, slots: int) -> None:
        self.epochs, self.slots = epochs, slots
        self.lent: dict[int, weakref.ref] = {}  # by slot: the batch that is, or was, in it
        self.last = -1

    def __iter__(self) -> Iterator[tuple]:
        # After the last slot that was given out, whatever was under way when an epoch was left.
        for step, (rows, numbers) in enumerate(self.epochs, self.last + 1):
            slot = step % self.slots
            if slot in self.lent and self.lent[slot]() is not None:
                raise RuntimeError(
                    "a batch of tuned_loader is still in use two batches later, when its memory is "
                    "due: copy what you keep (x.clone())"
                )
            yield slot, rows, numbers


class _Lent:
    """The batches in the slots that the processes have filled."""

    def __init__(self, ring: Tensor, turns: _Turns, processes: DataLoader) -> None:
        self.ring, self.turns, self.processes = ring, turns, processes

    def __iter__(self) -> Iterator[tuple[Tensor, list[int], list[str]]]:
        for slot, labels, failures in self.processes:
            yield self._lend(slot, self.ring[slot, : len(labels)].numpy()), labels, failures

    def _lend(self, slot: int, batch: np.ndarray) -> Tensor:
        # Whatever is made of it without a copy keeps `batch` alive.
        self.turns.last, self.turns.lent[slot] = slot, weakref.ref(batch)
        return _images(batch)


class _InThreads:
    """The batches of an epoch, decoded in threads some batches ahead."""

    def __init__(self, epochs: Epochs, photos: _Photos, workers: int) -> None:
        self.epochs, self.photos, self.workers = epochs, photos, workers

    def __iter__(self) -> Iterator[tuple[Tensor, list[int], list[str]]]:
        pool, coming = ThreadPoolExecutor(self.workers), deque()
        size = self.photos.form.size
        try:
            for rows, numbers in self.epochs:
                x = np.empty((len(rows), size, 3 * size), np.float32)
                work = zip(x, rows.tolist(), numbers.tolist(), strict=True)
                coming.append((x, rows, [pool.submit(self.photos.write, *each) for each in work]))
                if len(coming) > PREFETCH:
                    yield self._finished(*coming.popleft())
            while coming:
                yield self._finished(*coming.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    def _finished(self, x: np.ndarray, rows: np.ndarray, futures: list) -> tuple:
        """Wait for a batch; take out what could not be read."""
        failures = [future.result() for future in futures]
        if any(failures):
            good = [not failure for failure in failures]
            x, rows = x[good], rows[good]
        labels = [self.photos.labels[row] for row in rows.tolist()]
        return _images(x), labels, [*filter(None, failures)]


def _images(x: np.ndarray) -> Tensor:
    """Rows of pixels (n, size, 3 * size) as images (n, 3, size, size), without a copy."""
    images = torch.from_numpy(x)
    return images.view(len(x), x.shape[1], x.shape[1], 3).permute(0, 3, 1, 2)


def main() -> None:
    """Print each loader's rate in its second epoch, on 512 photos of 256 pixels."""
    import tempfile

    from pt_impl.kit import input_rates
    from shared.photos import make_photos

    with tempfile.TemporaryDirectory() as name:
        folder = make_photos(f"{name}/photos", images=512, size=256, seed=0)
        for make in (tuned_loader, threads_loader):
            loader = make(folder, batch_size=32, seed=0)
            print(f"{make.__name__}: {input_rates.second_epoch(loader):.0f} samples/s")


if __name__ == "__main__":
    main()
