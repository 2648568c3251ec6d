"""Input pipeline: a folder of JPEG files as batches, in the forms that the documentation shows.

What it changes: where images are read, decoded, cropped, flipped and normalised, and how they get
from there to the training loop. All loaders give the same batches: float32 images (n, 224, 224, 3)
less ImageNet's mean and over its deviation, and int64 labels. Order and crops follow from the seed
and the epoch (`shared/epochs.py`); each iteration is the next epoch. `work_rate` says how fast a
core does the work itself. `tuned_folder.py` comes close to that.

Its twin: `pt_impl/input/folder.py`.

Where the frameworks differ and why:
- tf.data works in threads, without Python: no image moves between processes, as it does there.
- The plainest map is not plain here: unless told not to, tf.data makes it parallel, fuses it with
  the batch and prefetches. A DataLoader's default is no worker.
- Decoders here: the whole image ("standard"), or only what the crop needs of it ("fast"). There:
  Pillow, or torchvision's. All are libjpeg-turbo with its accurate transform, and all resize with
  a filter against aliasing, which `tf.image.resize` leaves out unless asked.
- CMYK files are taken as inverted, as Adobe's programs write them, only with its marker here;
  there all are.
- Pixels stay float32 after the resize here, but in `uint8_loader`. There they are rounded.
- `tf.image.sample_distorted_bounding_box` draws from another distribution: the box is computed.
- A graph can't catch an error: a file that can't be read is found afterwards, by trying each.

When it helps and when it hurts: it helps where an image takes longer than a call of the map;
small arrays are better mapped a batch at a time. It takes its share of cores that train.

Run it alone: `python -m tf_impl.input.folder` prints samples/s of each loader.

Copy with it: `shared/epochs.py`, `shared/images.py`.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import tensorflow as tf

from shared.epochs import DRAWS, MEAN, RATIOS, STD, TRIES, Epochs, ImageForm
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
    """The tutorial's form: map and batch, and what tf.data makes of that by itself.

    source: a folder with a sub-folder of JPEG files for each class. decoder: "standard" or "fast".
    on_error: "raise" ends at a file that can't be read; "skip" makes its batch smaller and adds a
    line to the loader's list `skipped`. start_batch: batches seen before, over all epochs; the
    first iteration yields exactly what is left of one. A batch of which nothing can be read is not
    yielded, but counts. image_size, mean, std: of the images, as `ImageForm` has them. Yields
    (x, y); the last may be smaller.

    Raises ValueError for settings that don't exist and for a folder without images; while it
    iterates, for a file that can't be read, with its name and the reason. What libjpeg mends in
    silence, such as flipped bits within an image, goes unnoticed.
    """
    form = ImageForm(image_size, mean, std)
    paths, labels, epochs = open_folder(source, batch_size, seed, decoder, on_error, start_batch)
    load = _make_load(paths, labels, decoder, form)
    return _Loader(_batches(epochs, load, None, on_error), epochs, load, paths, on_error)


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
    load = _make_load(paths, labels, decoder, form)
    batches = _batches(epochs, load, workers or tf.data.AUTOTUNE, on_error)
    return _Loader(batches.prefetch(tf.data.AUTOTUNE), epochs, load, paths, on_error)


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
    load = _make_load(paths, labels, decoder, form, as_bytes=True)
    batches = _batches(epochs, load, workers or tf.data.AUTOTUNE, on_error)
    batches = batches.map(lambda x, y, rows: (_normalise(x, form), y, rows))
    return _Loader(batches.prefetch(tf.data.AUTOTUNE), epochs, load, paths, on_error)


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

    A call works on every `parts`-th file of epoch 0, in a loop within one graph. For the limit of a
    pipeline call it in a single-threaded process a core, at once, each with its `part`, and add up.
    """
    paths, labels, epochs = open_folder(source, 1, seed, decoder)
    load = _make_load(paths, labels, decoder, ImageForm(image_size, mean, std))
    rows, numbers = (np.concatenate(each)[part::parts] for each in zip(*epochs, strict=True))

    def sample(index, seen):
        image, _, _ = load(tf.gather(rows, index), tf.gather(numbers, index))
        return index + 1, seen + image[0, 0, 0]  # so that nothing of it is left out

    loop = (lambda index, _: index < len(rows), sample, (0, 0.0))
    work = tf.function(lambda: tf.while_loop(*loop, parallel_iterations=1))

    def measure() -> float:
        start = time.perf_counter()
        work()
        return len(rows) / (time.perf_counter() - start)

    measure()  # traces
    return measure


