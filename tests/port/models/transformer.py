"""A transformer that classifies padded sentences, in both frameworks.

The first block has each framework's layer of attention, the second one that is written out. PLANT
names the one thing in which they differ; "" means nothing.
"""

import math

import numpy as np

PLANT = ""
WORDS, LENGTH, SIZE, HEADS, CLASSES = 40, 6, 16, 4, 5
HEAD = SIZE // HEADS
RATE, DECAY = 2e-3, 0.1


def pytorch():
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value, self.output = (
                nn.Linear(SIZE, SIZE) for _ in range(4)
            )

        def forward(self, x, mask):
            parts = (self.query(x), self.key(x), self.value(x))
            q, k, v = (part.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for part in parts)
            scale = 1.0 if PLANT == "attention_scale" else HEAD**-0.5
            scores = q @ k.transpose(-1, -2) * scale
            scores = scores.masked_fill(~mask[:, None, None], -1e9)
            axis = -2 if PLANT == "softmax_axis" else -1
            mixed = torch.softmax(scores, dim=axis) @ v
            return self.output(mixed.transpose(1, 2).flatten(2))

    class Block(nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.norm1 = nn.LayerNorm(SIZE)
            self.attention = attention
            self.norm2 = nn.LayerNorm(SIZE)
            self.up = nn.Linear(SIZE, 2 * SIZE)
            self.act = nn.GELU()
            self.down = nn.Linear(2 * SIZE, SIZE)

        def forward(self, x, mask):
            y = self.norm1(x)
            if isinstance(self.attention, nn.MultiheadAttention):
                mixed = self.attention(y, y, y, key_padding_mask=~mask, need_weights=False)[0]
            else:
                mixed = self.attention(y, mask)
            x = x + mixed
            return x + self.down(self.act(self.up(self.norm2(x))))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(WORDS, SIZE)
            self.positions = nn.Parameter(torch.randn(LENGTH, SIZE))
            self.block1 = Block(nn.MultiheadAttention(SIZE, HEADS, batch_first=True))
            self.block2 = Block(Attention())
            self.norm = nn.LayerNorm(SIZE)
            self.head = nn.Linear(SIZE, CLASSES)

        def forward(self, tokens):
            mask = tokens != 0
            x = self.tokens(tokens) + self.positions
            x = self.norm(self.block2(self.block1(x, mask), mask))
            kept = mask[..., None].float()
            return self.head((x * kept).sum(1) / kept.sum(1))

    def loss(output, y):
        smoothing = 0.0 if PLANT == "label_smoothing" else 0.1
        return nn.functional.cross_entropy(output, y, label_smoothing=smoothing)

    torch.manual_seed(0)
    net = Net()
    kind = torch.optim.Adam if PLANT == "weight_decay" else torch.optim.AdamW
    return net, loss, kind(net.parameters(), lr=RATE, weight_decay=DECAY)


def tensorflow():
    import keras
    from keras import layers, ops

    class DenseEmbedding(layers.Embedding):
        """Its gradient is an array, as PyTorch's, in which those of a repeated word are added."""

        def call(self, inputs):
            return ops.take(self.embeddings * 1.0, inputs, axis=0)

    class Positions(layers.Layer):
        """Adds a vector to each position."""

        def build(self, shape):
            self.table = self.add_weight(shape=(LENGTH, SIZE), name="table")

        def call(self, x):
            return x + self.table

    class Attention(layers.Layer):
        """Attention that is written out."""

        def __init__(self, name):
            super().__init__(name=name)
            names = ("query", "key", "value", "output")
            self.query, self.key, self.value, self.out = (
                layers.Dense(SIZE, name=f"{name}_{part}") for part in names
            )

        def split(self, x):
            if PLANT == "reshape_order":
                return ops.transpose(ops.reshape(x, (-1, LENGTH, HEAD, HEADS)), (0, 3, 1, 2))
            return ops.transpose(ops.reshape(x, (-1, LENGTH, HEADS, HEAD)), (0, 2, 1, 3))

        def call(self, x, keep):
            q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
            scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) / math.sqrt(HEAD)
            scores = ops.where(keep[:, None, None], scores, -1e9)
            mixed = ops.transpose(ops.matmul(ops.softmax(scores), v), (0, 2, 1, 3))
            return self.out(ops.reshape(mixed, (-1, LENGTH, SIZE)))

    class Pooling(layers.Layer):
        """The mean over the tokens that are no padding."""

        def call(self, x, keep):
            kept = ops.cast(keep, "float32")[..., None]
            return ops.sum(x * kept, 1) / ops.sum(kept, 1)

    class NotPadding(layers.Layer):
        """True where a token is no padding."""

        def call(self, tokens):
            return ops.not_equal(tokens, 0)

    def block(x, keep, name):
        epsilon = 1e-3 if PLANT == "normalization_epsilon" and name == "block2" else 1e-5
        y = layers.LayerNormalization(epsilon=epsilon, name=f"{name}_norm1")(x)
        if name == "block1":
            attention = layers.MultiHeadAttention(HEADS, HEAD, name=f"{name}_attention")
            mask = None if PLANT == "mask" else keep[:, None, :]
            if PLANT == "attention_mask":
                mask = ops.logical_not(mask)
            y = attention(y, y, attention_mask=mask)
        else:
            y = Attention(f"{name}_attention")(y, keep)
        if not (PLANT == "missing_residual" and name == "block1"):
            y = layers.Add(name=f"{name}_add1")([x, y])
        x, y = y, layers.LayerNormalization(epsilon=1e-5, name=f"{name}_norm2")(y)
        y = layers.Dense(2 * SIZE, name=f"{name}_up")(y)
        tanh = PLANT == "gelu" and name == "block1"
        y = layers.Activation(
            lambda z: keras.activations.gelu(z, approximate=tanh), name=f"{name}_act"
        )(y)
        return layers.Add()([x, layers.Dense(SIZE, name=f"{name}_down")(y)])

    class Uncorrected(keras.optimizers.AdamW):
        """AdamW whose moments are not corrected for bias, as that of the first BERT."""

        def update_step(self, gradient, variable, learning_rate):
            place = self._get_variable_index(variable)
            m, v = self._momentums[place], self._velocities[place]
            m.assign(self.beta_1 * m + (1 - self.beta_1) * gradient)
            v.assign(self.beta_2 * v + (1 - self.beta_2) * gradient**2)
            variable.assign_sub(learning_rate * m / (ops.sqrt(v) + self.epsilon))

    tokens = keras.Input((LENGTH,), dtype="int32")
    keep = NotPadding()(tokens)
    x = DenseEmbedding(WORDS, SIZE, name="tokens")(tokens)
    x = Positions(name="positions")(x)
    x = block(block(x, keep, "block1"), keep, "block2")
    x = layers.LayerNormalization(epsilon=1e-5, name="norm")(x)
    model = keras.Model(tokens, layers.Dense(CLASSES, name="head")(Pooling()(x, keep)))

    def loss(output, y):
        targets = ops.one_hot(y, CLASSES)
        return keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)(
            targets, output
        )

    epsilon = 1e-5 if PLANT == "optimizer_epsilon" else 1e-8
    kind = Uncorrected if PLANT == "bias_correction" else keras.optimizers.AdamW
    rate = RATE / 2 if PLANT == "learning_rate" else RATE
    return model, loss, kind(rate, weight_decay=DECAY, epsilon=epsilon)


