"""What `twinbench port` answers: the differences of two models, in the order in which they act."""

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

    step: a key of STEPS. layer_pt, layer_tf: the names of the layer (as `named_modules` and as
    `layer.name` have them; "" where a difference is of no layer). size: relative L2 distance (of
    a loss and a share: relative difference). bound: up to which size it would have counted as
    equal. before: what was equal before it, in words. cause: a key of `causes.CATALOGUE`, None
    where no cause was verified. verified: whether the difference went once the change was made.
    change_pt, change_tf: the line to change on either side, one of both is enough. places: how many
    layers the change was needed in.
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
    """Weights that belong together: a layer of each side. how: "values", "name" or "order"."""

    layer_pt: str
    layer_tf: str
    how: str


@dataclass(frozen=True)
class Certificate:
    """Training steps that were equal: how many, the largest relative difference of a loss, of a
    weight tensor afterwards, and the bounds of both."""

    steps: int
    loss: float
    loss_bound: float
    weights: float
    weights_bound: float


@dataclass
class Report:
    """findings: the first difference first; empty where nothing differs. matches: weights.

    equal: what was compared and equal, in words, in order. notes: what is no difference but worth
    knowing. certificate: None unless the training steps were compared and equal. copied: whether
    weights were copied by the match, not by the file. code: of a copy_weights that does so.
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
        """Whether a difference was found at one of these steps."""
        return any(finding.step in steps for finding in self.findings)


Say = Callable[[str], None]
