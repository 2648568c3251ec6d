"""TensorFlow's models and words for the tests of pruning."""

import numpy as np
import tensorflow as tf

from tests.compression.teaching import LEFT
from tests.compression.tf_distillation import linear, numpy  # noqa: F401 - the tests take these

keras, layers = tf.keras, tf.keras.layers

ONES = np.ones((2, 9), np.float32)


def masks(model):
    """Canonical name -> mask."""
    calls = {layer.name: vars(layer).get("call") for layer in model.layers}
    ours = {f"{name}.kernel": np.array(c.mask) for name, c in calls.items() if hasattr(c, "mask")}
    return ours or {
        f"{layer.layer.name}.kernel": np.array(mask)
        for layer in model.layers
        for _, mask, _ in getattr(layer, "pruning_vars", ())  # tfmot's
    }


def forward(model, x=LEFT):
    """A pass in training mode."""
    return model(x, training=True)


def zeros(model):
    """The share of zeros of each variable, by name."""
    return {getattr(v, "path", v.name): float((np.array(v) == 0).mean()) for v in model.weights}


def zeros_by_layer(model):
    """The share of zeros of each layer's kernel."""
    kernels = {layer.name: layer.get_weights()[0] for layer in model.layers if layer.weights}
    return {name: float((kernel == 0).mean()) for name, kernel in kernels.items()}


def shared_layers(model, other):
    return set(model._flatten_layers()) & set(other._flatten_layers())


def without_kernels():
    return keras.Sequential([keras.Input((3,)), layers.BatchNormalization()])


class Inside(layers.Layer):
    """A layer in another."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.deep = layers.Dense(4, name="deep")

    def build(self, shape):
        self.deep.build(shape)

    def call(self, x):
        return self.deep(x)


def functional():
    """Two inputs; a function as a layer."""
    a, codes = keras.Input((4,)), keras.Input((), dtype="int64")
    x = layers.Conv1D(6, 1, name="conv")(layers.Reshape((1, 4))(a))
    x = layers.Add()([layers.Flatten()(x), layers.Embedding(5, 6, name="table")(codes)])
    x = layers.LayerNormalization(name="norm")(x)
    x = layers.Activation(lambda values: values)(x)
    return keras.Model([a, codes], {"y": layers.Dense(2, name="head")(x)})


def sequential():
    return keras.Sequential([keras.Input((4,)), layers.Dense(6, "relu"), layers.Dense(2)])


def nested():
    x, inner = keras.Input((4,)), keras.Sequential([keras.Input((4,)), layers.Dense(6, "relu")])
    return keras.Model(x, layers.Dense(2, name="outer")(inner(x)))


def unbuilt():
    return keras.Sequential([layers.Dense(6, "relu"), layers.Dense(2)])


def built_late():
    model = unbuilt()
    model(LEFT)
    return model


INPUTS = {"functional": [LEFT, np.arange(9) % 5]}


def subclassed():
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, x, training=False):
            return self.dense(x)

    model = Subclassed()
    model(LEFT)
    return model


def within():
    x = keras.Input((4,))
    return keras.Model(x, layers.Dense(2)(Inside()(x)))


def twice():
    x, layer = keras.Input((4,)), layers.Dense(4, name="shared")
    return keras.Model(x, layer(layer(x)))


def transposed():
    x = keras.Input((8, 2))
    return keras.Model(x, layers.Conv1DTranspose(3, 3, name="up")(x))


def two_widths():
    """Kernels 1 to 4 of two dtypes."""
    dense = layers.Dense(2, use_bias=False, dtype="float16"), layers.Dense(2, use_bias=False)
    model = keras.Sequential([keras.Input((2,)), *dense])
    model.set_weights([np.arange(1.0, 5.0).reshape(2, 2)] * 2)
    return model


PIXELS = np.random.default_rng(3).normal(size=(9, 16, 16, 3)).astype(np.float32)


def mobile(*between):
    """A model that XNNPACK runs sparsely."""
    x = images = keras.Input((16, 16, 3))
    for layer in (
        layers.ZeroPadding2D(),
        layers.Conv2D(8, 3, 2, name="first"),
        layers.Conv2D(16, 1, activation="relu", name="wide"),
        layers.DepthwiseConv2D(3, padding="same", name="depthwise"),
        *between,
        layers.Conv2D(8, 1, name="narrow"),
        layers.GlobalAveragePooling2D(keepdims=True),
        layers.Flatten(),
        layers.Dense(2, name="head"),
    ):
        x = layer(x)
    return keras.Model(images, x)


def pooled():
    return mobile(layers.MaxPooling2D(2))


def regularized():
    """A regularizer of outputs."""
    regular = layers.Dense(4, "relu", activity_regularizer="l2")
    return keras.Sequential([keras.Input((4,)), regular, layers.Dense(2)])


def adapted():
    """Adapted statistics, a layer that runs twice, a layer in another."""
    keras.utils.set_random_seed(0)
    x, layer, norm = (
        keras.Input((4,)),
        layers.Dense(4, "tanh", name="twice"),
        layers.Normalization(),
    )
    norm.adapt(LEFT * 3 + 5)
    return keras.Model(x, layers.Dense(2, name="head")(Inside()(layer(layer(norm(x))))))


def fit(model, y, begin, end):
    """Losses of Keras's `fit` over four epochs of three steps; called at their begin and end."""
    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_begin=begin, on_train_batch_end=end)]
    model.compile(keras.optimizers.Adam(0.05), "mse")
    settings = {"batch_size": 3, "epochs": 4, "shuffle": False, "verbose": 0}
    return model.fit(LEFT, y, **settings, callbacks=callbacks).history["loss"]


def Grouped():  # noqa: N802 - the twin's class
    """A plain and a grouped convolution, an embedding and a dense layer; two inputs."""
    images, codes = keras.Input((3, 3, 4)), keras.Input((), dtype="int64")
    x = layers.Activation(lambda v: v, name="by_hand")(layers.Conv2D(8, 1, name="conv")(images))
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(8, 1, groups=2, name="grouped")(x))
    x = layers.Add()([x, layers.Embedding(5, 8, name="table")(codes)])
    return keras.Model([images, codes], layers.Dense(3, name="head")(x))
