"""Photos: the work on one in a graph, and what becomes of a file that can't be read.

Twin: `pt_impl/kit/photos.py`.
Where the frameworks differ: a graph can't catch an error, so a file that can't be read is found
afterwards, by trying each; workers there are Python, which goes on.
"""

import os
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import tensorflow as tf

from shared.epochs import DRAWS, RATIOS, TRIES, Epochs, ImageForm, crop_box

FEATURES = {
    "image/encoded": tf.io.FixedLenFeature([], tf.string),
    "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    "image/row": tf.io.FixedLenFeature([], tf.int64),
}


def make_load(
    paths: list[str], labels: np.ndarray, decoder: str, form: ImageForm, as_bytes: bool = False
) -> Callable:
    """Return the work on a file as a graph: load(row, numbers) -> (image, label, row).

    as_bytes: the image is uint8, and normalised later.
    """
    paths, labels = tf.constant([*map(os.fsencode, paths)]), tf.constant(labels)

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64), tf.TensorSpec([DRAWS], tf.float32)])
    def load(row, numbers):
        image = decode_photo(tf.io.read_file(paths[row]), numbers, form.size, decoder)
        image = tf.cast(tf.round(image), tf.uint8) if as_bytes else normalise(image, form)
        return image, labels[row], row

    return load


def make_mapped_load(images, form: ImageForm) -> Callable:
    """Return the work on a photo of `shared.shards.MappedImages` as a graph.

    load(row, numbers) -> (image, label): the crop is cut by Python, and only that is read.
    """

    def cut(row, numbers):
        pixels, label = images.image(row)
        top, left, high, wide = crop_box(*pixels.shape[:2], numbers.tolist())
        return pixels[top : top + high, left : left + wide], np.int64(label)

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64), tf.TensorSpec([DRAWS], tf.float32)])
    def load(row, numbers):
        crop, label = tf.numpy_function(cut, [row, numbers], (tf.uint8, tf.int64))
        image = flip_and_resize(tf.ensure_shape(crop, [None, None, 3]), numbers, form.size)
        return normalise(image, form), tf.ensure_shape(label, [])

    return load


def load_record(record: tf.Tensor, numbers: tf.Tensor, form: ImageForm) -> tuple:
    """Return image, label and row of a `tf.train.Example`; `numbers`: of all rows in the epoch."""
    example = tf.io.parse_single_example(record, FEATURES)
    row = example["image/row"]
    image = decode_photo(example["image/encoded"], tf.gather(numbers, row), form.size)
    return normalise(image, form), example["image/class/label"], row


def decode_photo(
    jpeg: tf.Tensor, numbers: tf.Tensor, size: int, decoder: str = "standard"
) -> tf.Tensor:
    """Decode, crop, flip and resize a photo: float32 (size, size, 3), values in [0, 255].

    decoder: "standard" decodes the whole image, "fast" what the crop needs of it. numbers: those of
    its row from `shared.epochs.draw`. `tf.image.sample_distorted_bounding_box` draws from another
    distribution than torchvision does.
    """
    height, width, _ = tf.unstack(tf.io.extract_jpeg_shape(jpeg))
    box = graph_crop_box(height, width, tf.cast(numbers, tf.float64))
    settings = {"channels": 3, "dct_method": "INTEGER_ACCURATE"}
    if decoder == "fast":
        image = tf.io.decode_and_crop_jpeg(jpeg, box, **settings)
    else:
        top, left, high, wide = tf.unstack(box)
        image = tf.io.decode_jpeg(jpeg, **settings)[top : top + high, left : left + wide]
    return flip_and_resize(image, numbers, size)


def flip_and_resize(image: tf.Tensor, numbers: tf.Tensor, size: int) -> tf.Tensor:
    """Return the image as float32 (size, size, 3), values in [0, 255], flipped if drawn so."""
    image = tf.cond(numbers[-1] < 0.5, lambda: tf.reverse(image, [1]), lambda: image)
    return tf.image.resize(image, (size, size), antialias=True)


def graph_crop_box(height: tf.Tensor, width: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
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


def normalise(images: tf.Tensor, form: ImageForm) -> tf.Tensor:
    """Return pixels in [0, 255], (..., size, size, 3), less mean and over deviation, float32."""
    # As rows of 3 * size values: over a last axis of three it takes several times as long.
    rows = tf.reshape(tf.cast(images, tf.float32), [-1, 3 * form.size])
    return tf.reshape(rows * form.scale + form.offset, [-1, *images.shape[1:]])


def ordered(epoch: Callable[[], Iterable]) -> tf.data.Dataset:
    """Return (rows, numbers) of each batch: Python gives the order, and anew in each epoch."""
    specs = (tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, DRAWS], tf.float32))
    return tf.data.Dataset.from_generator(epoch, output_signature=specs)


def readable(
    load: Callable, size: int, calls: int | None = None, deterministic: bool | None = None
) -> Callable:
    """Return what makes a data set of one batch of samples, without those that `load` fails on.

    For `flat_map` over batches of at most `size` samples: what is left out makes its batch smaller,
    and moves no sample to another. A batch of which nothing is left is empty.
    """

    def batch(*samples):
        loaded = tf.data.Dataset.from_tensor_slices(samples).map(load, calls, deterministic)
        empty = [tf.zeros([0, *spec.shape], spec.dtype) for spec in loaded.element_spec]
        one = loaded.ignore_errors().batch(size)
        return one.concatenate(tf.data.Dataset.from_tensors(tuple(empty))).take(1)

    return batch


class FolderLoader:
    """Gives batches (x, y) of a folder's files; an iteration is an epoch.

    Attributes:
        skipped: the lines that say which files could not be read, and why.
    """

    def __init__(
        self, batches: tf.data.Dataset, epochs: Epochs, load: Callable, paths: list[str]
    ) -> None:
        """Take batches of (x, y, rows) in the order of `epochs`, and what loads each sample."""
        self.skipped: list[str] = []
        self.batches, self.epochs, self.load, self.paths = batches, epochs, load, paths

    def __iter__(self) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        batches = iter(self.batches)
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
                yield f"{self.paths[row]}: {reason_of(error)}"


def reason_of(error: tf.errors.OpError) -> str:
    """Return an error's message in a line, without the place in the graph."""
    return error.message.partition("[[")[0].strip().splitlines()[-1]


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
