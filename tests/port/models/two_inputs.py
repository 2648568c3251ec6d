"""A model of numbers and of a bag of words, in both frameworks, that gives probabilities.

PLANT names the one thing in which they differ; "" means nothing.
"""

import numpy as np

PLANT = ""
NUMBERS, WORDS, BAG, SIZE, CLASSES = 6, 20, 5, 12, 4
RATE = 2e-3


def pytorch():
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            padding = 0 if PLANT == "padding_token" else None
            self.words = nn.Embedding(WORDS, SIZE, padding_idx=padding)
            if padding is not None:
                with torch.no_grad():  # it starts as the other side's does
                    self.words.weight[0] = torch.linspace(-1, 1, SIZE)
            self.dense1 = nn.Linear(NUMBERS, SIZE, bias=False)
            self.bn = nn.BatchNorm1d(SIZE)
            self.act1 = nn.LeakyReLU(0.01)
            self.dense2 = nn.Linear(SIZE, SIZE)
            self.drop = nn.Dropout(0.2)
            self.head = nn.Linear(2 * SIZE, CLASSES)

        def forward(self, numbers, words):
            x = self.dense2(self.act1(self.bn(self.dense1(numbers))))
            x = torch.cat((torch.tanh(x), self.words(words).mean(1)), 1)
            return torch.softmax(self.head(self.drop(x)), 1)

    def loss(output, y):
        if PLANT == "logits":
            return nn.functional.cross_entropy(output, y)
        reduction = "sum" if PLANT == "loss_reduction" else "mean"
        return nn.functional.nll_loss(output.log(), y, reduction=reduction)

    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    if PLANT == "gradient_clipping":
        parameters = list(net.parameters())
        optimizer.register_step_pre_hook(
            lambda *_: nn.utils.clip_grad_norm_(parameters, 0.01) and None
        )
    return net, loss, optimizer


def tensorflow():
    import keras
    from keras import layers, ops

    class UnbiasedBatchNormalization(layers.BatchNormalization):
        """Updates the moving variance with the unbiased one, as PyTorch does."""

        def call(self, inputs, training=None, mask=None):
            kept = self.momentum * ops.convert_to_tensor(self.moving_variance)
            outputs = super().call(inputs, training=training, mask=mask)
            if training and self.trainable:
                count = ops.cast(ops.shape(inputs)[0], "float32")
                new = self.moving_variance - kept
                self.moving_variance.assign(kept + new * count / (count - 1))
            return outputs

    class DenseEmbedding(layers.Embedding):
        """Its gradient is an array, as PyTorch's, in which those of a repeated word are added."""

        def call(self, inputs):
            return ops.take(self.embeddings * 1.0, inputs, axis=0)

    numbers = keras.Input((NUMBERS,), name="numbers")
    words = keras.Input((BAG,), name="words", dtype="int32")
    penalty = keras.regularizers.L2(0.01) if PLANT == "penalty" else None
    x = layers.Dense(SIZE, use_bias=False, kernel_regularizer=penalty, name="dense1")(numbers)
    kind = UnbiasedBatchNormalization
    if PLANT == "running_variance":
        kind = layers.BatchNormalization
    x = kind(
        momentum=0.99 if PLANT == "batchnorm_momentum" else 0.9,
        epsilon=1e-3 if PLANT == "normalization_epsilon" else 1e-5,
        name="bn",
    )(x)
    slope = 0.2 if PLANT == "leaky_relu_slope" else 0.01
    x = layers.LeakyReLU(negative_slope=slope, name="act1")(x)
    dtype = "float64" if PLANT == "precision" else None
    activation = "relu" if PLANT == "activation" else "tanh"
    x = layers.Dense(SIZE, activation=activation, name="dense2", dtype=dtype)(x)
    x = ops.cast(x, "float32") if dtype else x
    embedding = layers.Embedding if PLANT == "embedding_slices" else DenseEmbedding
    bag = ops.mean(embedding(WORDS, SIZE, name="words_table")(words), 1)
    x = layers.Concatenate(name="both")([x, bag])
    x = layers.Dropout(0.8 if PLANT == "dropout_rate" else 0.2, name="drop")(x)
    x = layers.Dense(CLASSES, activation="softmax", name="head")(x)
    model = keras.Model({"numbers": numbers, "words": words}, x)
    if PLANT == "frozen_layer":
        model.get_layer("dense2").trainable = False
    clipping = {"clipvalue": 0.01} if PLANT == "gradient_clipping" else {}
    epsilon = 1e-4 if PLANT == "optimizer_epsilon" else 1e-8
    optimizer = keras.optimizers.Adam(RATE, epsilon=epsilon, **clipping)
    return model, keras.losses.SparseCategoricalCrossentropy(), optimizer


def batch(size=10, seed=0):
    random = np.random.default_rng(seed)
    numbers = random.standard_normal((size, NUMBERS), dtype=np.float32)
    words = random.integers(0, WORDS, (size, BAG))
    words[:, -1] = 0  # padding
    return {"numbers": numbers, "words": words}, random.integers(0, CLASSES, size)


def copy_weights(pytorch_model, tensorflow_model):
    state = {name: value.detach().numpy() for name, value in pytorch_model.state_dict().items()}
    layer = tensorflow_model.get_layer
    layer("words_table").set_weights([state["words.weight"]])
    kinds = ("weight", "bias", "running_mean", "running_var")
    layer("bn").set_weights([state[f"bn.{kind}"] for kind in kinds])
    layer("dense1").set_weights([state["dense1.weight"].T])
    for name in ("dense2", "head"):
        kernel = state[f"{name}.weight"].T
        if PLANT == "weight_layout" and name == "dense2":
            kernel = kernel.T
        if not (PLANT == "initial_values" and name == "head"):
            layer(name).set_weights([kernel, state[f"{name}.bias"]])
