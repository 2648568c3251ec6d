"""Steps of TensorFlow with a part that is known."""

import functools
import json
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tests.diagnosis.naps import BACKWARD, FORWARD, arrays, nap
from tf_impl.diagnosis import bottleneck, memory_growth, profiling  # noqa: F401 - tests use it
from tf_impl.kit import data, examples, training  # noqa: F401 - the same

# The machine's peak, which each turn of each profile would look for anew.
profiling.peak = functools.cache(profiling.peak)
layers = tf.keras.layers
# Two devices exchange, and a loader works beside the step: as many threads as there are cores.
tf.config.threading.set_inter_op_parallelism_threads(0)
tf.config.threading.set_intra_op_parallelism_threads(0)
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)


def _pause(x, seconds, part):
    def wait(value):
        nap(seconds, part)
        return value

    value = tf.numpy_function(wait, [x], x.dtype)
    value.set_shape(x.shape)
    return value


@tf.custom_gradient
def sleep(x):
    def backward(gradient):
        with tf.name_scope("gradient_tape"):
            return _pause(gradient, BACKWARD, "backward")

    return _pause(x, FORWARD, "forward"), backward


def dense(*widths):
    """Dense layers with ReLU between them."""
    tf.keras.utils.set_random_seed(0)
    inner = [layers.Dense(width, activation="relu") for width in widths[1:-1]]
    model = tf.keras.Sequential([*inner, layers.Dense(widths[-1])])
    model(np.zeros((1, widths[0]), np.float32))
    return model


