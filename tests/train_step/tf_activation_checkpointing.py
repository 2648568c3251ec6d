"""TensorFlow's models for the tests of activation checkpointing."""

import numpy as np
import tensorflow as tf

from tests.train_step.tf_steps import dense, normal, unbuilt  # noqa: F401 - the tests take these
from tf_impl import kit

keras, layers = tf.keras, tf.keras.layers
IMAGES = normal(6, 8)
CODES = tf.constant([[1, 2, 3, 0, 0, 0], [4, 1, 2, 3, 4, 0]])


def functional():
    """A flat model with dropout, BatchNorm, raw additions and two outputs."""
    x = inputs = keras.Input((8,), name="x")
    for index in range(3):
        inside = layers.Dense(8, activation="tanh", name=f"b{index}_in")(x)
        inside = layers.BatchNormalization(name=f"b{index}_norm")(inside)
        x = x + layers.Dropout(0.5, name=f"b{index}_drop")(inside)
        x = layers.Dense(8, name=f"b{index}_out")(x)
    return keras.Model(inputs, {"out": x, "last": layers.Dense(2, name="last")(x)})


def attention():
    """Layers with dropout inside, noise, a mask made inside and one from outside."""
    codes = keras.Input((6,), dtype="int32")
    x = layers.Embedding(5, 8, mask_zero=True, name="codes")(codes)
    for index in range(2):
        y = layers.MultiHeadAttention(2, 4, dropout=0.3, name=f"b{index}.mha")(x, x)
        y = layers.GaussianNoise(0.2, name=f"b{index}.noise")(y)
        x = layers.Add(name=f"b{index}.add")([x, y])
    x = layers.GRU(4, dropout=0.2, name="memory")(layers.Masking(name="mask")(x))
    return keras.Model(codes, x)


class Block(layers.Layer):
    """Without a `training` argument, with a keyword and a tuple as output."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.dense = layers.Dense(8, activation="tanh", name="inner")
        self.norm, self.dropout = layers.BatchNormalization(), layers.Dropout(0.5)

    def build(self, shape):
        self.dense.build(shape)
        self.norm.build(shape)

    def call(self, x, bias=None):
        x = self.dropout(self.norm(self.dense(x))) + bias
        return x, x * 2


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.parts = [Block(name=f"block{i}") for i in range(3)]

    def call(self, x):
        y = x
        for part in self.parts:
            x, y = part(x, bias=y)
        return x, y


def sequential():
    """Groups of layers."""
    pairs = [
        (layers.Dense(8, "tanh", name=f"{name}.in"), layers.Dropout(0.5, name=f"{name}.drop"))
        for name in "ab"
    ]
    return keras.Sequential([keras.Input((8,)), *pairs[0], *pairs[1]])


def submodels():
    """Models within, one of them frozen."""
    x = inputs = keras.Input((8,))
    for index in range(2):
        parts = [layers.Dense(8, "tanh"), layers.BatchNormalization(), layers.Dropout(0.5)]
        inner = keras.Sequential(parts, name=f"part_{index}")
        x = inner(x)
        inner.trainable = index > 0
    return keras.Model(inputs, x)


MAKERS = {
    "functional": (functional, IMAGES, ("b?", "last, b1")),
    "attention": (attention, CODES, ("b*, memory",)),
    "subclassed": (Subclassed, IMAGES, ("block*", "inner")),
    "sequential": (sequential, IMAGES, ("a, b", "a.in")),
    "submodels": (submodels, IMAGES, ("part_*",)),
}


def trained_in_a_graph(technique, name, blocks=""):
    """Losses and gradients of two steps in a graph, statistics and seeds after them."""
    make, x, _ = MAKERS[name]
    keras.utils.set_random_seed(0)
    model = make()
    model(x)
    return gradients(technique.apply_checkpointing(model, blocks=blocks), model, x)


def gradients(run, model, x):
    @tf.function
    def step():
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(run(x, training=True))
            loss = tf.add_n([tf.reduce_sum(tf.square(value)) for value in outputs])
        return loss, *tape.gradient(loss, model.trainable_variables)

    arrays = [np.array(tf.convert_to_tensor(part)) for _ in range(2) for part in step()]
    return arrays + [np.array(variable, float) for variable in model.non_trainable_variables]


def naive():
    """The trap: what `tf.recompute_grad` does to a block with dropout."""
    keras.utils.set_random_seed(0)
    model = functional()
    drop = model.get_layer("b1_drop")
    drop.call = lambda x, training, call=drop.call: tf.recompute_grad(
        lambda x: call(x, training=training)
    )(x)
    return gradients(model, model, IMAGES)


class Unfit(layers.Layer):
    """What its name says, in its `call`."""

    def call(self, x):
        return {
            "loss": lambda: self.add_loss(tf.reduce_sum(x)) or x,
            "draw": lambda: tf.nn.dropout(x, 0.5),
            "global": lambda: keras.random.dropout(x, 0.5),
            "complex": lambda: tf.signal.fft(tf.cast(x, tf.complex64)),
        }[self.name]()


def unfit(technique, name):
    keras.random.uniform((1,))  # makes the global generator, outside a graph
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8), Unfit(name=name)])
    gradients(technique.apply_checkpointing(model, blocks=name), model, IMAGES)


def penalized(technique, blocks):
    """A gradient of a block's gradient."""
    model, x = technique.apply_checkpointing(dense(4), blocks=blocks), tf.ones((2, 4))
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            inner.watch(x)
            output = model(x, training=True)
        slope = inner.gradient(output, x)
    tape.gradient(slope, model.trainable_variables)


def interleaved():
    """Two groups, each with a layer between those of the other."""
    x = inputs = keras.Input((8,))
    for name in ("a.0", "b.0", "a.1", "b.1"):
        x = layers.Dense(8, name=name)(x)
    return keras.Model(inputs, x)


PICTURES = tf.ones((2, 8, 8, 1))


def of_convolutions():
    """As a U-Net, which has no other product."""
    inside = (
        layers.Conv2D(4, 3, activation="relu", name="block.in"),
        layers.Conv2D(4, 3, name="block.out"),
    )
    return keras.Sequential([keras.Input((8, 8, 1)), *inside, layers.Conv2D(1, 1, name="last")])


def step_of(model):
    def loss_fn(output, y):
        return tf.reduce_mean(tf.square(output))

    return kit.training.make_train_step(model, keras.optimizers.SGD(0.1), loss_fn)
