"""Input pipeline: batches from a folder of JPEG files, as the documentation shows it.

    for x, y in uint8_loader("photos", batch_size=32, seed=0):  # instead of your loop's batches
        loss = step(x, y)

What it changes: where images are read, decoded, cropped, flipped and normalised, and how they get
to the training loop. All loaders give the same batches: float32 images, normalised by ImageNet's
mean and standard deviation, and int64 labels. Images are (n, 3, 224, 224), in TensorFlow (n, 224,
224, 3). Order and crops follow from the seed and the epoch (`shared/epochs.py`). Each pass over the
loader is the next epoch.

Its twin: `tf_impl/input/folder.py`.

Where the frameworks differ and why:
- PyTorch: Python code holds the interpreter's lock at times, so a DataLoader works in processes,
  which have to send their images. By default it has no workers, and the training loop waits for
  every image.
- TensorFlow: tf.data works in threads, without Python. By default it makes even the plainest map
  parallel, fuses it with the batch and prefetches.
- Pixels are rounded to uint8 after the resize in PyTorch. They stay float32 in TensorFlow, except
  in `uint8_loader`.
- PyTorch treats all CMYK files as inverted, TensorFlow only those with Adobe's marker.

When it helps and when it hurts: it competes with training for the cores. `tuned_folder.py` is
faster.
- Worker processes help if a sample takes longer to make than to send to another process. Small
  arrays in memory don't.

Run it alone: `python -m pt_impl.input.folder` prints samples/s of each loader, and the work limit.

Copy with it: `pt_impl/kit/photos.py`, `shared/epochs.py`, `shared/images.py`.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.transforms.v2 import functional as F

from pt_impl.kit.photos import PhotoLoader, cores, load_photo
from shared.epochs import MEAN, STD, Epochs, ImageForm
from shared.images import open_folder


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

    Args:
        source: a folder with a sub-folder of JPEG files for each class.
        decoder: "standard" (Pillow) or "fast" (torchvision; deprecated since 0.29 for TorchCodec's,
            which has the same name).
        on_error: "raise" ends at a file that can't be read; "skip" makes its batch smaller and adds
            a line to the loader's list `skipped`.
        start_batch: batches seen before, over all epochs; the first iteration yields exactly what
            is left of its epoch. A batch of which nothing can be read is not yielded, but counts.
        image_size, mean, std: of the images, as `ImageForm` has them.

    Returns:
        What yields (x, y), on the GPU where there is one; the last batch may be smaller.

    Raises:
        ValueError: settings that don't exist, or a folder without images; while it iterates, a file
            that can't be read, with its name and the reason.
    """
    paths, labels, epochs = open_folder(source, batch_size, seed, decoder, on_error, start_batch)
    photos = _Photos(paths, labels, decoder, ImageForm(image_size, mean, std))
    return PhotoLoader(DataLoader(photos, batch_sampler=epochs, collate_fn=_collate), on_error)


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
    paths, labels, epochs = open_folder(source, batch_size, seed, decoder, on_error, start_batch)
    photos = _Photos(paths, labels, decoder, ImageForm(image_size, mean, std))
    return PhotoLoader(_in_processes(photos, epochs, workers), on_error)


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
    photos = _Photos(paths, labels, decoder, form, as_bytes=True)
    return PhotoLoader(_in_processes(photos, epochs, workers), on_error, form)


def _in_processes(photos: "_Photos", epochs: Epochs, workers: int) -> DataLoader:
    return DataLoader(
        photos,
        batch_sampler=epochs,
        collate_fn=_collate,
        num_workers=workers or cores(),
        persistent_workers=True,  # to start them takes longer than a short epoch
        prefetch_factor=2,
        pin_memory=torch.cuda.is_available(),
    )


class _Photos(Dataset):
    """The files, and the work on each. Every worker has a copy."""

    def __init__(
        self,
        paths: list[str],
        labels: np.ndarray,
        decoder: str,
        form: ImageForm,
        as_bytes: bool = False,
    ) -> None:
        self.paths, self.labels = paths, labels.tolist()
        self.decoder, self.form, self.as_bytes = decoder, form, as_bytes

    def __getitems__(self, batch: tuple[np.ndarray, np.ndarray]) -> list[tuple]:
        """Return the samples of a batch: the image, its label, and why there is none."""
        rows, numbers = (array.tolist() for array in batch)
        return [self._sample(*each) for each in zip(rows, numbers, strict=True)]

    def _sample(self, row: int, numbers: list[float]) -> tuple[Tensor | None, int, str]:
        try:
            pixels = load_photo(self.paths[row], numbers, self.form.size, self.decoder)
        except ValueError as error:
            return None, -1, str(error)
        image = torch.tensor(pixels)
        return image if self.as_bytes else self._to_float(image), self.labels[row], ""

    def _to_float(self, image: Tensor) -> Tensor:
        """As tutorials do: to float32 in [0, 1], (3, size, size), then mean and deviation."""
        image = F.to_dtype(image.permute(2, 0, 1).contiguous(), torch.float32, scale=True)
        return F.normalize(image, self.form.mean, self.form.std)


def _collate(samples: list[tuple]) -> tuple[Tensor, list[int], list[str]]:
    """A batch of what could be read, its labels, and what could not."""
    good = [(image, label) for image, label, failure in samples if not failure]
    x = default_collate([image for image, _ in good]) if good else torch.empty(0)
    return x, [label for _, label in good], [failure for *_, failure in samples if failure]


def main() -> None:
    """Print each loader's rate in its second epoch, on 512 photos of 256 pixels, and the limit."""
    import tempfile

    from pt_impl.kit import input_rates
    from shared.photos import make_photos

    with tempfile.TemporaryDirectory() as name:
        folder = make_photos(f"{name}/photos", images=512, size=256, seed=0)
        print(f"work on one core: {input_rates.folder_limit(folder, seed=0)():.0f} samples/s")
        for make in (naive_loader, parallel_loader, uint8_loader):
            loader = make(folder, batch_size=32, seed=0)
            print(f"{make.__name__}: {input_rates.second_epoch(loader):.0f} samples/s")


if __name__ == "__main__":
    main()
