"""A small residual network with BatchNorm, pooling and a flattened head, in both frameworks.

PLANT names the one thing in which they differ; "" means nothing.
"""

import numpy as np

PLANT = ""
CHANNELS, CLASSES = 8, 5


def pytorch():
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, name):
            super().__init__()
            stride = 2 if name == "block1" else 1
            self.conv1 = nn.Conv2d(CHANNELS, CHANNELS, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(CHANNELS)
            self.act1 = nn.LeakyReLU(0.1)
            self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
            self.bn2 = nn.BatchNorm2d(CHANNELS)
            self.skip = nn.Conv2d(CHANNELS, CHANNELS, 1, stride, bias=False)
            self.act2 = nn.ReLU()

        def forward(self, x):
            y = self.act1(self.bn1(self.conv1(x)))
            return self.act2(self.bn2(self.conv2(y)) + self.skip(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False)
            self.bn = nn.BatchNorm2d(CHANNELS)
            self.act = nn.LeakyReLU(0.1)
            self.pool = nn.MaxPool2d(3, 2, 1)
            self.block1 = Block("block1")
            self.block2 = Block("block2")
            self.fc = nn.Linear(CHANNELS * 3 * 3, CLASSES)

        def forward(self, x):
            if PLANT == "preprocessing":
                x = (x - 0.5) / 0.25
            x = self.pool(self.act(self.bn(self.stem(x))))
            x = self.block2(self.block1(x))
            return self.fc(torch.flatten(x, 1))

    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    if PLANT == "gradient_clipping":
        parameters = list(net.parameters())
        optimizer.register_step_pre_hook(
            lambda *_: torch.nn.utils.clip_grad_norm_(parameters, 0.5) and None
        )
    return net, nn.functional.cross_entropy, optimizer


def tensorflow():
    import keras
    from keras import layers

    class UnbiasedBatchNormalization(layers.BatchNormalization):
        """Updates the moving variance with the unbiased one, as PyTorch does."""

        def call(self, inputs, training=None, mask=None):
            kept = self.momentum * keras.ops.convert_to_tensor(self.moving_variance)
            outputs = super().call(inputs, training=training, mask=mask)
            if training and self.trainable:
                shape = keras.ops.shape(inputs)
                count = keras.ops.cast(shape[0] * shape[1] * shape[2], "float32")
                new = self.moving_variance - kept
                self.moving_variance.assign(kept + new * count / (count - 1))
            return outputs

    def norm(name):
        planted = PLANT if name == "block1_bn1" else ""
        kind = UnbiasedBatchNormalization
        if planted == "running_variance":
            kind = layers.BatchNormalization
        return kind(
            epsilon=1e-3 if planted == "normalization_epsilon" else 1e-5,
            momentum=0.1 if planted == "batchnorm_momentum" else 0.9,
            trainable=planted != "frozen_normalization",
            name=name,
        )

    def block(x, name):
        strides = 2 if name == "block1" else 1
        convolution = {"use_bias": False, "strides": strides, "name": f"{name}_conv1"}
        if PLANT == "convolution_padding" and name == "block1":
            y = layers.Conv2D(CHANNELS, 3, padding="same", **convolution)(x)
        else:
            y = layers.Conv2D(CHANNELS, 3, **convolution)(layers.ZeroPadding2D(1)(x))
        y = norm(f"{name}_bn1")(y)
        if PLANT == "activation" and name == "block2":
            y = layers.Activation("silu", name=f"{name}_act1")(y)
        else:
            y = layers.LeakyReLU(negative_slope=0.1, name=f"{name}_act1")(y)
        y = layers.Conv2D(CHANNELS, 3, padding="same", use_bias=False, name=f"{name}_conv2")(y)
        y = norm(f"{name}_bn2")(y)
        s = layers.Conv2D(CHANNELS, 1, strides=strides, use_bias=False, name=f"{name}_skip")(x)
        if not (PLANT == "missing_residual" and name == "block2"):
            y = layers.Add(name=f"{name}_add")([y, s])
        return layers.ReLU(name=f"{name}_act2")(y)

    image = keras.Input((12, 12, 3))
    x = layers.Conv2D(CHANNELS, 3, padding="same", use_bias=False, name="stem")(image)
    x = norm("bn")(x)
    slope = 0.3 if PLANT == "leaky_relu_slope" else 0.1
    x = layers.LeakyReLU(negative_slope=slope, name="act")(x)
    if PLANT == "pooling_padding":
        x = layers.MaxPooling2D(3, 2, padding="same", name="pool")(x)
    else:
        x = layers.ZeroPadding2D(1, name="border")(x + 100.0)  # above the zeros of the border
        x = layers.MaxPooling2D(3, 2, name="pool")(x) - 100.0
    x = block(block(x, "block1"), "block2")
    if PLANT != "flatten_order":
        x = layers.Permute((3, 1, 2))(x)
    x = layers.Flatten()(x)
    dtype = "float64" if PLANT == "precision" else None
    x = layers.Dense(CLASSES, name="fc", dtype=dtype)(x)
    model = keras.Model(image, x)
    if PLANT == "frozen_layer":
        model.get_layer("block2_conv1").trainable = False
    clipping = {"clipnorm": 0.5} if PLANT == "gradient_clipping" else {}
    optimizer = keras.optimizers.SGD(
        0.01 if PLANT == "learning_rate" else 0.02,
        momentum=0.5 if PLANT == "momentum" else 0.9,
        nesterov=PLANT == "nesterov",
        **clipping,
    )
    return model, keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer


def batch(size=8, seed=0, framework="pytorch"):
    random = np.random.default_rng(seed)
    x = random.standard_normal((size, 12, 12, 3), dtype=np.float32)
    y = random.integers(0, CLASSES, size)
    return (x.transpose(0, 3, 1, 2) if framework == "pytorch" else x), y


def copy_weights(pytorch_model, tensorflow_model):
    state = {name: value.detach().numpy() for name, value in pytorch_model.state_dict().items()}
    for layer in tensorflow_model.layers:
        name = layer.name.replace("_", ".")
        if not layer.weights or (PLANT == "initial_values" and name == "block2.conv2"):
            continue
        if "bn" in name:
            kinds = ("weight", "bias", "running_mean", "running_var")
            layer.set_weights([state[f"{name}.{kind}"] for kind in kinds])
        elif name == "fc":
            layer.set_weights([state["fc.weight"].T, state["fc.bias"]])
        elif PLANT == "weight_layout" and name == "block1.conv2":
            layer.set_weights([state[f"{name}.weight"].transpose(2, 3, 0, 1)])
        else:
            layer.set_weights([state[f"{name}.weight"].transpose(2, 3, 1, 0)])
