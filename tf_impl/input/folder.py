"""Input pipeline: batches from a folder of JPEG files, as the documentation shows it.

    for x, y in uint8_loader("photos", batch_size=32, seed=0):  # instead of your loop's batches
        loss = step(x, y)

What it changes: where images are read, decoded, cropped, flipped and normalised, and how they get
to the training loop. All loaders give the same batches: float32 images, normalised by ImageNet's
mean and standard deviation, and int64 labels. Images are (n, 3, 224, 224), in TensorFlow (n, 224,
224, 3). Order and crops follow from the seed and the epoch (`shared/epochs.py`). Each pass over the
loader is the next epoch.

Its twin: `pt_impl/input/folder.py`, which says where the frameworks differ.

When it helps and when it hurts: it competes with training for the cores. `tuned_folder.py` is
faster.
- A map per image is fine if an image takes longer than the call. Map small arrays by batch.

Run it alone: `python -m tf_impl.input.folder` prints samples/s of each loader, and the work limit.

Copy with it: `shared/epochs.py`, `shared/images.py`, `tf_impl/kit/photos.py`.
"""

from collections.abc import Callable, Iterable

import tensorflow as tf

from shared.epochs import MEAN, STD, Epochs, ImageForm
from shared.images import open_folder
from tf_impl.kit.photos import FolderLoader, make_load, normalise, ordered, readable


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
    """The tutorial's form: map and batch, and what tf.data makes of that by itself.

    Args:
        source: a folder with a sub-folder of JPEG files for each class.
        decoder: "standard" (the whole image) or "fast" (what the crop needs of it).
        on_error: "raise" ends at a file that can't be read; "skip" makes its batch smaller and adds
            a line to the loader's list `skipped`.
        start_batch: batches seen before, over all epochs; the first iteration yields exactly what
            is left of its epoch. A batch of which nothing can be read is not yielded, but counts.
        image_size, mean, std: of the images, as `ImageForm` has them.

    Returns:
        What yields (x, y); the last batch may be smaller.

    Raises:
        ValueError: settings that don't exist, or a folder without images; while it iterates, a file
            that can't be read, with its name and the reason. What libjpeg mends in silence, such as
            flipped bits within an image, goes unnoticed.
    """
    form = ImageForm(image_size, mean, std)
    paths, labels, epochs = open_folder(source, batch_size, seed, decoder, on_error, start_batch)
    load = make_load(paths, labels, decoder, form)
    return FolderLoader(_batches(epochs, load, None, on_error), epochs, load, paths)


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
    """As the guide to performance has it: `workers` calls of the map at a time, and a prefetch.

    0 workers: as many as tf.data finds best (AUTOTUNE). All else is as for `naive_loader`.
    """
    form = ImageForm(image_size, mean, std)
    paths, labels, epochs = open_folder(source, batch_size, seed, decoder, on_error, start_batch)
    load = make_load(paths, labels, decoder, form)
    batches = _batches(epochs, load, workers or tf.data.AUTOTUNE, on_error)
    return FolderLoader(batches.prefetch(tf.data.AUTOTUNE), epochs, load, paths)


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
    """`parallel_loader` that batches a byte a value, and normalises the batch as a whole."""
    form = ImageForm(image_size, mean, std)
    paths, labels, epochs = open_folder(source, batch_size, seed, decoder, on_error, start_batch)
    load = make_load(paths, labels, decoder, form, as_bytes=True)
    batches = _batches(epochs, load, workers or tf.data.AUTOTUNE, on_error)
    batches = batches.map(lambda x, y, rows: (normalise(x, form), y, rows))
    return FolderLoader(batches.prefetch(tf.data.AUTOTUNE), epochs, load, paths)


def _batches(epochs: Epochs, load: Callable, calls: int | None, on_error: str) -> tf.data.Dataset:
    """Batches of (x, y, rows), with so many calls of the map at a time."""
    batches, size = ordered(lambda: epochs), epochs.batch_size
    if on_error == "skip":  # each batch by itself
        return batches.flat_map(readable(load, size, calls))
    return batches.unbatch().map(load, calls).batch(size)


def main() -> None:
    """Print each loader's rate in its second epoch, on 512 photos of 256 pixels, and the limit."""
    import tempfile

    from shared.photos import make_photos
    from tf_impl.kit import input_rates

    with tempfile.TemporaryDirectory() as name:
        folder = make_photos(f"{name}/photos", images=512, size=256, seed=0)
        print(f"work on one core: {input_rates.folder_limit(folder, seed=0)():.0f} samples/s")
        for make in (naive_loader, parallel_loader, uint8_loader):
            loader = make(folder, batch_size=32, seed=0)
            print(f"{make.__name__}: {input_rates.second_epoch(loader):.0f} samples/s")


if __name__ == "__main__":
    main()
