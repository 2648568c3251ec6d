"""The model families of the suite as functional Keras models, and their weights in and out.

What it holds: a model from a `shared.specs` spec, NHWC, in either Keras flavour: `tf.keras` is
Keras 3, or tf_keras where TF_USE_LEGACY_KERAS=1 was set before the import. Those of images are in
`shared/keras_models.py`, for any backend of Keras. Layers carry the canonical names, and Keras
stores weights in the canonical layout, so nothing has to be mapped.
Twin: `pt_impl/kit/models.py`.
Where the frameworks differ: Keras calls the complement of `bn_momentum` "momentum". Keras 3 feeds
BatchNorm's running variance with the biased variance of a batch (the sum over n values divided by
n), PyTorch and the fused kernel of tf_keras with the unbiased one (divided by n - 1). Training is
the same; in evaluation mode Keras 3's variance is smaller by a relative 1/n at most, which shows
where a small batch meets a small map.
"""

import numpy as np
import tensorflow as tf

from shared import keras_models
from shared.specs import GPTSpec, ModelSpec
from tf_impl.kit import runtime


class Tokens(tf.keras.layers.Embedding):
    """An embedding whose gradient is dense: codes (n, t) -> (n, t, width).

    Keras's own hands the optimizer one slice a position, and Keras 3.15's Adam and RMSprop square
    each slice apart, so that a code seen k times in a batch gets a wrong second moment.
    """

    def call(self, inputs):
        """Look the codes up, in the layer's compute dtype."""
        table = tf.convert_to_tensor(self.embeddings)
        return tf.cast(_look_up(table, inputs), self.compute_dtype)


@tf.custom_gradient
def _look_up(table, codes):
    """Rows of `table`; the gradient sums the rows of each code, in float32."""

    def gradient(upstream):
        rows = tf.reshape(tf.cast(upstream, tf.float32), (-1, table.shape[1]))
        total = tf.math.unsorted_segment_sum(rows, tf.reshape(codes, (-1,)), table.shape[0])
        return tf.cast(total, table.dtype), None

    return tf.gather(table, codes), gradient


class Positions(tf.keras.layers.Layer):
    """Adds one learned vector a position: (n, t, width) -> (n, t, width)."""

    def build(self, input_shape):
        """Create the table of shape (t, width)."""
        self.embeddings = self.add_weight(name="embeddings", shape=tuple(input_shape)[1:])
        super().build(input_shape)

    def call(self, inputs):
        """Add the table, in the dtype of the inputs; its beginning where a graph leaves t open."""
        table = tf.cast(self.embeddings, inputs.dtype)
        return inputs + (table[: tf.shape(inputs)[1]] if inputs.shape[1] is None else table)


class SelfAttention(tf.keras.layers.Layer):
    """Scaled dot-product attention, `causal` only to the left: (n, t, 3 * width) -> (n, t, width).

    The last axis of the input is [query | key | value], each split into heads contiguously. The
    products run in the layer's compute dtype, the softmax in float32 (Vaswani et al., 2017); in
    training, `dropout` of the shares are zero.
    """

    def __init__(self, heads, dropout=0.0, causal=True, **kwargs):
        """Keep the number of heads, which divides the width."""
        super().__init__(**kwargs)
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.drop = tf.keras.layers.Dropout(dropout) if dropout else None

    def call(self, inputs, training=None):
        """Attend within each head, then join the heads."""
        length, width = inputs.shape[1], inputs.shape[2] // 3
        if length is None:  # a graph for any length: see export
            length = tf.shape(inputs)[1]
        size = width // self.heads
        split = tf.reshape(inputs, (-1, length, 3, self.heads, size))
        query, key, value = tf.unstack(tf.transpose(split, (2, 0, 3, 1, 4)))
        scores = tf.matmul(query * size**-0.5, key, transpose_b=True)
        scores = tf.cast(scores, tf.float32)
        if self.causal:
            scores += _future(length)
        shares = tf.cast(tf.nn.softmax(scores), value.dtype)
        if self.drop is not None:
            shares = self.drop(shares, training=training)
        mixed = tf.matmul(shares, value)
        return tf.reshape(tf.transpose(mixed, (0, 2, 1, 3)), (-1, length, width))

    def get_config(self):
        """Return what rebuilds the layer."""
        own = {"heads": self.heads, "dropout": self.dropout, "causal": self.causal}
        return {**super().get_config(), **own}


