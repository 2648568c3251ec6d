"""What augmentation refuses: what is no image, losses that are averaged."""

import tensorflow as tf


def check_images(x, saturated: bool) -> None:
    """Raise ValueError for an x that is not float and NHWC, and saturation of other than RGB."""
    if not x.dtype.is_floating or x.shape.rank != 4:
        raise ValueError(f"x must be float and NHWC, not {x.dtype.name} of shape {x.shape}")
    if saturated and x.shape[3] != 3:
        raise ValueError(f"saturation needs three channels: x has {x.shape[3]}")


def check_nhwc(x: tf.Tensor) -> None:
    """Raise ValueError for an x of another rank."""
    if x.shape.rank != 4:
        raise ValueError(f"x must be NHWC, not of shape {x.shape}")


def check_float(x: tf.Tensor) -> None:
    """Raise ValueError for a dtype that has no shares."""
    if not x.dtype.is_floating:
        raise ValueError(f"x must be float to be blended, not {x.dtype.name}")


def check_dataset(dataset: tf.data.Dataset, policy) -> None:
    """Raise ValueError for what is no images with labels, and for weights of mixed samples."""
    element = dataset.element_spec
    if not isinstance(element, tuple) or len(element) not in (2, 3):
        raise ValueError(f"elements must be (x, y) or (x, y, sample_weight), not {element}")
    if not isinstance(element[0], tf.TensorSpec):
        raise ValueError(f"x must be one tensor of images, not {element[0]}")
    check_images(element[0], policy.saturation > 0)
    if len(element) == 3 and (policy.mixup or policy.cutmix):
        raise ValueError("a sample that is mixed of two has no weight: leave them out")


def check_sample_losses(losses: tf.Tensor) -> None:
    """Raise ValueError for a loss that has averaged already."""
    if losses.shape.rank == 0:
        raise ValueError(
            "the loss gives one value for all samples: it must give one value a sample, as with "
            "reduction='none'"
        )
