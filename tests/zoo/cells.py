"""A cell of the matrix: one technique applied to one model, and what came of it.

A cell tries the variants of a technique one after another. Each of them works, is refused (by a
error with its reason that the project itself raises, before the model has changed),
is wrong, or ends in somebody's traceback. The first variant speaks for the cell, unless another one
is wrong or ends in a traceback.
"""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
WORKS, REFUSED, WRONG, TRACEBACK = "works", "refused", "WRONG", "TRACEBACK"
_OURS = tuple(str(ROOT / folder) + "/" for folder in ("pt_impl", "tf_impl", "shared"))

# The techniques that take a model, by family. Input pipelines take none. Domain adaptation takes
# features and heads apart, as models of the zoo are not made.
FAMILIES = {
    "train_step": (
        "baseline",
        "mixed_precision",
        "loss_scaling",
        "compilation",
        "gradient_accumulation",
        "accumulated_statistics",
        "gradient_clipping",
        "finite_guard",
        "activation_checkpointing",
        "memory_format",
        "optimizer_implementations",
        "batch_size_finder",
        "stacking",
        "varying_lengths",
        "keras_backend",
        "onednn",
    ),
    "adaptation": ("fine_tuning",),
    "parallel": ("data_parallel", "model_parallel", "tensor_parallel"),
    "compression": (
        "pruning",
        "semi_structured_pruning",
        "structured_pruning",
        "sparse_inference",
        "distillation",
        "feature_distillation",
        "post_training_quantization",
        "accuracy_aware_quantization",
        "quantization_aware_training",
        "weight_quantization",
        "combinations",
    ),
    "deployment": (
        "reduced_precision",
        "export",
        "native_export",
        "frozen_inference",
        "serving_threads",
    ),
}
TECHNIQUES = {name: family for family, names in FAMILIES.items() for name in names}


class Wrong(Exception):
    """What a technique gave is not what plain framework code gives."""


class Coarse(Wrong):
    """As float32 has it, in which this model's plain code, too, is far from the same in float64."""


def module_of(framework: str, technique: str):
    """The technique's file in `framework`, "pt" or "tf"."""
    return importlib.import_module(f"{framework}_impl.{TECHNIQUES[technique]}.{technique}")


def apart(found, wanted) -> float:
    """The relative L2 distance between arrays, or lists of arrays taken as one vector."""
    pairs = list(zip(_listed(found), _listed(wanted), strict=True))
    for one, other in pairs:
        if np.shape(one) != np.shape(other):
            raise Wrong(f"a shape of {np.shape(one)}, not {np.shape(other)}")
    squares = [float(np.sum(np.square(np.float64(f) - np.float64(w)))) for f, w in pairs]
    norm = sum(float(np.sum(np.square(np.float64(w)))) for _, w in pairs)
    distance = (sum(squares) / norm) ** 0.5 if norm else sum(squares) ** 0.5
    return distance if distance == distance else float("inf")


def _listed(arrays) -> list:
    return list(arrays) if isinstance(arrays, list | tuple) else [arrays]


MOST_OFF = 0.05  # of updates, relative, whatever the model


@dataclass(frozen=True)
class Rounding:
    """How far plain code in float32 is from the same in float64, and what that allows a technique.

    Other kernels add in another order, each about as far from float64 as the plain ones: ten times
    the distance, or ten units in the last place (1e-6) where that is more. Updates are differences
    of weights, which have lost the digits that the weights share: ten times more.
    """

    outputs: float
    losses: float
    updates: float

    @property
    def of_outputs(self) -> float:
        """The bound of outputs, relative."""
        return max(1e-6, 10 * self.outputs)

    @property
    def of_files(self) -> float:
        """The bound of outputs in another runtime, whose exp, tanh and erf are its own.

        1e-5 is what the two frameworks are held to with each other.
        """
        return max(1e-5, 10 * self.outputs)

    @property
    def of_losses(self) -> float:
        """The bound of losses, relative."""
        return max(1e-6, 10 * self.losses)

    @property
    def of_updates(self) -> float:
        """The bound of updates, relative: a twentieth, for weights that amplify rounding more."""
        return min(MOST_OFF, max(1e-5, 10 * self.updates))

    @property
    def is_coarse(self) -> bool:
        """Whether weights amplify rounding so far that float32 can't tell a step from another."""
        return 10 * self.updates > MOST_OFF


