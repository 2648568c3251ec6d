"""What is measured of one side: its steps without the profiler, and the parts of a step.

All times are seconds per step. The kinds of work are those of `shared.step_events`.
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

    layer: "" if none. `calls`: operators per step. `names`: of the costliest of those.
    """

    layer: str
    phase: str
    kind: str
    seconds: float
    calls: float = 0.0
    names: tuple[str, ...] = ()


class Product(Struct, frozen=True, kw_only=True):
    """Calls of matrix products or convolutions of one shape: seconds and operations per step.

    shape: (m, k, n) of a product (m, k) @ (k, n); of a convolution or fused attention as in the
    kits' `convolution_seconds` and `attention_seconds`; () if unknown. ran_by: the library by its
    verbose output; "" if unknown.
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

    threads: of its pool. cpu_s, system_s: CPU time per step, of all threads. delayed: seconds per
    step in which threads were ready but had no processor, summed over threads. `faults`: minor page
    faults per step, of `fault_s` each. `graphs`: compiled or traced per step. `compiling_s`: how
    much longer steps with these took. `denormal`: the share of denormal weights. `flushed`: time of
    a step with denormals flushed to zero over that without. `peaks`: the machine's fastest
    products, in operations per second by dtype. `onednn`: whether they may be oneDNN's.
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
    """One of two programs. rounds: mean seconds per step of each, without the profiler.

    profiled: seconds per step with it. layers: of the model in order, with the lengths of the first
    weight. trains: whether a step has gradients. pieces: they add up to the profiled step. `parts`
    are scaled to the step without the profiler.
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
        """Seconds per step, the median of the rounds."""
        return median(self.rounds)

    @property
    def profiler_cost(self) -> float:
        """What the profiler added to a step, as a share of it; it may be within noise."""
        return self.profiled / self.step - 1

    @property
    def scale(self) -> float:
        """The factor from profiled time to time without it, but for separate measurements."""
        beside = min(self.facts.compiling_s, self.step)
        whole = sum(piece.seconds for piece in self.pieces)
        return (self.step - beside) / whole if whole else 0.0

    def parts(self) -> list[Piece]:
        """The pieces scaled to the step without the profiler; they add up to it.

        Time without a processor and time of page faults is subtracted from the operators in which
        it occurs.
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
    """The piece with its seconds multiplied."""
    return replaced(piece, seconds=piece.seconds * factor)


replaced = structs.replace
