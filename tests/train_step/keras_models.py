"""Small Keras models that are not the suite's own: what else a train step may meet, by name.

Each function returns (model, x, y, loss_fn); x is what `fit` would get for a batch.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

keras, layers = tf.keras, tf.keras.layers
ROWS = 8
KERAS_3 = hasattr(keras, "StatelessScope")


def values(*shape, seed=0):
    return tf.constant(np.random.default_rng(seed).normal(size=(ROWS, *shape)), tf.float32)


def codes(*shape, high=7):
    return tf.constant(np.random.default_rng(1).integers(0, high, (ROWS, *shape)), tf.int64)


def squares(output, y):
    """Mean square over all outputs: half-width outputs stay half-width."""
    pairs = zip(tf.nest.flatten(output), tf.nest.flatten(y), strict=True)
    return sum(tf.reduce_mean(tf.square(o - tf.cast(t, o.dtype))) for o, t in pairs)


def cross_entropy(logits, y):
    logits = tf.cast(logits, tf.float32)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def drop(x):
    """Dropout where masks can be the same in another graph: Keras 3 keeps its seeds."""
    return layers.Dropout(0.3)(x) if KERAS_3 else x


def normalized(drop=drop):
    """Adapted Normalization, GELU, dropout, and L2 on weights and activities."""
    norm, inputs = layers.Normalization(), keras.Input((4,))
    norm.adapt(5.0 + 3.0 * values(4, seed=3))
    x = layers.Dense(6, activation="gelu", kernel_regularizer=keras.regularizers.L2(0.1))
    x = drop(x(norm(inputs)))
    outputs = layers.Dense(2, name="head", activity_regularizer=keras.regularizers.L2(0.1))(x)
    return keras.Model(inputs, outputs), values(4), values(2, seed=1), squares


def regularized():
    """The same without dropout, whose masks depend on the dtype."""
    return normalized(drop=lambda x: x)


def sequence():
    """Convolutions over time."""
    inputs = keras.Input((9, 3))
    x = layers.Conv1D(4, 3, activation="relu", name="block")(inputs)
    x = layers.SeparableConv1D(4, 3, padding="same")(x)
    outputs = layers.Dense(2)(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, outputs), values(9, 3), values(2, seed=1), squares


def branches():
    """Grouped and depthwise convolutions, a residual sum and a concatenation."""
    inputs = keras.Input((6, 6, 4))
    # Keras compiles grouped convolutions on a CPU; GPUs have their own.
    x = layers.Conv2D(4, 3, padding="same", groups=2, name="block.grouped")(inputs)
    x = layers.Add(name="block.add")([inputs, layers.ReLU(name="block.relu")(x)])
    y = layers.DepthwiseConv2D(3, padding="same")(x)
    x = layers.Concatenate()([x, layers.LayerNormalization()(y)])
    outputs = layers.Dense(2)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs), values(6, 6, 4), values(2, seed=1), squares


def attention():
    """Attention within a residual stream; a bias of keys would have a gradient of rounding."""
    inputs = keras.Input((5, 8))
    x = layers.LayerNormalization()(inputs)
    settings = {"dropout": 0.2 if KERAS_3 else 0.0, "use_bias": False}
    x = layers.MultiHeadAttention(2, 4, **settings, name="block")(x, x)
    outputs = layers.Dense(2)(layers.Add()([inputs, x]))
    return keras.Model(inputs, outputs), values(5, 8), values(5, 2, seed=1), squares


def recurrent():
    """Masked codes, whose gradient is slices, into an LSTM."""
    inputs = keras.Input((6,), dtype="int64")
    x = layers.Embedding(9, 4, mask_zero=True, name="table")(inputs)
    outputs = layers.Dense(2, name="head")(layers.LSTM(5, name="block")(x))
    return keras.Model(inputs, outputs), codes(6), values(2, seed=1), squares


def looked_up():
    """A table of which several samples look up one row: its gradient is slices."""
    inputs = keras.Input((6,), dtype="int64")
    x = layers.Flatten()(layers.Embedding(9, 4, name="table")(inputs))
    return keras.Model(inputs, layers.Dense(2)(x)), codes(6), values(2, seed=1), squares


class Tied(keras.Model):
    """Logits by the table that embeds; a weight that the loss does not reach."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.table, self.block = layers.Embedding(7, 4), layers.Dense(4, activation="relu")
        self.unused = layers.Dense(3)

    def call(self, inputs, training=None):
        x = self.block(self.table(inputs))
        self.unused(x)
        table = tf.convert_to_tensor(self.table.embeddings)
        return tf.matmul(x, tf.cast(table, x.dtype), transpose_b=True)


