"""Mapped input pipeline: decoded photos from arrays on disk that are mapped into memory.

What it changes: images are decoded once, when the arrays are written, and not in every epoch. Of an
image the bytes of its crop are read and no others; what has been read stays in the page cache,
once for all processes. Batches are those of `folder.py`, in its order, with its crops:
float32 images (n, 224, 224, 3) and int64 labels.
`twinbench shards FOLDER TARGET --format arrays` writes the arrays.

Its twin: `pt_impl/input/mapped_arrays.py`.

Where the frameworks differ and why:
- NumPy maps the arrays on both sides: tf.data reads files, and has no operator that maps one. What
  it calls here for a crop is Python, which takes turns with itself; there processes work apart.
- The crop is resized in the graph here, to float32, and there by Pillow, to bytes.

When it helps and when it hurts: it helps where decoding is most of the work and memory is ample:
the arrays take about ten times the space of their JPEG files, and where they don't fit the page
cache the disk decides. Any sample can be had at once, so that no shuffle buffer is needed.

Run it alone: `python -m tf_impl.input.mapped_arrays` prints samples/s.

Copy with it: `shared/epochs.py`, `shared/shards.py`.
"""

import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import tensorflow as tf

from shared.epochs import DRAWS, MEAN, STD, Epochs, ImageForm, crop_box
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
    """`workers` calls of the map at a time, 0 for as many as tf.data finds best, cut crops.

    source: a folder of shards of arrays. All of them are read when this is called, for their
    checksums. on_error: "raise" raises at once where a shard is not what was written; "skip" leaves
    its samples out, which makes their batches smaller, and adds a line for each to the loader's
    list `skipped`. start_batch: batches seen before, over all epochs; the first iteration yields
    exactly what is left of its epoch. A batch of which nothing can be read is not yielded, but
    counts. image_size, mean, std: of the images, as `ImageForm` has them. Yields (x, y); the last
    batch may be smaller.

    Raises ValueError for settings that don't exist and for a damaged shard, with its file and the
    reason, and what `open_shards` raises.
    """
    form = ImageForm(image_size, mean, std)
    images = MappedImages(open_shards(source, "arrays", on_error))
    if images.damaged and on_error == "raise":
        raise ValueError(next(iter(images.damaged.values())))
    epochs = Epochs(images.size, batch_size=batch_size, seed=seed, start_batch=start_batch)
    return _Loader(images, epochs, form, workers or tf.data.AUTOTUNE)


def work_rate(
    source,
    *,
    seed: int,
    part: int = 0,
    parts: int = 1,
    image_size: int = 224,
    mean: tuple = MEAN,
    std: tuple = STD,
) -> Callable[[], float]:
    """Return `measure() -> samples/s`: the work on samples in this process, with nothing around it.

    A call works on every `parts`-th sample of epoch 0, in a loop within one graph. For the limit of
    a pipeline call it in a single-threaded process a core, at once, each with its `part`, and add
    up.
    """
    images = MappedImages(open_shards(source, "arrays"))
    load = _make_load(images, ImageForm(image_size, mean, std))
    epochs = Epochs(images.size, batch_size=1, seed=seed)
    batches = [batch for batch in epochs.batches(0) if images.has(batch[0])[0]][part::parts]
    rows, numbers = (np.concatenate(each) for each in zip(*batches, strict=True))

    def sample(index, seen):
        image, _ = load(tf.gather(rows, index), tf.gather(numbers, index))
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
    """An iteration is an epoch; `skipped` says which samples were left out, and why."""

    def __init__(self, images: MappedImages, epochs: Epochs, form: ImageForm, calls: int) -> None:
        self.skipped: list[str] = []
        self._images, self._epochs = images, epochs
        load, size = _make_load(images, form), epochs.batch_size
        # Python gives the order, a batch at a time, and anew in each epoch.
        specs = (tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, DRAWS], tf.float32))
        batches = tf.data.Dataset.from_generator(self._readable, output_signature=specs)
        if images.has(np.arange(images.size)).all():
            batches = batches.unbatch().map(load, calls).batch(size)
        else:

            def batch(*each):
                return tf.data.Dataset.from_tensor_slices(each).map(load, calls).batch(size)

            # A batch is a data set, so that what is left out makes it smaller and moves no other.
            batches = batches.flat_map(batch)
        self._dataset = batches.prefetch(tf.data.AUTOTUNE)

    def _readable(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """What is there of the next epoch."""
        for rows, numbers in self._epochs:
            there = self._images.has(rows)
            if there.any():
                yield rows[there], numbers[there]

    def __iter__(self) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        damaged, batches = self._images.damaged, iter(self._dataset)
        for rows, _ in self._epochs.batches(self._epochs.epoch, self._epochs.start):
            lost = [row for row in rows.tolist() if row in damaged]
            self.skipped += [f"{damaged[row]}: sample {row:09}" for row in lost]
            if self._images.has(rows).any():
                yield next(batches)


def _make_load(images: MappedImages, form: ImageForm) -> Callable:
    """Return the work on a sample as a graph: load(row, numbers) -> (image, label)."""

    def cut(row, numbers):
        pixels, label = images.image(row)
        top, left, high, wide = crop_box(*pixels.shape[:2], numbers.tolist())
        return pixels[top : top + high, left : left + wide], np.int64(label)

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64), tf.TensorSpec([DRAWS], tf.float32)])
    def load(row, numbers):
        image, label = tf.numpy_function(cut, [row, numbers], (tf.uint8, tf.int64))
        image = tf.ensure_shape(image, [None, None, 3])
        image = tf.cond(numbers[-1] < 0.5, lambda: tf.reverse(image, [1]), lambda: image)
        image = tf.image.resize(image, (form.size, form.size), antialias=True)
        rows = tf.reshape(image, [form.size, 3 * form.size]) * form.scale + form.offset
        return tf.reshape(rows, [form.size, form.size, 3]), tf.ensure_shape(label, [])

    return load


def main() -> None:
    """Print its rate in its second epoch, on 512 photos of 256 pixels."""
    import tempfile

    from shared.conversion import convert
    from shared.photos import make_photos

    with tempfile.TemporaryDirectory() as name:
        folder = make_photos(f"{name}/photos", images=512, size=256, seed=0)
        convert(folder, f"{name}/arrays", form="arrays", samples=64)
        loader = memory_mapped_loader(f"{name}/arrays", batch_size=32, seed=0)
        for _ in range(2):
            start = time.perf_counter()
            rate = sum(len(y) for _, y in loader) / (time.perf_counter() - start)
        print(f"memory_mapped_loader: {rate:.0f} samples/s")


if __name__ == "__main__":
    main()
