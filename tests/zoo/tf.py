"""The TensorFlow half of the zoo: Keras 3 models as other projects write them, not the suite's.

Each is small, and made here in the construction of a kind of model that people have: those of
keras-hub are not installed, models of the same construction stand here; those of
keras.applications are the originals, with random weights.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf
from tensorflow.keras import Input, Model, Sequential, initializers, layers, ops, regularizers

from tests.zoo.foreign import Foreign

CLASSES = 6
VOCABULARY = 24
LENGTH = 16
SIZE = 32  # of images


# Images ---------------------------------------------------------------------------------------


def _squeeze_excite(x, channels: int):
    weight = layers.GlobalAveragePooling2D(keepdims=True)(x)
    weight = layers.Conv2D(channels // 4, 1, activation="silu")(weight)
    return x * layers.Conv2D(channels, 1, activation="sigmoid")(weight)


def groups_net() -> Model:
    """Depthwise, separable and grouped convolutions, a residual sum, two branches side by side."""
    image = Input((SIZE, SIZE, 3))
    x = layers.Conv2D(16, 3, 2, "same", use_bias=False)(image)
    x = layers.BatchNormalization()(x)
    x = short = layers.Activation("gelu", name="stem")(x)
    x = layers.DepthwiseConv2D(5, padding="same", use_bias=False, name="mix_depthwise")(x)
    x = layers.BatchNormalization(name="mix_norm")(x)
    x = layers.Conv2D(32, 1, activation="gelu", name="mix_expand")(x)
    x = _squeeze_excite(x, 32)
    x = layers.SeparableConv2D(16, 3, padding="same", name="mix_project")(x)
    x = layers.Add(name="sum")([short, x])
    left = layers.Conv2D(16, 3, 2, "same", groups=4, name="left")(x)
    right = layers.Conv2D(8, 1, 2, name="right")(x)
    x = layers.BatchNormalization()(layers.Concatenate()([left, right]))
    x = layers.GlobalAveragePooling2D(name="pool")(layers.ReLU()(x))
    return Model(image, layers.Dense(CLASSES)(layers.Dropout(0.1)(x)))


def unet() -> Model:
    """Down and up again, with what was left on the way put beside: a class for each pixel."""

    def block(x, filters: int, name: str):
        x = layers.Conv2D(filters, 3, padding="same", name=f"{name}_conv")(x)
        x = layers.GroupNormalization(2, name=f"{name}_norm")(x)
        return layers.ReLU(name=f"{name}_relu")(x)

    image = Input((SIZE, SIZE, 3))
    first = block(image, 8, "first")
    second = block(layers.MaxPooling2D()(first), 16, "second")
    up = layers.Conv2DTranspose(8, 2, 2, name="up")(second)
    x = block(layers.Concatenate()([up, first]), 8, "last")
    return Model(image, layers.Conv2D(CLASSES, 1)(x))


def video() -> Model:
    """3-D convolutions over frames.

    The first has strides, for fewer windows to pool: of 16,384 some have two largest values within
    rounding, and plain code itself then takes another one in a graph than eagerly.
    """
    return Sequential(
        [
            Input((8, 16, 16, 3)),
            layers.Conv3D(8, 3, 2, padding="same", name="first"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling3D(dtype="float32"),  # it has no kernel for float64
            layers.Conv3D(16, 3, padding="same", activation="relu", name="second"),
            layers.GlobalAveragePooling3D(name="pool"),
            layers.Dense(CLASSES),
        ]
    )


def two_heads() -> Model:
    """A class and a box: a list of outputs."""
    image = Input((SIZE, SIZE, 3))
    x = layers.Conv2D(8, 3, 2, "same", activation="relu", name="features")(image)
    x = layers.Conv2D(16, 3, 2, "same", activation="relu")(x)
    x = layers.Dense(32, "relu", name="hidden")(layers.GlobalAveragePooling2D()(x))
    return Model(image, [layers.Dense(CLASSES)(x), layers.Dense(4)(x)])


def dict_heads() -> Model:
    """Coarse and fine classes: a dict, which is not in the order of its names."""
    image = Input((SIZE, SIZE, 3))
    x = layers.Conv2D(8, 3, 2, "same", use_bias=False)(image)
    x = layers.Flatten()(layers.ReLU()(layers.BatchNormalization()(x)))
    x = layers.Dense(32, "tanh", name="neck")(x)
    heads = {"fine": layers.Dense(CLASSES)(x), "coarse": layers.Dense(3)(x)}
    return Model(image, heads)


class Residual(layers.Layer):
    """A layer that has layers, made when it is built."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = layers.BatchNormalization()

    def build(self, shape):
        """Make the convolution as wide as the input."""
        self.convolution = layers.Conv2D(shape[-1], 3, padding="same", activation="swish")
        self.convolution.build(shape)
        self.norm.build(shape)
        super().build(shape)

    def call(self, x, training=None):
        """(n, h, w, c) -> (n, h, w, c)."""
        return x + self.convolution(self.norm(x, training=training))


