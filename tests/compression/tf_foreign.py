"""TensorFlow's models that have what the zoo's have not."""

import numpy as np
import tensorflow as tf

from tf_impl import kit
from tf_impl.compression import (
    combinations,
    distillation,
    feature_distillation,
    pruning,
    quantization_aware_training,
    semi_structured_pruning,
    sparse_inference,
    structured_pruning,  # noqa: F401 - the tests take these
    weight_quantization,
)
from tf_impl.deployment import native_export  # noqa: F401
from tf_impl.kit import copying  # noqa: F401
from tf_impl.train_step import compilation, gradient_accumulation

keras, layers = tf.keras, tf.keras.layers
X = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
Y = np.arange(8) % 3
ROWS = tf.random.stateless_normal((4, 8), (0, 1))


def halved(model, how):
    """(model, update, finalize) of a way to mask half of the weights."""
    if how == "2:4":
        masked = semi_structured_pruning.apply_two_to_four(model)
        return masked, lambda step: None, semi_structured_pruning.finalize_two_to_four
    settings = {"final_sparsity": 0.5, "begin_step": 0, "end_step": 1, "frequency": 1}
    return *pruning.apply_pruning(model, **settings), pruning.finalize_pruning


class Block(layers.Layer):
    def __init__(self, **named):
        super().__init__(**named)
        self.dense = layers.Dense(8, "relu")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x)


class Decorated(Block):
    """Its `call` is a graph of its own."""

    call = tf.function(Block.call)


def changed_within(kind):
    """What techniques make of a model with such a block, and how many products are sparse."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), kind(), layers.Dense(3)])
    kernel = model.layers[0].dense.kernel
    kernel.assign(tf.where(tf.abs(kernel) < 0.3, 0.0, kernel))
    predict = sparse_inference.make_predict(model, min_sparsity=0.2)
    graph = predict.get_concrete_function(ROWS).graph.as_graph_def()
    outputs = [
        predict(ROWS),
        quantization_aware_training.prepare_qat(model, ROWS, weight_bits=4)(ROWS),
        weight_quantization.apply_int4(model, ROWS)(ROWS),
    ]
    masked, _, finalize = halved(model, "2:4")
    for one in (masked, finalize(masked)):
        with tf.GradientTape() as tape:
            outputs.append(one(ROWS))
        outputs.append(tape.gradient(outputs[-1], one.layers[0].dense.kernel))
    products = sum(node.op == "SparseMatrixMatMul" for node in graph.node)
    return [np.array(output) for output in outputs], products


class Reads(layers.Layer):
    """It reads a kernel, and calls the kernel's layer or not."""

    def __init__(self, calls, **named):
        super().__init__(**named)
        self.calls, self.read = calls, layers.Dense(8, use_bias=False)

    def build(self, shape):
        self.read.build(shape)
        self.read.kernel.constraint = keras.constraints.UnitNorm(axis=0)

    def call(self, x):
        x = self.read(x) if self.calls else x
        return tf.matmul(x, self.read.kernel, transpose_b=True)

    def get_config(self):
        return super().get_config() | {"calls": self.calls}


def reading(calls):
    return keras.Sequential([keras.Input((8,)), Reads(calls), layers.Dense(2)])


def trained(model, update, x):
    """After two steps."""
    optimizer = keras.optimizers.SGD(0.1, 0.9)
    step = kit.training.make_train_step(model, optimizer, lambda y, _: tf.reduce_sum(y**2))
    for number in (1, 2):
        update(number)
        step(x, x)
    return model


# State in layers of layers


NUMBERS = np.random.default_rng(0).normal(5.0, 3.0, (8, 4)).astype(np.float32)


def _head(x):
    return layers.Dense(3)(layers.Dense(8, "relu", name="hidden")(x))


def nested():
    norm, x = layers.Normalization(), keras.Input((4,))
    norm.adapt(NUMBERS)
    return keras.Model(x, _head(keras.Sequential([keras.Input((4,)), norm])(x))), NUMBERS


