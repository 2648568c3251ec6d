"""What is measured of one side: its steps without the profiler, and what a step consists of.

All times are seconds a step. The kinds of work are those of `shared.step_events`.
"""

from __future__ import annotations

from statistics import median

from msgspec import Struct, structs

from shared.step_events import (
    DELAYED,
    DISPATCH,
    FAULTS,
    INPUT,
    PYTHON,
    READING,
    RECOMPILATION,
    REST,
    WAITING,
)


class Piece(Struct, frozen=True, kw_only=True):
    """A part of a step: what one layer spends on one kind of work in one phase.

    layer: "" is what belongs to none. `calls`: operators a step. `names`: of those, the costliest
    first.
    """

    layer: str
    phase: str
    kind: str
    seconds: float
    calls: float = 0.0
    names: tuple[str, ...] = ()


class Product(Struct, frozen=True, kw_only=True):
    """Calls of products or convolutions of one shape: seconds and operations of a step.

    shape: (m, k, n) of a product (m, k) @ (k, n); of a convolution or of fused attention as the
    kits' `convolution_seconds` and `attention_seconds` have it; () where it is not known.
    ran_by: the library that did, as its verbose mode says; "" where it does not.
    """

    kind: str
    layer: str
    shape: tuple[int, ...]
    dtype: str
    calls: float
    seconds: float
    flops: float
    ran_by: str = ""


class Facts(Struct, frozen=True, kw_only=True):
    """What is known of the process in its steps without the profiler.

    threads: of its pool. cpu_s, system_s: CPU time a step, of all threads. delayed: seconds a step
    in which threads were ready and had no processor, summed over them. `faults`: minor page faults
    a step, each of `fault_s`. `graphs`: compiled or traced in a step. `compiling_s`: what steps
    with such took longer than others. `denormal`: the share of denormal numbers in weights.
    `flushed`: times a step took with denormals flushed to zero, over those without. `peaks`: the
    machine's best products, operations a second by dtype. `onednn`: whether they may be
    oneDNN's.
    """

    threads: int
    processors: int
    cpu_s: float = 0.0
    system_s: float = 0.0
    delayed: float = 0.0
    faults: float = 0.0
    fault_s: float = 0.0
    graphs: float = 0.0
    compiling_s: float = 0.0
    denormal: float = 0.0
    flushed: float | None = None
    peaks: dict[str, float] = {}
    onednn: bool = True


class Side(Struct, frozen=True, kw_only=True):
    """One of two programs. rounds: mean seconds a step of each, without the profiler.

    profiled: seconds a step with it. layers: the model's in their order, each with the lengths of
    its first weight. trains: whether a step has gradients. pieces sum to the profiled step; `parts`
    are scaled to what it is without the profiler.
    """

    name: str
    framework: str
    rounds: list[float]
    profiled: float
    pieces: list[Piece]
    facts: Facts
    products: list[Product] = []
    layers: dict[str, list[int]] = {}
    trains: bool = True

    @property
    def step(self) -> float:
        """Seconds a step, the median of the rounds."""
        return median(self.rounds)

    @property
    def profiler_cost(self) -> float:
        """What the profiler added to a step, as a share of it; it may drown in noise."""
        return self.profiled / self.step - 1

    @property
    def scale(self) -> float:
        """What a second of the profile stands for, without what is measured beside it."""
        beside = min(self.facts.compiling_s, self.step)
        whole = sum(piece.seconds for piece in self.pieces)
        return (self.step - beside) / whole if whole else 0.0

    def parts(self) -> list[Piece]:
        """The pieces scaled to the step without the profiler; they sum to it.

        What happens within operators is taken from these: seconds in which no thread had a
        processor, and page faults, from those that write memory.
        """
        if not self.pieces:
            return [Piece(layer="", phase="", kind=REST, seconds=self.step)]
        parts = [scaled(piece, self.scale) for piece in self.pieces]
        apart = {RECOMPILATION: min(self.facts.compiling_s, self.step)}
        slept = sum(one.seconds for one in parts if one.kind in (WAITING, INPUT))
        idle = self.step - apart[RECOMPILATION] - self.facts.cpu_s - slept
        parts, apart[DELAYED] = _without(parts, min(idle, self.facts.delayed), (WAITING, INPUT))
        parts, apart[WAITING] = _without(parts, idle - apart[DELAYED], (WAITING, INPUT))
        faults = min(self.facts.faults * self.facts.fault_s, self.facts.system_s)
        parts, apart[FAULTS] = _without(parts, faults, NO_MEMORY)
        more = (Piece(layer="", phase="", kind=k, seconds=s) for k, s in apart.items() if s > 0)
        return [*parts, *more]


NO_MEMORY = (DISPATCH, READING, WAITING, INPUT, PYTHON)


def _without(
    parts: list[Piece], seconds: float, spared: tuple[str, ...]
) -> tuple[list[Piece], float]:
    """The parts without so many seconds, which those that are not spared lose; what was taken."""
    whole = sum(one.seconds for one in parts if one.kind not in spared)
    seconds = min(max(0.0, seconds), whole)
    share = seconds / whole if whole else 0.0
    return [one if one.kind in spared else scaled(one, 1 - share) for one in parts], seconds


def scaled(piece: Piece, factor: float) -> Piece:
    """The piece with so many times the seconds."""
    return replaced(piece, seconds=piece.seconds * factor)


replaced = structs.replace
