"""The kit's GPT on samples of many lengths: any length, positions and a mask as they are given.

What it holds: what a model has to take so that its samples can be packed.
Twin: `pt_impl/kit/packed.py`.
Where the frameworks differ: a mask is added to the scores here.
"""

import tensorflow as tf

from tf_impl.kit import models


class PackedGPT(tf.keras.Model):
    """`model(codes)`, or with positions and which places see which; it has the model's weights."""

    def __init__(self, spec, weights: dict):
        """Build the kit's model, whose layers take any length one by one."""
        super().__init__()
        self.spec, self.gpt = spec, models.build(spec, weights)

    def call(self, codes, positions=None, allowed=None):
        """Logits (n, t, vocabulary). codes, positions: (n, t) int64; allowed: (n, 1, t, t) bool.

        Without `allowed` a place sees those before it.
        """
        layer, places = self.gpt.get_layer, tf.range(tf.shape(codes)[1])
        if positions is None:
            positions = places
        if allowed is None:
            allowed = (places[:, None] >= places)[None, None]
        table = layer("positions").weights[0]
        # A product, since the gradient of rows that are gathered would be sparse.
        x = layer("tokens")(codes) + tf.one_hot(positions, table.shape[0]) @ table
        for index in range(self.spec.layers):
            name = f"block{index}"
            inside = layer(f"{name}.qkv")(layer(f"{name}.ln0")(x))
            x += layer(f"{name}.projection")(self._attend(inside, allowed))
            inside = layer(f"{name}.gelu")(layer(f"{name}.up")(layer(f"{name}.ln1")(x)))
            x += layer(f"{name}.down")(inside)
        return layer("head")(layer("ln")(x))

    def _attend(self, inside, allowed):
        """Scaled dot-product attention within the places that are allowed."""
        shape, heads, width = tf.shape(inside), self.spec.heads, self.spec.width
        split = tf.reshape(inside, (shape[0], shape[1], 3, heads, width // heads))
        query, key, value = tf.unstack(tf.transpose(split, (2, 0, 3, 1, 4)))
        scores = tf.matmul(query * (width // heads) ** -0.5, key, transpose_b=True)
        shares = tf.nn.softmax(tf.where(allowed, scores, scores.dtype.min))
        mixed = tf.transpose(tf.matmul(shares, value), (0, 2, 1, 3))
        return tf.reshape(mixed, (shape[0], shape[1], width))


def build(spec, weights: dict) -> tf.keras.Model:
    """The model of a GPT's spec and canonical weights, without dropout."""
    return PackedGPT(spec, weights)
