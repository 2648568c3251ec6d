"""What augmentation refuses: settings out of range, what is no image, losses that are averaged."""

import math
from dataclasses import fields

from torch import Tensor

BORDERS = ("zero", "nearest", "reflect")


def check_augmentation(policy) -> None:
    """Raise ValueError for a setting of a policy that is out of its range."""
    most = dict.fromkeys(("flip_horizontal", "flip_vertical", "contrast", "saturation"), 1)
    for field in fields(policy):
        name, value = field.name, getattr(policy, field.name)
        if name == "border":
            check_border(value)
        elif not 0 <= value <= most.get(name, math.inf) or not math.isfinite(value):
            bound = f"between 0 and {most[name]}" if name in most else "0 or more"
            raise ValueError(f"{name} must be {bound}, not {value!r}")
    if policy.zoom >= 1:
        raise ValueError(f"zoom must be below 1, not {policy.zoom!r}")


def check_border(border: str) -> None:
    """Raise ValueError for a border that there is not."""
    if border not in BORDERS:
        raise ValueError(f"border must be one of {', '.join(BORDERS)}, not {border!r}")


def check_alpha(alpha: float) -> None:
    """Raise ValueError for a negative alpha, and one that is no finite number."""
    if not alpha >= 0 or not math.isfinite(alpha):
        raise ValueError(f"alpha must be 0 or more, not {alpha!r}")


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
