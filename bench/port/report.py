"""What `twinbench port` answers: the differences of two models, in the order in which they act.

`bench.port.compare.port(file, say=print)` takes what `shared.user_model.look(path)` gives and
returns a `Report`. Both frameworks are imported in this process, PyTorch first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
    change_pt, change_tf: the line to change on either side, one of both is enough. why: why the
    frameworks differ there. places: how many layers the change was needed in.
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
    why: str = ""
    places: int = 1


@dataclass(frozen=True)
class Match:
    """Weights that belong together: a layer of each side. equal: whether they held the same."""

    layer_pt: str
    layer_tf: str
    kind: str
    equal: bool
    how: str  # "values", "name" or "order"


@dataclass(frozen=True)
class Certificate:
    """Training steps that were equal: how many, the largest relative difference of a loss, of a
    weight tensor afterwards, and the bounds of both."""

    steps: int
    loss: float
    loss_bound: float
    weights: float
    weights_bound: float


@dataclass(frozen=True)
class Report:
    """findings: the first difference first; empty where nothing differs. matches: weights.

    equal: what was compared and equal, in words, in order. notes: what is no difference but worth
    knowing. certificate: None unless the training steps were compared and equal.
    """

    findings: tuple[Finding, ...]
    matches: tuple[Match, ...]
    equal: tuple[str, ...]
    notes: tuple[str, ...] = ()
    certificate: Certificate | None = None
    copied: bool = False  # whether the weights were copied by the match, not by the file
    seconds: dict[str, float] = field(default_factory=dict)
    code: str = ""  # of a copy_weights that does what the match says

    @property
    def first(self) -> Finding | None:
        """The first difference."""
        return self.findings[0] if self.findings else None
