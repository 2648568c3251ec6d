"""A small U-Net that labels pixels, in both frameworks: GroupNorm, up- and downsampling, a gate.

PLANT names the one thing in which they differ; "" means nothing.
"""

import numpy as np

PLANT = ""
SIDE, CHANNELS, CLASSES = 16, 8, 4
IGNORED = 3


def pytorch():
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc1 = nn.Conv2d(2, CHANNELS, 3, padding=1)
            self.norm1 = nn.GroupNorm(2, CHANNELS)
            counted = PLANT != "average_pooling_count"
            self.pool = nn.AvgPool2d(3, 2, 1, count_include_pad=counted)
            self.enc2 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
            self.norm2 = nn.GroupNorm(2, CHANNELS)
            self.squeeze = nn.AdaptiveAvgPool2d(1)
            self.gate = nn.Linear(CHANNELS, CHANNELS)
            self.down = nn.Conv2d(CHANNELS, CHANNELS, 3, 2, 1)
            self.drop = nn.Dropout2d(0.25)
            self.up1 = nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, 2, 1, output_padding=1)
            self.dec1 = nn.Conv2d(2 * CHANNELS, CHANNELS, 3, padding=1)
            aligned = True if PLANT == "align_corners" else None
            mode = "nearest" if PLANT == "interpolation" else "bilinear"
            self.up2 = nn.Upsample(scale_factor=2, mode=mode, align_corners=aligned)
            self.focus = nn.Softmax(dim=1)
            self.dec2 = nn.Conv2d(2 * CHANNELS, CHANNELS, 3, padding=1)
            self.head = nn.Conv2d(CHANNELS, CLASSES, 1)

        def forward(self, x):
            a = torch.relu(self.norm1(self.enc1(x)))
            b = torch.relu(self.norm2(self.enc2(self.pool(a))))
            gate = torch.sigmoid(self.gate(self.squeeze(b).flatten(1)))
            b = b * gate[:, :, None, None]
            if PLANT == "denormals":
                b = b * 1e-20 * 1e-20 * 1e20 * 1e20
            c = self.drop(torch.relu(self.down(b)))
            d = torch.relu(self.dec1(torch.cat((self.up1(c), b), 1)))
            d = self.focus(self.up2(d))
            return self.head(torch.relu(self.dec2(torch.cat((d, a), 1))))

    def loss(output, y):
        ignored = -100 if PLANT == "ignored_label" else IGNORED
        return nn.functional.cross_entropy(output, y, ignore_index=ignored)

    torch.manual_seed(0)
    net = Net()
    return net, loss, torch.optim.SGD(net.parameters(), lr=0.05)


def tensorflow():
    import keras
    from keras import layers, ops

    def conv(filters, name, x, size=3):
        return layers.Conv2D(filters, size, padding="same", name=name)(x)

    def norm(name, x):
        epsilon = 1e-3 if (PLANT, name) == ("normalization_epsilon", "norm2") else 1e-5
        return layers.GroupNormalization(2, epsilon=epsilon, name=name)(x)

    image = keras.Input((SIDE, SIDE, 2))
    a = layers.ReLU()(norm("norm1", conv(CHANNELS, "enc1", image)))
    x = layers.AveragePooling2D(3, 2, name="pool")(layers.ZeroPadding2D(1)(a))
    b = layers.ReLU()(norm("norm2", conv(CHANNELS, "enc2", x)))
    order = "channels_first" if PLANT == "data_format" else "channels_last"
    gate = layers.GlobalAveragePooling2D(data_format=order, name="squeeze")(b)
    gate = layers.Dense(CHANNELS, activation="sigmoid", name="gate")(gate)
    b = b * layers.Reshape((1, 1, CHANNELS))(gate)
    if PLANT == "denormals":
        b = b * 1e-20 * 1e-20 * 1e20 * 1e20
    c = layers.Conv2D(CHANNELS, 3, 2, name="down")(layers.ZeroPadding2D(1)(b))
    c = layers.ReLU()(c)
    dropout = layers.Dropout if PLANT == "dropout_kind" else layers.SpatialDropout2D
    c = dropout(0.25, name="drop")(c)
    if PLANT == "transposed_convolution_padding":
        u = layers.Conv2DTranspose(CHANNELS, 3, 2, padding="same", name="up1")(c)
    else:
        u = layers.Conv2DTranspose(CHANNELS, 3, 2, name="up1")(c)
        u = layers.Cropping2D(((1, 0), (1, 0)))(u)
    d = layers.ReLU()(conv(CHANNELS, "dec1", layers.Concatenate()([u, b])))
    d = layers.UpSampling2D(2, interpolation="bilinear", name="up2")(d)
    d = layers.Softmax(axis=1 if PLANT == "softmax_axis" else -1, name="focus")(d)
    d = layers.ReLU()(conv(CHANNELS, "dec2", layers.Concatenate()([d, a])))
    model = keras.Model(image, conv(CLASSES, "head", d, 1))

    def loss(output, y):
        losses = keras.losses.sparse_categorical_crossentropy(y, output, from_logits=True)
        kept = ops.cast(ops.not_equal(y, IGNORED), "float32")
        if PLANT == "loss_reduction":
            return ops.sum(losses * kept)
        return ops.sum(losses * kept) / ops.sum(kept)

    return model, loss, keras.optimizers.SGD(0.05)


def batch(size=4, seed=0, framework="pytorch"):
    random = np.random.default_rng(seed)
    x = random.standard_normal((size, SIDE, SIDE, 2), dtype=np.float32)
    y = random.integers(0, CLASSES, (size, SIDE, SIDE))
    return (x.transpose(0, 3, 1, 2) if framework == "pytorch" else x), y


def copy_weights(pytorch_model, tensorflow_model):
    state = {name: value.detach().numpy() for name, value in pytorch_model.state_dict().items()}
    for layer in tensorflow_model.layers:
        if layer.weights:
            weight, bias = state[f"{layer.name}.weight"], state[f"{layer.name}.bias"]
            if weight.ndim == 4:  # the transposed one, too: its axes of channels are swapped twice
                weight = weight.transpose(2, 3, 1, 0)
            elif PLANT == "weight_layout" and layer.name == "gate":
                pass
            elif weight.ndim == 2:
                weight = weight.T
            layer.set_weights([weight, bias])