class Subclassed(Model):
    """A model that only its own code describes."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.stem = layers.Conv2D(8, 3, 2, "same", activation="relu", name="stem")
        self.residuals = [Residual(name=f"residual_{n}") for n in range(2)]
        self.dropout = layers.Dropout(0.1)
        decay = regularizers.L2(1e-2)
        self.hidden = layers.Dense(16, "relu", kernel_regularizer=decay, name="hidden")
        self.head = layers.Dense(CLASSES)

    def call(self, image, training=None):
        """(n, h, w, 3) -> (n, classes)."""
        x = self.stem(image)
        for layer in self.residuals:
            x = layer(x, training=training)
        x = self.dropout(ops.mean(x, (1, 2)), training=training)
        return self.head(self.hidden(x))


# Sequences ------------------------------------------------------------------------------------


def conv1d_text() -> Model:
    """Dilated, causal 1-D convolutions over embedded characters."""
    codes = Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 16)(codes)
    for n in range(2):
        y = layers.Conv1D(16, 3, padding="causal", dilation_rate=2**n, name=f"layer{n}_conv")(x)
        x = layers.Add(name=f"layer{n}_sum")([x, layers.Activation("gelu")(y)])
    x = layers.GlobalMaxPooling1D()(layers.LayerNormalization(name="norm")(x))
    return Model(codes, layers.Dense(CLASSES)(x))


def bilstm() -> Model:
    """Both directions over embedded characters."""
    return Sequential(
        [
            Input((LENGTH,), dtype="int32"),
            layers.Embedding(VOCABULARY, 16),
            layers.Bidirectional(layers.LSTM(12), name="both"),
            layers.Dense(16, "relu", name="hidden"),
            layers.Dense(CLASSES),
        ]
    )


class TiedLanguage(Model):
    """An LSTM whose last layer is its embedding (Press and Wolf, 2017)."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        normal = initializers.RandomNormal(stddev=1.0)  # with Keras's own it would say nothing
        self.embedding = layers.Embedding(VOCABULARY, 24, normal, name="embedding")
        self.lstm = layers.LSTM(24, return_sequences=True, dropout=0.1)
        self.bias = self.add_weight(shape=(VOCABULARY,), initializer="zeros", name="bias")

    def call(self, codes, training=None):
        """(n, t) -> (n, t, vocabulary)."""
        x = self.lstm(self.embedding(codes), training=training)
        return ops.matmul(x, ops.transpose(self.embedding.embeddings)) + self.bias


def _attention_block(x, name: str, mask=None, causal: bool = False):
    y = layers.LayerNormalization(epsilon=1e-5, name=f"{name}_norm0")(x)
    attention = layers.MultiHeadAttention(2, 16, dropout=0.1, name=f"{name}_attention")
    y = attention(y, y, attention_mask=mask, use_causal_mask=causal)
    x = layers.Add(name=f"{name}_sum0")([x, y])
    y = layers.LayerNormalization(epsilon=1e-5, name=f"{name}_norm1")(x)
    y = layers.Dense(64, "gelu", name=f"{name}_up")(y)
    y = layers.Dropout(0.1, name=f"{name}_dropout")(layers.Dense(32, name=f"{name}_down")(y))
    return layers.Add(name=f"{name}_sum1")([x, y])


class Positions(layers.Layer):
    """A vector that is learned for each position."""

    def build(self, shape):
        """Make as many as there are positions."""
        self.table = self.add_weight(shape=shape[1:], initializer="random_normal", name="table")

    def call(self, x):
        """(n, t, width) -> (n, t, width)."""
        return x + self.table


