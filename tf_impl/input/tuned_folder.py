"""Tuned input pipeline: batches from a folder of JPEG files, close to the limit of decoding.

    for x, y in tuned_loader("photos", batch_size=32, seed=0):
        loss = step(x, y)

What it changes: how samples get to the training loop. `tuned_loader` runs two batches of calls at a
time, on two threads per core, and each call writes its normalised image into its place in the
batch. `service_loader` gets batches from workers of tf.data's service, on other machines. Batches,
files and crops are those of `folder.py`.

Its twin: `pt_impl/input/tuned_folder.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps if a batch takes long to make, as with photos. It needs
memory for some more batches, and all cores, which training uses, too. If you train on a GPU, call
`tf.config.threading.set_intra_op_parallelism_threads(1)`: TensorFlow splits even small elementwise
work among all its threads, and tf.data's option against that does not reach these operators. The
kernel clears the pages of each new batch, unless glibc keeps them (MALLOC_MMAP_THRESHOLD_ and
MALLOC_TRIM_THRESHOLD_ above the size of a batch). The service helps if other machines have free
cores. On one machine it uses the same cores, and copies each batch.

Run it alone: `python -m tf_impl.input.tuned_folder` prints samples/s.

Copy with it: `shared/epochs.py`, `shared/images.py`, `tf_impl/kit/photos.py`.
"""

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import numpy as np
import tensorflow as tf

from shared.epochs import MEAN, STD, Epochs, ImageForm
from shared.images import open_folder
from tf_impl.kit.photos import FolderLoader, cores, make_load, ordered, readable, reason_of


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

    Args:
        source: a folder with a sub-folder of JPEG files for each class.
        decoder: "standard" (the whole image) or "fast" (what the crop needs of it).
        on_error: "raise" ends at a file that can't be read; "skip" makes its batch smaller and adds
            a line to the loader's list `skipped`, and makes one batch after the other.
        start_batch: batches seen before, over all epochs; the first iteration yields exactly what
            is left of its epoch. A batch of which nothing can be read is not yielded, but counts.
        image_size, mean, std: of the images, as `ImageForm` has them.

    Returns:
        What yields (x, y): float32 (n, image_size, image_size, 3) and int64.

    Raises:
        ValueError: settings that don't exist, or a folder without images; while it iterates, a file
            that can't be read, with its name and the reason.
    """
    form = ImageForm(image_size, mean, std)
    paths, labels, epochs = open_folder(source, batch_size, seed, decoder, on_error, start_batch)
    load, batches = make_load(paths, labels, decoder, form), ordered(lambda: epochs)
    # With as many calls as cores there is one batch in the making: at its end a core waits for the
    # other, and both for the batch to be taken. There are calls for the batch after it, too.
    calls = 2 * batch_size
    if on_error == "skip":
        batches = batches.flat_map(readable(load, batch_size, calls))
    else:  # fused: the map copies each image into its batch
        batches = batches.unbatch().map(load, calls).batch(batch_size)
    options = tf.data.Options()
    # Its own threads, so that no step of training takes their turn; each works on one sample, and a
    # second one a core works while the first one waits.
    options.threading.private_threadpool_size = workers or 2 * cores()
    options.threading.max_intra_op_parallelism = 1
    options.autotune.enabled = False  # it moves the number of calls, by what it has measured
    batches = batches.prefetch(1).with_options(options)
    return _OnAllCores(batches, epochs, load, paths)


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

    Each batch of an epoch comes once, whichever is ready first, so that what is left of one that
    was interrupted is known only with one worker: then the order is that of `tuned_loader`, as is
    all else. Who reaches the service's servers can have graphs run in them: they belong in a
    separate network.

    Args:
        service: its dispatcher, such as "grpc://dispatcher:5050". The workers have to find the
            files of `source` under the same paths.

    Raises:
        ValueError: as `tuned_loader`, and where no service answers.

    Source: `tf.data.experimental.service`.
    """
    form = ImageForm(image_size, mean, std)
    paths, labels, epochs = open_folder(source, batch_size, seed, decoder, "raise", start_batch)
    _check_service(service)
    return _Served(epochs, make_load(paths, labels, decoder, form), service)


class _OnAllCores(FolderLoader):
    """Binds each thread to a core.

    tf.data's threads wake one another for every sample, and Linux likes to put a thread on the core
    of the one that woke it: without this, whole epochs run on one core while another is idle.
    """

    def __iter__(self) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        before = _threads()
        for batch in super().__iter__():
            if before:  # with the first batch they are all there
                self._bind(_threads() - before)
                before = set()
            yield batch

    def _bind(self, threads: set[int]) -> None:
        cpus = sorted(os.sched_getaffinity(0))
        for place, thread in enumerate(sorted(threads)):
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(thread, {cpus[place % len(cpus)]})


def _threads() -> set[int]:
    """The threads of this process, where Linux tells them."""
    tasks = "/proc/self/task"
    return set(map(int, os.listdir(tasks))) if os.path.isdir(tasks) else set()


class _Served:
    """An iteration is an epoch, a data set that the service gets anew."""

    def __init__(self, epochs: Epochs, load: Callable, service: str) -> None:
        self.epochs, self.load, self.service = epochs, load, service

    def __iter__(self) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        size, batches = self.epochs.batch_size, [*self.epochs]
        # A graph has to say it all, since no Python runs where the batches are made.
        rows, numbers = (tf.constant(np.concatenate(each)) for each in zip(*batches, strict=True))

        def batch(number):
            part = slice(number * size, (number + 1) * size)
            samples = tf.data.Dataset.from_tensor_slices((rows[part], numbers[part]))
            return samples.map(self.load, tf.data.AUTOTUNE).batch(size)

        # One number is one share of the work: a batch is made whole, by one worker.
        made = tf.data.Dataset.range(len(batches)).flat_map(batch)
        mode = tf.data.experimental.service.ShardingPolicy.DYNAMIC
        sent = made.apply(tf.data.experimental.service.distribute(mode, self.service))
        try:
            for x, y, _ in sent.prefetch(tf.data.AUTOTUNE):
                yield x, y
        except tf.errors.OpError as error:
            raise ValueError(f"the service can't make a batch: {reason_of(error)}") from None


def _check_service(service: str) -> None:
    """Raise unless something answers there: TensorFlow itself would go on asking for an hour."""
    host, _, port = service.partition("://")[2].rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise ValueError(f"no tf.data service answers at {service!r}: {error}") from None


def main() -> None:
    """Print its rate in its second epoch, on 512 photos of 256 pixels."""
    import tempfile

    from shared.photos import make_photos
    from tf_impl.kit import input_rates

    with tempfile.TemporaryDirectory() as name:
        folder = make_photos(f"{name}/photos", images=512, size=256, seed=0)
        loader = tuned_loader(folder, batch_size=32, seed=0)
        print(f"tuned_loader: {input_rates.second_epoch(loader):.0f} samples/s")


if __name__ == "__main__":
    main()
