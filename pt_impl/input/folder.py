"""Input pipeline: a folder of JPEG files as batches, in the forms that the documentation shows.

What it changes: where images are read, decoded, cropped, flipped and normalised, and how they get
from there to the training loop. All loaders give the same batches: float32 images (n, 3, 224, 224)
less ImageNet's mean and over its deviation, and int64 labels. Order and crops follow from the seed
and the epoch (`shared/epochs.py`); each iteration is the next epoch. `work_rate` says how fast a
core does the work itself. `tuned_folder.py` comes close to that.

Its twin: `tf_impl/input/folder.py`.

Where the frameworks differ and why:
- Decoding from Python holds the interpreter's lock now and then, so a DataLoader works in
  processes, and what it costs is to move images from them. tf.data works in threads, not in Python.
- A DataLoader's default is no worker: the training loop waits for every image. tf.data makes the
  plainest map parallel by itself, and fuses it with the batch.
- Decoders here: Pillow ("standard"), or torchvision's with its resize of uint8 tensors ("fast";
  deprecated since 0.29 for TorchCodec's, which has the same name). There: the whole image
  ("standard"), or only what the crop needs of it ("fast"). All are libjpeg-turbo with its accurate
  transform, and all resize with a filter against aliasing.
- CMYK files are taken as inverted here, as Adobe's programs write them; there only those that
  have its marker.
- Pixels are rounded to uint8 after the resize here. There they stay float32, but in `uint8_loader`.
- A file that can't be read is met in the worker here, which goes on. A graph can't catch an error,
  so there it is looked for afterwards.

When it helps and when it hurts: workers pay where a sample costs more than its way from process to
process, which small arrays in memory don't. Each worker is a process of its own with Python and
torch in it. Where the cores are busy training, a pipeline takes its share of them.

Run it alone: `python -m pt_impl.input.folder` prints samples/s of each loader beside the limit.

Copy with it: `shared/epochs.py`, `shared/images.py`.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.io import decode_jpeg
from torchvision.transforms.v2 import functional as F

from shared.epochs import MEAN, STD, ImageForm, crop_box
from shared.images import open_folder, refuse_huge_jpeg

UNREADABLE = (OSError, RuntimeError, SyntaxError, ValueError, Image.DecompressionBombError)


def naive_loader(
    source,
    *,
    batch_size: int,
    seed: int,
    decoder: str = "standard",
    on_error: str = "raise",
    start_batch: int = 0,
    image_size: int = 224,
    mean: tuple = MEAN,
    std: tuple = STD,
) -> Iterable:
    """The tutorial's form: a DataLoader with its defaults, which does all work in this process.

    source: a folder with a sub-folder of JPEG files for each class. decoder: "standard" or "fast".
    on_error: "raise" ends at a file that can't be read; "skip" makes its batch smaller and adds a
    line to the loader's list `skipped`. start_batch: batches seen before, over all epochs; the
    first iteration yields exactly what is left of its epoch. A batch of which nothing can be read
    is not yielded, but counts. image_size, mean, std: of the images, as `ImageForm` has them.
    Yields (x, y), on the GPU where there is one; the last may be smaller.

    Raises ValueError for settings that don't exist and for a folder without images; while it
    iterates, for a file that can't be read, with its name and the reason. What libjpeg mends in
    silence, such as flipped bits within an image, goes unnoticed.
    """
    form = ImageForm(image_size, mean, std)
    paths, labels, epochs = open_folder(source, batch_size, seed, decoder, on_error, start_batch)
    samples = _Samples(paths, decoder, form, _to_tensor)
    batches = DataLoader(samples, batch_sampler=epochs, collate_fn=_collate)
    return _Loader(batches, labels, on_error)


def parallel_loader(
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
    """The same work in `workers` processes, 0 for one a core, which stay for all epochs.

    They end when the loader is deleted. Batches come back through shared memory, a new piece for
    each. Settings and errors are those of `naive_loader`.
    """
    form = ImageForm(image_size, mean, std)
    paths, labels, epochs = open_folder(source, batch_size, seed, decoder, on_error, start_batch)
    samples = _Samples(paths, decoder, form, _to_tensor)
    batches = _in_processes(samples, epochs, workers)
    return _Loader(batches, labels, on_error)


def uint8_loader(
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
    """`parallel_loader` whose workers hand over a byte a value; the batch is normalised here.

    A quarter of the bytes goes from process to process, and to a GPU, which then normalises. Images
    are channels last in memory.
    """
    form = ImageForm(image_size, mean, std)
    paths, labels, epochs = open_folder(source, batch_size, seed, decoder, on_error, start_batch)
    samples = _Samples(paths, decoder, form, _to_bytes)
    batches = _in_processes(samples, epochs, workers)
    scale, offset = (torch.from_numpy(row).to(_device()) for row in (form.scale, form.offset))

    def normalise(x: Tensor) -> Tensor:
        rows = x.view(-1, 3 * image_size).float()
        return torch.addcmul(offset, rows, scale).view(x.shape).permute(0, 3, 1, 2)

    return _Loader(batches, labels, on_error, normalise)


def work_rate(
    source,
    *,
    seed: int,
    part: int = 0,
    parts: int = 1,
    decoder: str = "standard",
    image_size: int = 224,
    mean: tuple = MEAN,
    std: tuple = STD,
) -> Callable[[], float]:
    """Return `measure() -> samples/s`: the work on samples in this process, with nothing around it.

    Each call reads, decodes, crops, flips and normalises every `parts`-th file of epoch 0 into the
    same memory. As the limit of a pipeline call it in one single-threaded process a core, at the
    same time, each with a `part` of its own, and add up what they return.
    """
    form = ImageForm(image_size, mean, std)
    paths, _, epochs = open_folder(source, 1, seed, decoder)
    samples = [(paths[row.item()], numbers[0].tolist()) for row, numbers in epochs][part::parts]
    out = np.zeros((image_size, 3 * image_size), np.float32)

    def measure() -> float:
        start = time.perf_counter()
        for path, numbers in samples:
            pixels = _to_bytes(_image(path, numbers, decoder, image_size), form)
            np.multiply(pixels.reshape(out.shape), form.scale, out=out)
            np.add(out, form.offset, out=out)
        return len(samples) / (time.perf_counter() - start)

    return measure


def _in_processes(samples: "_Samples", epochs, workers: int) -> DataLoader:
    """A DataLoader whose work is done in processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return DataLoader(
        samples,
        batch_sampler=epochs,
        collate_fn=_collate,
        num_workers=workers or cores,
        persistent_workers=True,  # to start them takes longer than a short epoch
        prefetch_factor=2,
        pin_memory=torch.cuda.is_available(),
    )