def tied():
    model, x = Tied(), codes(5)
    model(x)
    return model, x, codes(5), cross_entropy


def list_model_of_a_tuple():
    """Keras's functional [a, b] model with what a tf.data pipeline of tuples gives."""
    a, b = keras.Input((3,)), keras.Input((4,))
    x = layers.Concatenate()([layers.Dense(3, name="block")(a), b])
    model = keras.Model([a, b], layers.Dense(2)(x))
    return model, (values(3), values(4)), values(2, seed=1), squares


class Whole(keras.Model):
    """`call` takes one structure."""

    def __init__(self, **settings):
        super().__init__(**settings)
        regularizer = keras.regularizers.L2(0.1)
        self.block = layers.Dense(3, kernel_regularizer=regularizer)
        self.right = layers.Dense(3)

    def call(self, inputs, training=None):
        a, b = inputs
        return self.block(a) + self.right(b)


class Several(Whole):
    """`call` takes several arguments, one of them optional."""

    def call(self, left, right, scale=None, training=None):
        output = self.block(left) + self.right(right)
        return output if scale is None else output * scale


def subclassed():
    model, x = Whole(), (values(3), values(4))
    model(x)
    return model, x, values(3, seed=1), squares


def several_by_name():
    x = {"left": values(3), "right": values(4), "scale": values(1)}
    model = Several()
    model(**x)
    return model, x, values(3, seed=1), squares


class Everything(keras.Model):
    """What steps treat each in a way of their own, at once.

    Several arguments; random numbers, statistics and losses of its own; slices and masks; logits
    by the table that embeds; a weight that the loss does not reach.
    """

    def __init__(self, drop, **settings):
        super().__init__(**settings)
        regularizer = keras.regularizers.L2(0.1)
        given = {"kernel_regularizer": regularizer, "activity_regularizer": regularizer}
        self.words = layers.Embedding(7, 4, mask_zero=True)
        self.pool = layers.GlobalAveragePooling1D()
        self.norm, self.hidden = layers.Normalization(), layers.Dense(4, "gelu", **given)
        self.norm.adapt(5.0 + 3.0 * values(4, seed=3))
        self.drop = layers.Dropout(0.3) if drop else layers.Activation("linear")
        self.table, self.unused = layers.Embedding(7, 4), layers.Dense(3)

    def call(self, codes, numbers, scale=None, training=None):
        x = self.pool(self.words(codes), mask=self.words.compute_mask(codes))
        x = x[:, None] + self.table(codes) + self.drop(self.hidden(self.norm(numbers)))[:, None]
        self.unused(x)
        x = x if scale is None else x * scale[:, None]
        table = tf.convert_to_tensor(self.table.embeddings)
        return tf.matmul(x, tf.cast(table, x.dtype), transpose_b=True)


def everything(drop=KERAS_3):
    """Keras 3 keeps the seeds of dropout: masks are the same in another graph."""
    x = {"codes": codes(5), "numbers": values(4), "scale": values(1)}
    model = Everything(drop)
    model(**x)
    return model, x, codes(5), cross_entropy


def everything_but_dropout():
    return everything(drop=False)


ZOO = {
    make.__name__: make
    for make in (
        normalized,
        regularized,
        sequence,
        branches,
        attention,
        recurrent,
        looked_up,
        tied,
        list_model_of_a_tuple,
        subclassed,
        several_by_name,
        everything,
        everything_but_dropout,
    )
}
