"""Mapped input pipeline: decoded photos in arrays on disk, mapped into memory.

    # once: twinbench shards photos arrays --format arrays
    for x, y in memory_mapped_loader("arrays", batch_size=32, seed=0):
        loss = step(x, y)

What it changes: images are decoded only once, when the arrays are written. Only the bytes of an
image's crop are read. They stay in the page cache, once for all processes. Batches, order and crops
are those of `folder.py`.

Its twin: `tf_impl/input/mapped_arrays.py`.

Where the frameworks differ and why:
- NumPy maps the arrays in both, because tf.data has no operator that maps a file.
- PyTorch reads crops in independent processes. In TensorFlow a crop is a Python call, and these
  take turns.
- Pillow resizes the crop in PyTorch, the graph in TensorFlow.

When it helps and when it hurts: it helps if decoding is most of the work and memory is ample. The
arrays need about ten times the space of the JPEG files. If they don't fit into the page cache, the
disk limits the speed. Any sample can be read directly, so no shuffle buffer is needed.

Run it alone: `python -m pt_impl.input.mapped_arrays` prints samples/s.

Copy with it: `pt_impl/kit/photos.py`, `shared/epochs.py`, `shared/shards.py`.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pt_impl.kit.photos import PhotoLoader, cores, crop_photo
from shared.epochs import MEAN, STD, Epochs, ImageForm
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

    Args:
        source: a folder of shards of arrays. All of them are read when this is called, for their
            checksums.
        workers: they stay until the loader is deleted.
        on_error: "raise" raises at once where a shard is not what was written; "skip" leaves its
            samples out, which makes their batches smaller, and adds a line for each to the loader's
            list `skipped`.
        start_batch: batches seen before, over all epochs; the first iteration yields exactly what
            is left of its epoch. A batch of which nothing can be read is not yielded, but counts.
        image_size, mean, std: of the images, as `ImageForm` has them.

    Returns:
        What yields (x, y), float32 (n, 3, image_size, image_size) and int64, on the GPU where there
        is one; the last batch may be smaller.

    Raises:
        ValueError: settings that don't exist, or a damaged shard, with its file and the reason; and
            what `open_shards` raises.
    """
    form = ImageForm(image_size, mean, std)
    images = MappedImages(open_shards(source, "arrays", on_error))
    if images.damaged and on_error == "raise":
        raise ValueError(next(iter(images.damaged.values())))
    epochs = Epochs(images.size, batch_size=batch_size, seed=seed, start_batch=start_batch)
    batches = DataLoader(
        _Crops(images, image_size),
        batch_sampler=epochs,
        collate_fn=tuple,  # as it is
        num_workers=workers or cores(),
        persistent_workers=True,
        prefetch_factor=2,
        pin_memory=torch.cuda.is_available(),
    )
    return PhotoLoader(batches, "skip", form)


class _Crops(Dataset):
    """The images, and the work on each. Every worker maps the files itself."""

    def __init__(self, images: MappedImages, size: int) -> None:
        self.images, self.size = images, size

    def __getitems__(
        self, batch: tuple[np.ndarray, np.ndarray]
    ) -> tuple[Tensor, list[int], list[str]]:
        """Return the images of a batch, a byte a value, their labels, and what was left out."""
        rows, numbers = batch
        there, damaged = self.images.has(rows), self.images.damaged
        x, labels = np.empty((there.sum(), self.size, self.size, 3), np.uint8), []
        for out, row, drawn in zip(x, rows[there].tolist(), numbers[there], strict=True):
            pixels, label = self.images.image(row)
            out[:] = crop_photo(pixels, drawn, self.size)
            labels.append(label)
        failures = [f"{damaged[row]}: sample {row:09}" for row in rows.tolist() if row in damaged]
        return torch.from_numpy(x), labels, failures


def main() -> None:
    """Print its rate in its second epoch, on 512 photos of 256 pixels."""
    import tempfile

    from pt_impl.kit import input_rates
    from shared.conversion import convert
    from shared.photos import make_photos

    with tempfile.TemporaryDirectory() as name:
        folder = make_photos(f"{name}/photos", images=512, size=256, seed=0)
        convert(folder, f"{name}/arrays", form="arrays", samples=64)
        loader = memory_mapped_loader(f"{name}/arrays", batch_size=32, seed=0)
        print(f"memory_mapped_loader: {input_rates.second_epoch(loader):.0f} samples/s")


if __name__ == "__main__":
    main()
