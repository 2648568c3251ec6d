"""TensorFlow's models for the tests of mixed precision."""

import tensorflow as tf

from tests.train_step.tf_steps import (  # noqa: F401 - the tests take these
    cast,
    descent,
    difference,
    dtypes,
    kept,
    normal,
    policies,
    squares,
    unbuilt,
)
from tf_impl import kit
from tf_impl.deployment.reduced_precision import make_predict

keras, layers = tf.keras, tf.keras.layers
KEPT_TWICE = "conv0", "head"  # Keras gives a kept layer its policy for one trace
SEEN = {}  # by `Block`: Keras would track a dict of its own


class Block(layers.Layer):
    """A custom layer with layers and a weight."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.left, self.right = layers.Dense(8, name="left"), layers.Dense(8, name="right")

    def build(self, shape):
        self.scale = self.add_weight(shape=(8, 3), initializer="ones", name="scale")

    def call(self, a, b):
        a, b, scale = self.left(a), self.right(b), tf.convert_to_tensor(self.scale)
        for name, tensor in (("left", a), ("right", b), ("block", scale)):
            SEEN[name] = dtypes([tensor])
        return tf.matmul(tf.cast(a, b.dtype) + b, tf.cast(scale, b.dtype)), a, b


class Custom(keras.Model):
    """Two inputs, a dict as output."""

    def __init__(self):
        super().__init__()
        self.block = Block(name="block")

    def call(self, a, b, training=False):
        logits, *pair = self.block(a, b)
        return {"logits": logits, "pair": pair, "scores": None}


def custom(technique, keep):
    """The dtypes of a custom model's parts and outputs, and the losses of its training."""
    model, x = Custom(), (normal(16, 8), normal(16, 8, seed=1))
    model(*x)

    def loss_fn(output, y):
        SEEN["output"] = dtypes([output["logits"], *output["pair"]])
        return kit.training.cross_entropy(output["logits"], y)

    step = technique.make_train_step(model, descent(model), loss_fn, keep_fp32=keep)
    losses = [float(step(x, tf.range(16) % 3)) for _ in range(20)]
    predicted = make_predict(model, keep_fp32=keep)(x)
    assert policies(model) == ["float32"]
    return SEEN | {"predicted": dtypes([predicted["logits"]])}, losses


def statistics(technique, images):
    """Mean and variance of a BatchNorm behind a convolution that changes nothing."""
    norm = layers.BatchNormalization(momentum=0.0)
    same = layers.Conv2D(1, 1, use_bias=False, kernel_initializer="ones")
    model = keras.Sequential([keras.Input(images.shape[1:]), same, norm])
    make = technique.make_train_step
    make(model, descent(model, 0.0), lambda output, y: tf.reduce_mean(output))(images, 0)
    return float(norm.moving_mean[0]), float(norm.moving_variance[0])


def half():
    return keras.Sequential([keras.Input((2,)), layers.Dense(2, dtype="bfloat16")])


def attentive():
    """A functional model of two inputs with a nested model, attention and a GRU."""
    keras.utils.set_random_seed(0)
    a, b, inside = keras.Input((6, 8)), keras.Input((6, 8)), keras.Input((6, 8))
    block = keras.Model(inside, layers.Dense(8)(layers.LayerNormalization()(inside)))
    x = layers.MultiHeadAttention(2, 4)(block(a), block(b))
    x = layers.GRU(8)(layers.Softmax()(layers.Add()([x, a])))
    return keras.Model([a, b], layers.Dense(3)(x))


class Reader(keras.Model):
    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(0)
        self.words, self.head = layers.Embedding(20, 8), layers.Dense(3)

    def call(self, x, training=False):
        return self.head(self.words(x))


class Decorated(Reader):
    call = tf.function(Reader.call)


class Helped(Reader):
    read = tf.function(Reader.call)

    def call(self, x, training=False):
        return self.read(x)
