"""A one-stage detector's head on a small pyramid, in both frameworks: scores and boxes.

PLANT names the one thing in which they differ; "" means nothing.
"""

import numpy as np

PLANT = ""
SIDE, CHANNELS, ANCHORS, CLASSES = 16, 8, 2, 3
PLACES = (SIDE // 2) ** 2 * ANCHORS


def pytorch():
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stage1 = nn.Conv2d(3, CHANNELS, 3, 2, 1)
            self.stage2 = nn.Conv2d(CHANNELS, CHANNELS, 3, 2, 1)
            self.depthwise = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)
            self.lateral = nn.Conv2d(CHANNELS, CHANNELS, 1)
            self.up = nn.Upsample(scale_factor=2)
            self.smooth = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
            self.act = nn.SiLU()
            self.scores = nn.Conv2d(CHANNELS, ANCHORS * CLASSES, 3, padding=1)
            self.boxes = nn.Conv2d(CHANNELS, ANCHORS * 4, 3, padding=1)
            self.positive = nn.Softplus()

        def forward(self, x):
            fine = F.relu(self.stage1(x))
            coarse = F.relu(self.depthwise(F.relu(self.stage2(fine))))
            merged = self.lateral(fine) + self.up(coarse)
            x = self.act(self.smooth(merged))
            scores = self.scores(x).permute(0, 2, 3, 1).flatten(1).unflatten(1, (PLACES, CLASSES))
            boxes = self.boxes(x).permute(0, 2, 3, 1).flatten(1).unflatten(1, (PLACES, 4))
            return scores, self.positive(boxes)

    def loss(output, y):
        scores, boxes = output
        hit = y["classes"].float()
        of_scores = F.binary_cross_entropy_with_logits(scores, hit)
        return of_scores + F.smooth_l1_loss(boxes, y["boxes"])

    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    parameters = list(net.parameters())
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(parameters, 0.02))
    return net, loss, optimizer


def tensorflow():
    import keras
    from keras import layers, ops

    def conv(filters, name, x, **more):
        return layers.Conv2D(filters, 3, padding="same", name=name, **more)(x)

    def strided(name, x):
        if PLANT == "convolution_padding" and name == "stage2":
            return conv(CHANNELS, name, x, strides=2, activation="relu")
        x = layers.ZeroPadding2D(1)(x)
        return layers.Conv2D(CHANNELS, 3, strides=2, activation="relu", name=name)(x)

    image = keras.Input((SIDE, SIDE, 3))
    scaled = layers.Rescaling(0.5, 0.25, name="rescaling")(image)
    fine = strided("stage1", scaled if PLANT == "preprocessing" else image)
    coarse = strided("stage2", fine)
    coarse = layers.DepthwiseConv2D(3, padding="same", activation="relu", name="depthwise")(coarse)
    merged = layers.Conv2D(CHANNELS, 1, name="lateral")(fine)
    mode = "bilinear" if PLANT == "interpolation" else "nearest"
    top = layers.UpSampling2D(2, interpolation=mode, name="up")(coarse)
    if PLANT != "missing_residual":
        merged = layers.Add(name="merged")([merged, top])
    x = conv(CHANNELS, "smooth", merged)
    x = layers.Activation("relu" if PLANT == "activation" else "silu", name="act")(x)
    scores = conv(ANCHORS * CLASSES, "scores", x)
    if PLANT == "reshape_order":
        scores = layers.Permute((3, 1, 2))(scores)
    scores = layers.Reshape((PLACES, CLASSES), name="score_rows")(scores)
    boxes = layers.Reshape((PLACES, 4), name="box_rows")(conv(ANCHORS * 4, "boxes", x))
    boxes = layers.Activation("softplus", name="positive")(boxes)
    model = keras.Model(image, (scores, boxes))

    def loss(output, y):
        scores, boxes = output
        hit = ops.cast(y["classes"], "float32")
        logits = PLANT != "logits"
        of_scores = ops.mean(keras.losses.binary_crossentropy(hit, scores, from_logits=logits))
        apart = ops.abs(boxes - y["boxes"])
        of_boxes = ops.where(apart < 1, 0.5 * apart**2, apart - 0.5)
        total = ops.sum(of_boxes) if PLANT == "loss_reduction" else ops.mean(of_boxes)
        return of_scores + total

    clipping = {"clipnorm": 0.02} if PLANT == "gradient_clipping" else {"clipvalue": 0.02}
    optimizer = keras.optimizers.SGD(
        0.1 if PLANT == "learning_rate" else 0.05,
        momentum=0.9,
        nesterov=PLANT != "nesterov",
        **clipping,
    )
    return model, loss, optimizer


def batch(size=4, seed=0, framework="pytorch"):
    random = np.random.default_rng(seed)
    x = random.standard_normal((size, SIDE, SIDE, 3), dtype=np.float32)
    classes = random.integers(0, 2, (size, PLACES, CLASSES)).astype(np.float32)
    boxes = random.random((size, PLACES, 4), dtype=np.float32) * 3
    y = {"classes": classes, "boxes": boxes}
    return (x.transpose(0, 3, 1, 2) if framework == "pytorch" else x), y


def copy_weights(pytorch_model, tensorflow_model):
    state = {name: value.detach().numpy() for name, value in pytorch_model.state_dict().items()}
    for layer in tensorflow_model.layers:
        if not layer.weights or (PLANT == "initial_values" and layer.name == "boxes"):
            continue
        axes = (2, 3, 0, 1) if layer.name == "depthwise" else (2, 3, 1, 0)
        if PLANT == "weight_layout" and layer.name == "lateral":
            axes = (2, 3, 0, 1)
        kernel = state[f"{layer.name}.weight"].transpose(axes)
        layer.set_weights([kernel, state[f"{layer.name}.bias"]])
