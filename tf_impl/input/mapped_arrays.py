"""Mapped input pipeline: decoded photos in arrays on disk, mapped into memory.

    # once: twinbench shards photos arrays --format arrays
    for x, y in memory_mapped_loader("arrays", batch_size=32, seed=0):
        loss = step(x, y)

What it changes: images are decoded only once, when the arrays are written. Only the bytes of an
image's crop are read. They stay in the page cache, once for all processes. Batches, order and crops
are those of `folder.py`.

Its twin: `pt_impl/input/mapped_arrays.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps if decoding is most of the work and memory is ample. The
arrays need about ten times the space of the JPEG files. If they don't fit into the page cache, the
disk limits the speed. Any sample can be read directly, so no shuffle buffer is needed.

Run it alone: `python -m tf_impl.input.mapped_arrays` prints samples/s.

Copy with it: `shared/epochs.py`, `shared/shards.py`, `tf_impl/kit/photos.py`.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import tensorflow as tf

from shared.epochs import MEAN, STD, Epochs, ImageForm
from shared.shards import MappedImages, open_shards
from tf_impl.kit.photos import make_mapped_load, ordered


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
    """`workers` calls of the map at a time, 0 for as many as tf.data finds best, cut crops.

    Args:
        source: a folder of shards of arrays. All of them are read when this is called, for their
            checksums.
        on_error: "raise" raises at once where a shard is not what was written; "skip" leaves its
            samples out, which makes their batches smaller, and adds a line for each to the loader's
            list `skipped`.
        start_batch: batches seen before, over all epochs; the first iteration yields exactly what
            is left of its epoch. A batch of which nothing can be read is not yielded, but counts.
        image_size, mean, std: of the images, as `ImageForm` has them.

    Returns:
        What yields (x, y), float32 (n, image_size, image_size, 3) and int64; the last batch may be
        smaller.

    Raises:
        ValueError: settings that don't exist, or a damaged shard, with its file and the reason; and
            what `open_shards` raises.
    """
    form = ImageForm(image_size, mean, std)
    images = MappedImages(open_shards(source, "arrays", on_error))
    if images.damaged and on_error == "raise":
        raise ValueError(next(iter(images.damaged.values())))
    epochs = Epochs(images.size, batch_size=batch_size, seed=seed, start_batch=start_batch)
    return _Loader(images, epochs, form, workers or tf.data.AUTOTUNE)


class _Loader:
    """An iteration is an epoch; `skipped` says which samples were left out, and why."""

    def __init__(self, images: MappedImages, epochs: Epochs, form: ImageForm, calls: int) -> None:
        self.skipped: list[str] = []
        self.images, self.epochs = images, epochs
        load, size = make_mapped_load(images, form), epochs.batch_size
        batches = ordered(self._there)

        def batch(*samples):
            return tf.data.Dataset.from_tensor_slices(samples).map(load, calls).batch(size)

        if images.has(np.arange(images.size)).all():
            batches = batches.unbatch().map(load, calls).batch(size)
        else:  # each batch by itself, so that what is left out moves no sample to another
            batches = batches.flat_map(batch)
        self.batches = batches.prefetch(tf.data.AUTOTUNE)

    def _there(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """What is there of the next epoch."""
        for rows, numbers in self.epochs:
            there = self.images.has(rows)
            if there.any():
                yield rows[there], numbers[there]

    def __iter__(self) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        damaged, batches = self.images.damaged, iter(self.batches)
        for rows, _ in self.epochs.batches(self.epochs.epoch, self.epochs.start):
            lost = [row for row in rows.tolist() if row in damaged]
            self.skipped += [f"{damaged[row]}: sample {row:09}" for row in lost]
            if self.images.has(rows).any():
                yield next(batches)


def main() -> None:
    """Print its rate in its second epoch, on 512 photos of 256 pixels."""
    import tempfile

    from shared.conversion import convert
    from shared.photos import make_photos
    from tf_impl.kit import input_rates

    with tempfile.TemporaryDirectory() as name:
        folder = make_photos(f"{name}/photos", images=512, size=256, seed=0)
        convert(folder, f"{name}/arrays", form="arrays", samples=64)
        loader = memory_mapped_loader(f"{name}/arrays", batch_size=32, seed=0)
        print(f"memory_mapped_loader: {input_rates.second_epoch(loader):.0f} samples/s")


if __name__ == "__main__":
    main()
