"""Prints losses and weights after Keras's `fit`, on one device and on two under MirroredStrategy.

python -m tests.parallel.mirrored_fit tf
"""

import contextlib
import json

import numpy as np
import tensorflow as tf

from tf_impl.compression.distillation import DistilledTraining
from tf_impl.parallel import data_parallel
from tf_impl.train_step.gradient_accumulation import AccumulatedTraining


class Accumulated(AccumulatedTraining, tf.keras.Model):
    """In four micro-batches."""


class Taught(DistilledTraining, tf.keras.Model):
    """A student of `fit`."""


def fitted(strategy: tf.distribute.Strategy, kind: type) -> dict:
    """A small model with a loss of its own, after three epochs in the strategy's scope."""
    layers, random = tf.keras.layers, np.random.default_rng(0)
    x, y = random.normal(size=(48, 6)).astype(np.float32), random.integers(0, 4, 48)
    with strategy.scope():
        tf.keras.utils.set_random_seed(0)
        hidden = layers.Dense(8, "tanh", kernel_regularizer=tf.keras.regularizers.L2(0.05))
        inputs = tf.keras.Input((6,))
        model = kind(inputs, layers.Dense(4)(hidden(inputs)))
        if kind is Taught:
            model.learn_from(tf.keras.Sequential([tf.keras.Input((6,)), layers.Dense(4)]))
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.Adam(0.01), loss)
    history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
    found = {"losses": history.history["loss"], "weights": weights.tolist()}
    return found | {"replicas": strategy.num_replicas_in_sync}


def too_few() -> dict:
    """What a step of two micro-batches says to shards of one sample, and whether weights stay."""
    layers = tf.keras.layers

    def build():
        parts = layers.Dense(4), layers.BatchNormalization()
        model = tf.keras.Sequential([tf.keras.Input((6,)), *parts])
        return (
            model,
            tf.keras.optimizers.SGD(0.1),
            lambda y, labels: tf.reduce_mean((y - labels) ** 2),
        )

    model, optimizer, _ = data_parallel.one_process(build)
    step = data_parallel.make_train_step(model, optimizer, build()[2], micro_batches=2)
    batches = tf.data.Dataset.from_tensors((tf.ones((2, 6)), tf.ones((2, 4))))
    before, said = model.get_weights(), ""
    try:
        for (x, y), samples in data_parallel.distribute(model, batches):
            step(x, y, samples)
    except tf.errors.InvalidArgumentError as error:
        said = str(error)
    return {"said": said, "kept": all(map(np.array_equal, model.get_weights(), before))}


def losses_with_none(strategy: tf.distribute.Strategy) -> list[float]:
    """Losses of micro-batches of a dict, without a None in it and with one at its head."""

    class Optional(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = tf.keras.layers.Dense(2, kernel_initializer="ones")

        def call(self, x, offset=None):
            return self.layer(x)

    found, numbers = [], tf.reshape(tf.range(12.0), (4, 3))
    for x in (numbers, {"offset": None, "x": numbers}):
        with strategy.scope():
            model, optimizer = Optional(), tf.keras.optimizers.SGD(0.1)
            model(numbers)
            optimizer.build(model.trainable_variables)
        given = model, optimizer, lambda y, _: tf.reduce_mean(y**2)
        step = data_parallel.make_train_step(*given, micro_batches=2)
        batches = tf.data.Dataset.from_tensors((x, tf.zeros(4)))
        for (own_x, own_y), samples in data_parallel.distribute(model, batches):
            found.append(float(step(own_x, own_y, samples)))
    return found


def double_precision(strategy: tf.distribute.Strategy) -> list:
    """The kernel of a float64 model after steps of five samples, in parts and by one device."""
    random, found = np.random.default_rng(0), []
    x, y, kernel = (random.normal(size=size) for size in ((5, 4), (5, 2), (4, 2)))
    for parts in (1, 2, None):
        with strategy.scope() if parts else contextlib.nullcontext():
            layer = tf.keras.layers.Dense(2, use_bias=False, dtype="float64")
            model = tf.keras.Sequential([tf.keras.Input((4,), dtype="float64"), layer])
            optimizer = tf.keras.optimizers.SGD(0.1)
            optimizer.build(model.trainable_variables)
        model.set_weights([kernel])
        loss_fn = lambda output, labels: tf.reduce_mean((output - labels) ** 2)  # noqa: E731
        for _ in range(3):
            if parts:
                step = data_parallel.make_train_step(model, optimizer, loss_fn, micro_batches=parts)
                batches = tf.data.Dataset.from_tensors((x, y))
                for (own_x, own_y), samples in data_parallel.distribute(model, batches):
                    step(own_x, own_y, samples)
            else:
                with tf.GradientTape() as tape:
                    loss = loss_fn(model(x), y)
                optimizer.apply_gradients([(tape.gradient(loss, layer.kernel), layer.kernel)])
        found.append(model.get_weights()[0].tolist())
    return found


def main() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    found = {}
    for kind in (Accumulated, Taught):
        found[kind.__name__] = [fitted(each, kind) for each in (tf.distribute.get_strategy(), two)]
    found |= {"too few": too_few(), "losses with None": losses_with_none(two)}
    found["double precision"] = double_precision(two)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
