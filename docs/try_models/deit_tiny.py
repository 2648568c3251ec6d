"""DeiT-Tiny of timm at 96 px, trained as a classifier. Needs `pip install timm`."""

import numpy as np

blocks = "blocks.*"


def pytorch():
    import timm
    import torch.nn.functional as F

    model = timm.create_model("deit_tiny_patch16_224", img_size=96, num_classes=10)
    return model, F.cross_entropy


def batch(size=16, seed=0):
    random = np.random.default_rng(seed)
    return random.standard_normal((size, 3, 96, 96), dtype=np.float32), random.integers(0, 10, size)
