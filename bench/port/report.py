"""The answer of `twinbench port`: the differences of two models, in the order in which they act."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from bench.port.causes import CATALOGUE

# In the order in which they are looked at; a difference in one is a consequence in later ones.
STEPS = {
    "input": "the batch",
    "weights": "the weights after copy_weights",
    "evaluation": "outputs in evaluation mode",
    "training": "outputs in training mode, dropout off",
    "dropout": "what dropout does",
    "statistics": "running statistics after one training step",
    "loss": "the loss",
    "gradients": "gradients",
    "update": "one update by the optimizer",
    "steps": "several training steps",
}


@dataclass(frozen=True)
class Finding:
    """One difference.

    step: a key of STEPS. layer_pt, layer_tf: the names of the layer (by `named_modules` and
    `layer.name`; "" if it concerns no layer). size: relative L2 distance (for a loss or a share:
    relative difference). bound: the largest size that counts as equal. before: what was equal
    before it, in words. cause: a key of `causes.CATALOGUE`, None if no cause was verified.
    verified: whether the change removed the difference. change_pt, change_tf: the line to change on
    either side; one is enough. places: how many layers needed the change.
    """

    step: str
    layer_pt: str
    layer_tf: str
    size: float
    bound: float
    before: str
    cause: str | None = None
    verified: bool = False
    change_pt: str = ""
    change_tf: str = ""
    places: int = 1


@dataclass(frozen=True)
class Match:
    """Weights that correspond: a layer of each side. how: "values", "name" or "order"."""

    layer_pt: str
    layer_tf: str
    how: str


@dataclass(frozen=True)
class Certificate:
    """Training steps that were equal.

    Their number, the largest relative differences of a loss and of a weight tensor afterwards, and
    the bounds of both.
    """

    steps: int
    loss: float
    loss_bound: float
    weights: float
    weights_bound: float


@dataclass
class Report:
    """findings: the first difference first; empty if nothing differs. matches: weights.

    equal: what was compared and equal, in words, in order. notes: worth knowing, but no difference.
    certificate: None unless training steps were compared and equal. copied: whether the match
    copied the weights, not the file. code: a copy_weights that does the same.
    """

    findings: list[Finding] = field(default_factory=list)
    matches: tuple[Match, ...] = ()
    equal: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    certificate: Certificate | None = None
    copied: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    code: str = ""
    speed: str = ""  # of both, in words, where it was asked for

    def add(
        self, step: str, layers: tuple[str, str], size: float, bound: float, before: str,
        key: str | None = None, values: tuple[str, str] = ("", ""), places: int = 1,
    ) -> None:  # fmt: skip
        """Add a difference, or more places to one of the same step, cause and change."""
        cause = CATALOGUE[key] if key else None
        words = (key, cause.told == "changed", *cause.lines(*values)) if cause else ()
        finding = Finding(step, *layers, size, bound, before, *words, places=places)
        alike = (key, step, finding.change_pt)
        for place, other in enumerate(self.findings):
            if (other.cause, other.step, other.change_pt) == alike:
                self.findings[place] = replace(other, places=other.places + places)
                return
        self.findings.append(finding)

    def has(self, *steps: str) -> bool:
        """Whether one of these steps has a difference."""
        return any(finding.step in steps for finding in self.findings)


Say = Callable[[str], None]
