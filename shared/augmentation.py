"""How much images may be changed: the settings of augmentation, the same for both frameworks."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

BORDERS = ("zero", "nearest", "reflect")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How much images may be changed; as it stands, not at all.

    flip_horizontal, flip_vertical: probabilities. rotation: the most degrees to either side.
    zoom: 0.2 draws factors of 0.8 to 1.2. shift: the most to either side, in shares of the height
    and the width. brightness: the most that is added or taken, in the images' own unit. contrast,
    saturation: 0.2 draws factors of 0.8 to 1.2; saturation needs three channels.
    border: what stands beyond the image: "zero", "nearest" (its last pixel) or "reflect" (d c b a |
    a b c d | d c b a). mixup, cutmix: alpha, 0 for none; with both, each batch draws one of them.
    Values are not clipped.

    Raises ValueError for a setting that is out of its range.
    """

    flip_horizontal: float = 0.0
    flip_vertical: float = 0.0
    rotation: float = 0.0
    zoom: float = 0.0
    shift: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    border: str = "zero"

    def __post_init__(self) -> None:
        most = dict.fromkeys(("flip_horizontal", "flip_vertical", "contrast", "saturation"), 1)
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name == "border":
                check_border(value)
            elif not 0 <= value <= most.get(name, math.inf) or not math.isfinite(value):
                bound = f"between 0 and {most[name]}" if name in most else "0 or more"
                raise ValueError(f"{name} must be {bound}, not {value!r}")
        if self.zoom >= 1:
            raise ValueError(f"zoom must be below 1, not {self.zoom!r}")


def check_border(border: str) -> None:
    """Raise ValueError for a border that there is not."""
    if border not in BORDERS:
        raise ValueError(f"border must be one of {', '.join(BORDERS)}, not {border!r}")


def check_alpha(alpha: float) -> None:
    """Raise ValueError for a negative alpha, and one that is no finite number."""
    if not alpha >= 0 or not math.isfinite(alpha):
        raise ValueError(f"alpha must be 0 or more, not {alpha!r}")