def encoder() -> Model:
    """Attention over vectors, the mean of which is classified."""
    vectors = Input((LENGTH, 8))
    x = Positions(name="positions")(layers.Dense(32, name="project")(vectors))
    for n in range(2):
        x = _attention_block(x, f"block{n}")
    x = layers.GlobalAveragePooling1D(name="pool")(layers.LayerNormalization()(x))
    return Model(vectors, layers.Dense(CLASSES)(x))


def bert() -> Model:
    """Codes and what of them is padding by name; logits and what lies below them by name."""
    codes = Input((LENGTH,), dtype="int32", name="token_ids")
    padding = Input((LENGTH,), dtype="int32", name="padding_mask")
    x = layers.Embedding(VOCABULARY, 32, name="words")(codes)
    x = layers.LayerNormalization(name="words_norm")(Positions(name="positions")(x))
    mask = layers.Reshape((1, LENGTH))(padding)
    for n in range(2):
        x = _attention_block(x, f"block{n}", mask=mask)
    pooled = layers.Dense(32, "tanh", name="pooler")(x[:, 0])
    outputs = {"sequence_output": x, "logits": layers.Dense(CLASSES, name="logits")(pooled)}
    return Model({"token_ids": codes, "padding_mask": padding}, outputs)


def gpt() -> Model:
    """Causal attention and an embedding that turns vectors back into codes."""
    codes = Input((LENGTH,), dtype="int32", name="token_ids")
    embedding = layers.ReversibleEmbedding(VOCABULARY, 32, name="embedding")
    x = layers.Dropout(0.1)(Positions(name="positions")(embedding(codes)))
    for n in range(2):
        x = _attention_block(x, f"block{n}", causal=True)
    x = layers.LayerNormalization(name="norm")(x)
    return Model({"token_ids": codes}, embedding(x, reverse=True))


# Several inputs and outputs ---------------------------------------------------------------------


def normalized() -> Model:
    """A table whose columns are standardised by what was seen of them; L2 on its layers."""
    standardise = layers.Normalization(name="standardise")
    standardise.adapt(_table(64))
    decay = regularizers.L2(1e-2)
    return Sequential(
        [
            Input((3,)),
            standardise,
            layers.Dense(32, "gelu", kernel_regularizer=decay, name="up"),
            layers.Dropout(0.1),
            layers.Dense(16, "gelu", kernel_regularizer=decay, name="down"),
            layers.Dense(CLASSES),
        ]
    )


def two_inputs() -> Model:
    """A functional model of a list of inputs, which `tf.data` feeds with tuples."""
    image, vector = Input((SIZE, SIZE, 3), name="image"), Input((5,), name="vector")
    x = layers.Conv2D(8, 3, 2, "same", activation="relu")(image)
    x = layers.GlobalAveragePooling2D()(x)
    y = layers.Dense(8, name="second")(layers.Dense(16, "relu", name="first")(vector))
    x = layers.Concatenate(name="both")([x, y])
    return Model([image, vector], layers.Dense(CLASSES)(x))