class _Loader:
    """An iteration is an epoch; `skipped` says which files could not be read, and why."""

    def __init__(
        self,
        batches: DataLoader,
        labels: np.ndarray,
        on_error: str,
        normalise: Callable | None = None,
    ) -> None:
        self.skipped: list[str] = []
        self._batches, self._labels = batches, torch.from_numpy(labels)
        self._raises, self._normalise = on_error == "raise", normalise

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        device = _device()
        for x, rows, failures in _from_workers(self._batches):
            if failures and self._raises:
                raise ValueError(failures[0])
            self.skipped += failures
            if rows:
                x = x.to(device, non_blocking=True)
                y = self._labels[rows].to(device, non_blocking=True)
                yield self._normalise(x) if self._normalise else x, y


def _from_workers(batches: DataLoader) -> Iterator:
    """The batches; torch says that a worker died, or else what broke as it handed one over."""
    try:
        yield from batches
    except (EOFError, ConnectionError) as error:
        raise RuntimeError("DataLoader worker ended while it handed over a batch") from error


class _Samples(Dataset):
    """The files, and the work on each. Every worker has a copy."""

    def __init__(self, paths: list[str], decoder: str, form: ImageForm, finish: Callable) -> None:
        self.paths, self.decoder, self.form, self.finish = paths, decoder, form, finish

    def __getitems__(self, batch: tuple[np.ndarray, np.ndarray]) -> list[tuple]:
        """The samples of a batch: the row, and its image or why there is none."""
        rows, numbers = (array.tolist() for array in batch)
        return [self._sample(*each) for each in zip(rows, numbers, strict=True)]

    def _sample(self, row: int, numbers: list[float]) -> tuple:
        try:
            image = _image(self.paths[row], numbers, self.decoder, self.form.size)
            return row, self.finish(image, self.form)
        except UNREADABLE as error:
            reason = str(error).partition("\n")[0]
            return row, f"{self.paths[row]}: {type(error).__name__}: {reason}"


def _collate(samples: list[tuple]) -> tuple[Tensor, list[int], list[str]]:
    """A batch of what could be read, its rows, and what could not."""
    good = [sample for sample in samples if not isinstance(sample[1], str)]
    failures = [reason for _, reason in samples if isinstance(reason, str)]
    x = default_collate([image for _, image in good]) if good else torch.empty(0)
    return x, [row for row, _ in good], failures


def _image(path: str, numbers: list[float], decoder: str, size: int) -> Image.Image | Tensor:
    """Decode, crop, resize and flip: an image of Pillow, or a uint8 tensor (3, size, size)."""
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
    return F.horizontal_flip(image) if numbers[-1] < 0.5 else image


def _to_tensor(image: Image.Image | Tensor, form: ImageForm) -> Tensor:
    """As tutorials do: to float32 in [0, 1], (3, size, size), then mean and deviation."""
    pixels = image if isinstance(image, Tensor) else F.pil_to_tensor(image)
    pixels = F.to_dtype(pixels.contiguous(), torch.float32, scale=True)
    return F.normalize(pixels, form.mean, form.std)


def _to_bytes(image: Image.Image | Tensor, form: ImageForm) -> np.ndarray:
    """uint8 (size, size, 3), which are normalised later."""
    return image.permute(1, 2, 0).numpy() if isinstance(image, Tensor) else np.array(image)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    """Print each loader's rate in its second epoch, on 512 photos of 256 pixels."""
    import tempfile

    from shared.photos import make_photos

    with tempfile.TemporaryDirectory() as name:
        folder = make_photos(f"{name}/photos", images=512, size=256, seed=0)
        print(f"work on one core: {work_rate(folder, seed=0)():.0f} samples/s")
        for make in (naive_loader, parallel_loader, uint8_loader):
            loader = make(folder, batch_size=32, seed=0)
            for _ in range(2):
                start = time.perf_counter()
                rate = sum(len(y) for _, y in loader) / (time.perf_counter() - start)
            print(f"{make.__name__}: {rate:.0f} samples/s")


if __name__ == "__main__":
    main()