class _Loader:
    """An iteration is an epoch; `skipped` says which files could not be read, and why."""

    def __init__(self, batches, epochs: Epochs, load: Callable, paths, on_error: str) -> None:
        self.skipped: list[str] = []
        self._batches, self._epochs, self._load = batches, epochs, load
        self._paths, self._raises = paths, on_error == "raise"

    def __iter__(self) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        batches = iter(self._batches)
        for wanted, numbers in self._epochs.batches(self._epochs.epoch, self._epochs.start):
            try:
                x, y, rows = next(batches)
            except tf.errors.OpError:
                for failure in self._failures(wanted, numbers):
                    raise ValueError(failure) from None
                raise
            missing = ~np.isin(wanted, rows)
            self.skipped += self._failures(wanted[missing], numbers[missing])
            if not missing.all():
                yield x, y

    def _failures(self, rows: np.ndarray, numbers: np.ndarray) -> Iterator[str]:
        """Try each file: those that can't be read, and why."""
        for row, drawn in zip(rows, numbers, strict=True):
            try:
                self._load(row, drawn)
            except tf.errors.OpError as error:
                reason = error.message.partition("[[")[0].strip().splitlines()[-1]
                yield f"{self._paths[row]}: {reason}"


def _batches(epochs: Epochs, load: Callable, calls: int | None, on_error: str) -> tf.data.Dataset:
    """Batches of (x, y, rows), with so many calls of the map at a time."""
    # Python gives the order, a batch at a time, and anew in each epoch.
    specs = (tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, DRAWS], tf.float32))
    batches = tf.data.Dataset.from_generator(lambda: epochs, output_signature=specs)
    if on_error == "raise":
        return batches.unbatch().map(load, calls).batch(epochs.batch_size)

    def batch(*each):
        samples = tf.data.Dataset.from_tensor_slices(each).map(load, calls)
        empty = [tf.zeros([0, *spec.shape], spec.dtype) for spec in samples.element_spec]
        samples = samples.ignore_errors().batch(epochs.batch_size)
        return samples.concatenate(tf.data.Dataset.from_tensors(tuple(empty))).take(1)

    # A batch is a data set, so that what is left out makes it smaller and moves no other.
    return batches.flat_map(batch)


def _make_load(
    paths: list[str], labels: np.ndarray, decoder: str, form: ImageForm, as_bytes: bool = False
) -> Callable:
    """Return the work on a sample as a graph: load(row, numbers) -> (image, label, row).

    as_bytes: the image is uint8, and normalised later.
    """
    paths, labels = tf.constant([*map(os.fsencode, paths)]), tf.constant(labels)

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64), tf.TensorSpec([DRAWS], tf.float32)])
    def load(row, numbers):
        data = tf.io.read_file(paths[row])
        height, width, _ = tf.unstack(tf.io.extract_jpeg_shape(data))
        box = _crop_box(height, width, tf.cast(numbers, tf.float64))
        settings = {"channels": 3, "dct_method": "INTEGER_ACCURATE"}
        if decoder == "fast":
            image = tf.io.decode_and_crop_jpeg(data, box, **settings)
        else:
            top, left, high, wide = tf.unstack(box)
            image = tf.io.decode_jpeg(data, **settings)[top : top + high, left : left + wide]
        image = tf.cond(numbers[-1] < 0.5, lambda: tf.reverse(image, [1]), lambda: image)
        image = tf.image.resize(image, (form.size, form.size), antialias=True)
        if as_bytes:
            return tf.cast(tf.round(image), tf.uint8), labels[row], row
        return _normalise(image, form), labels[row], row

    return load


def _crop_box(height: tf.Tensor, width: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """`shared.epochs.crop_box` in a graph: top, left, height and width, int32 (4,)."""
    size = tf.cast([height, width], tf.float64)
    areas, ratios = numbers[:TRIES], numbers[TRIES : 2 * TRIES]
    pixels = size[0] * size[1] * areas
    tries = tf.round(tf.sqrt([pixels / ratios, pixels * ratios]))
    # Behind the tries stands the largest crop with a ratio within bounds, which fits.
    largest = tf.round([size[1] / RATIOS[0], size[0] * RATIOS[1]])
    tries = tf.concat([tries, tf.minimum(size, tf.maximum(largest, 1))[:, None]], 1)
    fits = tf.reduce_all((tries > 0) & (tries <= size[:, None]), 0)
    first = tf.where(fits)[0, 0]
    crop = tries[:, first]
    drawn = tf.floor(numbers[2 * TRIES : 2 * TRIES + 2] * (size - crop + 1))
    begin = tf.where(first == TRIES, tf.floor((size - crop) / 2), drawn)
    return tf.cast(tf.concat([begin, crop], 0), tf.int32)


def _normalise(images: tf.Tensor, form: ImageForm) -> tf.Tensor:
    """Pixels in [0, 255], (..., size, size, 3), less the mean and over the deviation, float32."""
    rows = tf.reshape(tf.cast(images, tf.float32), [-1, 3 * form.size])
    return tf.reshape(rows * form.scale + form.offset, [-1, *images.shape[1:]])


def main() -> None:
    """Print each loader's rate in its second epoch, on 512 photos of 256 pixels."""
    import tempfile

    from shared.photos import make_photos

    with tempfile.TemporaryDirectory() as name:
        folder = make_photos(f"{name}/photos", images=512, size=256, seed=0)
        for make in (naive_loader, parallel_loader, uint8_loader):
            loader = make(folder, batch_size=32, seed=0)
            for _ in range(2):
                start = time.perf_counter()
                rate = sum(len(y) for _, y in loader) / (time.perf_counter() - start)
            print(f"{make.__name__}: {rate:.0f} samples/s")


if __name__ == "__main__":
    main()