class TwoArguments(Model):
    """A model whose `call` takes two arguments."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.image = Sequential([layers.Conv2D(8, 3, 2), layers.ReLU(), layers.Flatten()])
        self.vector = layers.Dense(8, "relu", name="vector")
        self.head = layers.Dense(CLASSES)

    def call(self, image, vector):
        """(n, h, w, 3) and (n, 5) -> (n, classes)."""
        return self.head(ops.concatenate([self.image(image), self.vector(vector)], -1))


def wide_and_deep() -> Model:
    """Numbers and categories by name, with adapted statistics."""
    numbers = Input((3,), name="numbers")
    category = Input((), dtype="int32", name="category")
    standardise = layers.Normalization(name="standardise")
    standardise.adapt(_table(64))
    wide = standardise(numbers)
    deep = layers.Concatenate()([wide, layers.Embedding(7, 4)(category)])
    deep = layers.Dense(32, "gelu", name="up")(deep)
    deep = layers.Dense(32, "gelu", name="down")(deep)
    x = layers.Concatenate(name="both")([deep, wide])
    return Model({"numbers": numbers, "category": category}, layers.Dense(CLASSES)(x))


def eleven_heads() -> Model:
    """As many outputs as sort otherwise by number than by name."""
    vector = Input((8,))
    x = layers.Dense(32, "gelu", name="body")(vector)
    return Model(vector, [layers.Dense(CLASSES, name=f"head_{n}")(x) for n in range(11)])


# What few models have, each with one such trait -------------------------------------------------


def critic() -> Model:
    """Spectral normalisation, which changes the weight in each pass of training."""
    norm = layers.SpectralNormalization
    parts = norm(layers.Dense(32, "relu"), name="first"), norm(layers.Dense(16), name="second")
    return Sequential([Input((8,)), *parts, layers.ReLU(), layers.Dense(CLASSES)])


class Centre(layers.Layer):
    """Subtracts a moving mean that it has updated before, as the head of DINO does."""

    def build(self, shape):
        """Begin with a mean of zero."""
        settings = {"initializer": "zeros", "trainable": False, "name": "mean"}
        self.mean = self.add_weight(shape=shape[-1:], **settings)

    def call(self, x, training=None):
        """(n, width) -> (n, width)."""
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, 0))
        return ops.tanh(x - self.mean)


def centred() -> Model:
    """A head that is centred."""
    parts = layers.Dense(16, name="first"), Centre(name="centre"), layers.Dense(CLASSES)
    return Sequential([Input((8,)), *parts])


def lookups() -> Model:
    """Identifiers and numbers, whose places in a vocabulary and among bins have vectors."""
    number, identifier = Input((1,), name="number"), Input((1,), dtype="int64", name="identifier")
    words = layers.IntegerLookup(vocabulary=[3, 5, 8, 13, 21], name="words")(identifier)
    bins = layers.Discretization(bin_boundaries=[-1.0, 0.0, 1.0], name="bins")(number)
    vectors = [layers.Flatten()(layers.Embedding(8, 8)(codes)) for codes in (words, bins)]
    hidden = layers.Dense(16, "relu", name="hidden")(layers.Concatenate(name="both")(vectors))
    return Model({"number": number, "identifier": identifier}, layers.Dense(CLASSES)(hidden))


def active() -> Model:
    """A layer that is held back by what it gives."""
    regularizer = regularizers.L2(1e-2)
    wide = layers.Dense(32, "relu", activity_regularizer=regularizer, name="wide")
    return Sequential(
        [Input((8,)), wide, layers.Dense(16, "relu", name="hidden"), layers.Dense(CLASSES)]
    )


def conv_lstm() -> Model:
    """A recurrent layer over images."""
    memory = layers.ConvLSTM2D(6, 3, name="memory")
    pool = layers.GlobalAveragePooling2D(name="pool")
    return Sequential([Input((4, 10, 10, 2)), memory, pool, layers.Dense(CLASSES)])


class CTC(layers.Layer):
    """Adds CTC's loss of the labels that the model is given."""

    def call(self, labels, logits):
        """Labels (n, 4) and logits (n, t, classes) -> these logits."""
        count = ops.shape(logits)[0]
        lengths = ops.full((count,), 4, dtype="int32"), ops.full((count,), LENGTH, dtype="int32")
        self.add_loss(0.1 * ops.mean(ops.ctc_loss(labels, logits, *lengths)))
        return logits


def speech() -> Model:
    """Vectors over time and what they say, both as inputs, as in Keras's tutorial."""
    vectors, labels = Input((LENGTH, 8), name="x"), Input((4,), dtype="int32", name="labels")
    hidden = layers.Dense(16, "relu", name="hidden")(vectors)
    logits = layers.Dense(CLASSES, name="logits")(hidden)
    return Model({"x": vectors, "labels": labels}, CTC(name="ctc")(labels, logits))


# What they are fed with, and what their outputs are worth ---------------------------------------


def _random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _vectors(*shape: int) -> Callable:
    return lambda n, seed=0: tf.constant(_random(seed).normal(size=(n, *shape)), tf.float32)


_images = _vectors(SIZE, SIZE, 3)


def _pixels(n: int, seed: int = 0) -> tf.Tensor:
    return tf.constant(_random(seed).uniform(0, 255, (n, SIZE, SIZE, 3)), tf.float32)


def _codes(n: int, seed: int = 0) -> tf.Tensor:
    return tf.constant(_random(seed).integers(1, VOCABULARY, (n, LENGTH)), tf.int32)


def _classes(*shape: int, classes: int = CLASSES) -> Callable:
    return lambda n, seed=1: tf.constant(_random(seed).integers(0, classes, (n, *shape)), tf.int64)


def _table(n: int, seed: int = 0) -> tf.Tensor:
    numbers = _random(seed).normal(size=(n, 3)) * [20.0, 3.0, 0.1] + [100.0, -3.0, 0.5]
    return tf.constant(numbers, tf.float32)