def _future(length):
    """Minus infinity above the diagonal, 0 elsewhere: (length, length) float32."""
    if isinstance(length, int):
        return np.triu(np.full((length, length), -np.inf, np.float32), k=1)
    place = tf.range(length)
    return tf.where(place[None] > place[:, None], -np.inf, tf.constant(0.0))


def build(spec: ModelSpec, weights: dict[str, np.ndarray] | None = None) -> tf.keras.Model:
    """Build the model of `spec` on `runtime.device()`, with canonical `weights` if given.

    Images go in as float32 (n, height, width, channels), codes as int64 (n, t). Logits come out
    as (n, classes) or (n, t, vocabulary); of a detector comes (n, places, classes + 4): all places
    of the first level row by row, then those of the next; logits of the classes, then the
    four numbers of a box. Raises ValueError where `weights` do not fit.
    """
    with tf.device(runtime.device()):
        model = _gpt(spec) if isinstance(spec, GPTSpec) else keras_models.build(tf.keras, spec)
    if weights is not None:
        import_weights(model, weights)
    return model


def split_head(model: tf.keras.Model) -> tuple[tf.keras.Model, tf.keras.layers.Layer]:
    """The model's features and its head, x -> features -> logits; both share its weights."""
    head = model.get_layer("head")
    return tf.keras.Model(model.input, head.input), head


def _gpt(spec):
    layers = tf.keras.layers
    inputs = tf.keras.Input((spec.sequence_length,), dtype="int64", name="codes")
    x = Tokens(spec.vocabulary, spec.width, name="tokens")(inputs)
    x = _dropout(Positions(name="positions")(x), spec, "dropout")
    for index in range(spec.layers):
        x = _block(x, spec, f"block{index}")
    x = layers.LayerNormalization(epsilon=spec.ln_eps, name="ln")(x)
    return tf.keras.Model(inputs, layers.Dense(spec.vocabulary, use_bias=False, name="head")(x))


def _block(x, spec, name):
    """Pre-norm attention and feed-forward, each added to its input."""
    layers = tf.keras.layers
    inside = layers.LayerNormalization(epsilon=spec.ln_eps, name=f"{name}.ln0")(x)
    inside = layers.Dense(3 * spec.width, use_bias=False, name=f"{name}.qkv")(inside)
    attention = SelfAttention(spec.heads, spec.dropout, spec.causal, name=f"{name}.attention")
    inside = attention(inside)
    inside = layers.Dense(spec.width, use_bias=False, name=f"{name}.projection")(inside)
    inside = _dropout(inside, spec, f"{name}.dropout0")
    x = layers.Add(name=f"{name}.add0")([x, inside])
    inside = layers.LayerNormalization(epsilon=spec.ln_eps, name=f"{name}.ln1")(x)
    inside = layers.Dense(4 * spec.width, name=f"{name}.up")(inside)
    inside = layers.Activation(_gelu, name=f"{name}.gelu")(inside)
    inside = layers.Dense(spec.width, name=f"{name}.down")(inside)
    inside = _dropout(inside, spec, f"{name}.dropout1")
    return layers.Add(name=f"{name}.add1")([x, inside])


def _dropout(x, spec, name):
    """In training, `spec.dropout` of `x` are zero and the rest is scaled up."""
    return tf.keras.layers.Dropout(spec.dropout, name=name)(x) if spec.dropout else x


@tf.keras.utils.register_keras_serializable("twinbench")  # so that Keras can copy its layer
def _gelu(x):
    """The tanh approximation (Hendrycks and Gimpel, 2016)."""
    return tf.nn.gelu(x, approximate=True)


def named_parameters(model: tf.keras.Model) -> dict[str, tf.Variable]:
    """Canonical name -> trainable variable, in the order of the layers."""
    trainable = {id(variable) for variable in model.trainable_variables}
    named = keras_models.named_variables(model)
    return {name: variable for name, variable in named.items() if id(variable) in trainable}


def to_canonical(name: str, array) -> np.ndarray:
    """Return a weight or gradient called `name` as the array it is: Keras's layout is canonical."""
    return np.asarray(tf.convert_to_tensor(array))


def import_weights(model: tf.keras.Model, weights: dict[str, np.ndarray]) -> None:
    """Copy canonical `weights` into the model.

    Raises ValueError, before anything is changed, where a name is missing or unknown or a shape
    differs.
    """
    keras_models.import_weights(model, weights)


def export_weights(model: tf.keras.Model) -> dict[str, np.ndarray]:
    """Canonical name -> float32 array of every parameter and running statistic, copied."""
    return keras_models.export_weights(model)


def parameter_count(model: tf.keras.Model) -> int:
    """Number of trainable parameters."""
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
