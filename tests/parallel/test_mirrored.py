"""Keras's `fit` and steps on two devices under MirroredStrategy, beside one device."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from shared.specs import TASKS

FRAMEWORKS = ("tf",)
BAR = TASKS["digits-cnn"].parity


@pytest.fixture(scope="module")
def tf(impl):
    """TensorFlow, whose CPU is two devices."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf


@pytest.fixture(scope="module")
def two(tf):
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(scope="module")
def data_parallel(tf):
    from tf_impl.parallel import data_parallel

    return data_parallel


def fitted(tf, strategy, mixin, teach):
    """Losses and weights of a small model with a loss of its own, after three epochs."""

    class Model(mixin, tf.keras.Model):
        """As users make it."""

    layers, random = tf.keras.layers, np.random.default_rng(0)
    x, y = random.normal(size=(48, 6)).astype(np.float32), random.integers(0, 4, 48)
    with strategy.scope():
        tf.keras.utils.set_random_seed(0)
        hidden = layers.Dense(8, "tanh", kernel_regularizer=tf.keras.regularizers.L2(0.05))
        inputs = tf.keras.Input((6,))
        model = Model(inputs, layers.Dense(4)(hidden(inputs)))
        if teach:
            model.learn_from(tf.keras.Sequential([tf.keras.Input((6,)), layers.Dense(4)]))
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.Adam(0.01), loss)
    history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
    return history.history["loss"], weights


@pytest.mark.parametrize("kind", ["accumulated", "taught"])
def test_fit_equals_fit_on_one_device(tf, two, kind):
    from tf_impl.compression.distillation import DistilledTraining
    from tf_impl.train_step.gradient_accumulation import AccumulatedTraining

    assert two.num_replicas_in_sync == 2
    mixin = AccumulatedTraining if kind == "accumulated" else DistilledTraining
    one, both = (
        fitted(tf, strategy, mixin, kind == "taught")
        for strategy in (tf.distribute.get_strategy(), two)
    )
    for ours, theirs in zip(both, one, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=BAR, atol=1e-6)
    losses, _ = both
    assert losses[-1] < losses[0]


def test_shards_of_fewer_samples_than_micro_batches_change_nothing(tf, data_parallel):
    def build():
        parts = tf.keras.layers.Dense(4), tf.keras.layers.BatchNormalization()
        model = tf.keras.Sequential([tf.keras.Input((6,)), *parts])
        loss_fn = lambda y, labels: tf.reduce_mean((y - labels) ** 2)  # noqa: E731
        return model, tf.keras.optimizers.SGD(0.1), loss_fn

    model, optimizer, _ = data_parallel.one_process(build)
    step = data_parallel.make_train_step(model, optimizer, build()[2], micro_batches=2)
    batches = tf.data.Dataset.from_tensors((tf.ones((2, 6)), tf.ones((2, 4))))
    before = model.get_weights()
    (((x, y), samples),) = data_parallel.distribute(model, batches)
    message = "too few samples of a replica for 2 micro-batches"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        step(x, y, samples)
    assert all(map(np.array_equal, model.get_weights(), before))


def test_an_argument_that_is_none_goes_to_every_replica_and_micro_batch(tf, two, data_parallel):
    class Optional(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = tf.keras.layers.Dense(2, kernel_initializer="ones")

        def call(self, x, offset=None):
            return self.layer(x)

    losses, numbers = [], tf.reshape(tf.range(12.0), (4, 3))
    for x in (numbers, {"offset": None, "x": numbers}):
        with two.scope():
            model, optimizer = Optional(), tf.keras.optimizers.SGD(0.1)
            model(numbers)
            optimizer.build(model.trainable_variables)
        given = model, optimizer, lambda y, _: tf.reduce_mean(y**2)
        step = data_parallel.make_train_step(*given, micro_batches=2)
        batches = tf.data.Dataset.from_tensors((x, tf.zeros(4)))
        (((own_x, own_y), samples),) = data_parallel.distribute(model, batches)
        losses.append(float(step(own_x, own_y, samples)))
    assert losses[0] == losses[1] > 0


def test_a_share_of_double_precision_is_of_double_precision(tf, two, data_parallel):
    """The kernel after steps of five samples, in parts and by one device."""
    random, found = np.random.default_rng(0), []
    x, y, kernel = (random.normal(size=size) for size in ((5, 4), (5, 2), (4, 2)))
    loss_fn = lambda output, labels: tf.reduce_mean((output - labels) ** 2)  # noqa: E731
    for parts in (1, 2, None):
        with two.scope() if parts else contextlib.nullcontext():
            layer = tf.keras.layers.Dense(2, use_bias=False, dtype="float64")
            model = tf.keras.Sequential([tf.keras.Input((4,), dtype="float64"), layer])
            optimizer = tf.keras.optimizers.SGD(0.1)
            optimizer.build(model.trainable_variables)
        model.set_weights([kernel])
        for _ in range(3):
            if parts:
                step = data_parallel.make_train_step(model, optimizer, loss_fn, micro_batches=parts)
                batches = tf.data.Dataset.from_tensors((x, y))
                (((own_x, own_y), samples),) = data_parallel.distribute(model, batches)
                step(own_x, own_y, samples)
            else:
                with tf.GradientTape() as tape:
                    loss = loss_fn(model(x), y)
                optimizer.apply_gradients([(tape.gradient(loss, layer.kernel), layer.kernel)])
        found.append(model.get_weights()[0])
    for kernel in found[:2]:
        np.testing.assert_allclose(kernel, found[2], rtol=1e-13)