def _wide_inputs(n: int, seed: int = 0) -> dict[str, tf.Tensor]:
    return {"numbers": _table(n, seed), "category": tf.range(n) % 7}


def _bert_inputs(n: int, seed: int = 0) -> dict[str, tf.Tensor]:
    mask = tf.concat([tf.ones((n, LENGTH - 3), tf.int32), tf.zeros((n, 3), tf.int32)], 1)
    return {"token_ids": _codes(n, seed) * mask, "padding_mask": mask}


def _gpt_inputs(n: int, seed: int = 0) -> dict[str, tf.Tensor]:
    return {"token_ids": _codes(n, seed)}


def _identified(n: int, seed: int = 0) -> dict[str, tf.Tensor]:
    identifier = tf.constant(_random(seed).choice([3, 5, 8, 13, 21, 34], (n, 1)), tf.int64)
    return {"number": _vectors(1)(n, seed), "identifier": identifier}


def _spoken(n: int, seed: int = 0) -> dict[str, tf.Tensor]:
    labels = tf.constant(_random(seed).integers(1, CLASSES, (n, 4)), tf.int32)
    return {"x": _vectors(LENGTH, 8)(n, seed), "labels": labels}


def _pair(n: int, seed: int = 0) -> tuple[tf.Tensor, tf.Tensor]:
    return _images(n, seed), _vectors(5)(n, seed)


def cross_entropy(output, y) -> tf.Tensor:
    """Mean cross-entropy of logits (..., classes), with classes in the last axis."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, _wide(output)))


def _wide(output) -> tf.Tensor:
    return output if output.dtype == tf.float64 else tf.cast(output, tf.float32)


def many_losses(output, y) -> tf.Tensor:
    """Cross-entropy of the first output or "logits", and a tenth of the others' mean square."""
    if isinstance(output, dict):
        output = dict(output)
        first = output.pop("logits", None)
        first, *others = ([first] if first is not None else []) + list(output.values())
    else:
        first, *others = output
    squares = [tf.reduce_mean(tf.square(_wide(part))) for part in others]
    return cross_entropy(first, y) + 0.1 * tf.add_n(squares)


def loss_of(model: Foreign) -> Callable:
    """The loss that a model of the zoo trains with: `loss_fn(output, y)`."""
    return many_losses if {"tuple outputs", "dict outputs"} & {*model.traits} else cross_entropy


# The models -------------------------------------------------------------------------------------


def _application(name: str) -> Callable:
    def make() -> Model:
        make = getattr(tf.keras.applications, name)
        shape = (SIZE, SIZE, 3)
        return make(weights=None, classes=CLASSES, input_shape=shape, classifier_activation=None)

    return make


def _seeded(make: Callable, inputs: Callable) -> Callable:
    kept = []

    def build() -> Model:
        tf.keras.utils.set_random_seed(0)
        model = make()
        if not model.built:  # a subclassed one has no variables before its first call
            x = inputs(2)
            model(*x) if isinstance(x, tuple) else model(x)
        norms = _of_kind(model, layers.BatchNormalization)
        if norms and not kept:
            kept.extend(_statistics(model, norms, inputs(64)))
        for norm, (mean, variance) in zip(norms, kept, strict=bool(norms)):
            norm.moving_mean.assign(mean)
            norm.moving_variance.assign(variance)
        return model

    return build


def _of_kind(model: Model, kind: type) -> list:
    return [layer for layer in model._flatten_layers() if isinstance(layer, kind)]


def _statistics(model: Model, norms: list, x) -> list[tuple]:
    """Means and variances of the normalisations of a model that has seen x, as a trained one's.

    With those that they begin with, what a random model predicts would all but vanish.
    """
    dropouts = _of_kind(model, layers.Dropout)
    before = [norm.momentum for norm in norms], [dropout.rate for dropout in dropouts]
    for norm in norms:
        norm.momentum = 0.0
    for dropout in dropouts:
        dropout.rate = 0.0
    model(x, training=True)
    for norm, momentum in zip(norms, before[0], strict=True):
        norm.momentum = momentum
    for dropout, rate in zip(dropouts, before[1], strict=True):
        dropout.rate = rate
    return [(norm.moving_mean.numpy(), norm.moving_variance.numpy()) for norm in norms]


