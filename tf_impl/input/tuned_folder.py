"""Tuned input pipeline: a folder of JPEG files as batches, close to the limit of the work itself.

What it changes: what stands between the work on a sample and the training loop. `tuned_loader`
keeps two batches of calls in flight on two threads a core, and each call writes its normalised
image into its place in the batch. `service_loader` has them made by workers of tf.data's service,
on other machines. The batches are those of `folder.py`, from the same files with the same crops.

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
- `tf.data.Dataset.snapshot` is left out: it stores what came before it, decoded photos of ten times
  the bytes, and crops that are drawn anew have to come after it. For what is decoded once there is
  `mapped_arrays.py`; for small images `in_memory.py` has one.
- `service_loader` has no twin there, and `threads_loader` none here: every loader of tf.data works
  in threads, and PyTorch's workers are processes of the machine that trains.

When it helps and when it hurts: it helps where a batch takes long to make, such as one of photos.
It takes memory for some batches more, and all cores, also those that train. The service helps where
other machines have cores to spare; on one it is the same cores, and a copy of each batch.

Run it alone: `python -m tf_impl.input.tuned_folder` prints samples/s.

Copy with it: `shared/epochs.py`, `shared/images.py`.
"""

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import numpy as np
import tensorflow as tf

from shared.epochs import DRAWS, MEAN, RATIOS, STD, TRIES, Epochs, ImageForm
from shared.images import open_folder


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
    """Decode in `workers` threads, 0 for two a core, with two batches of calls waiting for them.

    source: a folder with a sub-folder of JPEG files for each class. decoder: "standard" (the whole
    image) or "fast" (what the crop needs of it). on_error: "raise" ends at a file that can't be
    read; "skip" makes its batch smaller and adds a line to the loader's list `skipped`, and makes
    one batch after the other. start_batch: batches seen before, over all epochs; the first
    iteration yields exactly what is left of its epoch. A batch of which nothing can be read is not
    yielded, but counts. image_size, mean, std: of the images, as `ImageForm` has them. Yields
    (x, y): float32 (n, image_size, image_size, 3) and int64.

    Raises ValueError for settings that don't exist and for a folder without images; while it
    iterates, for a file that can't be read, with its name and the reason.
    """
    form = ImageForm(image_size, mean, std)
    paths, labels, epochs = open_folder(source, batch_size, seed, decoder, on_error, start_batch)
    load = _make_load(paths, labels, decoder, form)
    batches = _batches(epochs, load, 2 * batch_size, on_error)
    options = tf.data.Options()
    # Threads of its own, so that no step of training takes their turn; each works on one sample.
    options.threading.private_threadpool_size = workers or 2 * _cores()
    options.threading.max_intra_op_parallelism = 1
    options.autotune.enabled = False
    return _Loader(batches.prefetch(1).with_options(options), epochs, load, paths, on_error)


def service_loader(
    source,
    *,
    batch_size: int,
    seed: int,
    service: str,
    decoder: str = "standard",
    start_batch: int = 0,
    image_size: int = 224,
    mean: tuple = MEAN,
    std: tuple = STD,
) -> Iterable:
    """Have the batches made by the workers of tf.data's service, as many as it has.

    service: its dispatcher, such as "grpc://dispatcher:5050". The workers have to find the files of
    `source` under the same paths. Each batch of an epoch comes once, whichever is ready first, so
    that what is left of one that was interrupted is known with one worker alone: then the order is
    that of `tuned_loader`, as is all else. Who reaches the service's servers can have graphs run in
    them: they belong in a network of their own.

    Raises ValueError as `tuned_loader`, and where no service answers.
    Source: `tf.data.experimental.service`.
    """
    form = ImageForm(image_size, mean, std)
    paths, labels, epochs = open_folder(source, batch_size, seed, decoder, "raise", start_batch)
    _check_service(service)
    return _Served(epochs, _make_load(paths, labels, decoder, form), service)


