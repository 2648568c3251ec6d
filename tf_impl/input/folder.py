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

from shared.epochs import DRAWS, RATIOS, TRIES, open_folder

SIZE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, of pixels in [0, 1]
# A row at a time: over a last axis of 3 channels the same arithmetic takes ten times as long.
SCALE = np.tile(1 / (255 * np.float32(STD)), SIZE)
OFFSET = np.tile(-np.float32(MEAN) / np.float32(STD), SIZE)


def naive_loader(
    source,
    *,
    batch_size: int,
    seed: int,
    decoder: str = "standard",
    on_error: str = "raise",
    start_batch: int = 0,
) -> Iterable:
    """The tutorial's form: map and batch, and what tf.data makes of that by itself.

    source: a folder with a sub-folder of JPEG files for each class. decoder: "standard" or "fast".
    on_error: "raise" ends at a file that can't be read; "skip" makes its batch smaller and adds a
    line to the loader's list `skipped`. start_batch: batches seen before, over all epochs; the
    first iteration yields exactly what is left of one. Yields (x, y); the last may be smaller.

    Raises ValueError for settings that don't exist and for a folder without images; while it
    iterates, for a file that can't be read, with its name and the reason. What libjpeg mends in
    silence, such as flipped bits within an image, goes unnoticed.
    """
    loader = _Loader(source, batch_size, seed, decoder, on_error, start_batch, _normalise)
    loader.dataset = loader.samples(None)
    return loader


def parallel_loader(
    source,
    *,
    batch_size: int,
    seed: int,
    workers: int = 0,
    decoder: str = "standard",
    on_error: str = "raise",
    start_batch: int = 0,
) -> Iterable:
    """As the guide to performance has it: `workers` calls of the map at a time, and a prefetch.

    0 workers: as many as tf.data finds best (AUTOTUNE). All else is as for `naive_loader`.
    """
    loader = _Loader(source, batch_size, seed, decoder, on_error, start_batch, _normalise)
    loader.dataset = loader.samples(workers or tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    return loader


def uint8_loader(
    source,
    *,
    batch_size: int,
    seed: int,
    workers: int = 0,
    decoder: str = "standard",
    on_error: str = "raise",
    start_batch: int = 0,
) -> Iterable:
    """`parallel_loader` that batches a byte a value, and normalises the batch as a whole."""

    def to_bytes(image):
        return tf.cast(tf.round(image), tf.uint8)

    loader = _Loader(source, batch_size, seed, decoder, on_error, start_batch, to_bytes)
    dataset = loader.samples(workers or tf.data.AUTOTUNE)
    dataset = dataset.map(lambda x, y, rows: (_normalise(x), y, rows))
    loader.dataset = dataset.prefetch(tf.data.AUTOTUNE)
    return loader


def work_rate(
    source, *, seed: int, part: int = 0, parts: int = 1, decoder: str = "standard"
) -> Callable[[], float]:
    """Return `measure() -> samples/s`: the work on samples in this process, with nothing around it.

    A call works on every `parts`-th file of epoch 0, in a loop within one graph. For the limit of a
    pipeline call it in a single-threaded process a core, at once, each with its `part`, and add up.
    """
    loader = _Loader(source, 1, seed, decoder, "raise", 0, _normalise)
    rows, numbers = (np.concatenate(each)[part::parts] for each in zip(*loader.epochs, strict=True))

    def sample(index, seen):
        image, _, _ = loader.load(tf.gather(rows, index), tf.gather(numbers, index))
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

    def __init__(self, source, batch_size, seed, decoder, on_error, start_batch, finish) -> None:
        found = open_folder(source, batch_size, seed, decoder, on_error, start_batch)
        self._paths, labels, self.epochs = found
        self.skipped: list[str] = []
        self._raises = on_error == "raise"
        self.load = _make_load(self._paths, labels, decoder, finish)

    def samples(self, calls: int | None) -> tf.data.Dataset:
        """Batches of (x, y, rows), with so many calls of the map at a time."""
        # Python gives the order, a batch at a time, and anew in each epoch.
        specs = (tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, DRAWS], tf.float32))
        batches = tf.data.Dataset.from_generator(lambda: self.epochs, output_signature=specs)
        if self._raises:
            return batches.unbatch().map(self.load, calls).batch(self.epochs.batch_size)

        def batch(*each):
            samples = tf.data.Dataset.from_tensor_slices(each).map(self.load, calls)
            empty = [tf.zeros([0, *spec.shape], spec.dtype) for spec in samples.element_spec]
            samples = samples.ignore_errors().batch(self.epochs.batch_size)
            return samples.concatenate(tf.data.Dataset.from_tensors(tuple(empty))).take(1)

        # A batch is a data set, so that what is left out makes it smaller and moves no other.
        return batches.flat_map(batch)

    def __iter__(self) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        batches = iter(self.dataset)
        for wanted, numbers in self.epochs.batches(self.epochs.epoch, self.epochs.start):
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
                self.load(row, drawn)
            except tf.errors.OpError as error:
                reason = error.message.partition("[[")[0].strip().splitlines()[-1]
                yield f"{self._paths[row]}: {reason}"


def _make_load(paths: list[str], labels: np.ndarray, decoder: str, finish: Callable) -> Callable:
    """Return the work on a sample as a graph: load(row, numbers) -> (image, label, row)."""
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
        image = tf.image.resize(image, (SIZE, SIZE), antialias=True)
        return finish(image), labels[row], row

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


def _normalise(images: tf.Tensor) -> tf.Tensor:
    """Pixels in [0, 255], (..., SIZE, SIZE, 3), less the mean and over the deviation, float32."""
    rows = tf.reshape(tf.cast(images, tf.float32), [-1, 3 * SIZE])
    return tf.reshape(rows * SCALE + OFFSET, [-1, *images.shape[1:]])


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