def texts():
    words, x = layers.TextVectorization(output_sequence_length=3), keras.Input((), dtype="string")
    words.adapt(np.array(["a b c", "c b a", "a a d"]))
    vectors = layers.GlobalAveragePooling1D()(layers.Embedding(8, 4)(words(x)))
    return keras.Model(x, _head(vectors)), tf.constant(["a c", "d b a", "b"])


class Scaled(layers.Layer):
    """A variable of its own, and a layer."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(1,), initializer="random_normal", name="scale")
        self.inner = layers.Dense(4)
        self.inner.build(shape)
        super().build(shape)

    def call(self, x):
        return self.inner(x) * self.scale

    def compute_output_shape(self, shape):
        return shape


def scaled():
    x = keras.Input((4,))
    return keras.Model(x, _head(Scaled(name="scaled")(x))), NUMBERS


def frozen_within(variables):
    """A layer in a model is frozen; and, if Keras has that, variables by themselves."""
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="a"), layers.Dense(4)])
    inner.layers[0].trainable = False
    x, last = keras.Input((4,)), layers.Dense(3)
    model = keras.Model(x, last(layers.Dense(8)(inner(x))))
    if variables:
        last.kernel.trainable = inner.layers[1].kernel.trainable = False
    return model


def trainable(model):
    return [part.trainable for part in [*model._flatten_layers(), *model.variables]]


def adapted(*more):
    """A layer with LoRA's factors."""
    keras.utils.set_random_seed(0)
    layer = layers.Dense(8, name="adapted")
    model = keras.Sequential([keras.Input((4,)), layer, *more, layers.Dense(3)])
    layer.enable_lora(2)
    layer.lora_kernel_b.assign(keras.random.normal((2, 8)))
    return model


def adapted_and_more():
    return adapted(layers.Dense(6, name="more"))


# Steps


def pair(width=4, policy=None):
    """A student or teacher with a layer of features."""
    keras.utils.set_random_seed(width)
    x = keras.Input((4,))
    features = layers.Dense(width, "relu", name="features", dtype=policy)(x)
    return keras.Model(x, layers.Dense(3, dtype="float32")(features))


LOSS, FEATURES = kit.training.cross_entropy, {"teacher_layer": "features"}


def with_features(model, optimizer, teacher=None):
    teacher, technique = teacher or pair(6), feature_distillation
    taught = technique.attach_regressor(model, teacher, X, student_layer="features", **FEATURES)
    return technique.make_train_step(taught, teacher, optimizer, LOSS, **FEATURES)


def with_sparse_kernel(model, optimizer):
    kernel = model.get_layer("features").kernel
    kernel.assign(np.where(np.arange(16).reshape(4, 4) % 2, 0.0, np.array(kernel)))
    return combinations.make_sparse_train_step(model, optimizer, LOSS)


def with_stored_logits(model, optimizer):
    step, teacher = distillation.make_stored_train_step(model, optimizer, LOSS), pair(6)
    return lambda x, y: step(x, (y, teacher(X)))


MAKERS = {
    "plain": lambda m, o: kit.training.make_train_step(m, o, LOSS),
    "graph": lambda m, o: compilation.graph_train_step(m, o, LOSS),
    "blocks": lambda m, o: compilation.compiled_model_train_step(m, o, LOSS),
    "parts": lambda m, o: gradient_accumulation.make_train_step(m, o, LOSS),
    "logits": lambda m, o: distillation.make_train_step(m, pair(6), o, LOSS),
    "stored": with_stored_logits,
    "features": with_features,
    "sparse": with_sparse_kernel,
}


def stepped(maker, *, scaled):
    """Weights after two steps of SGD, with a loss scaler around it or without."""
    model, optimizer = pair(), keras.optimizers.SGD(0.1)
    optimizer = keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer
    step = MAKERS[maker](model, optimizer)
    for _ in range(2):
        step(tf.constant(X), tf.constant(Y))
    return model.get_weights()
