"""Steps of either framework with a part that is known: built once for all scenarios."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
from itertools import pairwise

import numpy as np

from tests import workers
from tests.diagnosis import BACKWARD, FORWARD

NAME = sys.argv[1]
MODULES = ("profiling", "memory_growth", "bottleneck")
SLEPT: dict[str, list[float]] = {"forward": [], "backward": []}
impl = workers.implementation(NAME, *(f"diagnosis.{name}" for name in MODULES))
# The machine's peak, which each turn of each profile would look for anew.
impl.diagnosis.profiling.peak = functools.cache(impl.diagnosis.profiling.peak)


def forget() -> None:
    """Leave what there is out of all that TensorFlow's profiler goes through for a step's graph."""
    gc.collect()
    gc.freeze()


def nap(seconds: float, part: str) -> None:
    """Sleep, and note how long it really was: a busy machine wakes late."""
    start = time.perf_counter()
    time.sleep(seconds)
    SLEPT.setdefault(part, []).append(time.perf_counter() - start)


def data(inputs: int, size: int):
    """A batch with two classes."""
    random = np.random.default_rng(0)
    x = random.normal(size=(size, inputs)).astype(np.float32)
    return impl.kit.data.to_device(x, random.integers(0, 2, size))


if NAME == "pt":
    import torch
    from torch import distributed as dist
    from torch import nn

    # An operator of two threads waits for the second to wake, milliseconds where cores are shared.
    torch.set_num_threads(1)

    class _Sleep(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            nap(FORWARD, "forward")
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            nap(BACKWARD, "backward")
            return gradient.clone()

    def sleep(x):
        return _Sleep.apply(x)

    def dense(*widths):
        """Dense layers with ReLU between them."""
        torch.manual_seed(0)
        layers = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def convolutional():
        """Strided, dilated and in groups, transposed, and dense: images of 16x16 in 3 channels."""
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.Conv2d(8, 8, 3, groups=8, dilation=2),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.Flatten(),
            nn.Linear(4 * 8 * 8, 2),
        )

    def products():
        """What multiplies: a step, and its batch."""
        a, b = torch.ones(96, 160), torch.ones(160, 224)
        many, more = torch.ones(5, 96, 160), torch.ones(5, 160, 224)
        made = {
            "product": (torch.matmul, (a, b)),
            "transposed": (lambda x, y: x.T @ y.T, (torch.ones(160, 96), torch.ones(224, 160))),
            "batch": (torch.matmul, (many, more)),
            "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), (many, more)),
            "bfloat16": (torch.matmul, (a.bfloat16(), b.bfloat16())),
            "compiled": (torch.compile(torch.matmul, backend="aot_eager"), (a, b)),
            "integers": (torch.matmul, (a.int(), b.int())),
        }
        return made | {"large": (torch.matmul, (torch.ones(768, 768), torch.ones(768, 768)))}

    def table(rows, width):
        torch.manual_seed(0)
        return nn.Sequential(nn.EmbeddingBag(rows, width, mode="mean"), nn.Linear(width, 2))

    def codes(rows, size, length):
        return torch.randint(0, rows, (size, length))

    def optimizer_of(model, rule="sgd"):
        rules = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
        return rules[rule](model.parameters(), lr=1e-3)

    def sleeping_step(model):
        optimizer = optimizer_of(model)

        def step(x, y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(sleep(model(x)), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def with_metric(step, model):
        """A step that compares each prediction with its label in Python."""

        def measured(x, y):
            step(x, y)
            logits = model(x)
            return sum(
                int(row.argmax()) == int(label) for row, label in zip(logits, y, strict=True)
            )

        return measured

    class Exchange:
        """Sums with a peer that comes late to each: another rank in a thread of this process."""

        def __init__(self, late):
            store, self.late, self.groups = dist.HashStore(), late, [None, None]
            self.begun = threading.Semaphore(0)
            peer = threading.Thread(target=self._join, args=(store, 1), daemon=True)
            peer.start()
            self._join(store, 0)
            peer.join()
            threading.Thread(target=self._peer, daemon=True).start()

        def _join(self, store, rank):
            self.groups[rank] = dist.ProcessGroupGloo(store, rank, 2)

        def _peer(self):
            value = torch.ones(4)
            while self.begun.acquire():
                time.sleep(self.late)
                self.groups[1].allreduce([value]).wait()

        def sum(self, value):
            self.begun.release()
            self.groups[0].allreduce([value]).wait()

    def exchanging(step, late):
        exchange, value = Exchange(late), torch.ones(4)

        def exchanged(x, y):
            loss = step(x, y)
            exchange.sum(value)
            return loss

        return exchanged

else:
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    layers = tf.keras.layers

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
                loss = impl.kit.training.cross_entropy(sleep(model(x, training=True)), y)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return step

    def with_metric(step, model):
        """A step that compares each prediction with its label in Python."""

        def measured(x, y):
            step(x, y)
            logits = model(x)
            return sum(
                int(tf.argmax(row)) == int(label) for row, label in zip(logits, y, strict=True)
            )

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
    return impl.kit.training.make_train_step(
        model, optimizer_of(model, rule), impl.kit.training.cross_entropy
    )


def late_batches(batch, seconds):
    """A loader that takes `seconds` for each batch."""

    class Loader:
        def __iter__(self):
            while True:
                time.sleep(seconds)
                yield batch

    return Loader()
