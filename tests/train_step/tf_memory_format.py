"""TensorFlow's models for the tests of memory format."""

from contextlib import contextmanager
from unittest import mock

import numpy as np
import tensorflow as tf

from tests.train_step.tf_steps import KERAS_3, dense, normal  # noqa: F401 - the tests take these
from tf_impl import kit
from tf_impl.kit import operators, rebuilding  # noqa: F401
from tf_impl.kit.checks import memory_format as checks

keras, layers = tf.keras, tf.keras.layers
DEFAULT = "channels_last"


def counts(number):
    """Of `number` convolutions: forward, and backward twice, but for the first one's input."""
    return 3 * number - 1, number


@contextmanager
def by_xla():
    """XLA takes any format: the device is not tried, and copies are compared under XLA."""
    compiled = tf.function(lambda model, x: model(x, training=False), jit_compile=True)
    with (
        mock.patch.object(checks, "try_convolution", return_value=None),
        mock.patch.object(rebuilding, "_outputs", compiled),
    ):
        yield


def network(memory_format):
    """Images and codes in, branches that meet, and every kind of layer that is known."""
    axis = -1 if memory_format == "channels_last" else 1
    images = (8, 10, 3) if memory_format == "channels_last" else (3, 8, 10)
    keras.utils.set_random_seed(0)
    given = {"data_format": memory_format}
    a, b = keras.Input(images, name="a"), keras.Input((4,), name="b")
    x = layers.ZeroPadding2D(((1, 0), (0, 2)), name="pad", **given)(a)
    x = layers.Conv2D(4, 3, activation="relu", name="conv", **given)(x)
    y = layers.BatchNormalization(axis=axis, name="norm")(x)
    y = layers.DepthwiseConv2D(3, padding="same", name="depthwise", **given)(y)
    x = layers.Concatenate(axis=axis, name="both")([layers.ReLU()(x), y])
    x = layers.Add()([x, layers.Dropout(0.0)(x)])
    x = layers.MaxPooling2D(2, **given)(x)
    x = layers.Conv2DTranspose(2, 2, strides=2, name="up", **given)(x)
    x = layers.Flatten(name="flat", **given)(x)
    x = layers.Concatenate(name="all")([x, b])
    return keras.Model([a, b], layers.Dense(3, name="head")(x), name="two")


def one_step(model, x, y):
    """Loss, gradients and statistics of one step under XLA."""

    @tf.function(jit_compile=True)
    def step():
        with tf.GradientTape() as tape:
            loss = kit.training.cross_entropy(model(x, training=True), y)
        return loss, *tape.gradient(loss, model.trainable_variables)

    tensors = (*step(), *model.non_trainable_variables)
    return [np.array(tf.convert_to_tensor(tensor)) for tensor in tensors]


def formats(model):
    return {layer.data_format for layer in model.layers if hasattr(layer, "data_format")}


def pixels():
    """A convolution."""
    inputs = keras.Input((8, 8, 2))
    return keras.Model(inputs, layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3)(inputs)))


def adapted():
    """Normalization of images and of codes."""
    drawn = 5.0 + 3.0 * np.array(normal(40, 8, 8, 2))
    images, codes = layers.Normalization(), layers.Normalization()
    images.adapt(drawn)
    codes.adapt(drawn[:, 0, 0])
    a, b = keras.Input((8, 8, 2)), keras.Input((2,))
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3)(images(a)))
    return keras.Model([a, b], layers.Concatenate()([x, codes(b)]))


def sequences():
    """Conv1D and Conv3D beside images: they stay as they are."""
    a, b, c = keras.Input((8, 8, 2)), keras.Input((9, 3)), keras.Input((4, 5, 6, 2))
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3)(a))
    y = layers.Flatten()(layers.AveragePooling1D(2)(layers.Conv1D(4, 3)(b)))
    z = layers.GlobalMaxPooling3D()(layers.Conv3D(3, 2)(c))
    return keras.Model({"a": a, "b": b, "c": c}, [layers.Concatenate()([x, y, z]), y])


def by_operators():
    """Excitation as MobileNetV3 has it, with a layer that is called twice.

    Operators are layers of functions in tf_keras.
    """
    a = keras.Input((8, 8, 2))
    shared = layers.Conv2D(2, 3, padding="same", groups=2)
    x = layers.Rescaling(2.0, 0.5)(shared(shared(a)))
    y = layers.Conv2D(2, 1)(layers.GlobalAveragePooling2D(keepdims=True)(x))
    x = layers.Multiply()([x, layers.ReLU(6.0)(y + 3.0) * (1.0 / 6.0)])
    return keras.Model(a, layers.GlobalAveragePooling2D()(layers.Conv2D(3, 3)(x)))


def by_a_lambda():
    made = pixels()
    lengths = layers.Lambda(lambda x: tf.nn.l2_normalize(x, -1))(made.output)
    return keras.Model(made.input, lengths)


def without_images():
    return keras.Sequential([keras.Input((9, 3)), layers.Conv1D(4, 3)])


def difference(technique, model) -> float:
    """The largest difference of a copy in channels_first, relative to the largest output."""
    copy = technique.apply_memory_format(model, memory_format="channels_first")

    def example(tensor):  # as many samples as the technique tries, so that XLA is done
        return tf.random.stateless_normal([2, *tensor.shape[1:]], seed=(1, 2)) + 2.0

    x = tf.nest.map_structure(example, model.input)
    turned = technique.convert_batch(x, memory_format="channels_first")
    if isinstance(x, dict):  # volumes and sequences are the same in both
        turned |= {name: x[name] for name in ("b", "c")}
    outputs = [
        tf.nest.flatten(rebuilding._outputs(one, given))
        for one, given in ((model, x), (copy, turned))
    ]
    return max(
        float(np.abs(a - (tf.transpose(b, (0, 2, 3, 1)) if b.ndim == 4 else b)).max())
        / float(np.abs(a).max())
        for a, b in zip(*outputs, strict=True)
    )


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.conv = layers.Conv2D(2, 3)

    def call(self, inputs):
        return self.conv(inputs)


def subclassed():
    model = Subclassed()
    model(tf.zeros((1, 8, 8, 2)))
    return model


def over(layer):
    """`layer` above a convolution."""
    return keras.Sequential([keras.Input((8, 8, 2)), layers.Conv2D(2, 3), layer])


def nested():
    inside = keras.Sequential([keras.Input((8, 8, 2)), layers.Conv2D(2, 3)])
    return keras.Sequential([keras.Input((8, 8, 2)), inside])