def convolutional():
    """Strided, dilated and in groups, transposed, and dense: images of 16x16 in 3 channels."""
    model = tf.keras.Sequential(
        [
            layers.Conv2D(8, 3, strides=2, padding="same"),
            layers.DepthwiseConv2D(3, dilation_rate=2),
            layers.Conv2DTranspose(4, 2, strides=2),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )
    model(np.zeros((1, 16, 16, 3), np.float32))
    return model


def products():
    """What multiplies: a step, and its batch."""
    a, b = tf.ones((96, 160)), tf.ones((160, 224))
    many, more = tf.ones((5, 96, 160)), tf.ones((5, 160, 224))
    product = tf.function(tf.matmul)
    large, rows = tf.ones((768, 768)), tf.TensorSpec((None, None))

    def thrice(x, y):
        return tf.while_loop(
            lambda i, _: i < 3,
            lambda i, z: (i + 1, z + product(x, y)),
            (0, tf.zeros((96, 224))),
        )

    made = {
        "product": (tf.function(tf.matmul), (a, b)),
        "transposed": (
            tf.function(lambda x, y: tf.matmul(x, y, transpose_a=True, transpose_b=True)),
            (tf.ones((160, 96)), tf.ones((224, 160))),
        ),
        "batch": (tf.function(tf.matmul), (many, more)),
        "einsum": (
            tf.function(lambda x, y: tf.einsum("...ij,...jk->...ik", x, y)),
            (many, more),
        ),
        "bfloat16": (
            tf.function(tf.matmul),
            (tf.cast(a, tf.bfloat16), tf.cast(b, tf.bfloat16)),
        ),
        "fused": (tf.function(lambda x, y: tf.nn.relu(x @ y + tf.ones(224))), (a, b)),
        "called in a loop": (tf.function(thrice), (a, b)),
        "alike": (tf.function(lambda x, y: tf.matmul(x, y, transpose_b=True)), (a, a)),
        "without a graph": (tf.matmul, (a, b)),
        "of any length": (tf.function(tf.matmul, input_signature=[rows, rows]), (a, b)),
        "integers": (tf.function(tf.matmul), (tf.cast(a, tf.int32), tf.cast(b, tf.int32))),
    }
    return made | {"large": (tf.function(tf.matmul), (large, large))}


def table(rows, width):
    tf.keras.utils.set_random_seed(0)
    pooled = layers.GlobalAveragePooling1D()
    model = tf.keras.Sequential([layers.Embedding(rows, width), pooled, layers.Dense(2)])
    model(np.zeros((1, 4), np.int32))
    return model


def codes(rows, size, length):
    return tf.random.uniform((size, length), 0, rows, tf.int32)


def optimizer_of(model, rule="sgd"):
    rules = {"sgd": tf.keras.optimizers.SGD, "adam": tf.keras.optimizers.Adam}
    optimizer = rules[rule](1e-3)
    optimizer.build(model.trainable_variables)
    return optimizer


def sleeping_step(model):
    optimizer = optimizer_of(model)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = training.cross_entropy(sleep(model(x, training=True)), y)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def with_metric(step, model):
    """A step that compares each prediction with its label in Python."""

    def measured(x, y):
        step(x, y)
        logits = model(x)
        return sum(int(tf.argmax(row)) == int(label) for row, label in zip(logits, y, strict=True))

    return measured


def exchanging(step, late):
    """Sums with a peer that comes late to each: another device, fed by another thread."""
    begun = threading.Semaphore(0)

    def sum_on(device, value):
        with tf.device(f"CPU:{device}"):
            return tf.raw_ops.CollectiveReduceV2(
                input=value,
                group_size=2,
                group_key=7,
                instance_key=11,
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
            )

    def peer():
        while begun.acquire():
            time.sleep(late)
            sum_on(1, tf.ones(4))

    threading.Thread(target=peer, daemon=True).start()

    def exchanged(x, y):
        loss = step(x, y)
        begun.release()
        sum_on(0, tf.ones(4))
        return loss

    return exchanged


def plain_step(model, rule="sgd"):
    """The kit's step."""
    optimizer = optimizer_of(model, rule)
    return training.make_train_step(model, optimizer, training.cross_entropy)


def batch(inputs, size):
    return data.to_device(*arrays(inputs, size))


# What a profile leaves


def read_log(path):
    """The names of events in a log of TensorBoard's."""
    planes = xplane_pb2.XSpace.FromString(path.read_bytes()).planes
    return {entry.name for plane in planes for entry in plane.event_metadata.values()}


def opened(log):
    """The operators that TensorBoard's plug-in finds in a log; skips where it is not installed."""
    convert = pytest.importorskip(
        "xprof.convert.raw_to_tool_data", reason="needs pip install '.[readers]'"
    )
    table = json.loads(convert.xspace_to_tool_data([str(log)], "framework_op_stats", {})[0])[0]
    names = [column["id"] for column in table["cols"]]
    return [row["c"][names.index("type")]["v"] for row in table["rows"]]


# Of TensorFlow alone


def prepared_batches():
    """What is prepared in the background by another operator."""

    def prepare(number):
        x = tf.ones((300, 300)) * tf.cast(number, tf.float32)
        return tf.reduce_sum(tf.linalg.cholesky(x @ x + 1e6 * tf.eye(300)))

    numbers = tf.data.Dataset.range(1_000).map(prepare, num_parallel_calls=1).prefetch(4)
    return ((number,) for number in numbers)


def without_a_graph():
    """Two products that Python calls by themselves, and one in a function; batches of tf.data."""
    product = tf.function(tf.matmul)
    batches = tf.data.Dataset.from_tensors(tf.ones((64, 64)))
    return lambda x: product(tf.tanh(x @ x) @ x, x), batches


def by_xla():
    return tf.function(lambda x, y: x @ tf.transpose(x), jit_compile=True)


def leaking():
    """A step that is traced anew for each number, and how many calls are a round."""
    numbers = iter(range(10_000))

    @tf.function
    def traced(x, number):
        for _ in range(20):
            x = tf.nn.relu(x) * number
        return x

    return lambda x, y: traced(x, next(numbers)), 3


def _model_of(flavour):
    hidden = [flavour.layers.Dense(width, activation="relu") for width in (128, 128)]
    model = flavour.Sequential([*hidden, flavour.layers.Dense(10)])
    model.build((None, 64))
    return model, flavour.losses.SparseCategoricalCrossentropy(from_logits=True)


def loop(flavour, optimizer=None):
    """A step of one's own in either Keras, with an optimizer of a user's."""
    model, loss_fn = _model_of(flavour)
    optimizer = optimizer or type("Users", (flavour.optimizers.Adam,), {})()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def loop_of_an_old_optimizer(flavour):
    return loop(flavour, flavour.optimizers.legacy.SGD())


def compiled(flavour):
    model, loss_fn = _model_of(flavour)
    settings = {"jit_compile": False} if flavour.__name__ == "keras" else {}
    model.compile("adam", loss_fn, **settings)
    return model.train_on_batch
