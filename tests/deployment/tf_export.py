"""TensorFlow's models and words for the tests of exports."""

import numpy as np
import tensorflow as tf

from tests.compression.tf_distillation import numpy  # noqa: F401 - the tests take it

keras, layers = tf.keras, tf.keras.layers
KINDS = ("onnx", "openvino", "litert")
SIDES = (32, 32, 1)  # of the digits
EXPORTER = "tf2onnx.convert"

tensor = tf.constant


def modes(model):
    return [layer.trainable for layer in model.layers]


def built(model, *x):
    """A model that has its variables."""
    model(*x)
    return model


NAMED = {"logits", "inside"}


def named():
    """Inputs and outputs by name; adapted statistics."""
    keras.utils.set_random_seed(0)
    left, right = keras.Input((5,), name="left"), keras.Input((5,), name="right")
    standardise = layers.Normalization(mean=7.0, variance=9.0)
    both = layers.Multiply()([left, standardise(right)])
    logits = layers.Dense(3, activation="gelu")(both)
    return keras.Model({"right": right, "left": left}, {"logits": logits, "inside": both})


def named_inputs(left, right):
    return {"right": tensor(right), "left": tensor(left)}


def named_outputs(model, x):
    """What the model predicts, by the names of its outputs."""
    return {name: np.array(part) for name, part in model(x).items()}


class Function(keras.Model):
    """A dense layer and a function."""

    def __init__(self, function):
        super().__init__()
        self.inside, self.function = layers.Dense(4), function

    def call(self, x, training=False):
        return self.function(self.inside(x))


def window(x):
    """It branches on a size."""
    known = x.shape[1] is not None and x.shape[1] > 8
    return tf.reduce_mean(x[:, -8:] if known else x, 1)


def random():
    return built(Function(lambda x: x + tf.random.uniform(tf.shape(x))), tf.ones((2, 5)))


def words():
    """Texts go in."""
    vectors = layers.TextVectorization(vocabulary=["a", "b"], output_mode="multi_hot")
    model = keras.Sequential([keras.Input((1,), dtype="string"), vectors])
    return model, tf.constant([["a"], ["b"]])


def nothing():
    return keras.Sequential([keras.Input((3,)), layers.ReLU()])


def _eigenvalues(x):
    return tf.math.real(tf.linalg.eigvals(tf.matmul(x, x, transpose_b=True)))


def eigenvalues():
    return built(Function(_eigenvalues), tf.ones((4, 4)))


def unbuilt():
    return Function(tf.identity)


def recurrent():
    """An LSTM with dropout, which draws seeds, behind groups, which Keras 3 gives to XLA."""
    groups, lstm = layers.Conv1D(4, 3, groups=2), layers.LSTM(3, dropout=0.5)
    return keras.Sequential([keras.Input((5, 4)), groups, lstm])


def lookup():
    inputs = keras.Input((2,), dtype="int64")
    codes = layers.IntegerLookup(vocabulary=[5, 7])(inputs)
    return keras.Model(inputs, layers.Embedding(4, 2)(codes)), tf.constant([[5, 7]], tf.int64)


def stateful():
    kept = keras.Input(batch_shape=(2, 6, 4))
    model = keras.Model(kept, layers.GRU(2, stateful=True, name="kept")(kept))
    return model, tf.ones((2, 6, 4))


def reshaping():
    """It is traced with its batch's size in a reshape."""
    net = [keras.Input((8, 8, 1)), layers.Conv2D(4, 3), layers.Flatten()]
    return keras.Sequential(net), tf.random.normal((6, 8, 8, 1))


# Native exports ----------------------------------------------------------------------------------

PACKAGE = "model"
NAMED_BY = "package"
INPUT = "images"
PARTS = (
    "saved_model.pb",
    "variables/variables.data-00000-of-00001",
    "assets.extra/twinbench.json",
)


def program(predict, x):
    return predict.get_concrete_function(x).function_def


def is_compiled(ran):
    """XLA has to compile the function."""
    return bool(ran.attr["_XlaMustCompile"].b)


def texts():
    """Words by their vectors."""
    given = layers.TextVectorization(vocabulary=["a", "b"], output_sequence_length=3)
    inputs = keras.Input((), dtype="string")
    return keras.Model(inputs, layers.Embedding(4, 2)(given(inputs)))
