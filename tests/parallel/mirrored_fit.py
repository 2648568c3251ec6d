"""Prints losses and weights after Keras's `fit`, on one device and on two under MirroredStrategy.

python -m tests.parallel.mirrored_fit tf
"""

import json

import numpy as np
import tensorflow as tf


def fitted(strategy: tf.distribute.Strategy) -> dict:
    """A small model with a loss of its own, after three epochs in the strategy's scope."""
    layers, random = tf.keras.layers, np.random.default_rng(0)
    x, y = random.normal(size=(48, 6)).astype(np.float32), random.integers(0, 4, 48)
    with strategy.scope():
        tf.keras.utils.set_random_seed(0)
        hidden = layers.Dense(8, "tanh", kernel_regularizer=tf.keras.regularizers.L2(0.05))
        model = tf.keras.Sequential([tf.keras.Input((6,)), hidden, layers.Dense(4)])
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.Adam(0.01), loss)
    history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
    found = {"losses": history.history["loss"], "weights": weights.tolist()}
    return found | {"replicas": strategy.num_replicas_in_sync}


def main() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    print(json.dumps({"one": fitted(tf.distribute.get_strategy()), "two": fitted(two)}))


if __name__ == "__main__":
    main()
