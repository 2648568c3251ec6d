"""The work on a batch of small images: standardised, and shifted by some pixels.

Twin: `tf_impl/kit/small_images.py`.
Where the frameworks differ: TensorFlow has an operator that standardises; here it is written out.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from shared.epochs import SHIFT


def standardise(x: Tensor) -> Tensor:
    """Return each image of (n, channels, height, width) less its mean, and over its deviation.

    As `tf.image.per_image_standardization` has it: the least deviation is 1 / sqrt(values), so that
    noise keeps it above zero.
    """
    values = x.flatten(1)
    values = values - values.mean(1, keepdim=True)
    # The root of the mean square: `std` along rows takes ten times as long.
    size = values.shape[1]
    deviation = values.norm(dim=1, keepdim=True) / size**0.5
    return (values / deviation.clamp(min=size**-0.5)).view_as(x)


def shift(x: Tensor, places: Tensor) -> Tensor:
    """Pad images by SHIFT pixels, and cut each to its size again at its place from `shifts`.

    places: int64 (n, 2), from top and left.
    """
    padded = F.pad(x, [SHIFT] * 4)
    windows = padded.unfold(2, x.shape[2], 1).unfold(3, x.shape[3], 1)  # all of them, as views
    return windows[torch.arange(len(x)), :, places[:, 0], places[:, 1]]
