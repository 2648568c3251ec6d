"""Tuned input pipeline: a folder of JPEG files as batches, close to the limit of the work itself.

What it changes: what stands between the work on a sample and the training loop. `tuned_loader`
keeps two batches of calls in flight on two threads a core, and each call writes its normalised
image into its place in the batch. The batches are those of `folder.py`, from the same
files with the same crops.

Its twin: `pt_impl/input/tuned_folder.py`.

Where the frameworks differ and why:
- tf.data fuses a map with the batch that follows: each call copies its image into the batch while
  the cache still has it. But with as many calls as cores there is one batch in the making: at its
  end a core waits for the other, and both for the batch to be taken. More calls than threads keep
  all cores busy. There processes fill a ring of batches, because Python's threads take turns.
- AUTOTUNE is off: it moves the number of calls while the pipeline runs, by what it has measured.
- Linux tends to gather tf.data's threads on one core, for whole epochs; each is bound to a core.
- Two things keep tf.data from the limit where PyTorch's workers reach it. TensorFlow splits what is
  done element by element among all intra-op threads, however small, and tf.data's option against
  it (`max_intra_op_parallelism`) does not reach these operators. A second thread a core works while
  the first one waits; a process that trains on a GPU does better with
  `tf.config.threading.set_intra_op_parallelism_threads(1)`. And each batch is new memory, whose
  pages the kernel clears: glibc keeps them where MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_
  are set above the size of a batch.
- A batch is the caller's to keep here. There it is lent.
- `threads_loader` has no twin here: every loader of tf.data works in threads.

When it helps and when it hurts: it helps where a batch takes long to make, such as one of photos.
It takes memory for some batches more, and all cores, also those that train.

Run it alone: `python -m tf_impl.input.tuned_folder` prints samples/s.

Copy with it: `shared/epochs.py`, `shared/images.py`.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import numpy as np
import tensorflow as tf

from shared.epochs import DRAWS, RATIOS, TRIES, open_folder

SIZE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, of pixels in [0, 1]
# A row at a time: over a last axis of 3 channels the same arithmetic takes ten times as long.
SCALE = np.tile(1 / (255 * np.float32(STD)), SIZE)
OFFSET = np.tile(-np.float32(MEAN) / np.float32(STD), SIZE)


def tuned_loader(
    source,
    *,
    batch_size: int,
    seed: int,
    workers: int = 0,
    decoder: str = "standard",
    on_error: str = "raise",
    start_batch: int = 0,
) -> Iterable:
    """Decode in `workers` threads, 0 for two a core, with two batches of calls waiting for them.

    source: a folder with a sub-folder of JPEG files for each class. decoder: "standard" (the whole
    image) or "fast" (what the crop needs of it). on_error: "raise" ends at a file that can't be
    read; "skip" makes its batch smaller and adds a line to the loader's list `skipped`, and makes
    one batch after the other. start_batch: batches seen before, over all epochs; the first
    iteration yields exactly what is left of its epoch. Yields (x, y): float32 (n, 224, 224, 3) and
    int64.

    Raises ValueError for settings that don't exist and for a folder without images; while it
    iterates, for a file that can't be read, with its name and the reason.
    """
    loader = _Loader(source, batch_size, seed, decoder, on_error, start_batch)
    options = tf.data.Options()
    # Threads of its own, so that no step of training takes their turn; each works on one sample.
    options.threading.private_threadpool_size = workers or 2 * _cores()
    options.threading.max_intra_op_parallelism = 1
    options.autotune.enabled = False
    loader.dataset = loader.samples(2 * batch_size).prefetch(1).with_options(options)
    return loader


def threads_loader(
    source,
    *,
    batch_size: int,
    seed: int,
    workers: int = 0,
    decoder: str = "standard",
    on_error: str = "raise",
    start_batch: int = 0,
) -> Iterable:
    """Raises NotImplementedError: it would be `tuned_loader`."""
    raise NotImplementedError("tf.data has no other workers than threads: see tuned_loader")


class _Loader:
    """An iteration is an epoch; `skipped` says which files could not be read, and why."""

    def __init__(self, source, batch_size, seed, decoder, on_error, start_batch) -> None:
        found = open_folder(source, batch_size, seed, decoder, on_error, start_batch)
        self._paths, labels, self.epochs = found
        self.skipped: list[str] = []
        self._raises = on_error == "raise"
        self.load = _make_load(self._paths, labels, decoder)

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
        before = _threads()
        batches = iter(self.dataset)
        for wanted, numbers in self.epochs.batches(self.epochs.epoch, self.epochs.start):
            try:
                x, y, rows = next(batches)
            except tf.errors.OpError:
                for failure in self._failures(wanted, numbers):
                    raise ValueError(failure) from None
                raise
            if before:  # with the first batch they are all there
                _spread(_threads() - before)
                before = set()
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


def _make_load(paths: list[str], labels: np.ndarray, decoder: str) -> Callable:
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
        return _normalise(image), labels[row], row

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


def _normalise(image: tf.Tensor) -> tf.Tensor:
    """Pixels in [0, 255], (SIZE, SIZE, 3), less the mean and over the deviation, float32."""
    return tf.reshape(tf.reshape(image, [SIZE, 3 * SIZE]) * SCALE + OFFSET, image.shape)


def _threads() -> set[int]:
    """The threads of this process, where Linux tells them."""
    return (
        set(map(int, os.listdir("/proc/self/task"))) if os.path.isdir("/proc/self/task") else set()
    )


def _spread(threads: set[int]) -> None:
    """Give threads a core each, in turn.

    tf.data's threads wake one another for every sample, and Linux likes to put a thread on the core
    of the one that woke it: without this, whole epochs run on one core while another is idle.
    """
    cores = sorted(os.sched_getaffinity(0))
    for place, thread in enumerate(sorted(threads)):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, {cores[place % len(cores)]})


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def main() -> None:
    """Print its rate in its second epoch, on 512 photos of 256 pixels."""
    import tempfile

    from shared.photos import make_photos

    with tempfile.TemporaryDirectory() as name:
        folder = make_photos(f"{name}/photos", images=512, size=256, seed=0)
        loader = tuned_loader(folder, batch_size=32, seed=0)
        for _ in range(2):
            start = time.perf_counter()
            rate = sum(len(y) for _, y in loader) / (time.perf_counter() - start)
        print(f"tuned_loader: {rate:.0f} samples/s")


if __name__ == "__main__":
    main()