def _zoo() -> dict[str, Foreign]:
    images, label, text = _images, _classes(), _classes(LENGTH, classes=VOCABULARY)
    rows = [
        ("groups_net", groups_net, images, label,
         "images gelu grouped depthwise residual concatenated"
         " dropout batchnorm", "mix", "pool", "left", ""),
        ("unet", unet, images, _classes(SIZE, SIZE), "images transposed concatenated",
         "first,second",
         "second_conv", "", ""),
        ("video", video, _vectors(8, 16, 16, 3), label, "conv3d batchnorm", "first,second", "pool",
         "second", ""),
        ("two_heads", two_heads, images, label, "images tuple_outputs", "features", "hidden", "",
         ""),
        ("dict_heads", dict_heads, images, label, "images dict_outputs batchnorm", "neck", "neck",
         "",
         ""),
        ("subclassed", Subclassed, images, label, "images subclassed residual dropout l2 batchnorm",
         "residual_?", "hidden", "", ""),
        ("conv1d_text", conv1d_text, _codes, label, "conv1d gelu residual", "layer0,layer1",
         "norm", "norm", ""),
        ("bilstm", bilstm, _codes, label, "lstm", "hidden", "hidden", "hidden", ""),
        ("tied_language", TiedLanguage, _codes, text, "lstm tied dropout subclassed", "embedding",
         "embedding", "", ""),
        ("encoder", encoder, _vectors(LENGTH, 8), label, "attention gelu dropout residual",
         "block0,block1", "pool", "block1_norm0", "block?_up > block?_down"),
        ("bert", bert, _bert_inputs, label, "attention gelu dropout residual dict_inputs"
         " dict_outputs", "block0,block1", "pooler", "", ""),
        ("gpt", gpt, _gpt_inputs, text, "attention tied dropout residual dict_inputs",
         "block0,block1", "norm", "", ""),
        ("normalized", normalized, _table, label, "normalization gelu l2 dropout", "up,down",
         "down", "down", "up > down"),
        ("two_inputs", two_inputs, _pair, label, "images tuple_inputs concatenated", "first",
         "both", "",
         "first > second"),
        ("two_arguments", TwoArguments, _pair, label, "images tuple_inputs subclassed", "vector",
         "vector", "", ""),
        ("wide_and_deep", wide_and_deep, _wide_inputs, label, "normalization gelu dict_inputs"
         " concatenated", "up,down", "down", "", ""),
        ("eleven_heads", eleven_heads, _vectors(8), label, "gelu tuple_outputs eleven_outputs",
         "body", "body", "", ""),
        ("MobileNetV3Small", _application("MobileNetV3Small"), _pixels, label,
         "images depthwise residual dropout batchnorm", "expanded_conv_3,expanded_conv_4",
         "expanded_conv_4_add", "", ""),
        ("EfficientNetB0", _application("EfficientNetB0"), _pixels, label,
         "images normalization depthwise residual dropout batchnorm", "block3b,block4b", "top_conv",
         "block4a_expand_conv", ""),
        ("ResNet50", _application("ResNet50"), _images, label, "images residual batchnorm",
         "conv3_block2,conv3_block3", "conv4_block1_out", "conv4_block1_1_conv", ""),
        ("DenseNet121", _application("DenseNet121"), _images, label,
         "images concatenated batchnorm",
         "conv3_block2,conv3_block3", "pool4_conv", "pool4_bn", ""),
        ("critic", critic, _vectors(8), label, "spectral", "first", "second", "", ""),
        ("centred", centred, _vectors(8), label, "assigned_state", "centre", "centre", "", ""),
        ("lookups", lookups, _identified, label, "lookup dict_inputs concatenated", "hidden",
         "hidden", "", ""),
        ("active", active, _vectors(8), label, "activity", "wide", "hidden", "", ""),
        ("conv_lstm", conv_lstm, _vectors(4, 10, 10, 2), label, "conv_lstm", "memory", "pool", "",
         ""),
        ("speech", speech, _spoken, _classes(LENGTH), "ctc dict_inputs", "hidden", "hidden", "",
         ""),
    ]  # fmt: skip
    found = {}
    for name, make, inputs, labels, traits, blocks, layer, cut, pairs in rows:
        kinds = tuple(trait.replace("_", " ") for trait in traits.split())
        build = _seeded(make, inputs)
        found[name] = Foreign(name, build, inputs, labels, kinds, blocks, layer, cut, pairs)
    return found


ZOO = _zoo()