class _Served:
    """An iteration is an epoch, which the service gets as a data set of its own."""

    def __init__(self, epochs: Epochs, load: Callable, service: str) -> None:
        self._epochs, self._load, self._service = epochs, load, service

    def __iter__(self) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        size, batches = self._epochs.batch_size, [*self._epochs]
        # A graph has to say it all, since no Python runs where the batches are made.
        rows, numbers = (tf.constant(np.concatenate(each)) for each in zip(*batches, strict=True))

        def batch(number):
            part = slice(number * size, (number + 1) * size)
            samples = tf.data.Dataset.from_tensor_slices((rows[part], numbers[part]))
            return samples.map(self._load, tf.data.AUTOTUNE).batch(size)

        # One number is one share of the work: a batch is made whole, by one worker.
        made = tf.data.Dataset.range(len(batches)).flat_map(batch)
        mode = tf.data.experimental.service.ShardingPolicy.DYNAMIC
        sent = made.apply(tf.data.experimental.service.distribute(mode, self._service))
        try:
            for x, y, _ in sent.prefetch(tf.data.AUTOTUNE):
                yield x, y
        except tf.errors.OpError as error:
            reason = error.message.partition("[[")[0].strip().splitlines()[-1]
            raise ValueError(f"the service can't make a batch: {reason}") from None


def _check_service(service: str) -> None:
    """Raise unless something answers there: TensorFlow itself would go on asking for an hour."""
    host, _, port = service.partition("://")[2].rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise ValueError(f"no tf.data service answers at {service!r}: {error}") from None


class _Loader:
    """An iteration is an epoch; `skipped` says which files could not be read, and why."""

    def __init__(self, batches, epochs: Epochs, load: Callable, paths, on_error: str) -> None:
        self.skipped: list[str] = []
        self._batches, self._epochs, self._load = batches, epochs, load
        self._paths, self._raises = paths, on_error == "raise"

    def __iter__(self) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        before = _threads()
        batches = iter(self._batches)
        for wanted, numbers in self._epochs.batches(self._epochs.epoch, self._epochs.start):
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
                self._load(row, drawn)
            except tf.errors.OpError as error:
                reason = error.message.partition("[[")[0].strip().splitlines()[-1]
                yield f"{self._paths[row]}: {reason}"


def _batches(epochs: Epochs, load: Callable, calls: int, on_error: str) -> tf.data.Dataset:
    """Batches of (x, y, rows), with so many calls of the map at a time."""
    # Python gives the order, a batch at a time, and anew in each epoch.
    specs = (tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, DRAWS], tf.float32))
    batches = tf.data.Dataset.from_generator(lambda: epochs, output_signature=specs)
    if on_error == "raise":
        # The map copies each image into its batch. There are calls for the batch after this one,
        # too, so that no core waits at its end.
        return batches.unbatch().map(load, calls).batch(epochs.batch_size)

    def batch(*each):
        samples = tf.data.Dataset.from_tensor_slices(each).map(load, calls)
        empty = [tf.zeros([0, *spec.shape], spec.dtype) for spec in samples.element_spec]
        samples = samples.ignore_errors().batch(epochs.batch_size)
        return samples.concatenate(tf.data.Dataset.from_tensors(tuple(empty))).take(1)

    # A batch is a data set, so that what is left out makes it smaller and moves no other.
    return batches.flat_map(batch)


def _make_load(paths: list[str], labels: np.ndarray, decoder: str, form: ImageForm) -> Callable:
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
        image = tf.image.resize(image, (form.size, form.size), antialias=True)
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


def _normalise(image: tf.Tensor, form: ImageForm) -> tf.Tensor:
    """Pixels in [0, 255], (size, size, 3), less the mean and over the deviation, float32."""
    rows = tf.reshape(image, [form.size, 3 * form.size])
    return tf.reshape(rows * form.scale + form.offset, image.shape)


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
