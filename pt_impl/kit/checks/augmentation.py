"""What augmentation refuses: what is no image, losses that are averaged."""

from torch import Tensor


def check_images(x: Tensor, saturated: bool) -> None:
    """Raise ValueError for an x that is not float and NCHW, and saturation of other than RGB."""
    if not x.is_floating_point() or x.ndim != 4:
        raise ValueError(f"x must be float and NCHW, not {x.dtype} of shape {tuple(x.shape)}")
    if saturated and x.shape[1] != 3:
        raise ValueError(f"saturation needs three channels: x has {x.shape[1]}")


def check_nchw(x: Tensor) -> None:
    """Raise ValueError for an x of another rank."""
    if x.ndim != 4:
        raise ValueError(f"x must be NCHW, not of shape {tuple(x.shape)}")


def check_float(x: Tensor) -> None:
    """Raise ValueError for a dtype that has no shares."""
    if not x.is_floating_point():
        raise ValueError(f"x must be float to be blended, not {x.dtype}")


def check_labels(y) -> None:
    """Raise ValueError for labels of a dataset that are no tensor."""
    if not isinstance(y, Tensor):
        raise ValueError(f"labels must be numbers or tensors, not {type(y).__name__}")


def check_sample_losses(losses: Tensor, batch: int) -> None:
    """Raise ValueError for a loss that has averaged already."""
    if losses.ndim == 0 or len(losses) != batch:
        raise ValueError(
            f"the loss gives a shape of {tuple(losses.shape)} for {batch} samples: it must give "
            "one value a sample, as with reduction='none'"
        )
