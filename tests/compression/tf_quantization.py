"""TensorFlow's models and words for the tests of quantization."""

from contextlib import contextmanager

import numpy as np
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from tensorflow.core.protobuf import meta_graph_pb2

from tests.compression.tf_distillation import channels_last, linear, numpy  # noqa: F401
from tf_impl import kit
from tf_impl.kit import int8_files, integers, quantized_files  # noqa: F401
from tf_impl.kit.checks import quantization_aware_training as checks  # noqa: F401

keras, layers = tf.keras, tf.keras.layers


def tensor(array):
    return tf.constant(array)


images_of = tensor


def sequential(shape, *stack):
    return keras.Sequential([keras.Input(shape), *stack])


def convolution(kernel):
    """A 1x1 convolution."""
    model = sequential((3, 3, kernel.shape[2]), layers.Conv2D(kernel.shape[3], 1, use_bias=False))
    model.set_weights([kernel])
    return model


def without_kernels():
    return sequential((3, 3, 6), layers.BatchNormalization(), layers.ReLU())


def evaluate(model, x):
    return model(x, training=False)


def state(model):
    return {str(place): value for place, value in enumerate(model.get_weights())}


def gradients(model, x, y):
    kept = model.get_weights()  # statistics and ranges follow the batch
    with tf.GradientTape() as tape:
        loss = kit.training.cross_entropy(model(x, training=True), y)
    variables = model.trainable_variables
    pulls = tape.gradient(loss, variables)
    model.set_weights(kept)
    names = [variable.name.removeprefix("quant_").split(":")[0] for variable in variables]
    return {name: np.array(pull) for name, pull in zip(names, pulls, strict=True)}


@contextmanager
def spoiled(model):
    """Its first kernel is not finite inside."""
    kernel = model.trainable_variables[0]
    kept = np.array(kernel)
    kernel.assign(kept * float("nan"))
    yield
    kernel.assign(kept)


def levels(path):
    """Different values of each kernel in the file."""
    plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES  # kernels as they are in the file
    interpreter = Interpreter(model_path=str(path), experimental_op_resolver_type=plain)
    interpreter.allocate_tensors()
    products = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
    ran = [one for one in interpreter._get_ops_details() if one["op_name"] in products]
    return [len(np.unique(interpreter.get_tensor(one["inputs"][1]))) for one in ran]


# Models ------------------------------------------------------------------------------------------


def attention():
    keras.utils.set_random_seed(0)
    x = keras.Input((5, 16))
    y = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8)(x, x))
    y = layers.Dense(4, "tanh")(layers.Conv1D(8, 3, activation="gelu")(y))
    return keras.Model(x, y), tf.random.normal((8, 5, 16))


def concatenated():
    """A narrow range is beside one that has no grid."""
    keras.utils.set_random_seed(0)
    x, small = keras.Input((16,)), keras.initializers.RandomNormal(stddev=0.02)
    narrow = layers.Dense(8, kernel_initializer=small)(x)
    both = layers.Concatenate()([narrow, layers.LayerNormalization()(x)])
    return keras.Model(x, layers.Dense(4)(both)), tf.random.normal((8, 16))


def shared():
    """A layer has two calls, of which the first sees the larger values."""
    keras.utils.set_random_seed(0)
    x, layer = keras.Input((16,)), layers.Dense(8)
    both = layers.Concatenate()([layer(x), layer(layers.Rescaling(0.2)(x))])
    return keras.Model(x, layers.Dense(4)(both)), tf.random.normal((8, 16))


def activated():
    """Layers have layers as activations."""
    keras.utils.set_random_seed(0)
    conv = layers.Conv2D(8, 3, activation=layers.LeakyReLU(0.2))
    dense = layers.Dense(4, activation=layers.ReLU())
    return sequential((8, 8, 3), conv, layers.Flatten(), dense), tf.random.normal((8, 8, 8, 3))


def many_inputs():
    """12 inputs, each of values of its own size."""
    keras.utils.set_random_seed(0)
    inputs, x = [keras.Input((3,)) for _ in range(12)], tf.random.normal((32, 3))
    model = keras.Model(inputs, layers.Dense(2)(layers.Concatenate()(inputs)))
    return model, [(place + 1) * x for place in range(12)]


def fitted(model, x, steps=10):
    """Losses of plain SGD that pulls all outputs to 1; ranges follow the batches."""
    optimizer = keras.optimizers.SGD(0.05)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - 1) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    ranges = [v for v in model.non_trainable_variables if "max" in v.name]
    before = [np.array(variable) for variable in ranges]
    losses = [float(step()) for _ in range(steps)]
    assert any(np.any(old != np.array(new)) for old, new in zip(before, ranges, strict=True))
    return losses


