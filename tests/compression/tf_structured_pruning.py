"""TensorFlow's models and words for the tests of structured pruning."""

import numpy as np
import tensorflow as tf

from tests.compression.tf_distillation import numpy  # noqa: F401 - the tests take it
from tf_impl.compression import pruning

keras, layers = tf.keras, tf.keras.layers


def widths(model):
    """The shape of each weight, by its layer and its number there."""
    return {
        f"{layer.name}.{number}": list(weight.shape)
        for layer in model.layers
        for number, weight in enumerate(layer.get_weights())
    }


def finite(model, x):
    return bool(np.isfinite(np.array(model(x))).all())


def branches(weights, images):
    """Two inputs, a sum, a product, groups, a concatenation, flattened pixels, two outputs.

    The model with such weights, and its inputs.
    """
    x, scale = keras.Input((8, 8, 3), name="images"), keras.Input((1, 1, 1), name="scale")
    inputs, same = {"images": x, "scale": scale}, {"padding": "same"}
    x = layers.Conv2D(8, 3, **same, name="stem")(x)
    left = layers.Conv2D(8, 3, **same, name="left")(layers.ReLU()(x))
    x = x + layers.Multiply()([left, scale])
    deep = layers.DepthwiseConv2D(3, **same, use_bias=False, name="deep")(x)
    parts = (
        layers.Conv2D(12, 1, groups=2, name="grouped")(deep),
        layers.Conv2D(6, 1, name="point")(x),
    )
    x = layers.BatchNormalization(epsilon=1e-3, name="norm")(layers.Concatenate()(parts))
    x = layers.Flatten()(layers.MaxPooling2D(4)(x))
    x = layers.Dense(10, "relu", name="hidden")(x)
    outputs = {"y": layers.Dense(4, name="head")(x), "more": (layers.Dense(2, name="more")(x),)}
    model = keras.Model(inputs, outputs)
    for layer in model.layers:
        kinds = ("kernel", "bias", "gamma", "beta", "mean", "variance")
        values = [weights.get(f"{layer.name}.{kind}") for kind in kinds]
        if layer.get_weights():
            layer.set_weights([value for value in values if value is not None])
    return model, {"images": images, "scale": np.ones((len(images), 1, 1, 1), np.float32)}


def results(model, x):
    outputs = model(x, training=False)
    return [np.array(outputs["y"]), np.array(outputs["more"][0])]


def kernels(model):
    """The shape of each kernel, as PyTorch has it."""
    shapes = {}
    for layer in model.layers:
        if layer.get_weights() and layer.name != "norm":
            *window, reads, makes = layer.get_weights()[0].shape
            order = (reads, makes) if layer.name == "deep" else (makes, reads)
            shapes[layer.name] = [*order, *window]
    return shapes


# Models of other construction: each takes ROWS


ROWS = np.random.default_rng(2).normal(2.0, 3.0, (4, 6, 5)).astype(np.float32)


def Attention():  # noqa: N802 - the twin's class
    inputs = keras.Input((6, 5))
    x = layers.Dense(8, name="tokens")(inputs)
    y = layers.LayerNormalization(name="norm")(x)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 3, name="attention")(y, y)])
    y = layers.Dense(12, "gelu", name="up")(layers.LayerNormalization(name="norm2")(x))
    x = layers.Add()([x, layers.Dense(8, name="down")(y)])
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def Recurrent():  # noqa: N802 - the twin's class
    inputs = keras.Input((6, 5))
    x = layers.LSTM(6)(layers.Dense(8, name="up")(inputs))
    return keras.Model(inputs, layers.Dense(3)(layers.Dense(8, "relu", name="hidden")(x)))


def norms():
    inputs = keras.Input((6, 5))
    x = layers.Conv1D(8, 3, name="conv")(inputs)
    x = layers.GroupNormalization(2, name="groups")(x)
    x = layers.Conv1DTranspose(4, 2, name="transposed")(layers.Activation("gelu")(x))
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))


def twice():
    """A layer reads what it makes."""
    inputs, layer = keras.Input((6, 5)), layers.Dense(8, "relu", name="twice")
    x = layer(layer(layers.Dense(8, name="first")(inputs)))
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))


# What is refused: (model, inputs)


IMAGES, FLAT = np.ones((2, 8, 8, 4), np.float32), np.ones((2, 4), np.float32)


def network(*between, head=True):
    """Layers between images and a dense head."""
    x = images = keras.Input((8, 8, 4))
    for layer in between:
        x = layer(x)
    return keras.Model(images, _head(x) if head else x), IMAGES


def _head(x):
    return layers.Dense(2)(layers.GlobalAveragePooling2D()(x))


def convolution(activation=None, name="conv"):
    return layers.Conv2D(4, 1, activation=activation, name=name)


def relu(x):
    """It is another function."""
    return tf.nn.softmax(x)


def masked():
    schedule = {"final_sparsity": 0.5, "begin_step": 0, "end_step": 1, "frequency": 1}
    model, update = pruning.apply_pruning(network(convolution())[0], **schedule)
    update(1)
    return model, IMAGES


def two_outputs():
    images = keras.Input((8, 8, 4))
    x = convolution()(images)
    return keras.Model(images, [x, _head(x)]), IMAGES


def subclassed():
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.conv = layers.Conv2D(4, 1)

        def call(self, x):
            return self.conv(x)

    model = Subclassed()
    model(IMAGES)
    return model, IMAGES


UNFOLLOWED = {
    "outputs": lambda: (keras.Sequential([keras.Input((4,)), layers.Dense(2)]), FLAT),
    "no layer": lambda: (keras.Sequential([keras.Input((8, 8, 4)), layers.ReLU()]), IMAGES),
    "no head": lambda: network(convolution(), head=False),
    "masked": masked,
    "unknown": lambda: network(convolution(), layers.UnitNormalization(name="unit")),
    "mixes": lambda: network(convolution(), layers.Activation("softmax", name="over")),
    "mixes inside": lambda: network(convolution("softmax")),
    "by a layer": lambda: network(convolution(layers.Activation("softmax"))),
    "misnamed": lambda: network(convolution(relu)),
    "two outputs": two_outputs,
    "subclassed": subclassed,
}
