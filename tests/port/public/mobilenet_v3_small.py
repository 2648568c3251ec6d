"""MobileNetV3-Small of torchvision and of keras.applications, at 64 px, with random weights."""

import numpy as np

SIDE, CLASSES = 64, 10


def pytorch():
    import torch
    from torchvision.models import mobilenet_v3_small

    torch.manual_seed(0)
    model = mobilenet_v3_small(num_classes=CLASSES)
    return model, torch.nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.01)


def tensorflow():
    import keras

    model = keras.applications.MobileNetV3Small(
        weights=None, input_shape=(SIDE, SIDE, 3), classes=CLASSES, classifier_activation=None
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, loss, keras.optimizers.SGD(0.01)


def batch(size=4, seed=0, framework="pytorch"):
    random = np.random.default_rng(seed)
    x = random.standard_normal((size, SIDE, SIDE, 3), dtype=np.float32)
    y = random.integers(0, CLASSES, size)
    return (x.transpose(0, 3, 1, 2) if framework == "pytorch" else x), y
