"""MobileNetV3-Small of torchvision: depthwise convolutions, squeeze and excitation, dropout."""

import numpy as np

blocks = "features.*"


def pytorch():
    import torch.nn.functional as F
    from torchvision.models import mobilenet_v3_small

    return mobilenet_v3_small(num_classes=10), F.cross_entropy


def batch(size=16, seed=0):
    random = np.random.default_rng(seed)
    x = random.standard_normal((size, 3, 96, 96), dtype=np.float32)
    return x, random.integers(0, 10, size)
