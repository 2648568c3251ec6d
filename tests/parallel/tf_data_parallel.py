"""TensorFlow's models of the tests of data parallelism; each build is (model, optimizer, loss)."""

import contextlib
import os
from pathlib import Path

import tensorflow as tf

from tests.parallel.replicas import tf_config
from tf_impl.kit import examples, models, replicas, training

OTHER = {"variant": "one_process", "processes": 1}  # beside processes
LACKING = "tpu"  # this machine lacks something for it
keras, layers = tf.keras, tf.keras.layers


def digits():
    """The digits CNN, in a process that notes how many threads it has."""
    with Path(os.environ["THREADS_SEEN"]).open("a") as file:
        file.write(f"{tf.config.threading.get_intra_op_parallelism_threads()}\n")
    return examples.digits_cnn()


class Mixed(keras.Model):
    """Two inputs by name, a weight used twice, and losses of the model's own."""

    def __init__(self, sparse):
        super().__init__()
        penalty = keras.regularizers.L2(0.05)
        self.codes = layers.Embedding(12, 8, embeddings_regularizer=penalty, name="codes")
        self.numbers = layers.Dense(8, kernel_regularizer=penalty, name="numbers")
        self.up, self.down = layers.Dense(16, "relu", name="up"), layers.Dense(8, name="down")
        self.rest = layers.Embedding(12, 8, name="rest") if sparse else None  # its gradient is

    def call(self, numbers, codes, training=None):
        found = self.codes(codes) + self.rest(codes) if self.rest else self.codes(codes)
        x = tf.reduce_mean(found, 1) + self.numbers(numbers)
        return (x + self.down(self.up(x))) @ tf.transpose(self.codes.embeddings)


def mixed():
    return _mixed(sparse=True)


def all_dense():
    """Without an embedding whose gradient is sparse."""
    return _mixed(sparse=False)


def _mixed(sparse):
    keras.utils.set_random_seed(0)
    model = Mixed(sparse)
    model(tf.zeros([1, 6]), tf.zeros([1, 4], tf.int64))
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    return model, optimizer, training.cross_entropy


def masks():
    """The gradient of a row is the dropout mask of the sample that is this row of the identity."""
    dense = layers.Dense(64, use_bias=False, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((8,)), dense, layers.Dropout(0.5)])
    optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
    optimizer.build(model.trainable_variables)
    return model, optimizer, lambda output, y: tf.reduce_mean(output)


def small():
    """Where what trains does not matter, and has to take little time."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    return model, keras.optimizers.SGD(0.1), training.cross_entropy


def by_path(model):
    """Variables by their paths in the model."""
    return {weight.path.removeprefix(f"{model.name}/"): weight for weight in model.weights}


def plain(build, x, y, batches):
    """(weights, losses) of plain TensorFlow."""
    model, optimizer, _ = build()
    losses, cross_entropy = [], keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for rows in batches:
        with tf.GradientTape() as tape:
            logits = model(x["numbers"][rows], x["codes"][rows], training=True)
            loss = cross_entropy(y[rows], logits) + sum(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        losses.append(float(loss))
    return {name: weight.numpy() for name, weight in by_path(model).items()}, losses


def own_layout(images):
    return images


def canonical(weights):
    """Those of a digits CNN by the names that both frameworks share."""
    model, _, _ = examples.digits_cnn()
    for name, weight in by_path(model).items():
        weight.assign(weights[name])
    return models.export_weights(model)


def warn(monkeypatch, port, other):
    """What says that others can reach what listens at a port: who waits for the others."""
    hosts = [f"127.0.0.1:{each}" for each in (port, other)]
    monkeypatch.setenv("TF_CONFIG", tf_config(hosts))
    with contextlib.suppress(Exception):
        replicas.join(timeout_s=0.2)


# In one process


def trained_by(optimizer, **settings):
    """A build of the mixed model with this optimizer."""

    def build():
        model, _, loss_fn = mixed()
        return model, optimizer(**settings), loss_fn

    return build


def sgd(**settings):
    return trained_by(keras.optimizers.SGD, learning_rate=0.1, **settings)


def scaling():
    inner = keras.optimizers.SGD(0.1)
    return trained_by(keras.mixed_precision.LossScaleOptimizer, inner_optimizer=inner)