# A quantizer rounds in more places than plain rounding of what layers give (sums, products), and a
# grid that a histogram chose, or an even power, may be coarser than one from end to end.
COARSER = 3


class Cell:
    """The variants of one cell, as they are tried."""

    def __init__(self):
        self.variants: dict[str, dict] = {}
        self.worst: dict[str, float] = {}

    def near(self, what: str, found, wanted, bound: float, wrong: type[Wrong] = Wrong) -> None:
        """`wrong` unless `found` is within a relative `bound` of `wanted`."""
        distance = apart(found, wanted)
        self.worst[what] = max(distance, self.worst.get(what, 0.0))
        if not distance <= bound:
            raise wrong(f"{what}: {distance:.2g} from plain code, more than {bound:g}")

    def holds(self, what: str, true) -> None:
        """Wrong unless it is true."""
        if not true:
            raise Wrong(what)

    def attempt(
        self, name: str, variant: Callable, unchanged: Callable, exactly: Callable | None = None
    ) -> None:
        """Try a variant; `unchanged()` says whether a refusal left the model as it was.

        `exactly` is the same in float64, which decides where float32 is too coarse.
        """
        self.worst, found = {}, {"status": WORKS}
        try:
            try:
                variant()
            except Coarse:
                if exactly is None:
                    raise
                self.worst, found["in"] = {}, "float64"
                exactly()
            if self.worst:
                found["apart"] = float(f"{max(self.worst.values()):.2g}")
        except Wrong as error:
            found = {"status": WRONG, "reason": str(error)}
        except (ValueError, RuntimeError) as error:
            kind = REFUSED if _is_ours(error) else TRACEBACK
            found = {"status": kind, "reason": _line(error, kind)}
            if kind == REFUSED and not unchanged():
                found = {"status": WRONG, "reason": f"refused after a change: {found['reason']}"}
        except Exception as error:
            found = {"status": TRACEBACK, "reason": _line(error, TRACEBACK)}
        self.variants[name] = found

    def result(self) -> dict:
        """Status and reason of the cell, and those of its variants."""
        first = next(iter(self.variants.values()))
        for status in (TRACEBACK, WRONG):
            bad = [f"{n}: {v['reason']}" for n, v in self.variants.items() if v["status"] == status]
            if bad:
                return {"status": status, "reason": bad[0], "variants": self.variants}
        found = {"status": first["status"]}
        if first["status"] == REFUSED:
            found["reason"] = first["reason"]
        return found | {"variants": self.variants}


def _is_ours(error: Exception) -> bool:
    """Whether the project's own code raised it, directly or in what TensorFlow traced."""
    quoted = re.findall(r'File "([^"]+)"', str(error))
    if str(error).startswith("in user code") and quoted:
        return quoted[-1].startswith(_OURS)
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_OURS)


def _line(error: Exception, kind: str) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if str(error).startswith("in user code") else " ".join(lines)
    # Without colours, lines of code, and folders of this machine.
    text = re.sub(r"\x1b\[\d*m|\S*/\S+\.py:[\d:]*|(?<!\S)/\S+/", " ", text)
    text = " ".join(text.split())[:400]
    if kind == REFUSED:
        return text
    ours = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(_OURS)]
    place = f" at {Path(ours[-1].filename).relative_to(ROOT)}, {ours[-1].name}" if ours else ""
    return f"{type(error).__name__}{place}: {text}"
