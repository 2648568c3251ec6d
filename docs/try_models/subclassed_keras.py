"""A subclassed Keras model: a small residual network whose forward pass is Python."""

import numpy as np


def tensorflow():
    import tensorflow as tf
    from tensorflow.keras import layers

    class Residual(tf.keras.layers.Layer):
        def __init__(self, filters):
            super().__init__()
            self.first = layers.Conv2D(filters, 3, padding="same", use_bias=False)
            self.norm = layers.BatchNormalization()
            self.second = layers.Conv2D(filters, 3, padding="same")

        def call(self, x, training=False):
            y = tf.nn.relu(self.norm(self.first(x), training=training))
            return tf.nn.relu(x + self.second(y))

    class Network(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.stem = layers.Conv2D(32, 3, strides=2, padding="same", activation="relu")
            self.residuals = [Residual(32) for _ in range(3)]
            self.pool = layers.GlobalAveragePooling2D()
            self.head = layers.Dense(10)

        def call(self, x, training=False):
            x = self.stem(x)
            for residual in self.residuals:
                x = residual(x, training=training)
            return self.head(self.pool(x))

    return Network(), tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def batch(size=32, seed=0):
    random = np.random.default_rng(seed)
    x = random.standard_normal((size, 48, 48, 3), dtype=np.float32)
    return x, random.integers(0, 10, size)