def batch(size=8, seed=0):
    random = np.random.default_rng(seed)
    x = random.integers(1, WORDS, (size, LENGTH))
    x[np.arange(LENGTH) >= random.integers(2, LENGTH, (size, 1))] = 0
    return x, random.integers(0, CLASSES, size)


def copy_weights(pytorch_model, tensorflow_model):
    state = {name: value.detach().numpy() for name, value in pytorch_model.state_dict().items()}
    layer = tensorflow_model.get_layer
    layer("tokens").set_weights([state["tokens.weight"]])
    if PLANT != "initial_values":
        layer("positions").set_weights([state["positions"]])

    def dense(keras_layer, name):
        keras_layer.set_weights([state[f"{name}.weight"].T, state[f"{name}.bias"]])

    for block in ("block1", "block2"):
        for norm in ("norm1", "norm2"):
            names = [f"{block}.{norm}.{kind}" for kind in ("weight", "bias")]
            layer(f"{block}_{norm}").set_weights([state[name] for name in names])
        for part in ("up", "down"):
            dense(layer(f"{block}_{part}"), f"{block}.{part}")
    packed = zip(
        np.split(state["block1.attention.in_proj_weight"], 3),
        np.split(state["block1.attention.in_proj_bias"], 3),
        strict=True,
    )
    weights = []
    for weight, bias in packed:
        weights += [weight.T.reshape(SIZE, HEADS, HEAD), bias.reshape(HEADS, HEAD)]
    weights.append(state["block1.attention.out_proj.weight"].T.reshape(HEADS, HEAD, SIZE))
    layer("block1_attention").set_weights([*weights, state["block1.attention.out_proj.bias"]])
    attention = layer("block2_attention")
    for part in ("query", "key", "value", "out"):
        name = f"block2.attention.{'output' if part == 'out' else part}"
        if PLANT == "weight_layout" and part == "value":
            attention.value.set_weights([state[f"{name}.weight"], state[f"{name}.bias"]])
        else:
            dense(getattr(attention, part), name)
    layer("norm").set_weights([state["norm.weight"], state["norm.bias"]])
    dense(layer("head"), "head")
