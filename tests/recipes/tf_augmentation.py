"""TensorFlow's words for the tests of augmentation."""

import itertools

import numpy as np
import tensorflow as tf

from tests.recipes.tf_recipes import gradient_at, tensor  # noqa: F401 - the tests take these

image = tensor


def back(x):
    return np.array(x).astype(np.float32)


def cast(x, dtype):
    return tf.cast(x, dtype)


def generator(seed):
    return tf.random.Generator.from_seed(seed)


def copy_state(one, other, folder):
    path = tf.train.Checkpoint(random=one).write(str(folder / "random"))
    tf.train.Checkpoint(random=other).read(path).assert_consumed()


def in_another_layout(x, transform):
    """What a graph makes of images of unknown shape."""
    spec = tf.TensorSpec([None, None, None, 3])
    return tf.function(transform, input_signature=[spec])(x)


def sample_cross_entropy(outputs, labels):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)


def dataset(technique, data, policy, seed):
    pairs = tf.data.Dataset.from_tensor_slices(data).batch(4)
    return technique.augmented_dataset(pairs, policy, seed=seed)


def epochs_of(technique, data, policy, seed, count):
    """The batches of each epoch."""
    batches = dataset(technique, data, policy, seed)
    return [list(batches) for _ in range(count)]


def resumed(technique, data, policy, folder):
    """The images from the fourth batch of the second epoch on, of a place that was saved."""
    one, other = (iter(dataset(technique, data, policy, 1).repeat()) for _ in range(2))
    for _ in range(11):
        next(one)
    path = tf.train.Checkpoint(iterator=one).write(str(folder / "place"))
    tf.train.Checkpoint(iterator=other).read(path).assert_consumed()
    return [x for x, _ in itertools.islice(other, 5)]


def augmented(technique, policy, *parts):
    """The batches of four of these parts."""
    whole = tf.data.Dataset.from_tensor_slices(parts if len(parts) > 1 else parts[0])
    return list(technique.augmented_dataset(whole.batch(4), policy))
