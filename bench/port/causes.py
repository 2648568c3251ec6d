"""Known differences of the two frameworks: each row of causes.toml is one cause.

`twinbench port` answers with its rows, and docs/differences.md shows all of them (`python -m
bench.docs.differences`). Nothing here imports a framework.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

TOLD = {
    "changed": "with this changed the difference is gone",
    "read": "read from the settings of both sides: the change was not made",
    "not looked for": "`twinbench port` does not look for it",
}


class Argument(Struct, frozen=True):
    """An argument of PyTorch calls whose value explains a difference.

    at: its position, by function. default: its value if it is not given. values: what it may be in
    TensorFlow, besides the values that the Keras layers have.
    """

    name: str
    at: dict[str, int]
    default: object = None
    values: tuple = (None,)


class Cause(Struct, frozen=True, forbid_unknown_fields=True):
    """What differs.

    pytorch, tensorflow: what they do. why: why they differ. in_pytorch, in_tensorflow: the line
    that makes this side do as the other, one of both is enough; `{a}` is PyTorch's value and `{b}`
    TensorFlow's, of which `example` has one. defaults: parameters and their defaults, as
    "torch.nn.LayerNorm(eps)=1e-5; ...". argument: the change of a call that shows the cause; the
    changes that are more are in `alternatives`. settings: the names of those of
    `optimizers.Settings` or `losses.Formula` that do. told: how the command tells it.
    """

    title: str
    pytorch: str
    tensorflow: str
    why: str
    in_pytorch: str
    in_tensorflow: str
    example: tuple[str, str] = ("", "")
    defaults: str = ""
    argument: Argument | None = None
    settings: tuple[str, ...] = ()
    told: Literal["changed", "read", "not looked for"] = "changed"

    def lines(self, a: str = "", b: str = "") -> tuple[str, str]:
        """The line to change on either side, with these values."""
        one, other = a or self.example[0], b or self.example[1]
        texts = (self.in_pytorch, self.in_tensorflow)
        return tuple(text.replace("{a}", one).replace("{b}", other) for text in texts)


_TABLE = Path(__file__).with_suffix(".toml").read_bytes()
GROUPS: dict[str, dict[str, Cause]] = msgspec.toml.decode(_TABLE, type=dict[str, dict[str, Cause]])
CATALOGUE = {key: cause for group in GROUPS.values() for key, cause in group.items()}
LOSSES, OPTIMIZERS = GROUPS["Losses"], GROUPS["Optimizers"]