def amplifying():
    """Deep, with random weights: a value that rounds otherwise changes all that follow."""
    keras.utils.set_random_seed(0)
    stack = []
    for _ in range(30):
        norm = layers.BatchNormalization(momentum=0.0)
        stack += [layers.Dense(16), norm, layers.ReLU()]
    model = sequential((8,), *stack, layers.Dense(3))
    model(tf.random.normal((256, 8)), training=True)
    return model, tf.random.normal((32, 8))


def subclassed():
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, x):
            return self.dense(x)

    model = Subclassed()
    model(tf.zeros((2, 3, 3, 6)))
    return model


def in_precision(policy):
    return sequential((3, 3, 6), layers.Conv2D(3, 1, dtype=policy, name="own"))


def within():
    """A model inside of another."""
    return sequential((3, 3, 6), sequential((3, 3, 6), layers.Conv2D(3, 1)), layers.Dense(3))


def unknown_layer():
    return sequential((3, 3, 6), layers.Conv2D(3, 1), layers.LayerNormalization())


def unbuilt():
    return keras.Sequential([layers.Dense(3)])


# Files -------------------------------------------------------------------------------------------


def no_tensor():
    """Its output holds a string."""

    class Named(keras.Model):
        def __init__(self):
            super().__init__()
            self.conv = layers.Conv2D(8, 3)

        def call(self, x):
            return {"y": self.conv(x), "name": "y"}

    model = Named()
    model(tf.zeros((1, 16, 16, 1)))
    return model


def nothing():
    return sequential((16, 16, 1), layers.ReLU())


def inverse():
    """LiteRT has no such operator."""

    class Inverse(layers.Layer):
        def call(self, x):
            return tf.linalg.inv(tf.squeeze(x, -1))

    return sequential((16, 16, 1), Inverse())


def recurrent():
    """LSTM runs in a loop."""
    return sequential((16, 16, 1), layers.Reshape((16, 16)), layers.LSTM(8), layers.Dense(4))


def masked():
    """A mask makes large numbers that no grid has beside small ones."""
    keras.utils.set_random_seed(0)
    x, mask = keras.Input((5, 32)), keras.Input((1, 5))
    heads = layers.MultiHeadAttention(4, 8)(x, x, attention_mask=mask)
    return keras.Model([x, mask], layers.Dense(32)(heads))


def masked_inputs():
    random = np.random.default_rng(1).normal(size=(12, 5, 32)).astype(np.float32)
    return [tf.constant(9 * random), tf.constant(12 * [[[1.0] * 3 + [0.0] * 2]])]


def run(quantized, x):
    """What a quantized model in memory predicts."""
    return int8_files.interpret(quantized)(x)


def bombs(mark, bomb, whole):
    """LiteRT's format has no place for code."""
    return {}


def dense(kernel, axes=()):
    """A dense layer over the last of some axes."""
    layer = layers.Dense(kernel.shape[1], use_bias=False)
    model = sequential((*axes, kernel.shape[0]), layer)
    model.set_weights([kernel])
    return model


def distributed(kind):
    """`TimeDistributed` wraps a dense layer: alone, beside one that is called, within a model."""
    keras.utils.set_random_seed(0)
    wrapped, behind = layers.Dense(8, name="wrapped"), layers.ReLU()
    if kind == "beside":
        behind = layers.Dense(4, name="called")
    if kind == "within":
        wrapped = keras.Sequential([layers.Dense(8, name="inside")])
    return sequential((3, 16), layers.TimeDistributed(wrapped), behind)


def in_integers(model):
    """The names of layers whose kernels are int8."""
    every = model._flatten_layers(include_self=False)
    return [one.name for one in every if getattr(one, "quantization_mode", None) == "int8"]


def not_rebuilt():
    """Keras does not know how to make the model again."""

    class Holding(keras.Model):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def call(self, x):
            return self.layer(x)

    model = Holding(layers.Dense(4))
    model(tf.zeros((2, 48)))
    return model


def programs(mark):
    """Whole files of programs that write a file."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (None, 64), name="x")
        with tf.control_dependencies([tf.io.write_file(str(mark), "")]):
            tf.identity(x, name="y")
    meta = meta_graph_pb2.MetaGraphDef(graph_def=graph.as_graph_def())
    meta.signature_def["predict"].inputs["000"].name = "x:0"
    meta.signature_def["predict"].outputs["output"].name = "y:0"
    return {"program": meta.SerializeToString()}
